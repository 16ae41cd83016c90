"""Changes that papers' setups are made of: sizes, vocabularies, and how they train."""

from experiments.study.changes import Changes, times
from experiments.study.presets import HEADS
from lm.config.layers import GatedActivation

# Word pieces, sentinels (of which encoders use two) and special tokens together have the paper's number.
SENTINELS, SPECIAL = 100, 4

# Those of GLUE that a head can answer here, and SQuAD.
GLUE_HEADS = ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "squad")
RACE_HEADS = ("race-middle", "race-high")
WIKIPEDIA_AND_BOOKS = "tfds:wikipedia/20190301.en + text:books"

# With learned positions, which the papers' encoders have, a small encoder stays on the unigram plateau for
# hundreds or thousands of updates. With rotary ones it leaves it within 600 (docs/choices.md). So rows have
# rotary positions at the small scales, and learned ones at the paper's size.
ROTARY: Changes = {"model.positions.kind": "rotary"}
LEARNED: Changes = {"model.positions.kind": "learned"}

# Rows that are compared by their loss on held-out text alone.
NOT_TUNED: Changes = {"tuning.mixtures": ()}


def gated(activation: GatedActivation) -> Changes:
    """Return the change to a gated feed-forward layer: three matrices, 2/3 as wide, as many parameters."""
    return {"model.mlp.activation": activation, "model.mlp.d_ff": times(2 / 3, 2)}


def size(layers: int, d_model: int, num_heads: int, d_ff: int = 0, d_kv: int = 0) -> Changes:
    """Return the size of a model whose stacks have so many layers; d_ff is 4 d_model, heads share d_model."""
    return {
        "model.num_encoder_layers": layers,
        "model.num_decoder_layers": layers,
        "model.d_model": d_model,
        "model.attention.num_heads": num_heads,
        "model.attention.d_kv": d_kv or d_model // num_heads,
        "model.mlp.d_ff": d_ff or 4 * d_model,
    }


def vocabulary(kind: str, tokens: int) -> Changes:
    """Return a vocabulary of so many tokens, trained on the corpus: unigram, bpe or wordpiece."""
    return {
        "data.vocabulary": kind,
        "data.vocabulary_size": tokens - SENTINELS - SPECIAL,
        "data.sentinels": SENTINELS,
        "model.vocab_size": tokens,
    }


def pretraining(steps: int, batch_size: int, length: int) -> Changes:
    """Return the number of updates, of rows per update [sequences] and of tokens per row."""
    return {
        "pretraining.steps": steps,
        "pretraining.batch_size": batch_size,
        "data.inputs_length": length,
    }


def adamw(
    steps: int,
    learning_rate: float,
    warmup_steps: int,
    *,
    beta2: float = 0.999,
    epsilon: float = 1e-6,
    weight_decay: float = 0.01,
    clip_norm: float | None = 1.0,
) -> Changes:
    """Return AdamW for pre-training, with a rate that rises linearly and falls linearly to 0 at ``steps``."""
    return {
        "pretraining.optimizer.name": "adamw",
        "pretraining.optimizer.schedule": "linear",
        "pretraining.optimizer.learning_rate": learning_rate,
        "pretraining.optimizer.warmup_steps": warmup_steps,
        "pretraining.optimizer.decay_end": steps,
        "pretraining.optimizer.beta1": 0.9,
        "pretraining.optimizer.beta2": beta2,
        "pretraining.optimizer.epsilon": epsilon,
        "pretraining.optimizer.weight_decay": weight_decay,
        "pretraining.optimizer.clip_norm": clip_norm,
    }


def tuned_by_heads(
    learning_rate: float,
    batch_size: int,
    length: int,
    steps: int = 10_000,
    heads: tuple[str, ...] = GLUE_HEADS,
    *,
    warmup: float = 0.1,
    beta2: float = 0.999,
    epsilon: float = 1e-6,
    weight_decay: float = 0.01,
    clip_norm: float | None = 1.0,
) -> Changes:
    """Return fine-tuning of an encoder on labelled tasks, by default GLUE and SQuAD, a head for each.

    The rate rises linearly in a share of the steps, ``warmup``, and then falls linearly to 0. The defaults of
    it and of AdamW are those of BERT's code (Devlin et al. 2019), which ALBERT's and ELECTRA's have too.
    """
    return HEADS | {
        "tuning.heads": heads,
        "tuning.inputs_length": length,
        "finetuning.steps": steps,
        "finetuning.batch_size": batch_size,
        "finetuning.optimizer.learning_rate": learning_rate,
        "finetuning.optimizer.schedule": "linear",
        "finetuning.optimizer.warmup_steps": round(warmup * steps),
        "finetuning.optimizer.decay_end": 0,  # the last step
        "finetuning.optimizer.beta2": beta2,
        "finetuning.optimizer.epsilon": epsilon,
        "finetuning.optimizer.weight_decay": weight_decay,
        "finetuning.optimizer.clip_norm": clip_norm,
    }

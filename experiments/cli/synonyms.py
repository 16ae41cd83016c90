"""Holds what other programs call our settings, for hints behind the error about an unknown option."""

from collections.abc import Iterator, Sequence
from contextlib import suppress

from experiments.study.experiment import Experiment
from experiments.study.registry import build, find
from experiments.study.scales import DEFAULT_SCALE
from lm.config.base import SettingError, unused_settings

SYNONYMS = {  # a setting or option -> its names elsewhere
    "pretraining.optimizer.learning_rate finetuning.optimizer.learning_rate": (
        "lr learning-rate base-lr peak-lr max-lr"
    ),
    "pretraining.optimizer.schedule finetuning.optimizer.schedule": (
        "lr-schedule lr-scheduler lr-scheduler-type decay lr-decay"
    ),
    "pretraining.optimizer.warmup_steps finetuning.optimizer.warmup_steps": (
        "warmup warmup-ratio num-warmup-steps"
    ),
    "pretraining.optimizer.name finetuning.optimizer.name": "optim optimizer",
    "pretraining.optimizer.weight_decay finetuning.optimizer.weight_decay": "wd",
    "pretraining.optimizer.beta1 finetuning.optimizer.beta1": "adam-beta1 betas b1",
    "pretraining.optimizer.beta2 finetuning.optimizer.beta2": "adam-beta2 b2",
    "pretraining.optimizer.epsilon finetuning.optimizer.epsilon": "eps adam-epsilon adam-eps",
    "pretraining.optimizer.clip_norm finetuning.optimizer.clip_norm": (
        "clip grad-clip clip-grad grad-norm max-grad-norm gradient-clipping clip-grad-norm gradient-clip-val"
    ),
    "pretraining.loss.label_smoothing finetuning.loss.label_smoothing": (
        "label-smoothing label-smoothing-factor smoothing"
    ),
    "pretraining.loss.z_loss finetuning.loss.z_loss": "z-loss z-loss-weight",
    "pretraining.loss.name finetuning.loss.name": "criterion loss-fn loss-function token-loss",
    "pretraining.steps finetuning.steps": (
        "steps max-steps num-steps total-steps train-steps num-train-steps iterations max-iters"
    ),
    "pretraining.steps finetuning.steps data.repeats": "epochs num-epochs num-train-epochs max-epochs",
    "pretraining.batch_size finetuning.batch_size": (
        "batch batch-size train-batch-size global-batch-size per-device-train-batch-size device-batch-size"
    ),
    "pretraining.microbatches finetuning.microbatches": (
        "grad-accum gradient-accumulation gradient-accumulation-steps accumulate-grad-batches "
        "micro-batch-size"
    ),
    "pretraining.evaluate_every": "eval-every eval-interval eval-steps eval-freq val-check-interval",
    "pretraining.save_every finetuning.save_every": "save-steps save-interval checkpoint-every ckpt-every",
    "pretraining.log_every finetuning.log_every": "log-interval logging-steps log-steps log-freq",
    "model.num_encoder_layers model.num_decoder_layers": (
        "layers num-layers n-layer n-layers num-hidden-layers num-blocks n-blocks depth"
    ),
    "model.num_encoder_layers": "encoder-layers num-encoder-blocks",
    "model.num_decoder_layers": "decoder-layers num-decoder-blocks",
    "model.attention.num_heads tuning.heads": "heads",
    "model.attention.num_heads": "num-heads n-head n-heads num-attention-heads attention-heads nhead",
    "model.attention.num_key_value_heads": "kv-heads num-kv-heads n-kv-heads n-kv-head num-query-groups",
    "model.attention.d_kv": "d-head head-dim d-k head-size dim-head kv-channels",
    "model.d_model": "hidden-size hidden-dim width dim n-embd emb-dim embed-dim embedding-dim dmodel",
    "model.mlp.d_ff": (
        "ffn ff d-ffn d-hidden d-inner n-inner ffn-dim mlp-dim mlp-width intermediate-size "
        "ffn-hidden-size feed-forward-dim dim-feedforward"
    ),
    "model.mlp.activation": (
        "activation activation-function act act-fn hidden-act nonlinearity feed-forward "
        "feed-forward-proj gelu swiglu geglu"
    ),
    "model.dropout": (
        "dropout dropout-rate dropout-p attention-dropout attn-dropout attn-pdrop resid-pdrop hidden-dropout "
        "hidden-dropout-prob attention-probs-dropout-prob"
    ),
    "model.positions.kind": (
        "position-encoding positional-encoding position-embedding-type pos-emb pos-encoding rope rotary "
        "alibi relative-positions"
    ),
    "model.positions.rotary.base": "rope-theta rope-base rotary-base",
    "model.positions.max_length": "max-len max-position-embeddings n-positions n-ctx",
    "model.norm.kind": "layernorm layer-norm rmsnorm rms-norm norm-type normalization",
    "model.residual": "pre-norm prenorm post-norm postnorm norm-first",
    "model.norm.epsilon": "norm-eps layer-norm-eps layer-norm-epsilon rms-norm-eps",
    "model.output.logits": "tie-embeddings tie-word-embeddings tied tied-embeddings weight-tying",
    "model.bias": "use-bias",
    "model.sparsity.window": "sliding-window attention-window local-window",
    "model.attention.implementation": (
        "flash flash-attention attn-implementation attention-implementation attn-impl"
    ),
    "model.dtype": "precision mixed-precision bf16 fp16 bfloat16 amp",
    "model.compile.remat": (
        "gradient-checkpointing activation-checkpointing grad-checkpointing recompute remat-policy"
    ),
    "model.compile.loss_chunks": "chunked-cross-entropy chunked-loss fused-linear-cross-entropy loss-chunk",
    "model.compile.offloaded": "activation-offloading offload-activations cpu-offload",
    "model.architecture": "arch model-type",
    "model.lora.rank tuning.lora.rank": "lora lora-rank lora-r",
    "data.inputs_length tuning.inputs_length": (
        "seq-len seq-length sequence-length sequence-len max-seq-length max-seq-len block-size context "
        "context-length context-size input-length"
    ),
    "data.corpus": "dataset data train-data train-file data-path corpus-path",
    "data.vocabulary": "tokenizer vocab vocabulary-file",
    "data.vocabulary_size model.vocab_size": "vocab-size n-vocab",
    "objective.rate": "mask-rate mask-prob mlm-probability corruption-rate noise-density masking-rate",
    "objective.mean_span_length": "span-length mean-noise-span-length",
    "tuning.mixtures tuning.heads": "task tasks mixture",
    "mesh.tensor": "tp tensor-parallel tensor-parallel-size model-parallel",
    "mesh.data": "dp data-parallel",
    "seed": "random-seed seeds",
    "seeds": "num-seeds",
    "runs": "output-dir out-dir output outdir dir save-dir workdir logdir log-dir",
    "run": "checkpoint model-path",
    "wandb": "wandb-project project",
    "beams": "num-beams beam-size",
    "max_length": "max-new-tokens max-tokens",
    "temperature": "do-sample",
    "prompt": "prompts",
}
RESUME = ("resume", "continue", "resume-from-checkpoint", "restore")
_NAMED = {word: names.split() for names, words in SYNONYMS.items() for word in words.split()}
CHANGE_THE_MODEL = ("--start", "--model.architecture")  # options after which a row reads other settings


def hints(words: Sequence[str], takes_settings: bool, rows: Sequence[Experiment] = ()) -> Iterator[str]:
    """Yield a line for each option that another program has, naming ours.

    ``takes_settings``: whether the command takes settings; to others only options are named.
    ``rows``: what the command trains; settings that none of them reads are not named if others are.
    """
    for word in words:
        if not word.startswith("-"):
            continue
        name = word.partition("=")[0].lstrip("-").replace("_", "-")
        group, _, last = name.rpartition(".")
        if name in RESUME:
            yield f"--{name}: the same command resumes where it stopped"
        ours = _NAMED.get(name) or _NAMED.get(last, [])
        ours = [each for each in ours if each.startswith(f"{group}.")] or ours
        ours = [each for each in ours if takes_settings or "." not in each]
        ours = [each for each in ours if _is_read(each, rows)] or ours
        if ours and name.replace("-", "_") not in ours:
            yield f"--{name}: did you mean {' or '.join(map(option, ours[:3]))}?"


def rows_among(words: Sequence[str]) -> list[Experiment]:
    """Return the rows that a command line's words match; none if an option changes their model."""
    found: list[Experiment] = []
    if any(word.partition("=")[0] in CHANGE_THE_MODEL for word in words):
        return found
    for word in words:
        with suppress(SettingError):  # an option or its value
            found += [build(row.name, DEFAULT_SCALE) for row in find(word) if not row.needs]
    return found


def _is_read(path: str, rows: Sequence[Experiment]) -> bool:
    return not rows or any(not unused_settings(row, [path]) for row in rows)


def option(path: str) -> str:
    """Return a setting's path as an option."""
    return f"--{path.replace('_', '-')}"

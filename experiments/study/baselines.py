"""Language models and taggers before the Transformer, in order of discovery, on equal text and of equal size.

Networks have as many parameters as the Transformer of their scale, within 2 %: their widths follow from its
settings. Their blocks have only a mixer: the feed-forward layer has width 1, so it is switched off. Count
models have as many parameters as their text has different n-grams, or pairs of word and tag.
"""

from dataclasses import dataclass

from experiments.study.changes import Changes, objective, times, without
from experiments.study.experiment import Experiment
from experiments.study.presets import ADAMW, family
from experiments.study.table import Axis, make_table

WINDOW_CONTEXT = 4  # that the network of Bengio et al. (2003) reads to predict the next one [tokens]
STATE_MATRICES = {"rnn": 1, "gru": 3, "lstm": 4}  # matrices of a recurrent layer


@dataclass(frozen=True)
class EqualSize:
    """Computes ``model.mixer.width``: that of ``layers`` of a mixer as large as all blocks of a model."""

    mixer: str
    layers: int
    bidirectional: bool = False
    window: int = WINDOW_CONTEXT  # tokens that a window mixer reads
    d_ff_factor: float = 1.0  # multiple of model.mlp.d_ff that the Transformer to be matched has

    def __call__(self, _old: int | None, experiment: Experiment) -> int:
        """Return the even width whose number of parameters is nearest."""
        model = experiment.model
        d_model, d_ff = model.d_model, times(self.d_ff_factor).compute(model.mlp.d_ff)
        inner_dim = model.attention.num_heads * model.attention.d_kv
        num_blocks = model.num_encoder_layers if self.bidirectional else model.num_decoder_layers
        attention = 4 * d_model * inner_dim + 3 * inner_dim  # four matrices; biases of queries, keys, values
        feed_forward = 2 * d_model * d_ff + d_ff  # two matrices and the inner bias
        norms_and_output_biases = 6 * d_model  # two layer norms, each with scale and bias; two output biases
        block = attention + feed_forward + norms_and_output_biases
        target = num_blocks * block / self.layers
        widths = range(2, 16 * d_model, 2)
        return min(widths, key=lambda width: abs(self.layer_parameters(width, d_model) - target))

    def layer_parameters(self, width: int, d_model: int) -> int:
        """Count the mixer, its projection, two norms and a feed-forward layer of width 1."""
        if self.mixer == "window":
            mixer = width * (self.window * d_model + 1)
        else:
            mixer = STATE_MATRICES[self.mixer] * width * (width + d_model + 1)
        if self.mixer == "gru":
            mixer += width  # a second bias of the candidate state
        directions = 2 if self.bidirectional else 1
        # two layer norms, the bias of the projection, a feed-forward layer of width 1
        rest = 8 * d_model + 1
        return directions * (mixer + width * d_model) + rest

    def __str__(self) -> str:
        layers = "1 layer" if self.layers == 1 else f"{self.layers} layers"
        return f"{layers} as large as the Transformer's blocks"


def network(changes: Changes, mixer: str, layers: int, window: int = WINDOW_CONTEXT) -> Changes:
    """Return ``changes`` with ``layers`` of a mixer in the place of the Transformer's blocks.

    window: number of tokens that a layer of the mixer "window" reads.
    """
    bidirectional = changes["model.architecture"] == "encoder"
    mixer_changes: Changes = {
        "model.positions.kind": "none",
        # Changes are applied in order: this one reads the Transformer's d_ff and number of blocks.
        "model.mixer.width": EqualSize(mixer, layers, bidirectional, window),
        "model.mixer.kind": mixer,
        "model.mlp.d_ff": 1,
    }
    if bidirectional:
        mixer_changes["model.num_encoder_layers"] = layers
    else:
        mixer_changes["model.num_decoder_layers"] = layers
    if mixer == "window":
        mixer_changes["model.mixer.window"] = window
    # leaves these keys out first, so that they come last, in the order above
    return without(changes, *mixer_changes) | mixer_changes


# At nano 2.4 M tokens are read, at mini 4.9 M: a text of half that size, twice.
TRANSFORMER_LM: Changes = (
    family("gpt2")
    | objective("causal-lm")
    | ADAMW
    | {
        "model.positions.kind": "rotary",  # has no parameters
        "start.steps": 0,
        "pretraining.steps": times(4),
        "pretraining.save_every": times(4),
        "pretraining.evaluate_every": times(2),
        "data.repeats": 2,
        "data.held_out_documents": 64,
        "tuning.mixtures": (),
    }
)

SCHEDULES: dict[str, Changes] = {
    "constant": {"pretraining.optimizer.schedule": "constant"},
    "decay": {"pretraining.optimizer.schedule": "linear"},  # to 0 at the last step
}
RATES = (1e-3, 3e-3, 1e-2, 3e-2)  # learning rates of AdamW
RELATIVE_RATES = (0.01, 0.02, 0.04, 0.08, 0.16)  # of AdamW with updates relative to each parameter


def adamw(rate: float, schedule: str) -> Changes:
    """Return the changes to AdamW with a learning rate and a schedule of SCHEDULES."""
    optimizer: Changes = {"pretraining.optimizer.name": "adamw", "pretraining.optimizer.learning_rate": rate}
    return optimizer | SCHEDULES[schedule]


def relative_adamw(rate: float) -> Changes:
    """Return the changes to AdamW with updates relative to the parameters, and a rate that decays to 0.

    The update of each array is multiplied by the array's root mean square.
    """
    return adamw(rate, "decay") | {"pretraining.optimizer.name": "adamw-relative"}


# Optimisers that the table history-rates compares. Its rows are named KIND-KEY, such as lstm-0.01-decay.
OPTIMIZERS: dict[str, Changes] = {
    f"{rate:g}-{schedule}": adamw(rate, schedule) for rate in RATES for schedule in SCHEDULES
} | {f"relative-{rate:g}": relative_adamw(rate) for rate in RELATIVE_RATES}
# The optimiser of each kind of network in the table history: of those with decay, the one with the fewest
# bits per byte in the table history-rates at mini, as the mean of seeds 0 and 1 (docs/road.md).
TUNED_OPTIMIZERS: dict[str, str] = {
    "window": "0.01-decay",
    "rnn": "0.003-decay",
    "gru": "0.003-decay",
    "lstm": "relative-0.08",
    "transformer": "relative-0.08",
}
# The optimiser of tables that were trained before each kind had its own. Its rate was the best of four after
# 200 steps at nano, there with a constant schedule.
COMMON_OPTIMIZER = OPTIMIZERS["0.01-decay"]
UPDATE_FACTORS = (1, 4, 16)  # of the table history-budgets, as multiples of those of the table history


def ngram(order: int) -> Changes:
    """Return the changes of an interpolated Kneser-Ney n-gram model (Chen and Goodman 1999).

    All other settings are those of the Transformer, so that both read the same text. The optimiser among them
    is not used.
    """
    return TRANSFORMER_LM | COMMON_OPTIMIZER | {"counts.model": "ngram", "counts.order": order}


def language_model(kind: str, layers: int = 1, window: int = WINDOW_CONTEXT) -> Changes:
    """Return the changes of a network of this kind without its optimiser, which is one of OPTIMIZERS."""
    return TRANSFORMER_LM if kind == "transformer" else network(TRANSFORMER_LM, kind, layers, window)


def tuned(kind: str, layers: int = 1, window: int = WINDOW_CONTEXT) -> Changes:
    """Return the changes of a network of this kind, with the optimiser that is best for the kind."""
    return language_model(kind, layers, window) | OPTIMIZERS[TUNED_OPTIMIZERS[kind]]


def with_updates(changes: Changes, factor: float) -> Changes:
    """Return ``changes`` with ``factor`` times the updates of history, and four passes over the text.

    The amount of text therefore grows with the updates, for n-grams too: at mini to 1.2, 4.9 and 20 M tokens
    for the factors 1, 4 and 16. With the factor 1 it is half that of history.
    """
    return changes | {
        "pretraining.steps": times(4 * factor),
        "pretraining.save_every": times(4 * factor),
        "pretraining.evaluate_every": times(2 * factor),
        "data.repeats": 4,
    }


def budget_rows() -> dict[str, Changes]:
    """Return for each number of updates a 5-gram, an LSTM and a Transformer, with decay to 0."""
    rows: dict[str, Changes] = {}
    for factor in UPDATE_FACTORS:
        rows[f"5-gram-x{factor}"] = with_updates(ngram(5), factor)
        for kind in ("lstm", "transformer"):
            rows[f"{kind}-x{factor}"] = with_updates(tuned(kind), factor)
    return rows


PRETRAINED_TAGGER: Changes = (
    family("bert-base")
    | objective("masked-lm")
    | ADAMW
    | {
        "model.embedding.type_vocab_size": 0,
        "model.heads": (),
        "tuning.mixtures": (),
        "tuning.heads": ("roles",),  # documentation/roles: the syntactic tag of each word of Python code
        "finetuning.steps": times(8),
        "finetuning.optimizer.learning_rate": 3e-3,  # the bi-LSTM has 79 % after 200 steps at 3e-4, 99 % here
    }
)
# fine-tuned from random parameters; without pre-training there is no objective
TAGGER_FROM_SCRATCH: Changes = without(PRETRAINED_TAGGER, "objective") | {"pretraining.steps": 0}
ENTITIES: Changes = {"tuning.heads": ("entities",)}
HIDDEN_MARKOV: Changes = TAGGER_FROM_SCRATCH | {"counts.model": "tagger"}

TABLES = (
    # three to five minutes each on one core, with compiling and evaluating; n-grams take seconds
    make_table(
        "history",
        "Language models in the order of their discovery",
        {
            "bigram": ngram(2),
            "trigram": ngram(3),
            "4-gram": ngram(4),
            "5-gram": ngram(5),
            "window": tuned("window"),
            "rnn": tuned("rnn"),
            "gru": tuned("gru"),
            "lstm": tuned("lstm"),
            "lstm-2": tuned("lstm", layers=2),
            "transformer": tuned("transformer"),
        },
        scale="mini",
        seeds=5,
    ),
    # Bengio et al. 2003 compare windows of 2 and 4 tokens. Longer ones have as many parameters here.
    make_table(
        "history-window",
        "How many tokens a feed-forward language model should read",
        {str(window): tuned("window", window=window) for window in (1, 2, WINDOW_CONTEXT, 8, 16)},
        baseline=f"history-window/{WINDOW_CONTEXT}",
        scale="mini",
        seeds=3,
        axis=Axis("model.mixer.window", "window [tokens]"),
    ),
    # By these runs TUNED_OPTIMIZERS is chosen: 65 rows of three to five minutes, two seeds each.
    make_table(
        "history-rates",
        "Optimiser, learning rate and decay of each kind of language model",
        {
            f"{kind}-{name}": language_model(kind) | optimizer
            for kind in TUNED_OPTIMIZERS
            for name, optimizer in OPTIMIZERS.items()
        },
        baseline="history/5-gram",
        scale="mini",
        seeds=2,
    ),
    # networks take 4 minutes, a quarter of an hour and an hour
    make_table(
        "history-budgets",
        "From which budget on a network passes the 5-gram",
        budget_rows(),
        scale="mini",
        seeds=5,
    ),
    make_table(
        "tagging",
        "Tags of words",
        {
            "most-frequent": HIDDEN_MARKOV | {"counts.tagging": "most-frequent"},
            "hmm-greedy": HIDDEN_MARKOV | {"counts.tagging": "greedy"},
            "hmm-beam": HIDDEN_MARKOV | {"counts.tagging": "beam"},
            "hmm-viterbi": HIDDEN_MARKOV | {"counts.tagging": "viterbi"},
            "bi-lstm": network(TAGGER_FROM_SCRATCH, "lstm", 1),
            "transformer": TAGGER_FROM_SCRATCH,
            "bert": PRETRAINED_TAGGER,
        },
        scale="mini",
        seeds=2,
    ),
    # BIO labels; the score is the F1 of whole entities. With --tuning.heads ner the text is CoNLL-2003.
    make_table(
        "entities",
        "Named entities",
        {
            "most-frequent": HIDDEN_MARKOV | ENTITIES | {"counts.tagging": "most-frequent"},
            "hmm-greedy": HIDDEN_MARKOV | ENTITIES | {"counts.tagging": "greedy"},
            "hmm-viterbi": HIDDEN_MARKOV | ENTITIES | {"counts.tagging": "viterbi"},
            "bi-lstm": network(TAGGER_FROM_SCRATCH, "lstm", 1) | ENTITIES,
            "transformer": TAGGER_FROM_SCRATCH | ENTITIES,
            "bert": PRETRAINED_TAGGER | ENTITIES,
        },
        scale="mini",
        seeds=2,
    ),
)

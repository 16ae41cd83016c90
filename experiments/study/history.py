"""Language models and taggers in the order in which the field came to them, on equal text and of equal size.

Networks have as many parameters as the Transformer of their scale, within 2 %: their widths follow from its
settings. Their blocks are a mixer alone; a feed-forward layer is 1 wide, which is as good as none. Counts
have as many numbers as their text has different n-grams, or words with tags.
"""

from collections.abc import Callable

from experiments.study.experiment import Changes, Experiment, objective, table, times
from experiments.study.families import ADAMW, family

WINDOW_CONTEXT = 4  # tokens that Bengio's network reads to predict the fifth [tokens]
STATE_MATRICES = {"rnn": 1, "gru": 3, "lstm": 4}  # matrices of a recurrent layer


def as_large(mixer: str, layers: int, both_ways: bool = False) -> Callable[[int | None, Experiment], int]:
    """The even ``mixer_width`` with which ``layers`` of a mixer are as large as the Transformer's blocks."""

    def width(_: int | None, experiment: Experiment) -> int:
        model = experiment.model
        d, inner = model.d_model, model.num_heads * model.d_kv
        blocks = model.num_encoder_layers if both_ways else model.num_decoder_layers
        target = blocks * (4 * d * inner + 3 * inner + 2 * d * model.d_ff + model.d_ff + 6 * d) / layers

        def numbers(h: int) -> int:
            """Of a layer of width h: the mixer, its projection, two norms and a feed-forward layer 1 wide."""
            mixes = (
                h * (WINDOW_CONTEXT * d + 1) if mixer == "window" else STATE_MATRICES[mixer] * h * (h + d + 1)
            )
            mixes += h * (mixer == "gru")
            return (1 + both_ways) * (mixes + h * d) + 8 * d + 1

        return min(range(2, 16 * d, 2), key=lambda h: abs(numbers(h) - target))

    return width


def network(changes: Changes, mixer: str, layers: int, new: Changes) -> Changes:
    """``changes`` with layers of a mixer in the place of the Transformer's blocks, and what is ``new``."""
    encodes = changes["model.architecture"] == "encoder"
    own: Changes = {
        "model.positions": "none",
        "model.mixer_width": as_large(
            mixer, layers, encodes
        ),  # of the Transformer's settings, so before these
        "model.mixer": mixer,
        "model.mixer_window": WINDOW_CONTEXT,
        "model.d_ff": 1,
        f"model.num_{'encoder' if encodes else 'decoder'}_layers": layers,
    }
    return {path: value for path, value in changes.items() if path not in own} | own | new


# At nano and mini these read 1.0 and 2.0 M tokens twice. Rates are the best of ... at nano.
LANGUAGE_MODEL: Changes = (
    family("gpt2")
    | objective("causal-lm")
    | ADAMW
    | {
        "model.positions": "rotary",  # which have no parameters
        "start.steps": 0,
        "pretraining.steps": times(4),
        "pretraining.save_every": times(4),
        "pretraining.evaluate_every": times(2),
        "pretraining.optimizer.learning_rate": 3e-3,
        "data.repeats": 2,
        "data.held_out_documents": 64,
        "tuning.mixtures": (),
        "finetuning.steps": 0,
    }
)

TAGGING: Changes = (
    family("bert-base")
    | objective("masked-lm")
    | ADAMW
    | {
        "model.type_vocab_size": 0,
        "model.heads": (),
        "start.steps": 0,
        "tuning.mixtures": (),
        "tuning.heads": ("roles",),
        "finetuning.steps": times(8),
    }
)
UNTRAINED: Changes = TAGGING | {"pretraining.steps": 0}
HIDDEN_MARKOV: Changes = UNTRAINED | {"counts.model": "tagger"}

RATES: dict[str, Changes] = {
    mixer: {"pretraining.optimizer.learning_rate": rate}
    for mixer, rate in {"window": 3e-3, "rnn": 3e-3, "gru": 3e-3, "lstm": 3e-3}.items()
}

ROWS = {
    # lm sweep history --scale nano
    ("history", "Language models in the order of their discovery"): {
        "bigram": LANGUAGE_MODEL | {"counts.model": "ngram", "counts.order": 2},
        "trigram": LANGUAGE_MODEL | {"counts.model": "ngram", "counts.order": 3},
        "window": network(LANGUAGE_MODEL, "window", 1, RATES["window"]),
        "rnn": network(LANGUAGE_MODEL, "rnn", 1, RATES["rnn"]),
        "gru": network(LANGUAGE_MODEL, "gru", 1, RATES["gru"]),
        "lstm": network(LANGUAGE_MODEL, "lstm", 1, RATES["lstm"]),
        "lstm-2": network(LANGUAGE_MODEL, "lstm", 2, RATES["lstm"]),
        "transformer": LANGUAGE_MODEL,
    },
    # lm sweep tagging --scale nano
    ("tagging", "Tags of words"): {
        "most-frequent": HIDDEN_MARKOV | {"counts.tagging": "most-frequent"},
        "hmm-greedy": HIDDEN_MARKOV | {"counts.tagging": "greedy"},
        "hmm-beam": HIDDEN_MARKOV | {"counts.tagging": "beam"},
        "hmm-viterbi": HIDDEN_MARKOV | {"counts.tagging": "viterbi"},
        "bi-lstm": network(UNTRAINED, "lstm", 1, {}),
        "transformer": UNTRAINED,
        "bert": TAGGING,
    },
}

TABLES = tuple(table(name, title, None, rows) for (name, title), rows in ROWS.items())

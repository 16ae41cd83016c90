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


def of_equal_size(
    mixer: str, layers: int, both_ways: bool = False
) -> Callable[[int | None, Experiment], int]:
    """The even ``mixer.width`` with which ``layers`` of a mixer are as large as the Transformer's blocks."""

    def width(_: int | None, experiment: Experiment) -> int:
        model = experiment.model
        d, inner = model.d_model, model.attention.num_heads * model.attention.d_kv
        blocks = model.num_encoder_layers if both_ways else model.num_decoder_layers
        d_ff = model.mlp.d_ff
        target = blocks * (4 * d * inner + 3 * inner + 2 * d * d_ff + d_ff + 6 * d) / layers

        def numbers(h: int) -> int:
            """Of a layer of width h: the mixer, its projection, two norms and a feed-forward layer 1 wide."""
            mixes = (
                h * (WINDOW_CONTEXT * d + 1) if mixer == "window" else STATE_MATRICES[mixer] * h * (h + d + 1)
            )
            mixes += h * (mixer == "gru")
            return (1 + both_ways) * (mixes + h * d) + 8 * d + 1

        return min(range(2, 16 * d, 2), key=lambda h: abs(numbers(h) - target))

    return width


def network(changes: Changes, mixer: str, layers: int) -> Changes:
    """``changes`` with layers of a mixer in the place of the Transformer's blocks."""
    encodes = changes["model.architecture"] == "encoder"
    own: Changes = {
        "model.positions.kind": "none",
        # asks for the Transformer's sizes, so it comes before what changes them
        "model.mixer.width": of_equal_size(mixer, layers, encodes),
        "model.mixer.kind": mixer,
        "model.mlp.d_ff": 1,
        f"model.num_{'encoder' if encodes else 'decoder'}_layers": layers,
    }
    if mixer == "window":
        own["model.mixer.window"] = WINDOW_CONTEXT
    return {path: value for path, value in changes.items() if path not in own} | own


# At nano these read 1.2 M tokens twice, at mini all 2.1 M of the documentation 2.4 times.
LANGUAGE_MODEL: Changes = (
    family("gpt2")
    | objective("causal-lm")
    | ADAMW
    | {
        "model.positions.kind": "rotary",  # which have no parameters
        "start.steps": 0,
        "pretraining.steps": times(4),
        "pretraining.save_every": times(4),
        "pretraining.evaluate_every": times(2),
        # of 0.001, 0.003, 0.01 and 0.03 the best for each kind, after 200 steps at nano
        "pretraining.optimizer.learning_rate": 1e-2,
        "data.repeats": 2,
        "data.held_out_documents": 64,
        "tuning.mixtures": (),
    }
)

TAGGING: Changes = (
    family("bert-base")
    | objective("masked-lm")
    | ADAMW
    | {
        "model.embedding.type_vocab_size": 0,
        "model.heads": (),
        "tuning.mixtures": (),
        "tuning.heads": ("roles",),
        "finetuning.steps": times(8),
        "finetuning.optimizer.learning_rate": 3e-3,  # the bi-LSTM has 79 % after 200 steps at 3e-4, 99 % here
    }
)
UNTRAINED: Changes = {path: value for path, value in TAGGING.items() if path != "objective"}
UNTRAINED |= {"pretraining.steps": 0}
HIDDEN_MARKOV: Changes = UNTRAINED | {"counts.model": "tagger"}

ROWS = {
    # lm sweep history --scale mini --seeds 2: 8 rows; networks take 2,400 steps of 0.06 to 0.09 s on two
    # cores, three to five minutes a seed with their evaluations; counts are there in seconds
    ("history", "Language models in the order of their discovery"): {
        "bigram": LANGUAGE_MODEL | {"counts.model": "ngram", "counts.order": 2},
        "trigram": LANGUAGE_MODEL | {"counts.model": "ngram", "counts.order": 3},
        "window": network(LANGUAGE_MODEL, "window", 1),
        "rnn": network(LANGUAGE_MODEL, "rnn", 1),
        "gru": network(LANGUAGE_MODEL, "gru", 1),
        "lstm": network(LANGUAGE_MODEL, "lstm", 1),
        "lstm-2": network(LANGUAGE_MODEL, "lstm", 2),
        "transformer": LANGUAGE_MODEL,
    },
    # lm sweep tagging --scale nano: 7 rows
    ("tagging", "Tags of words"): {
        "most-frequent": HIDDEN_MARKOV | {"counts.tagging": "most-frequent"},
        "hmm-greedy": HIDDEN_MARKOV | {"counts.tagging": "greedy"},
        "hmm-beam": HIDDEN_MARKOV | {"counts.tagging": "beam"},
        "hmm-viterbi": HIDDEN_MARKOV | {"counts.tagging": "viterbi"},
        "bi-lstm": network(UNTRAINED, "lstm", 1),
        "transformer": UNTRAINED,
        "bert": TAGGING,
    },
}

TABLES = tuple(table(name, title, None, rows) for (name, title), rows in ROWS.items())

"""What was learnt from text before there were Transformers: ELMo's layers, an LSTM that is tuned, vectors.

Rows differ from the first of their table by what their name says, and have the size of the scale.
"""

from experiments.study.changes import Changes, times
from experiments.study.presets import BERT, GPT
from experiments.study.table import make_table

# Tags of words and whole sentences. A head on frozen layers learns at a higher rate than a model.
ON_TASKS: Changes = {
    "tuning.heads": ("roles", "acceptability"),
    "finetuning.steps": times(2),
    "finetuning.optimizer.learning_rate": 1e-3,
}
LSTM: Changes = GPT | ON_TASKS | {"model.mixer.kind": "lstm", "model.positions.kind": "none"}
ELMO: Changes = LSTM | {"model.heads": ("backward",)}
MASKED: Changes = BERT | ON_TASKS
MIXED: Changes = {"tuning.layers": "mixed-frozen", "finetuning.optimizer.learning_rate": 1e-2}
LAST: Changes = MIXED | {"tuning.layers": "last-frozen"}
AS_INITIALISED: Changes = {"pretraining.steps": 0}

# Models of the next token whose embedding is a table of its own, so that it may stay as it is. Their only
# blocks are a mixer and a feed-forward layer.
NEXT: Changes = GPT | {
    "model.output.logits": "separate",
    "model.positions.kind": "none",
    "model.num_decoder_layers": 1,
    "finetuning.steps": 0,
}
BENGIO: Changes = NEXT | {"model.mixer.kind": "window", "model.mixer.window": 4}
LSTM_LM: Changes = NEXT | {"model.mixer.kind": "lstm"}
SKIPGRAM: Changes = {"vectors.epochs": 1}
# The softmax moves all contexts at every centre, so that fewer of these may share an update.
SOFTMAX: Changes = SKIPGRAM | {"vectors.negatives": 0, "vectors.batch": 64}
FROZEN: Changes = {"vectors.embedding": "frozen"}

TABLES = (
    make_table(
        "elmo",
        "Layers of language models as features, and an LSTM tuned",
        {
            "mixed": ELMO | MIXED,
            "last": ELMO | LAST,
            "tuned": ELMO,
            "random-mixed": ELMO | MIXED | AS_INITIALISED,
            "bert-mixed": MASKED | MIXED,
            "bert-last": MASKED | LAST,
            "lstm": LSTM,  # Dai and Le 2015
            "lstm-no-pretraining": LSTM | AS_INITIALISED,
        },
    ),
    make_table(
        "vectors",
        "Skip-gram's vectors, and models whose embedding starts as them",
        {
            "window": BENGIO,
            "window+vectors": BENGIO | SKIPGRAM,
            "window+frozen-vectors": BENGIO | SKIPGRAM | FROZEN,
            "window+softmax-vectors": BENGIO | SOFTMAX,
            "lstm": LSTM_LM,
            "lstm+vectors": LSTM_LM | SKIPGRAM,
            "lstm+frozen-vectors": LSTM_LM | SKIPGRAM | FROZEN,
            "negative": NEXT | SKIPGRAM | AS_INITIALISED,
            "softmax": NEXT | SOFTMAX | AS_INITIALISED,
        },
    ),
)

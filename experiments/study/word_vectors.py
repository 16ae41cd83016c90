"""Transfer learning before the Transformer: word vectors, ELMo, and a fine-tuned LSTM language model.

Rows differ from the first of their table by what their name says, and have the size of the scale.
"""

from experiments.study.changes import Changes, times
from experiments.study.presets import BERT, GPT
from experiments.study.table import make_table

# A task that tags words, and one that classifies sentences.
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
NO_PRETRAINING: Changes = {"pretraining.steps": 0}

# Language models whose embedding is not shared with the output, so that it can be frozen; one layer.
NEXT: Changes = GPT | {
    "model.output.logits": "separate",
    "model.positions.kind": "none",
    "model.num_decoder_layers": 1,
    "finetuning.steps": 0,
}
BENGIO: Changes = NEXT | {"model.mixer.kind": "window", "model.mixer.window": 4}
LSTM_LM: Changes = NEXT | {"model.mixer.kind": "lstm"}
SKIPGRAM: Changes = {"vectors.epochs": 1}
# A full softmax updates all context vectors for every centre word, so a batch has fewer of these.
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
            "random-mixed": ELMO | MIXED | NO_PRETRAINING,
            "bert-mixed": MASKED | MIXED,
            "bert-last": MASKED | LAST,
            "lstm": LSTM,  # Dai and Le 2015
            "lstm-no-pretraining": LSTM | NO_PRETRAINING,
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
            "negative": NEXT | SKIPGRAM | NO_PRETRAINING,
            "softmax": NEXT | SOFTMAX | NO_PRETRAINING,
        },
    ),
)

"""Four tasks on the installed documentation, one for each kind of the paper's benchmarks."""

from lm import metrics
from lm.data.tasks.task import Task, classification, fields, words

TASKS = (
    Task(
        "summarise",
        source="documentation/summarise",
        column="CNNDM",
        to_text=lambda row: (f"summarize: {row['document']}", row["summary"]),
        from_text=words,
        target=lambda row: row["summary"],
        metrics={name: metrics.rouge(name) for name in ("rouge1", "rouge2", "rougeLsum")},
        beside=("rouge1", "rougeLsum"),
    ),
    classification(
        "acceptability",
        ("unacceptable", "acceptable"),
        ("sentence",),
        source="documentation/acceptability",
        column="GLUE",
        metrics={"matthews": metrics.matthews, "accuracy": metrics.accuracy},
        beside=("accuracy",),
    ),
    classification(
        "follows",
        ("False", "True"),
        ("sentence1", "sentence2"),
        source="documentation/follows",
        column="SGLUE",
        metrics={"accuracy": metrics.accuracy},
    ),
    Task(
        "cloze",
        source="documentation/cloze",
        column="SQuAD",
        to_text=lambda row: (fields("cloze", row, ("question", "context")), row["answers"][0]),
        from_text=words,
        target=lambda row: row["answers"],
        metrics={"exact_match": metrics.exact_match, "f1": metrics.answer_f1},
        beside=("f1",),
    ),
)

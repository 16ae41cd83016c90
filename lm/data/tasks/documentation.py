"""Four tasks on the installed documentation, one for each kind of the paper's benchmarks."""

from lm import metrics
from lm.data.tasks.task import Task, classification, fields, summarisation

TASKS = (
    summarisation("summarise", "documentation/summarise", "document", "summary"),
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
        name="cloze",
        source="documentation/cloze",
        column="SQuAD",
        to_text=lambda row: (fields("cloze", row, ("question", "context")), row["answers"][0]),
        target=lambda row: row["answers"],
        metrics={"exact_match": metrics.exact_match, "f1": metrics.answer_f1},
        beside=("f1",),
    ),
)

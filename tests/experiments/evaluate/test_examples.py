"""Which examples of training are shown."""

import pytest

from experiments.evaluate.examples import show_examples
from experiments.study.registry import build
from lm.data.tasks.task import BaseTask


class TaskRead(Exception):
    """Raised in place of reading the rows of a task, which are made from the built-in text."""


@pytest.mark.parametrize("row", ["t5/1-baseline/baseline", "bert/base"])
def test_a_task_is_read_for_examples_only_if_a_stage_is_trained_on_it(row, tmp_path, capsys, monkeypatch):
    def refuse(task, *_):
        raise TaskRead(task.name)

    monkeypatch.setattr(BaseTask, "rows", refuse)
    monkeypatch.setattr("experiments.runs.prepare._open_tasks", lambda *_: {})
    monkeypatch.setattr("experiments.runs.prepare._report_unwritable", lambda *_: None)
    text = "\n\n".join(f"This is sentence {number}. " * 20 for number in range(40))
    (tmp_path / "own.txt").write_text(text)
    given = {"data.corpus": f"text:{tmp_path}/own.txt", "data.vocabulary": "bytes", "model.vocab_size": 512}
    show_examples(build(row, "nano", given | {"finetuning.steps": 0}), 1, tmp_path / "cache")
    titles = [line.partition(",")[0] for line in capsys.readouterr().out.splitlines() if line[:1].strip()]
    assert titles == ["pre-training"]
    with pytest.raises(TaskRead):
        show_examples(build(row, "nano", given | {"finetuning.steps": 10}), 1, tmp_path / "cache")

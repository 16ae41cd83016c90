"""Which examples of training are shown."""

import re

import numpy as np
import pytest

from experiments.evaluate.examples import show_examples
from experiments.study.registry import build
from lm.data.tasks.task import BaseTask
from lm.objectives.corruption import NOISES, Noise


class TaskRead(Exception):
    """Raised in place of reading the rows of a task, which are made from the built-in text."""


def own_text(folder):
    """Write a text to the folder, and return the settings that read it byte by byte."""
    text = "\n\n".join(f"This is sentence {number}. " * 20 for number in range(40))
    (folder / "own.txt").write_text(text)
    return {"data.corpus": f"text:{folder}/own.txt", "data.vocabulary": "bytes", "model.vocab_size": 512}


@pytest.mark.parametrize("row", ["t5/1-baseline/baseline", "bert/base"])
def test_a_task_is_read_for_examples_only_if_a_stage_is_trained_on_it(row, tmp_path, capsys, monkeypatch):
    def refuse(task, *_):
        raise TaskRead(task.name)

    monkeypatch.setattr(BaseTask, "rows", refuse)
    monkeypatch.setattr("experiments.runs.prepare._open_tasks", lambda *_: {})
    monkeypatch.setattr("experiments.runs.prepare._report_unwritable", lambda *_: None)
    given = own_text(tmp_path)
    show_examples(build(row, "nano", given | {"finetuning.steps": 0}), 1, tmp_path / "cache")
    titles = [line.partition(",")[0] for line in capsys.readouterr().out.splitlines() if line[:1].strip()]
    assert titles == ["pre-training"]
    with pytest.raises(TaskRead):
        show_examples(build(row, "nano", given | {"finetuning.steps": 10}), 1, tmp_path / "cache")


def test_the_share_that_examples_hide_is_without_the_noise_that_did_not_fit(tmp_path, capsys, monkeypatch):
    noise = Noise(lambda _, texts: np.ones(texts.uniforms[:, 0].shape, bool))
    monkeypatch.setitem(NOISES, "iid", noise)
    given = own_text(tmp_path) | {"finetuning.steps": 0, "objective.noise": "iid", "objective.rate": 0.2}
    show_examples(build("t5/1-baseline/baseline", "nano", given), 3, tmp_path / "cache")
    out = capsys.readouterr().out
    ((length, room),) = re.findall(r"rows of step 0: (\d+) tokens of text, .* and (\d+) of targets", out)
    assert int(room) < int(length)
    hidden = [int(count) for count in re.findall(r"content +(\d+) tokens", out)]
    assert len(hidden) == 3 and max(hidden) < int(room)
    ((share, rate),) = re.findall(
        r"these rows hide (\S+) % of their text; objective.rate asks for (\S+) %", out
    )
    assert float(share) == pytest.approx(100 * sum(hidden) / (3 * int(length)), rel=0.02)
    assert rate == "20"

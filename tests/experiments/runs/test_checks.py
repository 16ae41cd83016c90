"""Checks of a run's settings before anything is prepared."""

from types import SimpleNamespace

import pytest

from experiments.runs.checks import check_agreement, check_answer_lengths
from experiments.study.registry import build
from lm.config.base import SettingError, changes

ROW = "t5/1-baseline/baseline"


@pytest.mark.parametrize(
    ("row", "mixtures", "task"),
    [
        (ROW, ("documentation", "documentation-language"), "acceptability"),
        ("gpt/base", ("documentation-reading",), "extract"),
    ],
)
def test_two_fine_tunings_that_score_the_same_task_are_refused(row, mixtures, task):
    experiment = build(row, "nano", {"tuning.mixtures": mixtures})
    with pytest.raises(SettingError, match=f"both score a task called '{task}'"):
        check_agreement(experiment)
    check_agreement(changes(experiment, {"tuning.mixtures": mixtures[:1], "tuning.heads": ()}))


def test_an_answer_that_pre_training_on_tasks_would_cut_is_refused():
    given = {"tuning.mixtures": ("glue_small",), "mixing.pretraining": "corpus+tasks", "finetuning.steps": 0}
    vocabulary = SimpleNamespace(encode=lambda text: [7] * (90 * (text == "positive")), template=None)
    with pytest.raises(SettingError, match="'positive'.*'sst2'.*'glue_small'"):
        check_answer_lengths(build(ROW, "nano", given), vocabulary)


def test_streams_that_repeated_text_cannot_fill_are_refused_and_not_lowered():
    # 300 x 32 x 64 / 64 = 9,600 tokens are repeated, which are 150 rows: two streams of 64 rows or more
    given = {"data.repeats": 64, "data.streams": 16}
    message = r"data.streams=16 should be at most 2, or 0: data.repeats=64 leaves 9,600 tokens"
    with pytest.raises(SettingError, match=message):
        check_agreement(build(ROW, "nano", given))
    for streams in (0, 1, 2):
        check_agreement(build(ROW, "nano", given | {"data.streams": streams}))
    check_agreement(build(ROW, "nano", {"data.streams": 16}))

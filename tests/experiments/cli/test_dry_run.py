"""``--dry-run``: the time that it expects, and the data that it says are missing or still to be made."""

import re

import pytest
from rich.console import Console

from experiments import __main__ as cli
from lm.data.documentation.corpus import VERSION

ROW = "t5/1-baseline/baseline"


@pytest.fixture
def dry_run(tmp_path, monkeypatch, capsys):
    """Return what ``--dry-run`` prints, at a speed that the test gives, in a folder without runs and data."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("TFDS_DATA_DIR", raising=False)
    monkeypatch.setattr("experiments.cli.dry_run.CONSOLE", Console(width=400))

    def run(*words, flops_per_second=1e12):
        monkeypatch.setattr("experiments.cli.dry_run.matmul_speed", lambda: flops_per_second)
        assert cli.dispatch(["run", ROW, "--dry-run", *words]) == 0
        return capsys.readouterr().out

    return run


def test_the_expected_time_of_a_row_at_nano_is_about_what_runs_took(dry_run):
    """Rows of `glu/2-glue` that are as large took 210 s (docs/results/nano-glu.tar.xz), their steps 79 s."""
    said = dry_run(flops_per_second=2.86e12 / 79 / 0.35)
    minutes, seconds = map(int, re.search(r"about (\d+) min (\d+) s \(", said).groups())
    assert 60 * minutes + seconds == pytest.approx(210, rel=0.15)
    assert "evaluating takes" in said


def test_text_that_is_still_to_be_made_is_named(dry_run, tmp_path):
    said = dry_run()
    assert "still to be made" in said and "missing" not in said
    assert "documentation/corpus, documentation/determiners, documentation/extract" in said
    for name, version in (
        ("corpus", VERSION),
        ("extract", "1.0.0"),
    ):  # one of them was made by an old version
        made = tmp_path / "runs/cache/tfds/documentation" / name / version
        made.mkdir(parents=True)
        (made / "dataset_info.json").touch()
    said = dry_run()
    assert "documentation/corpus" not in said and "documentation/extract" in said


def test_data_that_pre_training_or_the_vocabulary_alone_reads_are_named_if_they_are_missing(dry_run):
    multi_task = "--mixing.pretraining", "corpus+tasks", "--finetuning.steps", "0"
    assert "reads tfds:glue/sst2" in dry_run("--tuning.mixtures", "glue_small", *multi_task)
    assert "c4/en" in dry_run("--data.vocabulary", "unigram:tfds:c4/en")
    assert "c4/en" in dry_run("--pretraining.steps", "0", "--data.corpus", "tfds:c4/en")

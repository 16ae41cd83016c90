"""The stages of a run as they follow one another: the start that rows share, pre-training, fine-tuning."""

import json
from pathlib import Path

import numpy as np
import pytest
from tiny import TINY

from experiments.runs.recipes import start_from, steps_of, trained
from experiments.runs.result import read_result
from experiments.runs.run import run
from experiments.runs.stages import Stage, stages, stages_of
from experiments.runs.trained import answering, chosen
from experiments.study.registry import REGISTRY, build
from experiments.study.scales import SCALES
from lm import sharding
from lm.data.corpora import documentation
from lm.train.checkpoints import Checkpoints
from lm.train.config import CheckpointConfig
from lm.train.log import records

BASELINE = "t5/1-baseline/baseline"
START = {"start.steps": 3}
SMALL = SCALES["nano"] | TINY | START | {"pretraining.steps": 6, "finetuning.steps": 2}
SMALL |= {"tuning.mixtures": ("cloze",), "finetuning.save_every": 1, "finetuning.log_every": 1}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """A cache that holds a small documentation corpus; and a scale ``tiny``."""
    folder = tmp_path_factory.mktemp("runs") / "cache"
    documentation.prepare_sets(folder, packages=documentation.STDLIB)
    SCALES["tiny"] = SMALL
    yield folder
    del SCALES["tiny"]


def starts(name: str, changes: dict | None = None) -> set[Path]:
    """Folders of the starts of a row."""
    return {stage.folder for stage in stages(build(name, "nano", START | (changes or {}))) if stage.is_start}


@pytest.mark.parametrize("table", ["t5/4-", "t5/6-", "t5/9-", "t5/11-", "t5/12-"])
def test_rows_of_one_model_and_corpus_share_the_start_whatever_they_pretrain_on(table):
    rows = [name for name in REGISTRY if name.startswith(table)]
    assert len(rows) > 2 and all(starts(name) == starts(BASELINE) for name in rows)


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 1},
        {"model.d_ff": 32},
        {"data.corpus": "text:a"},
        {"start.steps": 4},
        {"start.objective.rate": 0.2},
        {"pretraining.optimizer.learning_rate": 0.5},
    ],
)
def test_the_start_and_what_follows_it_depend_on_all_that_shapes_it(changes):
    first, other = (stages(build(BASELINE, "nano", START | new)) for new in ({}, changes))
    assert all(a.folder != b.folder for a, b in zip(first[:2], other[:2], strict=True))


@pytest.mark.parametrize("name", ["bert/base", "electra/base", "t5/1-baseline/no-pretraining"])
def test_encoders_and_what_is_not_pretrained_have_no_start_and_lie_where_they_lay(name):
    with_start, without = (stages(build(name, "nano", new)) for new in (START, {}))
    assert [stage.folder for stage in with_start] == [stage.folder for stage in without]
    assert not any(stage.is_start for stage in with_start)


def test_members_of_an_ensemble_start_as_single_runs_of_their_seeds_do():
    single = [starts(BASELINE, {"seed": seed}) for seed in range(4)]
    assert starts("t5/13-scaling/ensemble") == set.union(*single)
    assert starts("t5/13-scaling/ensemble-fine-tuning") == single[0]


def followed(experiment, folder: Path, cache: Path, steps: int = 0) -> tuple[Stage, ...]:
    """The stages of a run that is trained to its end, torn from work after every few ``steps``, if given."""

    class Torn(Exception):
        pass

    class Reporter:
        left = steps

        def __getattr__(self, name):
            return lambda *values: None

        def advance(self, count: int, detail: str = "") -> None:
            self.left -= count == 1
            if steps and self.left < 0:
                raise Torn

    for _ in range(20):
        try:
            run(experiment, folder, cache, Reporter())
            return stages_of(folder)
        except Torn:
            continue
    raise AssertionError("it comes to no end")


@pytest.fixture(scope="module")
def finished(cache):
    """The stages of a run with a start."""
    return followed(build(BASELINE, "tiny"), cache.parent / "tiny" / "whole" / "seed-0", cache)


def test_pretraining_continues_from_the_start_with_its_memory_and_counts_from_0(finished):
    first, main, tuned = finished
    mesh = sharding.make_mesh(main.settings.mesh)
    assert (first.name, main.parent, tuned.parent) == ("start", first, main)
    steps = steps_of(main, mesh)
    with Checkpoints(first.folder / "checkpoints", CheckpointConfig()) as checkpoints:
        saved, begun = checkpoints.restore(steps.abstract, 3), start_from(first, steps)
    assert (int(saved.step), int(begun.step)) == (3, 0)
    for name, value in sharding.named(saved).items():
        if name != "step":
            np.testing.assert_array_equal(value, sharding.named(begun)[name])


def test_the_start_counts_in_tokens_and_is_no_pretraining_of_which_anything_is_told(finished):
    first, main, tuned = finished
    run_folder = tuned.folder.parents[1]
    result = read_result(run_folder)
    tokens = [
        line["tokens"] for stage in finished for line in records(stage.folder) if line["kind"] == "train"
    ]
    assert result.tokens == pytest.approx(sum(tokens), abs=2)
    assert result.held_out_loss == records(main.folder)[-1]["loss"] != records(first.folder)[-1]["loss"]
    assert answering(run_folder)[1:] == [main, first]
    assert chosen(run_folder, {stage.name: stage for stage in finished}, "") == main


def test_a_run_that_is_torn_from_every_stage_comes_to_what_it_does_without(finished, cache):
    torn = followed(build(BASELINE, "tiny"), cache.parent / "torn" / "row" / "seed-0", cache, steps=5)
    mesh = sharding.make_mesh(torn[0].settings.mesh)
    for whole, other in zip(finished, torn, strict=True):
        assert whole.folder != other.folder
        for name, value in trained(whole, mesh).params.items():
            np.testing.assert_array_equal(value, trained(other, mesh).params[name])
    begun = {stage.name: len(json.loads((stage.folder / "run.json").read_text())["starts"]) for stage in torn}
    assert begun["start"] == 1 and begun["pretraining"] > 2

"""What runs have in common: one pre-training for all that pre-train alike, found by what it depends on."""

from pathlib import Path

import pytest

from experiments.runs.stages import stages
from experiments.study.registry import REGISTRY, build

BASELINE = "t5/1-baseline/baseline"


def places(name: str, seed: int = 0, **changes) -> set[Path]:
    """Folders of the pre-trainings of a row, without the start that all have in common."""
    experiment = build(
        name, "nano", {"seed": seed} | {path.replace("__", "."): new for path, new in changes.items()}
    )
    trained = stages(experiment, Path("runs/nano") / name / f"seed-{seed}", Path("runs/cache"))
    return {stage.folder for stage in trained if stage.is_pretraining and not stage.is_start_pretraining}


@pytest.mark.parametrize("name", [name for name in REGISTRY if name.startswith("t5/10-")])
def test_rows_that_differ_in_fine_tuning_share_the_baselines_pretraining(name):
    assert places(name) == places(BASELINE)


@pytest.mark.parametrize("table", ["t5/4-", "t5/6-", "t5/8-", "t5/9-", "t5/11-", "t5/12-"])
def test_rows_that_differ_in_pretraining_share_none(table):
    each = [places(name) for name in REGISTRY if name.startswith(table)]
    assert sum(map(len, each)) == len(set().union(*each))


@pytest.mark.parametrize(
    "changes",
    [
        {"mesh__data": 1},
        {"data__workers": 2},
        {"tuning__inputs_length": 64},
        {"tuning__mixtures": ("cloze",)},
        {"finetuning__steps": 7},
    ],
)
@pytest.mark.parametrize(
    "shapes",
    [
        {},
        {"seed": 1},
        {"model__dropout": 0.1},
        {"pretraining__steps": 100},
        {"data__vocabulary_size": 1_000},
    ],
)
def test_pretraining_depends_on_all_that_shapes_it_and_on_nothing_that_comes_after(shapes, changes):
    found = places(BASELINE, **shapes, **changes)
    assert found == places(BASELINE, **shapes)
    assert bool(found & places(BASELINE)) == (not shapes)


def test_leaving_one_out_pretrains_once_for_each_mixture_and_never_on_it():
    tuned = [
        stage for stage in stages(build("t5/12-multi-task/leave-one-out", "nano")) if stage.writes_answers
    ]
    assert len(places("t5/12-multi-task/leave-one-out")) == len({stage.parent for stage in tuned}) == 2
    for stage in tuned:
        assert stage.parent.name == f"pretraining/without-{stage.name}"
        assert len(stage.parent.task_names) == 1 and not set(stage.task_names) & set(stage.parent.task_names)


def test_ensembles_start_from_the_seeds_of_the_baseline_and_share_no_member():
    seeds = [next(iter(places(BASELINE, seed))) for seed in range(8)]
    assert places("t5/13-scaling/ensemble") == set(seeds[:4])
    assert places("t5/13-scaling/ensemble", 1) == set(seeds[4:])
    assert places("t5/13-scaling/ensemble-fine-tuning", 1) == {seeds[1]}

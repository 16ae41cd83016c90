"""What runs have in common: one pre-training for all that pre-train alike, found by what it depends on."""

from pathlib import Path

import numpy as np
import pytest

from experiments.runs.prepare import Prepared
from experiments.runs.recipes import right_answers
from experiments.runs.stages import stages
from experiments.study.registry import REGISTRY, build
from lm import sharding
from lm.data.objectives import Lengths
from lm.data.tasks.mixtures import mixture
from lm.data.text.own import Bytes
from lm.data.text.tokens import Tokens
from lm.evaluate.questions import Questions
from lm.mesh import MeshConfig

BASELINE = "t5/1-baseline/baseline"


def places(name: str, seed: int = 0, **changes) -> set[Path]:
    """Folders of the pre-trainings of a row."""
    experiment = build(
        name, "nano", {"seed": seed} | {path.replace("__", "."): new for path, new in changes.items()}
    )
    trained = stages(experiment, Path("runs/nano") / name / f"seed-{seed}", Path("runs/nano"))
    return {stage.folder for stage in trained if stage.kind == "pretrain"}


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
        {"model__dropout": 0.0},
        {"pretraining__steps": 100},
        {"data__vocabulary_size": 1_000},
    ],
)
def test_pretraining_depends_on_all_that_shapes_it_and_on_nothing_that_comes_after(shapes, changes):
    found = places(BASELINE, **shapes, **changes)
    assert found == places(BASELINE, **shapes)
    assert bool(found & places(BASELINE)) == (not shapes)


def test_leaving_one_out_pretrains_once_for_each_benchmark_and_never_on_it():
    tuned = [
        stage for stage in stages(build("t5/12-multi-task/leave-one-out", "nano")) if stage.kind == "text"
    ]
    assert len(places("t5/12-multi-task/leave-one-out")) == len({stage.parent for stage in tuned}) == 4
    for stage in tuned:
        assert stage.parent.name == f"pretraining/without-{stage.name}"
        assert len(stage.parent.on) == 3 and not set(stage.on) & set(stage.parent.on)


def test_ensembles_start_from_the_seeds_of_the_baseline_and_share_no_member():
    seeds = [next(iter(places(BASELINE, seed))) for seed in range(8)]
    assert places("t5/13-scaling/ensemble") == set(seeds[:4])
    assert places("t5/13-scaling/ensemble", 1) == set(seeds[4:])
    assert places("t5/13-scaling/ensemble-fine-tuning", 1) == {seeds[1]}


@pytest.mark.parametrize("row", [BASELINE, "t5/2-architecture/language-model", "t5/2-architecture/prefix-lm"])
def test_the_loss_of_a_tasks_targets_counts_their_tokens_and_no_inputs(row):
    experiment = build(row, "nano", {"data.vocabulary": "bytes", "finetuning.batch_size": 8})
    rows = [
        {"question": "a _ c", "context": "b c d", "answers": [answer]}
        for answer in ("bc", "", "abcdef", "a long one") * 3
    ]
    (task,) = mixture("cloze")
    prepared = Prepared(Bytes(100), Tokens(Path()), Tokens(Path()), Path())
    stage, mesh = stages(experiment)[-1], sharding.make_mesh(MeshConfig())
    asked = Questions(task, rows, [], None, None)
    batches = right_answers(stage, prepared, mesh, asked, Lengths(raw=96, inputs=96, targets=8))
    counted = np.concatenate([batch["decoder_loss_weights"].sum(axis=1) for batch in batches])
    assert counted.tolist() == [3, 1, 7, 8] * 3 + [0] * 4  # and none of the rows of padding

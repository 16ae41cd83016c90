"""The stages of a run as they follow one another: the start that rows share, pre-training, its branches."""

import json
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import small_corpus
from tiny import TINY
from torn_runs import followed

from experiments.runs.checks import check_branches
from experiments.runs.paths import base_name
from experiments.runs.result import read_result
from experiments.runs.stages import stages
from experiments.runs.trained import generative_stages, select_stage
from experiments.study.registry import REGISTRY, build
from experiments.study.scales import SCALES
from experiments.study.start import START_ONLY_ROW
from lm import sharding
from lm.config.base import SettingError
from lm.config.training import CheckpointConfig
from lm.train.runtime import manifest
from lm.train.runtime.checkpoints import Checkpoints
from lm.train.runtime.records import records

BASELINE = "t5/1-baseline/baseline"
UPDATES = {"pretraining.steps": 200}
START, NO_START = {"start.steps": 3}, {"start.steps": 0}
SMALL = SCALES["nano"] | TINY | START | {"pretraining.steps": 8, "finetuning.steps": 2}
SMALL |= {"tuning.mixtures": ("cloze",), "finetuning.save_every": 1, "finetuning.log_every": 1}
SMALL |= {"tuning.branches": (0.125, 1.0)}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache that holds a small documentation corpus; and a scale ``tiny``."""
    folder = tmp_path_factory.mktemp("runs") / "cache"
    small_corpus.prepare(folder)
    SCALES["tiny"] = SMALL
    yield folder
    del SCALES["tiny"]


def starts(name: str, changes: dict | None = None) -> set[Path]:
    """Folders of the starts of a row."""
    return {
        stage.folder
        for stage in stages(build(name, "nano", START | (changes or {})))
        if stage.is_start_pretraining
    }


@pytest.mark.parametrize("table", ["t5/4-", "t5/6-", "t5/9-", "t5/11-", "t5/12-"])
def test_rows_of_one_model_and_corpus_share_the_start_whatever_they_pretrain_on(table):
    rows = [name for name in REGISTRY if name.startswith(table)]
    assert len(rows) > 2 and all(starts(name) == starts(BASELINE) for name in rows)


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 1},
        {"model.mlp.d_ff": 32},
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
    with_start, without = (stages(build(name, "nano", new)) for new in (START, NO_START))
    assert [stage.folder for stage in with_start] == [stage.folder for stage in without]
    assert not any(stage.is_start_pretraining for stage in with_start)


def test_members_of_an_ensemble_start_as_single_runs_of_their_seeds_do():
    single = [starts(BASELINE, {"seed": seed}) for seed in range(4)]
    assert starts("t5/13-scaling/ensemble") == set.union(*single)
    assert starts("t5/13-scaling/ensemble-fine-tuning") == single[0]


def test_branches_are_fine_tunings_from_one_pretraining_that_does_not_depend_on_them():
    tasks = ("cloze", "follows")
    (main, *_), (same, *tuned) = (
        stages(
            build(
                BASELINE, "nano", UPDATES | NO_START | {"tuning.mixtures": tasks, "tuning.branches": shares}
            )
        )
        for shares in ((1.0,), (0.125, 0.5, 1.0))
    )
    assert (main.folder, main.relevant_settings) == (same.folder, same.relevant_settings)
    assert (main.branch_steps, same.branch_steps) == ((200,), (25, 100, 200))
    assert [(stage.name, str(stage.folder), stage.parent_step) for stage in tuned] == [
        (name, f"finetuning/{name}", step)
        for task in tasks
        for name, step in ((task, 200), (f"at-0.5/{task}", 100), (f"at-0.125/{task}", 25))
    ]
    assert all(stage.parent == same for stage in tuned)
    assert [stage.is_compared for stage in tuned] == 2 * [True, False, False]
    assert base_name("at-0.5/cloze/member-1") == "at-0.5/cloze"


@pytest.mark.parametrize("row", ["t5/1-baseline/no-pretraining", "t5/12-multi-task/multi-task"])
def test_without_pretraining_or_fine_tuning_there_are_no_branches(row):
    branched, whole = (stages(build(row, "nano", {"tuning.branches": x})) for x in ((0.5, 1.0), (1.0,)))
    assert [stage.folder for stage in branched] == [stage.folder for stage in whole]


@pytest.mark.parametrize("shares", [(), (0.5,), (0.5, 0.5, 1.0), (0.0, 1.0), (0.5, 0.25, 1.0), (1.0, 2.0)])
def test_shares_that_make_no_sense_are_refused(shares):
    with pytest.raises(SettingError, match=r"tuning\.branches="):
        build(BASELINE, "nano", {"tuning.branches": shares})


def test_branches_that_are_one_or_whose_checkpoint_is_gone_are_refused_before_anything_starts(tmp_path):
    def branches(*shares):
        changes = UPDATES | NO_START | {"tuning.branches": shares, "tuning.mixtures": ("cloze",)}
        return stages(build(BASELINE, "nano", changes), tmp_path / "run", tmp_path / "cache")

    main, _, branch = every = branches(0.5, 1.0)
    check_branches(every)
    with pytest.raises(SettingError, match=r"are \(100, 100, 200\)"):
        check_branches(branches(0.5, 0.501, 1.0))
    (main.folder / "checkpoints" / "150").mkdir(parents=True)
    with pytest.raises(SettingError, match="tuning.branches="):
        check_branches(every)
    (branch.folder / "checkpoints" / "25").mkdir(parents=True)  # it needs it no longer
    check_branches(every)


def test_members_of_one_pre_training_have_heads_of_their_own(cache, tmp_path):
    ensemble = {"ensemble.members": 2, "ensemble.pretraining": "shared"}
    heads = {"tuning.heads": ("next",), "tuning.mixtures": (), "tuning.branches": (1.0,)}
    experiment = build("bert/base", "tiny", NO_START | ensemble | heads)
    pretraining, *members = stages(experiment, tmp_path / "run", tmp_path / "cache")
    mesh = sharding.make_mesh(experiment.mesh)
    with pretraining.checkpoints() as checkpoints:
        state = pretraining.steps(mesh).initial_state(0)
        checkpoints.save(replace(state, step=jnp.int32(pretraining.training.steps)))
    begun = [member.initial_state(member.steps(mesh))().params for member in members]
    differing = {name for name, value in begun[0].items() if (value != begun[1][name]).any()}
    assert differing == {"head.out.kernel"}


@pytest.fixture(scope="module")
def finished(cache):
    """The stages of a run with a start."""
    return followed(build(BASELINE, "tiny"), cache.parent / "tiny" / "whole" / "seed-0", cache)


@pytest.mark.slow
def test_pretraining_continues_from_the_start_with_its_memory_and_counts_from_0(finished):
    first, main, tuned, branch = finished
    mesh = sharding.make_mesh(main.settings.mesh)
    assert (first.name, main.parent, tuned.parent) == ("start", first, main) and branch.parent == main
    steps = main.steps(mesh)
    with Checkpoints(first.folder / "checkpoints", CheckpointConfig()) as checkpoints:
        saved, begun = checkpoints.restore(steps.abstract, 3), first.initial_state_from_checkpoint(steps)
    assert (int(saved.step), int(begun.step)) == (3, 0)
    for name, value in sharding.named(saved).items():
        if name != "step":
            np.testing.assert_array_equal(value, sharding.named(begun)[name])


@pytest.mark.slow
def test_the_start_counts_in_tokens_and_is_no_pretraining_of_which_anything_is_told(finished):
    first, main, tuned, branch = finished
    run_folder = tuned.folder.parents[1]
    result = read_result(run_folder)
    tokens = [
        line["tokens"] for stage in finished for line in records(stage.folder) if line["kind"] == "train"
    ]
    assert result.tokens == pytest.approx(sum(tokens), abs=2)
    assert result.held_out_loss == records(main.folder)[-1]["loss"] != records(first.folder)[-1]["loss"]
    assert generative_stages(run_folder) == [first, main, tuned, branch]
    assert select_stage(run_folder, {stage.name: stage for stage in finished}, "") == tuned


@pytest.mark.slow
def test_a_start_that_copies_has_no_content_tokens_and_no_loss_on_them(finished):
    first, main, *_ = finished
    for stage, is_told in ((first, False), (main, True)):
        evaluations = [line for line in records(stage.folder) if line["kind"] == "eval"]
        assert evaluations and all(("content_loss" in line) == is_told for line in evaluations)
        assert all(("reference_loss" in line) == is_told for line in evaluations)
    result = read_result(main.folder.parents[1] / "whole" / "seed-0")
    assert result.start_tokens == 0 < result.content_tokens


@pytest.mark.slow
def test_the_start_alone_is_fine_tuned_from_the_checkpoint_that_other_rows_go_on_from(finished, cache):
    experiment = build(START_ONLY_ROW, "tiny")
    starts_before = (finished[0].folder / "run.json").read_text()
    alone, tuned = followed(experiment, cache.parent / "tiny" / "alone" / "seed-0", cache)
    assert alone.folder == finished[0].folder and tuned.parent == alone
    assert (alone.folder / "run.json").read_text() == starts_before  # it is not trained again
    result = read_result(tuned.folder.parents[1])
    assert (result.content_loss, result.exit_step, result.content_tokens) == (None, None, 0)
    assert result.tasks["cloze"] and result.flops > 0


@pytest.mark.slow
def test_a_run_that_is_torn_from_every_stage_comes_to_what_it_does_without(finished, cache):
    torn = followed(build(BASELINE, "tiny"), cache.parent / "torn" / "row" / "seed-0", cache, steps=5)
    mesh = sharding.make_mesh(torn[0].settings.mesh)
    for whole, other in zip(finished, torn, strict=True):
        assert whole.folder != other.folder
        for name, value in whole.restore_state(mesh).params.items():
            np.testing.assert_array_equal(value, other.restore_state(mesh).params[name])
    begun = {stage.name: len(json.loads((stage.folder / "run.json").read_text())["starts"]) for stage in torn}
    assert begun["start"] == 1 and begun["pretraining"] > 2


@pytest.mark.slow
def test_a_branch_learns_and_scores_what_a_run_does_whose_pretraining_ended_there(finished, cache):
    """As long as the rate is constant: it is until step 2,500."""
    _, main, tuned, branch = finished
    short = build(BASELINE, "tiny", {"pretraining.steps": 1, "tuning.branches": (1.0,)})
    shorter = followed(short, cache.parent / "tiny" / "short" / "seed-0", cache)
    assert shorter[0].folder == finished[0].folder != main.folder != shorter[1].folder
    mesh = sharding.make_mesh(main.settings.mesh)
    learnt, due = (stage.restore_state(mesh).params for stage in (branch, shorter[-1]))
    for name, value in learnt.items():
        np.testing.assert_array_equal(value, due[name])
    result, other = (read_result(stage.folder.parents[1]) for stage in (tuned, shorter[-1]))
    whole, part = result.branches["cloze"]["8"], result.branches["cloze"]["1"]
    assert whole == result.tasks["cloze"] and result.branches.keys() == {"cloze"}
    by_likelihood = {name: other.tasks["cloze"]["metrics"][name] for name in part["metrics"]}
    assert "bits_above_chance" in by_likelihood and "em" not in by_likelihood  # branches answer nothing
    alone = other.tasks["cloze"] | {"metrics": by_likelihood, "answered": 0}
    assert alone.pop("shuffled"), "branches are scored on their own inputs alone"
    assert part == alone
    assert other.branches == {}


@pytest.mark.slow
def test_the_checkpoints_of_branches_stay_and_those_between_go(finished):
    _, main, *_ = finished
    assert [*manifest.steps(main.folder / "checkpoints")] == [1, 4, 6, 8]


@pytest.mark.slow
def test_a_pretraining_that_is_scored_itself_is_scored_at_each_branch(cache):
    changes = {"pretraining.steps": 4, "tuning.branches": (0.25, 1.0)}
    (*_, main) = followed(
        build("t5/12-multi-task/multi-task", "tiny", changes), cache.parent / "tasks" / "run", cache
    )
    result = read_result(cache.parent / "tasks" / "run")
    assert main.is_pretraining and [*result.branches["cloze"]] == ["1", "4"]
    assert result.branches["cloze"]["4"] == result.tasks["cloze"]
    assert result.branches["cloze"]["1"]["step"] == 1

"""Runs that learn from a teacher: how it is named, which are refused, and what is recorded and resumed."""

from types import SimpleNamespace

import numpy as np
import published
import pytest
from small_runs import runs

from experiments.cli.dry_run import step_cost
from experiments.cli.settings import TEACHER, given_changes, given_points
from experiments.runs import provenance
from experiments.runs.run import Run
from experiments.runs.stages import stages, stages_of
from experiments.study.registry import build
from lm.config.base import SettingError
from lm.sharding import make_mesh, named
from lm.train.loop import PeriodicActions
from lm.train.runtime.records import records

__all__ = ["runs"]
ROW = "bert/no-nsp"
PRETRAINED = {"tuning.mixtures": (), "tuning.heads": (), "finetuning.steps": 0}
WIDER = {"vocab_size": 512, "d_model": 32, "attention.num_heads": 4}
QUIET = SimpleNamespace(
    **dict.fromkeys(("say", "complain", "start", "resumed", "advance", "first_step_done"), lambda *_: None)
)


def taught(runs, teacher, row=ROW, **settings):
    """The settings of a row whose teacher is named as on a command line."""
    given = given_changes([row], "tiny", settings | {TEACHER: str(teacher)}, None, "", runs)
    return build(row, "tiny", PRETRAINED | given)


@pytest.fixture(scope="module")
def bert(runs):
    """A published encoder whose output is as wide as that of the rows, with another tokenizer."""
    return published.write("bert", runs / "bert", vocab_size=512)


def pretraining_of(runs, experiment, folder):
    found = stages(experiment, runs / "tiny" / folder / "seed-0", runs / "cache")
    return next(stage for stage in found if stage.is_pretraining and stage.is_compared)


def test_a_teacher_is_named_by_its_files_and_is_part_of_what_a_stage_is_trained_with(runs, bert):
    experiment = taught(runs, bert)
    name = experiment.distillation.teacher
    for again in (name, runs / "starts" / name):
        assert taught(runs, again) == experiment
    other = published.write("bert", runs / "other", seed=1, vocab_size=512)
    without = build(ROW, "tiny", PRETRAINED)
    each = [experiment, taught(runs, other), taught(runs, bert, **{"distillation.soft": 1.0}), without]
    found = [pretraining_of(runs, experiment, "folders") for experiment in each]
    assert len({stage.folder for stage in found}) == len(each)
    assert [stage.relevant_settings.distillation.teacher == name for stage in found] == [
        True,
        False,
        True,
        False,
    ]
    assert found[0].training_spec().teacher_config is not None
    assert found[-1].training_spec().teacher_config is None
    lengths = SimpleNamespace(lengths=found[0].lengths)
    inputs = SimpleNamespace(batches={found[0].name: lengths})
    assert found[0].step_flops(inputs) > found[-1].step_flops(inputs)  # the teacher's forward pass
    assert step_cost(found[0]) == found[0].step_flops(inputs), "a dry run counts it too"


def test_the_teachers_of_a_grid_are_named_as_by_the_option(runs, bert):
    other = published.write("bert", runs / "other", seed=1, vocab_size=512)
    points = given_points([ROW], "tiny", [f"{TEACHER}={bert},{other}"], {}, {}, "", runs)
    assert [build(ROW, "tiny", PRETRAINED | point.changes) for point in points] == [
        taught(runs, teacher) for teacher in (bert, other)
    ]


@pytest.mark.parametrize(
    ("family", "shape", "row", "message"),
    [
        ("bert", {}, ROW, "predicts 300 tokens, and model.vocab_size=512"),
        ("gpt2", {}, ROW, r"is a decoder \(causal\), and it should be an encoder \(bidirectional\)"),
        ("bert", WIDER, ROW, "cosine=1.0 compares .* has d_model=32"),
        ("bert", {}, "electra/base", "model.heads=.* should be without replaced-token"),
    ],
)
def test_a_teacher_that_predicts_other_things_is_refused(runs, family, shape, row, message):
    experiment = taught(runs, published.write(family, runs / f"{family}-{len(shape)}", **shape), row)
    with pytest.raises(SettingError, match=f"distillation.*{message}"):
        Run(experiment, runs / "tiny" / "refused", runs / "cache").check(print)


def test_another_vocabulary_is_refused_with_both_and_the_mend_before_text_is_encoded(runs, bert, monkeypatch):
    monkeypatch.setattr("experiments.runs.prepare.encoded_split", None)
    message = "has the vocabulary [0-9a-f]{12} in .*, and data.vocabulary='unigram' is .*--start MODEL"
    with pytest.raises(SettingError, match=message):
        Run(taught(runs, bert), runs / "tiny" / "refused", runs / "cache").check(print)


def test_a_teacher_that_is_gone_is_refused_with_what_to_name(runs):
    experiment = build(ROW, "tiny", PRETRAINED | {TEACHER: "encoder-0123456789abcdef"})
    with pytest.raises(SettingError, match="'encoder-0123456789abcdef' is missing in .*starts: name a"):
        Run(experiment, runs / "tiny" / "refused", runs / "cache").check(print)


@pytest.mark.slow
@pytest.mark.parametrize("row", [ROW, "gpt/base"])
def test_a_student_of_a_run_resumes_bit_for_bit_and_its_teacher_stays_as_it_was(runs, row, monkeypatch):
    folder, cache = runs / "tiny" / row / "seed-0", runs / "cache"
    Run(build(row, "tiny", PRETRAINED), folder, cache).train(QUIET)
    layers = {"model.num_encoder_layers": 1} if row == ROW else {"model.num_decoder_layers": 1}
    experiment = taught(runs, folder, row, **layers)
    (teacher,) = stages_of(runs / "starts" / experiment.distillation.teacher)
    before = named(teacher.restore_transformer(make_mesh(experiment.mesh)))

    def arrays(each):
        (stage,) = stages_of(each)
        return stage, named(stage.restore_state(make_mesh(experiment.mesh)))

    whole = Run(experiment, runs / "tiny" / "whole" / row / "seed-0", cache)
    whole.train(QUIET)
    stage, expected = arrays(whole.folder)
    losses = [line for line in records(stage.folder) if line["kind"] == "train"]
    assert all(line["soft_loss"] > 0 and line["cosine_distance"] > 0 for line in losses)
    recorded = provenance.read(stage.folder)["settings"]["distillation.teacher"]
    assert recorded == experiment.distillation.teacher

    def stopped(actions, state, step):
        on_step_end(actions, state, step)
        if step == 2:
            raise KeyboardInterrupt

    on_step_end = PeriodicActions.on_step_end
    stage.folder.rename(runs / f"put-away-{stage.folder.name}")
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(PeriodicActions, "on_step_end", stopped)
        Run(experiment, runs / "tiny" / "two" / row / "seed-0", cache).train(QUIET)
    Run(experiment, runs / "tiny" / "two" / row / "seed-0", cache).train(QUIET)
    again, found = arrays(runs / "tiny" / "two" / row / "seed-0")
    assert again.folder == stage.folder
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)
    after = named(teacher.restore_transformer(make_mesh(experiment.mesh)))
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value)

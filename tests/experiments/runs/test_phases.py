"""The phases of pre-training: objectives and masks one after the other, as if they were one training."""

import json
import re
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import small_corpus
from tiny import TINY
from torn_runs import followed

from experiments.cli.settings import parse_settings
from experiments.runs.checks import check_agreement, check_phases
from experiments.runs.phases import phase_settings, tokens_of_text
from experiments.runs.result import read_result
from experiments.runs.run import Run
from experiments.runs.scores import phases_to
from experiments.runs.stages import stages
from experiments.study.experiment import Experiment, PretrainingPhase
from experiments.study.overrides import check_overrides_are_read
from experiments.study.registry import build
from experiments.study.scales import SCALES
from experiments.study.words import setting_arguments
from lm import sharding
from lm.batch import Batch, Side
from lm.config.base import SettingError, changes, check_numbers, from_json, to_json
from lm.config.training import OptimizerConfig
from lm.objectives.denoising import OBJECTIVES
from lm.train.runtime.records import records

MLM, CLM = OBJECTIVES["masked-lm"], OBJECTIVES["causal-lm"]
SMALL = (
    SCALES["nano"]
    | TINY
    | {
        "model.dropout": 0.1,
        "pretraining.steps": 8,
        "pretraining.save_every": 2,
        "pretraining.optimizer.ema": 0.5,
        "finetuning.steps": 2,
        "finetuning.save_every": 1,
        "finetuning.log_every": 1,
    }
)
# a rate that differs at every step
LINEAR = {"pretraining.optimizer.schedule": "linear", "pretraining.optimizer.warmup_steps": 2}
AS_ENCODER = {"objective": MLM, "model.heads": (), "tuning.heads": ("acceptability",), **LINEAR}
AS_DECODER = {"tuning.heads": ("acceptability",), **LINEAR}
CAUSAL = PretrainingPhase(3 / 8, CLM, "causal")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """A cache that holds a small documentation corpus; and the scale ``tiny`` of all rows in these tests."""
    folder = tmp_path_factory.mktemp("runs") / "cache"
    small_corpus.prepare(folder)
    SCALES["tiny"] = SMALL
    yield folder
    del SCALES["tiny"]


def encoder(*phases, **changes):
    """The settings of a BERT with these phases before masked language modeling."""
    given = {path.replace("__", "."): value for path, value in changes.items()}
    return build("bert/base", "tiny", AS_ENCODER | {"pretraining.phases": phases} | given)


def decoder(*phases, **changes):
    """The settings of a GPT with these phases before causal language modeling."""
    given = {path.replace("__", "."): value for path, value in changes.items()}
    return build("gpt/base", "tiny", AS_DECODER | {"pretraining.phases": phases} | given)


def trained(experiment, cache, name, steps=0):
    """The stages of a run, and the train records of its pre-training."""
    every = followed(experiment, cache.parent / "tiny" / name / "seed-0", cache, steps)
    pretrained = [stage for stage in every if stage.is_pretraining]
    lines = [line for stage in pretrained for line in records(stage.folder) if line["kind"] == "train"]
    return every, lines


def last_state(stage):
    """The arrays of the last checkpoint of a stage, by name."""
    steps = stage.steps(sharding.make_mesh(stage.settings.mesh))
    with stage.checkpoints() as checkpoints:
        return sharding.named(checkpoints.restore(steps.abstract, stage.training.steps))


def assert_equal_arrays(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name], err_msg=name)


@pytest.fixture(scope="module")
def whole(cache):
    """A run without phases."""
    return trained(encoder(), cache, "whole")


@pytest.fixture(scope="module")
def causal_first(cache):
    """A run whose encoder is trained causally for 3 of 8 steps."""
    return trained(encoder(CAUSAL, tuning__branches=(0.25, 1.0)), cache, "causal-first")


# ---- one training


@pytest.mark.slow
def test_phases_of_one_objective_are_one_training_bit_for_bit(cache, whole):
    parts, lines = trained(encoder(PretrainingPhase(0.375, MLM)), cache, "parts")
    first, main, *_ = parts
    assert [(stage.name, stage.first_step, stage.training.steps) for stage in (first, main)] == [
        ("phase-1", 0, 3),
        ("pretraining", 3, 8),
    ]
    assert_equal_arrays(last_state(main), last_state(whole[0][0]))
    for name in ("loss", "learning_rate", "grad_norm"):
        assert [line[name] for line in lines] == [line[name] for line in whole[1]]
    assert [line["step"] for line in lines] == [*range(1, 9)]
    assert len({line["learning_rate"] for line in lines}) > 5


def test_a_phase_reads_on_where_the_one_before_ended(cache):
    experiment = encoder(CAUSAL)
    run = Run(experiment, cache.parent / "tiny" / "batches" / "seed-0", cache)
    inputs = run.check(lambda _: None)
    first, main, *_ = run.stages
    masked = inputs.batches["pretraining"](5, slice(None)).encoder
    causal = inputs.batches["phase-1"](5, slice(None)).encoder
    np.testing.assert_array_equal(masked.targets, causal.tokens)  # the text of a step is the same in both
    np.testing.assert_array_equal(
        causal.targets[:, :-1][causal.loss_weights[:, :-1] > 0],
        causal.tokens[:, 1:][causal.loss_weights[:, :-1] > 0],
    )
    assert first.settings.model.is_causal_encoder and not main.settings.model.is_causal_encoder


@pytest.mark.slow
@pytest.mark.parametrize("steps", [3, 5])
def test_a_run_that_is_torn_within_and_between_phases_comes_to_what_it_does_without(
    cache, causal_first, steps
):
    folder = cache.parent / f"torn-{steps}" / "row" / "seed-0"
    torn = followed(encoder(CAUSAL, tuning__branches=(0.25, 1.0)), folder, cache, steps)
    for one, other in zip(causal_first[0], torn, strict=True):
        assert one.folder != other.folder
        assert_equal_arrays(last_state(one), last_state(other))


@pytest.mark.slow
def test_an_optimiser_that_ends_with_its_phase_leaves_the_next_one_its_parameters_alone(cache):
    own = replace(encoder().pretraining.optimizer, learning_rate=0.5)
    every, lines = trained(encoder(PretrainingPhase(0.5, MLM, optimizer=own)), cache, "own")
    first, main, *_ = every
    rates = [line["learning_rate"] for line in lines]
    np.testing.assert_allclose(rates[:4], 500 * np.array(rates[4:]), rtol=1e-6)  # 0.5 and 0.001
    mesh = sharding.make_mesh(main.settings.mesh)
    begun = main.initial_state(main.steps(mesh))()
    assert int(begun.step) == 4
    fresh = main.steps(mesh).initial_state(main.settings.seed)
    assert_equal_arrays(sharding.named(begun.opt_state), sharding.named(fresh.opt_state))
    before = first.restore_state(mesh)  # the average of the parameters, since one is kept
    assert_equal_arrays(begun.params, before.params)


def test_a_phase_has_a_step_however_small_its_share(cache):
    small = (PretrainingPhase(0.01, MLM), PretrainingPhase(0.01, MLM), PretrainingPhase(0.97, MLM))
    assert encoder(*small).pretraining.phase_ends == (1, 2, 7, 8)


# ---- masks


@pytest.mark.slow
def test_a_causal_encoder_sees_nothing_that_follows_and_reads_both_ways_in_fine_tuning(causal_first):
    first, main, tuned, branch = causal_first[0]
    mesh = sharding.make_mesh(first.settings.mesh)
    tokens = np.arange(20, dtype=np.int32)[None] + 20
    others = np.where(np.arange(20) < 10, tokens, 7)
    for stage, is_causal in ((first, True), (main, False), (tuned, False), (branch, False)):
        model = stage.restore_transformer(mesh)
        before, after = (model.features(Batch(encoder=Side(tokens=x)))[:, :10] for x in (tokens, others))
        assert bool((np.asarray(before) == np.asarray(after)).all()) == is_causal
    assert branch.parent == first and (tuned.parent, branch.parent_step) == (main, 2)


@pytest.mark.slow
def test_a_run_that_is_causal_throughout_is_read_both_ways_when_tuned(cache):
    experiment = encoder(objective=CLM, pretraining__mask="causal")
    main, tuned = stages(experiment)
    assert main.settings.model.is_causal_encoder and not tuned.settings.model.is_causal_encoder
    always = stages(encoder(objective=CLM, model__attention__encoder_mask="causal"))
    assert always[0].folder == main.folder and always[1].settings.model.is_causal_encoder
    every, lines = trained(experiment, cache, "causal")
    assert lines[-1]["loss"] < lines[0]["loss"]


@pytest.mark.slow
def test_a_decoder_goes_on_from_an_encoder_with_all_that_it_and_its_optimiser_know(cache):
    every, lines = trained(decoder(PretrainingPhase(3 / 8, MLM, "bidirectional")), cache, "decoder")
    first, main, tuned = every
    assert [stage.settings.model.architecture for stage in every] == ["encoder", "decoder", "decoder"]
    saved, begun = last_state(first), main.initial_state(main.steps(sharding.make_mesh(main.settings.mesh)))()
    found = {name.replace(".decoder.", ".encoder."): x for name, x in sharding.named(begun).items()}
    assert_equal_arrays(found, saved)
    assert [line["step"] for line in lines] == [*range(1, 9)]


def test_a_prefix_decoder_goes_on_from_a_causal_one_which_rows_share(cache):
    constant = {"model__positions__kind": "rotary", "pretraining__optimizer__schedule": "constant"}
    causal = decoder(pretraining__steps=3, **constant)
    prefix = decoder(
        PretrainingPhase(3 / 8, CLM, "causal"),
        objective=OBJECTIVES["prefix-lm"],
        model__architecture="prefix-decoder",
        **constant,
    )
    first, main, *_ = stages(prefix)
    assert first.folder == stages(causal)[0].folder
    assert main.settings.model.architecture == "prefix-decoder"


# ---- settings


THREE = (
    PretrainingPhase(0.25, CLM, "causal"),
    PretrainingPhase(0.25, MLM, optimizer=OptimizerConfig(name="adamw", learning_rate=0.1)),
    PretrainingPhase(0.25, OBJECTIVES["span-masked-lm"]),
)


@pytest.mark.parametrize("has_start", [False, True])
def test_a_phase_is_the_last_one_of_a_pretraining_that_ends_there(cache, has_start):
    started = {"start__steps": 3, "start__objective": MLM} if has_start else {}
    experiment = encoder(*THREE, **started)
    every = stages(experiment)
    assert every[0].is_start_pretraining == has_start
    for index in range(4):
        shorter = stages(phase_settings(experiment, index))
        count = index + 1 + has_start
        assert [stage.folder for stage in shorter[:count]] == [stage.folder for stage in every[:count]]
    every = every[has_start:]
    assert [stage.settings.pretraining.optimizer.learning_rate for stage in every[:4]] == [
        0.1,
        0.1,
        0.001,
        0.001,
    ]
    assert [stage.settings.pretraining.optimizer_start for stage in every[:4]] == [0, 0, 4, 4]
    assert [stage.step_spec().optimizer.decay_end for stage in every[2:4]] == [4, 4]


def test_the_plateau_may_be_left_in_any_phase_that_hides_tokens_and_in_no_start(cache):
    copies = PretrainingPhase(0.25, OBJECTIVES["copy"])
    experiment = decoder(copies, *[PretrainingPhase(0.25, CLM)] * 2, start__steps=3, start__objective=CLM)
    start, *phases = [stage for stage in stages(experiment) if stage.is_pretraining]
    assert start.is_start_pretraining and len(phases) == 4
    assert phases_to(phases[-1]) == [stage.folder for stage in phases[1:]]


def test_masks_of_earlier_phases_are_seen_from_the_model_of_the_last_one(cache):
    experiment = encoder(PretrainingPhase(0.5, MLM), objective=CLM, pretraining__mask="causal")
    first, main, *_ = stages(experiment)
    assert not first.settings.model.is_causal_encoder and main.settings.model.is_causal_encoder
    assert [stage.folder for stage in stages(main.settings)[:2]] == [first.folder, main.folder]


def test_equal_first_phases_are_trained_once_and_others_are_not(cache):
    one, other = (stages(encoder(CAUSAL, objective=last))[:2] for last in (MLM, OBJECTIVES["span-masked-lm"]))
    assert one[0].folder == other[0].folder and one[1].folder != other[1].folder
    longer = stages(encoder(replace(CAUSAL, share=0.5)))
    assert not {stage.folder for stage in longer[:2]} & {stage.folder for stage in one}


@pytest.mark.parametrize(
    ("phase", "reason"),
    [
        ({"share": True}, "share=True should be of type float"),
        ({"share": 0.5, "mask": "both"}, "mask='both' is not a choice"),
        ({"share": 0.5, "objective": "causal"}, "there is no objective 'causal'; did you mean 'causal-lm'"),
    ],
)
def test_what_is_wrong_in_a_phase_is_said_of_the_setting_and_the_phase(phase, reason):
    text = json.dumps(phase)
    with pytest.raises(SettingError, match=re.escape(f"pretraining.phases={text}: {reason}")):
        PretrainingPhase.parse(text)


def test_settings_with_phases_are_written_read_and_given_as_words():
    experiment = encoder(*THREE)
    assert from_json(type(experiment), to_json(experiment)) == experiment
    assert tuple(map(PretrainingPhase.parse, map(str, THREE))) == THREE
    given = {"pretraining.phases": THREE}
    assert parse_settings(setting_arguments(given), [*given]) == given
    named = PretrainingPhase.parse('{"share": 0.25, "objective": "causal-lm", "mask": "causal"}')
    assert named == THREE[0]


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        (
            {"optimizer": {"muon_rms": 0.3}},
            r"phases\[0\]: optimizer.muon_rms is read by muon, not",
        ),
        ({"optimizer": {"beta1": 0.5}}, r"phases\[0\]: optimizer.beta1 is read by adamw"),
        ({"objective": {"noise": "suffix", "rate": 0.3}}, r"phases\[0\]: objective.rate is read"),
        ({"optimizer": {"name": "muon", "muon_rms": 0.3, "beta1": 0.5}}, None),
        ({"objective": "causal-lm"}, None),  # a name gives all settings of its objective
    ],
)
def test_a_setting_in_a_phase_that_nothing_reads_is_refused(inner, message):
    phase = PretrainingPhase.parse(json.dumps({"share": 0.5, **inner}))
    experiment = changes(Experiment(), {"pretraining.phases": (phase,)})
    with nullcontext() if message is None else pytest.raises(SettingError, match=message):
        check_overrides_are_read([experiment], ["pretraining.phases"])


def test_a_number_in_a_phase_that_overflows_is_refused_by_its_path():
    phase = PretrainingPhase.parse('{"share": 0.5, "optimizer": {"learning_rate": 1e300}}')
    experiment = changes(Experiment(), {"pretraining.phases": (phase,)})
    with pytest.raises(SettingError, match=r"pretraining.phases\[0\].optimizer.learning_rate=1e\+300"):
        check_numbers(experiment)


@pytest.mark.parametrize("phase", [False, True])
def test_a_late_decay_that_begins_while_the_rate_warms_up_is_refused_before_a_run(phase):
    optimizer = OptimizerConfig(schedule="warmup-stable-decay", warmup_steps=10, decay_start=9)
    new = {"pretraining.optimizer": optimizer}
    if phase:
        new = {"pretraining.phases": (PretrainingPhase(0.5, optimizer=optimizer),)}
    with pytest.raises(SettingError, match="optimizer.decay_start=9 should be at least pretraining"):
        check_agreement(changes(Experiment(), new))


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        ((PretrainingPhase(1.0, MLM),), "below 1"),
        ((PretrainingPhase(0.0, MLM),), "above 0"),
        ((PretrainingPhase(0.1, MLM),) * 8, r"pretraining\.steps=8 should be at least 9"),
    ],
)
def test_shares_that_leave_a_phase_without_steps_are_refused(phases, message):
    with pytest.raises(SettingError, match=message):
        encoder(*phases)


@pytest.mark.parametrize(
    ("row", "changes", "message"),
    [
        (
            encoder,
            {"phases": (PretrainingPhase(0.5, CLM),)},
            r"phases\[0\].mask='bidirectional' shows an encoder",
        ),
        (encoder, {"objective": CLM}, "pretraining.mask='bidirectional' shows an encoder"),
        (
            encoder,
            {"phases": (PretrainingPhase(0.5, OBJECTIVES["replace-spans"]),)},
            r"^pretraining.phases\[0\]: objective.targets='sentinels' does not suit model.architecture",
        ),
        (encoder, {"phases": (PretrainingPhase(0.5, CLM, "prefix"),)}, "an encoder may be 'causal'"),
        (
            decoder,
            {"pretraining__mask": "bidirectional", "objective": MLM},
            "set model.architecture='encoder'",
        ),
        (
            decoder,
            {"phases": (PretrainingPhase(0.25, CLM), PretrainingPhase(0.25, MLM, "bidirectional"))},
            "should come before",
        ),
        (
            decoder,
            {"phases": (PretrainingPhase(0.5, MLM, "bidirectional"),), "tuning__branches": (0.25, 1.0)},
            "should not lie in phases that train an encoder",
        ),
    ],
)
def test_masks_that_suit_neither_the_objective_nor_the_model_are_refused_by_name(row, changes, message):
    changes = dict(changes)
    experiment = row(*changes.pop("phases", ()), **changes)
    with pytest.raises(SettingError, match=message):
        check_phases(experiment)


@pytest.mark.parametrize(("fraction", "refused"), [(0.5, True), (0.55, True), (0.75, False)])
def test_a_branch_is_refused_if_the_phase_whose_checkpoint_it_tunes_trains_an_encoder(fraction, refused):
    phase = PretrainingPhase(0.5, MLM, "bidirectional")
    experiment = decoder(phase, tuning__branches=(fraction, 1.0))  # 0.55 of 8 steps rounds to 4, as 0.5
    tuned = [stage for stage in stages(experiment) if not stage.is_pretraining]
    assert refused == any(not stage.parent.settings.model.has_decoder for stage in tuned)
    message = rf"branches=.* should not lie in phases that train an encoder, as \[{fraction}\] do"
    with pytest.raises(SettingError, match=message) if refused else nullcontext():
        check_phases(experiment)


def test_a_mask_that_the_model_has_already_is_refused():
    with pytest.raises(SettingError, match="is the mask that the model has already: leave it out"):
        check_phases(decoder(PretrainingPhase(0.5, CLM, "causal")))


def test_an_encoder_decoder_keeps_its_masks():
    phase = PretrainingPhase(0.5, MLM, "causal")
    experiment = build("t5/1-baseline/baseline", "nano", {"pretraining.phases": (phase,)})
    with pytest.raises(SettingError, match="does not suit model.architecture='encoder-decoder'"):
        check_phases(experiment)


# ---- the start of encoders


def test_a_causal_start_of_an_encoder_is_the_causal_phase_of_as_many_steps():
    started = encoder(start__steps=3, start__objective=CLM)
    first, main, *_ = stages(started)
    assert first.is_start_pretraining and first.settings.model.is_causal_encoder
    assert main.parent == first and not main.settings.model.is_causal_encoder
    alone = stages(encoder(objective=CLM, pretraining__mask="causal", pretraining__steps=3))[0]
    assert first.folder == alone.folder


def test_an_encoder_has_a_start_if_its_objective_is_of_encoders_and_is_told_otherwise():
    started = encoder(start__steps=3, start__objective=MLM)
    first, main, *_ = stages(started)
    assert first.is_start_pretraining and main.parent == first and first.settings.objective == MLM
    plain = encoder(start__steps=3)  # the scale's start copies, which encoders do not
    assert [stage.folder for stage in stages(plain)] == [stage.folder for stage in stages(encoder())]


# ---- costs


@pytest.mark.slow
def test_costs_count_each_step_of_each_phase_once(cache, whole, causal_first):
    folder = cache.parent / "tiny"
    result, without = (read_result(folder / name / "seed-0") for name in ("causal-first", "whole"))
    assert result.flops == pytest.approx(without.flops)
    pretrained = [stage for stage in causal_first[0] if stage.is_pretraining]
    lines = [line for stage in pretrained for line in records(stage.folder)]
    learnt = [line["content_tokens"] for line in lines if line["kind"] == "train"]
    assert len(learnt) == 8 and result.content_tokens == pytest.approx(sum(learnt), abs=2)
    causal, masked = (result.phase_costs[end] for end in ("3", "8"))
    assert causal["content_tokens"] == pytest.approx(sum(learnt[:3]), abs=2)
    assert causal["content_tokens"] + masked["content_tokens"] == pytest.approx(sum(learnt), abs=3)
    assert causal["flops"] + masked["flops"] == pytest.approx(result.flops)
    assert result.held_out_loss == records(pretrained[-1].folder)[-1]["loss"]


def test_the_tokens_that_a_row_reads_are_those_of_its_texts_in_all_phases():
    spans = {
        "objective": OBJECTIVES["span-corruption"],
        "objective.rate": 0.25,
        "objective.mean_span_length": 5,
    }
    name, rows = "t5/1-baseline/baseline", 300 * 32  # of 64 inputs; 63 and 79 tokens of text give as many
    assert tokens_of_text(build(name, "nano")) == rows * 63
    assert tokens_of_text(build(name, "nano", spans)) == rows * 79
    # the X denoisers of UL2 leave little of a text in the inputs, and so read the longest ones
    assert tokens_of_text(build("now/3-denoisers/ul2", "nano")) > rows * 79
    half = {"pretraining.phases": (PretrainingPhase(0.5, OBJECTIVES["span-corruption"]),)}
    assert rows * 63 < tokens_of_text(build(name, "nano", half)) < rows * 79


def test_every_branch_starts_from_a_step_that_its_phase_keeps(cache):
    experiment = encoder(
        replace(CAUSAL, share=0.5), pretraining__steps=100, tuning__branches=(0.001, 0.3, 1.0)
    )
    found = stages(experiment, cache.parent / "rounded", cache)
    finetunings = [stage for stage in found if stage.has_head]
    assert [stage.parent_step for stage in finetunings] == [100, 30, 1]
    for stage in finetunings:
        assert stage.parent_step in stage.parent.branch_steps

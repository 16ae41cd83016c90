"""Settings at their borders and beyond: refused in a sentence, or a run that can be started."""

import typing
from dataclasses import replace

import pytest
from computed import ROWS, built, computed, kind_of, small_corpus_and_scale, without_none
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from experiments.cli.generate import generate
from experiments.runs.checks import check_device_memory
from experiments.runs.run import Run
from experiments.study.changes import apply
from experiments.study.experiment import Experiment, PretrainingPhase
from experiments.study.overrides import check_overrides_are_read
from experiments.study.registry import build
from lm.config.base import SettingError, leaves
from lm.config.training import OptimizerConfig
from lm.objectives.denoising import OBJECTIVES

WHOLE = (-(2**63), -1, 0, 1, 2, 3, 2**20, 2**31 - 1, 2**31, 2**32 - 1, 2**64)
REAL = (-1.0, 0.0, 1e-45, 1e-30, 0.5, 1.0, 2.0, 1e10, 3e38, 1e300, float("inf"), float("nan"))
TEXT = ("", "nothing", "../x", "a + b", "text:", "tfds:", "unigram:nothing", "x.model", "\0")
LARGE = 1_000  # numbers from here on are checked, and no batch of that size is made
# A vocabulary of another size is trained anew, which takes seconds.
TRAINED = ("data.vocabulary", "data.unknown", "data.corpus")


def absurd(path):
    """Values at the borders of a setting's type and beyond."""
    kind, optional = without_none(kind_of(path))
    values = [None] * optional
    if typing.get_origin(kind) is tuple:
        one, may_lack = without_none(typing.get_args(kind)[0])
        items = [None] * may_lack + [*singles(one)]
        return [*values, (), *((item,) for item in items), tuple(items[:2]), tuple(items[:1]) * 2]
    return [*values, *singles(kind)]


def singles(kind):
    """Values of a type that is no tuple."""
    if typing.get_origin(kind) is typing.Literal:
        return typing.get_args(kind)
    phases = tuple(PretrainingPhase(share, OBJECTIVES["masked-lm"], "prefix") for share in REAL)
    return {bool: (False, True), int: WHOLE, float: REAL, str: TEXT, PretrainingPhase: phases}[kind]


def is_small(value):
    """Whether a run with this value can be looked at in a moment."""
    values = value if isinstance(value, tuple) else (value,)
    return not any(isinstance(each, int | float) and abs(each) >= LARGE for each in values)


PATHS = [path for path, _ in leaves(Experiment())]
CASES = [(path, value) for path in PATHS for value in absurd(path)]
QUICK = [case for case in CASES if not case[0].startswith(TRAINED)]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    with small_corpus_and_scale(tmp_path_factory.mktemp("runs") / "cache") as folder:
        yield folder


def try_out(row, path, value, cache):
    """Start a run as far as its first step, if it is not refused: nothing but SettingError is raised."""
    try:
        changed = apply(built(row), {path: value})
        check_overrides_are_read([changed], [path])
        Run(changed, cache.parent / "new", cache).check(lambda line: None)
    except SettingError as error:
        assert str(error)
        return
    if is_small(value):
        computed(changed, cache)


@pytest.mark.parametrize("row", [pytest.param("lstm", marks=pytest.mark.slow), "t5"])
@settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(case=st.sampled_from(QUICK))
def test_a_setting_at_its_borders_is_refused_or_can_be_trained_with(row, case, cache):
    try_out(row, *case, cache)


@pytest.mark.slow
@pytest.mark.parametrize("group", sorted({path.partition(".")[0] for path in PATHS}))
@pytest.mark.parametrize("row", ROWS)
def test_every_setting_at_all_of_its_borders_is_refused_or_can_be_trained_with(row, group, cache):
    for path, value in CASES:
        if path.partition(".")[0] == group:
            try_out(row, path, value, cache)


@pytest.mark.parametrize(
    ("row", "path", "value", "words"),
    [
        ("gpt", "data.held_out_lengths", (1, 100_000), r"data\.held_out_lengths="),
        ("gpt", "data.held_out_lengths", (), r"data\.held_out_lengths=\(\)"),
        ("gpt", "data.held_out_lengths", (0,), r"data\.held_out_lengths=\(0,\)"),
        ("gpt", "data.inputs_length", 2**31, r"data\.inputs_length=2147483648"),
        ("gpt", "data.workers", 10**6, r"data\.workers=1000000"),
        ("gpt", "pretraining.optimizer.beta1", 1.0, r"optimizer\.beta1=1.0"),
        ("gpt", "pretraining.optimizer.beta2", 1.0, r"optimizer\.beta2=1.0"),
        (
            "gpt",
            "pretraining.optimizer.beta1",
            -0.1,
            r"optimizer\.beta1=-0.1",
        ),
        ("gpt", "pretraining.optimizer.epsilon", 0.0, r"optimizer\.epsilon=0.0"),
        (
            "gpt",
            "pretraining.optimizer.learning_rate",
            0.0,
            r"optimizer\.learning_rate=0.0",
        ),
        ("gpt", "pretraining.optimizer.clip_norm", -1.0, r"optimizer\.clip_norm=-1.0"),
        ("gpt", "pretraining.steps", 2**31, r"pretraining\.steps=2147483648"),
        ("gpt", "finetuning.batch_size", 2**30, r"finetuning\.batch_size=1073741824"),
        ("gpt", "tuning.adapters", 0.001, r"tuning\.adapters=0.001"),
        ("gpt", "tuning.lora.rank", 2**31, r"lora|model needs"),
        ("gpt", "model.embedding.d_embed", 0, r"model\.embedding\.d_embed=0"),
        ("gpt", "model.norm.epsilon", 0.0, r"model\.norm\.epsilon=0.0"),
        (
            "t5",
            "model.attention.num_heads",
            2**31,
            r"model\.attention\.num_heads=2147483648",
        ),
        (
            "t5",
            "model.positions.relative_buckets",
            1,
            r"model\.positions\.relative_buckets=1",
        ),
        (
            "t5",
            "model.positions.relative_buckets",
            2**20,
            r"model\.positions\.relative_buckets=1048576",
        ),
        ("lstm", "model.output.logits", "none", "objective.targets='everything'"),
        ("gpt", "ensemble.members", 10**9, r"ensemble\.members=1000000000"),
        ("t5", "objective.rate", 0.999999, r"objective\.rate=0.999999"),
        ("t5", "mixing.temperature", 1e-6, r"mixing\.temperature=1e-06"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_is_read(row, path, value, words, cache):
    with pytest.raises(SettingError, match=words):
        Run(apply(built(row), {path: value}), cache.parent / "new", cache).check(lambda line: None)


def test_a_batch_of_skip_gram_that_no_memory_holds_is_refused(cache):
    changed = apply(built("lstm"), {"vectors.epochs": 1, "vectors.batch": 2**31})
    with pytest.raises(SettingError, match=r"vectors\.batch=2147483648, .* GiB"):
        Run(changed, cache.parent / "new", cache).check(lambda line: None)


def test_long_rows_need_the_memory_of_the_host_for_their_tokens_and_no_device_for_their_states(monkeypatch):
    lstm = build("history/lstm", "nano", {"pretraining.steps_per_row": 1_000})
    rows, length = lstm.pretraining.batch_size, lstm.data.inputs_length
    states = rows * length * 1_000 * lstm.model.d_model * 4
    sizes = lstm.mesh.sizes(1)
    monkeypatch.setattr("lm.train.checks.device_memory", lambda: states // 2)
    check_device_memory(lstm, sizes)
    monkeypatch.setattr("lm.train.checks.host_memory", lambda: rows * length * 1_000)
    with pytest.raises(SettingError, match=r"pretraining\.steps_per_row=1000: .* GiB of the host"):
        check_device_memory(lstm, sizes)


def test_rotary_scalings_have_a_range():
    rotary = build("positions/rotary", "nano").model.positions.rotary
    with pytest.raises(SettingError, match="beta_slow=40.0.*model.positions.rotary.beta_fast=32.0"):
        replace(rotary, scaling="yarn", beta_slow=40.0)
    with pytest.raises(SettingError, match=r"model\.positions\.rotary\.base=0.0"):
        replace(rotary, base=0.0)


def test_each_rate_of_forgetting_is_below_1():
    for name in ("beta1", "beta2", "momentum", "muon_momentum", "ema"):
        with pytest.raises(SettingError, match=f"optimizer.{name}=1.0 should be at least 0 and below 1"):
            OptimizerConfig(**{name: 1.0})


def test_a_seed_of_sampling_is_refused_as_one_of_a_run_is(tmp_path):
    with pytest.raises(SettingError, match="--seed=-5"):
        generate(tmp_path, ("a text",), seed=-5)

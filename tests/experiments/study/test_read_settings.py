"""Every setting changes what is computed, or is refused where it is given by hand."""

import typing
from dataclasses import dataclass

import pytest
from computed import ROWS, built, computed, kind_of, small_corpus_and_scale, without_none
from small_models import CONFIGS

from experiments.cli.app import parse
from experiments.study import registry
from experiments.study.changes import apply
from experiments.study.experiment import Experiment, PretrainingPhase
from experiments.study.overrides import check_overrides_are_read, effective_overrides
from experiments.study.registry import REGISTRY, build, check_row, find
from experiments.study.scales import SCALES
from experiments.study.table import make_table
from lm.config.base import (
    ABOVE_0,
    GIVEN,
    SettingError,
    change,
    check_used,
    conditions,
    from_json,
    leaves,
    set_choices,
    setting,
    to_json,
    unused_settings,
)
from lm.config.model import ModelConfig
from lm.nn.presets import PRESETS
from lm.objectives.denoising import OBJECTIVES

# Settings of how a run is done: its numbers are the same, so that no other setting decides who reads them.
HOW = {
    "data.corrupt_records": "what is done about a damaged record; there is none",
    "data.workers": "who prepares batches",
    "data.encoders": "who encodes text ahead",
    "data.cache_size": "how much encoded text is kept",
    "model.attention.implementation": "which kernel computes the same attention",
    "model.compile.layers": "how the stack is compiled",
    "model.compile.remat": "what the backward pass computes again",
    "model.compile.saved": "what it need not compute again",
    "model.compile.offloaded": "what waits for it in the host's memory",
    "pretraining.microbatches": "in how many parts a batch is computed",
    "pretraining.keep_hours": "which checkpoints are kept",
    "pretraining.log_every": "how often numbers are written",
    "finetuning.microbatches": "in how many parts a batch is computed",
    "finetuning.keep_hours": "which checkpoints are kept",
    "finetuning.log_every": "how often numbers are written",
    "guard.non_finite": "what is done about a loss that is not finite; there is none",
    "guard.in_a_row": "when a run that leaves out updates is ended",
    "guard.failed_save": "what is done about a bad disk",
    **{
        f"mesh.{axis}": "which device computes what"
        for axis in ("slice", "data", "fsdp", "expert", "sequence", "tensor")
    },
}
GIVEN_OTHERWISE = {"start.model": "by --start", "distillation.teacher": "as the name of a model"}
# Second values that are not found by their type alone, the first that can be had in a row.
OTHERS = {
    "data.corpus": ("documentation/libraries",),
    "data.vocabulary": ("bytes", "bpe"),
    "data.held_out_lengths": ((1, 2),),
    "data.streams": (1, 2),
    "data.held_out_documents": (2,),
    "model.vocab_size": (640,),
    "model.special.eos": (2, None),
    "model.sparsity.layer_windows": ((3,),),
    "model.encoder.layer_windows": ((3,),),
    "model.published": ("{}",),
    "model.heads": (("backward",), ("pooler",), ("replaced-token",)),
    "tuning.mixtures": (("extract",),),
    "tuning.heads": (("follows",),),
    "tuning.branches": ((0.5, 1.0),),
    "tuning.lora.matrices": (("mlp",),),
    "model.lora.matrices": (("mlp",),),
    "model.attention.num_key_value_heads": (1,),
    "model.mlp.bias": (False, True),
    "model.attention.qkv_bias": (False, True),
    "model.encoder.num_heads": (1,),
    "objective.mixture": ("ul2", "fill-in-the-middle-lm"),
    "start.objective.mixture": ("ul2",),
    "pretraining.phases": tuple(
        (PretrainingPhase(0.5, OBJECTIVES[name]),) for name in ("causal-lm", "masked-lm", "prefix-lm")
    ),
    "pretraining.optimizer.factor_from": (8,),
    "finetuning.optimizer.factor_from": (8,),
}


def others(path, value):
    """Other values that a setting may have, by its type."""
    if path in OTHERS:
        return OTHERS[path]
    kind, _ = without_none(kind_of(path))
    if typing.get_origin(kind) is typing.Literal:
        return tuple(choice for choice in typing.get_args(kind) if choice != value)
    if kind is bool:
        return (not value,)
    if kind is int:
        return tuple(number for number in (2 * (value or 1), (value or 0) + 1, 1, 2, 3) if number != value)
    if kind is float:
        return ((value or 0.5) / 2, 0.25)
    raise AssertionError(f"{path} of type {kind} needs another value in OTHERS")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    with small_corpus_and_scale(tmp_path_factory.mktemp("runs") / "cache") as folder:
        yield folder


def effect(row, path, cache, before):
    """Why a setting, changed alone, is refused in a row; "" if it changes what is computed there.

    AssertionError if it is taken and changes nothing. ``before``: what is computed without it.
    """
    experiment, refused, without_effect = built(row), "", []
    for value in others(path, dict(leaves(experiment))[path]):
        try:
            changed = apply(experiment, {path: value})
            check_overrides_are_read([changed], [path])
            after = computed(changed, cache)
        except SettingError as error:
            refused = refused or str(error)
            continue
        if after != before:
            return ""
        without_effect.append(value)
    assert not without_effect, f"{path}={without_effect} is taken and changes nothing in {row}"
    return refused


PATHS = [path for path, _ in leaves(Experiment()) if path not in HOW and path not in GIVEN_OTHERWISE]
GROUPS = sorted({path.partition(".")[0] for path in PATHS})


@pytest.mark.parametrize("row", ["lstm", pytest.param("ngram", marks=pytest.mark.slow)])
def test_a_setting_changed_alone_changes_what_is_computed_or_is_refused(row, cache):
    """A third of what most rows read; the slow tests take all settings and rows."""
    slow = ("model.d", "model.n", "data.vocabulary", "vectors", "model.l", "model.e", "tuning", "finetuning")
    before = computed(built(row), cache)
    quick = [path for path in PATHS if not path.startswith(slow)]
    for path in quick[::3]:
        effect(row, path, cache, before)


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("row", ROWS)
def test_each_setting_changed_alone_in_each_row_changes_what_is_computed_or_is_refused(row, group, cache):
    before = computed(built(row), cache)
    for path in PATHS:
        if path.partition(".")[0] == group:
            effect(row, path, cache, before)


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
def test_what_is_refused_would_have_changed_nothing(row, cache):
    experiment = built(row)
    before = computed(experiment, cache)
    for path in unused_settings(experiment, PATHS):
        for value in others(path, dict(leaves(experiment))[path])[:1]:
            try:
                changed = computed(apply(experiment, {path: value}), cache)
            except SettingError:
                continue
            assert changed == before, f"{path}={value} is refused in {row}, where it matters"


BY_NAME = {"model.compile.saved", "model.compile.offloaded"}  # of HOW, and read with another policy of remat
IDLE = {  # of HOW, in these rows: what they are of is not there
    "lstm": {"model.attention.implementation", *(path for path in HOW if path.startswith("finetuning."))},
    "ngram": {path for path in HOW if path.startswith(("model.", "pretraining.", "finetuning."))},
}


@pytest.mark.parametrize("row", ROWS)
def test_a_setting_of_how_a_run_is_done_is_there_and_is_taken_wherever_it_is_done_so(row, cache):
    assert {*HOW, *GIVEN_OTHERWISE} <= {path for path, _ in leaves(Experiment())}
    assert unused_settings(built(row), HOW).keys() == IDLE.get(row, set()) | BY_NAME


# ---- rows


@pytest.mark.slow
def test_a_row_changes_nothing_that_it_does_not_read():
    for name in (name for name, row in REGISTRY.items() if not row.needs):
        check_row(name, "nano")


@pytest.mark.slow
@pytest.mark.parametrize("scale", sorted({*SCALES} - {"nano"}))
def test_a_row_changes_nothing_at_any_scale_that_it_does_not_read(scale):
    for name in (name for name, row in REGISTRY.items() if not row.needs):
        check_row(name, scale)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_family_sets_nothing_that_its_models_do_not_read(name):
    from experiments.study.presets import family

    paths = [path.removeprefix("model.") for path in family(name)]
    assert unused_settings(PRESETS[name], paths) == {}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_longest_row_is_read_by_exactly_the_models_whose_rows_it_limits(name):
    unused = unused_settings(CONFIGS[name], ["positions.max_length"])
    assert (not unused) == CONFIGS[name].has_max_length


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            registry.REGISTRY["bert/base"].changes | {"start.steps": 100},
            "start.steps",
        ),
        (registry.REGISTRY["gpt/base"].changes | {"objective.rate": 0.37}, "objective.rate is read by"),
        (registry.REGISTRY["bert/base"].changes | {"start.steps": 0}, "start.steps"),
        (
            registry.REGISTRY["gpt/base"].changes | {"generator_share": 0.5},
            "generator_share",
        ),
        (
            {"finetuning.steps": 0, "tuning.adapters": 0.5},
            "tuning.adapters.*finetuning.steps",
        ),
    ],
)
def test_a_row_of_ones_own_that_sets_what_it_does_not_read_is_refused(changes, words, restored_registry):
    registry.add_table(make_table("own", "", {"base": registry.REGISTRY["gpt/base"].changes, "row": changes}))
    with pytest.raises(SettingError, match=words):
        check_row("own/row", "nano")


def test_a_row_that_leaves_out_a_phase_of_another_keeps_what_that_says_of_it(restored_registry):
    bert = registry.REGISTRY["bert/base"].changes
    registry.add_table(make_table("own", "", {"base": bert, "row": bert | {"pretraining.steps": 0}}))
    check_row("own/row", "nano")


# ---- what is given on the command line


@pytest.mark.parametrize(
    ("row", "words", "said"),
    [
        (
            "t5/1-baseline/baseline",
            "--pretraining.optimizer.beta1 0.9",
            "pretraining.optimizer.beta1.*pretraining.optimizer.name=adamw",
        ),
        (
            "bert/base",
            "--start.steps 100",
            "start.steps.*model.architecture='encoder'",
        ),
        (
            "t5/1-baseline/baseline",
            "--generator-share 0.25",
            "generator_share",
        ),
        (
            "t5/1-baseline/baseline",
            "--model.positions.rotary.base 5",
            "model.positions.rotary.base",
        ),
        (
            "t5/1-baseline/baseline",
            "--start.steps 0 --start.objective.rate 0.3",
            "start.objective.rate.*start.steps",
        ),
        (
            "t5/1-baseline/baseline",
            "--mixing.limit 5",
            "mixing.limit.*mixing.pretraining",
        ),
        (
            "t5/1-baseline/baseline",
            "--finetuning.steps 0 --tuning.adapters 0.5",
            "tuning.adapters.*finetuning.steps",
        ),
        (
            "history/lstm",
            "--model.attention.num-heads 2",
            "model.attention.num_heads",
        ),
        (
            "history/trigram",
            "--pretraining.optimizer.learning-rate 0.1",
            "counts.m",
        ),
        ("t5/1-baseline/baseline", "--counts.order 2", "counts.order"),
        (
            "t5/1-baseline/baseline",
            "--vectors.window 2",
            "vectors.window.*vectors.epochs",
        ),
    ],
)
def test_a_setting_without_effect_is_refused_on_the_command_line(row, words, said, tmp_path):
    with pytest.raises(SettingError, match=said):
        parse("run", [row, *words.split(), "--check", "--runs", str(tmp_path)])()
    assert not [*tmp_path.iterdir()]


def test_what_depends_on_each_other_is_judged_together():
    together = {"start.steps": 100, "start.objective.rate": 0.3}
    experiment = build("t5/1-baseline/baseline", "base", together)
    check_overrides_are_read([experiment], together)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("report", ["--model.dropout", "0.1"]),
        ("report", ["--grid", "model.dropout=0,0.1"]),
        ("power", ["--model.dropout", "0.1"]),
    ],
)
def test_a_setting_is_refused_where_no_row_can_be_built_to_read_it(command, words, tmp_path):
    assert all(row.needs for row in find("sahoo/3-zero-shot"))
    with pytest.raises(
        SettingError, match=r"model\.dropout is read by no row, since none of these can be built"
    ):
        parse(command, ["sahoo/3-zero-shot", *words, "--runs", str(tmp_path)])()


def test_a_sweep_refuses_what_none_of_its_rows_reads_and_trains_others_as_they_are():
    with pytest.raises(SettingError, match=r"mixing\.limit"):
        parse("sweep", ["t5/4-objective", "--mixing.limit", "5"])()
    changes = {"objective.rate": 0.3, "pretraining.steps": 8}
    assert effective_overrides("t5/4-objective/bert-style", "nano", changes) == changes
    assert effective_overrides("t5/4-objective/deshuffling", "nano", changes) == {"pretraining.steps": 8}


def test_settings_of_an_older_run_are_read_whatever_reads_them():
    old = change(build("bert/base", "nano"), "generator_share", 0.5)
    assert from_json(Experiment, to_json(old)) == old


# ---- how it is declared


@dataclass(frozen=True)
class Inner:
    kind: typing.Literal["a", "b"] = "a"
    of_a: int = setting(1, {"kind": ("a",)})  # of a
    of_b: int = setting(1, {"kind": ("b",)})
    of_both: int = setting(1, ({"kind": ("b",)}, {"outer": ABOVE_0}))


@dataclass(frozen=True)
class Outer:
    outer: int = 0
    inner: Inner = setting(Inner(), {"outer": ABOVE_0}, overrides={"kind": ()})
    name: str = ""
    named: int = setting(0, {"name": GIVEN, "inner.kind": ("a",)})


def test_a_setting_is_read_if_it_and_the_groups_around_it_are():
    assert {*unused_settings(Outer(), ["inner"])} == {"inner.of_a", "inner.of_b", "inner.of_both"}
    assert unused_settings(Outer(outer=1), ["inner"]) == {
        "inner.of_b": "inner.of_b is read by b, not by a: leave it out, or set inner.kind=b"
    }
    assert {*unused_settings(Outer(name="x"), ["named", "outer", "name"])} == set()
    assert unused_settings(Outer(), ["named"]) == {
        "named": "named is read with name, not with name='': leave it out, or set name"
    }
    with pytest.raises(SettingError, match="inner.of_b"):
        check_used(Outer(outer=1), ["inner.of_b"])


def test_a_declaration_can_be_printed():
    assert conditions(Outer) == {
        "inner": "outer above 0",
        "inner.of_a": "inner.kind=a",
        "inner.of_b": "inner.kind=b",
        "inner.of_both": "inner.kind=b; or outer above 0",
        "named": "name given and inner.kind=a",
    }
    assert (
        conditions(ModelConfig)["positions.relative_bias_start"]
        == "positions.kind=relative|relative-per-layer|relative-and-learned"
    )


def test_a_choice_that_is_added_reads_all_but_what_it_ignores():
    @dataclass(frozen=True)
    class Config:
        kind: typing.Literal["a", "b"] = "a"
        of_b: int = setting(1, {"kind": ("b",)})
        of_a: int = setting(1, {"kind": ("a",)})

    class Entry:
        ignores = ("of_a",)

    set_choices(Config, "kind", {"a": None, "b": None, "mine": Entry})
    assert unused_settings(Config("mine"), ["of_a", "of_b"]).keys() == {"of_a"}
    Entry.ignores = ("of_b",)
    set_choices(Config, "kind", {"a": None, "b": None, "mine": Entry})
    assert unused_settings(Config("mine"), ["of_a", "of_b"]).keys() == {"of_b"}, "the entry of the last call"


def test_the_paths_of_a_declaration_are_those_of_settings():
    paths = {path for path, _ in leaves(Experiment())}
    named = " ".join(conditions(Experiment).values()).replace(";", " ").replace("=", " ").split()
    assert {
        word
        for word in named
        if word.partition(".")[0] in {p.partition(".")[0] for p in paths} and "." in word
    } <= paths

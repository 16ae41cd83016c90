"""Sweeps that start from a checkpoint: each point of a grid has its own run, and the command repeats it."""

import published
import pytest

from experiments.cli.run_options import Options
from experiments.cli.settings import given_changes, given_points, parse_settings
from experiments.cli.sweep import compared_experiments, grid_tables, sweep_argv, wanted_runs
from experiments.runs.init_from import overrides_of_start
from experiments.study.overrides import check_agreement_with_checkpoint
from experiments.study.registry import build
from lm.config.base import SettingError

ROW, SCALE = "t5/1-baseline/baseline", "nano"
BOTH = {"model.architecture": "encoder-decoder"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


def checkpoint(runs, family):
    """A published model of two layers a stack."""
    stacks = {"bart": ("encoder", "decoder"), "llama": ("decoder",)}[family]
    return str(published.write(family, runs / family, **{f"num_{stack}_layers": 2 for stack in stacks}))


@pytest.mark.parametrize(
    ("family", "row", "given", "grid", "points"),
    [
        pytest.param(
            "bart",
            ROW,
            {},
            ["model.num_decoder_layers=1,2", "model.dropout=0.2,0.3"],
            4,
            marks=pytest.mark.slow,
        ),
        ("llama", ROW, BOTH, ["model.num_decoder_layers=1,2"], 2),
        ("llama", ROW, {}, ["model.architecture=decoder,encoder-decoder"], 2),
        ("llama", "gpt/base", {"model.num_decoder_layers": 1}, ["model.dropout=0.2,0.3"], 2),
    ],
)
def test_each_point_of_a_grid_has_a_run_that_starts_as_its_values_ask(runs, family, row, given, grid, points):
    start = checkpoint(runs, family)
    changes = given_changes([row], SCALE, given, None, start, runs)
    found = given_points([row], SCALE, grid, changes, given, start, runs)
    compared = compared_experiments(row, found, changes, SCALE)
    at_points = [experiment for _, experiment in compared[:-1]]  # the last is the baseline's
    assert len(found) == len(at_points) == points
    folders = {run.folder: run.experiment for run in wanted_runs(compared, 1, Options(SCALE, runs))}
    assert set(at_points) <= set(folders.values()) and len(set(at_points)) == points
    for point, experiment in zip(found, at_points, strict=True):
        assert point.changes.items() >= (given | point.values).items()
        check_agreement_with_checkpoint(experiment, given | point.values)
        assert overrides_of_start(start, runs, given | point.values)["start.model"] == experiment.start.model
    (table,) = grid_tables(row, SCALE, found, changes)
    assert {build_row(each) for each in table.rows} == set(folders.values())


def test_rows_of_a_grid_are_labelled_by_what_it_varies_and_its_title_has_what_they_share(runs):
    given = {"data.corpus": "text:a.txt", "finetuning.steps": 0}
    changes = given_changes(["gpt/base"], SCALE, given, None, "", runs)
    grid = ["model.positions.kind=learned,none"]
    points = given_points(["gpt/base"], SCALE, grid, changes, given, "", runs)
    (table,) = grid_tables("gpt/base", SCALE, points, changes)
    assert [row.label for row in table.rows] == ["base, positions.kind=learned", "base, positions.kind=none"]
    assert table.title.endswith("model.positions.kind, with corpus=text:a.txt, finetuning.steps=0")


def build_row(row):
    """The experiment of a row that is not registered, which is called like one that is."""
    return build(row.name.partition(",")[0], SCALE, row.changes)


def test_a_grid_refuses_what_contradicts_the_checkpoint_as_an_option_is_refused(runs):
    start = checkpoint(runs, "bart")
    changes = given_changes([ROW], SCALE, {}, None, start, runs)
    for value in ("model.d_model=16,32", "model.num_decoder_layers=2,3", "data.vocabulary=bpe"):
        with pytest.raises(SettingError, match="contradicts --start"):
            given_points([ROW], SCALE, [value], changes, {}, start, runs)


def test_the_command_of_a_sweep_repeats_the_start_that_its_options_made(runs):
    start = checkpoint(runs, "llama")
    options = BOTH | {"model.num_decoder_layers": 1, "model.d_model": 16, "finetuning.steps": 3}
    changes = given_changes([ROW], SCALE, options, None, start, runs)
    words = sweep_argv(ROW, 2, changes, Options(SCALE, runs, start=start), settings=options)
    typed = parse_settings(words[words.index("2") + 1 : words.index("--start")])
    assert given_changes([ROW], SCALE, typed, None, start, runs) == changes
    assert typed == {path: new for path, new in options.items() if path != "model.d_model"}

"""From runs made by hand to verdicts on the paper's claims: columns that count, frames, rows that learn."""

from copy import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiments.cli.power import power
from experiments.figures.draw import draw_plots
from experiments.report import power as table_power
from experiments.report import report, text
from experiments.report.comparison import Comparison, Mismatch, share_noise, typical_noise
from experiments.report.export import report_data, sheet_csv, table_data
from experiments.report.figures import table_figures
from experiments.report.latex import claims_table
from experiments.report.metrics import (
    BUDGETS,
    BudgetCurve,
    Metric,
    budget_curve,
    has_same_targets,
    typical_std,
)
from experiments.report.power import measure_noise, measurement_note, seeds_sheet
from experiments.report.prediction import combined_scores, read_combined_scores
from experiments.runs.plateau import MAX_PASSES, has_plateau, plateau_note
from experiments.runs.result import Result
from experiments.runs.task_scores import write_example_values
from experiments.study.claims import VerdictCounts
from experiments.study.registry import REGISTRY, TABLES, build, find, tables_of
from experiments.study.table import Conclusion
from lm.config.base import SettingError, change
from lm.files import json_with_checksum, write

(TABLE,) = tables_of(find("t5/4-objective"))
NAMES = [row.name for row in TABLE.rows]
BASE = "t5/1-baseline/baseline"
UPDATES, EXAMPLES = 200, 100
TOKENS = {
    "t5/4-objective/prefix-lm": 4000,
    "t5/4-objective/deshuffling": 8000,
}  # of all pre-training; else 1,000. Each costs a million FLOP


def task(name: str, value: float, measure: str) -> dict:
    metrics = {measure: value, "loss": 1.0}
    chance = 0.0 if measure == "bits_above_chance" else None
    half = "language" if name == "agreement" else "reading"
    kind = {"column": name, "half": half, "metric": "em", "measure": measure, "step": 9, "chance": chance}
    return kind | {"rows": EXAMPLES, "score": value, "metrics": metrics}


def run(folder: Path, name: str, seed: int, level: float, **given) -> Result:
    """A run whose cloze is ``level`` and whose bits per byte are 4 less that, but for noise.

    After a quarter and half of the updates it has a quarter and half of its level.
    """
    noise = np.random.default_rng([seed, *name.encode()])
    own = level + 0.1 * noise.normal()
    cloze, words = task("cloze", own, "bits_above_chance"), task("restore", 4 - own, "bits_per_byte")
    branches = {
        "cloze": {str(u): task("cloze", own * u / UPDATES, "bits_above_chance") for u in (50, 100)},
        "restore": {str(u): task("restore", 4 - own * u / UPDATES, "bits_per_byte") for u in (50, 100)},
    }
    home = folder / name / f"seed-{seed}"
    bits = np.random.default_rng(0).normal(size=EXAMPLES)
    cloze["examples"] = write_example_values(home / "finetuning", "cloze", {"bits": bits - bits.mean() + own})
    tokens = TOKENS.get(name, 1000)
    counted = {"content_tokens": tokens, "content_loss": 5.0, "reference_loss": 6.0, "flops": 1e6 * tokens}
    return Result(
        columns={},
        tasks={"cloze": cloze, "restore": words},
        seconds=60.0,
        tokens=9,
        folder=home,
        scale=folder,
        stages={"cloze": f"{name}/seed-{seed}/finetuning"},
        branches=branches,
        **counted | {"exit_step": 50, "held_out_loss": 3.0} | given,
    )


LEVELS = {"prefix-lm": 2.0, "bert-style": 3.0, "deshuffling": 2.5, "baseline": 1.0}


def study(folder: Path, seeds: int | range = 5, levels=LEVELS, **given) -> Comparison:
    """Comparison of Table 4; ``given``: fields of the result of the row named so."""
    seeds = range(seeds) if isinstance(seeds, int) else seeds
    names = [*NAMES, BASE]
    runs = {
        name: [run(folder, name, s, levels[last], **given.get(last.replace("-", "_"), {})) for s in seeds]
        for name, last in ((name, name.rpartition("/")[2]) for name in names)
    }
    settings = {name: build(name, "nano") for name in names}
    settings = {name: change(settings[name], "pretraining.steps", UPDATES) for name in names}
    return Comparison(TABLE, runs, settings, pytest.fail)


def words(comparison: Comparison, budget, group="reading") -> dict[str, str]:
    """Claim -> the verdict on it."""
    found = comparison.verdicts()[group][budget]
    return {claim.pair: verdict.word for claim, verdict in found}


def test_a_claim_is_confirmed_or_contradicted_by_the_rows_that_it_names(tmp_path):
    assert words(study(tmp_path), "updates") == {
        "bert-style > prefix-lm": "confirmed",
        "prefix-lm > deshuffling": "contradicted",
        "bert-style > deshuffling": "confirmed",
    }


@pytest.mark.parametrize(
    ("level", "seeds", "said", "verdict"),
    [
        (2.0, 20, "equivalent", "confirmed"),
        (2.5, 20, "contradicted", "contradicted"),  # prefix LM is worse
        (1.5, 20, "confirmed", "contradicted"),  # prefix LM is better
        (2.0, 1, "undecided", "undecided"),
    ],
)
def test_a_claim_that_rows_are_equivalent_holds_where_a_report_calls_them_so_and_fails_where_one_is_better(
    level, seeds, said, verdict, tmp_path
):
    comparison = study(tmp_path, seeds, LEVELS | {"deshuffling": level})
    alike = Conclusion("prefix-lm", "deshuffling", "as good", relation="equivalent")
    table = replace(TABLE, conclusions=(*TABLE.conclusions, alike))
    found = words(Comparison(table, comparison.runs, comparison.experiments, pytest.fail), "updates")
    assert found["prefix-lm > deshuffling"] == said
    assert found["prefix-lm ≈ deshuffling"] == verdict


def test_a_conclusion_about_one_half_of_the_tasks_is_judged_by_that_half_alone(tmp_path):
    comparison = study(tmp_path)  # whose tasks are all of reading
    halves = [
        Conclusion("deshuffling", "prefix-lm", "it reads whole sentences", tasks="reading"),
        Conclusion("bert-style", "prefix-lm", "it writes whole sentences", tasks="language"),
    ]
    table = replace(TABLE, paper=None, columns=(), conclusions=tuple(halves))
    judged = Comparison(table, comparison.runs, comparison.experiments, pytest.fail)
    assert words(judged, "updates") == {
        "deshuffling > prefix-lm": "confirmed",
        "bert-style > prefix-lm": "other tasks",
    }
    verdicts = judged.verdicts()
    assert text.count_verdicts(verdicts["reading"]["updates"]) == (1, 0, 0, 0)
    assert text.verdict_sentence(judged, verdicts).startswith("1 claim judged by the reading tasks: 1 conf")
    first, second = text.brief_conclusions(judged, verdicts)
    assert first.startswith("- confirmed +") and first.endswith(
        ": it reads whole sentences (deshuffling > prefix-lm)"
    )
    assert second.startswith("- no tasks of language to judge by: ")
    notes = "\n".join(text.claims_notes(judged, verdicts))
    assert "reading, after training" in notes and "0 confirmed, 0 contradicted" not in notes
    language = {group: {"updates": [*each["updates"]][::-1]} for group, each in verdicts.items()}
    _, second = text.brief_conclusions(judged, verdicts | {"language": language["reading"]})
    assert second.startswith("- confirmed +") and ", by language: it writes whole sentences" in second
    assert text.brief_conclusions(comparison, comparison.verdicts()) == [], (
        "the paper's claims are on the page"
    )


def test_claims_about_tasks_that_were_not_scored_are_counted_and_head_no_empty_list(tmp_path):
    comparison = study(tmp_path)  # whose tasks are all of reading
    claim = Conclusion("bert-style", "prefix-lm", "it writes whole sentences", tasks="language")
    table = replace(TABLE, paper=None, columns=(), conclusions=(claim,))
    judged = Comparison(table, comparison.runs, comparison.experiments, pytest.fail)
    verdicts = judged.verdicts()
    first, *_ = text.claims_notes(judged, verdicts)
    assert first == "1 claim about these rows, judged by tasks that they do not have."
    assert text.all_claims_note([verdicts, verdicts], [judged, judged]) == ""


def test_the_loss_by_shuffled_inputs_is_that_of_the_seeds_that_were_scored_with_them(tmp_path):
    comparison = study(tmp_path, seeds=2)
    first, second = comparison.runs[BASE]

    def scored(one: Result, score: float, **more) -> Result:
        cloze = one.tasks["cloze"] | {"score": score, "metrics": {"bits_above_chance": score}, **more}
        return replace(one, tasks={**one.tasks, "cloze": cloze})

    runs = [scored(first, 4.0, shuffled={"score": 1.0, "rows": 9}), scored(second, 6.0)]
    judged = Comparison(TABLE, comparison.runs | {BASE: runs}, comparison.experiments, lambda line: None)
    cell = text.metrics_sheet(judged)["baseline, inputs shuffled"][0]
    assert cell.text == "1.000, loses 75%"


def test_the_csv_of_a_table_has_the_step_at_which_all_seeds_left_the_plateau_as_a_number(tmp_path):
    stuck, late = {"exit_step": None}, {"exit_step": 1500}
    sheet = text.scores_sheet(study(tmp_path, prefix_lm=late, bert_style=stuck))
    lines = sheet_csv({head: sheet[head] for head in ("row", "left plateau at step")}).splitlines()
    assert lines[1:3] == [f"{sheet['row'][0].text},1500", f'"{sheet["row"][1].text}",5 of 5 not left']


def test_rows_alike_are_undecided_or_equivalent(tmp_path):
    levels = LEVELS | {"bert-style": 2.0, "deshuffling": 2.0}
    assert set(words(study(tmp_path, levels=levels), "updates").values()) <= {"undecided", "equivalent"}


@pytest.mark.slow
def test_tables_whose_rows_are_alike_claim_something_one_time_in_twenty_and_a_planted_difference_is_found(
    tmp_path,
):
    """A/A: from runs to verdicts, with columns chosen and scaled by the same runs."""
    trials = 200
    alike = LEVELS | {"bert-style": 2.0, "deshuffling": 2.0, "prefix-lm": 2.0}
    wrong = found = 0
    for trial in range(trials):
        seeds = range(5 * trial, 5 * trial + 5)
        said = words(study(tmp_path / f"{trial}", seeds, alike), "updates").values()
        wrong += not {*said} <= {"undecided", "equivalent"}
        planted = study(tmp_path / f"{trial}b", seeds, alike | {"deshuffling": 1.5})  # five deviations
        found += words(planted, "updates")["prefix-lm > deshuffling"] == "confirmed"
    assert wrong <= 0.05 * trials + 3 * (0.05 * 0.95 * trials) ** 0.5
    assert found >= 0.95 * trials


def test_one_seed_claims_nothing(tmp_path):
    comparison = study(tmp_path, seeds=1)
    assert set(words(comparison, "updates").values()) == {"undecided"}
    assert "train more" in " ".join(text.claims_notes(comparison, comparison.verdicts()))


@pytest.mark.parametrize("seeds", [1, 2])
def test_a_unit_without_noise_over_seeds_is_said_to_be_one_on_page_and_terminal(
    seeds, tmp_path, monkeypatch, capsys
):
    comparison = study(tmp_path, seeds=seeds)
    for metric in comparison.judging_metrics:
        assert (comparison.noise[metric.name].seeds == 0) == (seeds == 1)
    shown = report.report_table(comparison, lambda line: None)
    empty = {"table": []}
    written = report.Report(tmp_path / "report.md", empty, empty, {TABLE.name: shown}, [])
    monkeypatch.setattr(report, "write_report", lambda *args, **given: written)
    report.print_report([TABLE], "nano", [str(tmp_path)])
    terminal = " ".join(capsys.readouterr().out.split())
    for said in (" ".join(shown.notes), terminal):
        assert ("a standard deviation of a run is here that of its examples alone" in said) == (seeds == 1)


def test_the_unit_counts_as_one_over_seeds_if_any_row_of_the_report_has_two(tmp_path):
    alone, repeated = study(tmp_path / "alone", seeds=1), study(tmp_path / "repeated", seeds=2)
    assert text.noise_notes(alone)
    share_noise([repeated, alone])
    assert not text.noise_notes(alone)


def test_a_metric_that_counts_in_its_own_unit_among_z_scores_is_named(tmp_path):
    comparison = study(tmp_path, seeds=1)
    assert not comparison.noise["restore"].is_known and comparison.noise["cloze"].is_known
    *_, note = text.noise_notes(comparison)
    assert note.startswith("The noise of restore is unknown: ")
    assert not any("is unknown" in note for note in text.noise_notes(study(tmp_path / "b", seeds=2)))


def test_signal_to_noise_is_unknown_where_rows_on_the_plateau_alone_have_seeds(tmp_path):
    stuck = {"exit_step": None}
    comparison = study(tmp_path, prefix_lm=stuck, bert_style=stuck)
    for name in (BASE, "t5/4-objective/deshuffling"):
        del comparison.runs[name][1:]
    assert comparison.std(comparison.metrics[1]) > 0
    assert comparison.signal_to_noise["restore"] is None, "no unit to divide by"
    assert comparison.signal_to_noise["cloze"] > 0, "that of its examples is known"


def test_a_row_that_has_not_left_the_plateau_is_not_ordered(tmp_path):
    comparison = study(tmp_path, prefix_lm={"exit_step": None})
    assert words(comparison, "updates") == {
        "bert-style > prefix-lm": "not yet learning",
        "prefix-lm > deshuffling": "not yet learning",
        "bert-style > deshuffling": "confirmed",
    }
    board = text.scores_sheet(comparison)
    assert [cell.text == "not yet learning" for cell in board["mean z-score, reading"]] == [
        True,
        False,
        False,
    ]
    assert board["left plateau at step"][0].text == "5 of 5 not left"
    unpretrained = study(tmp_path / "b", prefix_lm={"exit_step": None, "content_loss": None})
    assert "not yet learning" not in words(unpretrained, "updates").values()


def test_a_row_on_the_plateau_has_neither_sign_nor_verdict_nor_a_point_among_z_scores(tmp_path):
    """If it is the baseline, no row has a sign or a verdict; the numbers stay."""
    stuck, learning = {"exit_step": None}, study(tmp_path)
    signs, verdicts, points = marks_of(learning)
    assert all(signs) and "better" in verdicts and points == 3
    one_stuck = study(tmp_path, prefix_lm=stuck)
    signs, verdicts, points = marks_of(one_stuck)
    figures = table_figures(one_stuck, dict.fromkeys(one_stuck.canonical_names, {}))
    drawn = figures["t5-4-objective-crossing"].panels[0].curves
    assert len(drawn) == 2 and not any("Prefix" in label for label in drawn)
    assert signs[0] == "" and all(signs[1:])
    assert verdicts == ["not yet learning", "better", "better"] and points == 2
    signs, verdicts, points = marks_of(study(tmp_path, baseline=stuck))
    assert not any(signs) and {*verdicts} == {"not yet learning"}


def marks_of(comparison):
    """The signs and verdicts of rows in the first metric, and the number of points among its z-scores."""
    title = comparison.metrics[0].title
    signs = [cell.text[-1] if cell.text[-1] in "▲▼" else "" for cell in text.scores_sheet(comparison)[title]]
    cells = text.differences_sheet(comparison)[title]
    assert all(cell.value is not None for cell in cells)
    panels = table_figures(comparison, dict.fromkeys(comparison.canonical_names, {}))
    (first, *_) = next(iter(panels.values())).panels
    assert first.title.startswith("mean z-score")
    return signs, [cell.text.partition(") ")[2] for cell in cells], len(first.curves[""].x)


@pytest.mark.parametrize("is_drawn", [False, True])
def test_held_out_loss_has_a_panel_beside_tasks_only_if_a_row_predicts_what_the_baseline_does(
    tmp_path, is_drawn
):
    """Objectives that predict other tokens than the baseline's left a panel with a single point."""
    comparison = study(tmp_path).including_baseline()
    if is_drawn:
        settings = comparison.experiments
        settings[NAMES[0]] = replace(settings[BASE], seed=7)
    figures = table_figures(comparison, dict.fromkeys(comparison.canonical_names, {}))
    titles = [panel.title for panel in next(iter(figures.values())).panels]
    assert ("held-out loss\n[nats per token]" in titles) == is_drawn and len(titles) > 2


def test_rows_on_the_plateau_do_not_count_in_the_unit_unless_all_are(tmp_path):
    stuck = {"exit_step": None}
    one_stuck, learning, untrained = study(tmp_path, prefix_lm=stuck), study(tmp_path), study(tmp_path)
    untrained.runs[next(name for name in NAMES if name.endswith("prefix-lm"))] = []
    all_stuck = study(tmp_path, prefix_lm=stuck, bert_style=stuck, deshuffling=stuck, baseline=stuck)
    assert one_stuck.noise_std == pytest.approx(untrained.noise_std)
    assert all_stuck.noise_std == pytest.approx(learning.noise_std)
    assert one_stuck.noise_std != pytest.approx(learning.noise_std)


def test_rows_meet_where_the_one_that_spent_less_ends_and_nothing_is_extrapolated(tmp_path):
    got = words(study(tmp_path), "FLOP")
    # BERT-style has 1e9 FLOP. Prefix LM has 4e9, of which its first branch spent 1e9; deshuffling has 8e9
    # and spent 2e9 by its first.
    assert got["bert-style > deshuffling"] == "out of range"
    assert got["bert-style > prefix-lm"] == "confirmed"
    # 4e9 FLOP are half of deshuffling's: 1.25 there against 2.0
    assert got["prefix-lm > deshuffling"] == "confirmed"


def test_between_branches_a_score_is_linear_in_the_logarithm_of_what_was_spent():
    spent = {frame: np.array([1.0, 4.0]) for frame in BUDGETS}
    growth = BudgetCurve(spent, {"cloze": np.array([0.0, 1.0])})
    assert growth.score_at("FLOP", 2.0, "cloze") == pytest.approx(0.5)
    assert growth.score_at("FLOP", 4.0, "cloze") == 1.0
    assert growth.score_at("FLOP", 0.9, "cloze") is growth.score_at("FLOP", 4.1, "cloze") is None
    assert growth.score_at("FLOP", 0.995, "cloze") == 0.0  # equal but for a rounded width
    assert growth.score_at("FLOP", 4.03, "cloze") == 1.0


def test_the_start_that_rows_share_counts_as_spent(tmp_path):
    settings = change(change(build(BASE, "nano"), "pretraining.steps", UPDATES), "start.steps", 200)
    growth = budget_curve(run(tmp_path, BASE, 0, 1.0, start_tokens=600, start_flops=4e8), [], settings)
    assert growth.spent["content tokens"].tolist() == [700.0, 800.0, 1000.0]
    assert growth.spent["FLOP"].tolist() == pytest.approx([0.55e9, 0.7e9, 1e9])
    assert growth.spent["updates"].tolist() == [50, 100, 200]


def test_branches_have_spent_what_the_phases_before_them_cost(tmp_path):
    settings = change(build(BASE, "nano"), "pretraining.steps", UPDATES)
    costs = {
        "100": {"flops": 7e8, "content_tokens": 900},
        "200": {"flops": 3e8, "content_tokens": 100},
    }
    growth = budget_curve(run(tmp_path, BASE, 0, 1.0, phase_costs=costs), [], settings)
    assert growth.spent["updates"].tolist() == [50, 100, 200]
    assert growth.spent["content tokens"].tolist() == [450.0, 900.0, 1000.0]
    assert growth.spent["FLOP"].tolist() == pytest.approx([3.5e8, 7e8, 1e9])


def test_no_column_is_left_out_by_the_scores_of_the_rows_that_are_compared(tmp_path):
    for folder, levels in (
        ("signal", LEVELS),
        ("noise", dict.fromkeys(LEVELS, 1.0)),
        ("guessing-baseline", LEVELS | {"baseline": 0.0}),
        ("guessing", dict.fromkeys(LEVELS, 0.0)),
    ):
        comparison = study(tmp_path / folder, levels=levels)
        assert [column.name for column in comparison.judging_metrics] == ["cloze", "restore"], folder
        assert comparison.groups == {"reading": {"cloze": 0.5, "restore": 0.5}}


def test_a_column_at_chance_is_marked_and_counts(tmp_path):
    sheet = text.metrics_sheet(study(tmp_path))
    assert [cell.text for cell in sheet["rows above chance"]] == ["3 of 3", "–"], "words have no chance"
    guessing = study(tmp_path / "b", levels=dict.fromkeys(LEVELS, 0.0))
    assert text.metrics_sheet(guessing)["rows above chance"][0].text == "none: at chance"
    assert "cloze" in guessing.groups["reading"]


def test_a_column_that_the_study_declares_unfit_is_shown_and_not_averaged(tmp_path):
    whole = study(tmp_path)
    part = Comparison(TABLE, whole.runs, whole.experiments, pytest.fail, not_averaged={"cloze": "at chance"})
    assert part.groups == {"reading": {"restore": 1.0}}
    sheet = text.metrics_sheet(part)
    assert [cell.text for cell in sheet["column"]] == [c.title for c in part.metrics if not c.is_held_out]


@pytest.mark.parametrize("seeds", [1, 5])  # with one seed the ratio itself is unknown
def test_a_column_that_is_not_averaged_says_so_with_any_number_of_seeds(seeds, tmp_path):
    whole = study(tmp_path, seeds)
    part = Comparison(TABLE, whole.runs, whole.experiments, pytest.fail, not_averaged={"cloze": "at chance"})
    ratios = [cell.text for cell in text.metrics_sheet(part)["signal-to-noise"]]
    assert [ratio.endswith(", not averaged: at chance") for ratio in ratios] == [True, False]
    assert [ratio.startswith("unknown") for ratio in ratios] == [seeds == 1] * 2


def test_a_table_tells_differences_that_shrink_with_the_root_of_the_number_of_seeds(tmp_path):
    counts = (2, 3, 5, 10, 100, 1_000)
    noise = measure_noise(study(tmp_path), "reading")
    found = [noise.smallest_difference(count) for count in counts]
    assert found == sorted(found, reverse=True)
    assert found[-2] / found[-1] == pytest.approx(10**0.5, rel=0.1), "the same examples are hard for all rows"
    alone = study(tmp_path, levels=LEVELS, seeds=1)
    with pytest.raises(SettingError, match="--seeds 2"):
        measure_noise(alone, "reading")


def test_a_table_whose_rows_are_all_one_experiment_has_no_power_and_says_so(tmp_path, monkeypatch):
    """A table of the baseline alone, whose noise the control shows, and rows that settings make equal."""
    comparison = study(tmp_path)
    control = "t5/6-corruption-rate/50"
    monkeypatch.setattr("experiments.report.comparison.START_ONLY_ROW", control)
    comparison.runs[control] = [run(tmp_path, control, seed, 2.5) for seed in range(5)]
    comparison.experiments[control] = change(comparison.experiments[BASE], "objective.rate", 0.5)
    alone = replace(TABLE, rows=(REGISTRY[BASE],), conclusions=())
    equal = comparison.experiments | dict.fromkeys(NAMES, comparison.experiments[BASE])
    for table, experiments in ((alone, comparison.experiments), (TABLE, equal)):
        with pytest.raises(SettingError, match="no two of its rows differ"):
            measure_noise(Comparison(table, comparison.runs, experiments, pytest.fail), "reading")


def test_a_table_whose_runs_have_no_score_has_no_power_and_says_so(tmp_path, monkeypatch):
    comparison = study(tmp_path)
    for name, runs in comparison.runs.items():
        comparison.runs[name] = [replace(one, tasks={}, held_out_loss=None) for one in runs]
    monkeypatch.setattr(report, "compare_tables", lambda *_: [comparison])
    with pytest.raises(SettingError, match="t5/4-objective: none of its runs has a score"):
        power(TABLE.name, settings={}, runs=(str(tmp_path),))
    other = copy(comparison)
    other.table = replace(TABLE, name="t5/5-other")
    monkeypatch.setattr(report, "compare_tables", lambda *_: [comparison, other])
    with pytest.raises(SettingError, match=r"(?s)t5/4-objective: none .*t5/5-other: none of its runs has"):
        power(TABLE.name, settings={}, runs=(str(tmp_path),))


def test_power_is_that_of_the_tests_against_the_baseline_where_settings_make_all_claimed_pairs_equal(
    tmp_path,
):
    comparison = study(tmp_path)
    same = comparison.experiments[NAMES[0]]
    experiments = comparison.experiments | dict.fromkeys(NAMES, same)
    noise = measure_noise(Comparison(TABLE, comparison.runs, experiments, pytest.fail), "reading")
    assert noise.pairs == ((NAMES[0], BASE),)


def test_the_seeds_that_find_a_difference_are_the_fewest_that_do(tmp_path, monkeypatch):
    noise = measure_noise(study(tmp_path), "reading")
    for count in (2, 3, 5, 10):
        assert noise.seeds_to_find(noise.smallest_difference(count)) == count
    # of the examples alone, whose noise more seeds do not lessen
    noise = replace(noise, example_variance=1.0)
    monkeypatch.setattr(table_power, "MAX_SEEDS", 100)
    assert noise.seeds_to_find(0.5) is None
    (sheet,) = seeds_sheet({"reading": noise}, 0.5).values()
    assert sheet["reading"][0].text == "more than 100"


def test_the_noise_and_the_number_of_pairs_that_power_follows_from_are_printed(tmp_path, monkeypatch, capsys):
    comparison = study(tmp_path)
    noise = measure_noise(comparison, "reading")
    monkeypatch.setattr(report, "compare_tables", lambda *_: [comparison])
    for difference in (None, 1.5):
        power(TABLE.name, settings={}, runs=(str(tmp_path),), difference=difference)
        printed = capsys.readouterr().out
        assert ["reading", f"{noise.seed_variance**0.5:.3f}", "0.000", "3", "3"] in [
            line.split() for line in printed.splitlines()
        ]
    assert len(noise.pairs) == 3, "the noise of examples is 0, as all runs find the same ones hard"


def test_rows_that_the_noise_was_measured_on_and_that_are_not_in_the_table_are_named(tmp_path):
    note = measurement_note({"reading": measure_noise(study(tmp_path), "reading")})
    assert f"measured on 4 rows (3 of the table, and {BASE}), with" in note


def test_the_noise_of_a_pilot_is_within_the_limit_that_is_printed(tmp_path):
    noise = measure_noise(study(tmp_path, seeds=2), "reading")
    dof = noise.measured_dof
    assert dof == noise.measured_rows - 1, "two seeds of each row, whose common effects do not count"
    rng = np.random.default_rng(0)
    estimated = np.sqrt(rng.chisquare(dof, size=100_000) / dof)  # true noise: 1
    assert (estimated * noise.std_upper_factor < 1).mean() == pytest.approx(0.05, abs=0.003)
    more = measure_noise(study(tmp_path), "reading")
    assert more.std_upper_factor < noise.std_upper_factor


def test_the_combined_score_is_the_mean_difference_in_deviations_and_less_bits_per_byte_are_better(tmp_path):
    comparison = study(tmp_path)
    cloze, restore = comparison.judging_metrics
    assert (cloze.sign, restore.sign) == (1, -1)
    name = "t5/4-objective/bert-style"
    runs = comparison.runs
    parts = []
    for column in comparison.judging_metrics:
        base = np.mean([column.value(run.tasks) for run in runs[BASE]])
        ahead = column.sign * (column.value(runs[name][2].tasks) - base)
        parts.append(ahead / comparison.noise_std[column.name])
    assert comparison.combined_scores(name, "reading")[2] == pytest.approx(np.mean(parts))
    differences = comparison.differences(restore).values()
    assert {x.verdict for x in differences} == {"better"}, (
        "every row has fewer bits per byte than the baseline"
    )
    assert all(x.low < x.mean < x.high < 0 for x in differences), "in the unit of the metric"
    assert np.mean([*comparison.combined_scores(BASE, "reading").values()]) == pytest.approx(0)


def test_a_column_that_happens_to_repeat_well_counts_no_more_than_its_examples_allow(tmp_path):
    comparison = study(tmp_path)
    cloze, restore = (comparison.std(column) for column in comparison.judging_metrics)
    assert cloze == pytest.approx(restore), "the same noise, and of cloze alone the examples are known"
    values = comparison.runs[BASE][0].example_values("cloze")["bits"]
    by_examples = np.std(values) / np.sqrt(EXAMPLES)
    by_seeds = comparison.noise_std["restore"]
    assert by_seeds == pytest.approx(restore, rel=0.1), "that of the median row is near the pooled one"
    assert comparison.noise_std["cloze"] == pytest.approx(np.hypot(by_seeds, by_examples), rel=0.02)


def test_the_noise_of_examples_counts_where_they_were_kept(tmp_path):
    comparison = study(tmp_path)
    difference = comparison.difference(NAMES[1], NAMES[0], "updates", "reading")
    assert difference.by_examples.shape == (5, 10_000)
    assert np.allclose(difference.by_examples, 0, atol=1e-9), "all rows find the same examples hard"
    cloze = comparison.judging_metrics[0]
    values = [*comparison.values_by_seed(cloze)[BASE].values()]
    error = np.mean(values) / comparison.standard_errors_above_chance(cloze, BASE)
    seeds = np.std(values, ddof=1) / 5**0.5
    bits = np.random.default_rng(0).normal(size=EXAMPLES)
    assert error == pytest.approx(np.hypot(seeds, bits.std() / EXAMPLES**0.5), rel=0.03)


def vary_examples(comparison: Comparison) -> Comparison:
    """Each run finds other examples hard."""
    for runs in comparison.runs.values():
        for one in runs:
            row = one.folder.parent.name
            noise = np.random.default_rng([one.seed, *row.encode()]).normal(size=EXAMPLES)
            values = {"bits": noise - noise.mean() + one.tasks["cloze"]["score"]}
            one.tasks["cloze"]["examples"] = write_example_values(one.folder / "finetuning", "cloze", values)
    return comparison


def test_a_seed_without_examples_makes_no_pair_surer_and_is_named(tmp_path):
    every, some, said = vary_examples(study(tmp_path)), vary_examples(study(tmp_path)), []
    some.warn = said.append
    some.runs["t5/4-objective/prefix-lm"][0].stages.clear()  # its values of examples are not found
    pair = ("t5/4-objective/bert-style", "t5/4-objective/prefix-lm")
    known, lacking = (x.difference(*pair, "updates", "reading").example_variance for x in (every, some))
    assert lacking >= known > 0
    assert said == [f"{pair[1]} seed 0: the values of its examples of cloze are missing; not resampled"]


def test_of_runs_with_other_examples_the_few_are_left_out_and_not_the_many(tmp_path):
    comparison, said = study(tmp_path), []
    comparison.warn = said.append
    odd = comparison.runs[NAMES[0]][0]  # the first that is read
    odd.tasks["cloze"]["examples"] = write_example_values(
        odd.folder / "finetuning", "cloze", {"bits": np.ones(EXAMPLES // 2)}
    )
    others = comparison.difference(NAMES[1], NAMES[2], "updates", "reading")
    assert others.by_examples is not None
    assert said == [f"{NAMES[0]} seed 0: its examples of cloze are not those of most runs"]


def test_a_run_without_a_score_that_counts_is_in_no_claim_and_is_named(tmp_path):
    comparison, said = study(tmp_path), []
    comparison.warn = said.append
    del comparison.runs[NAMES[0]][2].tasks["restore"]
    assert len(comparison.difference(NAMES[0], NAMES[1], "updates", "reading").by_seed) == 4
    assert said == [f"{NAMES[0]} seed 2 has no score in restore: it is in no mean z-score"]


def test_rows_without_a_common_seed_are_not_compared_and_it_is_said_why(tmp_path):
    comparison = study(tmp_path)
    runs = comparison.runs
    runs["t5/4-objective/prefix-lm"] = runs["t5/4-objective/prefix-lm"][:2]
    runs["t5/4-objective/deshuffling"] = runs["t5/4-objective/deshuffling"][2:]
    assert words(comparison, "updates")["prefix-lm > deshuffling"] == "no common seed"
    counts = text.count_verdicts(comparison.verdicts()["reading"]["updates"])
    assert (counts.confirmed, counts.uncompared) == (2, 1)
    assert "1 not compared" in text.counts_text(counts)


def test_a_row_with_few_seeds_is_told_from_the_same_seeds_of_the_baseline(tmp_path):
    comparison = study(tmp_path)
    runs = comparison.runs
    runs[NAMES[0]] = runs[NAMES[0]][3:]
    parts = []
    for column in comparison.judging_metrics:
        mine, base = (column.value(next(r for r in runs[n] if r.seed == 4).tasks) for n in (NAMES[0], BASE))
        other = column.value(next(r for r in runs[BASE] if r.seed == 3).tasks)
        parts.append(column.sign * (mine - (base + other) / 2) / comparison.noise_std[column.name])
    assert comparison.combined_scores(NAMES[0], "reading")[4] == pytest.approx(np.mean(parts))


@pytest.mark.parametrize("setting", [("mixing.pretraining", "tasks"), ("data.repeats", 64)])
def test_a_row_that_learns_what_held_out_text_does_not_tell_has_no_plateau_to_leave(tmp_path, setting):
    """Tasks beside the corpus or in its place, or a few texts by heart."""
    comparison = study(tmp_path, prefix_lm={"exit_step": None})
    settings = comparison.experiments
    row = "t5/4-objective/prefix-lm"
    settings[row] = change(settings[row], *setting)
    assert words(comparison, "updates")["prefix-lm > deshuffling"] != "not yet learning"
    board = text.scores_sheet(comparison)
    assert "not yet learning" not in [cell.text for cell in board["mean z-score, reading"]]
    assert board["left plateau at step"][0].text == "–"
    this, alone = settings[row], settings[BASE]
    never = comparison.runs[row][0].exit_step
    assert (plateau_note(never, this), plateau_note(never, alone)) == (
        "",
        "; it has not left the unigram plateau",
    )


def test_few_passes_over_a_text_leave_the_plateau_as_new_text_does_and_many_memorize(tmp_path):
    row = study(tmp_path).experiments[BASE]
    for passes, has_one in ((0, True), (1, True), (MAX_PASSES, True), (MAX_PASSES + 1, False)):
        assert has_plateau(change(row, "data.repeats", passes)) == has_one


def test_a_run_that_starts_from_a_trained_model_leaves_no_plateau_at_a_step_of_its_own(tmp_path):
    row = study(tmp_path).experiments[BASE]
    assert plateau_note(50, row) == "; it left the unigram plateau at step 50"
    started = change(row, "start.model", "mine")
    assert plateau_note(50, started) == ""
    assert plateau_note(None, started) == "; it has not left the unigram plateau"
    control = change(started, "start.weights", "random")
    assert plateau_note(50, control) == plateau_note(50, row)


def test_rows_are_not_compared_where_one_had_not_left_the_plateau_yet(tmp_path):
    """Prefix LM has left it in the end, and not where it had spent what BERT-style spends in all."""
    late = study(tmp_path, prefix_lm={"exit_step": 150})
    assert words(late, "updates")["bert-style > prefix-lm"] == "confirmed"
    assert words(late, "FLOP")["bert-style > prefix-lm"] == "not yet learning"
    early = study(tmp_path / "b", prefix_lm={"exit_step": 50})
    assert words(early, "FLOP")["bert-style > prefix-lm"] == "confirmed"
    runs = late.runs
    runs["t5/4-objective/bert-style"] = runs["t5/4-objective/bert-style"][:2]
    fewer = Comparison(TABLE, runs, late.experiments, pytest.fail)  # only the seeds that both have count
    assert words(fewer, "FLOP")["bert-style > prefix-lm"] == "not yet learning"


def test_a_table_whose_claims_are_not_judged_says_nothing_of_seeds(tmp_path):
    plateau = {"exit_step": None}
    comparison = study(tmp_path, prefix_lm=plateau, bert_style=plateau, deshuffling=plateau)
    assert {*words(comparison, "updates").values()} == {"not yet learning"}
    said = " ".join(text.claims_notes(comparison, comparison.verdicts()))
    assert "3 not compared" in said and "seed" not in said


def test_a_table_whose_baseline_has_not_finished_is_drawn(tmp_path):
    comparison = study(tmp_path)
    comparison.runs[BASE] = []
    grid = table_figures(comparison, dict.fromkeys(comparison.canonical_names, {}))["t5-4-objective"]
    assert all(axes.has_data() or not axes.get_visible() for axes in draw_plots(grid).axes)


@pytest.mark.parametrize("lacking", ["no row", "the baseline"])
def test_the_curve_of_a_mean_z_score_ends_at_that_score_and_is_missing_where_it_is(lacking, tmp_path):
    comparison = study(tmp_path)
    if lacking == "the baseline":
        comparison.runs[BASE] = []
    for name in NAMES:
        curves = comparison.scores_by_content_tokens(name, "reading")
        ends = [curve[max(curve)] for curve in curves]
        assert ends == pytest.approx([*comparison.combined_scores(name, "reading").values()])
        assert len(ends) == (5 if lacking == "no row" else 0)
    figures = table_figures(comparison, dict.fromkeys(comparison.canonical_names, {}))
    assert ("t5-4-objective-crossing" in figures) == (lacking == "no row")


def test_a_table_says_how_many_seeds_its_own_rows_have(tmp_path):
    comparison = study(tmp_path)
    elsewhere = run(tmp_path, "t5/6-corruption-rate/10", 0, 1.0)
    comparison.runs["t5/6-corruption-rate/10"] = [elsewhere]  # as of a report on several tables
    said = " ".join(text.claims_notes(comparison, comparison.verdicts()))
    assert "With 5 seeds per pair" in said and "one seed" not in said


def test_the_power_beside_the_claims_names_the_tests_that_it_is_of(tmp_path):
    comparison = study(tmp_path)
    said = " ".join(text.claims_notes(comparison, comparison.verdicts()))
    assert "With 5 seeds per pair and 3 claims of this table, a difference of" in said
    comparison.runs["t5/4-objective/deshuffling"] = []  # the power is still that of all three tests
    part = Comparison(TABLE, comparison.runs, comparison.experiments, pytest.fail)
    said = " ".join(text.claims_notes(part, part.verdicts()))
    assert len(measure_noise(part, "reading").pairs) == 3
    assert "and all 3 pairs of rows in this table's claims (1 of them tested here), a difference of" in said


def test_claims_about_rows_that_were_made_of_other_things_are_marked(tmp_path):
    matching = study(tmp_path)
    mismatch = Mismatch("t5/4-objective/prefix-lm", 0, "other code")
    mismatches = {mismatch.row: [mismatch]}
    comparison = Comparison(TABLE, matching.runs, matching.experiments, pytest.fail, mismatches)
    said = " ".join(text.claims_notes(comparison, comparison.verdicts()))
    assert "claims about rows with ≠: 1 confirmed, 0 contradicted, 0 undecided" in said
    names = [
        cell.text
        for cell in text.claims_sheet(comparison.verdicts(), "updates", comparison.mismatches)["claim"]
    ]
    assert [name.endswith("≠") for name in names] == ["prefix-lm" in name for name in names]
    rows = table_data(comparison, comparison.verdicts())["rows"]
    assert [row["unlike"] for row in rows.values()] == [
        ["t5/4-objective/prefix-lm seed 0: other code"],
        [],
        [],
    ]


def test_runs_that_differ_in_the_same_thing_share_a_line(tmp_path):
    matching = study(tmp_path)
    reason = "other code than t/c seed 0: x.py"
    mismatches = {
        "t/a": [Mismatch("t/a", seed, reason) for seed in (0, 1)],
        "t/b": [Mismatch("t/b", 0, reason), Mismatch("t/b", 0, "its provenance is unknown: why")],
    }
    comparison = Comparison(TABLE, matching.runs, matching.experiments, pytest.fail, mismatches)
    assert [line for line in text.mismatch_note(comparison).splitlines() if line.startswith("- ")] == [
        f"- t/a seeds 0, 1; t/b seed 0: {reason}",
        "- t/b seed 0: its provenance is unknown: why",
    ]


def test_a_damaged_file_of_examples_is_named_and_the_rest_counts(tmp_path):
    comparison, said = study(tmp_path), []
    comparison.warn = said.append
    path = comparison.runs[NAMES[0]][0].folder / "finetuning" / "report" / "cloze.npy"
    path.write_bytes(path.read_bytes()[:50])
    assert words(comparison, "updates")["bert-style > prefix-lm"] == "confirmed"
    assert len(said) == 1 and str(path) in said[0]


def test_chance_is_told_in_standard_errors_and_columns_by_what_they_measure(tmp_path):
    sheet = text.metrics_sheet(study(tmp_path))
    assert [cell.text for cell in sheet["column"]] == [
        "cloze [bits above chance]",
        "restore [bits per byte ↓]",
    ]
    assert sheet["baseline above chance"][0].text.startswith("+")


def test_a_row_whose_seeds_agree_and_whose_examples_are_unknown_has_no_distance_from_chance(tmp_path):
    comparison = study(tmp_path, seeds=3)
    for each in comparison.runs[BASE]:
        each.tasks["cloze"]["metrics"]["bits_above_chance"] = 0.1  # three of which have a mean beside 0.1
        each.stages.clear()
    comparison.warn = lambda line: None
    assert comparison.standard_errors_above_chance(comparison.metrics[0], BASE) is None


def test_an_accuracy_is_above_chance_by_the_errors_of_seeds_and_kept_examples_or_nothing_is_said(tmp_path):
    comparison = study(tmp_path, seeds=3)
    right = 100.0 * (np.arange(EXAMPLES) < 0.6 * EXAMPLES)
    for runs in comparison.runs.values():
        for each in runs:
            each.tasks["cloze"] |= {"measure": "score", "score": right.mean(), "metrics": {}, "chance": 50.0}
    without = Comparison(TABLE, comparison.runs, comparison.experiments, lambda line: None)
    assert without.metrics[0].chance == 50
    assert without.standard_errors_above_chance(without.metrics[0], BASE) is None
    for runs in comparison.runs.values():
        for each in runs:
            stage = each.folder / "finetuning"
            each.tasks["cloze"]["examples"] = write_example_values(stage, "cloze", {"score": right})
    kept = Comparison(TABLE, comparison.runs, comparison.experiments, pytest.fail)
    errors = kept.standard_errors_above_chance(kept.metrics[0], BASE)
    assert errors == pytest.approx(10 / (right.std() / EXAMPLES**0.5), rel=0.03)
    assert kept.noise["cloze"].examples == pytest.approx(right.std() / EXAMPLES**0.5, rel=0.03)


def test_the_baselines_answers_are_shown_in_each_metric_of_a_task(tmp_path):
    comparison = study(tmp_path, seeds=2)
    for each in (each for runs in comparison.runs.values() for each in runs):
        each.tasks["cloze"]["metric"] = "f1 and exact_match"
        each.tasks["cloze"]["metrics"] |= {"f1": 50.0 + each.seed, "exact_match": 30.0 + each.seed}
    answers = text.metrics_sheet(comparison)["baseline answers"]
    assert [cell.text for cell in answers] == ["50.5 f1, 30.5 exact match", "–"]


def test_every_panel_of_a_picture_shows_something(tmp_path):
    comparison = study(tmp_path)
    figures = table_figures(comparison, dict.fromkeys(comparison.canonical_names, {}))
    assert [name.removeprefix("t5-4-objective") for name in figures] == ["", "-crossing"]
    for grid in figures.values():
        for axes in draw_plots(grid).axes:
            assert axes.has_data() or not axes.get_visible()
    crossing = figures["t5-4-objective-crossing"]
    assert all("[standard deviations of a run]" in panel.y_label for panel in crossing.panels)
    curves = crossing.panels[0].curves
    assert len(curves) == 3 and all(len(curve.x) == 3 for curve in curves.values())


def test_the_papers_column_of_the_same_kind_stands_once_beside_ours():
    column = Metric("cloze", ("cloze",), "bits_above_chance", "SQuAD", 0.0, ("em",), "reading")
    other = Metric("extract", ("extract",), "bits_above_chance", "SQuAD", 0.0, ("em",), "reading")
    experiments = {name: build(name, "nano") for name in (*NAMES, BASE)}
    comparison = Comparison(TABLE, dict.fromkeys(experiments, []), experiments, pytest.fail)
    vars(comparison)["metrics"] = [column, other]
    heads = list(text.scores_sheet(comparison))
    assert heads[:4] == ["row", column.title, "paper's SQuAD", other.title]


def test_every_metric_of_a_row_is_compared_in_its_own_direction(tmp_path):
    better = {"held_out_loss": 2.0}
    comparison = study(tmp_path, prefix_lm=better)
    by_name = {metric.name: metric for metric in comparison.metrics}
    assert {name: metric.sign for name, metric in by_name.items()} == {
        "cloze": 1,
        "restore": -1,
        "held-out loss": -1,
    }
    assert by_name["held-out loss"] not in comparison.judging_metrics, "tasks are what the claims are about"
    objectives = {name: comparison.experiments[name].objective for name in (*NAMES, BASE)}
    compared = comparison.differences(by_name["held-out loss"])
    assert all(objectives[name] == objectives[BASE] for name in compared), "and no others"


@pytest.mark.parametrize("changed", ["decoder", "prefix-decoder", "shared-encoder-decoder"])
def test_held_out_loss_compares_architectures_that_predict_the_same_tokens(changed):
    loss = Metric("held-out loss", ("held-out loss",), "held-out loss")
    base = build(BASE, "nano")
    other = change(base, "model.architecture", changed)
    assert has_same_targets(loss, base, other) == (changed == "shared-encoder-decoder")
    assert has_same_targets(Metric("cloze", ("cloze",), "score"), base, other)


def test_more_seeds_than_are_resampled_make_no_pair_surer(tmp_path, monkeypatch):
    every, some = vary_examples(study(tmp_path)), vary_examples(study(tmp_path))
    pair = ("t5/4-objective/bert-style", "t5/4-objective/prefix-lm")
    known = every.difference(*pair, "updates", "reading").example_variance
    monkeypatch.setattr("experiments.report.comparison.MAX_RESAMPLED_SEEDS", 2)
    assert some.difference(*pair, "updates", "reading").example_variance > known > 0


def with_language(comparison: Comparison, levels: dict[str, float]) -> Comparison:
    """Add a task of the language half, of which each row has its ``levels``, to all runs."""
    for name, runs in comparison.runs.items():
        for one in runs:
            noise = 0.05 * np.random.default_rng([one.seed, *name.encode()]).normal()
            level = levels[name.rpartition("/")[2]] + noise
            one.tasks["agreement"] = task("agreement", level, "bits_above_chance")
            one.branches["agreement"] = {str(u): one.tasks["agreement"] for u in (50, 100)}
    return comparison


def test_claims_are_judged_on_each_half_of_the_tasks_and_on_both_with_equal_weight(tmp_path):
    opposite = {"prefix-lm": 0.9, "bert-style": 0.1, "deshuffling": 2.0, "baseline": 1.0}
    comparison = with_language(study(tmp_path), opposite)
    assert comparison.groups == {
        "reading": {"cloze": 0.5, "restore": 0.5},
        "language": {"agreement": 1.0},
        "both": {"cloze": 0.25, "restore": 0.25, "agreement": 0.5},
    }
    assert comparison.main_group == "reading", "all columns of the paper read their input"
    assert words(comparison, "updates", "reading")["bert-style > prefix-lm"] == "confirmed"
    assert words(comparison, "updates", "language")["bert-style > prefix-lm"] == "contradicted"
    verdicts = comparison.verdicts()
    said = text.verdict_sentence(comparison, verdicts)
    assert "by the reading tasks: 2 confirmed, 1 contradicted. By the tasks on language: " in said
    alike = verdicts | {"language": verdicts["reading"]}
    assert "By the tasks on language" not in text.verdict_sentence(comparison, alike)
    decided = verdicts["reading"]["updates"]
    equal = [(claim, replace(verdict, word="equivalent")) for claim, verdict in decided[:2]] + decided[2:]
    judged = {"reading": verdicts["reading"] | {"updates": equal}}
    assert "2 undecided. Of the undecided 2 are equivalent." in text.verdict_sentence(comparison, judged)
    reading, language, both = (comparison.combined_scores(NAMES[0], g) for g in comparison.groups)
    assert all(both[seed] == pytest.approx((reading[seed] + language[seed]) / 2) for seed in both)
    orders = comparison.paper_orders
    assert orders["language"].tau == -1 and orders["reading"].tau > 0
    assert list(text.order_sheet(comparison)["tasks"])[0].text == "reading"
    assert set(comparison.verdicts()["both"]) == {"updates", "FLOP"}, "content tokens have no verdict"


def test_a_row_whose_runs_end_in_two_ways_does_not_change_the_unit():
    rng = np.random.default_rng(0)
    rows = [rng.normal(size=5) for _ in range(500)]
    assert typical_std(rows) == pytest.approx(1, rel=0.05), "the true deviation, for any number of seeds"
    assert typical_std([*rows, *(row[:2] for row in rows)]) == pytest.approx(1, rel=0.05)
    assert typical_std([*rows, [0.0, 100.0] * 3]) == pytest.approx(typical_std(rows), rel=1e-2)
    assert typical_std([*rows, *[[1.451, 1.451]] * 1_000]) == typical_std(rows), (
        "counted models have no noise"
    )
    assert typical_std([[1.0], []]) == 0


@pytest.mark.parametrize("seeds", [[2], [2, 2], [5, 2], [3, 3, 3], [2, 5, 3, 3], [5] * 8])
def test_the_unit_of_any_number_of_rows_is_right_on_average(seeds):
    rng = np.random.default_rng(0)
    units = [typical_std([rng.normal(size=n) for n in seeds]) for _ in range(4_000)]
    assert np.mean(np.square(units)) == pytest.approx(1, abs=4 * np.std(np.square(units)) / 4_000**0.5)


def test_the_unit_of_a_metric_is_that_of_all_tables_together(tmp_path):
    quiet, noisy = study(tmp_path), study(tmp_path / "b")
    for runs in noisy.runs.values():
        for one in runs:
            one.tasks["cloze"]["metrics"]["bits_above_chance"] += 2.0 * one.seed
    experiments = {name: change(each, "seed", 7) for name, each in noisy.experiments.items()}
    noisy.experiments = experiments  # another study
    apart = [typical_noise([each])["cloze"].std for each in (quiet, noisy)]
    share_noise([quiet, noisy])
    assert quiet.noise_std == noisy.noise_std and apart[0] < quiet.noise_std["cloze"] < apart[1]
    before = quiet.noise_std["cloze"]
    share_noise([quiet, noisy, quiet])
    assert quiet.noise_std["cloze"] == pytest.approx(before), "an experiment of two tables counts once"


def test_a_row_that_adds_nothing_to_the_start_alone_is_shown_as_such(tmp_path, monkeypatch):
    comparison = study(tmp_path)
    control = "t5/6-corruption-rate/50"
    monkeypatch.setattr("experiments.report.comparison.START_ONLY_ROW", control)
    assert comparison.control is None and comparison.gains_over_start("reading") == {}
    comparison.runs[control] = [run(tmp_path, control, seed, 2.5) for seed in range(5)]
    comparison.experiments[control] = change(comparison.experiments[BASE], "objective.rate", 0.5)
    cells = text.scores_sheet(comparison)["over the start alone, reading"]
    marks = [cell.text.rpartition(")")[2] for cell in cells]
    assert marks == [", worse", "", ", undecided"], "levels 2, 3, 2.5"
    monkeypatch.setattr("experiments.report.comparison.EQUIVALENCE_MARGIN", 4.0)
    cells = text.scores_sheet(comparison)["over the start alone, reading"]
    assert cells[2].text.endswith("), adds nothing"), "it is surely closer than the margin"
    other = NAMES[1]
    settings = change(comparison.experiments[other], "model.num_encoder_layers", 1)
    comparison.experiments[other] = settings
    cells = text.scores_sheet(comparison)["over the start alone, reading"]
    assert cells[1].text == "–", "another model has a start of its own"


def test_tables_whose_claims_are_about_other_tasks_have_no_share_of_confirmed_ones(tmp_path):
    comparison = study(tmp_path)
    about_language = replace(
        TABLE,
        paper=None,
        columns=(),
        conclusions=(Conclusion("bert-style", "prefix-lm", "it writes better", tasks="language"),),
    )
    other = Comparison(about_language, comparison.runs, comparison.experiments, pytest.fail)
    pair = [comparison, other]
    note = text.all_claims_note([each.verdicts() for each in pair], pair)
    assert "reading, after training: " in note and "of 1 table;" in note and "nan" not in note
    assert text.all_claims_note([other.verdicts()] * 2, [other] * 2).count("reading") == 0


def test_a_table_of_latex_has_the_difference_of_a_claim_in_the_half_that_it_is_about(tmp_path):
    comparison = study(tmp_path)
    halves = [
        Conclusion("deshuffling", "prefix-lm", "it reads better", tasks="reading"),
        Conclusion("bert-style", "prefix-lm", "it writes better", tasks="language"),
    ]
    table = replace(TABLE, paper=None, columns=(), conclusions=tuple(halves))
    judged = Comparison(table, comparison.runs, comparison.experiments, pytest.fail)
    verdicts = judged.verdicts()
    turned = {budget: [*each][::-1] for budget, each in verdicts["reading"].items()}
    sheet = claims_table(judged, verdicts | {"language": turned}, "updates", "nano").sheet
    assert [cell.text for cell in sheet["ours"]][1].startswith("+"), "the difference in language"
    assert [cell.text for cell in sheet["verdict"]] == ["confirmed", "confirmed, by language"]


def test_conclusions_in_columns_that_are_not_measured_do_not_wait_for_runs(tmp_path):
    comparison = study(tmp_path)
    told = Conclusion("bert-style", "prefix-lm", "it translates better", column="EnDe")
    waiting = Conclusion("bert-style", "deshuffling", "it reads better")
    table = replace(TABLE, columns=("GLUE",), conclusions=(told, waiting))
    note = text._conclusion_notes(Comparison(table, comparison.runs, {}, pytest.fail), [])[0]
    assert "states 2 conclusions; 1 of them waits for runs" in note and "1 cannot be tested here" in note


def test_rows_on_the_plateau_are_left_out_of_the_scores_of_another_report(tmp_path):
    stuck = {"exit_step": None}
    comparison = study(tmp_path, prefix_lm=stuck)
    path = tmp_path / "results.json"
    write(path, json_with_checksum(report_data([comparison], [comparison.verdicts()], "", "nano")))
    rows = read_combined_scores(path)[TABLE.name]["reading"]
    assert rows.keys() == {row.name for row in TABLE.rows} - {"t5/4-objective/prefix-lm"}
    assert rows.keys() == combined_scores(comparison)["reading"].keys()


def test_a_row_with_some_of_the_papers_scores_has_no_distance_in_the_paper(tmp_path):
    comparison = study(tmp_path)
    first, *others = TABLE.rows
    partial = replace(first, published={k: v for k, v in first.published.items() if k != "GLUE"})
    table = replace(TABLE, rows=(partial, *others))
    distances = text._published_distances(
        Comparison(table, comparison.runs, comparison.experiments, pytest.fail), table.rows
    )
    assert [cell.text == "–" for cell in distances] == [True, False, False]


def test_a_row_of_the_table_is_its_control_only_with_a_finished_run(tmp_path, monkeypatch):
    comparison = study(tmp_path)
    monkeypatch.setattr("experiments.report.comparison.START_ONLY_ROW", NAMES[0])
    assert comparison.control == NAMES[0]
    comparison.runs[NAMES[0]] = []
    assert comparison.control is None


def test_a_paper_whose_rows_are_compared_in_no_column_has_no_column_in_the_brief_table():
    table = TABLES["tay/released-shapes"]
    rows = [row.name for row in table.rows]
    comparison = Comparison(table, dict.fromkeys([*rows, table.baseline], []), {}, pytest.fail)
    assert text._published_distances(comparison, table.rows) == []


def test_what_a_task_loses_with_inputs_of_other_examples_stands_beside_its_score(tmp_path, monkeypatch):
    comparison = study(tmp_path)
    assert "baseline, inputs shuffled" not in text.metrics_sheet(comparison)
    for one in comparison.runs[BASE]:
        one.tasks["cloze"]["shuffled"] = {"score": 0.1, "rows": 40}
    cell = text.metrics_sheet(comparison)["baseline, inputs shuffled"][0]
    assert cell.text.startswith("0.100, loses 9") and cell.value == pytest.approx(0.1)
    cloze = comparison.metrics[0]
    for errors, is_share in ((None, True), (3.0, True), (2.9, False), (-1.0, False)):
        monkeypatch.setattr(Comparison, "standard_errors_above_chance", lambda *_, found=errors: found)
        assert ("loses" in text._shuffled_cell(comparison, cloze).text) == is_share, "a share of nothing"
    comparison._values_by_seed[cloze.name][BASE] = {}
    assert text._shuffled_cell(comparison, cloze).text == "–", "the baseline lacks another of its tasks"


def test_counts_of_claims_that_are_equal_at_both_budgets_are_told_once(tmp_path):
    comparison = study(tmp_path)
    verdicts = comparison.verdicts()
    lines = text.claims_notes(comparison, verdicts)[0].splitlines()
    assert [line.partition(":")[0] for line in lines if "reading" in line] == [
        "- reading, after training",
        "- reading, compute-matched",
    ]
    same = {group: dict.fromkeys(by_budget, by_budget["updates"]) for group, by_budget in verdicts.items()}
    lines = text.claims_notes(comparison, same)[0].splitlines()
    line = "- reading, after training and compute-matched: "
    assert [each.startswith(line) for each in lines if "reading" in each] == [True]
    lines = text.all_claims_note([same, same], [comparison, comparison]).splitlines()
    assert [each.startswith(line) for each in lines if "reading" in each] == [True]


def test_claims_are_weighted_so_that_a_large_table_is_one_vote():
    few, many = VerdictCounts(1, 0, 0), VerdictCounts(10, 30, 2)
    assert text._mean_share_text([few, many]).startswith(f"{(1 + 10 / 42) / 2:.0%} of 2 tables; in all 11 ")

"""From runs made by hand to verdicts on the paper's claims: columns that count, frames, rows that learn."""

from pathlib import Path

import numpy as np
import pytest

from experiments.report import scoreboard
from experiments.report.columns import FRAMES, Growth, Measured, leaving
from experiments.report.comparison import Evidence, Finished, grown
from experiments.report.plots import draw_figures
from experiments.report.records import table_data
from experiments.runs.result import Result
from experiments.runs.scores import write_example_values
from experiments.study.registry import REGISTRY, build, find, tables_of
from lm.config.base import change

(TABLE,) = tables_of(find("t5/4-objective"))
NAMES = [row.name for row in TABLE.rows]
BASE = "t5/1-baseline/baseline"
UPDATES, EXAMPLES = 200, 100
TOKENS = {
    "t5/4-objective/prefix-lm": 4000,
    "t5/4-objective/deshuffling": 8000,
}  # of all pre-training; else 1,000


def task(name: str, value: float, measure: str) -> dict:
    metrics = {measure: value, "loss": 1.0}
    chance = 0.0 if measure == "bits_above_chance" else None
    kind = {"column": name, "metric": "em", "measure": measure, "step": 9, "chance": chance, "rows": EXAMPLES}
    return kind | {"score": value, "metrics": metrics}


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
    counted = {"content_tokens": TOKENS.get(name, 1000), "content_loss": 5.0, "reference_loss": 6.0}
    return Result(
        columns={},
        tasks={"cloze": cloze, "restore": words},
        held_out_loss=3.0,
        seconds=60.0,
        tokens=9,
        folder=home,
        phases={"cloze": f"{name}/seed-{seed}/finetuning"},
        branches=branches,
        **counted | {"exit_step": 50, "flops": 1e9} | given,
    )


LEVELS = {"prefix-lm": 2.0, "bert-style": 3.0, "deshuffling": 2.5, "baseline": 1.0}


def study(folder: Path, seeds: int | range = 5, levels=LEVELS, **given) -> Evidence:
    """Evidence of Table 4; ``given``: fields of the result of the row named so."""
    seeds = range(seeds) if isinstance(seeds, int) else seeds
    names = [*NAMES, BASE]
    runs = {
        name: [run(folder, name, s, levels[last], **given.get(last.replace("-", "_"), {})) for s in seeds]
        for name, last in ((name, name.rpartition("/")[2]) for name in names)
    }
    settings = {name: build(name, "nano") for name in names}
    settings = {name: change(settings[name], "pretraining.steps", UPDATES) for name in names}
    return Evidence(Finished(TABLE, REGISTRY[BASE], runs, settings), pytest.fail)


def words(evidence: Evidence, frame) -> dict[str, str]:
    """Claim -> the verdict on it."""
    found = evidence.verdicts()[frame]
    names = [f"{claim.better.name} > {claim.worse.name}".replace("t5/4-objective/", "") for claim, _ in found]
    return dict(zip(names, (verdict.word for _, verdict in found), strict=True))


def test_a_claim_is_confirmed_or_contradicted_by_the_rows_that_it_names(tmp_path):
    assert words(study(tmp_path), "updates") == {
        "bert-style > prefix-lm": "confirmed",
        "prefix-lm > deshuffling": "contradicted",
        "bert-style > deshuffling": "confirmed",
    }


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
    evidence = study(tmp_path, seeds=1)
    assert set(words(evidence, "updates").values()) == {"undecided"}
    assert "train more" in " ".join(scoreboard.conclusions(evidence, evidence.verdicts()))


def test_a_row_that_has_not_left_the_plateau_is_not_ordered(tmp_path):
    evidence = study(tmp_path, prefix_lm={"exit_step": None})
    assert words(evidence, "updates") == {
        "bert-style > prefix-lm": "not yet learning",
        "prefix-lm > deshuffling": "not yet learning",
        "bert-style > deshuffling": "confirmed",
    }
    board = scoreboard.scoreboard(evidence)
    assert [cell.text == "not yet learning" for cell in board["combined"]] == [True, False, False]
    assert board["exit step"][0].text == "5 of 5 not left"
    unpretrained = study(tmp_path / "b", prefix_lm={"exit_step": None, "content_loss": None})
    assert "not yet learning" not in words(unpretrained, "updates").values()


def test_rows_meet_where_the_one_that_spent_less_ends_and_nothing_is_extrapolated(tmp_path):
    got = words(study(tmp_path), "content tokens")
    # BERT-style has 1,000 tokens. Prefix LM has 4,000, of which its first branch spent 1,000; deshuffling
    # has 8,000 and spent 2,000 by its first.
    assert got["bert-style > deshuffling"] == "out of range"
    assert got["bert-style > prefix-lm"] == "confirmed"
    # 4,000 tokens are half of deshuffling's: 1.25 there against 2.0
    assert got["prefix-lm > deshuffling"] == "confirmed"


def test_between_branches_a_score_is_linear_in_the_logarithm_of_what_was_spent():
    spent = {frame: np.array([1.0, 4.0]) for frame in FRAMES}
    growth = Growth(spent, {"cloze": np.array([0.0, 1.0])})
    assert growth.at("FLOP", 2.0, "cloze") == pytest.approx(0.5)
    assert growth.at("FLOP", 4.0, "cloze") == 1.0
    assert growth.at("FLOP", 0.9, "cloze") is growth.at("FLOP", 4.1, "cloze") is None


def test_the_start_that_rows_share_counts_as_spent(tmp_path):
    settings = change(change(build(BASE, "nano"), "pretraining.steps", UPDATES), "start.steps", 200)
    growth = grown(run(tmp_path, BASE, 0, 1.0, start_tokens=600, start_flops=4e8), [], settings)
    assert growth.spent["content tokens"].tolist() == [700.0, 800.0, 1000.0]
    assert growth.spent["FLOP"].tolist() == pytest.approx([0.55e9, 0.7e9, 1e9])
    assert growth.spent["updates"].tolist() == [50, 100, 200]


def test_a_column_whose_rows_differ_by_less_than_three_deviations_is_shown_and_not_averaged(tmp_path):
    evidence = study(tmp_path)
    assert [column.name for column in evidence.kept] == ["cloze", "restore"]
    noisy = study(tmp_path / "b", levels=dict.fromkeys(LEVELS, 1.0))
    assert noisy.kept == []
    assert all("not averaged" in cell.text for cell in scoreboard.measures(noisy)["signal-to-noise"])


def test_a_column_whose_baseline_is_not_surely_above_chance_is_not_averaged(tmp_path):
    evidence = study(tmp_path, levels=LEVELS | {"baseline": 0.0})
    assert [column.name for column in evidence.kept] == ["restore"]
    assert evidence.signals["cloze"] > 3
    assert "of chance: not averaged" in scoreboard.measures(evidence)["signal-to-noise"][0].text


def test_the_combined_score_is_the_mean_difference_in_deviations_and_less_bits_per_byte_are_better(tmp_path):
    evidence = study(tmp_path)
    cloze, restore = evidence.kept
    assert (cloze.better, restore.better) == (1, -1)
    name = "t5/4-objective/bert-style"
    runs = evidence.finished.runs
    parts = []
    for column in evidence.kept:
        base = np.mean([column.value(run.tasks) for run in runs[BASE]])
        ahead = column.better * (column.value(runs[name][2].tasks) - base)
        parts.append(ahead / evidence.units[column.name])
    assert evidence.combined(name)[2] == pytest.approx(np.mean(parts))
    assert set(evidence.marks(restore).values()) == {1}, "every row has fewer bits per byte than the baseline"
    assert np.mean([*evidence.combined(BASE).values()]) == pytest.approx(0)


def test_a_column_that_happens_to_repeat_well_counts_no_more_than_its_examples_allow(tmp_path):
    evidence = study(tmp_path)
    cloze, restore = (evidence.finished.deviation(column) for column in evidence.kept)
    assert cloze == pytest.approx(restore), "the same noise, and of cloze alone the examples are known"
    values = evidence.finished.runs[BASE][0].example_values("cloze")["bits"]
    by_examples = np.std(values) / np.sqrt(EXAMPLES)
    assert evidence.units["cloze"] == pytest.approx(np.hypot(cloze, by_examples), rel=0.02)
    assert evidence.units["restore"] == pytest.approx(restore)


def test_the_noise_of_examples_counts_where_they_were_kept(tmp_path):
    evidence = study(tmp_path)
    difference = evidence.difference(NAMES[1], NAMES[0], "updates")
    assert difference.by_examples.shape == (5, 10_000)
    assert np.allclose(difference.by_examples, 0, atol=1e-9), "all rows find the same examples hard"
    cloze = evidence.kept[0]
    values = [*evidence.finished.samples(cloze)[BASE].values()]
    error = np.mean(values) / evidence.from_chance(cloze)
    seeds = np.std(values, ddof=1) / 5**0.5
    bits = np.random.default_rng(0).normal(size=EXAMPLES)
    assert error == pytest.approx(np.hypot(seeds, bits.std() / EXAMPLES**0.5), rel=0.03)


def vary_examples(evidence: Evidence) -> Evidence:
    """Each run finds other examples hard."""
    for runs in evidence.finished.runs.values():
        for one in runs:
            noise = np.random.default_rng([one.seed, *str(one.folder).encode()]).normal(size=EXAMPLES)
            values = {"bits": noise - noise.mean() + one.tasks["cloze"]["score"]}
            one.tasks["cloze"]["examples"] = write_example_values(one.folder / "finetuning", "cloze", values)
    return evidence


def test_a_seed_without_examples_makes_no_pair_surer_and_is_named(tmp_path):
    every, some, said = vary_examples(study(tmp_path)), vary_examples(study(tmp_path)), []
    some.complain = said.append
    some.finished.runs["t5/4-objective/prefix-lm"][0].phases.clear()  # its values of examples are not found
    pair = ("t5/4-objective/bert-style", "t5/4-objective/prefix-lm")
    known, lacking = (x.difference(*pair, "updates").example_variance for x in (every, some))
    assert lacking >= known > 0
    assert said == [f"{pair[1]} seed 0: the values of its examples of cloze are missing; not drawn"]


def test_of_runs_with_other_examples_the_few_are_left_out_and_not_the_many(tmp_path):
    evidence, said = study(tmp_path), []
    evidence.complain = said.append
    odd = evidence.finished.runs[NAMES[0]][0]  # the first that is read
    odd.tasks["cloze"]["examples"] = write_example_values(
        odd.folder / "finetuning", "cloze", {"bits": np.ones(EXAMPLES // 2)}
    )
    others = evidence.difference(NAMES[1], NAMES[2], "updates")
    assert others.by_examples is not None
    assert said == [f"{NAMES[0]} seed 0: its examples of cloze are other ones than those of most runs"]


def test_a_run_without_a_score_that_counts_is_in_no_claim_and_is_named(tmp_path):
    evidence, said = study(tmp_path), []
    evidence.complain = said.append
    del evidence.finished.runs[NAMES[0]][2].tasks["restore"]
    assert len(evidence.difference(NAMES[0], NAMES[1], "updates").by_seed) == 4
    assert said == [f"{NAMES[0]} seed 2 has no score in restore: it is in no combined score"]


def test_rows_without_a_common_seed_are_not_compared_and_it_is_said_why(tmp_path):
    evidence = study(tmp_path)
    runs = evidence.finished.runs
    runs["t5/4-objective/prefix-lm"] = runs["t5/4-objective/prefix-lm"][:2]
    runs["t5/4-objective/deshuffling"] = runs["t5/4-objective/deshuffling"][2:]
    assert words(evidence, "updates")["prefix-lm > deshuffling"] == "no common seed"
    counts = scoreboard.count_verdicts(evidence.verdicts()["updates"])
    assert (counts.confirmed, counts.uncompared) == (2, 1)
    assert "1 not compared" in scoreboard.decision_accuracy(counts)


def test_a_row_with_few_seeds_is_told_from_the_same_seeds_of_the_baseline(tmp_path):
    evidence = study(tmp_path)
    runs = evidence.finished.runs
    runs[NAMES[0]] = runs[NAMES[0]][3:]
    parts = []
    for column in evidence.kept:
        mine, base = (column.value(next(r for r in runs[n] if r.seed == 4).tasks) for n in (NAMES[0], BASE))
        other = column.value(next(r for r in runs[BASE] if r.seed == 3).tasks)
        parts.append(column.better * (mine - (base + other) / 2) / evidence.units[column.name])
    assert evidence.combined(NAMES[0])[4] == pytest.approx(np.mean(parts))


@pytest.mark.parametrize("setting", [("mixing.pretraining", "tasks"), ("data.repeats", 64)])
def test_a_row_that_learns_what_held_out_text_does_not_tell_has_no_plateau_to_leave(tmp_path, setting):
    """Tasks beside the corpus or in its place, or a few texts by heart."""
    evidence = study(tmp_path, prefix_lm={"exit_step": None})
    settings = evidence.finished.settings
    row = "t5/4-objective/prefix-lm"
    settings[row] = change(settings[row], *setting)
    assert words(evidence, "updates")["prefix-lm > deshuffling"] != "not yet learning"
    board = scoreboard.scoreboard(evidence)
    assert "not yet learning" not in [cell.text for cell in board["combined"]]
    assert board["exit step"][0].text == "–"
    this, alone = settings[row], settings[BASE]
    never = evidence.finished.runs[row][0].exit_step
    assert (leaving(never, this), leaving(never, alone)) == ("", "; plateau not left")


def test_rows_are_not_compared_where_one_had_not_left_the_plateau_yet(tmp_path):
    """Prefix LM has left it in the end, and not where it had spent what BERT-style spends in all."""
    late = study(tmp_path, prefix_lm={"exit_step": 150})
    assert words(late, "updates")["bert-style > prefix-lm"] == "confirmed"
    assert words(late, "content tokens")["bert-style > prefix-lm"] == "not yet learning"
    early = study(tmp_path / "b", prefix_lm={"exit_step": 50})
    assert words(early, "content tokens")["bert-style > prefix-lm"] == "confirmed"
    runs = late.finished.runs
    runs["t5/4-objective/bert-style"] = runs["t5/4-objective/bert-style"][:2]
    fewer = Evidence(late.finished, pytest.fail)  # only the seeds that both have count
    assert words(fewer, "content tokens")["bert-style > prefix-lm"] == "not yet learning"


def test_a_table_whose_claims_are_not_judged_says_nothing_of_seeds(tmp_path):
    plateau = {"exit_step": None}
    evidence = study(tmp_path, prefix_lm=plateau, bert_style=plateau, deshuffling=plateau)
    assert {*words(evidence, "updates").values()} == {"not yet learning"}
    said = " ".join(scoreboard.conclusions(evidence, evidence.verdicts()))
    assert "3 not compared" in said and "seed" not in said


def test_a_table_whose_baseline_has_not_finished_is_drawn(tmp_path):
    evidence = study(tmp_path)
    evidence.finished.runs[BASE] = []
    panels = draw_figures(evidence, {name: {} for name in NAMES})["t5-4-objective"]
    assert all(axis.has_data() or not axis.get_visible() for axis in panels.axes)


def test_a_table_says_how_many_seeds_its_own_rows_have(tmp_path):
    evidence = study(tmp_path)
    elsewhere = run(tmp_path, "t5/6-corruption-rate/10", 0, 1.0)
    evidence.finished.runs["t5/6-corruption-rate/10"] = [elsewhere]  # as of a report on several tables
    said = " ".join(scoreboard.conclusions(evidence, evidence.verdicts()))
    assert "With 5 seeds a pair" in said and "one seed" not in said


def test_claims_about_rows_that_were_made_of_other_things_are_marked(tmp_path):
    evidence = study(tmp_path)
    evidence = Evidence(evidence.finished, pytest.fail, {"t5/4-objective/prefix-lm": ["other code"]})
    said = " ".join(scoreboard.conclusions(evidence, evidence.verdicts()))
    assert "claims about rows with ≠: 1 confirmed, 0 contradicted, 0 undecided" in said
    names = [cell.text for cell in scoreboard.verdict_sheet(evidence.verdicts(), evidence.unlike)["claim"]]
    assert [name.endswith("≠") for name in names] == ["prefix-lm" in name for name in names]
    rows = table_data(evidence, evidence.verdicts())["rows"]
    assert [row["unlike"] for row in rows.values()] == [["other code"], [], []]


def test_a_damaged_file_of_examples_is_named_and_the_rest_counts(tmp_path):
    evidence, said = study(tmp_path), []
    evidence.complain = said.append
    path = evidence.finished.runs[NAMES[0]][0].folder / "finetuning" / "report" / "cloze.npy"
    path.write_bytes(path.read_bytes()[:50])
    assert words(evidence, "updates")["bert-style > prefix-lm"] == "confirmed"
    assert len(said) == 1 and str(path) in said[0]


def test_chance_is_told_in_standard_errors_and_columns_by_what_they_measure(tmp_path):
    sheet = scoreboard.measures(study(tmp_path))
    assert [cell.text for cell in sheet["column"]] == [
        "cloze [bits above chance]",
        "restore [bits per byte ↓]",
    ]
    assert sheet["baseline from chance"][0].text.startswith("+")


def test_every_panel_of_a_picture_shows_something(tmp_path):
    figures = draw_figures(study(tmp_path), {name: {} for name in NAMES})
    assert [name.removeprefix("t5-4-objective") for name in figures] == ["", "-crossing"]
    for figure in (drawn := list(figures.values())):
        for axis in figure.axes:
            assert axis.has_data() or not axis.get_visible()
    lines = drawn[1].axes[0].containers
    assert len(lines) == 3 and all(len(line.lines[0].get_xdata()) == 3 for line in lines)


def test_the_papers_column_of_the_same_kind_stands_once_beside_ours():
    column = Measured("cloze", ("cloze",), "bits_above_chance", "SQuAD", 0.0, "em")
    other = Measured("extract", ("extract",), "bits_above_chance", "SQuAD", 0.0, "em")
    finished = Finished(TABLE, REGISTRY[BASE], {name: [] for name in (*NAMES, BASE)})
    vars(finished)["columns"] = [column, other]
    heads = list(scoreboard.scoreboard(Evidence(finished, pytest.fail)))
    assert heads[:4] == ["row", column.title, "paper's SQuAD", other.title]

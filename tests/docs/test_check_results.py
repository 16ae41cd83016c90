"""The script that checks a report from outside (docs/results/check.py), on small runs made by hand."""

import json
import math
import re
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from paths import ROOT

from experiments.report.report import write_report
from experiments.runs.paths import save_settings
from experiments.runs.result import write_result
from experiments.runs.task_scores import write_example_values
from experiments.study.paths import run_folder
from experiments.study.registry import REGISTRY, build, find, tables_of
from experiments.study.table import Conclusion

SCRIPT = ROOT / "docs/results/check.py"
BASE = "t5/1-baseline/baseline"
LEVELS = {"prefix-lm": 2.0, "bert-style": 3.0, "deshuffling": 2.5, "baseline": 1.0}
MEASURES = {
    "cloze": "bits_above_chance",
    "restore": "bits_per_byte",
    "follows": "score",
    "agreement": "bits_above_chance",
    "determiners": "bits_above_chance",
}
EXAMPLES, SEEDS = 60, 3


def finish(runs: Path, name: str, seed: int) -> None:
    """Write a finished run with five tasks of both halves, scored after half and all of its pre-training."""
    rng = np.random.default_rng([seed, *name.encode()])
    folder, level = run_folder(runs, "nano", name, seed, {}), LEVELS[REGISTRY[name].key]
    experiment = build(name, "nano", {"seed": seed})
    save_settings(folder, experiment)
    tasks, branches = {}, {}
    for place, (task, measure) in enumerate(MEASURES.items()):
        is_reading = place < 3
        bits = (level if is_reading else 4 - level) + rng.normal(size=EXAMPLES)
        if measure == "bits_per_byte":
            bits = 9 - bits
        bits += 0.1 * rng.normal()
        values = {"bits": bits}
        if measure == "score":  # a head's answers, right or wrong
            values = {"score": 100.0 * (bits > 2.0)}
        value = float(np.mean([*values.values()]))
        metrics = {measure: value}
        best = {"column": task, "metric": "em", "measure": measure, "step": 9, "score": value}
        best |= {"half": "reading" if is_reading else "language", "metrics": metrics}
        best |= {"chance": {"bits_above_chance": 0.0, "score": 50.0}.get(measure)}
        half = best | {"score": 0.8 * value, "metrics": {measure: 0.8 * value}}
        branches[task] = {str(experiment.pretraining.steps // 2): half}
        digest = write_example_values(folder / "finetuning", task, values)
        tasks[task] = best | {"examples": digest, "rows": EXAMPLES}
    flops = 1e9 * (2 if name.endswith("deshuffling") else 1)
    counted = {"content_loss": 5.0, "reference_loss": 6.0, "exit_step": 10, "flops": flops}
    scores = {"columns": {}, "tasks": tasks, "branches": branches, "held_out_loss": 3.0, "seconds": 1.0}
    stages = {task: str((folder / "finetuning").relative_to(runs / "nano")) for task in tasks}
    write_result(folder, scores | counted | {"tokens": 9, "phases": stages})


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The folder of small runs, and the results.json of the report on them."""
    runs = tmp_path_factory.mktemp("small") / "runs"
    (table,) = tables_of(find("t5/4-objective"))
    alike = Conclusion("bert-style", "prefix-lm", "as good", relation="equivalent")
    tables = [replace(table, conclusions=(*table.conclusions, alike))]
    for name in (*(row.name for row in table.rows), BASE):
        for seed in range(SEEDS):
            finish(runs, name, seed)
    path = write_report(tables, "nano", runs).path.with_name("results.json")
    return runs, json.loads(path.read_text())


def faults(check_script, runs, report) -> list[str]:
    return check_script.check_report(report, check_script.read_archives([runs])).faults


def test_every_figure_of_a_report_follows_from_its_runs_by_a_script_that_imports_nothing_of_ours(
    published, check_script
):
    assert "import experiments" not in SCRIPT.read_text() and "from experiments" not in SCRIPT.read_text()
    assert "from lm" not in SCRIPT.read_text()
    check = check_script.check_report(published[1], check_script.read_archives([published[0]]))
    assert check.faults == [] and check.count > 200 and len(check.borderline) < 5


TABLE = ("tables", "t5/4-objective")
CLAIM = (*TABLE, "claims", 0, "verdicts", "reading", "updates")
ROW = (*TABLE, "rows", "t5/4-objective/prefix-lm")
RUN = (*ROW, "seeds", "1")
ALTERED = {
    "tau": ((*TABLE, "order", "reading", "tau"), lambda x: -x),
    "p": ((*TABLE, "order", "language", "p"), lambda x: x / 3),
    "interval of tau": ((*TABLE, "order", "both", "interval"), lambda x: [-1.0, -0.9]),
    "a repeat": ((*TABLE, "order", "both", "a repeat of the paper"), lambda x: x - 0.1),
    "z": ((*TABLE, "claims", 0, "z"), lambda x: x + 0.1),
    "verdict": ((*CLAIM, "verdict"), lambda x: "undecided"),
    "difference": ((*CLAIM, "difference"), lambda x: x * 1.01),
    "interval": ((*CLAIM, "interval"), lambda x: [x[0] - 1, x[1] - 1]),
    "unit": ((*TABLE, "columns", "cloze", "unit"), lambda x: x * 1.1),
    "weight": ((*TABLE, "weights", "both", "cloze"), lambda x: 0.3),
    "p of a claim": ((*CLAIM, "p"), lambda x: x / 2),
    "p of equivalence": ((*CLAIM, "p that not equivalent"), lambda x: x / 2),
    "multi-bootstrap": ((*CLAIM, "multi-bootstrap"), lambda x: [x[0] - 1, x[1]]),
    "t of seeds": ((*CLAIM, "by seeds alone", "t"), lambda x: [x[0] - 0.1, x[1]]),
    "BCa of seeds": ((*CLAIM, "by seeds alone", "bca"), lambda x: [x[0], x[1] + 0.1]),
    "difference of a seed": ((*CLAIM, "seeds"), lambda x: [x[0], x[1], x[2] + 0.1]),
    "p of a column": ((*ROW, "less the baseline's", "cloze", "p"), lambda x: x / 2),
    "deviation": ((*TABLE, "columns", "cloze", "deviation"), lambda x: x * 1.1),
    "signal-to-noise": ((*TABLE, "columns", "cloze", "signal-to-noise"), lambda x: x * 1.1),
    "FLOP": ((*RUN, "flops"), lambda x: x * 1.01),
    "parameters": ((*RUN, "parameters"), lambda x: 1),
    "seconds": ((*RUN, "seconds"), lambda x: x / 2),
    "exit step": ((*RUN, "exit_step"), lambda x: x + 1),
    "loss": ((*RUN, "held_out_loss"), lambda x: x - 0.01),
    "tables": (("claims of all tables", "reading", "updates", "tables"), lambda x: x + 1),
    "count": ((*TABLE, "claim counts", "reading", "FLOP", "confirmed"), lambda x: x + 1),
    "mean share": (
        ("claims of all tables", "reading", "updates", "mean share confirmed"),
        lambda x: x / 2,
    ),
    "combined score": (
        (*TABLE, "rows", "t5/4-objective/prefix-lm", "combined", "reading", "1"),
        lambda x: x + 0.01,
    ),
    "score": (
        (*TABLE, "rows", "t5/4-objective/prefix-lm", "seeds", "1", "scores", "cloze"),
        lambda x: x + 0.01,
    ),
    "published score": (
        (*TABLE, "rows", "t5/4-objective/prefix-lm", "published", "GLUE"),
        lambda x: x + 3,
    ),
}
# of a claim, beside its verdict, difference and interval
OTHER_FIGURES = re.compile(r": (p|p that not equivalent|multi-bootstrap|by seeds|difference of a seed)\b")

# figures that others are computed from, so that a change of one is found in several
APART = ("unit", "weight", "mean share", "score", "published score")
CHOSEN = "t5/4-objective/bert-style > t5/4-objective/prefix-lm"
# what the script calls each of the others
TOGETHER = {
    "tau": "order, reading, tau",
    "p": "order, language, p",
    "interval of tau": "order, both, interval",
    "a repeat": "order, both, a repeat of the paper",
    "z": f"{CHOSEN}: z",
    "verdict": f"{CHOSEN}, reading, updates: undecided",
    "difference": f"{CHOSEN}, reading, updates: ",
    "interval": f"{CHOSEN}, reading, updates: interval",
    "p of a claim": f"{CHOSEN}, reading, updates: p: ",
    "p of equivalence": f"{CHOSEN}, reading, updates: p that not equivalent",
    "multi-bootstrap": f"{CHOSEN}, reading, updates: multi-bootstrap",
    "t of seeds": f"{CHOSEN}, reading, updates: by seeds alone, t",
    "BCa of seeds": f"{CHOSEN}, reading, updates: by seeds alone, bca",
    "difference of a seed": f"{CHOSEN}, reading, updates: difference of a seed",
    "p of a column": "prefix-lm less the baseline, cloze: p: ",
    "deviation": "deviation of cloze",
    "signal-to-noise": "signal-to-noise of cloze",
    "FLOP": "prefix-lm seed 1: flops",
    "parameters": "prefix-lm seed 1: parameters",
    "seconds": "prefix-lm seed 1: seconds",
    "exit step": "prefix-lm seed 1: exit_step",
    "loss": "prefix-lm seed 1: held_out_loss",
    "tables": "all tables, reading, updates, tables",
    "count": "counts, reading, FLOP, confirmed",
    "combined score": "prefix-lm seed 1: combined score, reading",
}


def altered(report, *names):
    """The report with other figures in these places."""
    report = deepcopy(report)
    for name in names:
        (*path, last), change = ALTERED[name]
        at = report
        for key in path:
            at = at[key]
        at[last] = change(at[last])
    return report


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in ("unit", "score"))) for name in APART]
)
def test_a_figure_that_is_altered_is_found(name, published, check_script):
    runs, report = published
    assert faults(check_script, runs, altered(report, name)) != []


def test_each_of_several_figures_that_are_altered_is_found_and_named(published, check_script):
    assert ALTERED.keys() == {*APART, *TOGETHER}
    runs, report = published
    found = faults(check_script, runs, altered(report, *TOGETHER))
    for name, label in TOGETHER.items():
        assert any(label in line for line in found), name
    verdict_difference_interval = [
        line for line in found if f"{CHOSEN}, reading, updates: " in line and not OTHER_FIGURES.search(line)
    ]
    assert len(verdict_difference_interval) == 3


def test_one_altered_verdict_is_one_fault_since_the_counts_are_made_from_the_runs(published, check_script):
    (line,) = faults(check_script, published[0], altered(published[1], "verdict"))
    assert line == f"{CHOSEN}, reading, updates: undecided in the report, confirmed from the runs"


def test_a_claim_that_is_left_out_or_a_run_that_scored_otherwise_is_found(published, check_script):
    runs, report = published
    fewer = deepcopy(report)
    del fewer["tables"]["t5/4-objective"]["claims"][0]
    assert any("claims" in line for line in faults(check_script, runs, fewer))
    archive = check_script.read_archives([runs])
    path = next(path for path in archive.scores if "bert-style/seed-1" in path)
    archive.scores[path]["tasks"]["cloze"]["metrics"]["bits_above_chance"] += 1
    assert check_script.check_report(report, archive).faults != []


def test_a_figure_that_is_left_out_or_not_a_number_is_found_and_named(published, check_script):
    runs, report = published
    report = deepcopy(report)
    table = report["tables"]["t5/4-objective"]
    table["order"]["reading"]["tau"] = math.nan
    first, second = (claim["verdicts"]["reading"]["updates"] for claim in table["claims"][:2])
    first["difference"] = math.nan
    first["interval"][0] = math.nan
    del second["p"]
    del second["multi-bootstrap"]
    table["claims"][1]["z"] = None
    row = table["rows"]["t5/4-objective/prefix-lm"]
    del row["seeds"]["1"]["scores"]["cloze"]
    del row["less the baseline's"]["restore"]
    del row["combined"]["both"]
    del table["rows"]["t5/4-objective/deshuffling"]["seeds"]["2"]
    del table["claim counts"]["language"]
    del report["claims of all tables"]["both"]["FLOP"]
    found = faults(check_script, runs, report)
    left_out = f"{table['claims'][1]['better']} > {table['claims'][1]['worse']}"
    for label in (
        "order, reading, tau: nan",
        f"{CHOSEN}, reading, updates: nan",
        f"{CHOSEN}, reading, updates: interval [nan",
        f"{left_out}, reading, updates: p: None",
        f"{left_out}, reading, updates: multi-bootstrap",
        f"{left_out}: z",
        "prefix-lm seed 1: cloze: None",
        "prefix-lm less the baseline, restore: is there",
        "prefix-lm: seeds with a combined score",
        "deshuffling: seeds: [0, 1] in the report, [0, 1, 2] from the runs",
        "groups of claims: ['both', 'reading']",
        "all tables: groups of claims",
    ):
        assert any(label in line for line in found), label


def test_a_verdict_is_borderline_only_if_another_draw_of_resamples_might_give_it(check_script):
    ends = ((-0.1, 0.1), (0.9, 1.1))  # the lower may lie on either side of zero
    test = check_script.Test(
        0.5,
        0.4,
        (0.05, 1.0),
        0.01,
        0.3,
        boot_ranges=ends,
        p_range=(0.009, 0.011),
        p_not_equivalent_range=(0.29, 0.31),
    )
    words = {check_script.claim_word(each, "better") for each in test.others()}
    assert words == {"confirmed", "undecided"}
    for word, borderline, differ in (("confirmed", 0, 0), ("undecided", 1, 0), ("contradicted", 0, 1)):
        check = check_script.Check()
        check.word("a claim", word, "confirmed", words)
        assert (len(check.borderline), len(check.faults)) == (borderline, differ), word


def test_a_small_p_of_tau_is_compared_within_the_error_of_random_orders(check_script):
    scores = [float(i) for i in range(12)]
    for theirs, due in ((scores, 4e-9), ([0.0, *scores[:-1]], 0.0)):  # exact without ties
        check = check_script.Check()
        check_script.check_tau_p(check, "p", due, scores, theirs)
        assert check.faults == []
        check_script.check_tau_p(check, "p", 0.009, scores, theirs)
        assert len(check.faults) == 1


def test_a_run_without_settings_is_named(published, check_script):
    archive = check_script.read_archives([published[0]])
    archive.settings.clear()
    with pytest.raises(SystemExit, match=r"seed-0 has no settings\.json"):
        check_script.check_report(published[1], archive)

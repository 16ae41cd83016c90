"""The study's published runs (docs/results): what they hold, what a report makes of them, and its picture."""

import csv
import hashlib
import json
import math
import re
import shlex
import tarfile
from collections import Counter
from functools import cache
from itertools import combinations
from statistics import mean, stdev
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats
from paths import ROOT

from experiments.report.claims_figure import VERDICTS, ClaimsFigure, count_claims
from experiments.report.order import tau_p_value
from experiments.report.prediction import read_tables
from experiments.report.report import write_report
from experiments.runs.plateau import PLATEAU_MARGIN
from experiments.study.baselines import OPTIMIZERS, TUNED_OPTIMIZERS
from experiments.study.claims import claims_to_test, compared_columns
from experiments.study.diffusion import (
    DIFFUSION_BUDGETS_OPTIMIZER,
    DIFFUSION_OPTIMIZERS,
    DIFFUSION_TUNED_OPTIMIZER,
)
from experiments.study.papers.t5 import PAPER
from experiments.study.recipe import FINETUNING_RATES
from experiments.study.registry import REGISTRY, canonical_row, find, tables_of
from experiments.study.scales import SCALES
from lm.config.base import SettingError
from lm.files import parse_with_checksum

DOCS = ROOT / "docs"
RESULTS = DOCS / "results/mini.json"


NANO = ("clark", "glu", "jo", "lewis", "liu", "sahoo", "wang")  # papers with tables at nano
# what is published -> the rows of its report
PUBLISHED = {
    "mini": "t5/[1246]-*",
    "mini-t5-9": "t5/9-repeats",
    "mini-t5-10": "t5/10-fine-tuning",
    "mini-t5-12": "t5/12-multi-task",
    "mini-start": "start",
    "mini-glu": "glu/1-perplexity",
    "mini-narang": "narang/1-modifications",
    "mini-diffusion": "now/4-diffusion",
    "mini-diffusion-budgets": "now/4-diffusion-budgets",
    "mini-diffusion-rates": "now/4-diffusion-rates",
    "mini-encoders": "now/1-encoders",
    "mini-architectures": "now/2-architectures",
    "mini-denoisers": "now/3-denoisers",
    "mini-clark": "clark/5-efficiency",
    "mini-lan": "lan/[34]-*",
    "mini-wettig": "wettig/*",
    "mini-history": "history",
    "mini-ladder": "ladder",
    "mini-experts": "now/5-experts",
    "mini-8x-objective": "t5/4-objective",
    "mini-recipe": "recipe-[dl]*",
    "mini-recipe-masked-lm": "recipe-masked-lm",
    "mini-recipe-finetuning": "recipe-finetuning",
    "mini-history-rates": "history-rates",
    **{f"nano-{paper}": f"{paper}/*" for paper in NANO},
}
OVERRIDES = {
    "mini-8x-objective": {
        "pretraining.steps": 4800,
        "pretraining.save_every": 1200,
        "pretraining.evaluate_every": 400,
    }
}
SIDES = ("better", "worse")  # of a claim
# reports whose runs lie in the archive of another
ARCHIVES = {"mini-start": "mini"}


def scale_of(name):
    """Return the scale of published runs, with which their name begins."""
    return name.partition("-")[0]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """A function from what is published to the folder of its runs, unpacked as docs/study.md says."""

    @cache
    def unpack(archive):
        folder = tmp_path_factory.mktemp("published") / "runs"
        with tarfile.open(DOCS / "results" / f"{archive}.tar.xz") as file:
            file.extractall(folder, filter="data")
        return folder

    return lambda name: unpack(ARCHIVES.get(name, name))


@pytest.mark.slow
def test_the_values_of_every_example_that_a_published_score_is_made_of_are_published_too(unpacked):
    """Those of a row that is not fine-tuned lie with its pre-training, not in its own folder."""
    runs = unpacked("mini")
    kept = {hashlib.sha256(file.read_bytes()).hexdigest(): file for file in runs.rglob("report/*.npy")}
    lines = [*csv.DictReader(RESULTS.with_suffix(".csv").open())]
    wanted = {(canonical_row(line["row"], "mini"), line["seed"]) for line in lines}
    assert len(wanted) == 80
    for row, seed in wanted:
        path = runs / "mini" / row / f"seed-{seed}" / "scores.json"
        for name, task in parse_with_checksum(path.read_bytes(), path)["tasks"].items():
            assert len(np.load(kept[task["examples"]])) == task["rows"], (path, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_report_on_the_published_runs_is_the_published_one(name, unpacked):
    tables = tables_of(find(PUBLISHED[name]))
    made = write_report(tables, scale_of(name), unpacked(name), overrides=OVERRIDES.get(name)).path
    results = DOCS / "results" / f"{name}.json"
    written, published = (
        json.loads(file.read_bytes())["tables"] for file in (made.with_name("results.json"), results)
    )
    assert_equal_but_for_rounding(written, published)
    assert made.with_suffix(".csv").read_text() == results.with_suffix(".csv").read_text()


def assert_equal_but_for_rounding(made, published, place=""):
    """Another processor gives the sums of a report other last bits.

    Few seeds have few resamples: with other last bits an end of their BCa interval may be another one. The
    outside script checks these.
    """
    assert type(made) is type(published), place
    if isinstance(made, dict):
        assert made.keys() == published.keys(), place
        for name in made:
            assert_equal_but_for_rounding(made[name], published[name], f"{place}/{name}")
    elif isinstance(made, list):
        assert len(made) == len(published), place
        for one, other in zip(made, published, strict=True):
            assert_equal_but_for_rounding(one, other, place)
    elif place.endswith("/bca") and published is not None:
        assert math.isfinite(made), place
    elif isinstance(made, float):
        assert made == pytest.approx(published, rel=1e-9, abs=1e-11), place
    else:
        assert made == published, place


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_command_of_a_published_report_is_the_one_that_a_reader_types_beside_the_unpacked_runs(name):
    command = json.loads((DOCS / "results" / f"{name}.json").read_text())["command"]
    assert shlex.split(command) == [
        "lm",
        "report",
        PUBLISHED[name],
        "--scale",
        scale_of(name),
        *(word for path, value in OVERRIDES.get(name, {}).items() for word in (f"--{path}", str(value))),
        "--runs",
        "runs",
        "--pictures",
        "png",
    ]


def test_archives_and_reports_are_published_together():
    files = {path.name for scale in SCALES for path in (DOCS / "results").glob(f"{scale}*")}
    reports = {f"{name}{suffix}" for name in PUBLISHED for suffix in (".csv", ".json")}
    assert files == reports | {f"{ARCHIVES.get(name, name)}.tar.xz" for name in PUBLISHED}


def test_a_bar_of_the_picture_is_as_long_as_the_share_of_claims_that_is_written_in_it():
    (axis,) = ClaimsFigure(results=RESULTS).figure().axes
    drawn = {
        (round(b.get_y() + b.get_height() / 2), b.get_x()): b.get_width()
        for b in axis.patches
        if b.get_width()
    }
    found = [
        (place, count / sum(each.counts.values()))
        for place, each in enumerate(count_claims(read_tables(RESULTS), "updates", "reading"))
        for count in each.counts.values()
        if count
    ]
    assert [(place, width) for (place, _), width in drawn.items()] == [
        (place, pytest.approx(share)) for place, share in found
    ]
    texts = [text.get_text() for text in axis.texts]
    counted = count_claims(read_tables(RESULTS), "updates", "reading")
    counts = [str(count) for each in counted for count in each.counts.values() if count]
    assert [text for text in texts if text.isdigit()] == counts
    taus = [f"{each.tau:.2f}".replace("-", "−") for each in counted if each.tau is not None]
    assert [text for text in texts if re.fullmatch(r"−?\d\.\d\d", text)] == taus and len(taus) == 3
    assert len(axis.patches) == len(found), "nothing but the bars"


@pytest.mark.parametrize("group", ["reading", "language", "both"])
def test_the_orders_and_verdicts_that_the_guide_tells_are_published(group):
    place = ["reading", "language", "both"].index(group)
    line = r"^\| (\d+) \| (\d+) \| " + r" \| ".join([r"([^|]*)"] * 6) + r" \|$"
    rows = re.findall(line, (DOCS / "study.md").read_text(), re.M)
    told = {}
    for number, count, *cells in rows:
        verdicts = [int(x) for x in cells[3 + place].split(", ")]
        told[number] = (int(count), cells[place], verdicts)
    found = {}
    for name, table in read_tables(RESULTS).items():
        number = re.search(r"\d+", name.partition("/")[2])[0]
        order, counts = table["order"].get(group), table["claim counts"][group]["updates"]
        tau = f"{order['tau']:.2f} (p {order['p']:.2g})" if order else "–"
        found[number] = (counts["claims"], tau, [counts[word] for word in VERDICTS])
    assert told == found and sum(count for count, _, _ in told.values()) == 50


def test_the_readme_counts_the_verdicts_on_t5s_conclusions_by_each_half_of_the_tasks():
    files = [RESULTS, *sorted(RESULTS.parent.glob("mini-t5-*.json"))]
    tables = [table for file in files for table in read_tables(file).values()]
    tested = [claim for table in tables for claim in table["claims"] if claim["conclusion"]]
    reading, language = (
        Counter(claim["verdicts"][half]["updates"]["verdict"] for claim in tested)
        for half in ("reading", "language")
    )
    due = (
        f"Of T5's {len(tested)} tested conclusions, tasks that need their input confirm "
        f"{reading['confirmed']} and contradict {reading['contradicted']}; tasks on language confirm "
        f"{language['confirmed']} and contradict {language['contradicted']}."
    )
    assert due in " ".join((ROOT / "README.md").read_text("utf-8").split())


def p_text(p):
    digits = next(n for n in range(3, 7) if round(p, n))
    return f"{p:.{digits}f}".rstrip("0").rstrip(".")


def test_the_readme_shows_tau_of_each_table_as_its_report_has_it():
    readme = (ROOT / "README.md").read_text("utf-8")
    files = [RESULTS, *sorted(RESULTS.parent.glob("mini-t5-*.json"))]
    others = ("mini-glu", "mini-narang", "mini-wettig", "mini-clark", "mini-lan", "mini-8x-objective")
    files += [RESULTS.with_name(f"{name}.json") for name in others]
    tables = [(file, *item) for file in files for item in read_tables(file).items() if item[1]["order"]]
    assert len(re.findall(r"(?m)^\|.* \(p [\d.]+\) \|", readme)) == len(tables)
    all_p = []
    for file, name, table in tables:
        number = name.partition("/")[2].partition("-")[0]
        orders = [order for group, order in table["order"].items() if group != "both"]
        all_p += [order["p"] for order in orders]
        cells = [f"{order['tau']:.2f} (p {p_text(order['p'])})" for order in orders]
        starts = {
            "t5": f"T5's Table {number}, {len(table['rows'])} ",
            "glu": "[Shazeer 2020]",
            "narang": "[Narang et al. 2021]",
            "wettig": "[Wettig et al. 2022]",
            "clark": f"ELECTRA's Table {number}, {len(table['rows'])} ",
            "lan": f"ALBERT's Table {number}, ",
        }
        start = starts[name.partition("/")[0]]
        (line,) = [
            line
            for line in readme.splitlines()
            if line.startswith(f"| {start}") and ("eight times" in line) == ("8x" in file.stem)
        ]
        assert all(cell in line for cell in cells), (line, cells)
    by_holm = np.maximum.accumulate([p * (len(all_p) - i) for i, p in enumerate(sorted(all_p))])
    significant = "none one two three four five six".split()[(by_holm < 0.05).sum()]
    assert f"Corrected for all {len(all_p)} (Holm), {significant} are below 0.05" in readme


@pytest.mark.slow
def test_the_guide_says_how_well_the_order_after_fewer_updates_predicts_that_after_eight_times_as_many(
    unpacked,
):
    other, runs = DOCS / "results/mini-8x-objective.json", unpacked("mini")
    made = write_report(tables_of(find("t5/4-objective")), "mini", runs, against=str(other)).path
    predicted = json.loads(made.with_name("results.json").read_bytes())["prediction"]["tables"]
    names = {"reading": "reading", "language": "language", "both": "both halves"}
    due = ", ".join(
        f"{names[group]} {each['decision accuracy']:.0%} (tau {each['tau']:.2f})"
        for group, each in predicted["t5/4-objective"].items()
    )
    assert due.replace("%", " %") in " ".join((DOCS / "study.md").read_text().split())


def test_the_guide_has_the_scores_and_differences_of_the_objectives_after_eight_times_the_updates():
    longer = read_tables(DOCS / "results/mini-8x-objective.json")["t5/4-objective"]
    shorter = read_tables(RESULTS)["t5/4-objective"]
    section = (
        (DOCS / "study.md").read_text().partition("### Eight times the updates")[2].partition("\n### ")[0]
    )
    for key, label in {
        "bert-style": "BERT-style",
        "prefix-lm": "prefix LM",
        "deshuffling": "deshuffling",
    }.items():
        cells = []
        for half in ("reading", "language"):
            before, after = (
                [*table["rows"][f"t5/4-objective/{key}"]["combined"][half].values()]
                for table in (shorter, longer)
            )
            cells += [f"{mean(before):+.1f}", f"{mean(after):+.1f} ± {stdev(after):.1f}"]
        assert f"| {label} | {' | '.join(cells)} |" in section
    for claim in longer["claims"]:
        for half in ("reading", "language"):
            judged = claim["verdicts"][half]["updates"]
            low, high = judged["interval"]
            if judged["verdict"] == "contradicted":  # told as the lead of the other row
                low, high = -high, -low
            told = judged["verdict"] != "undecided" or half == "reading"
            interval = f"{low:.1f} to {high:.1f})"
            assert told == (interval in " ".join(section.split())), (claim["better"], claim["worse"], half)


def bits_per_byte(report):
    """Return row, without its table -> the bits per byte of its seeds, in a published report."""
    bits = {}
    for line in csv.DictReader((DOCS / f"results/{report}.csv").open()):
        if line["column"] == "bits per byte":
            bits.setdefault(line["row"].rpartition("/")[2], []).append(float(line["score"]))
    return bits


def paired_difference(worse, better):
    """Return the mean difference of two rows' seeds and its 95 % interval by a paired t test, as printed."""
    found = [a - b for a, b in zip(worse, better, strict=True)]
    deviation = stdev(found) / len(found) ** 0.5
    numbers = (mean(found), *scipy.stats.t.interval(0.95, len(found) - 1, mean(found), deviation))
    return [f"{number:.3f}" for number in numbers]


def test_the_readme_has_the_bits_of_recurrence_attention_diffusion_and_counting():
    readme, bits = (DOCS.parent / "README.md").read_text(), bits_per_byte("mini-history")
    lead, low, high = paired_difference(bits["transformer"], bits["lstm"])
    means = {row: mean(values) for row, values in bits.items()}
    assert f"they need {means['lstm']:.3f} and {means['transformer']:.3f} bits per byte" in readme
    assert f"(five seeds, paired difference {lead}, 95 % CI {low} to {high})" in readme
    assert f"A counted 5-gram needs {means['5-gram']:.3f}." in readme
    rates = bits_per_byte("mini-history-rates")
    lead, _, _ = paired_difference(rates["transformer-0.01-decay"], rates["lstm-0.01-decay"])
    assert f"with one learning rate for all, the Transformer was {lead} behind" in readme
    lead, _, _ = paired_difference(rates["transformer-0.003-decay"], rates["lstm-0.01-decay"])
    assert f"with the best of four {lead}" in readme
    bound = mean(bits_per_byte("mini-diffusion")["masked-diffusion"])
    assert f"it needs at most {bound:.2f} bits per byte" in readme
    assert f"the decoder {means['transformer']:.2f}, a counted 5-gram {means['5-gram']:.2f}" in readme
    budgets = bits_per_byte("mini-diffusion-budgets")
    rows = ("masked-diffusion-x4", "causal-lm-x4", "5-gram-x4")
    assert "these are {:.2f}, {:.2f} and {:.2f}".format(*(mean(budgets[row]) for row in rows)) in readme


def test_the_road_of_models_has_the_bits_of_every_row():
    bits = bits_per_byte("mini-history")
    road = " ".join((DOCS / "road.md").read_text().split())
    for row, values in bits.items():
        assert len(values) == 5
        spread = "" if row.endswith("gram") else f" ± {stdev(values):.3f}"
        assert re.search(rf"\| `{row}` \|[^|]*\|[^|]*\| {mean(values):.3f}{spread} \|", road), row
    leads = [after - before for before, after in zip(bits["lstm"], bits["transformer"], strict=True)]
    lead, low, high = paired_difference(bits["transformer"], bits["lstm"])
    assert f"by {lead} bits per byte (95 % {low} to {high}" in road
    num_ahead = ("no", "one", "two", "three", "four", "each")[sum(lead > 0 for lead in leads)]
    assert f"with {num_ahead} of five seeds" in road


def test_the_course_has_the_perplexities_of_the_road():
    road, course = ((DOCS / f"{page}.md").read_text() for page in ("road", "course"))
    section = road.partition("## What came out at `mini`")[2]
    perplexity = dict(re.findall(r"\| `([\w-]+)` \| [^|]+ \| ([\d,]+)", section))
    words = " ".join(course.split())
    assert f"a perplexity of {perplexity['5-gram']} per word" in words
    decoder, lstm = perplexity["transformer"], perplexity["lstm-2"]
    assert f"the Transformer {decoder} and two layers of LSTM {lstm}," in words


def with_deviation(values, digits):
    """Return the mean of values over seeds, with their standard deviation if there are several."""
    values = [*values]
    if len(values) == 1:
        return f"{values[0]:z.{digits}f}"
    return f"{mean(values):z.{digits}f} ± {stdev(values):.{digits}f}"


def z_cells(row):
    """Return the mean z-scores of a row in reading and in language."""
    return [with_deviation(row["combined"][half].values(), 1) for half in ("reading", "language")]


def losses_cell(seeds):
    """Return the mean content loss of a row, and the loss without context."""
    return f"{mean(each['content_loss'] for each in seeds):.2f}, {seeds[0]['reference_loss']:.2f}"


def exit_text(seeds):
    """Return the steps at which the seeds of a row left the unigram plateau; "" if one has not."""
    exits = sorted({each["exit_step"] or 0 for each in seeds})
    return " to ".join(f"{step:,}" for step in exits[:: max(len(exits) - 1, 1)]) if exits[0] else ""


def test_the_guide_has_what_each_share_of_hidden_tokens_reaches_and_scores():
    rows = read_tables(RESULTS.with_name("mini-wettig.json"))["wettig/mask-rate"]["rows"]
    guide = (DOCS / "study.md").read_text()
    for name, row in rows.items():
        seeds = [*row["seeds"].values()]
        rate, _, bert = name.rpartition("/")[2].partition("-")
        exit_step, z = exit_text(seeds), ["–", "–"]
        if exit_step:
            z = z_cells(row)
        scores = [
            f"{mean(each['scores'][task] for each in seeds):.1f}"
            for task in ("acceptability", "extract", "next")
        ]
        label = f"{rate} %, 80/10/10" if bert else f"{rate} %"
        cells = [
            label,
            losses_cell(seeds),
            exit_step or "not left",
            *z,
            *scores,
            f"{row['published']['MNLI']:.1f}",
        ]
        assert f"| {' | '.join(cells)} |" in guide


def test_the_guide_has_what_encoders_whose_layers_share_parameters_reach_and_score():
    tables = read_tables(RESULTS.with_name("mini-lan.json")).values()
    rows = {name.rpartition("/")[2]: row for table in tables for name, row in table["rows"].items()}
    shared = {
        "not-shared": "nothing",
        "shared-attention": "attention",
        "shared-ffn": "feed-forward",
        "all-shared": "all",
    }
    guide = (DOCS / "study.md").read_text()
    for name, row in rows.items():
        parts, _, width = name.rpartition("-")
        seeds = [*row["seeds"].values()]
        losses = [each["content_loss"] for each in seeds]
        z = ["–", "–"]
        if width == "768":  # the other widths have a baseline that has not left the plateau
            z = z_cells(row)
        here = {"64": 11, "128": 22, "256": 43, "768": 128}[width]
        exit_step = exit_text(seeds) or "not left"
        cells = [width, here, shared[parts], len(seeds), with_deviation(losses, 2), exit_step, *z]
        cells += [f"{mean(each['scores']['extract'] for each in seeds):.1f}", row["published"]["AVG"]]
        assert f"| {' | '.join(map(str, cells))} |" in guide
    section = " ".join(guide.partition("### What layers share")[2].partition("\n### ")[0].split())
    claims = [claim["verdicts"]["reading"]["updates"] for table in tables for claim in table["claims"]]
    judged = [claim for claim in claims if claim["difference"] is not None]
    assert {claim["verdict"] for claim in judged} == {"undecided"} and "No conclusion is decided" in section
    assert all("{:.1f} to {:.1f})".format(*claim["interval"]) in section for claim in judged)


def test_the_guide_has_what_each_step_from_bert_to_electra_reaches_and_scores_and_the_verdicts():
    (table,) = read_tables(RESULTS.with_name("mini-clark.json")).values()
    section = (DOCS / "study.md").read_text().partition("### Replaced tokens")[2].partition("\n### ")[0]
    for name, row in table["rows"].items():
        seeds = [*row["seeds"].values()]
        tasks = ("follows", "extract", "next", "acceptability")
        scores = [with_deviation((each["scores"][task] for each in seeds), 1) for task in tasks]
        cells = [f"`{name.rpartition('/')[2]}`", losses_cell(seeds), exit_text(seeds), *z_cells(row), *scores]
        assert f"| {' | '.join(cells)} | {row['published']['GLUE']:.1f} |" in section
    for claim in table["claims"]:
        better, worse = (claim[side].rpartition("/")[2] for side in ("better", "worse"))
        cells = [f"{claim['conclusion']} (`{better}` over `{worse}`)"]
        for half in ("reading", "language"):
            judged = claim["verdicts"][half]["updates"]
            cells.append(
                "{} {:.1f} ({:.1f} to {:.1f})".format(
                    judged["verdict"], judged["difference"], *judged["interval"]
                )
            )
        assert f"| {' | '.join(cells)} |" in section
    judged = table["claims"][0]["verdicts"]["reading"]["updates"]
    lead = f"by [{judged['difference']:.1f} deviations](docs/study.md#replaced-tokens)"
    (told,) = [line for line in (ROOT / "README.md").read_text("utf-8").splitlines() if lead in line]
    assert "(95 % CI {:.1f} to {:.1f}, three seeds)".format(*judged["interval"]) in told


def test_the_guide_has_the_bits_of_diffusion_at_three_budgets_and_the_verdicts():
    guide = (DOCS / "study.md").read_text()
    section = guide.partition("#### Diffusion with more text")[2].partition("\n### ")[0]
    bits = bits_per_byte("mini-diffusion-budgets")
    for kind, bound in {"causal-lm": "", "5-gram": "", "masked-diffusion": "≤ "}.items():
        cells = []
        for budget in ("x0.25", "x1", "x4"):
            values = bits[f"{kind}-{budget}"]
            spread = "" if kind == "5-gram" else f" ± {stdev(values):.3f}"
            cells.append(f"{bound}{mean(values):.3f}{spread}")
        assert f"| `{kind}` | {' | '.join(cells)} |" in section
    check_verdicts("mini-diffusion-budgets", section)


def check_verdicts(report, section):
    """Demand the verdict, difference and interval of every claim of a report in a section of the guide."""
    (table,) = read_tables(DOCS / f"results/{report}.json").values()
    for claim in table["claims"]:
        judged = claim["verdicts"]["held-out text"]["updates"]
        difference = "–"
        if judged["difference"] is not None:
            low, high = judged["interval"]
            difference = f"{judged['difference']:.1f} ({low:.1f} to {high:.1f})"
        assert f"| {judged['verdict']} | {difference} |" in section, claim["conclusion"]


def test_the_guide_has_the_bits_of_diffusion_with_five_seeds_and_the_verdicts():
    guide = (DOCS / "study.md").read_text()
    section = guide.partition("### Diffusion or autoregression")[2].partition("\n#### ")[0]
    bits = bits_per_byte("mini-diffusion")
    for kind, values in bits.items():
        assert len(values) == 5
        bound = "≤ " if kind in {"masked-diffusion", "any-order"} else ""
        spread = "" if kind == "5-gram" else f" ± {stdev(values):.3f}"
        assert re.search(rf"\| `{kind}`.* \| {bound}{mean(values):.3f}{spread} \|", section), kind
    check_verdicts("mini-diffusion", section)
    (table,) = read_tables(DOCS / "results/mini-diffusion.json").values()
    for claim in table["claims"]:
        better, worse = (bits[claim[side].rpartition("/")[2]] for side in ("better", "worse"))
        difference, low, high = paired_difference(worse, better)
        assert f") | {difference} ({low} to {high}) |" in section, claim["conclusion"]


def test_the_guide_has_the_bits_of_diffusion_with_every_optimiser_and_the_best_is_used():
    bits = bits_per_byte("mini-diffusion-rates")
    means = {name: mean(bits[f"masked-diffusion-{name}"][:2]) for name in DIFFUSION_OPTIMIZERS}
    assert min(means, key=means.get) == DIFFUSION_TUNED_OPTIMIZER
    cells = []
    for name, value in means.items():
        cell = f"**{value:.3f}**" if name == DIFFUSION_TUNED_OPTIMIZER else f"{value:.3f}"
        cells.append(cell + " (one seed)" * (len(bits[f"masked-diffusion-{name}"]) == 1))
    guide = (DOCS / "study.md").read_text()
    assert f"| {' | '.join(cells)} |" in guide
    former = bits[f"any-order-{DIFFUSION_BUDGETS_OPTIMIZER}"]
    assert f"`any-order` goes from {mean(former):.3f} ± {stdev(former):.3f}" in guide


def test_the_road_has_the_bits_of_every_kind_at_every_rate_and_history_the_best():
    bits = bits_per_byte("mini-history-rates")
    road = (DOCS / "road.md").read_text()
    names = [name for name in OPTIMIZERS if not name.endswith("constant")]
    for kind, tuned in TUNED_OPTIMIZERS.items():
        means = {name: mean(bits[f"{kind}-{name}"][:2]) for name in names if f"{kind}-{name}" in bits}
        assert tuned == min(means, key=means.get)
        cells = []
        for name in names:
            cell = f"{means[name]:.3f}" if name in means else "–"
            cell = f"**{cell}**" if name == tuned else cell
            cells.append(cell + " (one seed)" * (len(bits.get(f"{kind}-{name}", ())) == 1))
        assert f"| `{kind}` | {' | '.join(cells)} |" in road


@pytest.mark.slow
def test_the_readme_has_the_number_of_published_runs(unpacked):
    names = [name for name in PUBLISHED if scale_of(name) == "mini"]
    scores = (path for name in names for path in unpacked(name).rglob("seed-*/scores.json"))
    runs = {hashlib.sha256(path.read_bytes()).hexdigest() for path in scores}
    assert f", {len(runs)} runs. " in (DOCS.parent / "README.md").read_text()


def test_the_readme_has_the_number_of_published_runs_at_nano_and_the_rows_that_remain(unpacked):
    names = [name for name in PUBLISHED if scale_of(name) == "nano"]
    scores = (path for name in names for path in unpacked(name).rglob("seed-*/scores.json"))
    runs = {hashlib.sha256(path.read_bytes()).hexdigest() for path in scores}
    readme = (ROOT / "README.md").read_text("utf-8")
    assert f"{len(runs)} runs at `nano`, with one seed" in readme
    published = {
        canonical_row(line["row"], scale_of(name))
        for name in PUBLISHED
        for line in csv.DictReader((DOCS / f"results/{name}.csv").open())
    }
    remaining = Counter(
        paper
        for paper in NANO
        for row in find(f"{paper}/*")
        if not row.needs and not {canonical_row(row.name, scale) for scale in ("mini", "nano")} & published
    )
    assert remaining == {"clark": 2} and "ELECTRA (but two)" in readme


def test_the_readme_has_the_sizes_of_the_models_that_papers_conclusions_are_tested_with():
    groups = ("t5", "glu", "narang", "clark", "lan", "wettig")
    sizes = {}
    for name in PUBLISHED:
        if scale_of(name) == "mini" and PUBLISHED[name].partition("/")[0] in groups:
            for table in read_tables(DOCS / f"results/{name}.json").values():
                rows = {claim[side] for claim in table["claims"] if claim["conclusion"] for side in SIDES}
                for row in rows:
                    seeds = table["rows"][row]["seeds"].values()
                    sizes[row.rpartition("/")[2]] = max(each["parameters"] for each in seeds) / 1e6
    experts = max(sizes.pop("moe"), sizes.pop("switch"))
    due = f"{min(sizes.values()):.1f} to {max(sizes.values()):.1f} million parameters"
    assert f"{due} ({experts:.1f} with experts)" in (ROOT / "README.md").read_text("utf-8")


@pytest.mark.slow
def test_the_guide_has_how_far_the_baseline_is_behind_other_objectives_after_eight_times_the_updates(
    unpacked,
):
    table = read_tables(DOCS / "results/mini-8x-objective.json")["t5/4-objective"]
    columns, tasks = table["columns"], table["weights"]["reading"]
    paths = sorted(unpacked("mini-8x-objective").glob("mini/t5/1-baseline/*/seed-*/scores.json"))
    baseline = [parse_with_checksum(path.read_bytes(), path)["tasks"] for path in paths]

    def differences(row):
        """Return the difference from the baseline in reading, seed by seed."""
        seeds = table["rows"][f"t5/4-objective/{row}"]["seeds"]
        for seed, of_baseline in enumerate(baseline):
            yield mean(
                (seeds[str(seed)]["scores"][task] - of_baseline[task]["score"])
                / (columns[task]["unit"] * (-1 if columns[task]["measure"] == "bits_per_byte" else 1))
                for task in tasks
            )

    section = (DOCS / "study.md").read_text().partition("### Eight times the updates")[2]
    section = " ".join(section.partition("\n### ")[0].split())
    for row, words in {
        "bert-style": "by {:.1f} deviations ({:.1f} to {:.1f}, ",
        "prefix-lm": "by {:.1f} ({:.1f} to {:.1f}), ",
    }.items():
        found = [*differences(row)]
        error = stdev(found) / len(found) ** 0.5
        low, high = scipy.stats.t.interval(0.95, len(found) - 1, mean(found), error)
        assert words.format(mean(found), low, high) in section
        assert (low > 0) == (row == "bert-style")


def test_the_guide_says_where_convolutions_stand_and_how_far_seeds_and_modifications_differ():
    (table,) = read_tables(DOCS / "results/mini-narang.json").values()
    losses = {
        name.rpartition("/")[2]: [each["held_out_loss"] for each in row["seeds"].values()]
        for name, row in table["rows"].items()
    }
    means = {row: mean(values) for row, values in losses.items()}
    ordered = sorted(
        (row.rpartition("/")[2] for row in table["order"]["held-out text"]["rows"]), key=means.get
    )
    places = [ordered.index(f"{kind}-convolution") + 1 for kind in ("lightweight", "dynamic")]
    assert places == [3, 11]
    widest = max(losses, key=lambda row: max(losses[row]) - min(losses[row]))
    spread = max(losses[widest]) - min(losses[widest])
    closer = sum(abs(mean_loss - means["vanilla"]) < spread for row, mean_loss in means.items()) - 1
    section = (DOCS / "study.md").read_text().partition("### Modifications of the Transformer")[2]
    section = " ".join(section.partition("\n### ")[0].split())
    assert f"third and 11th of {len(ordered)} rows here" in section
    assert f"by up to {spread:.2f} nats (`{widest}`), and {closer} of the {len(means) - 1} mod" in section


def test_the_guide_has_how_far_denoisers_stand_in_the_order_of_their_content_tokens():
    (table,) = read_tables(DOCS / "results/mini-denoisers.json").values()
    rows = [*table["rows"].values()]
    language = [mean(row["combined"]["language"].values()) for row in rows]
    tokens = [mean(each["content_tokens"] for each in row["seeds"].values()) for row in rows]
    tau, p = scipy.stats.kendalltau(language, tokens)
    assert f"(tau {tau:.2f}, p {p:.2f})" in (DOCS / "study.md").read_text()


def test_the_guide_has_how_far_experts_without_the_balance_loss_are_behind_the_dense_model():
    rows = read_tables(DOCS / "results/mini-experts.json")["now/5-experts"]["rows"]
    found = rows["now/5-experts/experts-unbalanced"]["less the baseline's"]["bits per byte"]
    low, high = found["interval"]
    guide = " ".join((DOCS / "study.md").read_text().split())
    verdict = f"{found['verdict']} ({low:.3f} to {high:.3f})"
    assert f"{found['difference']:.2f} more than the dense model, which is {verdict}" in guide


def test_the_page_on_choices_has_what_each_optimiser_gains_for_an_encoder():
    gains = {}
    for line in csv.DictReader((DOCS / "results/mini-recipe-masked-lm.csv").open()):
        if line["column"] == "held-out loss":
            gain = float(line["reference_loss"]) - float(line["content_loss"])
            gains.setdefault(line["row"].rpartition("/")[2], []).append(gain)
    names = {"adafactor": "Adafactor", "muon": "Muon", "adamw": "AdamW"}
    page = (DOCS / "choices.md").read_text().replace("**", "")
    for row, found in gains.items():
        optimizer, _, rate = row.rpartition("-")
        name = names.get(optimizer, "AdamW, relative to the parameter")
        assert len(found) == 5
        assert f"| {name} | {rate} | {mean(found):.2f} ± {stdev(found):.2f} |" in page


def test_the_page_on_choices_has_what_each_optimiser_gains_on_both_poles_and_its_regret():
    gains = {}
    for line in csv.DictReader((DOCS / "results/mini-recipe.csv").open()):
        if line["column"] == "held-out loss":
            pole, _, row = line["row"].partition("/")
            gain = float(line["reference_loss"]) - float(line["content_loss"])
            gains.setdefault(row, {}).setdefault(pole, []).append(gain)
    tables = read_tables(DOCS / "results/mini-recipe.json")
    best = {pole: max(mean(found[pole]) for found in gains.values()) for pole in tables}
    names = {"adafactor": "Adafactor", "muon": "Muon", "adamw": "AdamW"}
    page = (DOCS / "choices.md").read_text().replace("**", "")
    for row, found in gains.items():
        optimizer, _, rate = row.rpartition("-")
        cells = [names.get(optimizer, "AdamW, relative to the parameter"), rate]
        for pole, table in tables.items():
            assert len(found[pole]) == 5
            sign = (
                table["rows"][f"{pole}/{row}"]["less the baseline's"].get("held-out loss", {}).get("verdict")
            )
            has_left_plateau = mean(found[pole]) >= PLATEAU_MARGIN  # others are not compared
            mark = " ▼" * (sign == "worse" and has_left_plateau)
            cells.append(f"{mean(found[pole]):.2f} ± {stdev(found[pole]):.2f}{mark}")
        cells.append(f"{max(best[pole] - mean(found[pole]) for pole in tables):.2f}")
        assert f"| {' | '.join(cells)} |" in page, cells


def test_the_page_on_choices_has_how_far_each_method_of_fine_tuning_comes_at_each_rate():
    rows = read_tables(DOCS / "results/mini-recipe-finetuning.json")["recipe-finetuning"]["rows"]
    names = {
        "all": "all parameters",
        "adapters-2048": "adapters of 2048",
        "lora-8": "low-rank updates of rank 8",
        "adapters-32": "adapters of 32",
    }
    page = (DOCS / "choices.md").read_text()
    for method, name in names.items():
        for half in ("reading", "language"):
            cells = []
            for rate in FINETUNING_RATES:
                found = rows[f"recipe-finetuning/{method}-{rate:g}"]["combined"][half].values()
                assert len(found) == 5
                cells.append(f"{mean(found):z.1f} ± {stdev(found):.1f}")
            assert f"| {name} | {half} | {' | '.join(cells)} |" in page


def test_tau_counts_the_pairs_of_rows_that_stand_as_in_the_paper_less_those_that_do_not():
    for name, table in read_tables(RESULTS).items():
        for group, order in table["order"].items():
            rows = table["rows"]
            ours = {row: mean(rows[row]["combined"][group].values()) for row in rows}
            paper = {row: sum(REGISTRY[row].published[c.name] / c.std for c in PAPER.columns) for row in rows}
            signs = Counter(((ours[a] > ours[b]) == (paper[a] > paper[b])) for a, b in combinations(rows, 2))
            due = (signs[True] - signs[False]) / signs.total()
            assert order["tau"] == pytest.approx(due), (name, group)


# Those whose archives or checks take longest: others too have tasks, an order of rows or held-out text alone,
# and the pairs of mini-narang have a test of their own below.
LONGEST = {"mini", "mini-start", "mini-8x-objective", "mini-narang", "mini-t5-9", "mini-t5-10", "mini-t5-12"}
LONGEST |= {"mini-architectures", "mini-denoisers", "mini-recipe-finetuning"}
LONGEST |= {name for name in PUBLISHED if scale_of(name) == "nano"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONGEST)) for name in PUBLISHED]
)
def test_every_published_figure_follows_from_the_published_runs(name, unpacked, check_script):
    report = json.loads((DOCS / "results" / f"{name}.json").read_text())
    check = check_script.check_report(report, check_script.read_archives([unpacked(name)]))
    assert not check.faults and check.count > 100


def test_figures_that_no_resample_is_part_of_are_compared_to_their_last_digits(unpacked, check_script):
    report = json.loads((DOCS / "results/mini-glu.json").read_text())
    table = report["tables"]["glu/1-perplexity"]
    table["columns"]["held-out loss"]["unit"] *= 1.001
    claim = table["claims"][0]
    interval = claim["verdicts"]["held-out text"]["updates"]["interval"]
    interval[1] += 0.01 * (interval[1] - interval[0])
    found = check_script.check_report(report, check_script.read_archives([unpacked("mini-glu")])).faults
    what = f"{claim['better']} > {claim['worse']}, held-out text, updates: interval"
    for label in ("unit of held-out loss", what):
        assert any(label in line for line in found), label


def test_an_archive_stays_if_a_folder_has_no_runs_and_does_not_depend_on_rights(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(DOCS / "results")
    import archive

    scores = tmp_path / "runs/mini/t5/seed-0/scores.json"
    scores.parent.mkdir(parents=True)
    scores.write_text("{}")
    packed = tmp_path / "mini.tar.xz"

    def pack(*folders):
        monkeypatch.setattr("sys.argv", ["archive.py", str(tmp_path / "runs"), str(packed), *folders])
        archive.main()
        return packed.read_bytes()

    before = pack("mini/t5")
    with pytest.raises(SystemExit, match="none has no runs"):
        pack("mini/t5", "mini/none")
    assert packed.read_bytes() == before
    scores.chmod(0o600)
    assert pack("mini", "mini/t5") == before


def test_a_row_that_shares_the_runs_of_another_is_packed_with_them_or_not_at_all(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(DOCS / "results")
    import archive

    runs = ["mini/bart/base/seed-0/scores.json", "mini/lewis/rotation/seed-0/scores.json"]
    for run in runs:
        (tmp_path / "runs" / run).parent.mkdir(parents=True)
        (tmp_path / "runs" / run).write_text("{}")
    (tmp_path / "runs/mini/lewis/infilling").symlink_to("../bart/base")
    words = ["archive.py", str(tmp_path / "runs"), str(tmp_path / "a.tar.xz"), "mini/lewis"]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit, match="infilling shares the runs of mini/bart/base"):
        archive.main()
    monkeypatch.setattr("sys.argv", [*words, "mini/bart"])
    archive.main()
    with tarfile.open(tmp_path / "a.tar.xz") as file:
        assert sorted(file.getnames()) == runs


@pytest.mark.parametrize(
    ("scores", "reference"),
    [
        ([5, 1, 2, 4, 3, 6], [1, 1, 2, 3, 4, 5]),  # a tie of the paper alone
        ([1, 1, 2, 4, 3, 6], [1, 2, 3, 4, 5, 6]),
        ([5, 1, 2, 4, 3, 6, 8, 7, 10, 9], [1, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
    ],
)
def test_the_outside_script_has_the_p_of_ties(scores, reference, check_script):
    scores, reference = np.array(scores, float), np.array(reference, float)
    p, is_exact = check_script.tau_p_value(scores, reference)
    assert is_exact == (len(scores) <= 8)
    assert p == pytest.approx(tau_p_value(scores, reference), abs=1e-9 if is_exact else 0.004)


def test_the_outside_script_expects_the_claims_of_a_table_of_pairs_with_the_baseline(check_script):
    (table,) = tables_of(find("narang/1-modifications"))
    rows = {
        row.name: {"published": dict(row.published), "published runs": row.published_runs}
        for row in table.rows
    }
    claims = [
        {"better": c.better.name, "worse": c.worse.name, "z": c.z, "conclusion": c.conclusion}
        for c in claims_to_test(table)
    ]
    paper = {
        column.name: {"deviation": column.std, "higher is better": column.higher_is_better}
        for column in compared_columns(table)
    }
    names = {name: name for name in rows}
    data = {
        "paper": paper,
        "rows": rows,
        "claims": claims,
        "claim counts": {},
        "weights": {},
        "pairs": table.pairs,
    }
    stand_in = SimpleNamespace(
        name=table.name, data=data, experiment=names, runs=dict.fromkeys(rows, True), baseline=table.baseline
    )
    check = check_script.Check()
    check_script.check_claims(check, stand_in)
    assert not check.faults and check.count > 40


def test_the_command_that_the_guide_gives_says_how_many_figures_differ(check_script, monkeypatch, capsys):
    files = [str(DOCS / f"results/mini-glu{suffix}") for suffix in (".json", ".tar.xz")]
    monkeypatch.setattr("sys.argv", ["check.py", *files])
    assert check_script.main() == 0
    printed = capsys.readouterr().out
    assert " figures compared: 0 differ" in printed
    for names in (check_script.RECOMPUTED, check_script.RECORDED, check_script.UNCHECKED):
        assert names in printed, "it says what it compared and what it did not"


def test_the_outside_script_lists_verdicts_on_demand_and_says_that_a_file_was_edited(
    check_script, monkeypatch, capsys, tmp_path
):
    report = json.loads((DOCS / "results/mini-glu.json").read_text())
    claim = report["tables"]["glu/1-perplexity"]["claims"][0]
    claim["verdicts"]["held-out text"]["updates"]["verdict"] = "confirmed"
    edited = tmp_path / "edited.json"
    edited.write_text(json.dumps(report))
    archive = str(DOCS / "results/mini-glu.tar.xz")
    monkeypatch.setattr("sys.argv", ["check.py", str(edited), archive, "--verdicts"])
    assert check_script.main() == 1
    lines = capsys.readouterr().out.splitlines()
    of_claims = [line for line in lines if " in the report" in line and "; " in line]
    assert len(of_claims) == 2 * 24, "two budgets"
    what = f"{claim['better']} > {claim['worse']}, held-out text, updates: undecided"
    (listed,) = [line for line in of_claims if line.startswith(what)]
    assert ", p = " in listed and listed.endswith("; confirmed in the report")
    assert sum("; as in the report" in line for line in of_claims) == 2 * 24 - 1
    assert any("edited.json was edited or damaged" in line for line in lines)


def test_a_picture_of_claims_by_tasks_that_a_report_lacks_says_by_which_it_has_some():
    with pytest.raises(SettingError, match="by --tasks 'reading'; it has some by 'held-out text'"):
        ClaimsFigure(results=RESULTS.with_name("mini-glu.json")).figure()


@pytest.mark.parametrize("text", ["", "[]", "{}", "\x00", '{"tables": 1, "sha256": "0"}'])
def test_a_file_that_is_no_results_of_a_report_is_refused(text, tmp_path):
    file = tmp_path / "results.json"
    file.write_text(text)
    with pytest.raises(SettingError, match=r"results\.json"):
        ClaimsFigure(results=file).figure()
    with pytest.raises(SettingError, match="should be the results.json of a report"):
        ClaimsFigure(results=tmp_path / "none.json").figure()

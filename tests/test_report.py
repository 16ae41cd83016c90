"""From finished runs to what a report says of them."""

import csv
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from rich.console import Console

from experiments import commands, origin, plots, report
from experiments.findings import agreement, kendall
from experiments.folders import save_settings
from experiments.page import samples
from experiments.registry import REGISTRY, build, find, tables
from experiments.results import curves, results, run_folder
from experiments.sheets import Cell
from lm.config import SettingError, change, leaves

RATES = tables(find("t5/6-corruption-rate"))
NAMES = [row.name for row in RATES[0].rows]
FIRST = "t5/1-baseline/baseline seed 0"
RECORD = {
    "settings": {}, "vocabulary": {"fingerprint": "v"}, "data": {"corpus train": "c", "cloze validation": "d"},
    "code": {"lm/config.py": "1"}, "packages": {"jax": "0.10"},
}  # fmt: skip
ATTACK = "<script>document.title = 1</script>"


def finish(runs: Path, name: str, seed: int, score: float) -> Path:
    """A finished run with one task, its metrics and its predictions."""
    folder = run_folder(runs, "nano", name, seed, {})
    phase = folder / "finetuning" / "cloze"
    (phase / "predictions" / "cloze").mkdir(parents=True)
    save_settings(folder, build(name, "nano", {"seed": seed}))
    origin.record(phase, RECORD)
    (phase / "metrics.jsonl").write_text('{"step": 1, "kind": "eval", "score": 2}\n{"step": 2, "ki')
    answer = json.dumps({"target": ["a"], "prediction": ATTACK})
    (phase / "predictions" / "cloze" / "2.jsonl").write_text(answer + '\n{"ta')
    scores = {
        "columns": {"SQuAD": score, "GLUE": 0.0}, "held_out_loss": 3.0, "seconds": 1.0, "tokens": 9,
        "tasks": {"cloze": {"column": "SQuAD", "metric": "em", "step": 2, "score": score, "metrics": {}}},
        "phases": {"cloze": str(phase.relative_to(runs / "nano"))},
    }  # fmt: skip
    (folder / "scores.json").write_text(json.dumps(scores))
    return folder


def study(runs: Path, seeds: int = 2) -> Path:
    """Every row of the table, whose scores fall by ten from row to row and by one from seed to seed."""
    for place, name in enumerate(NAMES):
        for seed in range(seeds):
            finish(runs, name, seed, 90.0 - 10 * place - seed)
    return runs


def written(runs, **options) -> tuple[report.Report, str]:
    made = report.write_report(RATES, "nano", runs, **options)
    return made, made.path.read_text()


def test_kendall_is_scipys_and_unknown_where_a_side_is_all_alike():
    x, y = np.random.default_rng(0).integers(4, size=(2, 20, 6)).astype(float)
    expected = [scipy.stats.kendalltau(*pair).statistic for pair in zip(x, y, strict=True)]
    np.testing.assert_allclose(kendall(x, y), expected)
    assert agreement([np.ones((2, 1))] * 3, np.arange(3.0)[:, None], seed=0) is None


def test_agreement_is_repeatable_and_holds_its_estimate():
    ours = [np.array([[place + noise] for noise in (-0.6, 0.6)]) for place in (0.0, 2.0, 1.0)]
    got, paper = agreement(ours, np.arange(3.0)[:, None], seed=0), np.arange(3.0)[:, None]
    assert got == agreement(ours, paper, seed=0)
    assert got.tau == pytest.approx(1 / 3)
    assert -1 <= got.low <= got.tau <= got.high <= 1
    assert agreement([np.array([[place]]) for place in range(3)], paper, seed=0)[:2] == (1, 1)


def test_a_report_orders_the_rows_and_marks_the_differences_beyond_noise(tmp_path):
    made, text = written(study(tmp_path))
    scores, places = made.sheets[RATES[0].name]
    assert [cell.text.replace("\N{NO-BREAK SPACE}", " ") for cell in scores["SQuAD"]] == [
        "89.50 ± 0.71 ▲", "79.50 ± 0.71", "69.50 ± 0.71 ▼", "59.50 ± 0.71 ▼"
    ]  # fmt: skip
    assert [cell.best for cell in scores["SQuAD"]] == [True, False, False, False]
    assert dict(zip((c.text for c in places["row"]), (c.text for c in places["SQuAD"]), strict=True))["10%"] == "1 (3)"
    assert "of the paper's 1 (▲ or ▼) in scores that we have two seeds of, ours agree with 1 and contradict 0" in text
    assert "objective.rate: 0.15 → 0.5" in made.path.with_suffix(".html").read_text()
    lines = list(csv.DictReader((made.path.parent / "report.csv").open()))
    assert len(lines) == len(NAMES) * 2 * 2
    assert lines[1] | {"row": NAMES[0], "seed": "0", "column": "GLUE", "score": "0.0", "paper": "82.82"} == lines[1]


def test_a_single_seed_shows_no_difference_and_two_rows_no_order(tmp_path):
    _, text = written(study(tmp_path / "one", seeds=1))
    assert "takes two seeds" in text
    assert "| average" not in text
    for name in NAMES[:2]:
        finish(tmp_path / "two", name, 0, 1.0)
    assert "from three finished rows on; there are 2" in written(tmp_path / "two")[1]


def test_tables_of_which_only_the_baseline_has_finished_are_named_not_shown(tmp_path):
    finish(tmp_path, "t5/1-baseline/baseline", 0, 1.0)
    finish(tmp_path, "t5/4-objective/deshuffling", 0, 1.0)
    made = report.write_report(tables(find("t5/*")), "nano", tmp_path)
    assert list(made.sheets) == ["t5/4-objective"]
    assert "has finished of: t5/1-baseline, t5/2-architecture" in made.path.read_text()


@pytest.mark.parametrize(
    ("pattern", "folder"),
    [
        ("t5/*", "t5"),
        ("t5/6-corruption-rate", "t5-6-corruption-rate"),
        ("t5/1*", "t5-1+10+11+12+13+15"),
        ("bert", "bert"),
        ("*t/*", "bert+gpt+bart"),
    ],
)
def test_every_set_of_tables_has_a_report_of_its_own(tmp_path, pattern, folder):
    wanted = tables(find(pattern))
    finish(tmp_path, wanted[0].rows[0].name, 0, 1.0)
    assert report.write_report(wanted, "nano", tmp_path).path.parent.name == folder


def test_an_ensemble_shows_a_curve_a_member_and_the_answers_of_all_together(tmp_path):
    folder = finish(tmp_path, NAMES[0], 0, 1.0)
    (folder / "finetuning/cloze/member-0").mkdir()
    shutil.copy(folder / "finetuning/cloze/metrics.jsonl", folder / "finetuning/cloze/member-0")
    (folder / "finetuning/cloze/predictions/cloze/ensemble.jsonl").write_text('{"prediction": "together"}')
    path, scores = f"{folder.relative_to(tmp_path / 'nano')}/finetuning/cloze/member-0", folder / "scores.json"
    scores.write_text(json.dumps(json.loads(scores.read_text()) | {"phases": {"cloze/member-0": path}}))
    found = results(REGISTRY[NAMES[0]], "nano", tmp_path)
    assert curves(found) == {"cloze: score": [[(1, 2)]]}
    assert "together" in samples("cloze", 2, found[0])


@pytest.mark.parametrize("watched", [False, True])
def test_a_bucket_that_cannot_be_read_is_said_to_be_one_of_the_runs(watched, monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    said = []
    with pytest.raises(SettingError, match="--runs gs://bucket/runs cannot be read: .*gcsfs"):
        if watched:
            report.watch(RATES, "nano", "gs://bucket/runs", said.append)
        written("gs://bucket/runs")


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"code": {"lm/config.py": "2"}}, "other code than {first}: lm/config.py 1 -> 2"),
        ({"packages": {"jax": "0.11"}}, "other packages than {first}: jax 0.10 -> 0.11"),
        ({"vocabulary": {"fingerprint": "w"}}, "other vocabulary than {first}: fingerprint v -> w"),
        ({"data": RECORD["data"] | {"cloze validation": "e"}}, "other data than {first}: cloze validation d -> e"),
        ("edited", "it is not known: .*origin.json was edited or damaged"),
        (None, "it is not known: .*origin.json is missing"),
    ],
)
def test_a_seed_made_of_other_things_than_its_neighbours_is_marked_whatever_folder_it_lies_in(tmp_path, other, said):
    folders = [study(tmp_path / "here"), tmp_path / "there"]
    assert "≠" not in written(folders)[1]
    phase = finish(folders[1], NAMES[2], 7, 60.0) / "finetuning" / "cloze"
    if other is None:
        (phase / "origin.json").unlink()
    elif other == "edited":
        (phase / "origin.json").write_text((phase / "origin.json").read_text().replace("0.10", "0.11"))
    else:
        origin.record(phase, RECORD | other)
    made, text = written(folders)
    label = REGISTRY[NAMES[2]].label
    for sheet in made.sheets[RATES[0].name]:
        assert [cell.text for cell in sheet["row"] if "≠" in cell.text] == [f"{label} ≠"]
    assert re.search(rf"\n- {NAMES[2]} seed 7: {said.format(first=FIRST)}", text)


def test_rows_whose_settings_name_other_text_are_not_compared_in_it(tmp_path):
    (table,) = tables(find("t5/8-*"))
    for row in table.rows:
        phase = finish(tmp_path, row.name, 0, 1.0) / "finetuning" / "cloze"
        origin.record(phase, RECORD | {"data": {"corpus train": build(row.name, "nano").data.corpus}})
    assert "≠" not in report.write_report([table], "nano", tmp_path).path.read_text()


def test_a_run_in_several_folders_counts_once_and_what_does_not_count_is_named(tmp_path):
    here, there = study(tmp_path / "here"), study(tmp_path / "there", seeds=3)
    save_settings(run_folder(here, "nano", NAMES[0], 0, {}), change(build(NAMES[0], "nano"), "model.d_ff", 3))
    (run_folder(here, "nano", NAMES[2], 0, {}) / "scores.json").write_text('{"columns": {"GLUE": NaN}, "tas')
    (run_folder(here, "nano", NAMES[3], 1, {}) / "scores.json").unlink()
    made, text = written([here, there, tmp_path / "nowhere"])
    assert made.path.is_relative_to(here)
    for said in ("model.d_ff: 3 -> ", "10/seed-0 belongs", "is damaged", "seed-1 has not finished", "nowhere"):
        assert said in text
    assert [cell.text for cell in made.sheets[RATES[0].name][0]["seeds"]] == ["3"] * 4
    with pytest.raises(SettingError, match="other settings"):
        results(REGISTRY[NAMES[0]], "nano", here)
    with pytest.raises(SettingError, match="no run of .* has finished"):
        written(tmp_path / "nowhere")


def test_many_settings_given_by_hand_still_make_a_file_name(tmp_path):
    given = {f"model.setting_{i}": "é" * 9 for i in range(40)}
    folders = [run_folder(tmp_path, "nano", NAMES[0], 0, given | {"x": x}) for x in (1, 2)]
    for folder in folders:
        folder.mkdir(parents=True)
    assert len(set(folders)) == 2


@pytest.mark.parametrize("name", plots.AXES)
def test_rows_on_the_axis_of_a_picture_differ_in_its_number_and_in_nothing_else(name):
    at = plots.axis_of(tables(find(name))[0], "base")
    built = [dict(leaves(build(row, "base"))) | {plots.AXES[name][0]: None} for row in at]
    assert len(set(at.values())) == len(at) > 3
    assert all(settings == built[0] for settings in built)


def test_the_report_is_written_anew_when_a_run_changes_until_interrupted(tmp_path, monkeypatch):
    said, page, waits = [], study(tmp_path) / "nano/reports/t5-6-corruption-rate/report.html", []

    def sleep(seconds):
        assert '<meta http-equiv="refresh"' in page.read_text()
        waits.append(seconds)
        if len(waits) == 2:
            finish(tmp_path, NAMES[0], 2, 50.0)
        if len(waits) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", sleep)
    report.watch(RATES, "nano", tmp_path, said.append)
    assert ["wrote" in line for line in said] == [True, True, False]
    assert '<meta http-equiv="refresh"' not in page.read_text()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_the_page_needs_no_network_hides_no_markup_and_sorts_its_tables(tmp_path):
    page = written(study(tmp_path))[0].path.with_suffix(".html")
    text = page.read_text()
    assert not re.findall(r'(?:src|href)="(?!data:|#)', text)
    twice = "<script>for (const _ of 'ab') document.querySelector('th:nth-child(4)').click()</script></body>"
    page.write_text(text.replace("</body>", twice))
    call = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    done = subprocess.run([*call, str(page)], capture_output=True, text=True, timeout=600)
    assert "CONSOLE" not in done.stderr
    assert ATTACK not in done.stdout
    assert "&lt;script&gt;document" in done.stdout
    rows = re.findall(r"<tr>\n<td[^>]*>(\d+%)", done.stdout.partition("</table>")[0])
    assert rows == ["50%", "25%", "15%", "10%"]


def test_at_80_columns_no_number_and_no_value_that_a_row_changes_is_cut(monkeypatch, capsys):
    monkeypatch.setattr(commands, "CONSOLE", Console(width=80, file=sys.stdout))
    numbers = {f"column {i}, paper": [Cell(f"{i}{i}.{i:02d} ± 0.12", best=i == 3)] for i in range(10, 22)}
    commands.show_sheet("a table", {"row": [Cell("encoder-decoder-6-layers")], **numbers})
    lines = capsys.readouterr().out.splitlines()
    for head, (cell,) in numbers.items():
        assert any(head in line for line in lines) and any(cell.text in line for line in lines)
    assert max(map(len, lines)) <= 80 and sum("encoder-decoder-6-layers" in line for line in lines) > 1
    commands.show_rows("t5/5-bert-style")
    shown = "".join(line.split("│")[3].strip() for line in capsys.readouterr().out.splitlines() if "│" in line)
    assert "…" not in shown and "objective.inputs=masks-or-random,objective.targets=everything" in shown

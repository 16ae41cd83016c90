"""From finished runs to what a report says of them."""

import csv
import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import scipy.stats

from experiments import plots, report
from experiments.registry import REGISTRY, build, find, tables
from experiments.results import results, run_folder
from experiments.statistics import agreement, kendall, pooled_std
from lm.config import SettingError, change, to_json

RATES = tables(find("t5/6-corruption-rate"))
NAMES = [row.name for row in RATES[0].rows]
ATTACK = "<script>document.title = 1</script>"


def finish(runs: Path, name: str, seed: int, score: float) -> Path:
    """A finished run with one task, its metrics and its predictions."""
    folder = run_folder(runs, "nano", name, seed, {})
    phase = folder / "finetuning" / "cloze"
    (phase / "predictions" / "cloze").mkdir(parents=True)
    (folder / "settings.json").write_text(to_json(build(name, "nano", {"seed": seed})))
    (phase / "metrics.jsonl").write_text('{"step": 1, "kind": "eval", "score": 2}\n{"step": 2, "ki')
    answer = json.dumps({"target": ["a"], "prediction": ATTACK})
    (phase / "predictions" / "cloze" / "2.jsonl").write_text(answer + '\n{"ta')
    scores = {
        "columns": {"SQuAD": score, "GLUE": 0.0}, "held_out_loss": 3.0, "seconds": 1.0, "tokens": 9,
        "tasks": {"cloze": {"column": "SQuAD", "metric": "em", "step": 2, "score": score, "metrics": {}}},
        "phases": {"finetuning/cloze": str(phase.relative_to(runs / "nano"))},
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
    rng = np.random.default_rng(0)
    x, y = rng.integers(4, size=(2, 20, 6)).astype(float)
    np.testing.assert_allclose(
        kendall(x, y), [scipy.stats.kendalltau(*pair).statistic for pair in zip(x, y, strict=True)]
    )
    assert np.isnan(kendall(np.ones(3), np.arange(3.0)))
    assert agreement([np.ones((2, 1))] * 3, np.arange(3.0)[:, None], seed=0) is None


def test_agreement_is_repeatable_holds_its_estimate_and_knows_what_chance_does():
    ours = [np.array([[place + noise] for noise in (-0.6, 0.6)]) for place in (0.0, 2.0, 1.0)]
    got, paper = agreement(ours, np.arange(3.0)[:, None], seed=0), np.arange(3.0)[:, None]
    assert got == agreement(ours, paper, seed=0)
    assert got.tau == pytest.approx(1 / 3)
    assert -1 <= got.low <= got.tau <= got.high <= 1
    same = agreement([np.array([[place]]) for place in range(3)], paper, seed=0)
    assert (same.tau, same.low) == (1, 1)
    assert same.chance == pytest.approx(1 / 6, abs=0.02)  # three rows have six orders


def test_noise_is_pooled_over_rows_whatever_their_means_and_unknown_of_single_seeds():
    np.testing.assert_allclose(pooled_std([np.array([[0.0], [2.0]]), np.array([[50.0]])]), [2**0.5])
    assert pooled_std([np.zeros((1, 1)), np.ones((1, 1))]) is None


def test_a_report_orders_the_rows_and_names_the_differences_beyond_noise(tmp_path):
    made, text = written(study(tmp_path))
    assert "83.28" in text and "`objective.rate=0.5`" in text
    assert re.search(r"\| 10% \| 1 \(\d\) \| 1 \(\d\) \|", text)
    assert "Ours, beyond two standard deviations over seeds (SQuAD 0.71), pooled over the rows: " in text
    assert "10% (SQuAD +10.00); 25% (SQuAD -10.00); 50% (SQuAD -20.00)." in text
    lines = list(csv.DictReader((made.path.parent / "report.csv").open()))
    assert len(lines) == len(NAMES) * 2 * 2
    assert lines[1] | {"row": NAMES[0], "seed": "0", "column": "GLUE", "score": "0.0", "paper": "82.82"} == lines[1]


def test_a_single_seed_shows_no_difference_and_two_rows_no_order(tmp_path):
    _, text = written(study(tmp_path / "one", seeds=1))
    assert "None of our differences is told from noise" in text and "There is no average yet" in text
    for name in NAMES[:2]:
        finish(tmp_path / "two", name, 0, 1.0)
    assert "compared with the paper's when three have finished; 2 have" in written(tmp_path / "two")[1]


def test_a_run_in_several_folders_counts_once_and_what_does_not_count_is_named(tmp_path):
    here, there = study(tmp_path / "here"), study(tmp_path / "there", seeds=3)
    other = run_folder(here, "nano", NAMES[0], 0, {}) / "settings.json"
    other.write_text(to_json(change(build(NAMES[0], "nano"), "model.d_ff", 3)))
    (run_folder(here, "nano", NAMES[2], 0, {}) / "scores.json").write_text('{"columns": {"GLUE": NaN}, "tas')
    (run_folder(here, "nano", NAMES[3], 1, {}) / "scores.json").unlink()
    made, text = written([here, there, tmp_path / "nowhere"])
    assert made.path.is_relative_to(here)
    for said in ("model.d_ff: 3 there", "10/seed-0 belongs", "is damaged", "seed-1 has not finished", "nowhere"):
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


@pytest.mark.parametrize(
    ("name", "path", "rows"),
    [
        ("t5/2-architecture", None, 0),
        ("t5/6-corruption-rate", "objective.rate", 4),
        ("t5/7-span-length", "objective.mean_span_length", 4),
        ("t5/9-repeats", "data.repeats", 4),
        ("t5/10-fine-tuning", "tuning.adapters", 4),
        ("t5/11-mixing", "mixing.limit", 6),
    ],
)
def test_a_table_is_drawn_against_the_number_that_its_rows_differ_in(name, path, rows):
    axis = plots.axis_of(tables(find(name))[0], "base")
    assert (axis and axis[0], len(axis[1]) if axis else 0) == (path, rows)


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

"""An entry of the public table: trained once at a tiny scale, then every way to break a rule is refused."""

import csv
import hashlib
import io
import json
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import small_runs
from matplotlib.figure import Figure

from experiments.cli import entry as command
from experiments.entries import archive as archives
from experiments.entries import rules, table, verify
from experiments.entries.archive import Archive, read_archive
from experiments.entries.entry import check_source, load_entry
from experiments.entries.tracks import BASELINE_SCORES, TRACKS
from experiments.report.report import compare_tables
from experiments.study.plugins import STUDY_VARIABLE
from experiments.study.registry import build, find, tables_of
from lm.config.base import SettingError
from lm.data.documentation.corpus import INSTALLED
from lm.data.tasks.benchmarks import TASKS
from lm.files import json_with_checksum, parse_with_checksum

runs = small_runs.runs
FILE = '''"""A decoder with squared ReLU."""

from experiments.entries.entry import Entry

ENTRY = Entry(
    title="Squared ReLU",
    author="A. Student",
    hypothesis="It is ahead of GELU.",
    row="history/transformer",
    changes=CHANGES,
)
'''
STEPS = {"pretraining.steps": 4, "pretraining.save_every": 4, "pretraining.evaluate_every": 4}
CHANGES = {"model.mlp.activation": "squared-relu", "data.repeats": 0, "data.inputs_length": 24, **STEPS}
TINY_RULES = rules.Rules(scale="tiny", text=INSTALLED, seeds=2, held_out_documents=2)


@pytest.fixture(scope="module", autouse=True)
def _tiny_rules():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rules, "RULES", TINY_RULES)
        patch.setenv(STUDY_VARIABLE, "")
        # a worker would be another pytest
        patch.setattr(command, "train_unfinished", lambda wanted, options, *_, **__: train(wanted, options))
        yield


def train(wanted, options):
    from experiments.cli.train import train_unfinished

    return train_unfinished(wanted, options)


def file_of(folder: Path, name: str, text: str = FILE, changes=CHANGES) -> Path:
    path = folder / f"{name}.py"
    path.write_text(text.replace("CHANGES", repr(changes)))
    return path


@pytest.fixture(scope="module")
def sealed(runs, tmp_path_factory):
    """The archive of an entry that keeps the rules."""
    file = file_of(tmp_path_factory.mktemp("entries"), "squared")
    command.entry_run(file, runs=runs)
    return file.with_suffix(".tar.xz")


def altered(path: Path, folder: Path, change) -> Path:
    """A copy of an archive whose summary and files ``change`` has changed, sealed anew as a forger would."""
    found = read_archive(path)
    summary, files = json.loads(json.dumps(found.summary)), dict(found.files)
    summary.pop("sha256", None)
    change(summary, files)
    summary["files"] = {name: hashlib.sha256(contents).hexdigest() for name, contents in files.items()}
    out = folder / "altered.tar.xz"
    with tarfile.open(out, "w:xz") as packed:
        for name, contents in ({archives.SUMMARY: json_with_checksum(summary).encode()} | files).items():
            member = tarfile.TarInfo(name)
            member.size = len(contents)
            packed.addfile(member, io.BytesIO(contents))
    return out


def rewritten(contents: bytes, **values) -> bytes:
    """A file with a checksum in which values are replaced."""
    old = parse_with_checksum(contents, "a file")
    return json_with_checksum(old | values).encode()


def refusal(archive: Path, runs) -> str:
    with pytest.raises(SettingError) as caught:
        command.entry_verify(archive, runs=runs)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.slow
def test_an_archive_is_accepted_after_one_of_its_seeds_was_trained_again_to_the_last_bit(
    sealed,
    runs,
    capsys,
):
    command.entry_verify(sealed, runs=runs)
    shown = " ".join(capsys.readouterr().out.split())
    assert "equal to the last bit" in shown and "accepted: Squared ReLU, by A. Student" in shown
    assert "no position sees a later one" in shown


def test_an_entry_that_is_finished_is_packed_again_without_training_and_never_over_an_archive(sealed, runs):
    before = {path: path.stat().st_mtime_ns for path in (*runs.rglob("metrics.jsonl"), sealed)}
    command.entry_run(sealed.with_name("squared.py"), out=sealed.with_name("again.tar.xz"), runs=runs)
    with pytest.raises(SettingError, match=r"squared.tar.xz is there already: --out"):
        command.entry_run(sealed.with_name("squared.py"), runs=runs)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    sealed.with_name("again.tar.xz").unlink()


# ---- cheats


def test_another_text_is_refused(runs, tmp_path):
    file = file_of(tmp_path, "other_text", changes={**CHANGES, "data.corpus": "text:book.txt"})
    with pytest.raises(SettingError, match="data.corpus is the same for all entries"):
        command.entry_run(file, runs=runs)


def test_a_teacher_which_has_learnt_from_another_text_and_budget_is_refused(runs, tmp_path):
    with pytest.raises(SettingError, match="distillation.teacher is the same for all entries"):
        load_entry(file_of(tmp_path, "taught", changes={**CHANGES, "distillation.teacher": "gpt2"}))


def test_an_archive_that_learnt_other_data_than_there_are_here_is_refused(sealed, runs, tmp_path):
    def change(summary, files):
        for name in [name for name in files if name.endswith("origin.json")]:
            old = parse_with_checksum(files[name], name)["data"]
            files[name] = rewritten(files[name], data=dict.fromkeys(old, "another digest"))

    assert "it learnt from another data" in refusal(altered(sealed, tmp_path, change), runs)


def test_a_check_trains_nothing_and_refuses_what_a_run_would(runs, tmp_path, capsys):
    before = [*runs.rglob("scores.json")]
    command.entry_run(
        file_of(tmp_path, "fair", changes={"model.mlp.activation": "silu"}), runs=runs, check=True
    )
    assert "fair.py keeps the rules" in capsys.readouterr().out
    assert [*runs.rglob("scores.json")] == before and not [*tmp_path.glob("*.tar.xz")]
    with pytest.raises(SettingError, match="parameters; an entry has at most"):
        command.entry_run(
            file_of(tmp_path, "heavy", changes={"model.mlp.d_ff": 10**6}), runs=runs, check=True
        )


def test_a_longer_budget_is_refused_before_training(runs, tmp_path):
    steps = {"pretraining.steps": 10**9, "pretraining.save_every": 10**9}
    file = file_of(tmp_path, "long", changes={**CHANGES, **steps})
    with pytest.raises(SettingError, match="a run takes .* FLOP; an entry has 2.1e"):
        command.entry_run(file, runs=runs)
    file = file_of(tmp_path, "large", changes={**CHANGES, "model.mlp.d_ff": 10**6})
    with pytest.raises(SettingError, match="parameters; an entry has at most 2,000,000"):
        command.entry_run(file, runs=runs)


def test_fewer_seeds_are_refused_and_so_is_a_seed_of_ones_choice(sealed, runs, tmp_path):
    def drop(summary, files):
        del summary["seeds"]["1"]

    assert "it has the seeds [0]; an entry has [0, 1]" in refusal(altered(sealed, tmp_path, drop), runs)

    def choose(summary, files):
        name = "seed-1/settings.json"
        files[name] = rewritten(files[name], seed=7)

    assert "seed-1/settings.json is not what" in refusal(altered(sealed, tmp_path, choose), runs)
    file = file_of(tmp_path, "lucky", changes={**CHANGES, "seed": 7})
    with pytest.raises(SettingError, match="seed is the same for all entries"):
        command.entry_run(file, runs=runs)


def test_scores_that_were_edited_are_refused_wherever_they_were_edited(sealed, runs, tmp_path):
    def edit_summary(summary, files):
        summary["seeds"]["0"]["score"] -= 1

    assert "its records say" in refusal(altered(sealed, tmp_path, edit_summary), runs)

    def edit_everything(summary, files):
        for seed in ("0", "1"):
            name = f"seed-{seed}/scores.json"
            likelihoods = parse_with_checksum(files[name], name)["likelihoods"]
            likelihoods[-1]["nats"] /= 2
            files[name] = rewritten(files[name], likelihoods=likelihoods)
            summary["seeds"][seed]["score"] /= 2

    assert "they should be equal" in refusal(altered(sealed, tmp_path, edit_everything), runs)


def test_a_file_that_was_changed_after_sealing_is_named(sealed, tmp_path, runs):
    def change(summary, files):
        files["seed-0/metrics.jsonl"] = b""

    path = altered(sealed, tmp_path, change)
    found = read_archive(path)
    summary = dict(found.summary) | {"files": read_archive(sealed).summary["files"]}
    summary.pop("sha256", None)
    with tarfile.open(path, "w:xz") as packed:
        contents = {archives.SUMMARY: json_with_checksum(summary).encode()} | dict(found.files)
        for name, each in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(each)
            packed.addfile(member, io.BytesIO(each))
    stage = next(name for name in found.files if name.endswith("metrics.jsonl") and "stages" in name)
    assert stage
    assert "was added after sealing" in refusal(path, runs) or "changed after sealing" in refusal(path, runs)


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("import socket", "import socket"),
        ("from urllib import request", "import urllib"),
        ("import os", "import os"),
        ("import operator", "import operator"),
        ("from lm.data.corpus.shards import iter_documents", "import lm.data.corpus.shards"),
        ("import lm.files as f", "import lm.files"),
        ("from lm.nn import presets\nfrom lm.config.base import json as j", "import json"),
        ("from dataclasses import builtins", "import builtins from dataclasses"),
        ("import numpy as np\nTEXT = np.loadtxt('https://example.org')", "use loadtxt"),
        ("import numpy as np\nTEXT = np.lib.npyio", "use lib"),
        ("import lm.nn as lm\nlm.files.read_bytes", "use files"),
        ("TEXT = open('held_out.txt').read()", "use open"),
        ("X = __builtins__['exec']", "use __builtins__"),
        ("X = __loader__", "use __loader__"),
        ("import lm.nn.mlp as mlp\nmlp.MLP = None", "set mlp.MLP"),
        ("import lm.nn.mlp as self\nself.MLP = None", "set self.MLP"),
        ("def put(self):\n    self.RULES = None", "set self.RULES"),
        ("import lm.nn.mlp as mlp\nsetattr(mlp, 'MLP', None)", "use setattr"),
        ("import lm.nn.mlp as mlp\nmlp.__dict__['MLP'] = None", "use __dict__"),
        ("exec('import os')", "use exec"),
        ("class Mine:\n    def flops(self, length, visible):\n        return 0", "define flops"),
        ("class Mine:\n    flops = None", "define flops"),
        ("class Mine:\n    def __init__(self):\n        self.flops = None", "define flops"),
        ("class Mine:\n    from math import floor as flops", "define flops"),
        ("class Mine:\n    class flops:\n        pass", "define flops"),
        ("class Mine:\n    match 0:\n        case flops:\n            pass", "define flops"),
        ("class Mine:\n    def __getattribute__(self, name):\n        return 0", "define __getattribute__"),
        ("from lm.nn.nothing import part", "import from lm.nn.nothing: No module named 'lm.nn.nothing'"),
        ("import jax.experimental.multihost_utils as m", "import jax.experimental.multihost_utils"),
    ],
)
def test_reading_files_or_the_network_and_replacing_what_scores_are_refused_with_their_line(line, fault):
    with pytest.raises(SettingError) as caught:
        check_source((FILE + line).encode(), "mine.py")
    message = str(caught.value)
    assert f"an entry may not {fault}" in message and message.startswith("mine.py:")
    assert int(message.split(":")[1]) > FILE.count("\n")


def test_a_file_is_read_in_the_encoding_that_python_reads_it_in():
    with pytest.raises(SettingError, match="may not import os"):
        check_source(b"# coding: utf-7\n+AAo-import os\n", "mine.py")


def test_a_file_has_no_room_for_a_text():
    with pytest.raises(SettingError, match="an entry has at most 20,000"):
        check_source(FILE.encode() + b"#" * 20_000, "mine.py")


def test_what_an_entry_may_do_is_allowed():
    check_source(
        b"import jax.numpy as jnp\nfrom lm.nn.mixers import MIXERS\n\n\nclass Mine:\n"
        b"    def __init__(self):\n        self.width = jnp.ones(3)\n\n\nMIXERS['mine'] = Mine\n",
        "mine.py",
    )


def test_an_entry_of_a_class_of_its_own_is_refused(tmp_path):
    text = FILE.replace("ENTRY = Entry(", "class Lucky(Entry):\n    pass\n\n\nENTRY = Lucky(")
    with pytest.raises(SettingError, match="should define ENTRY = Entry"):
        load_entry(file_of(tmp_path, "lucky_class", text))


def test_text_that_a_file_brings_along_is_refused(runs, tmp_path, sealed):
    words = held_out_documents_of(runs)[0].split()[:60]
    pieces = [" ".join(words[i : i + 5]) for i in range(0, 60, 5)]
    file = file_of(tmp_path, "contaminated", FILE + f"TEXT = {pieces!r}\n")
    with pytest.raises(SettingError, match="held-out"):
        command.entry_run(file, runs=runs)


def held_out_documents_of(runs) -> list[str]:
    from lm.data.corpus.shards import iter_documents
    from lm.data.corpus.spec import corpus_shards

    return [*iter_documents(corpus_shards("documentation/installed", "validation", runs / "cache"))]


@pytest.mark.parametrize(
    ("commit", "mend"),
    [
        ("e5aca88", "git checkout e5aca88 && make install"),
        ("e5aca88-dirty", "changes that are not recorded"),
        ("", "its commit is not recorded"),
    ],
)
def test_the_refusal_of_another_version_says_how_to_verify_it(commit, mend):
    archive = Archive(Path("old.tar.xz"), {"code": {"lm/batch.py": "0123456789ab"}, "commit": commit}, {})
    with pytest.raises(SettingError, match=f"another version, .*; .*{mend}$"):
        verify.check_code(archive)


def test_an_archive_of_another_version_is_refused(sealed, runs, tmp_path):
    def other_code(summary, files):
        summary["code"]["lm/train/step.py"] = "0123456789ab"

    assert "it was trained by another version" in refusal(altered(sealed, tmp_path, other_code), runs)

    def other_rules(summary, files):
        summary["rules"]["flops"] *= 2

    assert "by its rules flops is" in refusal(altered(sealed, tmp_path, other_rules), runs)


def test_a_budget_that_the_records_understate_is_found_when_a_seed_is_trained_again(sealed, runs, tmp_path):
    def understate(summary, files):
        for seed in ("0", "1"):
            name = f"seed-{seed}/scores.json"
            files[name] = rewritten(files[name], flops=1.0)
            summary["seeds"][seed]["flops"] = 1.0

    assert "is given with 1 FLOP" in refusal(altered(sealed, tmp_path, understate), runs)


def test_the_file_beside_an_archive_and_the_words_of_its_summary_are_those_of_the_file_in_it(
    sealed, runs, tmp_path
):
    def rename(summary, files):
        summary["entry"]["author"] = "Somebody else"

    assert "does not say what its entry.py says" in refusal(altered(sealed, tmp_path, rename), runs)
    copy = tmp_path / "copied.tar.xz"
    copy.write_bytes(sealed.read_bytes())
    (tmp_path / "copied.py").write_text("# a harmless file\n")
    assert "it should be the same, to be read" in refusal(copy, runs)


def test_a_network_whose_seeds_all_score_alike_is_refused(sealed, runs, tmp_path):
    def repeat(summary, files):
        first = parse_with_checksum(files["seed-0/scores.json"], "seed 0")
        name = "seed-1/scores.json"
        files[name] = rewritten(files[name], likelihoods=first["likelihoods"])
        summary["seeds"]["1"]["score"] = summary["seeds"]["0"]["score"]

    assert "does not depend on its seed" in refusal(altered(sealed, tmp_path, repeat), runs)


def causal(inputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Logits [B,T,V] that count the tokens of the inputs, and those of the targets until each position."""
    return np.eye(40)[inputs].sum(1, keepdims=True) + np.cumsum(np.eye(40)[targets], axis=1)


def test_a_model_that_sees_a_later_token_at_any_place_or_the_rows_beside_it_is_no_distribution():
    tokens = np.random.default_rng(0).integers(0, 40, (4, 16))
    verify.check_causality(Path("run"), causal, tokens)
    verify.check_rows_alone(Path("run"), causal, tokens)

    def peeks(inputs, targets):  # one position sees the next, and no half of the text can show it
        logits = causal(inputs, targets)
        logits[:, 4] += np.eye(40)[targets[:, 5]]
        return logits

    def mixes_inputs(inputs, targets):
        return causal(inputs, targets) + np.eye(40)[inputs].mean(0)

    def mixes_targets(inputs, targets):
        return causal(inputs, targets) + np.eye(40)[targets].mean(0)

    with pytest.raises(SettingError, match="predictions before position 5 change"):
        verify.check_causality(Path("run"), peeks, tokens)
    for mixes in (mixes_inputs, mixes_targets):
        with pytest.raises(SettingError, match="predictions of a row change"):
            verify.check_rows_alone(Path("run"), mixes, tokens)


# ---- the table


def entry_of(name: str, date: str, values, track="text") -> Archive:
    scores = {
        str(seed): {
            "score": value,
            "half_width": 0.0,
            "flops": 1e13,
            "parameters": 10**6,
            "seconds": 60,
        }
        for seed, value in enumerate(values)
    }
    about = {"title": name, "author": "A. Student", "track": track}
    return Archive(Path(f"{name}.tar.xz"), {"date": date, "commit": "", "entry": about, "seeds": scores}, {})


def test_entries_that_differ_by_nothing_are_told_apart_in_at_most_five_tables_of_a_hundred():
    draw, wrong, tables = np.random.default_rng(0), 0, 1_000
    for _ in range(tables):
        entries = [entry_of(f"e{i}", f"2026-01-{i + 1:02d}", draw.normal(1.5, 0.01, 5)) for i in range(4)]
        wrong += any(each.is_record for each in table.compare_in_order(entries)[1:])
    assert wrong / tables < 0.05 + 3 * (0.05 * 0.95 / tables) ** 0.5


def test_the_levels_of_all_comparisons_add_up_to_that_of_the_rules():
    total = sum(map(table.level_of, range(1, 10_000)))
    assert total == pytest.approx(TINY_RULES.level, rel=1e-3)


def test_a_clear_improvement_is_a_record_and_the_next_is_compared_with_it():
    spread = np.array([-0.01, -0.005, 0, 0.005, 0.01])
    entries = [
        entry_of(name, date, mean + spread)
        for name, date, mean in (
            ("first", "2026-01-01", 1.6),
            ("better", "2026-01-02", 1.5),
            ("between", "2026-01-03", 1.55),
        )
    ]
    placed = {each.archive.name: each for each in table.compare_in_order(entries)}
    assert [placed[name].is_record for name in ("first", "better", "between")] == [True, True, False]
    assert placed["between"].p > 0.5
    ranked = [cell.text for cell in table.table_sheet([*placed.values()], TRACKS["text"])["entry"]]
    assert ranked == ["better", "between", "first"]
    axes = Figure().subplots()
    table._draw_track([*placed.values()], TRACKS["text"], axes)
    (steps,) = (line for line in axes.lines if line.get_label() == "record")
    assert [*steps.get_ydata()] == pytest.approx([1.6, 1.5, 1.5]), "the record stands until the last entry"


def test_entries_stand_in_the_order_of_acceptance_and_the_others_by_the_time_of_sealing(
    tmp_path, monkeypatch
):
    dates = {"a": "2026-01-03 10:00", "b": "2026-01-02", "c": "2026-01-01 09:00", "d": "2026-01-01 08:00"}
    for name in dates:
        (tmp_path / f"{name}.tar.xz").write_bytes(b"")
    monkeypatch.setattr(
        table, "read_archive", lambda path: entry_of(path.name[0], dates[path.name[0]], [1.0])
    )
    monkeypatch.setattr(table, "check_rules", lambda archive: None)
    assert [each.name for each in table.read_entries(tmp_path)] == ["d", "c", "b", "a"]
    (tmp_path / table.ORDER_FILE).write_text("b\na\n")
    assert [each.name for each in table.read_entries(tmp_path)] == ["b", "a", "d", "c"]
    (tmp_path / table.ORDER_FILE).write_text("b\ne\n")
    with pytest.raises(SettingError, match="order.txt names e, of which there is no archive"):
        table.read_entries(tmp_path)


def test_more_is_better_in_tasks_and_less_in_text_and_no_entry_is_compared_with_the_other_track():
    spread = np.array([-0.01, -0.005, 0, 0.005, 0.01])
    entries = [
        entry_of(f"{track}-{mean}", f"2026-01-0{day}", mean + spread, track)
        for track in TRACKS
        for day, mean in enumerate((1.5, 1.6, 1.4), start=1)
    ]
    found = table.compare_tracks(entries)
    assert {name: [each.is_record for each in compared] for name, compared in found.items()} == {
        "text": [True, False, True],
        "tasks": [True, True, False],
    }
    for name, best in (("text", "text-1.4"), ("tasks", "tasks-1.6")):
        assert table.table_sheet(found[name], TRACKS[name])["entry"][0].text == best
    for name, track in TRACKS.items():
        better = {"text": 1, "tasks": 2}[name]
        assert table.improvement_p(np.full(5, 1.5), np.full(5, better), track) == 0
        assert table.improvement_p(np.full(5, better), np.full(5, 1.5), track) == 1


# ---- the track of tasks


def test_a_score_of_tasks_is_in_deviations_of_a_run_from_the_baseline_with_equal_halves():
    half = {name: TASKS[name].half for name in BASELINE_SCORES}

    def score(moved) -> float:
        """The score of a run that is as good as the baseline, and better by a deviation in these tasks."""
        tasks = {
            name: baseline.mean
            + baseline.deviation * (name in moved) * (-1 if TASKS[name].measure == "bits_per_byte" else 1)
            for name, baseline in BASELINE_SCORES.items()
        }
        return TRACKS["tasks"].score(
            SimpleNamespace(tasks={name: {"score": value} for name, value in tasks.items()}), Path("run")
        )[0]

    assert score([]) == pytest.approx(0)
    assert score(BASELINE_SCORES) == pytest.approx(1)
    for each in ("reading", "language"):
        names = [name for name in half if half[name] == each]
        assert score(names) == pytest.approx(1 / 2)
        assert score(names[:1]) == pytest.approx(1 / 2 / len(names))


RESULTS = Path(__file__).parents[3] / "docs" / "results"


def test_the_baseline_of_the_track_of_tasks_is_that_of_the_first_three_published_seeds():
    columns = json.loads((RESULTS / "mini.json").read_text())["tables"]["t5/1-baseline"]["columns"]
    judged = {name: each for name, each in columns.items() if each["judged"]}
    assert BASELINE_SCORES.keys() == judged.keys()
    with (RESULTS / "mini.csv").open() as lines:
        rows = [row for row in csv.DictReader(lines) if row["row"] == "t5/1-baseline/baseline"]
    for name, baseline in BASELINE_SCORES.items():
        scores = {row["seed"]: float(row["score"]) for row in rows if row["column"] == name}
        assert baseline.mean == pytest.approx(np.mean([scores[seed] for seed in "012"]), abs=5e-5)
        assert (TASKS[name].half, TASKS[name].measure) == (judged[name]["half"], judged[name]["measure"])


@pytest.mark.slow
def test_the_unit_of_the_track_of_tasks_is_the_noise_of_the_first_three_published_seeds(tmp_path):
    """Pooled over the rows of Tables 1 and 4, and with that of new examples."""
    with tarfile.open(RESULTS / "mini.tar.xz") as file:
        file.extractall(tmp_path, filter="data")
    for folder in tmp_path.glob("mini/t5/*/*/seed-[3-9]"):
        shutil.rmtree(folder)
    tables = compare_tables(tables_of(find("t5/[14]-*")), "mini", tmp_path, None, print)
    for metric in (metric for metric in tables[0].metrics if metric.name in BASELINE_SCORES):
        rows = {name: scores for table in tables for name, scores in table.values_by_seed(metric).items()}
        variances = [np.var([*scores.values()], ddof=1) for scores in rows.values()]
        assert len(variances) == 5
        noise = np.hypot(np.mean(variances) ** 0.5, tables[0].noise[metric.name].examples)
        assert BASELINE_SCORES[metric.name].deviation == pytest.approx(noise, abs=5e-5), metric.name


def test_an_entry_of_tasks_is_tuned_as_the_baseline_is_whatever_row_it_starts_from(runs, tmp_path):
    baseline = build("t5/1-baseline/baseline", "tiny")
    for row in ("t5/4-objective/prefix-lm", "history/transformer"):
        text = FILE.replace("history/transformer", row).replace("row=", 'track="tasks",\n    row=')
        experiment = load_entry(file_of(tmp_path, "of_tasks", text, STEPS)).experiment(1)
        assert experiment.tuning == replace(baseline.tuning, branches=(1.0,))
        assert experiment.finetuning == baseline.finetuning
    for path in ("tuning.inputs_length", "finetuning.steps"):
        with pytest.raises(SettingError, match="is the same for all entries"):
            load_entry(file_of(tmp_path, "tuned", text, {path: 500}))
    with pytest.raises(SettingError, match="should be one of text, tasks"):
        load_entry(file_of(tmp_path, "third", text.replace('"tasks"', '"pictures"'), STEPS))


@pytest.mark.slow
def test_an_entry_of_tasks_is_trained_sealed_and_verified(runs, tmp_path, capsys):
    text = FILE.replace("history/transformer", "t5/1-baseline/baseline").replace(
        "row=", 'track="tasks",\n    row='
    )
    command.entry_run(file := file_of(tmp_path, "of_tasks", text, STEPS), runs=runs)
    command.entry_verify(file.with_suffix(".tar.xz"), runs=runs)
    shown = " ".join(capsys.readouterr().out.split())
    assert "standard deviations of a run in the archive" in shown and "equal to the last bit" in shown
    assert "no position sees a later one" in shown


def test_a_folder_of_archives_becomes_a_table_and_a_picture(sealed, capsys):
    command.entry_table(sealed.parent)
    shown = capsys.readouterr().out
    assert "squared" in shown and "A. Student" in shown
    assert (sealed.parent / "records.png").read_bytes().startswith(b"\x89PNG")


def test_the_archives_in_the_repository_are_whole_and_the_table_reads_them(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rules, "RULES", rules.Rules())
    command.entry_table(Path(__file__).parents[3] / "docs" / "entries", out=tmp_path / "records.png")
    assert "five_gram" in capsys.readouterr().out


def test_a_folder_without_archives_and_a_file_without_an_entry_are_refused(tmp_path):
    with pytest.raises(SettingError, match="has no archives of entries"):
        command.entry_table(tmp_path)
    empty = tmp_path / "nothing_here.py"
    empty.write_text("X = 1\n")
    with pytest.raises(SettingError, match="should define ENTRY"):
        load_entry(empty)

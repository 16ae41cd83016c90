"""A file that was changed since it was written is named, or nothing that is shown or done depends on the
change.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import toy
from reported_runs import NAMES, RECORD
from texts import TEXTS

from experiments.report.page import prediction_samples
from experiments.report.results import find_results
from experiments.runs import provenance
from experiments.runs.curves import read_curves
from experiments.runs.paths import load_settings, save_settings
from experiments.runs.result import write_result
from experiments.runs.status import is_stage_finished
from experiments.runs.task_scores import best_of, write_example_values
from experiments.runs.vocabulary import store_vocabulary, stored_vocabulary
from experiments.study.paths import run_folder
from experiments.study.registry import REGISTRY, build
from lm.config.base import SettingError
from lm.data.tasks.task import BaseTask
from lm.evaluate.evaluator import write_predictions
from lm.files import json_with_checksum, line_with_checksum, parse_lines_with_checksum, parse_with_checksum
from lm.tokenizers.sentencepiece import SentencePieceTokenizer, train_sentencepiece
from lm.train.runtime import manifest
from lm.train.runtime.records import status

VALUE = {
    "name": "ä\n\u2028",
    "numbers": [1, -0.0, 1e308, None, True],
    "in": {"deep": {}},
    "steps": {1: 2, 10: 3, 2: 4},
}
PATH = Path("folder/file.json")
HOSTILE = [
    b"",
    b"null",
    b"[]",
    b"{}",
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b'{"a": ' + b"9" * 5000 + b"}",
    b"\xff\xfe",
    b"\0",
]


def lines(count: int) -> list[bytes]:
    made, before = [], ""
    for step in range(count):
        line, before = line_with_checksum({"step": step, "loss": step / 7}, before)
        made.append(line.encode())
    return made


def damaged(data: bytes, rng: np.random.Generator) -> bytes:
    """One bit is another, or one digit."""
    if rng.random() < 0.5:
        place = int(rng.integers(len(data)))
        return data[:place] + bytes([data[place] ^ 1 << int(rng.integers(8))]) + data[place + 1 :]
    digits = [i for i, byte in enumerate(data) if chr(byte).isdigit()]
    place = int(rng.choice(digits))
    other = (data[place] - 48 + int(rng.integers(1, 10))) % 10 + 48
    return data[:place] + bytes([other]) + data[place + 1 :]


def test_what_is_sealed_comes_back_and_no_change_of_it_passes():
    text = json_with_checksum(VALUE).encode()
    whole = json.loads(json.dumps(VALUE))
    assert parse_with_checksum(text, PATH) == whole
    assert parse_with_checksum(json.dumps(json.loads(text)).encode(), PATH) == whole, (
        "laid out otherwise it says the same"
    )
    rng = np.random.default_rng(0)
    for _ in range(500):
        try:
            assert json.dumps(parse_with_checksum(damaged(text, rng), PATH)) == json.dumps(whole)
        except SettingError as error:
            assert str(PATH) in str(error) and "put back" in str(error)


@pytest.mark.parametrize("data", HOSTILE, ids=lambda data: repr(data[:8]))
def test_a_hostile_file_is_one_error_that_names_it(data):
    for read in (parse_with_checksum, parse_lines_with_checksum):
        if data not in (b"", b"\0") or read is parse_with_checksum:
            with pytest.raises(SettingError, match="folder/file.json"):
                read(data if read is parse_with_checksum else data + b"\n", PATH)


def test_of_lines_a_lost_one_a_moved_one_and_a_changed_one_are_named():
    made = lines(5)
    assert [each["step"] for each in parse_lines_with_checksum(b"".join(made), PATH)] == [0, 1, 2, 3, 4]
    for place in range(4):
        with pytest.raises(SettingError, match=rf"line {place + 1} of 4"):
            parse_lines_with_checksum(b"".join(made[:place] + made[place + 1 :]), PATH)
        with pytest.raises(SettingError, match=rf"line {place + 1} of 5"):
            parse_lines_with_checksum(
                b"".join([*made[:place], made[place + 1], made[place], *made[place + 2 :]]), PATH
            )


def test_a_last_line_that_a_kill_cut_short_is_legal_and_one_that_was_changed_is_not():
    *whole, last = lines(3)
    for end in range(len(last)):
        found = parse_lines_with_checksum(b"".join(whole) + last[:end] + b"\0" * (end % 3), PATH)
        assert len(found) == (3 if end == len(last) - 1 else 2)
    for wrong in (last[:-1] + b"\x0b", last[:-3] + b'0"}\n', last[:40] + b"\n"):
        with pytest.raises(SettingError, match="line 3 of 3"):
            parse_lines_with_checksum(b"".join(whole) + wrong, PATH)


STEPS, TASK = 4, BaseTask("cloze", "", "SQuAD", None, {"em": None})


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a finished run: every file that one leaves, by what writes it."""
    runs = tmp_path_factory.mktemp("runs")
    folder, experiment = run_folder(runs, "nano", NAMES[0], 0, {}), build(NAMES[0], "nano")
    phase = folder / "finetuning" / "cloze"
    vocabulary = SentencePieceTokenizer(
        train_sentencepiece(TEXTS, 45, runs / "vocabulary.model"), experiment.data.sentinels
    )
    save_settings(folder, experiment)
    provenance.record(phase, RECORD | {"vocabulary": {"fingerprint": vocabulary.fingerprint}})
    store_vocabulary(phase, vocabulary)

    def evaluate(state):
        step = int(state.step)
        asked = SimpleNamespace(to_text=lambda row: (row, ["a", "b"]))
        write_predictions(
            phase / "predictions" / "cloze" / f"{step}.jsonl", asked, list("12345"), ["a", f"c{step}", *"def"]
        )
        return {
            "loss": 3.0 - step / 10,
            "cloze/bits_per_byte": 2.0,
            "cloze/em": 10.0 * step,
            "cloze/score": 10.0 * step,
        }

    toy.run(phase, STEPS, every=2, evaluate=evaluate)
    examples = write_example_values(phase, "cloze", {"bits": np.arange(5.0), "ranked": np.ones(5)})
    scored = best_of(TASK, phase) | {"examples": examples}
    found = {
        "columns": {"SQuAD": scored["score"]},
        "tasks": {"cloze": scored},
        "held_out_loss": 2.5,
        "seconds": 1.0,
    }
    count = len((phase / "metrics.jsonl").read_text().splitlines())
    stages = {"cloze": str(phase.relative_to(runs / "nano"))}
    write_result(folder, found | {"tokens": 9, "phases": stages, "records": {"cloze": count}})
    return folder


def seen(folder: Path) -> tuple[list, list[str]]:
    """All that is shown of a run and done with it, and what is said of its files."""
    phase, said, shown = folder / "finetuning" / "cloze", [], []
    experiment = build(NAMES[0], "nano")

    def look(at):
        try:
            shown.append(at())
        except (SettingError, OSError, manifest.Damage) as error:
            said.append(str(error))

    found = find_results(REGISTRY[NAMES[0]], "nano", folder.parents[4], said.append)
    look(lambda: found)
    look(lambda: read_curves(found, said.append))
    look(lambda: [prediction_samples("cloze", step, result) for result in found for step in (2, 4)])
    look(lambda: [{x: y.tolist() for x, y in result.example_values("cloze").items()} for result in found])
    look(lambda: is_stage_finished(phase, STEPS))
    look(lambda: status(phase))
    look(lambda: best_of(TASK, phase))
    look(lambda: load_settings(folder))
    look(lambda: provenance.read(phase))
    look(lambda: stored_vocabulary(phase, experiment).fingerprint)
    look(lambda: manifest.best(manifest.manifests(phase / "checkpoints"), "loss", "lowest"))
    faults = {
        step: manifest.find_damage(path, step) for step, path in manifest.steps(phase / "checkpoints").items()
    }
    look(lambda: faults)
    return shown, [
        *said,
        *filter(None, faults.values()),
        *(text for text in map(str, shown) if "; not shown" in text),
    ]


def other(data: bytes, kind: str, rng: np.random.Generator) -> bytes:
    if kind == "line":
        lines = data.splitlines(keepends=True)
        del lines[int(rng.integers(len(lines)))]
        return b"".join(lines)
    return damaged(data, rng)


@pytest.mark.parametrize(
    "first, count", [(0, 60), pytest.param(60, 560, marks=pytest.mark.slow)], ids=["60", "560"]
)
def test_a_bit_a_digit_or_a_line_of_any_file_of_a_run_that_is_other_is_said_or_changes_nothing(
    run, first, count
):
    whole, silent = seen(run), 0
    assert not whole[1] and len(whole[0]) == 12, whole[1]
    assert (
        whole[0][3] == [{"bits": [0, 1, 2, 3, 4], "ranked": [1] * 5}]
        and whole[0][4]
        and whole[0][10] == 4
        and "c4" in whole[0][2][1]
    )
    files = sorted(path for path in run.rglob("*") if path.is_file() and path.stat().st_size)
    assert len(files) > 15
    for number in range(first, first + count):
        rng = np.random.default_rng(number)
        path = files[number % len(files)]
        data = path.read_bytes()
        kind = "line" if data.count(b"\n") > 1 and rng.random() < 0.3 else "byte"
        try:
            path.write_bytes(other(data, kind, rng))
            shown, said = seen(run)
        finally:
            path.write_bytes(data)
        assert said or repr(shown) == repr(whole[0]), f"case {number}, {kind} of {path}: nothing is said"
        silent += not said
    assert silent < count / 2
    assert repr(seen(run)) == repr(whole)

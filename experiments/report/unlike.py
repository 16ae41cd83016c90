"""Which runs of a table were made of other data, vocabulary, code or packages than those beside them."""

from collections.abc import Iterator, Mapping
from typing import Any

from experiments.console import Sheet
from experiments.report.sheets import Finished, base_of
from experiments.runs import origin
from experiments.runs.result import Result
from experiments.study.experiment import Experiment, Table
from experiments.study.registry import build
from lm.settings import SettingError, leaves

MARK = "≠"  # behind the name of a row
Unlike = Mapping[str, list[str]]  # row -> what is other in its seeds, a line each


def unlike(table: Table, found: Finished, scale: str) -> Unlike:
    """What in the rows of ``table`` is other than in the first run, the baseline's if there is one, of those
    alike.

    Of rows that a setting gives other data or another vocabulary, those are compared that have the same
    setting. A row is in the result if anything of it is other, or is not known.
    """
    first: dict[Any, tuple[str, Any]] = {}
    lines: dict[str, list[str]] = {}
    for row in dict.fromkeys(row.name for row in (base_of(table), *table.rows)):
        for run in found[row]:
            name, others = f"{row} seed {run.seed}", []
            try:
                for key, value in parts(run, build(row, scale)):
                    owner, due = first.setdefault(key, (name, value))
                    others += [f"{key[0]} than {owner}: {said(due, value)}"] if value != due else []
            except (SettingError, OSError) as error:
                others.append(f"it is not known: {error}")
            if others:
                lines.setdefault(row, []).extend(f"{name}: {other}" for other in dict.fromkeys(others))
    return lines


def parts(run: Result, experiment: Experiment) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """(what, and what it depends on; value) of all that the phases of a run were made of."""
    settings, data = dict(leaves(experiment)), experiment.data
    kind, _, named = data.vocabulary.partition(":")
    vocabulary: tuple[Any, ...] = (data.vocabulary, data.sentinels)
    if kind == "unigram":
        tasks = experiment.tuning.mixtures if data.vocabulary_texts == "corpus+tasks" else ()
        vocabulary = (named or data.corpus, data.vocabulary_size, data.sentinels, data.corrupt_records, tasks)
    there = run.phase_folders()
    for phase in run.phases:
        if phase not in there:
            raise SettingError(f"the folder of {phase} is missing")
        record = origin.read(there[phase])
        for split, fingerprint in record["data"].items():
            setting = {"corpus": "data.corpus", "vocabulary": "data.vocabulary"}.get(split.split()[0])
            yield ("other data", split, settings.get(setting), data.corrupt_records), {split: fingerprint}
        yield ("other vocabulary", *vocabulary), record["vocabulary"]
        yield ("other code",), record["code"]
        yield ("other packages",), record["packages"]
        yield ("another history",), {"allowed": [each["changed"] for each in record["allowed"]]}


def said(due: Mapping[str, Any], value: Mapping[str, Any]) -> str:
    """The names in which two records differ, with the values where they are short, as of packages."""
    names = [name for name in due | value if due.get(name) != value.get(name)]
    texts = [f"{name} {due.get(name, 'none')} -> {value.get(name, 'none')}" for name in names]
    shown = [text if len(text) < 60 else name for name, text in zip(names, texts, strict=True)][:3]
    return ", ".join([*shown, f"{len(names) - 3} more"] if len(names) > 3 else shown)


def note(others: Unlike) -> str:
    """What a report says of them; nothing if all is alike."""
    if not others:
        return ""
    lines = "".join(f"\n- {line}" for each in others.values() for line in each)
    return (
        f"{MARK}: made of other things than the rows beside it, which may be why its scores differ.\n{lines}"
    )


def marked(sheet: Sheet, labels: set[str]) -> Sheet:
    """The sheet with a mark behind the rows of these ``labels``."""
    rows = [
        cell._replace(text=f"{cell.text} {MARK}") if cell.text in labels else cell for cell in sheet["row"]
    ]
    return sheet | {"row": rows}

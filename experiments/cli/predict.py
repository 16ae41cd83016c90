"""Apply a head to each line of a file (``lm predict``), and make vectors of texts (``lm embed``)."""

import json
import shlex
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.cli.settings import Mixture
from experiments.console import print_line
from lm.config.base import SettingError
from lm.files import atomic_file, check_characters, is_json_lines, split_lines

TABLE_ENDINGS = (".csv", ".tsv", ".parquet", ".json")  # of files whose lines are no texts

if TYPE_CHECKING:  # with jax
    from lm.notebook import TrainableModel


def predict(run: Path, file: Path | None = None, /, mixture: Mixture = "") -> None:
    """Print what a run's fine-tuned head says of each line of a file, one JSON object per line.

    A line is a text. In a file that ends in .jsonl it is a JSON value, as the head needs it: a string, or a
    list for a pair of texts, the words of a sentence, or candidates; also as {"text": ...}, whose other
    fields are ignored. The table in docs/notebook.md says which. What is printed of a blank line is null.

        lm predict @mine new.txt
        lm predict @mine pairs.jsonl --mixture mrpc

    Args:
        run: Folder or @NAME of a run with a fine-tuned head.
        file: Text file in UTF-8, one text per line, or .jsonl; by default the standard input.
    """
    from lm.predictions import Choice, Classification  # with jax

    lines = read_lines(file)
    texts = [line for line in lines if line is not None]
    with warnings_in_a_line():
        model = open_model(run, mixture)
        check_ending(model, file)
        predictions = model.predict(texts)
    results: list[dict[str, Any]] = [
        asdict(each) if isinstance(each, Classification | Choice) else {"prediction": each}
        for each in predictions
    ]
    of_blank_line = {"text": ""} | dict.fromkeys(results[0])
    remaining = iter(results)
    for line in lines:
        result = of_blank_line if line is None else {"text": line} | next(remaining)
        print(json.dumps(result, ensure_ascii=False))


def embed(run: Path, file: Path | None = None, /, *, out: Path, mixture: Mixture = "") -> None:
    """Write a vector for each line of a file, as float32 [lines,D] in the format of numpy.

        lm embed @mine new.txt --out vectors.npy

    Args:
        run: Folder or @NAME of a run; without a fine-tuned head its pre-trained model is used.
        file: Text file in UTF-8, one text per line, or .jsonl with a string or a pair of strings per line;
            by default the standard input.
        out: File to write, NAME.npy.
    """
    if out.suffix != ".npy":
        raise SettingError(f"--out {out} should be a file name that ends in .npy, such as vectors.npy")
    texts = read_lines(file)
    if None in texts:
        place = f"line {texts.index(None) + 1} of {file or 'the standard input'}"
        raise SettingError(f"{place} is blank: leave it out, since each line has a vector")
    with warnings_in_a_line():
        vectors = open_model(run, mixture).embed(texts)
    with atomic_file(out) as opened:
        np.save(opened, vectors)
    print_line(f"{out}: {len(vectors):,} vectors of {vectors.shape[1]:,} numbers")


@contextmanager
def warnings_in_a_line() -> Iterator[None]:
    """Print warnings on the standard error in a line each, without the place in the code."""
    with warnings.catch_warnings(record=True) as caught:
        try:
            yield
        finally:
            for warning in caught:
                print(warning.message, file=sys.stderr)


def open_model(run: Path, mixture: str) -> "TrainableModel":
    """Return the model of a run with its head, and print which one it is on the standard error."""
    from experiments.runs.trained import open_texts  # with jax

    model, which = open_texts(run, mixture)
    print(which, file=sys.stderr)
    return model


def no_text_field(row: dict[str, Any]) -> str:
    """Return what is wrong with a JSON object that has no field "text", and the mend."""
    fields = ", ".join(map(repr, row)) or "no field"
    lists = [field for field, value in row.items() if isinstance(value, list) and value]
    words = [field for field in lists if all(isinstance(word, str) for word in row[field])]
    if not words:
        return f'should be "..." or {{"text": ...}}, and has {fields}: rename the field of the text'
    path = f".{words[0]}" if words[0].isidentifier() else f".[{json.dumps(words[0])}]"
    mend = f"write the list alone, such as with jq -c {shlex.quote(path)} in.jsonl > out.jsonl"
    return f"should be a JSON list of words, or a text, and has {fields}: {mend}"


def check_ending(model: "TrainableModel", file: Path | None) -> None:
    """Raise SettingError if a file has texts, one per line, and the head reads lists, such as of words."""
    from lm.predictions import EXPECTED, READS_TEXTS  # with jax

    if model.head is None or (file is not None and is_json_lines(file)):
        return
    kind = model.head.reader.task.kind
    if kind not in READS_TEXTS:
        found = f"{file or 'the standard input'} has one text per line"
        mend = "give a file that ends in .jsonl, with a JSON list per line"
        raise SettingError(f"{found}, and this head expects {EXPECTED[kind]}: {mend}")


def read_lines(file: Path | None) -> list[Any]:
    """Return the text in each line of a file, or of the standard input; None for a blank line above others.

    Raises SettingError if it cannot be read, for a table, and without any text.
    """
    name = str(file or "the standard input")
    if file is not None and file.suffix.lower() in TABLE_ENDINGS:
        mend = 'give a file of one text per line, or a .jsonl file of "..." or {"text": ...} per line'
        raise SettingError(f"{name} is a table: {mend}")
    try:
        text = sys.stdin.read().removeprefix("\ufeff") if file is None else file.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SettingError(f"{name} cannot be read as text in UTF-8: save it so ({error})") from error
    except OSError as error:
        mend = "; give one file" if file is not None and file.is_dir() else ""
        raise SettingError(f"{name} cannot be read: {error.strerror}{mend}") from error
    lines = split_lines(text)
    while lines and not lines[-1].strip():
        lines.pop()
    texts: list[Any] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            texts.append(None)
            continue
        if file is None or not is_json_lines(file):
            check_characters(line, f"{name} line {number}")
            texts.append(line)
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise SettingError(f"{name} line {number} should be JSON, such as a string: {error}") from error
        check_characters(value, f"{name} line {number}")
        if isinstance(value, dict) and "text" not in value:
            raise SettingError(f"{name} line {number} {no_text_field(value)}")
        texts.append(value["text"] if isinstance(value, dict) else value)
        if texts[-1] is None:
            raise SettingError(f"{name} line {number} has null for a text: write the text, or a blank line")
    if not texts:
        raise SettingError(f"{name} has no text: give one per line")
    return texts

"""The embedded corpus: what counts as prose, and that nothing is seen twice."""

import ast
import inspect
import math
import random
import subprocess
import sys
import sysconfig
import time
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path

import feeding
import numpy as np
import pytest
import scipy.stats

from lm.c4 import filters
from lm.config.base import SettingError
from lm.data.corpus import tfds as rows
from lm.data.documentation import corpus, docstrings, language_tasks, reading_tasks, tasks
from lm.data.documentation.task_text import FUNCTION_WORDS, strip_punctuation
from lm.data.tasks.benchmarks import TASKS as TEXT_TASKS
from lm.data.tasks.labelled import LABELLED
from lm.data.tasks.mixtures import MIXTURES

TASKS = corpus.FEATURES.keys() - {"corpus", "unfiltered", *corpus.SEPARATE_SETS}
SOME = (  # packages of the standard library that are rich in prose and quick to read
    "asyncio argparse ctypes email http json logging multiprocessing optparse os pickle pydoc_data random "
    "smtplib"
    " socket sqlite3 ssl statistics string subprocess tarfile threading tkinter typing unittest urllib xml "
    "zipfile"
)


@pytest.fixture(scope="module")
def documents():
    return list(docstrings.extract_docstrings(SOME.split()))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    corpus.prepare_sets(folder, packages=SOME.split())
    return folder


def names(part, split, cache):
    return {row["name"] for row in rows.prepared_rows(f"documentation/{part}", split, cache)}


def test_docstrings_are_those_that_python_finds():
    for name in ("argparse", "asyncio/streams", "email/message", "zipfile"):
        base = Path(sysconfig.get_path("stdlib"), name)
        source = next(p for p in (base.with_suffix(".py"), base / "__init__.py") if p.exists()).read_text(
            "utf-8"
        )
        owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, owners)]
        expected = {text for node in nodes if (text := ast.get_docstring(node))}
        found = {inspect.cleandoc(text) for text in docstrings.docstrings(source)}
        # escapes are not resolved, "..." is not looked for
        assert len(expected ^ found) <= 0.15 * len(expected)


def test_strings_that_open_nothing_are_no_docstrings():
    source = 'x = [\n    """An entry of a list."""\n]\n\n\ndef f():  # why\n    """What f does."""\n'
    assert list(docstrings.docstrings(source)) == ["What f does."]


def test_paragraphs_are_joined_and_tables_code_and_marks_are_dropped():
    docstring = """Return the mean
    of the values.

    Parameters
    ----------
    values : sequence of float, optional
        The numbers whose mean is
        wanted by the caller.
    * first point of a list
      that goes on here.

    Args:
      axis (int): The axis along which the
        mean is taken here.
    >>> mean([1, 2])
    1.5

    Notes
    -----
    A heading is no part of it.
    """
    assert list(filter(None, map(docstrings.to_prose, docstrings.paragraphs(docstring)))) == [
        "Return the mean of the values.",
        "The numbers whose mean is wanted by the caller.",
        "first point of a list that goes on here.",
        "The axis along which the mean is taken here.",
        "A heading is no part of it.",
    ]


@pytest.mark.parametrize(
    "text", ["See https://x.org for more of it.", "x = y + 1.", "A set {a}.", "a | b | c.", "Ünïcödé."]
)
def test_code_and_addresses_are_no_prose(text):
    assert docstrings.to_prose(text) is None


def test_every_line_passes_the_rules_and_a_name_is_there_once(documents):
    assert len({document.name for document in documents}) == len(documents)
    assert any(document.name.startswith("help.") for document in documents)
    for _, text in documents:
        lines = [line for line in text.split("\n") if line]
        assert filters.apply_filters(lines, docstrings.PARAGRAPH_FILTERS) == lines


def test_no_sentence_is_in_two_documents_or_twice_in_one(documents):
    found = [
        one.lower() for _, text in documents for line in text.split("\n") for one in filters.sentences(line)
    ]
    found = [sentence for sentence in found if len(sentence.split()) >= 5]
    assert len(found) > 1000
    assert len(found) - len(set(found)) <= 0.001 * len(found)  # a sentence repeated within its own paragraph


def test_no_document_is_in_two_splits_of_corpus_or_tasks(cache):
    train, validation, test = (names("corpus", split, cache) for split in ("train", "validation", "test"))
    assert len(train) + len(validation) + len(test) == len(train | validation | test)
    for task in TASKS:
        parts = [names(task, split, cache) for split in ("train", "validation", "report")]
        assert min(map(len, parts)) > 0
        assert sum(map(len, parts)) == len(set().union(*parts))
        assert set().union(*parts) <= validation | test


def test_no_part_trains_on_what_another_is_evaluated_on(cache):
    corpus.prepare_sets(cache, name="unfiltered", packages=SOME.split())
    assert not names("corpus", "validation+test", cache) & names("unfiltered", "train", cache)
    whole = {
        split: feeding.documents("documentation/installed", split, cache) for split in ("train", "validation")
    }
    assert whole["train"] and not {*whole["train"]} & {*whole["validation"]}
    assert len({name for names in corpus.CORPUS_PARTS.values() for name in names}) == sum(
        map(len, corpus.CORPUS_PARTS.values())
    )
    with pytest.raises(SettingError, match="did you mean 'science'"):
        corpus.documentation_shards("sience", "train", cache)


@pytest.mark.parametrize(
    ("part", "written"), [("/installed", "corpus"), ("", "corpus"), ("/unfiltered", "unfiltered")]
)
def test_a_corpus_is_written_when_it_is_first_read(part, written, tmp_path, monkeypatch):
    """Also by a row that has no tasks of the documentation."""
    write, few = corpus.prepare_sets, SOME.split()
    monkeypatch.setattr(
        corpus, "prepare_sets", lambda *given, **named: write(*given, **(named | {"packages": few}))
    )
    feeding.documents(f"documentation{part}", "train", tmp_path)
    assert (tmp_path / "tfds" / "documentation" / written).is_dir()


def test_unfiltered_documents_keep_what_the_rules_remove(documents):
    assert ">>>" in dict(docstrings.unfiltered(["json"]))["json"]
    assert ">>>" not in dict(documents)["json"]


def stored(task, split, cache):
    return list(rows.prepared_rows(f"documentation/{task}", split, cache))


@pytest.fixture(scope="module")
def generated(documents):
    """All rows of each task, as they are before a sample of them is stored."""
    generators = tasks.task_generators(text for _, text in documents)
    return {name: [*generate(documents, random.Random(name))] for name, generate in generators.items()}


def test_answers_are_where_the_task_says_and_nowhere_else(generated):
    for row in generated["extract"]:
        assert row["answers"][0] in row["context"] and row["context"].split().count(row["question"]) == 1
    for row in generated["cloze"]:
        candidates, (answer,) = row["candidates"], row["answers"]
        assert len(set(candidates)) == reading_tasks.CLOZE_CANDIDATES and answer in candidates
        words = {strip_punctuation(word) for word in f"{row['question']} {row['context']}".split()}
        assert not words & set(candidates) and row["question"].count("_") >= 1
    for row in generated["restore"]:
        left = [word for word in row["summary"].split() if word not in FUNCTION_WORDS]
        assert left == row["document"].split() != row["summary"].split()
    for row in generated["next"]:
        assert len(set(row["sentences"])) == reading_tasks.NEXT_CANDIDATES > row["label"]
    for row in generated["summary"]:
        assert len(row["documents"]) == reading_tasks.NEXT_CANDIDATES > row["label"]
        assert row["summary"] not in row["documents"]
    for row in generated["modality"]:
        assert row["answers"][0] in row["candidates"] and len({*row["candidates"]}) == 3
        assert not reading_tasks.MODALS.keys() & {*row["sentence"].split()}
    for row in generated["order"]:
        first, second = row["answers"][0].split(", then ", 1)
        assert row["context"].startswith(first) and f" {second}" in row["context"]
        assert row["answers"][0] in row["candidates"] and len({*row["candidates"]}) == 2


def test_every_task_has_its_half_and_the_mixtures_are_the_halves():
    for half in ("reading", "language"):
        assert {task.half for task in MIXTURES[f"documentation-{half}"]} == {half}
    assert {task.name for task in MIXTURES["documentation"]} == TASKS - {"cloze"}
    assert all(TEXT_TASKS[name].half for name in TASKS)
    assert {task.half for name, task in TEXT_TASKS.items() if name not in TASKS} == {""}
    assert all(task.half == TEXT_TASKS[name].half for name, task in LABELLED.items() if name in TASKS)


def test_equal_documents_give_equal_tasks(documents, generated):
    generators = tasks.task_generators(text for _, text in documents)
    for name, generate in generators.items():
        assert [*generate(documents, random.Random(name))] == generated[name], name


def test_each_modal_meaning_is_right_about_as_often_and_each_order_as_often(generated):
    rows = generated["modality"]
    counts = Counter(row["candidates"].index(row["answers"][0]) for row in rows)
    assert scipy.stats.chisquare([*counts.values()]).pvalue > 1e-4, counts
    answers_of = defaultdict(Counter)
    for row in generated["order"]:
        answers_of[tuple(row["candidates"])][row["answers"][0]] += 1
    assert all(len(counts) == 2 and len({*counts.values()}) == 1 for counts in answers_of.values())


def test_a_minimal_pair_has_the_same_words_in_another_order(generated):
    for row in generated["acceptability"]:
        one, other = row["sentence"].split(), row["damaged"].split()
        assert one != other and sorted(one) == sorted(other) and (one[0], one[-1]) == (other[0], other[-1])


@pytest.mark.parametrize("name", ["agreement", "determiners", "verb-forms"])
def test_a_minimal_pair_differs_in_one_word_and_each_of_the_two_is_right_as_often(name, generated):
    changed = Counter()
    for row in generated[name]:
        one, other = row["sentence"].split(), row["damaged"].split()
        ((right, wrong),) = [pair for pair in zip(one, other, strict=True) if pair[0] != pair[1]]
        changed[strip_punctuation(right), strip_punctuation(wrong)] += 1
    assert len(changed) >= 4
    assert all(changed[pair] == changed[pair[::-1]] for pair in changed)


def test_rules_find_what_agrees_and_leave_what_may_be_right():
    def found(find, text):
        words = text.split()
        return [(words[place], wrong) for place, wrong in find(words)]

    agreement, determiners = language_tasks.agreement, language_tasks.determiners
    assert found(agreement, "The values of the array are sorted first.") == [("are", "is")]
    assert found(agreement, "The value of the arrays is sorted first.") == [("is", "are")]
    assert found(agreement, "The array and the value are sorted first.") == []
    assert found(determiners, "Return these values in a list or an array.") == [
        ("these", "this"),
        ("a", "an"),
        ("an", "a"),
    ]
    forms = {"return": "returned", "returned": "return"}
    verbs = partial(language_tasks.verb_forms, forms=forms)
    assert found(verbs, "It must return what is returned, or return.") == [
        ("return", "returned"),
        ("returned,", "return,"),
    ]


def test_how_frequent_and_how_long_a_candidate_is_does_not_tell_the_answer(documents, cache):
    """Bits above chance of a guesser that knows the corpus and the answers of training, and no context."""
    corpus_words, learnt = Counter(), Counter()
    for _, text in documents:
        corpus_words.update(map(strip_punctuation, text.split()))
    learnt.update(row["answers"][0] for row in stored("cloze", "train", cache))
    rows = stored("cloze", "report", cache) + stored("cloze", "validation", cache)
    for weight in (lambda word: corpus_words[word], lambda word: learnt[word] + 1, len):
        for power in (-1, -0.3, 0.1, 0.3, 1):  # however much it trusts that
            bits = [above_chance([weight(word) ** power for word in row["candidates"]], row) for row in rows]
            assert np.mean(bits) < 0.02 + 3 * np.std(bits) / len(bits) ** 0.5, (power, len(bits))


def above_chance(weights, row):
    right = weights[row["candidates"].index(row["answers"][0])]
    return math.log2(len(weights)) + math.log2(right / sum(weights))


def test_no_place_is_right_more_often_than_another(cache):
    cloze = [row["candidates"].index(row["answers"][0]) for row in stored("cloze", "report", cache)]
    labels = [[row["label"] for row in stored(name, "report", cache)] for name in ("next", "summary")]
    order = [row["candidates"].index(row["answers"][0]) for row in stored("order", "report", cache)]
    choices = reading_tasks.NEXT_CANDIDATES
    for places, count in (
        (cloze, reading_tasks.CLOZE_CANDIDATES),
        (labels[0], choices),
        (labels[1], choices),
        (order, 2),
    ):
        counts = np.bincount(places, minlength=count)
        assert scipy.stats.chisquare(counts).pvalue > 1e-4, counts


def test_equal_packages_give_an_equal_fingerprint(cache, tmp_path):
    corpus.prepare_sets(tmp_path, packages=SOME.split())
    prints = [feeding.fingerprint("documentation/installed", "train", folder) for folder in (cache, tmp_path)]
    assert prints[0] == prints[1]
    assert prints[0] != feeding.fingerprint("documentation/installed", "validation", cache)


WRITE = """
import sys
from pathlib import Path
from lm.data.documentation.corpus import write_set
row = {"name": "a", "document": "One.", "summary": "Two."}
write_set("restore", {"train": [row] * 3}, Path(sys.argv[1]))
"""


def test_every_process_writes_the_same_bytes(tmp_path):
    folders = [tmp_path / str(process) for process in range(6)]  # protobuf's own order differed in 1 of 5
    for folder in folders:
        subprocess.run([sys.executable, "-c", WRITE, folder], check=True)
    assert len({next(folder.rglob("*array_record*")).read_bytes() for folder in folders}) == 1


def test_a_set_that_another_process_moves_to_its_place_first_is_kept(tmp_path, monkeypatch):
    draft, home = tmp_path / "draft", tmp_path / "home"
    draft.mkdir()
    (draft / "rows").write_text("ours")
    replace = corpus.os.replace

    def replace_too_late(folder, place):
        place.mkdir()
        (place / "rows").write_text("theirs")
        replace(folder, place)

    monkeypatch.setattr(corpus.os, "replace", replace_too_late)
    corpus.move_sets({"corpus": corpus.WrittenSet(draft, 1)}, home)
    assert (home / "corpus" / corpus.VERSION / "rows").read_text() == "theirs"


def test_too_little_documentation_is_an_error():
    with pytest.raises(SettingError, match="too few"):
        [*corpus.make_sets(docstrings.extract_docstrings(["json"]))]


FULL = """
import resource, sys
from lm.config.base import SettingError
from lm.data.documentation import corpus
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))  # of a file: as a full disk has it
try:
    corpus.prepare_sets(sys.argv[1], packages=sys.argv[2:])
except SettingError as error:
    print(error)
"""


def test_a_full_disk_is_told_in_a_line_with_the_set_and_leaves_nothing(tmp_path):
    ran = subprocess.run(
        [sys.executable, "-B", "-c", FULL, tmp_path, *SOME.split()], capture_output=True, text=True
    )
    assert (
        ran.stdout.count("\n") == 1
        and f"{tmp_path}/tfds/documentation/corpus cannot be written" in ran.stdout
    )
    assert "File too large" in ran.stdout and not [path for path in tmp_path.rglob("*") if path.is_file()], (
        ran.stderr
    )


@pytest.mark.slow
def test_a_default_install_gives_eight_megabytes_in_half_a_minute(tmp_path):
    start = time.process_time()
    corpus.prepare_sets(tmp_path, packages=docstrings.DEFAULT)
    seconds = time.process_time() - start
    parts = [
        feeding.documents("documentation/installed", split, tmp_path) for split in ("train", "validation")
    ]
    assert sum(len(text) for part in parts for text in part) > 7.2e6  # and the test split
    assert seconds < 60  # 20 s on an idle core
    for task in TASKS:
        least = (400, 60, 300)
        for split, count in zip(("train", "validation", "report"), least, strict=True):
            assert len(stored(task, split, tmp_path)) >= count, (task, split)


def test_tagged_code_is_written_alone_and_read_as_a_labelled_task(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "EVALUATION_ROWS", {"validation": 50, "report": 70})
    said = []
    packages = ["asyncio", "email", "numpy"]
    corpus.prepare_sets(tmp_path, name="roles", packages=packages, report=said.append)
    assert f"(once per folder of runs; to give a new one this cache: ln -s {tmp_path} NEW/cache)" in said[0]
    assert [path.name for path in (tmp_path / "tfds" / "documentation").iterdir()] == ["roles"]
    task = LABELLED["roles"]
    splits = {split: task.rows(split, tmp_path) for split in ("train", "validation", "report")}
    assert (len(splits["validation"]), len(splits["report"])) == (50, 70)
    names = {split: {row["name"] for row in rows} for split, rows in splits.items()}
    assert names["train"] and not names["train"] & (names["validation"] | names["report"])
    assert {name.partition(".")[0] for name in set().union(*names.values())} == {"asyncio", "email"}
    row = splits["train"][0]
    (words,), roles = task.to_text(row)
    assert len(words) == len(roles) and task.evaluate([row], [roles])["score"] == 100

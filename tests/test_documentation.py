"""The embedded corpus: what counts as prose, and that nothing is seen twice."""

import ast
import inspect
import random
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

from lm.data.corpora import cleaning, corpus, documentation, harvest
from lm.data.text import sources
from lm.settings import SettingError

SOME = (  # packages of the standard library that are rich in prose and quick to read
    "asyncio argparse ctypes email http json logging multiprocessing optparse os pickle pydoc_data random "
    "smtplib"
    " socket sqlite3 ssl statistics string subprocess tarfile threading tkinter typing unittest urllib xml "
    "zipfile"
)


@pytest.fixture(scope="module")
def documents():
    return list(harvest.harvest(SOME.split()))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    documentation.prepare_sets(folder, packages=SOME.split())
    return folder


def names(part, split, cache):
    return {row["name"] for row in sources.prepared_rows(f"documentation/{part}", split, cache)}


def test_docstrings_are_those_that_python_finds():
    for name in ("argparse", "asyncio/streams", "email/message", "zipfile"):
        base = Path(sysconfig.get_path("stdlib"), name)
        source = next(p for p in (base.with_suffix(".py"), base / "__init__.py") if p.exists()).read_text(
            "utf-8"
        )
        owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, owners)]
        expected = {text for node in nodes if (text := ast.get_docstring(node))}
        found = {inspect.cleandoc(text) for text in harvest.docstrings(source)}
        # escapes are not resolved, "..." is not looked for
        assert len(expected ^ found) <= 0.15 * len(expected)


def test_strings_that_open_nothing_are_no_docstrings():
    source = 'x = [\n    """An entry of a list."""\n]\n\n\ndef f():  # why\n    """What f does."""\n'
    assert list(harvest.docstrings(source)) == ["What f does."]


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
    assert list(filter(None, map(harvest.prose, harvest.paragraphs(docstring)))) == [
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
    assert harvest.prose(text) is None


def test_every_line_passes_the_rules_and_a_name_is_there_once(documents):
    assert len({document.name for document in documents}) == len(documents)
    assert any(document.name.startswith("help.") for document in documents)
    for _, text in documents:
        lines = [line for line in text.split("\n") if line]
        assert cleaning.cleaned(lines, harvest.PARAGRAPH_FILTERS) == lines


def test_no_sentence_is_in_two_documents_or_twice_in_one(documents):
    found = [
        one.lower() for _, text in documents for line in text.split("\n") for one in cleaning.sentences(line)
    ]
    found = [sentence for sentence in found if len(sentence.split()) >= 5]
    assert len(found) > 1000
    assert len(found) - len(set(found)) <= 0.001 * len(found)  # a sentence repeated within its own paragraph


def test_no_document_is_in_two_splits_of_corpus_or_tasks(cache):
    train, validation, test = (names("corpus", split, cache) for split in ("train", "validation", "test"))
    assert len(train) + len(validation) + len(test) == len(train | validation | test)
    for task in documentation.MAKERS:
        learnt, asked = (names(task, split, cache) for split in ("train", "validation"))
        assert min(len(learnt), len(asked)) > 0
        assert not learnt & asked
        assert learnt | asked <= validation | test


def test_no_part_trains_on_what_another_is_evaluated_on(cache):
    documentation.prepare_sets(cache, name="unfiltered", packages=SOME.split())
    assert not names("corpus", "validation+test", cache) & names("unfiltered", "train", cache)
    whole = {split: corpus.documents("documentation", split, cache) for split in ("train", "validation")}
    parts = {
        name: corpus.documents(f"documentation/{name}", "train", cache) for name in documentation.CORPUS_PARTS
    }
    assert len(parts["science"]) == 0 < len(parts["topics"]) < len(parts["libraries"])
    assert len(parts["topics"]) + len(parts["libraries"]) == len(whole["train"])
    assert set(parts["topics"]) | set(parts["libraries"]) == set(whole["train"])
    assert len({part.fingerprint for part in (*parts.values(), *whole.values())}) == 5
    with pytest.raises(SettingError, match="did you mean 'science'"):
        corpus.documents("documentation/sience", "train", cache)


def test_unfiltered_documents_keep_what_the_rules_remove(documents):
    assert ">>>" in dict(harvest.unfiltered(["json"]))["json"]
    assert ">>>" not in dict(documents)["json"]


def test_labels_are_balanced_and_answers_stand_in_their_context(cache):
    for task in ("acceptability", "follows"):
        labels = [row["label"] for row in sources.prepared_rows(f"documentation/{task}", "train", cache)]
        assert 0.45 < sum(labels) / len(labels) < 0.55
    for row in sources.prepared_rows("documentation/cloze", "train", cache):
        assert row["answers"][0] in row["context"]
        assert "_" in row["question"]


def test_damage_leaves_first_and_last_word_and_changes_the_order():
    words = ["The", "quick", "brown", "fox", "jumps", "over", "it."]
    for seed in range(100):
        found = documentation.damaged(words, random.Random(seed))
        assert found != words
        assert (found[0], found[-1]) == (words[0], words[-1])
        assert set(found) == set(words)


def test_equal_packages_give_an_equal_fingerprint(cache, tmp_path):
    documentation.prepare_sets(tmp_path, packages=SOME.split())
    prints = [corpus.documents("documentation", "train", folder).fingerprint for folder in (cache, tmp_path)]
    assert prints[0] == prints[1]
    assert prints[0] != corpus.documents("documentation", "validation", cache).fingerprint


WRITE = """
import sys
from pathlib import Path
from lm.data.corpora.documentation import write_set
row = {"name": "a", "sentence1": "One.", "sentence2": "Two.", "label": 1}
write_set("follows", {"train": [row] * 3}, Path(sys.argv[1]), Path(sys.argv[1], "set"))
"""


def test_every_process_writes_the_same_bytes(tmp_path):
    folders = [tmp_path / str(process) for process in range(6)]  # protobuf's own order differed in 1 of 5
    for folder in folders:
        subprocess.run([sys.executable, "-c", WRITE, folder], check=True)
    assert len({next(folder.glob("set/*array_record*")).read_bytes() for folder in folders}) == 1


def test_too_little_documentation_is_an_error():
    with pytest.raises(SettingError, match="too few"):
        documentation.make_sets(harvest.harvest(["json"]))


FULL = """
import resource, sys
from lm.settings import SettingError
from lm.data.corpora import documentation
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))  # of a file: as a full disk has it
try:
    documentation.prepare_sets(sys.argv[1], packages=sys.argv[2:])
except SettingError as error:
    print(error)
"""


def test_a_full_disk_is_told_in_a_line_with_the_set_and_leaves_nothing(tmp_path):
    ran = subprocess.run(
        [sys.executable, "-c", FULL, tmp_path, *SOME.split()], capture_output=True, text=True
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
    documentation.prepare_sets(tmp_path)
    seconds = time.process_time() - start
    parts = [corpus.documents("documentation", split, tmp_path) for split in ("train", "validation")]
    assert sum(len(text) for part in parts for text in part) > 7.2e6  # and the test split
    assert seconds < 60  # 20 s on an idle core
    for task in documentation.MAKERS:
        assert len(sources.prepared_rows(f"documentation/{task}", "train", tmp_path)) >= 1500
        assert len(sources.prepared_rows(f"documentation/{task}", "validation", tmp_path)) >= 200

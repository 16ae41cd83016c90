"""Tasks in files: the examples of docs/tasks.md, what they read and answer, and what is wrong with others."""

import gzip
import json
import pickle
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pyarrow
import pytest
import tensorflow_datasets as tfds
from benchmark_files import TEXT, prepare
from paths import ROOT
from pyarrow import parquet
from scored_runs import HEADS, SMALL, read, run_of
from tiny import TINY

from experiments.evaluate.tasks import RowSelection, find_members, score_file, score_run
from experiments.notebook import load_run
from experiments.runs import prepare as data
from experiments.runs.checks import tasks_from_files
from experiments.runs.paths import save_settings
from experiments.runs.sources import Sources
from experiments.runs.stages import stages
from experiments.runs.vocabulary import unwritable_answers
from experiments.study.experiment import Experiment
from lm.config.base import DataError, SettingError, changes
from lm.data.classification import Reader
from lm.data.corpus.readers import COMPRESSED
from lm.data.corpus.tables import read_table
from lm.data.tasks.benchmarks import find_task
from lm.data.tasks.labelled import CONLL, LABELLED, find_labelled
from lm.data.tasks.mixtures import mixture
from lm.data.tasks.task import LabelledTask
from lm.data.tasks.task_files import check_rows, check_task_files, has_tags, read_task_file
from lm.tokenizers.huggingface import load_tokenizer
from lm.tokenizers.sentencepiece import ByteTokenizer

DOCS = (ROOT / "docs" / "tasks.md").read_text("utf-8")
# a comment names a file of TOML, and the line above names one of rows, in which a comment would be a row
EXAMPLES = dict(
    re.findall(r"```toml\n# (\S+)\n(.*?)```", DOCS, re.DOTALL)
    + re.findall(r"`(\S+)`:\n\n```\w+\n(.*?)```", DOCS, re.DOTALL)
)
HEAD = {"finetuning.steps": 1}
# rows of CoNLL-2003, as TFDS has them
SENTENCES = [
    {"tokens": ["Ada", "Lovelace", "lived", "in", "London", "."], "ner": [1, 2, 0, 0, 5, 0]},
    {"tokens": ["So", "did", "Babbage", "!"], "ner": [0, 0, 1, 0]},
]
RTE = [{"sentence1": "It is so.", "sentence2": "So it is.", "label": label} for label in (0, 1)]


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The folder with the files of the docs."""
    for name, text in EXAMPLES.items():
        (tmp_path / name).write_text(text, "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TFDS_DATA_DIR", raising=False)
    return tmp_path


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "cache"
    labels = tfds.features.ClassLabel(names=["entailment", "not_entailment"])
    features = tfds.features.FeaturesDict({"sentence1": TEXT, "sentence2": TEXT, "label": labels})
    prepare("glue/rte", folder, (features, RTE, "train validation"))
    return folder


def checked(name, cache, **given):
    """What ``lm run`` finds out about a task file before it trains; the lines that it says but for counts."""
    return [line for line in said_of(name, cache, **given) if not re.search(r" rows of '\w+': ", line)]


def said_of(name, cache, **given):
    """All lines that ``lm run`` says of a task file before it trains."""
    said = []
    settings = SMALL | {"tuning.mixtures": (), "tuning.heads": ()} | given
    kind = "tuning.mixtures" if not given else "tuning.heads"
    experiment = changes(Experiment(), settings | {kind: (name,)})
    check_task_files(tasks_from_files(experiment), cache, ByteTokenizer(100), said.append)
    return said


def test_the_rows_of_each_label_are_counted(files, cache):
    rows = [json.loads(line) for line in (files / "reviews-train.jsonl").read_text().splitlines()]
    rows.append(rows[0])
    (files / "reviews-train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    said = said_of("reviews.toml", cache, **{"finetuning.steps": 1})
    assert said == [
        "reviews.toml: 3 rows of 'train': 2 bad, 1 good",
        "reviews.toml: 1 rows of 'validation': 0 bad, 1 good",
    ]


def test_every_example_of_the_docs_is_whole_and_says_what_is_read_and_answered(files, cache):
    found = {name: find_task(name) for name in EXAMPLES if name.endswith(".toml") and not has_tags(name)}
    pairs = {name: [*map(task.to_text, task.rows("train", cache))] for name, task in found.items()}
    assert pairs == {
        "colours.toml": [
            ("what colour is grass?", "green"),
            ("what colour is snow, fresh?", "white"),
            ("what colour is coal?", "black"),
        ],
        "reviews.toml": [
            ("reviews title: Never again review: It broke at once.", "bad"),
            ("reviews title: Lovely review: I use it every day.", "good"),
        ],
        "entails.toml": [
            ("entails sentence1: It is so. sentence2: So it is.", "entailment"),
            ("entails sentence1: It is so. sentence2: So it is.", "not_entailment"),
        ],
    }
    for name, task in found.items():
        assert checked(name, cache) == []
        rows = task.rows("validation", cache)
        right = [task.to_text(row)[1] for row in rows]
        assert task.evaluate(rows, right)["score"] == 100
        assert task.evaluate(rows, ["?"] * len(rows))["score"] == 0


def test_a_labelled_task_is_answered_by_a_head_or_in_words_that_are_its_candidates(files, cache):
    head, words = find_labelled("reviews.toml"), find_task("reviews.toml")
    (row,) = head.rows("validation", cache)
    assert head.texts(row) == ("Fine", "It does what it should.")
    assert (head.target(row), head.labels, head.kind) == (1, ("bad", "good"), "classes")
    assert [answer for _, answer in words.choices(row)[0]] == ["bad", "good"] and words.choices(row)[1] == 1
    for task in (head, words):
        again = pickle.loads(pickle.dumps(task))
        assert type(again) is type(task) and again.file == Path("reviews.toml")


def test_rouge_scores_no_answers_in_scripts_of_which_it_reads_no_word(files):
    spec = read_task_file(files / "colours.toml")
    rows = [dict.fromkeys(spec.columns, text) for text in ("green", "зелёный")]
    check_rows(Path("colours.toml"), spec, rows)
    with pytest.raises(DataError, match="row 2: the target 'зелёный' has no letter from a to z.* rouge1"):
        check_rows(Path("colours.toml"), replace(spec, metrics=("rouge1",)), rows)


def test_a_boolean_is_the_label_of_its_name_and_no_number_of_a_label(files):
    spec = read_task_file(files / "reviews.toml")
    named = replace(spec, labels=("true", "false"))
    assert [named.class_of({spec.label: value}) for value in (True, False)] == [0, 1]
    assert replace(spec, labels=("0", "1")).class_of({spec.label: True}) == 1
    with pytest.raises(LookupError):
        replace(spec, labels=("yes", "no")).class_of({spec.label: True})


@pytest.mark.parametrize("given", [{}, {"finetuning.steps": 1}])  # in words, and by a head
def test_rows_of_one_label_are_refused_and_empty_texts_are_said(files, cache, given):
    name = "reviews.toml"
    bad = {"title": "Never again", "review": " ", "verdict": "bad"}
    good = {"title": "Lovely", "review": "I use it every day.", "verdict": "good"}
    rows = files / "reviews-train.jsonl"
    rows.write_text(f"{json.dumps(bad)}\n" * 2)
    with pytest.raises(
        SettingError, match="all 2 rows of 'train' have the label 'bad', of bad, good: there is nothing"
    ):
        checked(name, cache, **given)
    rows.write_text(f"{json.dumps(good)}\n{json.dumps(bad)}\n")
    (said,) = checked(name, cache, **given)
    assert (
        "1 of 2 rows of 'train' have nothing in the column 'review'; the first is" in said
        and "line 2" in said
    )
    rows.write_text(f"{json.dumps(good)}\n{json.dumps(bad | good)}\n{json.dumps(bad | {'review': 'Bad.'})}\n")
    (files / "reviews-valid.jsonl").write_text(f"{json.dumps(good)}\n" * 2)
    (said,) = checked(name, cache, **given)
    assert "all 2 rows of 'validation' have the label 'good'" in said


@pytest.mark.parametrize("given", [{}, {"finetuning.steps": 1}])  # in words, and by a head
def test_a_label_that_no_training_row_has_is_said(files, cache, given):
    labels = ("bad", "good", "mixed")
    task = (files / "reviews.toml").read_text().replace('["bad", "good"]', json.dumps(labels))
    assert json.dumps(labels) in task
    task = task.replace('"f1"', '"macro_f1"')
    (files / "reviews.toml").write_text(task)
    for split, known in (("train", labels[:2]), ("valid", labels)):
        rows = [{"title": "Never again", "review": "I use it.", "verdict": label} for label in known]
        (files / f"reviews-{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (said,) = checked("reviews.toml", cache, **given)
    assert "1 of 3 rows of 'validation' have the label 'mixed', which no row of 'train' has" in said


def test_of_answers_that_the_vocabulary_cannot_write_it_is_said_how_to_write_them(files, cache):
    (files / "colours-train.csv").write_text("thing,colour\nmilk,white\nsnow,weiß\ngrass,grün\n")
    for split in ("train", "valid"):
        (files / f"{split}.txt").write_text("\n\n".join(["The white cat saw a green rat."] * 40))
    given = {"tuning.mixtures": ("colours.toml",), "data.corpus": f"text:{files}", "pretraining.steps": 0}
    experiment = changes(Experiment(), TINY | given | {"data.vocabulary_size": 18})
    said: list[str] = []
    data.prepare(experiment, cache, said.append)
    (line,) = [line for line in said if "can never be written right" in line]
    assert "67% of the answers of colours.toml" in line and "--data.unknown bytes" in line
    others = {"data.unknown": "bytes", "data.vocabulary_size": 274}
    for vocabulary in ("bytes", "unigram"):
        data.prepare(changes(experiment, others | {"data.vocabulary": vocabulary}), cache, said.append)
    assert sum("can never be written right" in line for line in said) == 1


def test_characters_that_are_lacking_are_found_by_the_unknown_token_of_the_vocabulary(tmp_path):
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\nsnow\n[CLS]\n[SEP]\n[MASK]\n")
    vocabulary = load_tokenizer(tmp_path, 0, 8)
    task = SimpleNamespace(to_text=lambda answer: ("", answer))
    assert unwritable_answers(task, ["snow", "snow", "weiß"], vocabulary) == 1 / 3


def test_a_run_knows_the_checksums_of_the_file_and_its_rows(files, cache):
    for split in ("train", "valid"):
        (files / f"{split}.txt").write_text("One.\n\nTwo.\n")
    given = {"tuning.mixtures": ("colours.toml",), "pretraining.steps": 0, "data.corpus": f"text:{files}"}
    experiment = changes(Experiment(), TINY | given)
    (stage,) = stages(experiment, files / "run")
    assert (stage.name, stage.folder.name) == ("colours.toml", "colours.toml")
    assert [task.name for task in stage.tasks["validation"]] == ["colours.toml"]

    before = stage.fingerprints(Sources(cache))
    (files / "colours.toml").write_text(EXAMPLES["colours.toml"].replace("what colour", "which colour"))
    second = stage.fingerprints(Sources(cache))
    (files / "colours-train.csv").write_text("thing,colour\nmilk,white\n")
    third = stage.fingerprints(Sources(cache))
    assert {name for name in before if before[name] != second[name]} == {"colours.toml file"}
    assert {name for name in second if second[name] != third[name]} == {"colours.toml train"}


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        (
            "colours.toml",
            "{thing}",
            "{thin}",
            "colours.toml: .*colours-train.csv have no column 'thin'; did you mean 'thing'",
        ),
        (
            "colours.toml",
            "exact_match",
            "exact",
            "colours.toml: metric 'exact' is unknown; did you mean 'exact_match'",
        ),
        (
            "colours.toml",
            "targets =",
            "target =",
            "colours.toml: 'target' is unknown; did you mean 'targets'",
        ),
        (
            "colours.toml",
            "metrics =",
            "metrcs =",
            "colours.toml: 'metrcs' is unknown; did you mean 'metrics'",
        ),
        (
            "colours.toml",
            "validation =",
            "valid =",
            "colours.toml: splits has 'valid'; did you mean 'validation'",
        ),
        ("colours.toml", 'validation = "colours-valid.csv"', "", "colours.toml: .splits. lacks 'validation'"),
        (
            "colours.toml",
            "colours-valid.csv",
            "colours-vali.csv",
            "colours-vali.csv is missing; did you mean 'colours-valid.csv'",
        ),
        (
            "colours.toml",
            "= 16",
            "= 5",
            "3 of 3 targets in 'train' exceed targets_length=5, the longest has 6 tokens",
        ),
        ("colours.toml", "= 16", '= "16"', "targets_length='16' should be a whole number"),
        (
            "colours-train.csv",
            "coal,black",
            "coal",
            "colours-train.csv, line 4: 1 cells, and the header names 2",
        ),
        (
            "colours-train.csv",
            EXAMPLES["colours-train.csv"],
            "thing,colour\n",
            "colours-train.csv has no rows, only the names of its columns",
        ),
        (
            "colours-train.csv",
            "coal,black",
            'coal,"black',
            "colours-train.csv, line 4: a quote is opened and never closed",
        ),
        (
            "colours-train.csv",
            "coal,black",
            "coal, anthracite,black",
            "line 4: 3 cells, and the header names 2 columns .*; a text with ',' stands in quotes",
        ),
        ("colours-train.csv", "thing,", "colour,", "line 1: two columns are called 'colour'"),
        ("colours-train.csv", "thing,colour", "thing;colour", "line 1: columns are separated by ';'"),
        ("colours-valid.csv", "milk", '"milk', "colours-valid.csv, line 2: "),
        (
            "reviews-train.jsonl",
            '"verdict": "bad"',
            '"verdict": "poor"',
            r"lack 'poor' \(1 row\); the first is at reviews-train.jsonl, line 1",
        ),
        (
            "reviews-train.jsonl",
            '"title": "Lovely", ',
            "",
            "reviews-train.jsonl, line 2, has no value in the column 'title'",
        ),
        (
            "reviews-train.jsonl",
            '{"title": "Lovely',
            '{"title "Lovely',
            "reviews-train.jsonl, line 2, is not JSON",
        ),
        (
            "colours.toml",
            '"{colour}"',
            '"colour"',
            "targets='colour' names no column in braces, so that all rows have the same targets",
        ),
        ("colours.toml", "{thing}", "{thing", "inputs='.*{thing.*' has a brace without its partner"),
        ("colours.toml", '"{colour}"', '"{colour}}"', "targets='{colour}}' has a brace without its partner"),
        ("colours.toml", "metrics =", 'text = "thing"\nmetrics =', "text is not read with targets: leave it"),
        ("colours.toml", "metrics =", 'labels = ["a"]\nmetrics =', "labels is not read with targets: leave"),
        ("reviews.toml", '["bad", "good"]', '["bad"]', "metric 'f1' is of two labels, not 1"),
        (
            "reviews.toml",
            '["bad", "good"]',
            '["bad", "bad"]',
            r"labels=\['bad', 'bad'\] should be names that",
        ),
        (
            "reviews-valid.jsonl",
            '"verdict": 1',
            '"verdict": -1',
            "task 'reviews.toml': reviews-valid.jsonl, line 1 has no label",
        ),
        (
            "colours.toml",
            "colours-valid.csv",
            "./colours-train.csv",
            "colours.toml: splits: train and validation are both './colours-train.csv'",
        ),
        ("entails.toml", 'validation = "validation"', 'validation = "train"', "are both 'train'"),
        (
            "colours.toml",
            '"exact_match"',
            '"pearson"',
            "colours-train.csv, line 2: the target 'green' is no number, as required by pearson",
        ),
        ("reviews.toml", '["bad", "good"]', '["0", "2"]', r"labels=\['0', '2'\] lack 'bad'"),
        ("entails.toml", "tfds:", "tdfs:", "source='tdfs:glue/rte' should be 'tfds:NAME' or 'hf:NAME'"),
        (
            "entails.toml",
            '"sentence1"',
            '"sentense1"',
            "have no column 'sentense1'; did you mean 'sentence1'",
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_place_before_anything_compiles(file, old, new, message, files, cache):
    text = EXAMPLES[file]
    assert old in text
    (files / file).write_text(text.replace(old, new))
    with pytest.raises(SettingError, match=message) as error:
        checked(f"{re.split('[-.]', file)[0]}.toml", cache)
    assert "\n" not in str(error.value)


def test_targets_are_cut_only_where_that_is_asked_for_and_then_it_is_said_how_many(files, cache):
    text = EXAMPLES["colours.toml"].replace("= 16", '= 5\nlonger_targets = "cut"')
    (files / "colours.toml").write_text(text)
    what = "exceed targets_length=5, the longest has 6 tokens, EOS counted, and lose their end"
    assert checked("colours.toml", cache) == [
        f"colours.toml: 3 of 3 targets in 'train' {what}",
        f"colours.toml: 1 of 1 targets in 'validation' {what}",
    ]


def test_a_text_is_no_answer_of_a_head_and_two_files_of_one_name_are_not_told_apart(files):
    with pytest.raises(SettingError, match="colours.toml has no label; name it in tuning.mixtures"):
        find_labelled("colours.toml")
    with pytest.raises(SettingError, match="there is no task file lost.toml in "):
        mixture("lost.toml")
    with pytest.raises(
        SettingError, match=r"there is no task file color\.toml in .*did you mean colours\.toml"
    ):
        mixture("color.toml")
    (files / "folder.toml").mkdir()
    with pytest.raises(SettingError, match="folder.toml is a folder, and should be a task file"):
        mixture("folder.toml")
    with pytest.raises(SettingError, match="tickets.csv'; a task of your own is a TOML file"):
        find_labelled("tickets.csv")
    with pytest.raises(SettingError, match=r"name \['x.toml'\]"):
        changes(Experiment(), {"tuning.mixtures": ("a/x.toml", "b/x.toml")})


def test_tables_may_be_packed_and_have_columns_of_any_name(files, cache):
    (files / "a.tsv.gz").write_bytes(gzip.compress("odd: name\tb\r\n{x}\tü\r\n".encode()))
    text = 'inputs = "{{{odd: name}}}"\ntargets = "{b}"\nmetrics = ["bleu"]\nsplits = {train = "a.tsv.gz"}'
    (files / "odd.toml").write_text(text)
    task = find_task("odd.toml")
    assert task.to_text(task.rows("train", cache)[0]) == ("{{x}}", "ü")


@pytest.mark.parametrize("ending", [".gz", ".bz2", ".xz"])
def test_a_packed_table_of_parquet_is_read_as_one_that_is_not(tmp_path, ending):
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": ["milk", "snow"], "label": [0, 1]}), path)
    packed = path.with_name(f"a.parquet{ending}")
    with COMPRESSED[ending](packed, "wb") as file:
        file.write(path.read_bytes())
    assert [*read_table(packed)] == [{"text": "milk", "label": 0}, {"text": "snow", "label": 1}]


def test_the_first_line_of_a_csv_file_that_is_not_empty_names_the_columns(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("\n\nthing,colour\n\nmilk,white\n")
    rows = read_table(path)
    assert [*rows] == [{"thing": "milk", "colour": "white"}] and rows.location(0) == "a.csv, line 5"
    path.write_text("\nthing,thing\n")
    with pytest.raises(DataError, match="line 2: two columns are called 'thing'"):
        read_table(path)


@pytest.mark.parametrize("header", ["a|b", "\na;b", '"a|b"'])
def test_the_name_of_the_only_column_may_have_a_sign_that_separates_columns_elsewhere(header, tmp_path):
    (tmp_path / "one.csv").write_text(f"{header}\nx\ny\n")
    name = header.strip().strip('"')
    assert [*read_table(tmp_path / "one.csv")] == [{name: "x"}, {name: "y"}]
    (tmp_path / "quoted.csv").write_text('"a|b"\nx|y\n')
    assert [*read_table(tmp_path / "quoted.csv")] == [{"a|b": "x|y"}]
    (tmp_path / "two.csv").write_text("\na|b\nx|y\n")
    with pytest.raises(DataError, match=r"two.csv, line 2: columns are separated by '\|'.* in quotes"):
        read_table(tmp_path / "two.csv")


def test_half_a_character_in_a_table_of_json_is_read_as_a_mark_wherever_it_stands(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(r'{"a": "cut \ud83d", "b": {"c": ["cut \ud83d"]}, "\ud83d": 1}')
    assert [*read_table(path)] == [{"a": "cut ?", "b": {"c": ["cut ?"]}, "?": 1}]
    path.write_text('{"a": 1}\n{"a": \n')
    with pytest.raises(DataError, match="a.jsonl, line 2, is not JSON"):
        read_table(path)


def test_sets_of_the_hub_come_from_the_package_datasets_and_its_lack_is_said(files, cache, monkeypatch):
    text = EXAMPLES["entails.toml"].replace("tfds:glue/rte", "hf:someone/set:part")
    (files / "entails.toml").write_text(text)
    task = find_task("entails.toml")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(SettingError, match="hf:someone/set:part needs the package datasets: pip install"):
        task.rows("train", cache)
    asked = []

    def load_dataset(*what, split):
        asked.append((*what, split))
        if split == "train":
            return RTE
        raise ConnectionError("no network\nat all")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert [*task.rows("train", cache)] == RTE and asked == [("someone/set", "part", "train")]
    with pytest.raises(SettingError, match="split 'validation', cannot be loaded: no network$"):
        task.rows("validation", cache)


def test_a_run_is_scored_on_a_task_file_by_what_was_tuned_for_it_else_by_what_was_tuned(files, cache):
    folder, *_ = run_of(files, "files", {"tuning.mixtures": ("colours.toml",)})
    score_run(folder, ["colours.toml"], "", RowSelection())
    scores, lines = read(folder / "scores" / "colours.toml" / "colours.toml" / "validation")
    assert scores["metrics"].keys() == {"exact_match", "score"} and lines[0]["target"] == "white"
    assert len(lines[0]["prediction"].encode()) <= 16
    task, (stage,) = find_members(folder, "reviews.toml", "")
    assert (task.file, stage.name) == (Path("reviews.toml"), "colours.toml")


def test_a_head_that_was_tuned_for_a_task_file_answers_it_wherever_the_file_is_named_from(files):
    folder = files / "run"
    save_settings(folder, changes(Experiment(), SMALL | HEADS | {"tuning.heads": ("reviews.toml",)}))
    task, (stage,) = find_members(folder, str(files / "reviews.toml"), "")
    assert (type(task), stage.name) == (LabelledTask, "reviews.toml")


def test_the_example_with_tags_prints_what_its_page_says(files, cache):
    lines = said_of("names.toml", cache, **HEAD)
    assert len(lines) == 2 and "".join(f"    {line}\n" for line in lines) in DOCS


def tag_file(folder, rows, labels=CONLL, **keys):
    """Write a task file with these rows as both splits, and return its name."""
    for split in ("train", "valid"):
        (folder / f"own-{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    keys = {"words": "tokens", "tags": "ner", "labels": labels} | keys
    lines = [f"{key} = {json.dumps(value)}" for key, value in keys.items() if value is not None]
    lines.append('splits = {train = "own-train.jsonl", validation = "own-valid.jsonl"}')
    (folder / "own.toml").write_text("\n".join(lines))
    return "own.toml"


@pytest.mark.parametrize("are_named", [False, True])
def test_tags_of_a_file_are_read_scored_and_answered_as_those_of_the_built_in_task(are_named, files, cache):
    rows = SENTENCES
    if are_named:
        rows = [row | {"ner": [CONLL[tag] for tag in row["ner"]]} for row in SENTENCES]
    own, built_in = find_labelled(tag_file(files, rows)), LABELLED["ner"]
    assert (own.kind, own.labels, own.unscored_metrics) == ("tokens", CONLL, ("accuracy",))
    read = own.rows("train", cache)
    batches = [
        Reader(task, ByteTokenizer(100), "encoder", 40).batch(given, 2).features()
        for task, given in ((own, read), (built_in, SENTENCES))
    ]
    assert batches[0].keys() == batches[1].keys()
    assert all((batches[0][key] == batches[1][key]).all() for key in batches[0])
    answers = [[1, 2, 0, 0, 7, 0], [0, 0, 1, -1]]
    scores = own.evaluate(read, answers)
    assert scores == built_in.evaluate(SENTENCES, answers)
    assert scores["score"] == pytest.approx(200 / 3) and scores["accuracy"] == 80
    assert type(pickle.loads(pickle.dumps(own))) is LabelledTask


def test_tags_are_scored_by_entities_if_they_are_bio_else_by_words_unless_metrics_are_named(files):
    for name in ("ner", "entities", "pos", "roles"):
        built_in = LABELLED[name]
        own = find_labelled(tag_file(files, SENTENCES, built_in.labels))
        assert [*own.metrics] == [*built_in.metrics], name
        assert own.unscored_metrics == built_in.unscored_metrics
    own = find_labelled(tag_file(files, SENTENCES, metrics=["accuracy", "entity_f1"]))
    assert ([*own.metrics], own.unscored_metrics) == (["accuracy", "entity_f1"], ())


def test_words_are_counted_by_tag_and_what_cannot_be_learned_is_said(files, cache):
    labels = CONLL[:6]
    name = tag_file(files, SENTENCES, labels)
    valid = [{"tokens": ["Rome"], "ner": ["B-LOC"]}, {"tokens": ["Oslo", "UN"], "ner": ["B-LOC", "B-ORG"]}]
    (files / "own-valid.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in valid))
    assert said_of(name, cache, **HEAD) == [
        "own.toml: 10 words of 'train': 6 O, 2 B-PER, 1 I-PER, 0 B-ORG, 0 I-ORG, 1 B-LOC",
        "own.toml: 3 words of 'validation': 0 O, 0 B-PER, 0 I-PER, 1 B-ORG, 0 I-ORG, 2 B-LOC",
        "own.toml: 1 of 3 words of 'validation' have the label 'B-ORG', which no word of 'train' has: it "
        "cannot be learned",
    ]
    tag_file(files, [{"tokens": ["It", "is"], "ner": [0, 0]}])
    with pytest.raises(SettingError, match="all 2 words of 'train' have the label 'O'.*nothing to learn"):
        said_of(name, cache, **HEAD)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tokens": ["So"]}, "line 2: 'tokens' and 'ner' have 1 and 4 entries: each word should"),
        ({"ner": [0]}, "line 2: 'tokens' and 'ner' have 4 and 1 entries: each word should"),
        ({"tokens": [], "ner": []}, "line 2: the list of words 'tokens' is empty"),
        ({"tokens": "So did he"}, "line 2: words 'tokens' should be a list of texts, not 'So did he'"),
        ({"tokens": ["So", 1, 2, 3]}, "line 2: words 'tokens' should be a list of texts"),
        ({"ner": "O O O O"}, "line 2: tags 'ner' should be a list of labels, not 'O O O O'"),
        ({"ner": ["B", "B", "I", "O"]}, r"lack 'B' \(2 words\), 'I' \(1 word\); .* own-train.jsonl, line 2"),
        ({"ner": [0, 0, 9, 0]}, r"lack '9' \(1 word\); the first is at own-train.jsonl, line 2"),
        ({"ner": [0, -100, 1, 0]}, "own-train.jsonl, line 2 has no label"),
        ({"ner": None}, "own-train.jsonl, line 2, has no value in the column 'ner'"),
    ],
)
def test_rows_whose_words_and_tags_do_not_pair_are_named_before_training(changed, message, files, cache):
    name = tag_file(files, [SENTENCES[0], SENTENCES[1] | changed])
    with pytest.raises(SettingError, match=message) as error:
        said_of(name, cache, **HEAD)
    assert "own" in str(error.value)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"label": "ner"}, "own.toml: either targets .* not label and words and tags"),
        ({"tags": None}, "own.toml: words, .* and tags, .* need each other"),
        ({"words": None}, "own.toml: words, .* and tags, .* need each other"),
        ({"labels": None}, "own.toml: tags needs labels"),
        ({"text": "tokens"}, "own.toml: text is not read with words and tags"),
        ({"inputs": "{tokens}"}, "own.toml: inputs is not read with words and tags"),
        ({"targets_length": 9}, "own.toml: targets_length is not read with words and tags"),
        ({"metrics": ["f1"]}, "own.toml: metric 'f1' is unknown.*entity_f1"),
        (
            {"labels": ["O", "S-PER"], "metrics": ["entity_f1"]},
            "own.toml: metric 'entity_f1' needs labels in BIO",
        ),
        ({"tags": "nre"}, "own.toml: the rows of own-train.jsonl have no column 'nre'; did you mean 'ner'"),
    ],
)
def test_keys_that_do_not_fit_tags_are_named(keys, message, files, cache):
    with pytest.raises(SettingError, match=message):
        said_of(tag_file(files, SENTENCES, **keys), cache, **HEAD)


def test_a_list_is_no_label_and_tags_are_no_words_that_a_model_writes(files, cache):
    given = {"words": None, "tags": None, "text": "tokens", "label": "ner", "metrics": ["accuracy"]}
    name = tag_file(files, SENTENCES, **given)
    for how in ({}, HEAD):
        with pytest.raises(SettingError, match="line 1: the label 'ner' is a list; .* words and tags"):
            said_of(name, cache, **how)
    with pytest.raises(SettingError, match="own.toml has tags of words.*name it in tuning.heads"):
        mixture(tag_file(files, SENTENCES))


def test_a_head_tags_the_words_of_a_file_in_evaluation_as_in_predictions(files, capsys):
    name = tag_file(files, SENTENCES)
    folder, *_ = run_of(files, "own", HEADS | {"tuning.heads": (name,)})
    score_run(folder, [name], "", RowSelection())
    scores, lines = read(folder / "scores" / name / name / "validation")
    assert scores["metrics"].keys() == {"entity_f1", "accuracy", "score"}
    found = load_run(folder).predict([row["tokens"] for row in SENTENCES])
    assert found == [[CONLL[tag] for tag in line["prediction"]] for line in lines]
    (files / "right.jsonl").write_text("".join(f"{json.dumps(row['ner'])}\n" for row in SENTENCES))
    capsys.readouterr()
    score_file(Path("right.jsonl"), name, RowSelection())
    assert "100.00" in capsys.readouterr().out

"""The C4 rules, against the cases of TFDS's C4 and the paper."""

import json
from pathlib import Path

import pytest

from lm.data import cleaning

PEERS = Path(__file__).parents[1].parent / "shared" / "parity" / "peer_cases.json"
# Left out: they need word lists or addresses of the open web, or belong to the multilingual mC4.
LEFT_OUT = {"c4.badwords_filter", "c4.normalize_url", "c4.is_valid_length", "c4.paragraph_filter"}
RULES = cleaning.Rules()


def cases(name):
    found = json.loads(PEERS.read_text())["cases"] if PEERS.exists() else []
    return [pytest.param(case["args"], case["expected"], id=case["id"]) for case in found if case["fn"] == name]


@pytest.mark.parametrize(("args", "expected"), cases("c4.clean_page"))
def test_a_page_is_cleaned_as_in_tfds(args, expected):
    assert cleaning.clean_page(args["text"], RULES) == expected["text"]


@pytest.mark.parametrize(("args", "expected"), cases("c4.remove_duplicate_lines"))
def test_a_line_is_kept_once(args, expected):
    rules = cleaning.Rules(sentences_per_page=args["min_num_sentences"])
    found = list(cleaning.remove_duplicates([page["text"] for page in args["pages"]], rules))
    kept = [
        {"url": page["url"], "text": text} for page, text in zip(args["pages"], found, strict=True) if text is not None
    ]
    assert kept == expected


def test_every_c4_rule_of_the_peers_is_here_or_left_out_by_name():
    if not PEERS.exists():
        pytest.skip("no peer cases")
    names = {case["fn"] for case in json.loads(PEERS.read_text())["cases"] if case["fn"].startswith("c4.")}
    assert names == LEFT_OUT | {"c4.clean_page", "c4.remove_duplicate_lines"}


def test_an_opening_brace_condemns_the_page():
    page = "One two three four five.\n" * 3
    assert cleaning.clean_page(page + "Here it is { but never closed.", RULES) is None
    assert cleaning.clean_page(page + "It is closed } but never opened.", RULES) is not None


def test_thresholds_are_settings():
    page = "One two three.\nFour five six.\nSeven eight nine."
    assert cleaning.clean_page(page, RULES) is None
    assert cleaning.clean_page(page, cleaning.Rules(words_per_line=3)) == page
    assert cleaning.clean_page(page, cleaning.Rules(words_per_line=3, sentences_per_page=4)) is None


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("It ends here. Then it goes on! Does it? Yes.", 4),
        ("Shapes, e.g. Vectors, are one sentence, cf. Fig. 3 of it.", 1),
        ('He said "no." Then he left.', 2),
        ("Version 3.5 came out...but nobody saw it.", 1),
        ("J. Smith wrote it.", 1),
        ("", 0),
    ],
)
def test_sentences_end_at_a_mark_before_a_capital(text, count):
    found = cleaning.sentences(text)
    assert len(found) == count
    assert " ".join(found) == text

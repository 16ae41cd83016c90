"""The C4 rules where the cases of TFDS's C4 (test_peer_cases.py) are silent."""

import numpy as np
import pytest
from pages import clean_page

from lm.c4 import filters

RULES = filters.Rules()


def test_an_opening_brace_condemns_the_page():
    page = "One two three four five.\n" * 3
    assert clean_page(page + "Here it is { but never closed.", RULES) is None
    assert clean_page(page + "It is closed } but never opened.", RULES) is not None


@pytest.mark.parametrize("mark", ["{", "Lorem ipsum"])
def test_as_in_tfds_a_page_is_judged_by_the_lines_that_filters_before_leave(mark):
    page = "One two three four five.\n" * 3
    assert clean_page(f"{page}Here it is with {mark} in a line.", RULES) is None
    assert clean_page(f"{page}Here it is with {mark} in a line without an end", RULES) == page.strip()
    assert clean_page(f"{page}With {mark}.", RULES) == page.strip()  # a line of few words goes first


@pytest.mark.parametrize("mark", ["{", "Lorem ipsum", "heck"])
@pytest.mark.parametrize(
    "line", ["Here it is with {} in a line without an end", "With {}.", "Javascript is {}."]
)
def test_by_the_papers_order_a_page_goes_with_a_mark_in_any_line(mark, line, tmp_path):
    (tmp_path / "words").write_text("heck\n")
    page = "One two three four five.\n" * 3
    released, paper = (
        filters.Rules(order=order, bad_words=str(tmp_path / "words")) for order in ("released", "paper")
    )
    assert clean_page(page + line.format(mark), released) == page.strip()
    assert clean_page(page + line.format(mark), paper) is None
    assert clean_page(page + line.format("nothing"), paper) == page.strip()


def test_both_orders_have_the_same_filters_and_leave_the_same_of_pages_without_marks():
    released, paper = map(filters.ordered_filters, ("released", "paper"))
    assert set(released) == set(paper) == set(filters.FILTERS) and released == tuple(filters.FILTERS)
    assert paper.index("bad-words") < paper.index("blanks") and paper[-2:] == (
        "sentences-per-page",
        "language",
    )
    page = "  One two three four five.[1]\nToo few.\nWe use cookies and know it.\n" + "A b c d e f.\n" * 3
    assert clean_page(page, filters.Rules(order="paper")) == clean_page(page, RULES) is not None


def test_the_filters_stand_in_the_order_of_tfds():
    names = (
        "page-length paragraphs blanks long-words citations terminal-punctuation words-per-line lorem-ipsum"
    )
    names += " javascript curly-braces policy sentences-per-page bad-words language"
    assert [*filters.FILTERS] == names.split()


def test_a_page_in_another_language_or_in_none_is_dropped():
    english = "This is an English page about nothing at all. " * 8
    assert filters.is_language(english, "en", 0.99)
    assert not filters.is_language(english, "de", 0.99)
    assert not filters.is_language("Home | About | Contact", "en", 0.99)


def test_each_filter_counts_what_it_removed(tmp_path):
    (tmp_path / "words").write_text("heck\n")
    steps = filters.build_filters(
        filters.Rules(bad_words=str(tmp_path / "words")), (*filters.LINE_FILTERS, "bad-words")
    )
    counts = {name: np.zeros(3, np.int64) for name in steps}
    lines = ["  We go on and on.[1]", "Short.", "Use javascript or do not.", "What the heck is it?"]
    assert filters.apply_filters(lines, steps, counts) is None
    found = {name: row.tolist() for name, row in counts.items() if row.any()}
    assert found == {
        "blanks": [0, 0, 2],
        "citations": [0, 0, 3],
        "words-per-line": [0, 1, 6],
        "javascript": [0, 1, 25],
        "bad-words": [1, 2, 36],
    }


def test_the_first_word_of_a_list_counts_whatever_program_wrote_the_list(tmp_path):
    (tmp_path / "words").write_bytes(b"\xef\xbb\xbfheck\r\nworse\r\n")
    test = filters.bad_words_filter(filters.Rules(bad_words=str(tmp_path / "words")))
    assert test(["What the heck is it?"]) is test(["It is worse."]) is None


def test_all_switches_off_all_but_the_language():
    assert set(filters.disabled_filters(["all"])) == {*filters.FILTERS, "duplicates"} - {"language"}


def test_thresholds_are_settings():
    page = "One two three.\nFour five six.\nSeven eight nine."
    assert clean_page(page, RULES) is None
    assert clean_page(page, filters.Rules(words_per_line=3)) == page
    assert clean_page(page, filters.Rules(words_per_line=3, sentences_per_page=4)) is None


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("It ends here. Then it goes on! Does it? Yes.", 4),
        ("Shapes, e.g. Vectors, are one sentence, cf. Fig. 3 of it.", 1),
        ('He said "no." Then he left.', 2),
        ("Version 3.5 came out...but nobody saw it.", 1),
        ("J. Smith wrote it.", 1),
        ("Это первое предложение. Это второе. Это третье.", 3),
        ("Das ist es. Über Nacht kam es. Ähnliches folgt.", 3),
        ("He came at 5 a.m. and left.", 1),
        ("", 0),
    ],
)
def test_sentences_end_at_a_mark_before_a_capital(text, count):
    found = filters.sentences(text)
    assert len(found) == count
    assert " ".join(found) == text


@pytest.mark.parametrize(
    "url",
    [
        "https://www.a.com",
        "HTTPS://WWW.A.COM/x",
        "http://me@www.a.com:80?q",
        "www.a.com",
        "//www.a.com/x",
        "ftp://www.a.com/x",
        "http://www.a.com./x",
    ],
)
def test_a_host_is_found_by_its_own_name_and_by_those_that_contain_it(url):
    assert filters.in_domains(url, {"www.a.com"}) and filters.in_domains(url, {"a.com"})
    assert not filters.in_domains(url, {"b.com", "w.a.com"})

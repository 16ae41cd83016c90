"""The C4 rules where the cases of TFDS's C4 (test_peer_cases.py) are silent."""

import pytest

from lm.data import cleaning

RULES = cleaning.Rules()


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

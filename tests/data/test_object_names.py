"""Names of Python objects as entities: what an author marked, and a set split by module."""

import pytest

from lm.data.documentation.object_names import NAME_LABELS, object_name_rows, tagged_sentences


def shown(docstring):
    return [
        " ".join(word if label == "O" else f"{word}/{label}" for word, label in sentence)
        for sentence in tagged_sentences(docstring)
    ]


def test_a_marked_name_is_an_entity_of_its_role_and_the_markup_is_gone():
    text = "Ends a :class:`~orm.Session`, as :meth:`.Session.close()` does. Raises :py:exc:`E` then."
    begin = "Ends a Session/B-class , as Session/B-function ./I-function close/I-function does ."
    assert shown(text) == [begin, "Raises E/B-class then ."]


@pytest.mark.parametrize(
    "sentence",
    [
        "See :class:`Session` and :ref:`this chapter <sessions>` there.",
        "See :class:`the session <Session>` there.",
        "See :class:`Session` and ``None`` there.",
        "See :class:`Session` and :math:`x` there.",
        "It has no name that is marked.",
    ],
)
def test_a_sentence_whose_other_markup_may_be_a_name_is_left_out(sentence):
    assert shown(sentence) == []
    assert len(shown(f"{sentence} Then close :func:`it` first.")) == 1


def test_rows_have_the_labels_of_their_words_and_none_occurs_twice():
    modules = [
        (f"m{number}", ["Call :func:`a.b` first.", f"Then call :func:`f{number}` too."])
        for number in range(60)
    ]
    splits = object_name_rows(modules)
    rows = [row for split in splits.values() for row in split]
    assert all(splits.values())
    assert len({tuple(row["tokens"]) for row in rows}) == len(rows) == 61
    (first,) = [row for row in rows if "first" in row["tokens"]]
    assert [NAME_LABELS[number] for number in first["entities"]] == [
        "O",
        "B-function",
        "I-function",
        "I-function",
        "O",
        "O",
    ]

"""Words of code tagged by their role: what the syntax says, and a set split by module."""

import pytest

from lm.c4.filters import hash_fraction
from lm.data.documentation.code_tags import CODE_TAGS, LINE_LENGTHS, code_tag_rows, tagged_lines
from lm.data.documentation.docstrings import TRAIN_BELOW

SOURCE = '''
"""Too short."""
import os.path as paths
@paths.wraps(kind=1)
class Shelf(Base):
    def lend(self, title: str, days=3) -> None:
        self.log(title, until=clock.now() + days)  # a comment
        late = (days >
                limit)
        shelf.owner.name = title or "none"
        later = lambda late: late
'''
TAGGED = """
import/keyword os/module ./punctuation path/module as/keyword paths/module
@/operator paths/value ./punctuation wraps/method (/punctuation kind/argument
 =/operator 1/number )/punctuation
class/keyword Shelf/class (/punctuation Base/value )/punctuation :/punctuation
def/keyword lend/function (/punctuation self/parameter ,/punctuation title/parameter :/punctuation str/value
 ,/punctuation days/parameter =/operator 3/number )/punctuation ->/operator None/keyword :/punctuation
self/value ./punctuation log/method (/punctuation title/value ,/punctuation until/argument =/operator
 clock/value ./punctuation now/method (/punctuation )/punctuation +/operator days/value )/punctuation
late/variable =/operator (/punctuation days/value >/operator limit/value )/punctuation
shelf/value ./punctuation owner/attribute ./punctuation name/attribute =/operator
 title/value or/keyword ""/string
later/variable =/operator lambda/keyword late/parameter :/punctuation late/value
"""


def shown(source):
    return [" ".join(f"{word}/{role}" for word, role in line) for line in tagged_lines(source)]


def test_a_name_has_the_role_that_the_syntax_gives_it_at_its_place():
    assert shown(SOURCE) == TAGGED.replace("\n ", " ").strip().split("\n")


@pytest.mark.parametrize(
    ("line", "role"),
    [
        ("name(1, 2)", "call"),
        ("name[1] = 2", "value"),
        ("name = 1, 2", "variable"),
        ("for name in rows: pass", "variable"),
        ("import name.x", "module"),
        ("from x import name", "module"),
        ("x.y.name + 1", "attribute"),
        ("x.y.name(1)", "method"),
        ("call(1, name=2)", "argument"),
        ("lambda *name: 1", "parameter"),
        ("def name(): pass", "function"),
        ("class name: pass", "class"),
        ("async def name(): pass", "function"),
        ("global x, name", "variable"),
    ],
)
def test_one_name_has_every_role(line, role):
    assert dict(*tagged_lines(line + "\n"))["name"] == role


def test_match_is_a_keyword_only_where_it_begins_a_statement():
    statement, _, call = tagged_lines("match x, 1:\n    case _: pass\nmatch(x, 1)\n")
    assert (statement[0], call[0]) == (("match", "keyword"), ("match", "call"))


@pytest.mark.parametrize("source", ["x = = 1\n", "name = 'é', 1\n", "x = f'{a}', 1\n", "x = y\n", "\0\n"])
def test_what_does_not_parse_is_not_ascii_or_depends_on_the_version_of_python_is_left_out(source):
    assert shown(source) == []


def test_a_line_that_is_too_long_is_left_out():
    fits = "x = " + " + ".join("y" for _ in range((LINE_LENGTHS.stop - 2) // 2))
    assert len(shown(fits + "\n")) == 1 and shown(fits + " + y\n") == []


@pytest.fixture(scope="module")
def splits():
    return code_tag_rows(["json", "email", "logging", "asyncio"])


def test_a_module_is_in_one_split_by_its_name_alone(splits):
    names = {split: {row["name"] for row in rows} for split, rows in splits.items()}
    assert names["train"] and not names["train"] & (names["validation"] | names["report"])
    assert not names["validation"] & names["report"]
    alone = code_tag_rows(["logging"])
    for split, rows in alone.items():
        assert {row["name"] for row in rows} == {name for name in names[split] if name.startswith("logging")}
    assert all(hash_fraction(name, "roles") < TRAIN_BELOW for name in names["train"])


def test_no_line_is_in_the_set_twice_and_every_role_occurs(splits):
    rows = [row for rows in splits.values() for row in rows]
    assert len({tuple(row["tokens"]) for row in rows}) == len(rows) > 1000
    assert {role for row in rows for role in row["roles"]} == set(range(len(CODE_TAGS)))
    assert all(len(row["tokens"]) == len(row["roles"]) in LINE_LENGTHS for row in rows)

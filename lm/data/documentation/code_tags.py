"""Lines of Python code with a syntactic tag for each word: sequence labelling whose labels are never wrong.

Python's tokenizer tags keywords, numbers, strings and punctuation, the syntax tree tags names. The same name
may be a variable in one place and an attribute, a parameter or a called function in another, so that a model
has to use the context.
"""

import ast
import io
import keyword
import re
import tokenize
import warnings
from collections.abc import Iterable, Iterator
from tokenize import TokenInfo

from lm.data.corpus.tfds import Row
from lm.data.documentation.docstrings import STDLIB, TaggedWords, module_files, tagged_rows

CODE_TAGS = (
    *"keyword number string punctuation operator".split(),
    *"module class function parameter".split(),  # names that are imported or defined
    # names that are used: a variable is assigned to, a value is read
    *"call method argument attribute variable value".split(),
)
PUNCTUATION = frozenset("( ) [ ] { } , : . ;".split())
SOFT_KEYWORDS = frozenset(keyword.softkwlist) - {"_"}  # names, if the syntax tree has them as names
LAYOUT_TOKENS = {tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT}
# the beginning of a string that is no f-string, whose tokens differ between Python versions
PLAIN_STRING = re.compile(r"[rbuRBU]*['\"]")
STRING = '""'  # replaces every string
LINE_LENGTHS = range(4, 41)  # [words]

Position = tuple[int, int]  # of a word's first character: line from 1, column from 0


def code_tag_rows(packages: Iterable[str] = STDLIB) -> dict[str, list[Row]]:
    """Return ``{split: rows}``, a row for each line of code, its tags in ``roles``."""
    modules = (
        (name, tagged_lines(path.read_text("utf-8", errors="replace")))
        for name, path in module_files(packages)
    )
    return tagged_rows(modules, "roles", CODE_TAGS, "roles")


def tagged_lines(source: str) -> Iterator[TaggedWords]:
    """Yield the words of each logical line with their tags; nothing for source that is not ASCII Python."""
    if not source.isascii():
        return
    try:
        with warnings.catch_warnings(action="ignore"):  # about invalid escapes
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    tags = name_tags(tree)
    line: list[TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in LAYOUT_TOKENS:
            continue
        if token.type != tokenize.NEWLINE:
            line.append(token)
            continue
        if len(line) in LINE_LENGTHS and all(map(_can_be_tagged, line)):
            words = [token.string for token in line]
            previous_words = ["", *words[:-1]]
            yield [
                _tag_word(token, previous, words[0], tags)
                for token, previous in zip(line, previous_words, strict=True)
            ]
        line = []


def name_tags(tree: ast.AST) -> dict[Position, str]:
    """Return the tag of every name in an expression, and of parameters, by the position of the name."""
    tags: dict[Position, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):  # its parts are walked later and do not replace the tag
            if isinstance(node.func, ast.Name):
                tags[node.func.lineno, node.func.col_offset] = "call"
            elif isinstance(node.func, ast.Attribute):
                tags[_attribute_position(node.func)] = "method"
        elif isinstance(node, ast.Name):
            is_read = isinstance(node.ctx, ast.Load)
            tags.setdefault((node.lineno, node.col_offset), "value" if is_read else "variable")
        elif isinstance(node, ast.Attribute):
            tags.setdefault(_attribute_position(node), "attribute")
        elif isinstance(node, ast.arg):
            tags[node.lineno, node.col_offset] = "parameter"
        elif isinstance(node, ast.keyword) and node.arg:
            tags[node.lineno, node.col_offset] = "argument"
    return tags


def _attribute_position(node: ast.Attribute) -> Position:
    """Return the position of the name after the dot."""
    assert node.end_lineno is not None and node.end_col_offset is not None
    return node.end_lineno, node.end_col_offset - len(node.attr)


def _can_be_tagged(token: TokenInfo) -> bool:
    if token.type == tokenize.STRING:
        return bool(PLAIN_STRING.match(token.string))
    return token.type in (tokenize.NAME, tokenize.NUMBER, tokenize.OP)


def _tag_word(token: TokenInfo, previous: str, first: str, tags: dict[Position, str]) -> tuple[str, str]:
    """Return a word and its tag; ``previous`` is the word before it, ``first`` the first of the line."""
    word = token.string
    if token.type == tokenize.STRING:
        return STRING, "string"
    if token.type == tokenize.NUMBER:
        return word, "number"
    if token.type == tokenize.OP:
        return word, "punctuation" if word in PUNCTUATION else "operator"
    if keyword.iskeyword(word):
        return word, "keyword"
    if previous == "def":
        return word, "function"
    if previous == "class":
        return word, "class"
    if token.start in tags:
        return word, tags[token.start]
    if first in ("import", "from"):
        return word, "module"
    return word, "keyword" if word in SOFT_KEYWORDS else "variable"  # such as the name of an exception

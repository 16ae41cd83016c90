"""Lines of Python code with a role tag for each word: sequence labelling, right by construction.

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

from lm.c4.filters import hash_fraction
from lm.data.corpus.tfds import Row
from lm.data.documentation.docstrings import STDLIB, files

CODE_TAGS = (
    *"keyword number string punctuation operator".split(),
    *"module class function parameter".split(),  # what is imported or defined
    # what is used: a variable is assigned to, a value read
    *"call method argument attribute variable value".split(),
)
PUNCTUATION = frozenset("( ) [ ] { } , : . ;".split())
SOFT = frozenset(keyword.softkwlist) - {"_"}  # soft keywords: names where the syntax tree has them
LAYOUT = {tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT}
LITERAL = re.compile(r"[rbuRBU]*['\"]")  # not an f-string, whose tokens differ between Python versions
STRING = '""'  # replaces every string
LENGTHS = range(4, 41)  # of a line [words]
# a module is in train if its hash is below the first, in validation if below the second, else in report
TRAIN_SHARE, VALIDATION_SHARE = 0.8, 0.9

Begin = tuple[int, int]  # where a word begins: line from 1, column from 0


def code_tag_rows(packages: Iterable[str] = STDLIB) -> dict[str, list[Row]]:
    """Return ``{split: rows}``, a row for each line of code, and no line twice in all splits.

    A row has the ``name`` of the module, the ``tokens`` of the line and their ``roles``, indices in CODE_TAGS.
    The split of a module, train, validation or report, depends on its name alone.
    """
    splits: dict[str, list[Row]] = {"train": [], "validation": [], "report": []}
    seen: set[tuple[str, ...]] = set()
    for name, path in files(packages):
        number = hash_fraction(name, "roles")
        split = "train" if number < TRAIN_SHARE else "validation" if number < VALIDATION_SHARE else "report"
        for line in tagged_lines(path.read_text("utf-8", errors="replace")):
            words, roles = zip(*line, strict=True)
            if words not in seen:
                seen.add(words)
                row = {"name": name, "tokens": [*words], "roles": [CODE_TAGS.index(role) for role in roles]}
                splits[split].append(row)
    return splits


def tagged_lines(source: str) -> Iterator[list[tuple[str, str]]]:
    """Yield the words of each logical line with their roles; nothing for source that is not ASCII Python."""
    if not source.isascii():
        return
    try:
        with warnings.catch_warnings(action="ignore"):  # about invalid escapes
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    roles = name_tags(tree)
    line: list[TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.NEWLINE:
            line += [] if token.type in LAYOUT else [token]
            continue
        if len(line) in LENGTHS and all(map(_is_plain, line)):
            befores = ["", *(token.string for token in line)]
            yield [
                _tagged(token, before, befores[1], roles)
                for token, before in zip(line, befores, strict=False)
            ]
        line = []


def name_tags(tree: ast.AST) -> dict[Begin, str]:
    """Return the role of every name in an expression, and of parameters, by where the name begins."""
    roles: dict[Begin, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):  # its parts are walked later and do not replace the role
            if isinstance(node.func, ast.Name):
                roles[node.func.lineno, node.func.col_offset] = "call"
            elif isinstance(node.func, ast.Attribute):
                roles[_attribute(node.func)] = "method"
        elif isinstance(node, ast.Name):
            is_read = isinstance(node.ctx, ast.Load)
            roles.setdefault((node.lineno, node.col_offset), "value" if is_read else "variable")
        elif isinstance(node, ast.Attribute):
            roles.setdefault(_attribute(node), "attribute")
        elif isinstance(node, ast.arg):
            roles[node.lineno, node.col_offset] = "parameter"
        elif isinstance(node, ast.keyword) and node.arg:
            roles[node.lineno, node.col_offset] = "argument"
    return roles


def _attribute(node: ast.Attribute) -> Begin:
    """Return where the name behind the dot begins."""
    assert node.end_lineno is not None and node.end_col_offset is not None
    return node.end_lineno, node.end_col_offset - len(node.attr)


def _is_plain(token: TokenInfo) -> bool:
    if token.type == tokenize.STRING:
        return bool(LITERAL.match(token.string))
    return token.type in (tokenize.NAME, tokenize.NUMBER, tokenize.OP)


def _tagged(token: TokenInfo, before: str, first: str, roles: dict[Begin, str]) -> tuple[str, str]:
    """Return a word and its role; ``before`` is the word in front of it, ``first`` the first of the line."""
    word = token.string
    if token.type == tokenize.STRING:
        return STRING, "string"
    if token.type == tokenize.NUMBER:
        return word, "number"
    if token.type == tokenize.OP:
        return word, "punctuation" if word in PUNCTUATION else "operator"
    if keyword.iskeyword(word):
        return word, "keyword"
    if role := {"def": "function", "class": "class"}.get(before) or roles.get(token.start):
        return word, role
    if first in ("import", "from"):
        return word, "module"
    return word, "keyword" if word in SOFT else "variable"  # such as the name of an exception

"""An extension of Griffe: the reference lists the fields of each class with the comments beside them."""

import io
import tokenize
from typing import Any

import griffe


class FieldComments(griffe.Extension):
    """Appends a section "Attributes" to the docstring of every class with annotated fields."""

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        """Called by Griffe when the members of a class are known."""
        lines = cls.lines_collection[cls.filepath]
        fields = [
            f"    {name}: {field_comment(lines, member.lineno, member.endlineno) or '–'}"
            for name, member in cls.members.items()
            if isinstance(member, griffe.Attribute)
            and member.annotation is not None
            and "property" not in member.labels
            and not name.startswith("_")
        ]
        if fields and cls.docstring is not None and "Attributes:" not in cls.docstring.value:
            cls.docstring.value = "\n".join([cls.docstring.value, "", "Attributes:", *fields])


def field_comment(lines: list[str], first: int, last: int) -> str:
    """Return the comment behind a field, else the comment lines above it; lines count from 1."""
    source = "\n".join(line.strip() for line in lines[first - 1 : last]) + "\n"
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    behind = [token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT]
    if behind:
        return " ".join(behind)
    above: list[str] = []
    for line in reversed(lines[: first - 1]):
        if not line.strip().startswith("#"):
            break
        above.insert(0, line.strip().lstrip("# "))
    return " ".join(above)

"""An extension of Griffe: the reference lists the fields of each class with their comments and defaults."""

import io
import tokenize
from typing import Any

import griffe


class FieldComments(griffe.Extension):
    """Appends a section "Attributes" to the docstring of every class with annotated fields."""

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        """Called by Griffe when the members of a class are known."""
        lines = cls.lines_collection[cls.filepath]
        fields = []
        for name, member in cls.members.items():
            if not isinstance(member, griffe.Attribute) or member.annotation is None:
                continue
            member.value = unwrapped(member.value)
            if "property" in member.labels or name.startswith("_"):
                continue
            comment = escaped(field_comment(lines, member.lineno, member.endlineno))
            about = "; ".join(filter(None, [comment, default_text(member.value)]))
            fields.append(f"    {name}: {about or '–'}")
        if fields and cls.docstring is not None and "Attributes:" not in cls.docstring.value:
            cls.docstring.value = "\n".join([cls.docstring.value, "", "Attributes:", *fields])


def unwrapped(value: Any) -> Any:
    """Return the default in ``setting(DEFAULT, ...)``, by which it reads; any other value as it is."""
    if isinstance(value, griffe.ExprCall) and str(value.function) == "setting":
        return value.arguments[0]
    return value


def default_text(value: Any) -> str:
    """Return "default `VALUE`" for a field with a plain default, else ""."""
    text = "" if value is None else str(value)
    return "" if not text or "field(" in text else f"default `{text}`"


def escaped(comment: str) -> str:
    """Return a comment in which no HTML is read, such as that of ``<unk>``."""
    return comment.replace("<", "&lt;")


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

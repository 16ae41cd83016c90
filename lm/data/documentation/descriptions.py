"""Prose beside docstrings: descriptions in the interfaces of services, and documentation of Ansible.

Every function yields ``(name, strings)`` like ``docstrings.module_docstrings``, in the order of the names.
"""

import gzip
import html
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from lm.c4.filters import hash_fraction

Read = Callable[[str], bytes]  # the contents of a file of a distribution
Strings = tuple[str, list[str]]

SERVICES = 0.6  # share of AWS's services, chosen by the hash of their names
BOTOCORE = re.compile(r"botocore/data/([^/]+)/([^/]+)/service-2\.json(?:\.gz)?")
DISCOVERY = re.compile(r"googleapiclient/discovery_cache/documents/(.+)\.(v[^./]*)\.json")
CHECK = re.compile(r"(prowler/.+)\.metadata\.json")
BLOCK_TAG = re.compile(
    r"</?(?:p|li|ul|ol|note|important|dl|dt|dd|br|h\d|div|table|tr|td|pre|title|caution|fullname)\b[^>]*>"
)
TAG = re.compile(r"</?[a-zA-Z][^>]*>")
MARKDOWN_LINK = re.compile(r"\[([^\]]+)\]\([^)]*\)")
YAML_MARK = re.compile(
    r"^( *)(?:- |description: *|short_description: *)(?:>-?|\|-?)?['\"]?", re.MULTILINE | re.ASCII
)
ANSIBLE_ROLE = re.compile(r"[CBIOVPRELM]\(([^)]*)\)")
ANSIBLE_START = re.compile(r"^DOCUMENTATION\s*=\s*[rRuU]?(\"\"\"|''')", re.MULTILINE | re.ASCII)


def service_descriptions(paths: Iterable[str], read: Read) -> Iterator[Strings]:
    """Yield the documentation of AWS services, each in the newest version of its interface.

    The share SERVICES of them is taken, so that no package is a third of the text.
    """
    newest: dict[str, str] = {}
    for path in sorted(paths):  # versions are dates
        match = BOTOCORE.fullmatch(path)
        if match and hash_fraction(match[1], "services") < SERVICES:
            newest[match[1]] = path
    for service, path in sorted(newest.items()):
        contents = gzip.decompress(read(path)) if path.endswith(".gz") else read(path)
        yield f"botocore.{service}", [*map(html_text, values(json.loads(contents), "documentation"))]


def discovery_descriptions(paths: Iterable[str], read: Read) -> Iterator[Strings]:
    """Yield the descriptions of each Google interface in its newest version, stable ones first."""
    newest: dict[str, tuple[tuple[bool, list[int]], str]] = {}
    for path in sorted(paths):
        if match := DISCOVERY.fullmatch(path):
            name, version = match.groups()
            is_stable = "alpha" not in version and "beta" not in version
            rank = (is_stable, [int(number) for number in re.findall("[0-9]+", version)])
            if name not in newest or rank > newest[name][0]:
                newest[name] = rank, path
    for name, (_, path) in sorted(newest.items()):
        texts = map(html_text, values(json.loads(read(path)), "description"))
        yield f"googleapiclient.{name}", [MARKDOWN_LINK.sub(r"\1", text) for text in texts]


def check_descriptions(paths: Iterable[str], read: Read) -> Iterator[Strings]:
    """Yield what each check of Prowler says of a risk and its remedy."""
    for path in sorted(paths):
        if match := CHECK.fullmatch(path):
            texts = [text.replace("\n", "\n\n") for text in values(json.loads(read(path)))]
            yield match[1].replace("/", "."), texts


def ansible_documentation(source: str) -> Iterator[str]:
    """Yield the description of an Ansible module, its marks of YAML replaced by empty lines."""
    if "DOCUMENTATION" not in source:  # most sources have none
        return
    for opening in ANSIBLE_START.finditer(source):
        text = source[opening.end() : source.find(opening[1], opening.end())]
        yield ANSIBLE_ROLE.sub(r"\1", YAML_MARK.sub(r"\n\1", text))


def values(tree: Any, key: str | None = None) -> Iterator[str]:
    """Yield the strings in nested JSON in their order: all, or those that have the ``key``."""
    todo: list[tuple[Any, bool]] = [(tree, key is None)]
    while todo:
        value, is_wanted = todo.pop()
        if isinstance(value, str) and is_wanted:
            yield value
        elif isinstance(value, dict):
            items = [(item, key is None or name == key) for name, item in value.items()]
            todo.extend(reversed(items))
        elif isinstance(value, list):
            todo.extend((item, key is None) for item in reversed(value))


def html_text(text: str) -> str:
    """Return the text of HTML, an empty line in place of each tag that begins or ends a block."""
    return html.unescape(TAG.sub("", BLOCK_TAG.sub("\n\n", text)))


DESCRIPTIONS: dict[str, Callable[[Sequence[str], Read], Iterator[Strings]]] = {
    "botocore": service_descriptions,
    "google-api-python-client": discovery_descriptions,
    "prowler": check_descriptions,
}

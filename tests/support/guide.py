"""The sections of CONTRIBUTING.md that say how to add something, and their patches."""

import re

from paths import ROOT

SECTION = re.compile(r"^### (Add .+?)\n(.*?)(?=^##|\Z)", re.MULTILINE | re.DOTALL)
SECTIONS: dict[str, str] = dict(SECTION.findall((ROOT / "CONTRIBUTING.md").read_text("utf-8")))


def blocks(title: str) -> list[tuple[str, str]]:
    """Return the (language, text) of each block of code in a section."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", SECTIONS[title], re.MULTILINE | re.DOTALL)


def patches(title: str) -> list[tuple[str, str]]:
    """Return the (file, hunk) of each patch in a section."""
    found = []
    for kind, body in blocks(title):
        if kind == "diff":
            name, _, hunk = body.partition("\n")
            found.append((name.removeprefix("--- "), hunk))
    return found


def patch(title: str, file: str, text: str, hunk: str) -> str:
    """Return the text of a file changed as a hunk says; the lines it shows must stand there exactly once."""
    lines = hunk.splitlines()
    before = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "+")
    after = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "-")
    found = text.count(before)
    assert found == 1, (
        f"CONTRIBUTING.md, section {title!r}: its patch to {file} should find its lines once, and finds them "
        f"{found} times; in CONTRIBUTING.md, change the patch to what the file has now:\n{before}"
    )
    return text.replace(before, after)

"""Hooks of mkdocs: pages that are files of the repository, and links to its address, once that is known."""

import re
import tomllib
from pathlib import Path
from typing import Any

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
PLACEHOLDER = "https://example.org/"
INCLUDED = re.compile(r"\[([\w./]+)\]\(\.\./\1\)")


def on_config(config: Any) -> Any:
    """Called by mkdocs before it builds."""
    urls = addresses()
    if not urls["Documentation"].startswith(PLACEHOLDER):
        config["site_url"] = urls["Documentation"]
    if not urls["Repository"].startswith(PLACEHOLDER):
        config["repo_url"] = urls["Repository"]
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs for each page; returns its text.

    A page that is one link to a file of the repository becomes that file, and its links those of the site.
    """
    if not (included := INCLUDED.fullmatch(markdown.strip())):
        return markdown
    text = (PYPROJECT.parent / included[1]).read_text("utf-8")
    return re.sub(r"\]\((\.\./)?docs/", "](", text)


def on_post_build(config: Any) -> None:
    """Called by mkdocs at the end; removes files that mean nothing to a site without an address."""
    if not config["site_url"]:
        for name in ("404.html", "sitemap.xml", "sitemap.xml.gz"):
            (Path(config["site_dir"]) / name).unlink(missing_ok=True)


def addresses() -> dict[str, str]:
    """Return the addresses of the project by name, such as "Repository"."""
    project: dict[str, dict[str, str]] = tomllib.loads(PYPROJECT.read_text("utf-8"))["project"]
    return project["urls"]

"""A hook of mkdocs: the site links to the repository of pyproject.toml, once that has an address."""

import tomllib
from pathlib import Path
from typing import Any

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
PLACEHOLDER = "https://example.org/"


def on_config(config: Any) -> Any:
    """Called by mkdocs before it builds."""
    urls = addresses()
    if not urls["Documentation"].startswith(PLACEHOLDER):
        config["site_url"] = urls["Documentation"]
    if not urls["Repository"].startswith(PLACEHOLDER):
        config["repo_url"] = urls["Repository"]
    return config


def on_post_build(config: Any) -> None:
    """Called by mkdocs at the end; removes files that mean nothing to a site without an address."""
    if not config["site_url"]:
        for name in ("404.html", "sitemap.xml", "sitemap.xml.gz"):
            (Path(config["site_dir"]) / name).unlink(missing_ok=True)


def addresses() -> dict[str, str]:
    """Return the addresses of the project by name, such as "Repository"."""
    project: dict[str, dict[str, str]] = tomllib.loads(PYPROJECT.read_text("utf-8"))["project"]
    return project["urls"]

"""What a tokenizer.json may ask for: a text may not become a thousand times longer, nor be framed by a
million ids.
"""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lm.settings import SettingError, parse_json

LARGEST = 1 << 28  # of the file; the largest published ones have 40 MB [bytes]
GROWTH = 100  # how many times longer a text may get by all replacements one after the other; published: 3
# that may come before a text or in the place of one character [characters], or around a text [ids]
LONGEST = 1_000


def check(path: Path) -> None:
    """SettingError for a tokenizer.json, before it is read by its package, that would take any time or
    memory.
    """
    if path.stat().st_size > LARGEST:
        raise SettingError(f"{path} has {path.stat().st_size} bytes; a tokenizer has {LARGEST} at most")
    growth, added = 1.0, 0
    for step in _steps(parse_json(path.read_bytes(), path)):
        try:
            growth, added = growth * _growth(step), max(added, _added(step))
        except (AttributeError, TypeError, ValueError, OverflowError, KeyError) as error:
            raise SettingError(
                f"{path} has a {step.get('type')!r} that makes no sense: {error!r:.200}"
            ) from error
    if growth > GROWTH:
        raise SettingError(
            f"{path}: its replacements make a text up to {growth:.3g} times longer, {GROWTH} is the most"
        )
    if added > LONGEST:
        raise SettingError(f"{path}: it adds {added} characters or ids to a text, {LONGEST} is the most")


def _steps(value: Any) -> Iterator[dict[str, Any]]:
    """Whatever has a type, in any depth; not the vocabulary."""
    left = (
        [value[key] for key in ("normalizer", "pre_tokenizer", "post_processor", "decoder") if key in value]
        if (isinstance(value, dict))
        else []
    )
    while left:
        each = left.pop()
        if isinstance(each, dict):
            if isinstance(each.get("type"), str):
                yield each
            left += each.values()
        elif isinstance(each, list):
            left += each


def _growth(step: dict[str, Any]) -> float:
    if step["type"] != "Replace":
        return 1.0
    pattern, content = step["pattern"], step["content"]
    # A regular expression may match between all characters.
    return max(1.0, len(content) / len(pattern["String"]) if pattern.get("String") else len(content) + 1.0)


def _added(step: dict[str, Any]) -> int:
    if step["type"] == "TemplateProcessing":
        ids = {name: len(token["ids"]) for name, token in step["special_tokens"].items()}
        both = [*step["single"], *step["pair"]]
        return sum(ids.get(piece["SpecialToken"]["id"], 0) for piece in both if "SpecialToken" in piece)
    if step["type"] == "Precompiled" and step["precompiled_charsmap"]:
        charsmap = base64.b64decode(step["precompiled_charsmap"])
        texts = charsmap[4 + int.from_bytes(charsmap[:4], "little") :]  # behind a trie of that many bytes
        return max(map(len, texts.split(b"\0")), default=0)
    return max(
        (len(step[key]) for key in ("prepend", "content") if isinstance(step.get(key), str)), default=0
    )

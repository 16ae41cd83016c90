"""Keeps threads of orbax from writing on the terminal what is said in a line elsewhere."""

import logging
import sys
from functools import cache
from pathlib import Path
from typing import Any


@cache
def hush() -> None:
    """Keep off the terminal what orbax's threads write there of an error: it is raised to us too."""
    before = sys.unraisablehook

    def is_news(record: logging.LogRecord) -> bool:
        return not record.exc_info or not {"orbax", "asyncio"} & {*Path(record.pathname).parts}

    def tell(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":  # which others of its writes would have told
            before(unraisable)

    sys.unraisablehook = tell
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(is_news)

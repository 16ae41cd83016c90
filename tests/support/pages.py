"""A page, and what cleaning leaves of it."""

from lm.c4 import filters


def clean_page(text, rules):
    """The page's clean lines, or None when it is dropped."""
    steps = filters.build_filters(rules, (*filters.LINE_FILTERS, "sentences-per-page"))
    lines = filters.apply_filters(text.splitlines(), steps)
    return lines and "\n".join(lines)

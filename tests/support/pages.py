"""A page, and what cleaning leaves of it."""

from lm.c4 import filters


def clean_page(text, rules):
    """The page's clean lines, or None when it is dropped."""
    wanted = {*filters.LINE_FILTERS, "bad-words", "sentences-per-page"}
    names = [name for name in filters.ordered_filters(rules.order) if name in wanted]
    steps = filters.build_filters(rules, names)
    lines = filters.apply_filters(text.splitlines(), steps)
    return lines and "\n".join(lines)

"""Finished runs made by hand, as reports read them."""

from experiments.study.registry import find, tables_of

RATES = tables_of(find("t5/6-corruption-rate"))
NAMES = [row.name for row in RATES[0].rows]
RECORD = {
    "settings": {},
    "vocabulary": {"fingerprint": "v"},
    "data": {"corpus train": "c", "cloze validation": "d"},
    "code": {"lm/config/base.py": "1"},
    "packages": {"jax": "0.10"},
}

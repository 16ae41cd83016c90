"""Texts from which small vocabularies are trained."""

import re

import numpy as np

WORDS = re.findall(
    "[a-z]+", "the quick brown fox jumps over a lazy dog while seven wizards mix potions and quote verse"
)
TEXTS = [" ".join(np.random.default_rng(i).choice(WORDS, 40)) for i in range(60)]

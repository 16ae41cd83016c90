"""Interpolated Kneser-Ney counts of the tokens of two passes' text: no training."""

from experiments.entries.entry import Entry

ENTRY = Entry(
    title="A 5-gram",
    author="The project",
    hypothesis="Counting is ahead of masked diffusion after so little text.",
    row="now/4-diffusion/5-gram",
)

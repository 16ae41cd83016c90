"""Masked diffusion, whose score is an upper bound of its bits."""

from experiments.entries.entry import Entry

ENTRY = Entry(
    title="Masked diffusion",
    author="The project",
    hypothesis="Masked diffusion learns less than counting from so little text.",
    row="now/4-diffusion/masked-diffusion",
)

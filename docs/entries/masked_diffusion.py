"""The same Transformer as an encoder, trained by masked diffusion; its bits are an upper bound."""

from experiments.entries.entry import Entry

ENTRY = Entry(
    title="Masked diffusion",
    author="The project",
    hypothesis="Predicting in any order is behind predicting from left to right.",
    row="now/4-diffusion/masked-diffusion",
)

"""The LSTM of the table now/4-diffusion."""

from experiments.entries.entry import Entry

ENTRY = Entry(
    title="An LSTM of one layer",
    author="The project",
    hypothesis="An LSTM is behind a Transformer of as many parameters.",
    row="now/4-diffusion/lstm",
)

"""The LSTM of the history table, with as many parameters as the decoder there."""

from experiments.entries.entry import Entry

ENTRY = Entry(
    title="An LSTM",
    author="The project",
    hypothesis="At this size an LSTM needs fewer bits per byte than a Transformer.",
    row="history/lstm",
)

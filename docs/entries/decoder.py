"""The Transformer of the history table, as it stands there: the network that others start from."""

from experiments.entries.entry import Entry

ENTRY = Entry(
    title="A decoder",
    author="The project",
    hypothesis="A Transformer needs fewer bits per byte than a 5-gram.",
    row="history/transformer",
)

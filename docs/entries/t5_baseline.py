"""The baseline of the T5 paper, at the size of this table: the first entry of the track of tasks."""

from experiments.entries.entry import Entry

ENTRY = Entry(
    title="T5's baseline",
    author="The project",
    hypothesis="Two more seeds do not change what three scored: the mean of five is within half a deviation of 0.",
    row="t5/1-baseline/baseline",
    track="tasks",
)

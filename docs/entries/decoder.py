"""The Transformer of the table now/4-diffusion, with rotary positions and GELU."""

from experiments.entries.entry import Entry

ENTRY = Entry(
    title="The decoder of the history table",
    author="The project",
    hypothesis="A Transformer is ahead of an LSTM of as many parameters, and of counting.",
    row="now/4-diffusion/causal-lm",
)

"""``lm eval likelihood``: how likely a run's model finds texts, a corpus, or continuations of contexts."""

from pathlib import Path
from typing import Annotated

import tyro

from experiments.evaluate.likelihood import Scoring, score_texts

DEFAULTS = Scoring()


def eval_likelihood(
    run: Path,
    file: str,
    /,
    out: Path | None = None,
    scoring: Annotated[Scoring, tyro.conf.arg(name="")] = DEFAULTS,
) -> None:
    """Show the log-probability of texts: nats, perplexity per token, bits per byte and per character.

    Each line of the file is a text, or a context, a tab and its continuation; blank lines are skipped. In a
    .jsonl file a line is {"context": ..., "continuation": ...}. Masked diffusion gives an upper bound of the
    bits, with a 95 % interval. Other encoders give the pseudo-log-likelihood: each token in turn is masked.
    An encoder-decoder reads the context and scores the continuation. The likelihood of a text without a
    context is no measure of it, since it was trained to fill gaps or to answer.

        lm eval likelihood runs/nano/gpt/base/seed-0 book.txt
        lm eval likelihood runs/nano/gpt/base/seed-0 \\
          documentation --texts 10

    Args:
        run: Folder of a run, @NAME or @last.
        file: Lines to score (- reads standard input), or a corpus as data.corpus names it: documentation,
            text:PATH, jsonl:PATH, parquet:PATH or tfds:NAME, whose texts are scored together.
        out: File for the results as JSON lines, in the order of the input.
    """
    score_texts(run, file, out, scoring)

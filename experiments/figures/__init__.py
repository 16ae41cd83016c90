"""Figures that explain models, drawn by ``lm draw``: which there are, where each is made, and what it shows.

A figure is a dataclass whose fields are its options. Its module is imported when the figure is asked for. The
order is that of a course: from recurrence to attention, then what both cost.
"""

from typing import NamedTuple


class FigureEntry(NamedTuple):
    """A figure that ``lm draw`` knows."""

    target: str  # module:class
    summary: str  # one sentence
    arguments: str = ""  # required ones, as in a usage line


TRAINED, CONCEPTS = "experiments.figures.trained_models", "experiments.figures.concepts"
WITH_TEXT = 'RUN --text "..."'
FIGURES = {
    "next": FigureEntry(
        f"{TRAINED}:NextTokenFigure",
        "What a model expects after each token of a text (an encoder: in its place).",
        WITH_TEXT,
    ),
    "history": FigureEntry(
        "experiments.figures.language_models:HistoryFigure",
        "N-grams and networks on equal text: bits per byte by model, size and budget.",
        "[RUNS]",
    ),
    "gradients": FigureEntry(
        f"{TRAINED}:GradientFigure",
        "How much a recurrent state depends on an earlier one: gradients vanish, or explode.",
    ),
    "gates": FigureEntry(
        f"{TRAINED}:GatesFigure", "What an LSTM's gates let through at each token.", WITH_TEXT
    ),
    "alignment": FigureEntry(
        f"{TRAINED}:AlignmentFigure", "Where in its source a decoder attends while it writes.", WITH_TEXT
    ),
    "scores": FigureEntry(
        f"{CONCEPTS}:ScoresFigure", "Attention scores, the same masked, and the weights after softmax."
    ),
    "masks": FigureEntry(
        f"{CONCEPTS}:MasksFigure", "Which keys a query attends to, under each kind of mask."
    ),
    "attention": FigureEntry(
        f"{TRAINED}:HeadsFigure",
        "Where the heads with the sharpest attention look.",
        f"{WITH_TEXT} [--heads N]",
    ),
    "sinusoids": FigureEntry(
        f"{CONCEPTS}:SinusoidsFigure", "Each position has its own mixture of waves; near ones are similar."
    ),
    "distances": FigureEntry(
        f"{CONCEPTS}:DistancesFigure",
        "What T5's buckets, ALiBi and rotary positions make of a distance.",
    ),
    "bias": FigureEntry(
        f"{TRAINED}:BiasFigure", "The bias that T5's heads have learned for each distance.", "RUN"
    ),
    "lens": FigureEntry(
        f"{TRAINED}:LensFigure", "What each layer would answer if it were the last (logit lens).", WITH_TEXT
    ),
    "similarity": FigureEntry(
        f"{TRAINED}:SimilarityFigure",
        "A word has one embedding, and a different state in each sentence.",
        'RUN [RUN ...] --text "..." --other "..." --word WORD',
    ),
    "mixture": FigureEntry(
        f"{TRAINED}:MixtureFigure", "Which layers each task takes its features from.", "RUN"
    ),
    "tuning": FigureEntry(
        f"{TRAINED}:TuningFigure", "How far fine-tuning moved the parameters of each layer.", "RUN"
    ),
    "decoding": FigureEntry(
        f"{TRAINED}:DecodingFigure", "Time per token with a key-value cache and without, measured here."
    ),
    "lengths": FigureEntry(
        f"{CONCEPTS}:LengthsFigure",
        "Time and memory of a layer against the length of its sequence, measured here.",
    ),
    "coordinates": FigureEntry(
        "experiments.figures.coordinates:CoordinatesFigure",
        "How much training steps change a model by its width, with muP and without.",
        "ROW",
    ),
    "claims": FigureEntry(
        "experiments.report.claims_figure:ClaimsFigure",
        "Which of a paper's claims are confirmed, and whether rows are in its order (Kendall's tau).",
        "REPORT/results.json",
    ),
}

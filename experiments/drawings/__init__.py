"""Pictures that explain: which there are, where each is made, and what it shows.

A picture is a dataclass, whose fields are its options and whose ``figure`` draws it; it is imported when it
is asked for. They stand in the order of a course: from recurrence to attention, then what both cost.
"""

from typing import NamedTuple


class Drawing(NamedTuple):
    """A picture that ``lm draw`` knows."""

    place: str  # module of experiments.drawings : class
    shows: str  # in a sentence
    call: str = ""  # what has to follow its name


WITH_TEXT = 'RUN --text "..."'
DRAWINGS = {
    "next": Drawing("with_run:NextPicture", "What a model expects after each token of a text.", WITH_TEXT),
    "gradients": Drawing(
        "with_run:GradientPicture",
        "What a recurrent state still owes to an earlier one: it fades, or explodes.",
    ),
    "gates": Drawing(
        "with_run:GatesPicture", "What an LSTM's gates keep, write and show at each token.", WITH_TEXT
    ),
    "alignment": Drawing(
        "with_run:AlignmentPicture", "Where in its source a decoder looks while it writes.", WITH_TEXT
    ),
    "scores": Drawing("without_run:ScorePicture", "Scores, the same masked, and the weights after softmax."),
    "masks": Drawing("without_run:MaskPicture", "Which keys a query sees, under every kind of mask."),
    "attention": Drawing(
        "with_run:HeadsPicture", "Where heads look: four of them, or all (--heads 0).", WITH_TEXT
    ),
    "sinusoids": Drawing(
        "without_run:SinusoidPicture", "Each position has its own mixture of waves; near ones are alike."
    ),
    "distances": Drawing(
        "without_run:DistancePicture", "What T5's buckets, ALiBi and rotary positions make of a distance."
    ),
    "bias": Drawing("with_run:BiasPicture", "What T5's heads have learnt about distance.", "RUN"),
    "lens": Drawing(
        "with_run:LensPicture", "What each layer would answer, if it were the last (logit lens).", WITH_TEXT
    ),
    "similarity": Drawing(
        "with_run:SimilarityPicture",
        "A word has one embedding, and in each sentence another state.",
        'RUN [RUN ...] --text "..." --other "..." --word WORD',
    ),
    "mixture": Drawing("with_run:MixturePicture", "Which layers each task takes its features from.", "RUN"),
    "decoding": Drawing(
        "with_run:DecodingPicture", "The time of a token with a cache and without, measured here."
    ),
    "lengths": Drawing(
        "without_run:LengthPicture", "Time and memory of a layer against the length of a row, measured here."
    ),
    "claims": Drawing(
        "claims:ClaimsPicture",
        "What came of the paper's claims, and whether rows stand in its order (tau).",
        "REPORT/results.json",
    ),
}

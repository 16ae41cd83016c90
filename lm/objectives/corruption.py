"""Corruption masks: which tokens of a text are noise. A new kind is an entry of NOISES and its NoiseName.

Sources: Raffel et al. 2020 (i.i.d., spans; T5's code where the paper is silent), Devlin et al. 2019 with the
whole-word masking of its code, Joshi et al. 2020 (SpanBERT), Lewis et al. 2020 (BART).
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

import numpy as np

GEOMETRIC, LONGEST_SPAN = 0.2, 10  # mean 3.8, as SpanBERT's [Joshi et al. 2020, 3.1; words]

# A Poisson span may have length 0: a mask is inserted and no token is hidden.
NoiseName = Literal["iid", "whole-words", "spans", "geometric-spans", "poisson-spans", "suffix", "everything"]

Counts = tuple[np.ndarray, np.ndarray]  # [B]: noise tokens, and the runs they fall in
Selection = tuple[np.ndarray, np.ndarray]  # int32 [B,L], and bool [B,L]: which of them to keep


class Amount(Protocol):
    """The settings of an objective that say how much of a text is corrupted."""

    @property
    def rate(self) -> float: ...
    @property
    def mean_span_length(self) -> float: ...


class Drawn(NamedTuple):
    """Lengths of texts and the random numbers from which their corruption masks are drawn."""

    lengths: np.ndarray  # int [B]
    u: np.ndarray  # uniform random numbers, float32 [B,draws,L]
    num_sentinels: int
    word_starts: np.ndarray | None = None  # bool [B,L], for noise on words

    @property
    def starts(self) -> np.ndarray:
        assert self.word_starts is not None, "noise on words needs to know where words begin"
        return self.word_starts


class Infilled(NamedTuple):
    """What inputs show of a text in which masks stand for spans of any length."""

    source: np.ndarray  # int [B,2L]: the position in the text that is shown; -1: a mask
    keep: np.ndarray  # bool [B,2L]: which of them to keep
    noise: np.ndarray  # bool [B,L]: what of the text is not shown


class Noise(NamedTuple):
    """One kind of noise: a function that draws a mask of the tokens, or an infilling, which is more."""

    mask: Callable[[Amount, Drawn], np.ndarray]  # bool [B,L], True on noise
    infill: Callable[[Amount, np.ndarray, np.ndarray], Infilled] | None = None  # of lengths and uniforms
    # of lengths and first uniforms [B]; None where the amount is left to chance
    counts: Callable[[Amount, np.ndarray, np.ndarray], Counts] | None = None
    draws: int = 1  # random numbers per token
    on_words: bool = False  # reads where words begin
    per_document: bool = False  # splits each document, so documents are kept apart
    ignores: tuple[str, ...] = ()  # settings of the amount without effect, refused where they are changed

    @property
    def bounded(self) -> bool:
        """Return whether inputs and targets are known to fit before the noise is drawn.

        Either the first random number determines the number of noise tokens and spans, or there are no more
        of them than the text has tokens. Noise that is not bounded is drawn first and trimmed afterwards.
        """
        return self.infill is not None or self.counts is not None


def length_mask(lengths: np.ndarray, width: int) -> np.ndarray:
    """Return which positions lie before each row's length, bool [B,L]."""
    return np.arange(width, dtype=lengths.dtype) < lengths[:, None]  # 3 x as fast as mixing two types


def runs_of(mask: np.ndarray) -> np.ndarray:
    """Return where each run of True begins, bool [B,L]."""
    starts = mask.copy()
    starts[:, 1:] &= ~mask[:, :-1]
    return starts


def latest(starts: np.ndarray) -> np.ndarray:
    """Return the last start at or before each position, int [B,L]; 0 where there is none."""
    return np.maximum.accumulate(np.where(starts, np.arange(starts.shape[1]), 0), axis=1)


def tie_broken(u: np.ndarray) -> np.ndarray:
    """Return numbers of the same order with ties broken by column, float64 [B,L].

    Every machine then sorts alike.
    """
    return u + np.arange(u.shape[1]) * (2.0**-24 / u.shape[1])  # float32 draws are multiples of 2^-24


def _smallest(u: np.ndarray, among: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Return the ``count`` [B] positions with the smallest numbers ``among`` others, bool [B,L]."""
    order = tie_broken(u)
    np.putmask(order, ~among, np.inf)
    bounds = np.sort(order, axis=1)[np.arange(len(u)), count - 1]
    return order <= np.where(count > 0, bounds, -np.inf)[:, None]


# --- masks


def span_counts(amount: Amount, lengths: np.ndarray, _u: np.ndarray | None = None) -> Counts:
    """Return T5's numbers of noise tokens and spans [B], in float32, half to even, whatever is drawn."""
    length = np.maximum(lengths, 2)
    noise = np.round(length.astype(np.float32) * np.float32(amount.rate)).astype(np.int32)
    noise = np.clip(noise, 1, length - 1)
    spans = np.round(noise.astype(np.float32) / np.float32(amount.mean_span_length)).astype(np.int32)
    return noise, np.maximum(spans, 1)


def _compose(u: np.ndarray, total: np.ndarray, parts: np.ndarray) -> np.ndarray:
    """Return random compositions of totals [B] into positive parts, as running sums in one flat array."""
    columns = np.arange(max(int(total.max()), 1))
    ends = _smallest(u[:, : len(columns)], columns < total[:, None] - 1, parts - 1)
    ends[np.arange(len(u)), total - 1] = True
    return np.flatnonzero(ends) % len(columns) + 1


def random_spans_noise_mask(amount: Amount, text: Drawn) -> np.ndarray:
    """Return the mask of T5's span corruption, bool [B,L]: text, noise, text, ..., noise.

    The lengths of text and of noise are random compositions of fixed totals.

    >>> from lm.objectives.denoising import Objective
    >>> u = np.random.default_rng(0).random((1, 1, 8), np.float32)
    >>> objective = Objective("spans", rate=0.4, mean_span_length=2.0)
    >>> mask = random_spans_noise_mask(objective, Drawn(np.array([8]), u, num_sentinels=100))
    >>> int(mask.sum()), int(runs_of(mask).sum()), bool(mask[0, 0])
    (3, 2, False)
    """
    u = text.u[:, 0]
    batch, width = u.shape
    if width < 2:  # a single token is never noise
        return np.zeros(u.shape, bool)
    noise, spans = span_counts(amount, text.lengths)
    visible = np.maximum(text.lengths, 2) - noise
    # none is empty, and there is a sentinel for each
    spans = np.minimum(spans, np.minimum(np.minimum(noise, visible), text.num_sentinels))
    # Noise uses the first numbers and text the last, together at most L - 2, so that none is used twice.
    noise_ends, text_ends = _compose(u, noise, spans), _compose(u[:, ::-1], visible, spans)
    before = np.roll(noise_ends, 1)
    before[np.cumsum(spans) - spans] = 0
    rows = np.repeat(np.arange(batch), spans)
    toggles = np.zeros((batch, width + 1), np.int8)
    toggles[rows, text_ends + before] = 1
    toggles[rows, text_ends + noise_ends] = -1
    return np.cumsum(toggles[:, :-1], axis=1, dtype=np.int8).view(bool)


def prefix_lengths(lengths: np.ndarray, u: np.ndarray) -> np.ndarray:
    """Return prefix lengths, int [B], uniform in [1, L-1]; a single token is all prefix."""
    return 1 + (u * np.maximum(lengths - 1, 0)).astype(np.int32)


def _suffix(_amount: Amount, text: Drawn) -> np.ndarray:
    return np.arange(text.u.shape[2]) >= prefix_lengths(text.lengths, text.u[:, 0, 0])[:, None]


def _whole_words(amount: Amount, text: Drawn) -> np.ndarray:
    """Return a whole-word mask, bool [B,L]: the number drawn where a word begins decides for all of it."""
    return np.take_along_axis(text.u[:, 0], latest(text.starts), axis=1) < amount.rate


def _geometric_spans(amount: Amount, text: Drawn) -> np.ndarray:
    """Return SpanBERT's mask, bool [B,L]: spans from random words on until enough is noise.

    Words begin a span in the order of their random numbers. The last span is cut at the first end of a word
    that reaches the share. A word is noise if one of the spans over it was drawn.
    """
    lengths, u = text.lengths, text.u
    inside = length_mask(lengths, u.shape[2])
    starts = text.starts & inside
    starts[:, 0] = inside[:, 0]
    words = np.count_nonzero(starts, axis=1)
    shape = len(u), int(words.max(initial=1))
    word = np.where(inside, np.cumsum(starts, axis=1) - 1, 0)
    flat = word + shape[1] * np.arange(len(u))[:, None]
    sizes = np.bincount(flat[inside], minlength=shape[0] * shape[1]).reshape(shape)
    among, begin = length_mask(words, shape[1]), np.flatnonzero(starts)
    drawn, counts = np.full(shape, np.inf, np.float32), np.zeros(shape, np.int32)
    drawn[among] = u[:, 0].ravel()[begin]
    counts[among] = geometric(u[:, 1].ravel()[begin])
    first = drawn.copy()  # the number of the first span over each word
    for ahead in range(1, min(LONGEST_SPAN, shape[1])):
        reach = np.where(counts[:, :-ahead] > ahead, drawn[:, :-ahead], np.inf)
        np.minimum(first[:, ahead:], reach, out=first[:, ahead:])
    order = np.argsort(first, axis=1, kind="stable")
    size = np.take_along_axis(sizes, order, axis=1)
    chosen = np.zeros(shape, bool)
    enough = np.maximum(np.round(lengths * amount.rate), 1)[:, None]
    np.put_along_axis(chosen, order, np.cumsum(size, axis=1) - size < enough, axis=1)
    return chosen.ravel()[flat]


def geometric(u: np.ndarray) -> np.ndarray:
    """Turn uniforms into lengths from 1 to LONGEST_SPAN, each 20 % less likely than the one before."""
    stay = 1 - GEOMETRIC
    lengths = 1 + np.log1p(-u * (1 - stay**LONGEST_SPAN)) / math.log(stay)
    return np.minimum(lengths, LONGEST_SPAN).astype(np.int32)


def _infill(amount: Amount, lengths: np.ndarray, u: np.ndarray) -> Infilled:
    """Return BART's text infilling of lengths [B] and uniforms [B,2,L]: each span becomes one mask.

    The share of noise is exact. Span lengths are Poisson, and one of 0 inserts a mask between two tokens; no
    two masks are neighbours. Spans are drawn until they hold the noise. The last one drawn, which is also the
    last in the text, takes what remains of it. Mostly that cuts it, as in BART. It is lengthened if no
    further span fits: a span needs one noise token, and one visible token before the next span, so that
    inputs never outgrow the text. That is rare except for texts of a few tokens (at a rate of 0.15, one in
    20 of 2 to 9 tokens) and rates above mean / (mean + 1).

    BART's code counts words, lets spans overlap, so that less may be hidden than asked for, and adds a mask
    for every empty span.
    """
    rows, _, width = u.shape
    noise = np.clip(np.round(lengths * amount.rate), 1, lengths - 1)
    noise = np.where(lengths > 1, noise, 0).astype(np.int64)
    visible = lengths - noise
    spans = np.searchsorted(_poisson(amount.mean_span_length), u[:, 1], side="right")
    total = np.cumsum(spans, axis=1)
    count = np.minimum(np.minimum((total < noise[:, None]).sum(1) + 1, visible + 1), noise)
    last = np.maximum(count - 1, 0)
    spans[np.arange(rows), last] += noise - total[np.arange(rows), last]
    columns = np.arange(width)
    # before which of the visible tokens a span opens, or at the end
    opens = _smallest(u[:, 0], columns < visible[:, None] + 1, count)
    skipped = np.zeros((rows, width), np.int64)
    skipped[opens] = spans[columns < count[:, None]]
    source = np.minimum(columns + np.cumsum(skipped, axis=1), width - 1)
    shown, hidden = columns < visible[:, None], length_mask(lengths, width)
    hidden[np.nonzero(shown)[0], source[shown]] = False
    masked, keep = np.stack([np.full_like(source, -1), source], axis=2), np.stack([opens, shown], axis=2)
    return Infilled(masked.reshape(rows, -1), keep.reshape(rows, -1), hidden)


def _poisson(mean: float) -> np.ndarray:
    """Return the Poisson distribution function at 0, 1, 2, ..., float64, as far as float32 resolves it."""
    count = np.arange(int(mean + 10 * math.sqrt(mean)) + 10)
    return np.cumsum(np.exp(count * math.log(mean) - mean - [math.lgamma(k + 1) for k in count]))[:-1]


NOISES: dict[str, Noise] = {
    "iid": Noise(lambda amount, text: text.u[:, 0] < amount.rate, ignores=("mean_span_length",)),
    "whole-words": Noise(_whole_words, on_words=True, ignores=("mean_span_length",)),
    "spans": Noise(random_spans_noise_mask, counts=span_counts),
    "geometric-spans": Noise(_geometric_spans, draws=2, on_words=True, ignores=("mean_span_length",)),
    "poisson-spans": Noise(
        lambda amount, text: _infill(amount, text.lengths, text.u).noise, infill=_infill, draws=2
    ),
    "suffix": Noise(
        _suffix,
        counts=lambda amount, lengths, u: (lengths - prefix_lengths(lengths, u), np.ones_like(lengths)),
        per_document=True,
        ignores=("rate", "mean_span_length"),
    ),
    "everything": Noise(
        lambda amount, text: np.ones(text.u[:, 0].shape, bool),
        counts=lambda amount, lengths, u: (lengths, np.ones_like(lengths)),
        per_document=True,
        ignores=("rate", "mean_span_length"),
    ),
}


# --- noise that is dropped where it does not fit


def cap_sentinels(noise: np.ndarray, inside: np.ndarray, u: np.ndarray, num_sentinels: int) -> np.ndarray:
    """Return noise, bool [B,L], with random spans dropped in rows that have fewer sentinels than spans.

    One span fewer is kept than there are sentinels, since the text around k spans has up to k + 1 runs, each
    of which needs a sentinel too. The numbers u at their starts choose the spans: given the mask they are
    uniform for i.i.d. and whole-word noise, and only nearly so for geometric spans.
    """
    starts = runs_of(noise)
    scarce = np.maximum(starts.sum(1), runs_of(inside & ~noise).sum(1)) > num_sentinels
    if scarce.any():
        few = starts[scarce]
        chosen = _smallest(u[scarce], few, np.full(len(few), num_sentinels - 1))
        noise[scarce] &= np.take_along_axis(chosen, latest(few), axis=1)
    return noise


def trim_targets(noise: np.ndarray, inside: np.ndarray, sentinels: bool, room: int) -> np.ndarray:
    """Drop the noise whose targets do not fit in ``room``, which includes EOS and a closing sentinel."""
    targets = noise | runs_of(inside & ~noise) if sentinels else noise
    over = targets.sum(1) > room - 1
    if over.any():
        noise[over] &= np.cumsum(targets[over], axis=1) <= room - 2
    return noise

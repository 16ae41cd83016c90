"""Where the noise falls: lengths [B] and random numbers [B,draws,L] -> bool [B,L], True on noise.

Noise on words also takes where they begin, bool [B,L]. Sources: Raffel et al. 2020 (i.i.d., spans), Devlin et
al. 2019 with the whole-word masking of its released code, Joshi et al. 2020 (SpanBERT), Lewis et al. 2020
(BART).
"""

import math
from typing import Protocol

import numpy as np

# lengths of SpanBERT's spans, whose mean then is 3.8 [Joshi et al. 2020, 3.1; words]
GEOMETRIC, LONGEST = 0.2, 10


class Amount(Protocol):
    """How much noise: what an objective says of it."""

    rate: float
    mean_span_length: float


def within(lengths: np.ndarray, width: int) -> np.ndarray:
    """bool [B,L]: the positions before each row's length."""
    return np.arange(width) < lengths[:, None]


def runs_of(mask: np.ndarray) -> np.ndarray:
    """bool [B,L]: where a run of True begins."""
    starts = mask.copy()
    starts[:, 1:] &= ~mask[:, :-1]
    return starts


def latest(starts: np.ndarray) -> np.ndarray:
    """bool [B,L] -> int [B,L]: the last start at or before each position, 0 where there is none."""
    return np.maximum.accumulate(np.where(starts, np.arange(starts.shape[1]), 0), axis=1)


def ranks(u: np.ndarray) -> np.ndarray:
    """float64 [B,L]: the same order with ties broken by column, so that sorting gives one answer on any
    machine.
    """
    return u + np.arange(u.shape[1]) * (2.0**-24 / u.shape[1])  # float32 draws are multiples of 2^-24


def _smallest(u: np.ndarray, among: np.ndarray, count: np.ndarray) -> np.ndarray:
    """bool [B,L]: of the positions ``among``, the ``count`` [B] with the smallest numbers; there must be as
    many.
    """
    order = ranks(u)
    np.putmask(order, ~among, np.inf)
    bounds = np.sort(order, axis=1)[np.arange(len(u)), count - 1]
    return order <= np.where(count > 0, bounds, -np.inf)[:, None]


def span_counts(amount: Amount, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """lengths [B] -> noise tokens and noise spans [B], the same for every draw: T5's, in float32, half to
    even.
    """
    length = np.maximum(lengths, 2)
    noise = np.round(length.astype(np.float32) * np.float32(amount.rate)).astype(np.int32)
    noise = np.clip(noise, 1, length - 1)
    spans = np.round(noise.astype(np.float32) / np.float32(amount.mean_span_length)).astype(np.int32)
    return noise, np.maximum(spans, 1)


def _compose(u: np.ndarray, total: np.ndarray, parts: np.ndarray) -> np.ndarray:
    """Split each total [B] into positive parts, all compositions being equally likely: the running sums,
    flat.
    """
    places = np.arange(max(int(total.max()), 1))
    ends = _smallest(u[:, : len(places)], places < total[:, None] - 1, parts - 1)
    ends[np.arange(len(u)), total - 1] = True
    return np.flatnonzero(ends) % len(places) + 1


def _spans(amount: Amount, lengths: np.ndarray, u: np.ndarray, num_sentinels: int, starts) -> np.ndarray:
    """Text, noise, text, ..., noise: both kinds of length are random compositions of fixed totals."""
    u = u[:, 0]
    batch, width = u.shape
    if width < 2:  # a single token is never noise
        return np.zeros(u.shape, bool)
    noise, spans = span_counts(amount, lengths)
    kept = np.maximum(lengths, 2) - noise
    # none empty, all told apart
    spans = np.minimum(spans, np.minimum(np.minimum(noise, kept), num_sentinels))
    hidden = _compose(u, noise, spans)  # takes its numbers from the left, the other from the right:
    shown = _compose(u[:, ::-1], kept, spans)  # together they need no more than L - 2
    before = np.roll(hidden, 1)
    before[np.cumsum(spans) - spans] = 0
    rows = np.repeat(np.arange(batch), spans)
    toggles = np.zeros((batch, width + 1), np.int8)
    toggles[rows, shown + before] = 1
    toggles[rows, shown + hidden] = -1
    return np.cumsum(toggles[:, :-1], axis=1, dtype=np.int8).view(bool)


def _suffix(amount, lengths, u, num_sentinels, starts):
    return np.arange(u.shape[2]) >= prefix_lengths(lengths, u[:, 0, 0])[:, None]


def prefix_lengths(lengths: np.ndarray, u: np.ndarray) -> np.ndarray:
    """[B], uniforms [B] -> [B]: uniform in [1, L-1]; a single token is all prefix."""
    return 1 + (u * np.maximum(lengths - 1, 0)).astype(np.int32)


def _whole_words(amount, lengths, u, num_sentinels, starts):
    """The number drawn at the beginning of a word decides for all of it."""
    return np.take_along_axis(u[:, 0], latest(starts), axis=1) < amount.rate


def _geometric_spans(
    amount: Amount, lengths: np.ndarray, u: np.ndarray, num_sentinels: int, starts
) -> np.ndarray:
    """Spans that begin at random words, one after the other, until the noise has its share; the last one is
    cut.

    All words begin a span, in the order of their numbers; one is noise as soon as the first span over it is
    drawn.
    """
    inside = within(lengths, u.shape[2])
    starts = starts & inside
    starts[:, 0] = inside[:, 0]
    words = np.count_nonzero(starts, axis=1)
    shape = len(u), int(words.max(initial=1))
    word = np.where(inside, np.cumsum(starts, axis=1) - 1, 0)
    flat = word + shape[1] * np.arange(len(u))[:, None]
    sizes = np.bincount(flat[inside], minlength=shape[0] * shape[1]).reshape(shape)
    among, begin = within(words, shape[1]), np.flatnonzero(starts)
    drawn, counts = np.full(shape, np.inf, np.float32), np.zeros(shape, np.int32)
    drawn[among] = u[:, 0].ravel()[begin]
    counts[among] = geometric(u[:, 1].ravel()[begin])
    when = drawn.copy()
    for ahead in range(1, min(LONGEST, shape[1])):
        reach = np.where(counts[:, :-ahead] > ahead, drawn[:, :-ahead], np.inf)
        np.minimum(when[:, ahead:], reach, out=when[:, ahead:])
    order = np.argsort(when, axis=1, kind="stable")
    size = np.take_along_axis(sizes, order, axis=1)
    chosen = np.zeros(shape, bool)
    enough = np.maximum(np.round(lengths * amount.rate), 1)[:, None]
    np.put_along_axis(chosen, order, np.cumsum(size, axis=1) - size < enough, axis=1)
    return chosen.ravel()[flat]


def geometric(u: np.ndarray) -> np.ndarray:
    """Uniforms -> lengths from 1 to LONGEST, each GEOMETRIC less likely than the one before."""
    stay = 1 - GEOMETRIC
    return np.minimum(1 + np.log1p(-u * (1 - stay**LONGEST)) / math.log(stay), LONGEST).astype(np.int32)


NOISE = {
    "iid": lambda amount, lengths, u, num_sentinels, starts: u[:, 0] < amount.rate,
    "whole-words": _whole_words,
    "spans": _spans,
    "geometric-spans": _geometric_spans,
    "suffix": _suffix,
    "everything": lambda amount, lengths, u, num_sentinels, starts: np.ones(u[:, 0].shape, bool),
}


def infill(
    amount: Amount, tokens: np.ndarray, lengths: np.ndarray, u: np.ndarray, mask: int
) -> tuple[np.ndarray, np.ndarray]:
    """tokens [B,L] -> [B,2L], and which of them to keep: spans have become one mask each, no two of them
    neighbours.

    Lengths of spans are Poisson, 0 among them: such a span puts a mask between two tokens. The last span is
    cut to the noise that is left, and there are no more spans than tokens of noise, so that inputs never
    outgrow the text.
    """
    rows, width = tokens.shape
    noise = np.where(lengths > 1, np.clip(np.round(lengths * amount.rate), 1, lengths - 1), 0).astype(
        np.int64
    )
    kept = lengths - noise
    spans = np.searchsorted(_poisson(amount.mean_span_length), u[:, 1], side="right")
    total = np.cumsum(spans, axis=1)
    count = np.minimum(np.minimum((total < noise[:, None]).sum(1) + 1, kept + 1), noise)
    last = np.maximum(count - 1, 0)
    spans[np.arange(rows), last] += noise - total[np.arange(rows), last]
    places = np.arange(width)
    # before which of the tokens that stay, or at the end
    opens = _smallest(u[:, 0], places < kept[:, None] + 1, count)
    skipped = np.zeros((rows, width), np.int64)
    skipped[opens] = spans[places < count[:, None]]
    source = np.minimum(places + np.cumsum(skipped, axis=1), width - 1)
    shown = np.stack([np.full_like(tokens, mask), np.take_along_axis(tokens, source, axis=1)], axis=2)
    keep = np.stack([opens, places < kept[:, None]], axis=2)
    return shown.reshape(rows, -1), keep.reshape(rows, -1)


def _poisson(mean: float) -> np.ndarray:
    """float64: the probability of at most 0, 1, 2, ...; as far as float32 draws tell."""
    count = np.arange(int(mean + 10 * math.sqrt(mean)) + 10)
    return np.cumsum(np.exp(count * math.log(mean) - mean - [math.lgamma(k + 1) for k in count]))[:-1]


def tell_apart(noise: np.ndarray, inside: np.ndarray, u: np.ndarray, num_sentinels: int) -> np.ndarray:
    """Keep the noise of rows with enough sentinels; elsewhere keep random runs, one fewer than there are
    sentinels.

    Among noise tokens u is uniform whatever the mask, so that it can choose; k runs leave at most k + 1 runs
    of text.
    """
    starts = runs_of(noise)
    scarce = np.maximum(starts.sum(1), runs_of(inside & ~noise).sum(1)) > num_sentinels
    if scarce.any():
        few = starts[scarce]
        keep = _smallest(u[scarce], few, np.full(len(few), num_sentinels - 1))
        noise[scarce] &= np.take_along_axis(keep, latest(few), axis=1)
    return noise


def fit(noise: np.ndarray, inside: np.ndarray, sentinels: bool, room: int) -> np.ndarray:
    """Drop the noise that does not fit in ``room``, less one sentinel for the text after it and one EOS."""
    said = noise | runs_of(inside & ~noise) if sentinels else noise
    over = said.sum(1) > room - 1
    if over.any():
        noise[over] &= np.cumsum(said[over], axis=1) <= room - 2
    return noise

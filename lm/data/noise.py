"""Where the noise falls: lengths [B] and random numbers [B,L] -> bool [B,L], True on noise."""

from typing import Protocol

import numpy as np


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


def ranks(u: np.ndarray) -> np.ndarray:
    """float64 [B,L]: the same order with ties broken by column, so that sorting gives one answer on any machine."""
    return u + np.arange(u.shape[1]) * (2.0**-24 / u.shape[1])  # float32 draws are multiples of 2^-24


def _smallest(u: np.ndarray, among: np.ndarray, count: np.ndarray) -> np.ndarray:
    """bool [B,L]: of the positions ``among``, the ``count`` [B] with the smallest numbers; there must be as many."""
    order = ranks(u)
    np.putmask(order, ~among, np.inf)
    bounds = np.sort(order, axis=1)[np.arange(len(u)), count - 1]
    return order <= np.where(count > 0, bounds, -np.inf)[:, None]


def span_counts(amount: Amount, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """lengths [B] -> noise tokens and noise spans [B], the same for every draw: T5's, in float32, half to even."""
    length = np.maximum(lengths, 2)
    noise = np.round(length.astype(np.float32) * np.float32(amount.rate)).astype(np.int32)
    noise = np.clip(noise, 1, length - 1)
    spans = np.round(noise.astype(np.float32) / np.float32(amount.mean_span_length)).astype(np.int32)
    return noise, np.maximum(spans, 1)


def _compose(u: np.ndarray, total: np.ndarray, parts: np.ndarray) -> np.ndarray:
    """Split each total [B] into positive parts, all compositions being equally likely: the running sums, flat."""
    places = np.arange(max(int(total.max()), 1))
    ends = _smallest(u[:, : len(places)], places < total[:, None] - 1, parts - 1)
    ends[np.arange(len(u)), total - 1] = True
    return np.flatnonzero(ends) % len(places) + 1


def _spans(amount: Amount, lengths: np.ndarray, u: np.ndarray, num_sentinels: int) -> np.ndarray:
    """Text, noise, text, ..., noise: both kinds of length are random compositions of fixed totals."""
    batch, width = u.shape
    if width < 2:  # a single token is never noise
        return np.zeros(u.shape, bool)
    noise, spans = span_counts(amount, lengths)
    kept = np.maximum(lengths, 2) - noise
    spans = np.minimum(spans, np.minimum(np.minimum(noise, kept), num_sentinels))  # none empty, all told apart
    hidden = _compose(u, noise, spans)  # takes its numbers from the left, the other from the right:
    shown = _compose(u[:, ::-1], kept, spans)  # together they need no more than L - 2
    before = np.roll(hidden, 1)
    before[np.cumsum(spans) - spans] = 0
    rows = np.repeat(np.arange(batch), spans)
    toggles = np.zeros((batch, width + 1), np.int8)
    toggles[rows, shown + before] = 1
    toggles[rows, shown + hidden] = -1
    return np.cumsum(toggles[:, :-1], axis=1, dtype=np.int8).view(bool)


def _suffix(amount: Amount, lengths: np.ndarray, u: np.ndarray, num_sentinels: int) -> np.ndarray:
    return np.arange(u.shape[1]) >= prefix_lengths(lengths, u[:, 0])[:, None]


def prefix_lengths(lengths: np.ndarray, u: np.ndarray) -> np.ndarray:
    """[B], uniforms [B] -> [B]: uniform in [1, L-1]; a single token is all prefix."""
    return 1 + (u * np.maximum(lengths - 1, 0)).astype(np.int32)


NOISE = {
    "iid": lambda amount, lengths, u, num_sentinels: u < amount.rate,
    "spans": _spans,
    "suffix": _suffix,
    "everything": lambda amount, lengths, u, num_sentinels: np.ones(u.shape, bool),
}


def tell_apart(noise: np.ndarray, inside: np.ndarray, u: np.ndarray, num_sentinels: int) -> np.ndarray:
    """Keep the noise of rows with enough sentinels; elsewhere keep random runs, one fewer than there are sentinels.

    Among noise tokens u is uniform whatever the mask, so that it can choose; k runs leave at most k + 1 runs of text.
    """
    starts = runs_of(noise)
    scarce = np.maximum(starts.sum(1), runs_of(inside & ~noise).sum(1)) > num_sentinels
    if scarce.any():
        few = starts[scarce]
        keep = _smallest(u[scarce], few, np.full(len(few), num_sentinels - 1))
        start = np.maximum.accumulate(np.where(few, np.arange(few.shape[1]), 0), axis=1)
        noise[scarce] &= np.take_along_axis(keep, start, axis=1)
    return noise


def fit(noise: np.ndarray, inside: np.ndarray, sentinels: bool, room: int) -> np.ndarray:
    """Drop the noise that does not fit in ``room``, less one sentinel for the text after it and one EOS."""
    said = noise | runs_of(inside & ~noise) if sentinels else noise
    over = said.sum(1) > room - 1
    if over.any():
        noise[over] &= np.cumsum(said[over], axis=1) <= room - 2
    return noise

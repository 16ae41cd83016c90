"""Corruption masks: which tokens of a text are noise. A new kind is an entry of NOISES and its NoiseName.

Sources: Raffel et al. 2020 (i.i.d., spans; T5's code where the paper is silent), Devlin et al. 2019 with the
whole-word masking of its code, Joshi et al. 2020 (SpanBERT), Lewis et al. 2020 (BART).

Shapes: B texts of at most L tokens, R uniform random numbers per token. A span is a run of consecutive noise
tokens. Uniform numbers are in [0, 1).
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

import numpy as np

# SpanBERT's geometric distribution of span lengths, cut off at 10 words: mean 3.8 [Joshi et al. 2020, 3.1].
GEOMETRIC_P, LONGEST_SPAN = 0.2, 10

# A Poisson span may have length 0: a mask is inserted and no token is hidden.
NoiseName = Literal["iid", "whole-words", "spans", "geometric-spans", "poisson-spans", "suffix", "everything"]


class CorruptionConfig(Protocol):
    """The settings of an objective that say how much of a text is corrupted."""

    @property
    def rate(self) -> float: ...
    @property
    def mean_span_length(self) -> float: ...


class CorruptionInputs(NamedTuple):
    """What corruption masks are drawn from: lengths of texts, and random numbers."""

    lengths: np.ndarray  # int [B]
    uniforms: np.ndarray  # float32 [B,R,L]
    num_sentinels: int  # at most so many spans can be replaced
    word_starts: np.ndarray | None = None  # bool [B,L]; only for noise with ``needs_word_starts``


class Infilling(NamedTuple):
    """Texts in which each noise span, of any length, is replaced by one mask; [B,2L] before selection."""

    source: np.ndarray  # int [B,2L]: the position in the text that is shown; -1: a mask
    keep: np.ndarray  # bool [B,2L]: which of these entries the inputs consist of
    noise: np.ndarray  # bool [B,L]: the tokens of the text that are hidden


class NoiseCounts(NamedTuple):
    """How much of each text is noise, int [B] each."""

    tokens: np.ndarray
    spans: np.ndarray


class Noise(NamedTuple):
    """A kind of noise: the function that draws its corruption mask, and facts about it."""

    mask: Callable[[CorruptionConfig, CorruptionInputs], np.ndarray]  # returns bool [B,L], True on noise
    # (config, lengths [B], uniforms [B,R,L]) -> Infilling, for noise that also inserts masks
    infill: Callable[[CorruptionConfig, np.ndarray, np.ndarray], Infilling] | None = None
    # (config, lengths [B], first uniforms [B]) -> NoiseCounts; None where more of the draw decides
    counts: Callable[[CorruptionConfig, np.ndarray, np.ndarray], NoiseCounts] | None = None
    uniforms_per_token: int = 1  # R
    needs_word_starts: bool = False
    per_document: bool = False  # splits each document in two, so documents are not concatenated
    unused_settings: tuple[str, ...] = ()  # of ``CorruptionConfig``; changing them is an error

    @property
    def has_bounded_targets(self) -> bool:
        """Return whether inputs and targets are known to fit before the noise is drawn.

        Either the first random number determines the number of noise tokens and spans, or there are no more
        of them than the text has tokens. All other noise is drawn first and then reduced until it fits.
        """
        return self.infill is not None or self.counts is not None


def length_mask(lengths: np.ndarray, width: int) -> np.ndarray:
    """Return bool [B,width]: which positions lie before each row's length."""
    return np.arange(width, dtype=lengths.dtype) < lengths[:, None]  # 3 x as fast as mixing two types


def run_starts(mask: np.ndarray) -> np.ndarray:
    """Return bool [B,L]: the first position of each run of True."""
    starts = mask.copy()
    starts[:, 1:] &= ~mask[:, :-1]
    return starts


def last_start(starts: np.ndarray) -> np.ndarray:
    """Return int [B,L]: the last start at or before each position; 0 where there is none."""
    return np.maximum.accumulate(np.where(starts, np.arange(starts.shape[1]), 0), axis=1)


def break_ties(uniforms: np.ndarray) -> np.ndarray:
    """Return float64 [B,L]: the same numbers, where equal ones grow slightly from left to right.

    Every machine then sorts alike.
    """
    return uniforms + np.arange(uniforms.shape[1]) * (2.0**-24 / uniforms.shape[1])  # multiples of 2^-24


def _choose_smallest(uniforms: np.ndarray, candidates: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Return bool [B,L]: the ``count`` [B] positions with the smallest numbers, of ``candidates`` [B,L]."""
    order = break_ties(uniforms)
    np.putmask(order, ~candidates, np.inf)
    bounds = np.sort(order, axis=1)[np.arange(len(order)), count - 1]
    return order <= np.where(count > 0, bounds, -np.inf)[:, None]


# --- masks


def span_counts(
    config: CorruptionConfig, lengths: np.ndarray, _first_uniforms: np.ndarray | None = None
) -> NoiseCounts:
    """Return T5's numbers of noise tokens and spans [B], in float32, half to even, whatever is drawn."""
    length = np.maximum(lengths, 2)
    noise = np.round(length.astype(np.float32) * np.float32(config.rate)).astype(np.int32)
    noise = np.clip(noise, 1, length - 1)
    spans = np.round(noise.astype(np.float32) / np.float32(config.mean_span_length)).astype(np.int32)
    return NoiseCounts(noise, np.maximum(spans, 1))


def _random_part_ends(uniforms: np.ndarray, total: np.ndarray, parts: np.ndarray) -> np.ndarray:
    """Return the end of each part of randomly split totals [B], one text after the other, int [sum of parts].

    A total is split into ``parts`` [B] lengths of at least 1, all splits equally likely (a composition).
    """
    columns = np.arange(max(int(total.max()), 1))
    ends = _choose_smallest(uniforms[:, : len(columns)], columns < total[:, None] - 1, parts - 1)
    ends[np.arange(len(ends)), total - 1] = True
    return np.flatnonzero(ends) % len(columns) + 1


def random_spans_noise_mask(config: CorruptionConfig, texts: CorruptionInputs) -> np.ndarray:
    """Return the mask of T5's span corruption, bool [B,L]: text, noise, text, ..., noise.

    The numbers of noise tokens and of spans are fixed (``span_counts``). Their lengths, and those of the text
    between them, are random.

    >>> from lm.objectives.denoising import Objective
    >>> u = np.random.default_rng(0).random((1, 1, 8), np.float32)
    >>> objective = Objective("spans", rate=0.4, mean_span_length=2.0)
    >>> mask = random_spans_noise_mask(objective, CorruptionInputs(np.array([8]), u, num_sentinels=100))
    >>> int(mask.sum()), int(run_starts(mask).sum()), bool(mask[0, 0])
    (3, 2, False)
    """
    uniforms = texts.uniforms[:, 0]
    batch, width = uniforms.shape
    if width < 2:  # a single token is never noise
        return np.zeros(uniforms.shape, bool)
    noise, spans = span_counts(config, texts.lengths)
    visible = np.maximum(texts.lengths, 2) - noise
    # none is empty, and there is a sentinel for each
    spans = np.minimum(spans, np.minimum(np.minimum(noise, visible), texts.num_sentinels))
    # Noise uses the first numbers and text the last, together at most L - 2, so that none is used twice.
    noise_ends = _random_part_ends(uniforms, noise, spans)
    text_ends = _random_part_ends(uniforms[:, ::-1], visible, spans)
    noise_starts = np.roll(noise_ends, 1)  # counted in noise tokens alone, as the ends are
    noise_starts[np.cumsum(spans) - spans] = 0
    rows = np.repeat(np.arange(batch), spans)
    steps = np.zeros((batch, width + 1), np.int8)  # +1 where noise begins, -1 where it ends
    steps[rows, text_ends + noise_starts] = 1
    steps[rows, text_ends + noise_ends] = -1
    return np.cumsum(steps[:, :-1], axis=1, dtype=np.int8).view(bool)


def prefix_lengths(lengths: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """Return prefix lengths, int [B], uniform in [1, L-1]; a single token is all prefix."""
    return 1 + (uniforms * np.maximum(lengths - 1, 0)).astype(np.int32)


def _iid_mask(config: CorruptionConfig, texts: CorruptionInputs) -> np.ndarray:
    return texts.uniforms[:, 0] < config.rate


def _suffix_mask(_config: CorruptionConfig, texts: CorruptionInputs) -> np.ndarray:
    prefixes = prefix_lengths(texts.lengths, texts.uniforms[:, 0, 0])
    return np.arange(texts.uniforms.shape[2]) >= prefixes[:, None]


def _suffix_counts(_config: CorruptionConfig, lengths: np.ndarray, first_uniforms: np.ndarray) -> NoiseCounts:
    return NoiseCounts(lengths - prefix_lengths(lengths, first_uniforms), np.ones_like(lengths))


def _everything_mask(_config: CorruptionConfig, texts: CorruptionInputs) -> np.ndarray:
    return np.ones(texts.uniforms[:, 0].shape, bool)


def _everything_counts(
    _config: CorruptionConfig, lengths: np.ndarray, _first_uniforms: np.ndarray
) -> NoiseCounts:
    return NoiseCounts(lengths, np.ones_like(lengths))


def _whole_words_mask(config: CorruptionConfig, texts: CorruptionInputs) -> np.ndarray:
    """Return a whole-word mask, bool [B,L]: the number drawn where a word begins decides for all of it."""
    assert texts.word_starts is not None
    return np.take_along_axis(texts.uniforms[:, 0], last_start(texts.word_starts), axis=1) < config.rate


def _geometric_spans_mask(config: CorruptionConfig, texts: CorruptionInputs) -> np.ndarray:
    """Return SpanBERT's mask, bool [B,L]: spans of whole words until ``rate`` of the tokens is noise.

    Each word has a number that orders the spans, and a length in words for the span that begins there. A word
    is reached by the first span, in that order, that covers it. Words become noise as they are reached. So
    the last span is cut at the first word whose end reaches the wanted number of tokens.
    """
    assert texts.word_starts is not None
    lengths, uniforms = texts.lengths, texts.uniforms
    is_token = length_mask(lengths, uniforms.shape[2])
    starts = texts.word_starts & is_token
    starts[:, 0] = is_token[:, 0]
    num_words = np.count_nonzero(starts, axis=1)
    shape = len(uniforms), int(num_words.max(initial=1))  # [B,words]
    word_of_token = np.where(is_token, np.cumsum(starts, axis=1) - 1, 0)
    flat_word = word_of_token + shape[1] * np.arange(len(uniforms))[:, None]
    word_sizes = np.bincount(flat_word[is_token], minlength=shape[0] * shape[1]).reshape(shape)
    is_word, first_tokens = length_mask(num_words, shape[1]), np.flatnonzero(starts)
    rank, span_words = np.full(shape, np.inf, np.float32), np.zeros(shape, np.int32)
    rank[is_word] = uniforms[:, 0].ravel()[first_tokens]
    span_words[is_word] = geometric_lengths(uniforms[:, 1].ravel()[first_tokens])
    reached_at = rank.copy()  # the rank of the first span over each word
    for ahead in range(1, min(LONGEST_SPAN, shape[1])):
        rank_if_covered = np.where(span_words[:, :-ahead] > ahead, rank[:, :-ahead], np.inf)
        np.minimum(reached_at[:, ahead:], rank_if_covered, out=reached_at[:, ahead:])
    order = np.argsort(reached_at, axis=1, kind="stable")
    ordered_sizes = np.take_along_axis(word_sizes, order, axis=1)
    wanted = np.maximum(np.round(lengths * config.rate), 1)[:, None]
    noise_words = np.zeros(shape, bool)
    np.put_along_axis(noise_words, order, np.cumsum(ordered_sizes, axis=1) - ordered_sizes < wanted, axis=1)
    return noise_words.ravel()[flat_word]


def geometric_lengths(uniforms: np.ndarray) -> np.ndarray:
    """Return lengths from 1 to LONGEST_SPAN, each 20 % less likely than the one before, from uniforms."""
    stay = 1 - GEOMETRIC_P
    lengths = 1 + np.log1p(-uniforms * (1 - stay**LONGEST_SPAN)) / math.log(stay)
    return np.minimum(lengths, LONGEST_SPAN).astype(np.int32)


def _infill(config: CorruptionConfig, lengths: np.ndarray, uniforms: np.ndarray) -> Infilling:
    """Return BART's text infilling of texts of these lengths [B]: each noise span becomes one mask.

    The number of noise tokens is exact. Span lengths are Poisson, and one of 0 inserts a mask between two
    tokens; no two masks are neighbours. Spans are drawn until they hold all noise tokens. The last one drawn,
    which is also the last in the text, takes what remains of them. Mostly that cuts it, as in BART. It is
    lengthened if no further span fits: a span needs one noise token, and one visible token before the next
    span, so that inputs never outgrow the text. That is rare except for texts of a few tokens (at a rate of
    0.15, one in 20 of 2 to 9 tokens) and rates above mean / (mean + 1).

    BART's code counts words, lets spans overlap, so that less may be hidden than asked for, and adds a mask
    for every empty span.
    """
    rows, _, width = uniforms.shape
    noise = np.clip(np.round(lengths * config.rate), 1, lengths - 1)
    noise = np.where(lengths > 1, noise, 0).astype(np.int64)
    visible = lengths - noise
    spans = np.searchsorted(_poisson_cdf(config.mean_span_length), uniforms[:, 1], side="right")  # lengths
    total = np.cumsum(spans, axis=1)
    count = np.minimum(np.minimum((total < noise[:, None]).sum(1) + 1, visible + 1), noise)
    last = np.maximum(count - 1, 0)
    spans[np.arange(rows), last] += noise - total[np.arange(rows), last]
    columns = np.arange(width)
    # before which of the visible tokens a span lies; column ``visible``: at the end
    has_span = _choose_smallest(uniforms[:, 0], columns < visible[:, None] + 1, count)
    skipped = np.zeros((rows, width), np.int64)
    skipped[has_span] = spans[columns < count[:, None]]
    source = np.minimum(columns + np.cumsum(skipped, axis=1), width - 1)
    is_visible, hidden = columns < visible[:, None], length_mask(lengths, width)
    hidden[np.nonzero(is_visible)[0], source[is_visible]] = False
    # Before each visible token there is room for a mask.
    sources, keep = np.stack([np.full_like(source, -1), source], axis=2), np.stack([has_span, is_visible], 2)
    return Infilling(sources.reshape(rows, -1), keep.reshape(rows, -1), hidden)


def _infill_mask(config: CorruptionConfig, texts: CorruptionInputs) -> np.ndarray:
    return _infill(config, texts.lengths, texts.uniforms).noise


def _poisson_cdf(mean: float) -> np.ndarray:
    """Return the Poisson distribution function at 0, 1, 2, ..., float64, as far as float32 resolves it."""
    count = np.arange(int(mean + 10 * math.sqrt(mean)) + 10)
    return np.cumsum(np.exp(count * math.log(mean) - mean - [math.lgamma(k + 1) for k in count]))[:-1]


NOISES: dict[str, Noise] = {
    "iid": Noise(_iid_mask, unused_settings=("mean_span_length",)),
    "whole-words": Noise(_whole_words_mask, needs_word_starts=True, unused_settings=("mean_span_length",)),
    "spans": Noise(random_spans_noise_mask, counts=span_counts),
    "geometric-spans": Noise(
        _geometric_spans_mask,
        uniforms_per_token=2,
        needs_word_starts=True,
        unused_settings=("mean_span_length",),
    ),
    "poisson-spans": Noise(_infill_mask, infill=_infill, uniforms_per_token=2),
    "suffix": Noise(
        _suffix_mask,
        counts=_suffix_counts,
        per_document=True,
        unused_settings=("rate", "mean_span_length"),
    ),
    "everything": Noise(
        _everything_mask,
        counts=_everything_counts,
        per_document=True,
        unused_settings=("rate", "mean_span_length"),
    ),
}


# --- reducing noise until it fits


def limit_spans(
    noise: np.ndarray, is_token: np.ndarray, uniforms: np.ndarray, num_sentinels: int
) -> np.ndarray:
    """Return noise, bool [B,L], with random spans dropped in texts that have more spans than sentinels.

    One span fewer is kept than there are sentinels, since the text around k spans has up to k + 1 runs, each
    of which needs a sentinel too. The spans with the smallest uniforms at their starts are kept. Given the
    mask these numbers are uniform for i.i.d. and whole-word noise, and only nearly so for geometric spans.
    """
    starts = run_starts(noise)
    has_too_many = np.maximum(starts.sum(1), run_starts(is_token & ~noise).sum(1)) > num_sentinels
    if has_too_many.any():
        starts = starts[has_too_many]
        kept = _choose_smallest(uniforms[has_too_many], starts, np.full(len(starts), num_sentinels - 1))
        noise[has_too_many] &= np.take_along_axis(kept, last_start(starts), axis=1)
    return noise


def trim_targets(
    noise: np.ndarray, is_token: np.ndarray, has_sentinels: bool, max_targets: int
) -> np.ndarray:
    """Return noise, bool [B,L], without its end where targets would be longer than ``max_targets``.

    Targets also have an EOS and, with sentinels, a closing one.
    """
    is_target = noise | run_starts(is_token & ~noise) if has_sentinels else noise
    is_too_long = is_target.sum(1) > max_targets - 1
    if is_too_long.any():
        noise[is_too_long] &= np.cumsum(is_target[is_too_long], axis=1) <= max_targets - 2
    return noise

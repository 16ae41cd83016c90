"""Corruption masks: which tokens of a text are noise. A new kind is an entry of NOISES and its NoiseName.

Sources: Raffel et al. 2020 (i.i.d., spans; T5's code where the paper is silent), Devlin et al. 2019 with the
whole-word masking of its code, Joshi et al. 2020 (SpanBERT), Lewis et al. 2020 (BART), Song et al. 2019
(MASS: a single span), Bavarian et al. 2022 (fill-in-the-middle: the middle of a document), Tay et al. 2022
(UL2: a suffix with a fixed share of the text), Du et al. 2022 (GLM: a suffix of half the text or more), Sahoo
et al. 2024 (masked diffusion: a rate per text), Hoogeboom et al. 2022 (any-order autoregression: a count per
text), Levine et al. 2021 (PMI masking: words that belong together are hidden together).

Shapes: B texts of at most L tokens, R uniform random numbers per token. A span is a run of consecutive noise
tokens. Uniform numbers are in [0, 1).
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

import numpy as np

# SpanBERT's geometric distribution of span lengths, cut off at 10 words: mean 3.8 [Joshi et al. 2020, 3.1].
GEOMETRIC_P, LONGEST_SPAN = 0.2, 10

NoiseName = Literal[
    # no token is hidden
    "none",  # inputs are the text, in another order if ``Objective.sentences`` says so
    "random-text",  # the whole text is replaced by random tokens
    # tokens are hidden one by one
    "iid",  # each with the probability ``rate``
    "whole-words",  # all tokens of a word or none
    "collocations",  # likewise, and all words of a phrase that mostly occurs as one
    "uniform-rate",  # each with a probability that is drawn for the text
    "uniform-count",  # as many as is drawn for the text
    # spans are hidden
    "spans",  # a text begins with visible tokens and ends with a span
    "rolled-spans",  # such spans, rolled by a random offset: all positions are equally likely to be noise
    "geometric-spans",  # of whole words, with lengths of SpanBERT's distribution
    "poisson-spans",  # each becomes one mask token; a span of length 0 inserts one and hides nothing (BART)
    "single-span",  # with the share ``rate`` of the tokens
    "middle",  # between two random positions
    "suffix",  # from a random position on
    "suffix-share",  # with the share ``rate`` of the tokens
    "everything",
]


class CorruptionConfig(Protocol):
    """The settings of an objective that say how much of a text is corrupted."""

    @property
    def rate(self) -> float: ...
    @property
    def max_rate(self) -> float | None: ...
    @property
    def mean_span_length(self) -> float: ...


class CorruptionInputs(NamedTuple):
    """The arguments of a noise's ``mask``: lengths of texts, and random numbers."""

    lengths: np.ndarray  # int [B]
    uniforms: np.ndarray  # float32 [B,R,L]
    num_sentinels: int  # number of sentinels that may replace noise spans
    # bool [B,L]: the first token of each word or, with ``needs_collocations``, of each collocation and of
    # each word outside of one; only for noise with ``needs_word_starts``
    word_starts: np.ndarray | None = None
    # bool [B,L]: the first token of each sentence but the first of a text; only for noise with
    # ``needs_sentence_starts``
    sentence_starts: np.ndarray | None = None


class Infilling(NamedTuple):
    """Infilled texts: each noise span becomes one mask token, also a span of length 0.

    A text is stored as 2L slots, a slot for a mask before the slot of each token.
    """

    source: np.ndarray  # int [B,2L]: the position in the text of each slot's token; -1: a mask token
    keep: np.ndarray  # bool [B,2L]: which slots make up the inputs
    noise: np.ndarray  # bool [B,L]: the tokens of the text that are hidden


class NoiseCounts(NamedTuple):
    """The numbers of noise tokens, of noise spans, and of visible spans, of each text.

    The number of noise tokens is exact. The numbers of spans are upper bounds: packing reserves that room.
    """

    num_noise_tokens: np.ndarray  # int [B]
    num_noise_spans: np.ndarray  # int [B]; without meaning where there are no noise tokens
    num_visible_spans: np.ndarray  # int [B]


class Noise(NamedTuple):
    """A kind of noise: the function that draws its corruption mask, and facts about it."""

    # (config, texts) -> bool [B,L], True on noise; what it holds behind the end of a text is ignored
    mask: Callable[[CorruptionConfig, CorruptionInputs], np.ndarray]
    # (config, lengths [B], uniforms [B,R,L]) -> Infilling, for noise that also inserts mask tokens
    infill: Callable[[CorruptionConfig, np.ndarray, np.ndarray], Infilling] | None = None
    # (config, lengths [B], length_uniforms [B]) -> NoiseCounts, for noise whose counts depend on at most one
    # random number per text; None: for all other noise. Packing draws that number first, since it needs the
    # lengths of corrupted texts, and the mask then gets it as ``uniforms[:, 0, 0]``
    counts: Callable[[CorruptionConfig, np.ndarray, np.ndarray], NoiseCounts] | None = None
    uniforms_per_token: int = 1  # R
    needs_word_starts: bool = False
    needs_sentence_starts: bool = False
    # words of a collocation are treated as one; ``uniforms[:, 1]`` decides between collocations that overlap
    needs_collocations: bool = False
    # each text should come from one document, since this noise splits a text into parts or hides it all. A
    # causal LM is the exception: it hides everything, and its documents may still be concatenated
    # (``Objective.concatenates``)
    per_document: bool = False
    # the whole text is replaced by random tokens, which ``uniforms[:, 0]`` draw, and inputs and targets are
    # made of these (the copying task)
    replaces_text: bool = False
    hides_tokens: bool = True
    # ``compute_lengths`` makes texts so short that their targets too have at most ``inputs_length`` tokens
    targets_limited_to_inputs_length: bool = False
    # (lengths [B], uniforms [B,R,L]) -> float32 [B], the weight in the loss of each noise token of a text, so
    # that the loss estimates an upper bound of the text's negative log-likelihood. None: the weight is 1.
    # With weights, ``uniforms[:, 1, 0]`` must set how much of a text is noise. It is not drawn independently
    # for each row: the rows of a batch cover [0, 1) evenly (``data.batches.evenly_spread_uniforms``), and the
    # loss has less variance
    loss_weights: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None
    # settings of ``CorruptionConfig`` that it does not read; changing them is an error
    ignores: tuple[str, ...] = ()

    @property
    def bounds_likelihood(self) -> bool:
        """Return whether the loss estimates an upper bound of the text's negative log-likelihood."""
        return self.loss_weights is not None

    @property
    def target_room_follows_rate(self) -> bool:
        """Return whether ``compute_lengths`` estimates the room for targets from ``rate``.

        Noise beyond that room is removed.
        """
        return self.hides_tokens and not self.fits_without_trimming and not self.bounds_likelihood

    @property
    def fits_without_trimming(self) -> bool:
        """Return whether inputs and targets always fit, so that noise is not reduced after it is drawn.

        There are two such cases. With ``counts`` the lengths are known before the noise is drawn. With
        ``infill`` neither inputs nor targets are longer than the text. All other noise is drawn first and
        then reduced by ``limit_spans`` and ``trim_targets``.
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
    """Return float64 [B,L]: the numbers plus a tiny increment by position, so that ties break left to right.

    Every machine then sorts them in the same order.
    """
    smallest_step = 2.0**-24  # of uniforms, which are multiples of it
    return uniforms + np.arange(uniforms.shape[1]) * (smallest_step / uniforms.shape[1])


def _choose_smallest(uniforms: np.ndarray, candidates: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Return bool [B,L]: the ``count`` [B] of the ``candidates`` [B,L] with the smallest uniforms.

    No row may have fewer candidates than its count.
    """
    order = break_ties(uniforms)
    np.putmask(order, ~candidates, np.inf)
    # In each row the count-th smallest number: all up to it are chosen. For a count of 0 the index is -1; the
    # last line replaces that threshold.
    thresholds = np.sort(order, axis=1)[np.arange(len(order)), count - 1]
    return order <= np.where(count > 0, thresholds, -np.inf)[:, None]


# --- masks


def span_counts(config: CorruptionConfig, lengths: np.ndarray) -> NoiseCounts:
    """Return T5's numbers of noise tokens and of spans: as many noise spans as visible ones.

    They depend on no random number, and are computed in float32 and rounded half to even, as in T5's code.
    The number of spans is not yet limited to the tokens that there are. A text of less than two tokens is
    treated as one of two: its second token, which lies outside of the text, is the noise.
    """
    length = np.maximum(lengths, 2)
    num_noise_tokens = np.round(length.astype(np.float32) * np.float32(config.rate)).astype(np.int32)
    num_noise_tokens = np.clip(num_noise_tokens, 1, length - 1)
    num_spans = num_noise_tokens.astype(np.float32) / np.float32(config.mean_span_length)
    num_spans = np.maximum(np.round(num_spans).astype(np.int32), 1)
    return NoiseCounts(num_noise_tokens, num_spans, num_spans)


def _span_counts_of_text(
    config: CorruptionConfig, lengths: np.ndarray, _length_uniforms: np.ndarray
) -> NoiseCounts:
    """Return ``span_counts``, but no noise in texts of 0 or 1 tokens, which are visible."""
    num_noise_tokens, num_spans, num_visible_spans = span_counts(config, lengths)
    is_short = lengths < 2
    return NoiseCounts(
        np.where(is_short, 0, num_noise_tokens), num_spans, np.where(is_short, lengths, num_visible_spans)
    )


def _random_segment_ends(uniforms: np.ndarray, total: np.ndarray, num_segments: np.ndarray) -> np.ndarray:
    """Split ``total[b]`` tokens at random into ``num_segments[b]`` segments; return the end of each segment.

    The ends are flattened over b, int [sum of num_segments]. Segments have at least one token, and all splits
    are equally likely (a random composition of an integer).
    """
    columns = np.arange(max(int(total.max()), 1))
    ends = _choose_smallest(uniforms[:, : len(columns)], columns < total[:, None] - 1, num_segments - 1)
    ends[np.arange(len(ends)), total - 1] = True
    return np.nonzero(ends)[1] + 1


def random_spans_noise_mask(config: CorruptionConfig, texts: CorruptionInputs) -> np.ndarray:
    """Return the mask of T5's span corruption, bool [B,L]: visible text, noise, visible text, ..., noise.

    The number of noise tokens is that of ``span_counts``. So is the number of noise spans, unless there are
    fewer noise tokens, visible tokens or sentinels than that. The lengths of the noise spans and of the
    visible spans between them are random.

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
    num_noise_tokens, num_spans, _ = span_counts(config, texts.lengths)
    num_visible_tokens = np.maximum(texts.lengths, 2) - num_noise_tokens
    # No noise span and no visible span is empty, and there is a sentinel for each noise span.
    most_spans = np.minimum(np.minimum(num_noise_tokens, num_visible_tokens), texts.num_sentinels)
    num_spans = np.minimum(num_spans, most_spans)
    # Noise reads uniforms from the left, visible text from the right. Together they read at most L - 2, so
    # none is read twice.
    noise_ends = _random_segment_ends(uniforms, num_noise_tokens, num_spans)
    nonnoise_ends = _random_segment_ends(uniforms[:, ::-1], num_visible_tokens, num_spans)
    # A span begins where the one before it ends, counted in noise tokens; the first of a text begins at 0.
    noise_starts = np.roll(noise_ends, 1)
    first_spans = np.cumsum(num_spans) - num_spans  # their indices among the spans of all texts
    noise_starts[first_spans] = 0
    rows = np.repeat(np.arange(batch), num_spans)
    steps = np.zeros((batch, width + 1), np.int8)  # +1 where noise begins, -1 where it ends
    steps[rows, nonnoise_ends + noise_starts] = 1
    steps[rows, nonnoise_ends + noise_ends] = -1
    return np.cumsum(steps[:, :-1], axis=1, dtype=np.int8).view(bool)


def _rolled_spans_mask(config: CorruptionConfig, texts: CorruptionInputs) -> np.ndarray:
    """Return the mask of "spans" rolled to the right by a random number of tokens, bool [B,L].

    What leaves the text at its right end enters at its left, as with ``random_roll`` in T5's code. It may cut
    a span of noise, or of visible text, in two.
    """
    sentinels = max(texts.num_sentinels - 1, 1)  # one for the span that is cut in two
    spans = random_spans_noise_mask(config, texts._replace(num_sentinels=sentinels))
    lengths = np.maximum(texts.lengths, 1)[:, None]
    offsets = (texts.uniforms[:, 1, :1] * lengths).astype(np.int64)
    positions = np.arange(spans.shape[1])
    source = np.where(positions < lengths, (positions - offsets) % lengths, positions)
    return np.take_along_axis(spans, source, axis=1)


def _rolled_span_counts(
    config: CorruptionConfig, lengths: np.ndarray, length_uniforms: np.ndarray
) -> NoiseCounts:
    """Return upper bounds of the numbers of "rolled-spans", which may cut one span in two, of either kind."""
    num_noise_tokens, num_spans, num_visible_spans = _span_counts_of_text(config, lengths, length_uniforms)
    return NoiseCounts(num_noise_tokens, num_spans + 1, num_visible_spans + 1)


def prefix_lengths(lengths: np.ndarray, length_uniforms: np.ndarray) -> np.ndarray:
    """Return prefix lengths, int [B], uniform in [1, L-1]; a text of 0 or 1 tokens is all prefix."""
    return np.minimum(1 + (length_uniforms * np.maximum(lengths - 1, 0)).astype(np.int32), lengths)


def _clip_to_text(num_noise_tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the numbers of noise tokens, int [B], clipped to [1, L-1]; 0 in texts of 0 or 1 tokens."""
    most = np.maximum(lengths - 1, 0)
    return np.clip(num_noise_tokens, np.minimum(most, 1), most)


def _iid_mask(config: CorruptionConfig, texts: CorruptionInputs) -> np.ndarray:
    return texts.uniforms[:, 0] < config.rate


def _suffix_mask(_config: CorruptionConfig, texts: CorruptionInputs) -> np.ndarray:
    prefixes = prefix_lengths(texts.lengths, texts.uniforms[:, 0, 0])
    return np.arange(texts.uniforms.shape[2]) >= prefixes[:, None]


def _suffix_counts(
    _config: CorruptionConfig, lengths: np.ndarray, length_uniforms: np.ndarray
) -> NoiseCounts:
    ones = np.ones_like(lengths)
    return NoiseCounts(lengths - prefix_lengths(lengths, length_uniforms), ones, ones)


def suffix_share_counts(
    config: CorruptionConfig, lengths: np.ndarray, length_uniforms: np.ndarray
) -> NoiseCounts:
    """Return the numbers of a suffix with the share ``rate`` of the tokens.

    With ``max_rate`` the share is uniform between ``rate`` and that. The prefix has at least one token, and
    so has the suffix unless the text is a single token.
    """
    low = config.rate
    high = low if config.max_rate is None else config.max_rate
    # In float32, as for the mask: with halves rounded otherwise, a text would exceed its room by a token.
    share = low + (high - low) * length_uniforms.astype(np.float32)
    num_noise_tokens = np.round(lengths * share).astype(np.int32)
    num_noise_tokens = _clip_to_text(num_noise_tokens, lengths)
    return NoiseCounts(num_noise_tokens, np.ones_like(lengths), np.ones_like(lengths))


def _suffix_share_mask(config: CorruptionConfig, texts: CorruptionInputs) -> np.ndarray:
    counts = suffix_share_counts(config, texts.lengths, texts.uniforms[:, 0, 0])
    return np.arange(texts.uniforms.shape[2]) >= (texts.lengths - counts.num_noise_tokens)[:, None]


def single_span_counts(
    config: CorruptionConfig, lengths: np.ndarray, _length_uniforms: np.ndarray | None = None
) -> NoiseCounts:
    """Return the numbers of one span of ``rate`` of the tokens; a single token is never noise."""
    num_noise_tokens = np.round(lengths * config.rate).astype(np.int32)
    num_noise_tokens = _clip_to_text(num_noise_tokens, lengths)
    num_visible_spans = np.minimum(lengths - num_noise_tokens, 2)
    return NoiseCounts(num_noise_tokens, np.ones_like(lengths), num_visible_spans)


def _single_span_mask(config: CorruptionConfig, texts: CorruptionInputs) -> np.ndarray:
    """Return the mask of one span, bool [B,L], that begins after the first token.

    It ends before the last token, unless all tokens but the first are noise. All such positions are equally
    likely.
    """
    span_lengths = single_span_counts(config, texts.lengths).num_noise_tokens
    num_positions = np.maximum(texts.lengths - span_lengths - 1, 1)
    starts = 1 + (texts.uniforms[:, 0, 0] * num_positions).astype(np.int32)
    return _one_span(starts, span_lengths, texts.uniforms.shape[2])


def middle_lengths(lengths: np.ndarray, length_uniforms: np.ndarray) -> np.ndarray:
    """Return the lengths of random middles, int [B], from 1 to L - 1.

    A middle is a substring of the text, but not the whole text, and all are equally likely: L - n + 1 of them
    have n tokens. A single token has no middle.
    """
    total = (lengths - 1.0) * (lengths + 2.0) / 2  # the number of substrings
    # n (2 L + 1 - n) / 2 substrings have at most n tokens. The middle has the smallest n for which they are
    # at least the share u of all: the smaller root of n^2 - (2 L + 1) n + 2 u total, rounded up.
    coefficient = 2.0 * lengths + 1
    discriminant = coefficient**2 - 8 * length_uniforms * total
    middles = np.ceil((coefficient - np.sqrt(discriminant)) / 2).astype(np.int32)
    return _clip_to_text(middles, lengths)


def _middle_mask(_config: CorruptionConfig, texts: CorruptionInputs) -> np.ndarray:
    """Return the mask of a random middle, bool [B,L]: any substring of the text but the whole of it."""
    span_lengths = middle_lengths(texts.lengths, texts.uniforms[:, 0, 0].astype(np.float64))
    starts = (texts.uniforms[:, 1, 0] * (texts.lengths - span_lengths + 1)).astype(np.int32)
    return _one_span(starts, span_lengths, texts.uniforms.shape[2])


def _middle_counts(
    _config: CorruptionConfig, lengths: np.ndarray, length_uniforms: np.ndarray
) -> NoiseCounts:
    num_noise_tokens = middle_lengths(lengths, length_uniforms.astype(np.float64))
    ones = np.ones_like(lengths)
    return NoiseCounts(num_noise_tokens, ones, 2 * ones)  # one visible span if the middle touches an end


def _one_span(starts: np.ndarray, span_lengths: np.ndarray, width: int) -> np.ndarray:
    """Return bool [B,width]: the ``span_lengths`` [B] positions from ``starts`` [B] on."""
    offsets = np.arange(width) - starts[:, None]
    return (offsets >= 0) & (offsets < span_lengths[:, None])


def _no_noise_mask(_config: CorruptionConfig, texts: CorruptionInputs) -> np.ndarray:
    return np.zeros(texts.uniforms[:, 0].shape, bool)


def _everything_mask(_config: CorruptionConfig, texts: CorruptionInputs) -> np.ndarray:
    return np.ones(texts.uniforms[:, 0].shape, bool)


def _everything_counts(
    _config: CorruptionConfig, lengths: np.ndarray, _length_uniforms: np.ndarray
) -> NoiseCounts:
    return NoiseCounts(lengths, np.ones_like(lengths), np.zeros_like(lengths))


def _no_noise_counts(
    _config: CorruptionConfig, lengths: np.ndarray, _length_uniforms: np.ndarray
) -> NoiseCounts:
    """Return no noise token, and one visible span unless the text is empty."""
    return NoiseCounts(np.zeros_like(lengths), np.ones_like(lengths), np.minimum(lengths, 1))


def diffusion_rates(uniforms: np.ndarray) -> np.ndarray:
    """Return the rate of noise of each text, float32 [B], uniform in (0, 1]; ``uniforms`` are [B,2,L]."""
    return 1 - uniforms[:, 1, 0]


def _uniform_rate_mask(_config: CorruptionConfig, texts: CorruptionInputs) -> np.ndarray:
    """Return the mask of masked diffusion, bool [B,L]: a token is noise with probability t, a random time."""
    return texts.uniforms[:, 0] < diffusion_rates(texts.uniforms)[:, None]


def _uniform_rate_weights(_lengths: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """Return 1/t, float32 [B] (Sahoo et al. 2024, equation 11 with the log-linear schedule)."""
    return 1 / diffusion_rates(uniforms)


def any_order_counts(lengths: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """Return how many tokens of each text are noise, int [B], uniform in [1, L]; ``uniforms`` are [B]."""
    counts = 1 + (uniforms.astype(np.float64) * lengths).astype(np.int64)
    return np.minimum(counts, lengths)  # 0 in an empty text


def _uniform_count_mask(_config: CorruptionConfig, texts: CorruptionInputs) -> np.ndarray:
    """Return a mask of a random number of tokens, bool [B,L]: all sets of so many are equally likely."""
    counts = any_order_counts(texts.lengths, texts.uniforms[:, 1, 0])
    return _choose_smallest(texts.uniforms[:, 0], length_mask(texts.lengths, texts.uniforms.shape[2]), counts)


def _uniform_count_weights(lengths: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """Return length / number of noise tokens, float32 [B] (Hoogeboom et al. 2022, equation 4)."""
    counts = any_order_counts(lengths, uniforms[:, 1, 0])
    return (lengths / np.maximum(counts, 1)).astype(np.float32)


def _whole_words_mask(config: CorruptionConfig, texts: CorruptionInputs) -> np.ndarray:
    """Return a whole-word mask, bool [B,L]: a word's tokens share the uniform of its first."""
    assert texts.word_starts is not None
    return np.take_along_axis(texts.uniforms[:, 0], last_start(texts.word_starts), axis=1) < config.rate


def _geometric_spans_mask(config: CorruptionConfig, texts: CorruptionInputs) -> np.ndarray:
    """Return SpanBERT's mask, bool [B,L]: spans of whole words until ``rate`` of the tokens is noise.

    At each word a span could begin: it has a random priority and a random length in words. Spans are added
    in order of priority, the lowest first, and each marks its words as noise from left to right. Marking
    stops after the word with which the noise reaches ``rate`` of the tokens, also within a span.
    """
    assert texts.word_starts is not None
    lengths, uniforms = texts.lengths, texts.uniforms
    is_token = length_mask(lengths, uniforms.shape[2])
    starts = texts.word_starts & is_token
    starts[:, 0] = is_token[:, 0]
    num_words = np.count_nonzero(starts, axis=1)
    shape = len(uniforms), int(num_words.max(initial=1))  # [B,words]
    word_of_token = np.where(is_token, np.cumsum(starts, axis=1) - 1, 0)
    flat_word = word_of_token + shape[1] * np.arange(len(uniforms))[:, None]  # index in a flat [B * words]
    word_sizes = np.bincount(flat_word[is_token], minlength=shape[0] * shape[1]).reshape(shape)
    is_word = length_mask(num_words, shape[1])
    # The first token of each word, in a flat [B * L]: its uniforms decide about the word.
    first_tokens = np.flatnonzero(starts)
    priority = np.full(shape, np.inf, np.float32)
    priority[is_word] = uniforms[:, 0].ravel()[first_tokens]
    span_words = np.zeros(shape, np.int32)  # length of the span that begins at each word [words]
    span_words[is_word] = geometric_lengths(uniforms[:, 1].ravel()[first_tokens])
    covering_priority = priority.copy()  # of the first span, in order of priority, that covers each word
    for ahead in range(1, min(LONGEST_SPAN, shape[1])):
        priority_if_covered = np.where(span_words[:, :-ahead] > ahead, priority[:, :-ahead], np.inf)
        np.minimum(covering_priority[:, ahead:], priority_if_covered, out=covering_priority[:, ahead:])
    order = np.argsort(covering_priority, axis=1, kind="stable")
    ordered_sizes = np.take_along_axis(word_sizes, order, axis=1)
    wanted = np.maximum(np.round(lengths * config.rate), 1)[:, None]
    noise_words = np.zeros(shape, bool)
    np.put_along_axis(noise_words, order, np.cumsum(ordered_sizes, axis=1) - ordered_sizes < wanted, axis=1)
    return noise_words.ravel()[flat_word]


def geometric_lengths(uniforms: np.ndarray) -> np.ndarray:
    """Return lengths from 1 to LONGEST_SPAN from uniforms; each is 20 % less likely than the one before."""
    p_longer = 1 - GEOMETRIC_P
    lengths = 1 + np.log1p(-uniforms * (1 - p_longer**LONGEST_SPAN)) / math.log(p_longer)
    return np.minimum(lengths, LONGEST_SPAN).astype(np.int32)


def _infill(config: CorruptionConfig, lengths: np.ndarray, uniforms: np.ndarray) -> Infilling:
    """Return BART's text infilling of texts of these lengths [B]: each noise span becomes one mask token.

    The number of noise tokens is exact. Span lengths are Poisson distributed. A span of length 0 inserts a
    mask token between two tokens; no two mask tokens are neighbours.

    Spans are drawn until their lengths add up to the number of noise tokens. The last span, which is also
    the last in the text, gets the tokens that are left. Usually this shortens it, as in BART. If no further
    span fits it is lengthened: there are at most min(noise tokens, visible tokens + 1) spans, so that inputs
    are never longer than the text. That is rare, except for texts of a few tokens (at a rate of 0.15, one in
    20 texts of 2 to 9 tokens) and for rates above mean / (mean + 1).

    BART's code counts words in place of tokens, adds a mask for every empty span, and lets spans overlap, so
    that it may hide less than ``rate``.
    """
    rows, _, width = uniforms.shape
    num_noise_tokens = _clip_to_text(np.round(lengths * config.rate).astype(np.int64), lengths)
    num_visible_tokens = lengths - num_noise_tokens
    # The lengths of more spans than are needed, [B,L]: the first ``num_spans`` of each row are used.
    span_lengths = np.searchsorted(_poisson_cdf(config.mean_span_length), uniforms[:, 1], side="right")
    total = np.cumsum(span_lengths, axis=1)
    num_drawn_spans = (total < num_noise_tokens[:, None]).sum(1) + 1  # until their lengths add up
    num_spans = np.minimum(np.minimum(num_drawn_spans, num_visible_tokens + 1), num_noise_tokens)
    last = np.arange(rows), np.maximum(num_spans - 1, 0)  # the index of each row's last span
    span_lengths[last] += num_noise_tokens - total[last]
    columns = np.arange(width)
    # has_span[b, i]: a span lies before visible token i or, if i == num_visible_tokens[b], at the end of the
    # text
    has_span = _choose_smallest(uniforms[:, 0], columns < num_visible_tokens[:, None] + 1, num_spans)
    span_before = np.zeros((rows, width), np.int64)  # length of the span there, 0 without one
    span_before[has_span] = span_lengths[columns < num_spans[:, None]]
    # The position in the text of visible token i: i, and the tokens of all spans up to there.
    source = np.minimum(columns + np.cumsum(span_before, axis=1), width - 1)
    is_visible = columns < num_visible_tokens[:, None]
    hidden = length_mask(lengths, width)
    hidden[np.nonzero(is_visible)[0], source[is_visible]] = False
    # Each visible token's slot comes after a slot for the mask before it.
    sources = np.stack([np.full_like(source, -1), source], axis=2)
    keep = np.stack([has_span, is_visible], axis=2)
    return Infilling(sources.reshape(rows, -1), keep.reshape(rows, -1), hidden)


def _infill_mask(config: CorruptionConfig, texts: CorruptionInputs) -> np.ndarray:
    return _infill(config, texts.lengths, texts.uniforms).noise


def _poisson_cdf(mean: float) -> np.ndarray:
    """Return the Poisson CDF at 0, 1, 2, ..., float64, up to where float32 cannot tell it from 1."""
    count = np.arange(int(mean + 10 * math.sqrt(mean)) + 10)
    log_factorials = np.array([math.lgamma(k + 1) for k in count])
    log_probabilities = count * math.log(mean) - mean - log_factorials
    return np.cumsum(np.exp(log_probabilities))[:-1]


_NO_NOISE = Noise(
    _no_noise_mask, counts=_no_noise_counts, hides_tokens=False, ignores=("rate", "mean_span_length")
)
NOISES: dict[str, Noise] = {
    "iid": Noise(_iid_mask, ignores=("mean_span_length",)),
    "uniform-rate": Noise(
        _uniform_rate_mask,
        uniforms_per_token=2,
        loss_weights=_uniform_rate_weights,
        ignores=("rate", "mean_span_length"),
    ),
    "uniform-count": Noise(
        _uniform_count_mask,
        uniforms_per_token=2,
        loss_weights=_uniform_count_weights,
        ignores=("rate", "mean_span_length"),
    ),
    "whole-words": Noise(_whole_words_mask, needs_word_starts=True, ignores=("mean_span_length",)),
    "collocations": Noise(
        _whole_words_mask,
        uniforms_per_token=2,
        needs_word_starts=True,
        needs_collocations=True,
        ignores=("mean_span_length",),
    ),
    "spans": Noise(random_spans_noise_mask, counts=_span_counts_of_text),
    "rolled-spans": Noise(_rolled_spans_mask, counts=_rolled_span_counts, uniforms_per_token=2),
    "geometric-spans": Noise(
        _geometric_spans_mask,
        uniforms_per_token=2,
        needs_word_starts=True,
        ignores=("mean_span_length",),
    ),
    "poisson-spans": Noise(_infill_mask, infill=_infill, uniforms_per_token=2),
    "single-span": Noise(_single_span_mask, counts=single_span_counts, ignores=("mean_span_length",)),
    "middle": Noise(
        _middle_mask,
        counts=_middle_counts,
        uniforms_per_token=2,
        per_document=True,
        ignores=("rate", "mean_span_length"),
    ),
    "suffix": Noise(
        _suffix_mask,
        counts=_suffix_counts,
        per_document=True,
        ignores=("rate", "mean_span_length"),
    ),
    "suffix-share": Noise(
        _suffix_share_mask,
        counts=suffix_share_counts,
        targets_limited_to_inputs_length=True,
        ignores=("mean_span_length",),
    ),
    "everything": Noise(
        _everything_mask,
        counts=_everything_counts,
        per_document=True,
        ignores=("rate", "mean_span_length"),
    ),
    "none": _NO_NOISE,
    "random-text": _NO_NOISE._replace(replaces_text=True),
}
HIDES_NOTHING = tuple(name for name, noise in NOISES.items() if not noise.hides_tokens)
BOUNDS_LIKELIHOOD = tuple(name for name, noise in NOISES.items() if noise.bounds_likelihood)


# --- reducing noise until it fits


def limit_spans(
    noise: np.ndarray, is_token: np.ndarray, uniforms: np.ndarray, num_sentinels: int
) -> np.ndarray:
    """Remove random spans from ``noise``, bool [B,L], in texts with more spans than sentinels; return it.

    Such a text keeps ``num_sentinels`` - 1 noise spans: k noise spans leave up to k + 1 visible spans, which
    targets replace by a sentinel each. The noise spans with the smallest uniforms at their starts are kept.
    Given the mask these uniforms are uniformly distributed for i.i.d. and whole-word noise, and only nearly
    so for geometric spans. The array is changed in place.
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
    """Remove the last tokens of ``noise``, bool [B,L], where targets exceed ``max_targets``; return it.

    Room is left for EOS and, if targets have sentinels, for a last sentinel before it; for targets without
    EOS pass ``max_targets`` + 1. The array is changed in place.
    """
    in_targets = noise | run_starts(is_token & ~noise) if has_sentinels else noise
    is_too_long = in_targets.sum(1) > max_targets - 1
    if is_too_long.any():
        noise[is_too_long] &= np.cumsum(in_targets[is_too_long], axis=1) <= max_targets - 1 - has_sentinels
    return noise

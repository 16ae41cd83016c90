"""Input and target formats of a text under a corruption mask, and how its sentences are ordered and split.

A new format is one entry of INPUTS or TARGETS and its name. Shapes: B texts of at most L tokens; tokens,
noise (True on noise tokens) and uniform random numbers are [B,L].
"""

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple, Protocol

import numpy as np

from lm.objectives.corruption import break_ties, last_start, length_mask, run_starts
from lm.tokenizers.tokenizer import Tokenizer

InputsName = Literal[
    "sentinels",  # each noise span is replaced by one sentinel
    "masks",  # each noise token is replaced by a mask token
    "masks-or-random",  # likewise, but the share ``random_share`` by random ones (Raffel et al. 2020, 3.3.1)
    "masks-random-or-same",  # and the share ``same_share`` is left as it is (Devlin et al. 2019, 3.1)
    "span-masks",  # each noise span is replaced by one mask token (for noise that is infilled)
    "visible",  # noise is left as it is; attention masks hide it from the queries of "permuted" targets
    "drop",  # noise is left out
    "shuffle",  # noise tokens are permuted among their positions
    # fill-in-the-middle (Bavarian et al. 2022, section 3); PRE, SUF and MID are the first three sentinels
    "prefix-suffix-middle",  # PRE prefix SUF suffix MID
    "suffix-prefix-middle",  # PRE SUF suffix MID prefix, which the middle follows
]
TargetsName = Literal[
    "sentinels",  # the noise; each run of visible text is replaced by one sentinel
    "shuffled-sentinels",  # likewise, with the spans in random order (GLM: Du et al. 2022, section 2.1)
    "drop",  # the noise alone
    "everything",  # the whole text
    # of encoders
    "in-place",  # the token of each noise position
    "permuted",  # the same in a random order, each from visible text and the noise before it (XLNet)
    # of a discriminator, which reads the text with its masks filled in by a generator
    "replaced",  # whether each token is another than the text's
    "replaced-at-masks",  # the same, at masked positions alone
    "restored",  # the text's token, at all positions
    "restored-at-masks",  # the same, at masked positions alone
]


class Formatted(NamedTuple):
    """Texts in the format of inputs or targets, before the tokens to drop are taken out.

    It has K slots per text, which are its L positions unless ``source`` says otherwise.
    """

    tokens: np.ndarray  # int32 [B,K]
    keep: np.ndarray  # bool [B,K]: the tokens that inputs or targets consist of
    source: np.ndarray | None = None  # int [B,K]: the position in the text of each slot's token; -1: none


class FormatConfig(Protocol):
    """The settings of an objective that say how many noise tokens are not masked."""

    @property
    def random_share(self) -> float: ...
    @property
    def same_share(self) -> float: ...


# (numbers of tokens, of noise tokens, and of spans that become sentinels, each [B]) -> length of the
# formatted text [B], sentinels included, without EOS
FormattedLength = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def _length_of_text(
    num_tokens: np.ndarray, _num_noise_tokens: np.ndarray, _num_spans: np.ndarray
) -> np.ndarray:
    """Return the number of all tokens: each stays, or another takes its place."""
    return num_tokens


def _length_of_visible(
    num_tokens: np.ndarray, num_noise_tokens: np.ndarray, _num_spans: np.ndarray
) -> np.ndarray:
    """Return the number of visible tokens."""
    return num_tokens - num_noise_tokens


def _length_of_noise(
    _num_tokens: np.ndarray, num_noise_tokens: np.ndarray, _num_spans: np.ndarray
) -> np.ndarray:
    """Return the number of noise tokens."""
    return num_noise_tokens


def _length_of_visible_and_sentinels(
    num_tokens: np.ndarray, num_noise_tokens: np.ndarray, num_spans: np.ndarray
) -> np.ndarray:
    """Return the number of visible tokens and of sentinels, one for each noise span."""
    return num_tokens - num_noise_tokens + num_spans


def _length_of_noise_and_sentinels(
    _num_tokens: np.ndarray, num_noise_tokens: np.ndarray, num_spans: np.ndarray
) -> np.ndarray:
    """Return the number of noise tokens and of sentinels, one for each span of visible text."""
    return num_noise_tokens + num_spans


def _length_around_middle(
    num_tokens: np.ndarray, num_noise_tokens: np.ndarray, _num_spans: np.ndarray
) -> np.ndarray:
    """Return the number of visible tokens and of PRE, SUF and MID."""
    return num_tokens - num_noise_tokens + 3


class Format(NamedTuple):
    """A format of inputs or of targets."""

    # (settings, tokens [B,L], noise mask [B,L], uniforms [B,L], tokenizer) -> Formatted
    apply: Callable[[FormatConfig, np.ndarray, np.ndarray, np.ndarray, Tokenizer], Formatted]
    formatted_length: FormattedLength = _length_of_text
    # random numbers that ``apply`` reads or, for "visible", ``prediction_order``
    uniforms_per_token: int = 0
    ends_with_eos: bool = True  # if not, the format has an end of its own
    num_sentinels: int = 0  # least number of sentinels that it needs, whatever the text


def noise_span_to_unique_sentinel(
    _config: FormatConfig,
    tokens: np.ndarray,
    noise: np.ndarray,
    _uniforms: np.ndarray,
    tokenizer: Tokenizer,
) -> Formatted:
    """Replace each noise span by a unique sentinel; sentinels count down from the top of the vocabulary.

    T5's ``noise_span_to_unique_sentinel``, and with the mask inverted its nonnoise form for targets.
    """
    starts = run_starts(noise)
    counts = np.count_nonzero(starts, axis=1)
    index_in_text = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    replaced = tokens.copy()
    replaced.ravel()[np.flatnonzero(starts)] = tokenizer.vocab_size - 1 - index_in_text
    return Formatted(replaced, starts | ~noise)


def nonnoise_span_to_unique_sentinel(
    config: FormatConfig, tokens: np.ndarray, noise: np.ndarray, uniforms: np.ndarray, tokenizer: Tokenizer
) -> Formatted:
    """Replace each run of text between noise spans by a unique sentinel."""
    return noise_span_to_unique_sentinel(config, tokens, ~noise, uniforms, tokenizer)


def _shuffled_spans(
    config: FormatConfig,
    tokens: np.ndarray,
    noise: np.ndarray,
    uniforms: np.ndarray,
    tokenizer: Tokenizer,
) -> Formatted:
    """Return the noise spans in random order, each after the sentinel that replaces it in the inputs.

    A text has to begin with visible text. Each run of visible text is replaced by the sentinel of the noise
    span after it; the run after the last noise span is left out.
    """
    with_sentinels = nonnoise_span_to_unique_sentinel(config, tokens, noise, uniforms, tokenizer).tokens
    sentinel_position = last_start(run_starts(~noise))  # of the sentinel before each token's span
    is_sentinel = np.zeros(noise.shape, bool)
    is_sentinel[np.nonzero(noise)[0], sentinel_position[noise]] = True
    keep = noise | is_sentinel
    # all tokens of a span and its sentinel have the same key
    order_key = np.take_along_axis(break_ties(uniforms), sentinel_position, axis=1)
    order = np.argsort(np.where(keep, order_key, np.inf), axis=1, kind="stable")
    ordered_tokens = np.take_along_axis(with_sentinels, order, axis=1)
    ordered_keep = np.take_along_axis(keep, order, axis=1)
    return Formatted(ordered_tokens, ordered_keep, order)


def _mask(
    _config: FormatConfig,
    tokens: np.ndarray,
    noise: np.ndarray,
    _uniforms: np.ndarray,
    tokenizer: Tokenizer,
) -> Formatted:
    """Replace each noise token by the mask token."""
    return Formatted(np.where(noise, np.int32(tokenizer.mask), tokens), np.ones_like(noise))


def _mask_or_random(
    config: FormatConfig, tokens: np.ndarray, noise: np.ndarray, uniforms: np.ndarray, tokenizer: Tokenizer
) -> Formatted:
    """Replace the share ``random_share`` of the noise tokens by random tokens, the others by the mask token.

    Random tokens are uniform over all ids from ``first_regular_id`` on, sentinels included, as in T5's code.
    """
    if config.random_share == 0:
        return _mask(config, tokens, noise, uniforms, tokenizer)
    first = tokenizer.first_regular_id
    # A uniform number below ``random_share`` is uniform there: divided by it, it picks the token.
    random_token = first + (uniforms / config.random_share * (tokenizer.vocab_size - first)).astype(np.int32)
    replacement = np.where(uniforms < config.random_share, random_token, tokenizer.mask)
    return Formatted(np.where(noise, replacement, tokens), np.ones_like(noise))


def _mask_random_or_same(
    config: FormatConfig, tokens: np.ndarray, noise: np.ndarray, uniforms: np.ndarray, tokenizer: Tokenizer
) -> Formatted:
    """Leave the share ``same_share`` of the noise tokens as they are.

    The share ``random_share`` of them is replaced by random tokens, and the others by the mask token.
    """
    changes = noise & (uniforms < 1 - config.same_share)
    return _mask_or_random(config, tokens, changes, uniforms, tokenizer)


def _drop_noise(_config: FormatConfig, tokens: np.ndarray, noise: np.ndarray, *_: object) -> Formatted:
    return Formatted(tokens, ~noise)


def _drop_nonnoise(_config: FormatConfig, tokens: np.ndarray, noise: np.ndarray, *_: object) -> Formatted:
    return Formatted(tokens, noise)


def _keep_all(_config: FormatConfig, tokens: np.ndarray, noise: np.ndarray, *_: object) -> Formatted:
    return Formatted(tokens, np.ones_like(noise))


def _shuffle(
    _config: FormatConfig,
    tokens: np.ndarray,
    noise: np.ndarray,
    uniforms: np.ndarray,
    _tokenizer: Tokenizer,
) -> Formatted:
    """Permute the noise tokens among their positions (deshuffling)."""
    order = np.argsort(np.where(noise, break_ties(uniforms), np.inf), axis=1)
    shuffled = tokens.copy()
    shuffled[noise] = np.take_along_axis(tokens, order, axis=1)[length_mask(noise.sum(1), noise.shape[1])]
    return Formatted(shuffled, np.ones_like(noise))


def _prefix_and_suffix(
    _config: FormatConfig,
    tokens: np.ndarray,
    noise: np.ndarray,
    _uniforms: np.ndarray,
    tokenizer: Tokenizer,
    *,
    prefix_first: bool,
) -> Formatted:
    """Return the prefix and the suffix of each text with the sentinels PRE, SUF and MID.

    The middle, which is the noise, is left out. A text without noise is all prefix.
    """
    rows, length = tokens.shape
    is_suffix = np.logical_or.accumulate(noise, axis=1)
    # Each slot is in one of five parts, 0 to 4, which are written in this order.
    part_of_text = np.where(is_suffix, 3, 1) if prefix_first else np.where(is_suffix, 2, 4)
    part_of_sentinels = [0, 2, 4] if prefix_first else [0, 1, 3]  # PRE, SUF and MID
    parts = np.concatenate([part_of_text, np.tile(part_of_sentinels, (rows, 1))], axis=1)
    order = np.argsort(parts, axis=1, kind="stable")
    sentinels = np.tile(tokenizer.vocab_size - 1 - np.arange(3, dtype=np.int32), (rows, 1))
    sources = np.concatenate([np.tile(np.arange(length), (rows, 1)), np.full((rows, 3), -1)], axis=1)
    slot_tokens = np.concatenate([tokens, sentinels], axis=1)
    keep = np.concatenate([~noise, np.ones((rows, 3), bool)], axis=1)
    return Formatted(
        np.take_along_axis(slot_tokens, order, axis=1),
        np.take_along_axis(keep, order, axis=1),
        np.take_along_axis(sources, order, axis=1),
    )


INPUTS: dict[InputsName, Format] = {
    "sentinels": Format(noise_span_to_unique_sentinel, _length_of_visible_and_sentinels),
    "masks": Format(_mask),
    "masks-or-random": Format(_mask_or_random, uniforms_per_token=1),
    "masks-random-or-same": Format(_mask_random_or_same, uniforms_per_token=1),
    "span-masks": Format(_mask),  # ``Noise.infill`` makes the inputs of infilled noise instead
    "visible": Format(_keep_all, uniforms_per_token=1),
    "drop": Format(_drop_noise, _length_of_visible),
    "shuffle": Format(_shuffle, uniforms_per_token=1),
    "prefix-suffix-middle": Format(
        partial(_prefix_and_suffix, prefix_first=True),
        _length_around_middle,
        ends_with_eos=False,
        num_sentinels=3,
    ),
    "suffix-prefix-middle": Format(
        partial(_prefix_and_suffix, prefix_first=False),
        _length_around_middle,
        ends_with_eos=False,
        num_sentinels=3,
    ),
}
TARGETS: dict[TargetsName, Format] = {
    "sentinels": Format(nonnoise_span_to_unique_sentinel, _length_of_noise_and_sentinels),
    "shuffled-sentinels": Format(_shuffled_spans, _length_of_noise_and_sentinels, uniforms_per_token=1),
    "drop": Format(_drop_nonnoise, _length_of_noise),
    "everything": Format(_keep_all),
}


def prediction_order(noise: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """Return int32 [B,L]: 1, 2, ... for the noise tokens of a text in the order of their uniforms, else 0.

    >>> noise = np.array([[True, False, True, True]])
    >>> prediction_order(noise, np.array([[0.5, 0.1, 0.9, 0.2]])).tolist()
    [[2, 0, 3, 1]]
    """
    order = np.argsort(np.where(noise, break_ties(uniforms), np.inf), axis=1)
    places = np.empty_like(order)
    np.put_along_axis(places, order, np.arange(1, noise.shape[1] + 1)[None], axis=1)
    return (places * noise).astype(np.int32)


# --- random text


def random_tokens(uniforms: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """Return int32 [B,L]: a token for each uniform, by Zipf's law over the ids of ordinary tokens.

    Of N ordinary tokens, number k (from 0) has the probability log((k + 2) / (k + 1)) / log(N + 1), which is
    nearly proportional to 1 / (k + 1). Vocabularies that are sorted by frequency, such as SentencePiece's,
    get about the frequencies of a text so. Sentinels and ids below ``first_regular_id`` are never drawn.
    """
    first, end = tokenizer.first_regular_id, tokenizer.vocab_size - tokenizer.num_sentinels
    # in float64, since float32 may round a product up to N
    number = np.floor(np.exp(uniforms.astype(np.float64) * np.log(end - first + 1))) - 1
    return first + number.astype(np.int32)


# --- sentences


def sentence_starts(tokens: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """Return bool [B,L]: the first token of each sentence but the text's first.

    A sentence begins where a word follows the end of another sentence, and after every EOS.
    """
    starts = np.zeros(tokens.shape, bool)
    before = tokens[:, :-1]
    starts[:, 1:] = tokenizer.sentence_ends[before] & tokenizer.word_starts[tokens[:, 1:]]
    starts[:, 1:] |= before == tokenizer.eos
    return starts


def sentence_permutation(
    tokens: np.ndarray, lengths: np.ndarray, uniforms: np.ndarray, tokenizer: Tokenizer
) -> np.ndarray:
    """Return int [B,L]: the positions of the text with its sentences in random order."""
    order = np.take_along_axis(uniforms, last_start(sentence_starts(tokens, tokenizer)), axis=1)
    np.putmask(order, ~length_mask(lengths, uniforms.shape[1]), np.inf)
    return np.argsort(order, axis=1, kind="stable")


def rotation(lengths: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """Return int [B,L]: the positions of the text from a random token on, then those before it.

    BART's document rotation (Lewis et al. 2020, section 2.2). All starts are equally likely; the first column
    of ``uniforms`` [B,L] decides.
    """
    positions = np.arange(uniforms.shape[1])
    starts = (uniforms[:, 0] * lengths).astype(np.int64)
    rotated = (positions + starts[:, None]) % np.maximum(lengths, 1)[:, None]
    return np.where(positions < lengths[:, None], rotated, positions)


def split_points(
    tokens: np.ndarray, lengths: np.ndarray, uniforms: np.ndarray, tokenizer: Tokenizer
) -> np.ndarray:
    """Return where to split each text, int [B], at least one token from either end; uniforms are [B].

    All starts of sentences are equally likely. A text of one sentence is split at the start of a word, a text
    of one word at any token.
    """
    candidates = length_mask(lengths, tokens.shape[1])
    candidates[:, 0] = False
    for starts in (tokenizer.word_starts[tokens], sentence_starts(tokens, tokenizer)):
        coarser = starts & candidates
        candidates = np.where(coarser.any(axis=1, keepdims=True), coarser, candidates)
    nth = (uniforms * candidates.sum(axis=1)).astype(np.int64)
    return np.argmax(np.cumsum(candidates, axis=1) > nth[:, None], axis=1)

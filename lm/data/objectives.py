"""Denoising objectives on arrays: where the noise falls x what the inputs show x what the targets show.

Everything here is a pure function of its arguments, random numbers included: ``uniforms`` draws those of
example ``row`` from (seed, row) alone, so an example does not depend on its batch, host or worker.

Sources: Raffel et al. 2020, sections 3.1.4 and 3.3, and the behaviour of the T5 code where the paper is
silent; for encoders Devlin et al. 2019, Joshi et al. 2020 (SpanBERT) and Clark et al. 2020 (ELECTRA); for
text infilling Lewis et al. 2020 (BART). Two deviations from T5, both because nothing may be cut and
``inputs`` and ``targets`` must together give back the text:

* *Too few sentinels.* T5 let them run over into word pieces. Here "spans" draws at most as many spans as
  there are sentinels (fewer and longer; the number of noise tokens stays), and of "iid" noise only as many
  runs are kept, chosen uniformly, as can be told apart on both sides. The other runs stay in the text.
* *Too long targets.* T5 cut them. Here ``lengths`` leaves room for all but about 1 in 30,000 draws of "iid"
  noise, and such a draw loses the noise with which it would run over.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from lm.data.noise import NOISE, fit, infill, prefix_lengths, ranks, runs_of, span_counts, tell_apart, within
from lm.data.sentences import permute
from lm.data.text.vocabulary import PAD, UNK, Vocabulary
from lm.settings import SettingError

# share of noise tokens that become any id [Raffel et al. 2020, 3.3.1; Devlin et al. 2019, 3.1]
RANDOM_SHARE = 0.1
SAME_SHARE = 0.1  # share of noise tokens that an encoder sees unchanged [Devlin et al. 2019, 3.1]
IN_PLACE = ("in-place", "replaced")  # targets of encoders
BY_CHANCE = ("iid", "whole-words", "geometric-spans")  # noise whose amount or runs are random
DEVIATIONS = 4  # standard deviations of room for targets of random length
SHORTEST = 3  # inputs: one token that stays, one for noise, EOS [tokens]


# Poisson spans may be empty: then something is missing where nothing was.
Noise = Literal["iid", "whole-words", "spans", "geometric-spans", "poisson-spans", "suffix", "everything"]
# Masks stand one for one, "span-masks" one for each span. Of "masks-or-random" 10 % are any token, and of
# "masks-random-or-same" 10 % more are what they were.
Inputs = Literal[
    "sentinels", "masks", "masks-or-random", "masks-random-or-same", "span-masks", "drop", "shuffle"
]
# With "replaced" a discriminator tells besides of every token whether it is the text's.
Targets = Literal["sentinels", "drop", "everything", "in-place", "replaced"]
# T5 ends every example, also where the text was cut. Others separate documents and nothing else: a causal
# model that finds EOS at the same place of every row learns the place, and stops there.
Ends = Literal["each-example", "between-documents"]


@dataclass(frozen=True)
class Objective:
    """What is hidden of a text and what has to be said about it."""

    noise: Noise = "iid"  # which tokens are noise
    inputs: Inputs = "sentinels"  # what replaces noise
    # what replaces the tokens that are not noise; in encoders they stay in their places
    targets: Targets = "sentinels"
    rate: float = 0.15  # share of tokens that are noise; for all noise but "suffix" and "everything"
    mean_span_length: float = 3.0  # of "spans" and "poisson-spans" [tokens]
    sentences: Literal["in-order", "permuted"] = "in-order"  # of inputs; targets keep the text's order
    # what encoders tell of two pieces of text
    pairs: Literal["none", "next-sentence", "sentence-order"] = "none"
    # where EOS stands, of encoders [SEP]: T5's rule, or once between two documents
    eos: Ends = "each-example"

    def __post_init__(self):
        if not 0 < self.rate < 1:
            raise SettingError(f"objective.rate={self.rate} should lie between 0 and 1, such as 0.15")
        if not self.mean_span_length >= 1:
            raise SettingError(
                f"objective.mean_span_length={self.mean_span_length} should be at least 1, such as 3.0"
            )

    @property
    def concatenates(self) -> bool:
        """Whether documents are strung together before they are split; a few objectives keep them apart."""
        return self.pairs == "none" and (self.noise not in ("suffix", "everything") or not self.has_inputs)

    @property
    def separates(self) -> bool:
        """Whether documents are strung together with EOS between them, and examples are cut from that without
        one.
        """
        return self.concatenates and self.eos == "between-documents"

    @property
    def has_inputs(self) -> bool:
        """False for the causal LM, whose inputs are absent: not even an EOS."""
        return (self.noise, self.inputs) != ("everything", "drop")

    @property
    def draws(self) -> int:
        """Random numbers per token: where noise falls, how far, what the inputs show there, the order of
        sentences.
        """
        return (
            1
            + (self.noise in ("geometric-spans", "poisson-spans"))
            + (self.inputs in ("masks-or-random", "masks-random-or-same", "shuffle"))
            + (self.sentences == "permuted")
        )

    @property
    def reads_words(self) -> bool:
        return self.noise in ("whole-words", "geometric-spans")


_CAUSAL_LM = Objective(noise="everything", inputs="drop", targets="everything")
_MASKED_LM = Objective(inputs="masks-random-or-same", targets="in-place", eos="between-documents")

OBJECTIVES = {
    "baseline": Objective(),  # "replace spans" of i.i.d. noise: the baseline of all tables
    "replace-spans": Objective(),
    "span-corruption": Objective(noise="spans"),
    "drop-tokens": Objective(inputs="drop", targets="drop"),
    "mass-style": Objective(inputs="masks", targets="everything"),
    "bert-style": Objective(inputs="masks-or-random", targets="everything"),
    "deshuffling": Objective(noise="everything", inputs="shuffle", targets="everything"),
    "prefix-lm": Objective(noise="suffix", inputs="drop", targets="drop"),
    "language-model": _CAUSAL_LM,  # of the T5 paper's tables
    "causal-lm": replace(_CAUSAL_LM, eos="between-documents"),
    "text-infilling": Objective(
        "poisson-spans", "span-masks", "everything", rate=0.3, sentences="permuted", eos="between-documents"
    ),
    "masked-lm": _MASKED_LM,
    "whole-word-masked-lm": replace(_MASKED_LM, noise="whole-words"),
    "span-masked-lm": replace(_MASKED_LM, noise="geometric-spans"),
    "electra": Objective(inputs="masks", targets="replaced", eos="between-documents"),
}


class Ragged(NamedTuple):
    """tokens int32 [B,L] from the left, then padding; lengths int32 [B]. Only ``lengths`` tells padding from
    text.
    """

    tokens: np.ndarray
    lengths: np.ndarray


class Lengths(NamedTuple):
    """Tokens of one row: of raw text, any EOS between documents included, and the room for inputs and
    targets.
    """

    raw: int
    inputs: int
    targets: int


def uniforms(seed: int, rows: np.ndarray, count: int, length: int) -> np.ndarray:
    """float32 [B,count,length] in [0, 1): row r's numbers are those of ``Generator(Philox(key=[seed,
    r]))``.
    """
    bits = np.random.Philox(key=[seed, 0])
    generator, fresh = np.random.Generator(bits), bits.state
    numbers = np.empty((len(rows), count, length), np.float32)
    for row, out in zip(rows, numbers, strict=True):
        fresh["state"]["key"][1] = row  # a new state is six times as fast to set as a new generator to make
        bits.state = fresh
        generator.random(out=out, dtype=np.float32)
    return numbers


def noise_mask(
    objective: Objective,
    lengths: np.ndarray,
    u: np.ndarray,
    num_sentinels: int,
    room: int,
    starts: np.ndarray | None = None,
) -> np.ndarray:
    """lengths [B], uniforms [B,draws,L] -> bool [B,L]; at most ``room`` tokens of targets, EOS included.

    starts: where words begin, bool [B,L]; of objectives that read words.
    """
    inside = within(lengths, u.shape[2])
    mask = NOISE[objective.noise](objective, lengths, u, num_sentinels, starts) & inside
    if objective.noise in BY_CHANCE:
        if "sentinels" in (objective.inputs, objective.targets):
            mask = tell_apart(mask, inside, u[:, 0], num_sentinels)
        if objective.targets in ("sentinels", "drop"):
            mask = fit(mask, inside, objective.targets == "sentinels", room)
    return mask


# --- what is shown: tokens [B,L], bool [B,L] -> new tokens [B,L] and which of them to keep
# ---------------------------


def replace_runs(tokens: np.ndarray, mask: np.ndarray, vocabulary: Vocabulary) -> tuple[np.ndarray, ...]:
    """Each run of the mask becomes one sentinel; they count down from the top of the vocabulary."""
    starts = runs_of(mask)
    counts = np.count_nonzero(starts, axis=1)
    order = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    replaced = tokens.copy()
    replaced.ravel()[np.flatnonzero(starts)] = vocabulary.size - 1 - order
    return replaced, starts | ~mask


def _mask(tokens, mask, u, vocabulary):
    return np.where(mask, np.int32(vocabulary.mask), tokens), np.ones_like(mask)


def _mask_or_random(tokens, mask, u, vocabulary):
    anything = UNK + 1 + (u / RANDOM_SHARE * (vocabulary.size - UNK - 1)).astype(np.int32)
    return np.where(mask, np.where(u < RANDOM_SHARE, anything, vocabulary.mask), tokens), np.ones_like(mask)


def _mask_random_or_same(tokens, mask, u, vocabulary):
    return _mask_or_random(tokens, mask & (u < 1 - SAME_SHARE), u, vocabulary)


def _shuffle(tokens, mask, u, vocabulary):
    """The noise tokens change places among themselves."""
    order = np.argsort(np.where(mask, ranks(u), np.inf), axis=1)
    shuffled = tokens.copy()
    shuffled[mask] = np.take_along_axis(tokens, order, axis=1)[within(mask.sum(1), mask.shape[1])]
    return shuffled, np.ones_like(mask)


INPUTS = {
    "sentinels": lambda tokens, noise, u, vocabulary: replace_runs(tokens, noise, vocabulary),
    "masks": _mask,
    "masks-or-random": _mask_or_random,
    "masks-random-or-same": _mask_random_or_same,
    "drop": lambda tokens, noise, u, vocabulary: (tokens, ~noise),
    "shuffle": _shuffle,
}
TARGETS = {
    "sentinels": lambda tokens, noise, vocabulary: replace_runs(tokens, ~noise, vocabulary),
    "drop": lambda tokens, noise, vocabulary: (tokens, noise),
    "everything": lambda tokens, noise, vocabulary: (tokens, np.ones_like(noise)),
}


def denoise(
    objective: Objective, text: Ragged, u: np.ndarray, vocabulary: Vocabulary, limits: Lengths
) -> tuple[Ragged, Ragged]:
    """text [B,L], uniforms [B,draws,L] -> inputs and targets that fit in ``limits``, EOS where the example
    ends.
    """
    tokens, lengths = text
    eos = None if objective.separates else vocabulary.eos
    inside, shown = within(lengths, tokens.shape[1]), tokens
    if objective.sentences == "permuted":
        shown, u = permute(tokens, lengths, u[:, -1], vocabulary), u[:, :-1]
    if objective.noise == "poisson-spans":
        shown, keep = infill(objective, shown, lengths, u, vocabulary.mask)
        return _gather(shown, keep, eos), _gather(tokens, inside, eos)
    starts = vocabulary.word_starts[shown] if objective.reads_words else None
    noise = noise_mask(objective, lengths, u, vocabulary.num_sentinels, limits.targets, starts)
    shown, keep = INPUTS[objective.inputs](shown, noise, u[:, -1], vocabulary)
    inputs = _gather(shown, keep & inside, eos if objective.has_inputs else None)
    said, keep = TARGETS[objective.targets](tokens, noise, vocabulary)
    return inputs, _gather(said, keep & inside, eos)


def _gather(tokens: np.ndarray, keep: np.ndarray, eos: int | None) -> Ragged:
    """tokens [B,L], bool [B,L] -> the kept tokens from the left and, unless it is None, ``eos``."""
    counts = np.count_nonzero(keep, axis=1).astype(np.int32)
    ends = eos is not None
    gathered = np.full((len(tokens), int(counts.max(initial=0)) + ends), PAD, np.int32)
    # 3 x as fast as [keep]
    gathered[within(counts, gathered.shape[1])] = tokens.ravel()[np.flatnonzero(keep)]
    if ends:
        gathered[np.arange(len(tokens)), counts] = eos
    return Ragged(gathered, counts + np.int32(ends))


# --- how long it all gets
# --------------------------------------------------------------------------------------------

# tokens of inputs without EOS, of (tokens of text, noise tokens, runs of noise); else those of text
INPUT_SIZES = {
    "sentinels": lambda text, noise, runs: text - noise + runs,
    "drop": lambda text, noise, runs: text - noise,
}
# tokens of targets without EOS, of (tokens of text, noise tokens, runs of text); else those of text
TARGET_SIZES = {
    "sentinels": lambda text, noise, runs: noise + runs,
    "drop": lambda text, noise, runs: noise,
}


def _text(text, noise, runs):
    return text


def sizes(objective: Objective, lengths: np.ndarray, u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """lengths [B], first uniforms [B] -> tokens of inputs and of targets [B], EOS included; not for noise by
    chance.
    """
    runs = np.ones_like(lengths)
    if objective.noise == "spans":
        noise, runs = span_counts(objective, lengths)
    else:
        noise = lengths - prefix_lengths(lengths, u) if objective.noise == "suffix" else lengths
    inputs = INPUT_SIZES.get(objective.inputs, _text)(lengths, noise, np.where(noise, runs, 0)) + 1
    targets = (
        TARGET_SIZES.get(objective.targets, _text)(lengths, noise, np.where(noise < lengths, runs, 0)) + 1
    )
    return inputs if objective.has_inputs else np.zeros_like(inputs), targets


def lengths(objective: Objective, inputs_length: int) -> Lengths:
    """The raw tokens of a row whose inputs fill ``inputs_length`` as far as they can, and the room for its
    targets.
    """
    if inputs_length < SHORTEST:
        raise SettingError(f"data.inputs_length={inputs_length} should be at least {SHORTEST}, such as 512")
    if objective.noise == "spans":
        return _span_lengths(objective, inputs_length)
    raw = inputs_length - (not objective.separates)  # and EOS
    targets = inputs_length
    if objective.noise in BY_CHANCE and objective.targets != "everything":
        targets = min(targets, _iid_room(objective, raw))
    return Lengths(raw, inputs_length if objective.has_inputs else 0, targets)


def _span_lengths(objective: Objective, inputs_length: int) -> Lengths:
    """The longest text whose inputs fit (512 tokens at 15 %, mean 3: 568, and 114 of targets); nothing is
    random.
    """
    raw = np.arange(2, math.ceil(inputs_length * 2 / (1 - objective.rate)) + 2)
    inputs, targets = sizes(objective, raw, np.zeros(len(raw)))
    last = int(np.flatnonzero(inputs <= inputs_length)[-1])
    over = (
        objective.rate == 0.5 and targets[last] > inputs[last]
    )  # T5 keeps the targets of 50 % noise to a round length
    return Lengths(int(raw[last]) - over, inputs_length, int(targets[last]) - over)


def _iid_room(objective: Objective, raw: int) -> int:
    """Tokens of targets for L tokens, each noise with probability p: the mean and DEVIATIONS standard
    deviations.

    "drop" says the noise: binomial, mean Lp, variance Lp(1-p).
    "sentinels" says a token where it is noise or the one before it is (and one at the very start, either
    way): all L but those with q_i q_{i-1} = 1, where q = 1 for no noise. With P(q) = Q = 1-p the mean is L -
    (L-1)Q^2; each of the L-1 products has the variance Q^2 - Q^4, each of the L-2 pairs of neighbours the
    covariance Q^3 - Q^4. 512 inputs at 10/15/25/50 %: 149/200/287/435 with EOS. The original's
    103/192/256/512 cut 35 % of the examples at 10 %, 2 % at 25 %; and "drop" at 15 %: 110, where 104 cut 0.07
    %.
    """
    p, q = objective.rate, 1 - objective.rate
    if objective.targets == "drop":
        mean, variance = raw * p, raw * p * q
    else:
        mean = raw - (raw - 1) * q**2
        variance = (raw - 1) * (q**2 - q**4) + 2 * max(raw - 2, 0) * (q**3 - q**4)
    return math.ceil(mean + DEVIATIONS * math.sqrt(variance)) + 1

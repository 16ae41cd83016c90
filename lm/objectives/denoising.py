"""Pre-training objectives: which tokens are noise, what is predicted, and how long inputs and targets are.

A denoising objective is three independent choices: the corruption mask (which tokens are noise), the format
of the inputs (what replaces noise) and the format of the targets. Here L is the number of tokens of a text,
p is ``rate``, a span is a run of consecutive noise tokens, and a sentinel is the special token that replaces
a span.

Sources:

* T5's objectives: Raffel et al. 2020, sections 3.1.4 and 3.3
* encoders: Devlin et al. 2019 (BERT), Joshi et al. 2020 (SpanBERT), Clark et al. 2020 (ELECTRA); shares of
  masked tokens: Wettig et al. 2022
* PMI masking: Levine et al. 2021
* permutation language modeling: Yang et al. 2019 (XLNet)
* masked diffusion: Sahoo et al. 2024 (MDLM), Nie et al. 2025 (LLaDA); its any-order form: Hoogeboom et al.
  2022
* text infilling, rotation and permutation: Lewis et al. 2020 (BART)
* mixtures of denoisers: Tay et al. 2022 (UL2), Bavarian et al. 2022 (fill-in-the-middle), Du et al. 2022
  (GLM)

This code differs from T5's in two points, so that nothing is cut, and inputs and targets together give back
the text:

* *Too few sentinels.* T5 lets their ids run over into word pieces. Here "spans" draws at most as many spans
  as there are sentinels (fewer and longer ones, with the same number of noise tokens). Noise whose amount is
  random drops spans, chosen uniformly, until there are enough sentinels for inputs and targets.
* *Too long targets.* T5 truncates them. Here ``compute_lengths`` leaves room for all but about 1 in 30,000
  texts if the amount of noise is random, and from such a text the noise that does not fit is dropped.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

import numpy as np

from lm.config.base import Condition, SettingError, Values, check_at_least_0_below_1, did_you_mean, setting
from lm.objectives.corruption import HIDES_NOTHING, NOISES, CorruptionInputs, Noise, NoiseName
from lm.objectives.formatting import INPUTS, TARGETS, Format, InputsName, TargetsName

# Targets of ELECTRA's discriminator: which tokens were replaced (Clark et al. 2020).
REPLACED = ("replaced", "replaced-at-masks")
# Targets in ELECTRA's ablations "All-Tokens MLM" and "Replace MLM": the original tokens (ibid., section 3.5).
RESTORED = ("restored", "restored-at-masks")
# Targets of encoders: predicted at the position where they are hidden.
IN_PLACE = ("in-place", "permuted", *REPLACED, *RESTORED)
DEVIATIONS = 4  # standard deviations of room for targets of random length: 1 draw in 30,000 is longer
# Assumed number of tokens per word, which scales the variance of whole-word noise. It is high, so that texts
# with long words still fit.
WORD_TOKENS = 4
HIGHEST_RATE = 0.99  # beyond it a text would be more than 100 times as long as its inputs
LONGEST_MEAN_SPAN = 10_000  # [tokens]
SHORTEST_INPUTS = 3  # one visible token, one that replaces noise, EOS [tokens]
# [CLS], two [SEP] and four tokens, since random numbers are drawn per token and a pair needs four [tokens]
SHORTEST_MLM_INPUTS = 7


def _noises_that_use(field: str) -> Values:
    """Return the kinds of noise that use a setting of ``CorruptionConfig``."""
    return Values(tuple(name for name, noise in NOISES.items() if field not in noise.ignores))


def _unless_mixture(*alternatives: Condition) -> tuple[Condition, ...]:
    """Return the alternatives, each with the further condition that the objective is not a mixture.

    A setting is used if one of the alternatives holds. An alternative, a dict from other settings to values,
    holds if each of these settings has one of its values. Without alternatives the only condition is that the
    objective is not a mixture, whose denoisers each have settings of their own.
    """
    no_mixture: Condition = {"mixture": Values(("",), description="an objective without a mixture")}
    return tuple(no_mixture | each for each in alternatives or ({},))


# All objectives but a causal LM, which has no inputs (``Objective.has_inputs``) and one format of targets.
WITH_INPUTS: tuple[Condition, ...] = (
    {"noise": Values(exclude=("everything",))},
    {"inputs": Values(exclude=("drop",))},
)
_NOISES_ACROSS_DOCUMENTS = tuple(name for name, noise in NOISES.items() if not noise.per_document)
# Objectives whose documents may be concatenated, so that EOS can separate them (``Objective.concatenates``).
_MAY_CONCATENATE: tuple[Condition, ...] = (
    {"noise": Values(_NOISES_ACROSS_DOCUMENTS), "pairs": ("none",)},
    {"noise": ("everything",), "inputs": ("drop",)},
)
CONCATENATED: tuple[Condition, ...] = tuple(
    one | {"documents": ("concatenated",)} for one in _MAY_CONCATENATE
)

PairsName = Literal["none", "next-sentence", "next-single-sentence", "sentence-order"]
# pairs whose negatives take text from another document
NEXT_SENTENCE = ("next-sentence", "next-single-sentence")

# T5 ends every example, also where the text was cut. Others separate documents and nothing else: a causal
# model that finds EOS at the same position of every row learns the position, and stops there. With "none"
# segment ids and positions alone tell packed examples apart.
EosPlacement = Literal["each-example", "between-documents", "none"]
# Which tokens of its row a decoder learns to predict.
LossName = Literal["all-tokens", "targets"]
DECODER_ONLY: Condition = {"model.architecture": ("decoder", "prefix-decoder")}
_HAS_DECODER: Condition = {
    "model.architecture": Values(exclude=("encoder",), description="a model with a decoder"),
}


def check_name(field: str, name: str, known: Collection[str]) -> None:
    """Raise SettingError for a name of no entry, with the nearest one."""
    if name not in known:
        raise SettingError(f"objective.{field}={name!r} is unknown{did_you_mean(name, known)}")


@dataclass(frozen=True)
class Objective:
    """An objective: corruption mask x format of inputs x format of targets; or a mixture of these."""

    noise: NoiseName = setting("iid", _unless_mixture())  # how corrupted tokens are chosen
    # what replaces corrupted tokens in the inputs
    inputs: InputsName = setting("sentinels", _unless_mixture({"noise": Values(exclude=HIDES_NOTHING)}))
    # what the model predicts, and what replaces the tokens that are not corrupted
    targets: TargetsName = setting("sentinels", _unless_mixture(*WITH_INPUTS))
    # share of tokens that are corrupted (ignored with noise
    # middle, suffix, everything, none, random-text, uniform-rate and uniform-count)
    rate: float = setting(0.15, _unless_mixture({"noise": _noises_that_use("rate")}))
    # mean length of corrupted spans [tokens]
    mean_span_length: float = setting(3.0, _unless_mixture({"noise": _noises_that_use("mean_span_length")}))
    # share of the corrupted tokens that become any token, with masks-or-random and masks-random-or-same
    random_share: float = setting(
        0.1, _unless_mixture({"inputs": ("masks-or-random", "masks-random-or-same")})
    )
    # share of the corrupted tokens that stay as they were, with masks-random-or-same
    same_share: float = setting(0.1, _unless_mixture({"inputs": ("masks-random-or-same",)}))
    # order of the inputs: that of the text, its sentences permuted, or the text rotated to begin at any
    # token; targets keep the order of the text
    sentences: Literal["in-order", "permuted", "rotated"] = setting("in-order", _unless_mixture(*WITH_INPUTS))
    # classification of two pieces of text by an encoder: none, next sentence, or sentence order; pieces are
    # segments of several sentences, and with next-single-sentence one sentence each
    pairs: PairsName = setting("none", _unless_mixture({"targets": IN_PLACE}))
    # whether a sequence continues across the end of a document, or holds text of one document alone
    documents: Literal["concatenated", "apart"] = setting("concatenated", _unless_mixture(*_MAY_CONCATENATE))
    # where EOS (in encoders [SEP]) is written; none: nowhere (only models with a decoder)
    eos: EosPlacement = setting("each-example", _unless_mixture(*CONCATENATED, _HAS_DECODER))
    # upper end of the suffix's share of tokens, which is uniform in [rate, max_rate]; None: always rate
    max_rate: float | None = setting(None, _unless_mixture({"noise": ("suffix-share",)}))
    # tokens on which the loss of a decoder without an encoder is computed in pre-training: all of a row, or
    # the targets alone and not the inputs before them
    loss: LossName = setting(
        "all-tokens",
        _unless_mixture(*(DECODER_ONLY | one for one in WITH_INPUTS)),
    )
    # name of a mixture of denoisers, each with noise, inputs, targets and the rest of its own; empty: none
    mixture: str = ""

    def __post_init__(self):
        # names may have been added at run time, where type checking cannot see them
        check_name("noise", self.noise, NOISES)
        check_name("inputs", self.inputs, [*get_args(InputsName), *INPUTS])
        check_name("targets", self.targets, [*get_args(TargetsName), *TARGETS])
        if not 0 < self.rate <= HIGHEST_RATE:
            raise SettingError(
                f"objective.rate={self.rate} should lie between 0 and {HIGHEST_RATE}, such as 0.15"
            )
        if not 1 <= self.mean_span_length <= LONGEST_MEAN_SPAN:
            raise SettingError(
                f"objective.mean_span_length={self.mean_span_length} should be from 1 to "
                f"{LONGEST_MEAN_SPAN:,}, such as 3.0"
            )

        if self.max_rate is not None and not self.rate <= self.max_rate <= 1:
            raise SettingError(
                f"objective.max_rate={self.max_rate} should lie between objective.rate={self.rate} and 1"
            )
        if self.mixture:
            check_name("mixture", self.mixture, DENOISER_MIXTURES)
        check_at_least_0_below_1(self, "objective.", "random_share same_share")
        if self.inputs == "masks-random-or-same" and self.random_share + self.same_share > 1:
            raise SettingError(
                f"objective.random_share={self.random_share} and objective.same_share={self.same_share} "
                "should be at most 1 together"
            )

    @property
    def corruption(self) -> Noise:
        """Return the entry of NOISES that draws the corruption mask."""
        return NOISES[self.noise]

    def draw_noise(self, texts: CorruptionInputs) -> np.ndarray:
        """Return the corruption mask, bool [B,L], True on noise; what lies behind a text is to be ignored.

        Raise SettingError if the entry of NOISES returns something else.
        """
        mask = np.asarray(self.corruption.mask(self, texts))
        batch, _, length = texts.uniforms.shape
        if mask.shape != (batch, length) or mask.dtype != bool:
            raise SettingError(
                f"NOISES[{self.noise!r}] returned {mask.dtype} of shape {list(mask.shape)}; it should return "
                f"bool [B,L], here {[batch, length]}"
            )
        return mask

    @property
    def denoisers(self) -> "tuple[Denoiser, ...]":
        """Return the denoisers of its mixture; without a mixture, itself alone."""
        return DENOISER_MIXTURES[self.mixture] if self.mixture else (Denoiser("", self),)

    @property
    def is_mlm(self) -> bool:
        """Return whether targets are predicted in place, at the masked positions, as by encoders."""
        if self.mixture:
            # lm.data.checks.check_mixture makes sure that this holds for all denoisers of a mixture or none
            return self.denoisers[0].objective.is_mlm
        return self.targets in IN_PLACE

    @property
    def needs_collocations(self) -> bool:
        """Return whether it, or a denoiser of its mixture, hides the collocations of the training text."""
        return any(denoiser.objective.corruption.needs_collocations for denoiser in self.denoisers)

    @property
    def has_inputs(self) -> bool:
        """Return False for a causal LM, which has no inputs at all, not even an EOS.

        A mixture has inputs if one of its denoisers has.
        """
        if self.mixture:
            return any(denoiser.objective.has_inputs for denoiser in self.denoisers)
        return (self.noise, self.inputs) != ("everything", "drop")

    @property
    def targets_format(self) -> Format:
        """Return the format of the targets of a model with a decoder.

        It is that of ``targets``, but the whole text if noise is infilled.
        """
        return TARGETS["everything" if self.corruption.infill else self.targets]

    @property
    def concatenates(self) -> bool:
        """Return whether documents are concatenated before they are split into segments.

        They are kept apart if ``documents`` says so, for pairs of sentences, and for noise that splits or
        hides each document (prefix LM, deshuffling), except in a causal LM.
        """
        is_apart = self.corruption.per_document and self.has_inputs
        return self.pairs == "none" and self.documents == "concatenated" and not is_apart

    @property
    def eos_between_documents(self) -> bool:
        """Return whether EOS separates concatenated documents instead of ending each example."""
        return self.concatenates and self.eos == "between-documents"

    @property
    def writes_eos(self) -> bool:
        """Return whether EOS ends examples or documents; of a mixture, whether it does in any denoiser."""
        return any(denoiser.objective.eos != "none" for denoiser in self.denoisers)

    @property
    def eos_after_each_example(self) -> bool:
        """Return whether EOS ends each example."""
        return self.eos != "none" and not self.eos_between_documents

    @property
    def uniforms_per_token(self) -> int:
        """Return the random numbers per token: for the mask, the two formats and the order of the inputs."""
        per_format = INPUTS[self.inputs].uniforms_per_token
        if not self.is_mlm:
            per_format += self.targets_format.uniforms_per_token
        return self.corruption.uniforms_per_token + per_format + (self.sentences != "in-order")


@dataclass(frozen=True)
class Denoiser:
    """One objective of a mixture, and how often it makes a row."""

    name: str  # within its mixture, as logs and reports call it: "r-3"
    objective: Objective
    weight: float = 1.0  # rows in proportion to the weights of the others
    # the mode token that begins its inputs, such as "[R]"; "": none. Equal modes of a mixture have one token.
    mode: str = ""


_CAUSAL_LM = Objective(noise="everything", inputs="drop", targets="everything")
_INFILLING = Objective(
    noise="poisson-spans", inputs="span-masks", targets="everything", rate=0.3, sentences="permuted"
)
_BART = Objective(targets="everything", eos="between-documents")
_ELECTRA = Objective(inputs="masks", targets="replaced", eos="between-documents")
_MASKED_LM = Objective(inputs="masks-random-or-same", targets="in-place", eos="between-documents")
_DIFFUSION = Objective(noise="uniform-rate", inputs="masks", targets="in-place", eos="between-documents")
_COPY = Objective(noise="none", targets="everything")

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
    # BART's own objective, which also permutes sentences (Lewis et al. 2020, section 5.1).
    # Infilling alone has ``sentences`` "in-order".
    "text-infilling": replace(_INFILLING, eos="between-documents"),
    "token-deletion": replace(_BART, inputs="drop"),
    "document-rotation": replace(_BART, noise="none", sentences="rotated"),
    "sentence-permutation": replace(_BART, noise="none", sentences="permuted"),
    "mass": Objective(noise="single-span", inputs="masks", targets="drop", rate=0.5),
    "fill-in-the-middle": Objective(noise="middle", targets="drop"),
    "masked-lm": _MASKED_LM,
    "whole-word-masked-lm": replace(_MASKED_LM, noise="whole-words"),
    "pmi-masked-lm": replace(_MASKED_LM, noise="collocations"),
    # Yang et al. 2019, section 2.3, partial prediction with K = 6
    "permutation-lm": replace(
        _MASKED_LM, noise="geometric-spans", inputs="visible", targets="permuted", rate=1 / 6
    ),
    "span-masked-lm": replace(_MASKED_LM, noise="geometric-spans"),
    "masked-diffusion": _DIFFUSION,
    "any-order": replace(_DIFFUSION, noise="uniform-count"),
    "electra": _ELECTRA,
    "electra-15": replace(_ELECTRA, targets="replaced-at-masks"),
    "replace-mlm": replace(_ELECTRA, targets="restored-at-masks"),
    "all-tokens-mlm": replace(_ELECTRA, targets="restored"),
    "copy": _COPY,
    "copy-random": replace(_COPY, noise="random-text"),  # the copying task [Graves et al. 2014, section 4.1]
}


def _spans(name: str, mean_span_length: float, rate: float, weight: float = 1.0, mode: str = "") -> Denoiser:
    """Return a denoiser of T5's span corruption."""
    objective = Objective(noise="spans", rate=rate, mean_span_length=mean_span_length)
    return Denoiser(name, objective, weight, mode)


def _suffix(name: str, rate: float, weight: float = 1.0, mode: str = "") -> Denoiser:
    """Return a denoiser with one span, which is the end of the text: sequential denoising, as a prefix LM."""
    return Denoiser(name, Objective(noise="suffix-share", rate=rate), weight, mode)


# Tay et al. 2022 (UL2), table 1: regular (R), sequential (S) and extreme (X) denoisers by (mean span, rate),
# in equal shares. The mode token says which of the three kinds a text is of ("mode switching").
_UL2 = (
    _spans("r-3", 3, 0.15, mode="[R]"),
    _spans("r-8", 8, 0.15, mode="[R]"),
    _suffix("s", 0.25, mode="[S]"),
    _spans("x-3", 3, 0.5, mode="[X]"),
    _spans("x-8", 8, 0.5, mode="[X]"),
    _spans("x-64-15", 64, 0.15, mode="[X]"),
    _spans("x-64-50", 64, 0.5, mode="[X]"),
)
_MIDDLE = Objective(noise="middle", inputs="prefix-suffix-middle", targets="drop")

# By ``Objective.mixture``. Rows of a batch choose among the denoisers in proportion to their weights.
DENOISER_MIXTURES: dict[str, tuple[Denoiser, ...]] = {
    "ul2": _UL2,
    "ul2-without-modes": tuple(replace(denoiser, mode="") for denoiser in _UL2),
    # T5Gemma 2 (Zhang et al. 2025, arXiv 2512.14856): 1:1:1:1:4, the last with 3/4 of the text as its target
    "t5gemma-2": (
        _spans("span-3", 3, 0.15),
        _spans("span-12", 12, 0.5),
        _spans("span-32-15", 32, 0.15),
        _spans("span-32-50", 32, 0.5),
        _suffix("suffix", 0.75, weight=4),
    ),
    # Bavarian et al. 2022 for decoders: half of the rows unchanged, a quarter in each of the two orders; the
    # loss on all tokens
    "fill-in-the-middle-lm": (
        Denoiser("causal-lm", OBJECTIVES["causal-lm"], weight=2),
        Denoiser("prefix-suffix-middle", _MIDDLE),
        Denoiser("suffix-prefix-middle", replace(_MIDDLE, inputs="suffix-prefix-middle")),
    ),
    # Du et al. 2022 (GLM), section 2.1.1: blanks of 3 tokens on average, 15 % of the text, filled in random
    # order; and half of the rows a suffix of half the text or more (section 2.1.2, "document-level")
    "glm": (
        Denoiser("blanks", Objective(noise="spans", targets="shuffled-sentinels", loss="targets")),
        Denoiser("document", Objective(noise="suffix-share", rate=0.5, max_rate=1.0, loss="targets")),
    ),
}


class Lengths(NamedTuple):
    """The lengths of an example [tokens]: of its text, and the most that its inputs and targets may have.

    EOS is part of inputs and of targets.
    """

    raw: int  # of the text before corruption
    inputs: int
    targets: int  # where one row holds inputs and targets: the row's length less ``inputs``


def corrupted_lengths(
    objective: Objective, lengths: np.ndarray, length_uniforms: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the most input tokens and target tokens that texts of these lengths may have, int [B] each.

    They are upper bounds, since ``NoiseCounts`` are. Both count one token for EOS, unless ``eos`` is "none";
    the inputs count none if their format has an end of its own (``Format.ends_with_eos``). With
    "between-documents" no example ends with EOS, and the room for it stays empty.

    Only for noise with ``counts``, whose lengths depend on one random number per text, ``length_uniforms``
    [B].
    """
    assert objective.corruption.counts is not None, "the amount of noise is random"
    counts = objective.corruption.counts(objective, lengths, length_uniforms)
    num_noise_tokens, num_noise_spans, num_visible_spans = counts
    num_noise_spans = np.where(num_noise_tokens, num_noise_spans, 0)
    inputs_format, targets_format = INPUTS[objective.inputs], TARGETS[objective.targets]
    inputs = inputs_format.formatted_length(lengths, num_noise_tokens, num_noise_spans)
    targets = targets_format.formatted_length(lengths, num_noise_tokens, num_visible_spans)
    if objective.writes_eos:
        inputs, targets = inputs + int(inputs_format.ends_with_eos), targets + 1
    return inputs if objective.has_inputs else np.zeros_like(inputs), targets


def compute_lengths(objective: Objective, inputs_length: int) -> Lengths:
    """Return the most raw tokens whose inputs fit in ``inputs_length``, and the room for their targets.

    T5's ``random_spans_helper``. Raise SettingError if ``inputs_length`` is too short for one example.

    >>> compute_lengths(Objective(noise="spans"), 512)
    Lengths(raw=568, inputs=512, targets=114)
    """
    shortest = SHORTEST_MLM_INPUTS if objective.is_mlm else SHORTEST_INPUTS
    if inputs_length < shortest:
        raise SettingError(f"data.inputs_length={inputs_length} should be at least {shortest}, such as 512")
    if objective.is_mlm:  # all but [CLS] and the [SEP] behind each piece is text
        return Lengths(inputs_length - (2 if objective.pairs == "none" else 3), inputs_length, 0)
    if objective.corruption.counts and not objective.corruption.per_document:
        return _fixed_lengths(objective, inputs_length)
    raw = inputs_length - objective.eos_after_each_example  # one token less, for EOS at the end
    if num_fim_sentinels := INPUTS[objective.inputs].num_sentinels:
        # The last sentinel replaces EOS; without EOS, the at least one noise token makes room for it.
        raw += 1 - num_fim_sentinels
    if raw < 2:
        raise _no_room_error(objective, inputs_length)
    targets = inputs_length
    if not objective.corruption.fits_without_trimming and objective.targets != "everything":
        targets = min(targets, _room_for_random_targets(objective, raw))
    return Lengths(raw, inputs_length if objective.has_inputs else 0, targets)


def _fixed_lengths(objective: Objective, inputs_length: int) -> Lengths:
    """Return the lengths for noise with ``counts``, by trying all lengths of texts."""
    # A share of 1 - rate of the raw tokens stays in the inputs, so that far longer texts cannot fit; the
    # factor 2 leaves room for rounding.
    raw = np.arange(2, math.ceil(inputs_length * 2 / (1 - objective.rate)) + 2)
    # Noise may depend on one random number; 0 and 1 give the extremes, of which we take the longer.
    low_inputs, low_targets = corrupted_lengths(objective, raw, np.zeros(len(raw)))
    high_inputs, high_targets = corrupted_lengths(objective, raw, np.ones(len(raw)))
    inputs, targets = np.maximum(low_inputs, high_inputs), np.maximum(low_targets, high_targets)
    fits = inputs <= inputs_length
    if objective.corruption.targets_limited_to_inputs_length:
        fits &= targets <= inputs_length
    if not fits.any():
        raise _no_room_error(objective, inputs_length)
    longest = int(np.flatnonzero(fits)[-1])
    if objective.corruption.targets_limited_to_inputs_length:
        return Lengths(int(raw[longest]), int(inputs[longest]), int(targets[longest]))
    # At 50 % noise T5 takes one raw token less, so that targets are not longer than inputs, and one target.
    # The shorter text may have as many noise tokens, and then needs as much room.
    if longest and objective.rate == 0.5 and targets[longest] > inputs[longest]:
        room = max(targets[longest] - 1, targets[longest - 1])
        return Lengths(int(raw[longest - 1]), inputs_length, int(room))
    return Lengths(int(raw[longest]), inputs_length, int(targets[longest]))


def _no_room_error(objective: Objective, inputs_length: int) -> SettingError:
    """Return the error of inputs too short for a text of two tokens, one visible and one hidden."""
    return SettingError(
        f"data.inputs_length={inputs_length} has no room for a text of two tokens under "
        f"objective.noise={objective.noise!r} and objective.inputs={objective.inputs!r}: raise it"
    )


def _room_for_random_targets(objective: Objective, raw: int) -> int:
    """Return the room for targets of L raw tokens, each of which is noise with probability p.

    It is the mean number of targets plus DEVIATIONS standard deviations.

    "drop" predicts the noise: binomial, mean Lp, variance Lp(1-p); for whole-word noise the variance is
    WORD_TOKENS times as large. "sentinels" has a target where a token is noise or the one before it is, and
    always one at the very start: L of them, less the L - 1 products q_i q_{i-1}, where q is 1 for a token
    that is no noise, and 0 for noise. With P(q = 1) = Q = 1-p the mean is L - (L-1)Q^2. Each product has
    variance Q^2 - Q^4, and each of the L-2 pairs of neighbouring products the covariance Q^3 - Q^4.

    512 inputs at 10/15/25/50 %: 149/200/287/435 with EOS. T5's 103/192/256/512 cut 35 % of the examples at
    10 %, 2 % at 25 %; its 104 for "drop" at 15 %, where this gives 110, cut 0.07 %.
    """
    p, q = objective.rate, 1 - objective.rate
    if objective.targets == "drop":
        mean, variance = raw * p, raw * p * q
        if objective.corruption.needs_word_starts:
            variance *= WORD_TOKENS
    else:
        mean = raw - (raw - 1) * q**2
        variance = (raw - 1) * (q**2 - q**4) + 2 * max(raw - 2, 0) * (q**3 - q**4)
    return math.ceil(mean + DEVIATIONS * math.sqrt(variance)) + objective.writes_eos

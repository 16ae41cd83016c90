"""A model with its tokenizer, which scores texts and answers prompts as lm-evaluation-harness asks it to.

Its requests are those of the harness [Gao et al. 2021]. A context and its continuation are encoded together
and cut where the tokens of the context end, blanks at the end of a context belonging to the continuation.
What is longer than the model reads loses its beginning.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from lm import sharding
from lm.config.base import SettingError, nearest
from lm.config.decoding import Decoding
from lm.evaluate.generate import Model, beam_search, decode, prompt_batch
from lm.evaluate.loglikelihood import Continuation, Masking, Put, TokenIds, score_continuations

PROMPTS = 32  # prompts that are answered together [rows]
NARROWEST = 16  # smallest of the powers of two to which prompts are padded [tokens]
DEFAULT_LENGTH = 256  # longest answer where a request names no length, as in the harness [tokens]
# names that requests use for the longest answer
LENGTH_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "num_beams", "seed")


@dataclass(frozen=True)
class TextModel:
    """A model that is asked in texts; ``put`` places a batch as that of a ``Steps`` does."""

    model: Model
    put: Put
    encode: Callable[[str], list[int]]  # a text alone
    framed: Callable[[str], list[int]]  # a prompt, with the ids around it
    decode: Callable[[Iterable[int]], str]
    prefix: int | None  # stands before a text without a context: BOS, else EOS
    masking: Masking | None = None  # for encoders only
    max_length: int | None = None  # longest row; None: model.positions.max_length [tokens]

    @property
    def longest(self) -> int:
        """Return how many tokens are read at most, without the start token that is not in a prompt."""
        config = self.model.config
        starts = not config.has_encoder and config.special.start is not None
        return (self.max_length or config.positions.max_length) - starts

    def log_likelihoods(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Return log-probability [nats] of each continuation given its context, and whether it is greedy."""
        return self._scored([self.pair(*pair) for pair in pairs])

    def rolling(self, texts: Sequence[str]) -> list[float]:
        """Return the log-probability [nats] of whole texts, of any length, each token scored once."""
        windows = [
            [*rolling_windows(self._bare(self.framed(text)), self._start(), self.longest)] for text in texts
        ]
        scores = iter(self._scored([pair for few in windows for pair in few]))
        return [sum(next(scores)[0] for _ in few) for few in windows]

    def generate(self, prompts: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """Return the answer to each prompt, up to the first of the texts ``until`` among its settings.

        Decoding is greedy unless the settings sample or search. Raises SettingError for an unknown setting.
        """
        groups = defaultdict[tuple[Decoding, int], list[int]](list)
        for number, (_, settings) in enumerate(prompts):
            groups[decoding_from_kwargs(settings)].append(number)
        answers = [""] * len(prompts)
        for (decoding, seed), numbers in groups.items():
            room = self.max_length or self.model.config.positions.max_length
            room -= 0 if self.model.config.has_encoder else decoding.max_length
            if room < 1:
                raise SettingError(f"max_gen_toks={decoding.max_length} leaves no room for a prompt")
            rows = {number: self.framed(prompts[number][0])[-room:] for number in numbers}
            for part in _batches(rows):
                tokens = self._written([rows[number] for number in part], decoding, seed)
                for number, ids in zip(part, tokens, strict=False):
                    answers[number] = until(self.decode(ids), prompts[number][1].get("until"))
        return answers

    def pair(self, context: str, continuation: str) -> Continuation:
        """Return the ids of a context and of its continuation."""
        if not context:
            scored = self.encode(continuation)
            start = self._start()
            return (start, scored) if scored[:1] != start or len(scored) == 1 else (scored[:1], scored[1:])
        blanks = len(context) - len(context.rstrip())
        context, continuation = (
            context[: len(context) - blanks],
            context[len(context) - blanks :] + continuation,
        )
        if self.model.config.has_encoder and self.model.config.has_decoder:
            return self.framed(context), self.encode(continuation)
        if self.masking is not None:
            return self.encode(context), self.encode(context + continuation)[len(self.encode(context)) :]
        before = self.encode(context)
        return self._bare(self.framed(context)), self.encode(context + continuation)[len(before) :]

    def _start(self) -> list[int]:
        return [] if self.prefix is None else [self.prefix]

    def _bare(self, ids: list[int]) -> list[int]:
        """Return ids without the start token, which ``lm.evaluate.loglikelihood`` adds itself."""
        config = self.model.config
        starts = not config.has_encoder and config.special.start is not None
        return ids[1:] if starts and ids[:1] == [config.special.start] else ids

    def _scored(self, pairs: Sequence[Continuation]) -> list[tuple[float, bool]]:
        both = self.model.config.has_encoder and self.model.config.has_decoder
        cut = [self._cut(context, scored, both) for context, scored in pairs]
        log_probs, greedy = score_continuations(self.model, cut, self.put, self.masking)
        return list(zip(log_probs.tolist(), greedy.tolist(), strict=True))

    def _cut(self, context: TokenIds, scored: TokenIds, both: bool) -> Continuation:
        """Drop the beginning of a context that is too long; SettingError if the continuation alone is."""
        if len(scored) > self.longest:
            raise SettingError(
                f"a continuation of {len(scored)} tokens exceeds the {self.longest} of the model"
            )
        frame = -1 if self.masking is None else len((*self.masking.begin, *self.masking.end))
        room = self.longest if both else self.longest - len(scored) - frame
        return context[max(len(context) - room, 0) :], scored

    def _written(self, rows: Sequence[Sequence[int]], decoding: Decoding, seed: int) -> np.ndarray:
        """Return the answers to prompts of ids, int32 [rows or more,max_length]."""
        config, mesh = self.model.config, getattr(jax.tree.leaves(self.model)[0].sharding, "mesh", None)
        parts = 1 if mesh is None else sharding.batch_shards(mesh.shape)
        width = NARROWEST
        while width < max(map(len, rows)):
            width *= 2
        if not config.has_encoder and config.positions.kind == "learned":
            width = min(width, config.positions.max_length + 1 - decoding.max_length)
        tokens = np.full((-(-PROMPTS // parts) * parts, width), config.special.pad, np.int32)
        segments = np.zeros(tokens.shape, np.int32)
        for number, ids in enumerate(rows):
            tokens[number, : len(ids)], segments[number, : len(ids)] = ids, 1
        placed = self.put(prompt_batch(config, tokens, segments))
        if decoding.beams > 1:
            return np.asarray(beam_search(self.model, placed, decoding)[0][:, 0])
        return np.asarray(decode(self.model, placed, decoding, key=jax.random.key(seed)).tokens)


def rolling_windows(ids: TokenIds, prefix: TokenIds, length: int) -> Iterator[Continuation]:
    """Yield (context, continuation) pairs in which every token is scored once.

    Each row is as full as it can be, and has one token at least as context.
    """
    if len(ids):
        yield prefix, ids[:length]
    for begin in range(length, len(ids), length):
        end = min(begin + length, len(ids))
        yield ids[end - length - 1 : begin], ids[begin:end]


def decoding_from_kwargs(settings: Mapping[str, Any]) -> tuple[Decoding, int]:
    """Return how the settings of a request decode, and the seed; raise SettingError for unknown settings."""
    known = {*LENGTH_NAMES, *SAMPLING, "until"}
    if unknown := sorted(settings.keys() - known):
        raise SettingError(f"generation_kwargs: {unknown[0]!r} is unknown{nearest(unknown[0], known)}")
    given = {name: value for name, value in settings.items() if value is not None}
    length = int(next((given[name] for name in LENGTH_NAMES if name in given), DEFAULT_LENGTH))
    temperature = float(given.get("temperature", 1.0 if given.get("do_sample") else 0.0))
    if not given.get("do_sample", temperature > 0):
        return Decoding(length, beams=int(given.get("num_beams", 1))), 0
    top_k, top_p = int(given.get("top_k", 0)), float(given.get("top_p", 1.0))
    return Decoding(length, temperature=temperature, top_k=top_k, top_p=top_p), int(given.get("seed", 0))


def until(text: str, stops: str | Sequence[str] | None) -> str:
    """Return a text up to the first of ``stops`` in it."""
    for stop in [stops] if isinstance(stops, str) else stops or ():
        text = text.split(stop)[0] if stop else text
    return text


def _batches(rows: Mapping[int, Sequence[int]]) -> Iterator[list[int]]:
    """Yield the numbers of at most PROMPTS rows at a time, those of similar length together."""
    order = sorted(rows, key=lambda number: len(rows[number]))
    yield from (order[start : start + PROMPTS] for start in range(0, len(order), PROMPTS))

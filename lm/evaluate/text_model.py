"""A model with its tokenizer that answers the requests of lm-evaluation-harness [Gao et al. 2021].

A context and its continuation are tokenized together and split where the tokens of the context end; an
encoder-decoder reads them apart. Spaces at the end of a context belong to the continuation. Contexts that
exceed the model's length lose their beginning.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from lm import sharding
from lm.config.base import SettingError, did_you_mean
from lm.config.decoding import Decoding
from lm.evaluate.beam_search import TRANSFORMERS_RULES
from lm.evaluate.generate import Model, beam_search, decode, prompt_batch
from lm.evaluate.loglikelihood import (
    Masking,
    Request,
    ShardBatch,
    TokenIds,
    score_continuations,
    without_start,
)

BATCH_SIZE = 32  # prompts that are answered together [rows]
MIN_PADDED_LENGTH = 16  # smallest of the powers of two to which prompts are padded [tokens]
DEFAULT_LENGTH = 256  # longest answer if a request gives no length, as in the harness [tokens]
# settings by which a request may give the length of the longest answer: the first that is given counts
LENGTH_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
DEFAULT_TOP_K = 50  # number of tokens to sample from if a request gives none, as in transformers [tokens]
WHOLE_NUMBERS = (*LENGTH_NAMES, "top_k", "num_beams", "seed")  # settings of a request that have no fraction
NUMBERS = (*WHOLE_NUMBERS, "temperature", "top_p")


@dataclass(frozen=True)
class TextModel:
    """A model that scores texts and answers prompts."""

    model: Model
    shard_batch: ShardBatch  # places this process's part of a batch on its devices
    encode: Callable[[str], list[int]]  # a text without special tokens
    encode_prompt: Callable[[str], list[int]]  # a prompt with its special tokens
    decode: Callable[[Iterable[int]], str]
    prefix: int | None  # precedes a text without a context: BOS, else EOS
    masking: Masking | None = None  # for encoders only
    max_length: int | None = None  # longest row; None: model.positions.max_length [tokens]

    def __post_init__(self):
        if self.max_length is None:
            return
        config = self.model.config
        longest = config.positions.max_length
        if config.has_max_length and self.max_length > longest:
            raise SettingError(f"max_length={self.max_length} exceeds model.positions.max_length={longest}")
        least = self._num_special_tokens + 1
        if self.max_length < least:
            raise SettingError(
                f"max_length={self.max_length} should be at least {least}: the special tokens of a text, and "
                "one token of it"
            )

    @property
    def max_text_length(self) -> int:
        """Return the maximum number of tokens of a text that is scored, without special tokens.

        These, a decoder's start token or those in ``masking``, are added when it is scored.
        """
        return self._row_length - self._num_special_tokens

    @property
    def _num_special_tokens(self) -> int:
        """Return the number of special tokens that scoring adds to a text."""
        num_ends = 0 if self.masking is None else len(self.masking.begin) + len(self.masking.end)
        return self._adds_start + num_ends

    @property
    def _row_length(self) -> int:
        return self.model.config.positions.max_length if self.max_length is None else self.max_length

    @property
    def _adds_start(self) -> bool:
        return not self.model.config.has_encoder and self.model.config.special.start is not None

    @property
    def _is_encoder_decoder(self) -> bool:
        return self.model.config.has_encoder and self.model.config.has_decoder

    def log_likelihoods(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Return log-probability [nats] of each continuation given its context, and whether it is greedy.

        Raises SettingError for what is no (context, continuation).
        """
        requests: list[Request] = []
        for number, pair in enumerate(pairs):
            is_pair = isinstance(pair, tuple | list) and len(pair) == 2
            if not is_pair or not all(isinstance(text, str) for text in pair):
                raise SettingError(
                    f"pairs[{number}]={pair!r:.80} should be (context, continuation), two texts"
                )
            requests.append(self.encode_pair(*pair))
        return self._score(requests)

    def rolling_log_likelihoods(self, texts: Sequence[str]) -> list[float]:
        """Return the log-probability [nats] of whole texts, of any length, each token scored once.

        As in the harness, the special tokens of a prompt are scored too, such as Llama's BOS and T5's EOS.
        Those of an encoder are not, nor is a start token that scoring adds.
        """
        if isinstance(texts, str):
            raise SettingError(
                f"rolling_log_likelihoods expects a list of texts, not the text {texts!r:.40}: [text]"
            )
        requests: list[Request] = []
        text_indices: list[int] = []
        for index, text in enumerate(texts):
            if self.masking is not None:
                ids = self.encode(text)
            else:
                ids = without_start(self.encode_prompt(text), self.model.config)
            text_requests = list(rolling_windows(ids, self._prefix_ids(), self.max_text_length))
            requests += text_requests
            text_indices += [index] * len(text_requests)
        totals = [0.0] * len(texts)
        for index, (log_prob, _) in zip(text_indices, self._score(requests), strict=True):
            totals[index] += log_prob
        return totals

    def generate(self, prompts: Sequence[str | tuple[str, Mapping[str, Any]]]) -> list[str]:
        """Return the answer to each prompt or (prompt, settings), up to the first of their ``until`` texts.

        Decoding is greedy unless the settings sample or search. Raises SettingError for an unknown setting.
        """
        if isinstance(prompts, str):
            raise SettingError(f"generate expects a list of prompts, not the text {prompts!r:.40}: [text]")
        pairs = [(prompt, {}) if isinstance(prompt, str) else prompt for prompt in prompts]
        groups = defaultdict[tuple[Decoding, int], list[int]](list)
        for index, (_, settings) in enumerate(pairs):
            groups[decoding_from_kwargs(settings)].append(index)
        answers = [""] * len(pairs)
        for (decoding, seed), indices in groups.items():
            room = self._row_length
            if not self.model.config.has_encoder:
                room -= decoding.max_length
            if room < 1:
                raise SettingError(
                    f"max_gen_toks={decoding.max_length} leaves no room for a prompt in a row of "
                    f"{self._row_length} tokens: give a max_gen_toks of at most {self._row_length - 1}"
                )
            ids = {index: self._prompt_ids(pairs[index][0], room) for index in indices}
            for number, batch in enumerate(_batches_by_length(ids)):
                key = jax.random.fold_in(jax.random.key(seed), number)
                generated = self._generate_batch([ids[index] for index in batch], decoding, key)
                for index, tokens in zip(batch, generated, strict=False):
                    answers[index] = cut_at_stops(self.decode(tokens), pairs[index][1].get("until"))
        return answers

    def encode_pair(self, context: str, continuation: str) -> Request:
        """Return the ids of a context and of its continuation, to be scored.

        Spaces at the end of the context move to the continuation. Without a context the prefix token is the
        context; it is not repeated if the ids of the continuation begin with it. An encoder-decoder's two
        texts are tokenized separately; else they are tokenized together and split where the tokens of the
        context end.
        """
        if not context.strip() and not self._is_encoder_decoder:
            context, continuation = "", context + continuation
        if not context:
            ids, prefix = self.encode(continuation), self._prefix_ids()
            begins_with_prefix = ids[:1] == prefix and len(ids) > 1
            return (ids[:1], ids[1:]) if begins_with_prefix else (prefix, ids)
        stripped = context.rstrip()
        context, continuation = stripped, context[len(stripped) :] + continuation
        if self._is_encoder_decoder:
            return self.encode_prompt(context), self.encode(continuation)
        context_ids = self.encode(context)
        continuation_ids = self.encode(context + continuation)[len(context_ids) :]
        if self.masking is not None:
            return context_ids, continuation_ids
        return without_start(self.encode_prompt(context), self.model.config), continuation_ids

    def _prefix_ids(self) -> list[int]:
        """Return the tokens before a text without context, without the start token, which scoring adds."""
        return [] if self.prefix is None or self._adds_start else [self.prefix]

    def _prompt_ids(self, prompt: str, room: int) -> list[int]:
        """Return the ids of a prompt; one that is too long loses its beginning, but not a decoder's start.

        For a model without a start token, an empty prompt becomes the prefix token.
        """
        ids = self.encode_prompt(prompt) or self._prefix_ids()
        kept = 1 if self._adds_start and ids[:1] == [self.model.config.special.start] else 0
        start, text = ids[:kept], ids[kept:]
        excess = max(len(ids) - room, 0)
        return start + text[excess:]

    def _score(self, requests: Sequence[Request]) -> list[tuple[float, bool]]:
        truncated = [self._truncate(context, continuation) for context, continuation in requests]
        scores = score_continuations(self.model, truncated, self.shard_batch, self.masking)
        return list(zip(scores.log_probs.tolist(), scores.is_greedy.tolist(), strict=True))

    def _truncate(self, context: TokenIds, continuation: TokenIds) -> Request:
        """Drop the beginning of a context that is too long; SettingError if the continuation alone is."""
        room = self.max_text_length
        if len(continuation) > room:
            raise SettingError(
                f"a continuation of {len(continuation)} tokens exceeds the {room} of the model"
            )
        if not self._is_encoder_decoder:
            room -= len(continuation)
            if self.masking is None:
                room += 1  # a decoder does not read the last token of the continuation
        return context[max(len(context) - room, 0) :], continuation

    def _generate_batch(
        self, prompts: Sequence[Sequence[int]], decoding: Decoding, key: jax.Array
    ) -> np.ndarray:
        """Return the answers to prompts of ids, int32 [R,max_length]; R - len(prompts) rows are padding."""
        config = self.model.config
        mesh = sharding.mesh_of(self.model)
        shards = 1 if mesh is None else sharding.batch_shards(mesh.shape)
        rows = -(-BATCH_SIZE // shards) * shards
        length = MIN_PADDED_LENGTH
        while length < max(map(len, prompts)):
            length *= 2
        if config.has_max_length:
            max_length = config.positions.max_length
            if not config.has_encoder:  # a decoder reads the answer, but for its last token, after the prompt
                max_length += 1 - decoding.max_length
            length = min(length, max_length)
        tokens = np.full((rows, length), config.special.pad, np.int32)
        segments = np.zeros(tokens.shape, np.int32)
        for row, ids in enumerate(prompts):
            tokens[row, : len(ids)], segments[row, : len(ids)] = ids, 1
        batch = self.shard_batch(prompt_batch(config, tokens, segments))
        if decoding.beams > 1:
            answers, _ = beam_search(self.model, batch, decoding, rules=TRANSFORMERS_RULES)
            return np.asarray(answers[:, 0])
        return np.asarray(decode(self.model, batch, decoding, key=key).tokens)


def rolling_windows(ids: TokenIds, prefix: TokenIds, length: int) -> Iterator[Request]:
    """Yield (context, continuation) pairs in which every token is scored once.

    A continuation has up to ``length`` tokens. The context of the first is ``prefix``, which may be empty;
    that of each other one is the token before it. The last context is longer, so that its row is full too.
    """
    if len(ids):
        yield prefix, ids[:length]
    for begin in range(length, len(ids), length):
        end = min(begin + length, len(ids))
        yield ids[end - length - 1 : begin], ids[begin:end]


def decoding_from_kwargs(settings: Mapping[str, Any]) -> tuple[Decoding, int]:
    """Return the decoding settings of a request, and the seed; raise SettingError for unknown settings.

    The default length is that of lm-evaluation-harness. The other defaults and the rules of beam search are
    those of transformers, but a temperature above 0 samples without ``do_sample`` too.
    """
    known = {*NUMBERS, "do_sample", "until"}
    if unknown := sorted(settings.keys() - known):
        raise SettingError(f"generation_kwargs: {unknown[0]!r} is unknown{did_you_mean(unknown[0], known)}")
    given = {name: value for name, value in settings.items() if value is not None}
    numbers = {name: _parse_number(name, value) for name, value in given.items() if name in NUMBERS}
    length = int(next((numbers[name] for name in LENGTH_NAMES if name in numbers), DEFAULT_LENGTH))
    beams = int(numbers.get("num_beams", 1))
    temperature = float(numbers.get("temperature", 1.0 if given.get("do_sample") else 0.0))
    if temperature < 0:
        raise SettingError(f"generation_kwargs: temperature={temperature} should be 0 or more, such as 0.8")
    is_sampled = given.get("do_sample", temperature > 0)
    if is_sampled and not temperature:
        raise SettingError(f"generation_kwargs: do_sample needs a temperature above 0, not {temperature}")
    if is_sampled and beams > 1:
        raise SettingError("generation_kwargs: num_beams and do_sample exclude each other")
    if not is_sampled:
        return Decoding(length, beams=beams, length_penalty=1.0), 0
    top_k, top_p = int(numbers.get("top_k", DEFAULT_TOP_K)), float(numbers.get("top_p", 1.0))
    return Decoding(length, temperature=temperature, top_k=top_k, top_p=top_p), int(numbers.get("seed", 0))


def _parse_number(name: str, value: Any) -> float:
    """Return the value of a setting as a number; SettingError for anything else.

    One of WHOLE_NUMBERS may have no fraction.
    """
    try:
        number = value if isinstance(value, int) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise SettingError(f"generation_kwargs: {name}={value!r} should be a number")
    if name in WHOLE_NUMBERS and number != int(number):
        raise SettingError(f"generation_kwargs: {name}={value!r} should be a whole number")
    return number


def cut_at_stops(text: str, stops: str | Sequence[str] | None) -> str:
    """Return a text up to the first of ``stops`` in it; stops that are empty do not count."""
    if isinstance(stops, str):
        stops = [stops]
    begins = [text.index(stop) for stop in stops or () if stop and stop in text]
    return text[: min(begins, default=len(text))]


def _batches_by_length(prompts: Mapping[int, Sequence[int]]) -> Iterator[list[int]]:
    """Yield the keys of at most BATCH_SIZE prompts at a time, those of similar length together."""
    order = sorted(prompts, key=lambda index: len(prompts[index]))
    yield from (order[start : start + BATCH_SIZE] for start in range(0, len(order), BATCH_SIZE))

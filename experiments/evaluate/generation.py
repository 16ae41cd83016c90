"""Prints what a run's model writes after prompts, and what it puts into the gaps of a text."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from rich.markup import escape

from experiments.console import UNBROKEN
from lm.config.base import SettingError, check_at_least, diff
from lm.config.decoding import Decoding
from lm.tokenizers.tokenizer import MASK, Tokenizer

if TYPE_CHECKING:  # with jax, which takes a second
    from experiments.runs.trained import Trained, TrainedNgrams

# answers that are searched for each text that is shown: several may read alike, since a text can be cut into
# tokens in more than one way
ANSWERS_PER_TEXT = 2
LONGEST_SPAN = 16  # that an encoder-decoder may write for a mask [tokens]
BEAM_OPTIONS = {"beams", "length_penalty"}  # of ``Decoding``
GREEDY = Decoding()


PassesName = Literal["mask-predict", "gibbs", "metropolis-hastings", "ancestral", "confidence"]
# those that give another text for each seed
SAMPLING_PASSES: tuple[PassesName, ...] = ("gibbs", "metropolis-hastings", "ancestral")


@dataclass(frozen=True)
class Filling:
    """Options for texts with gaps."""

    top: int = 5  # candidates to show per gap: tokens of an encoder, whole texts of an encoder-decoder
    iterations: int = 0  # encoders: fill the whole text in this many passes; 0: show candidates per gap
    # encoders: predict the least certain positions again in each pass (mask-predict); sample one position
    # after another given all others (gibbs), and keep a token only as far as it suits the whole text
    # (metropolis-hastings); or, as masked diffusion does, fill some masks in each pass: a random choice of
    # them (ancestral), or those of which the model is surest (confidence)
    passes: PassesName = "mask-predict"

    def __post_init__(self):
        check_at_least(self, "", top=1, iterations=0)
        if self.passes != "mask-predict" and not self.iterations:
            raise SettingError(f"passes={self.passes!r} needs iterations of 1 or more, such as 10")


def option_names(settings: Iterable[str]) -> str:
    """Return the options of the command line that set fields of ``Decoding`` and ``Filling``, in a row."""
    return ", ".join(f"--{name.replace('_', '-')}" for name in settings)


def write_answers(
    run: Path, prompts: Sequence[str], mixture: str, decoding: Decoding, filling: Filling, seed: int
) -> None:
    """Print what a model writes after each prompt, and how fast.

    Raises SettingError for options of filling gaps.
    """
    from experiments.runs.trained import generative_stages, open_run

    if refused := diff(Filling(), filling):
        raise SettingError(
            f"{option_names(refused)}: for texts with gaps; leave it out, or put {MASK} into --prompt"
        )
    write = _writer(decoding, seed)
    trained = open_run(run, generative_stages(run), mixture)
    batch = trained.batch([trained.encode(text) for text in prompts], decoding.max_length)
    UNBROKEN.print(f"[dim]{escape(trained.description)}[/]")
    _print_answers(
        prompts,
        lambda: write(trained.model, batch)[: len(prompts)],
        trained.vocabulary,
        trained.config.special.eos,
    )


def generate_with_ngrams(
    ngrams: "TrainedNgrams",
    prompts: Sequence[str],
    decoding: Decoding,
    filling: Filling,
    seed: int,
    gaps: str = "",
) -> None:
    """Print the n-grams' continuation of each prompt, read as the beginning of a document, and the speed.

    gaps: the marks of gaps in the prompts, such as "<mask>"; empty for none.

    Raises SettingError for prompts with gaps, and for options of beam search or of filling gaps.
    """
    beam_options = [name for name in diff(GREEDY, decoding) if name in BEAM_OPTIONS]
    if refused := [*beam_options, *diff(Filling(), filling)]:
        raise SettingError(
            f"n-grams write greedily or by sampling (--temperature); leave {option_names(refused)} out"
        )
    if gaps:
        raise SettingError(
            f"n-grams write what follows a text and fill no gaps; leave {gaps} out of --prompt"
        )
    vocabulary = ngrams.vocabulary
    ids = [vocabulary.encode_prompt(prompt) for prompt in prompts]
    UNBROKEN.print(f"[dim]{escape(ngrams.description)}[/]")
    _print_answers(
        prompts, lambda: ngram_continuations(ngrams, ids, decoding, seed), vocabulary, vocabulary.eos
    )


def ngram_continuations(
    ngrams: "TrainedNgrams", prompts: Sequence[Sequence[int]], decoding: Decoding, seed: int
) -> np.ndarray:
    """Return what n-grams write after prompts of ids, int32 [B,max_length], padded after EOS.

    Each token is chosen as with networks: the likeliest one, or one sampled at a temperature.
    """
    import jax

    from lm.classical.ngram import next_token_probs
    from lm.evaluate.sampling import next_token

    choose, key, vocabulary = jax.jit(next_token, static_argnums=0), jax.random.key(seed), ngrams.vocabulary
    answers = np.full((len(prompts), decoding.max_length), vocabulary.pad, np.int32)
    done = np.zeros(len(prompts), bool)
    for step in range(decoding.max_length):
        texts = [[*prompt, *answer] for prompt, answer in zip(prompts, answers[:, :step], strict=True)]
        probs = np.stack([next_token_probs(ngrams.model, text) for text in texts])
        tokens = choose(decoding, np.log(probs), jax.random.fold_in(key, step))
        answers[~done, step] = np.asarray(tokens)[~done]
        done |= answers[:, step] == vocabulary.eos
        if done.all():
            break
    return answers


def _print_answers(
    prompts: Sequence[str], write: Callable[[], np.ndarray], vocabulary: Tokenizer, eos: int | None
) -> None:
    """Print each prompt with its answer from ``write()`` [B,max_length], and the tokens per second."""
    write()  # compiles, so that the next call is timed alone
    start = time.perf_counter()
    tokens = write()
    seconds, count = time.perf_counter() - start, count_written(tokens, eos)
    for text, ids in zip(prompts, tokens, strict=True):
        UNBROKEN.print(f"[cyan]{escape(text)}[/]\n  {escape(vocabulary.decode(ids))}")
    UNBROKEN.print(f"{count} tokens in {seconds:.3f} s: {count / seconds:.0f} tokens/s")


def is_masked_diffusion(run: Path) -> bool:
    """Return whether a run trains an encoder to write texts by masked diffusion."""
    from experiments.runs.paths import load_settings

    experiment = load_settings(run)
    return experiment.model.architecture == "encoder" and experiment.objective.corruption.bounds_likelihood


def count_written(tokens: np.ndarray, eos: int | None) -> int:
    """Return the number of tokens in answers [B,max_length]: of each up to and with its first EOS, or all."""
    ends = tokens == eos
    return int(np.where(ends.any(1), ends.argmax(1) + 1, tokens.shape[1]).sum())


def _writer(decoding: Decoding, seed: int) -> Callable:
    """Return a function (model, batch) -> the best answers, int32 [B,max_length]."""
    import jax

    from lm.evaluate.generate import beam_search, decode

    if decoding.beams > 1:
        return lambda model, batch: np.asarray(beam_search(model, batch, decoding)[0][:, 0])
    key = jax.random.key(seed)
    return lambda model, batch: np.asarray(decode(model, batch, decoding, key=key).tokens)


def fill_gaps(
    run: Path,
    texts: Sequence[str],
    mixture: str,
    filling: Filling,
    seed: int,
    decoding: Decoding = GREEDY,
    gaps: str = MASK,
) -> None:
    """Print what a model puts for each [MASK] of the texts.

    gaps: what the user typed for it, such as "<extra_id_0>", which an error names.

    Raises SettingError for options of decoding, but for the temperature of the passes "confidence".
    """
    from experiments.runs.trained import mask_filling_stages, open_run

    unread = list(diff(GREEDY, decoding))
    if filling.passes == "confidence":
        unread = [name for name in unread if name != "temperature"]
    if unread:
        raise SettingError(
            f"{option_names(unread)}: not read where masks are filled, but for --temperature with --passes "
            "confidence: leave it out"
        )
    trained = open_run(run, mask_filling_stages(run, gaps), mixture)
    if trained.config.has_decoder and filling.iterations:
        raise SettingError("--iterations is for encoders; an encoder-decoder writes its text once")
    UNBROKEN.print(f"[dim]{escape(trained.description)}[/]")
    for text in texts:
        if trained.config.has_decoder:
            lines = _infilled(trained, text, filling.top)
        elif filling.iterations:
            lines = _filled_in_passes(trained, text, filling, decoding.temperature, seed)
        else:
            lines = _candidates(trained, text, filling.top)
        for line in lines:
            UNBROKEN.print(line)


def _candidates(run: "Trained", text: str, top: int) -> Iterator[str]:
    """Yield an encoder's likeliest tokens for each mask, with their probabilities."""
    from lm.evaluate.mask_filling import fill_masks

    vocabulary = run.vocabulary
    ids, _ = run.encode_gaps(text)
    candidates = fill_masks(run.model, run.batch([ids]), mask=vocabulary.mask, k=top)
    for number, (tokens, shares) in enumerate(zip(*candidates, strict=True), 1):
        words = [escape(vocabulary.decode([token]) or str(token)) for token in tokens]
        line = "  ".join(f"{word} {share:.1%}" for word, share in zip(words, shares, strict=True))
        yield f"{escape(MASK)} {number}: {line}"


def _filled_in_passes(
    run: "Trained", text: str, filling: Filling, temperature: float, seed: int
) -> Iterator[str]:
    """Yield the text that an encoder fills in several passes, or several texts if it samples."""
    import jax

    from lm.evaluate.mask_filling import (
        ancestral,
        gibbs,
        mask_predict,
        metropolis_hastings,
        most_confident_first,
    )

    ids, _ = run.encode_gaps(text)
    vocabulary, options = run.vocabulary, {"iterations": filling.iterations, "mask": run.vocabulary.mask}
    samples = filling.passes in SAMPLING_PASSES or (filling.passes == "confidence" and temperature > 0)
    count = filling.top if samples else 1
    batch, key = run.batch([ids] * count), jax.random.key(seed)
    if filling.passes == "gibbs":
        filled = gibbs(run.model, batch, key, **options)
    elif filling.passes == "metropolis-hastings":
        filled, accepted = metropolis_hastings(run.model, batch, key, **options)
        yield f"{float(accepted[:count].mean()):.0%} of the proposals were accepted"
    elif filling.passes == "ancestral":
        filled = ancestral(run.model, batch, key, **options)
    elif filling.passes == "confidence":
        filled = most_confident_first(run.model, batch, key, temperature=temperature, **options)
    else:
        filled = mask_predict(run.model, batch, **options)
    special = (vocabulary.cls, vocabulary.sep, vocabulary.eos)
    for row in np.asarray(filled)[:count, : len(ids)]:
        yield escape(vocabulary.decode([token for token in row if token not in special]))


def _infilled(run: "Trained", text: str, top: int) -> Iterator[str]:
    """Yield the likeliest texts of an encoder-decoder, each once, with the probability of all its answers.

    Answers that leave a gap open, as an answer without its sentinel does, fill nothing and are left out. The
    last line says how many texts are missing, and why.
    """
    from lm.evaluate.mask_filling import infill, sentinel_spans

    vocabulary, config = run.vocabulary, run.config
    ids, sentinels = run.encode_gaps(text)
    num_copied = len(sentinels) if sentinels else len(ids)  # T5 repeats the sentinels, BART the whole text
    longest = LONGEST_SPAN * text.count(MASK) + num_copied + 1  # with EOS
    longest = min(longest, config.positions.max_length) if config.has_max_length else longest
    searched = min(ANSWERS_PER_TEXT * top, config.vocab_size)
    answers, shares = infill(run.model, run.batch([ids], longest), max_length=longest, k=searched)
    found: dict[str, float] = {}  # text -> its probability, of all answers that read alike
    num_open = 0
    for answer, share in zip(answers[0].tolist(), shares[0].tolist(), strict=True):
        filled = escape(vocabulary.decode(answer))
        if sentinels:
            answer_ids = answer
            if vocabulary.eos in answer:
                answer_ids = answer[: answer.index(vocabulary.eos)]
            spans = sentinel_spans(answer_ids, sentinels, vocabulary.vocab_size - vocabulary.num_sentinels)
            words = [vocabulary.decode(span) for span in spans if span is not None]
            if len(words) < len(spans):
                num_open += 1
                continue
            shown = zip(text.split(MASK), [*words, ""], strict=True)
            filled = "".join(f"{escape(part)}[bold]{escape(word)}[/]" for part, word in shown)
        found[filled] = found.get(filled, 0.0) + share
    for filled, share in sorted(found.items(), key=lambda pair: -pair[1])[:top]:
        yield f"{percentage(share):>7}  {filled}"
    if len(found) < top:
        searched = len(shares[0])
        counts = {"left a gap open": num_open, "read like another": searched - num_open - len(found)}
        reasons = " and ".join(f"{count} {what}" for what, count in counts.items() if count)
        note = f"{len(found)} of {top}: of the {searched} likeliest answers {reasons or 'each is shown'}"
        if not found:
            note = (
                f"no answer fills every gap: each of the {searched} likeliest leaves one open, as those of a "
                "model do that has learnt little"
            )
        yield f"[dim]{note}[/]"


def percentage(share: float) -> str:
    """Return a share as a percentage such as ``"12.3%"``; below 0.1 % it has an exponent: ``"9e-02%"``."""
    return f"{share:.1%}" if share >= 0.001 or not share else f"{100 * share:.0e}%"

"""Measures how likely a run's model finds texts, a corpus, or continuations of contexts."""

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from experiments.console import CONSOLE, UNBROKEN, listing, print_line
from experiments.evaluate.generation import option_names
from experiments.runs.paths import find_cache
from lm import files
from lm.config.base import SettingError, check_at_least, diff, parse_json
from lm.data.corpus.files import Split
from lm.data.corpus.readers import WINDOW_READERS
from lm.data.corpus.shards import iter_documents
from lm.data.corpus.spec import corpus_shards
from lm.metrics import Likelihood
from lm.tokenizers.tokenizer import Tokenizer

if TYPE_CHECKING:  # with jax, which takes a second
    from experiments.runs.kinds.stage import Stage
    from experiments.runs.trained import Trained
    from lm.evaluate.loglikelihood import Request

ENCODER_DECODER_NOTE = (
    "An encoder-decoder: its encoder reads what stands before the scored tokens, nothing at the start of a "
    "text, and its decoder was trained to fill gaps or to answer. So these bits do not say how well it "
    "models running text, and do not compare with a decoder's."
)
ENCODER_NOTE = (
    "An encoder: these are pseudo-log-likelihoods, in which each token is predicted from all others. Their "
    "perplexity and bits do not compare with a decoder's."
)
SHOWN_TEXT = 60  # of a text [characters]
IMPORTED_ROW_LENGTH = 512  # longest row for imported models, whose rows in training are not known [tokens]
CORPUS_KINDS = ("documentation", *WINDOW_READERS, "tfds")  # with which the name of a corpus begins


@dataclass(frozen=True)
class Scoring:
    """Options of how texts are scored."""

    # use the model that was fine-tuned on this mixture; by default the first that was fine-tuned in words,
    # else the pre-trained one
    mixture: str = ""
    end: bool = False  # also score the EOS after each text
    # longest row; a longer text without a context is scored in overlapping windows; 0: the length of rows in
    # training, and 512 for a model that was first trained elsewhere [tokens]
    length: int = 0
    # tokens that each window scores; those before them are its context; 0: half of a row [tokens]
    stride: int = 0
    split: Split = "validation"  # split of a corpus: the held-out part (validation) or the rest (train)
    texts: int = 0  # score only the first texts of a corpus; 0: all [texts]
    # masked diffusion: sets of masks by which the bound of each window is estimated, an even number
    draws: int = 64

    def __post_init__(self):
        check_at_least(self, "", length=0, stride=0, texts=0, draws=2)


def score_texts(run: Path, file: str, out: Path | None, scoring: Scoring) -> None:
    """Print how likely a run's model finds the texts of a file or a corpus; write each result to ``out``."""
    from experiments.runs.stages import stages_of
    from experiments.runs.trained import select_stage

    if out is not None and out.is_dir():
        raise SettingError(f"--out {out} is a folder: name a file")
    stages = stages_of(run)
    if all(stage.settings.model.output.logits == "none" for stage in stages):
        raise SettingError(
            f"{run}: its model has no output matrix (model.output.logits=none), so that no token "
            "has a probability"
        )
    kind = file.partition(":")[0].partition("/")[0]
    is_corpus = kind in CORPUS_KINDS and not Path(file).exists()
    if is_corpus:
        cache = find_cache(run)
        texts = corpus_texts(file, scoring, cache)
        print_line(f"Corpus, as prepared for the run: {cache}")
    else:
        texts = read_texts(Path(file))

    def encode(vocabulary: Tokenizer, text: str) -> list[int]:
        """Return the ids of a line, which may name masks and sentinels, or of a document, which may not."""
        return vocabulary.encode(text) if is_corpus else vocabulary.encode_prompt(text)

    if any(stage.is_count_based for stage in stages):
        stage = select_stage(run, {each.name: each for each in stages}, scoring.mixture)
        results = score_by_counts(stage, texts, scoring, encode)
    else:
        results = score_by_network(run, stages, texts, scoring, encode)
    for result, (_, text) in zip(results, texts, strict=True):
        result |= {"bytes": len(text.encode()), "characters": len(text)}
        result |= text_rates([result])
    if out is not None:
        files.write(out, "".join(map(json_line, results)))
    show_likelihoods([] if is_corpus else [text for _, text in texts], results)


def score_by_counts(
    stage: "Stage",
    texts: Sequence[tuple[str, str]],
    scoring: Scoring,
    encode: Callable[[Tokenizer, str], list[int]],
) -> list[dict[str, Any]]:
    """Return log-probability and tokens of each continuation by n-grams.

    Each context is read as the beginning of a document. Raises SettingError for options of windows and masks.
    """
    from experiments.runs.kinds.counts import Ngrams, texts_as_counted
    from experiments.runs.vocabulary import stored_vocabulary
    from lm.classical.ngram import token_log_probs

    if not isinstance(stage, Ngrams):
        raise SettingError(
            f"{stage.folder}: counts.model={stage.settings.counts.model!r} is no language model"
        )
    if unread := diff(Scoring(), scoring).keys() & {"length", "stride", "draws"}:
        names = option_names(sorted(unread))
        raise SettingError(f"n-grams score whole texts without masks; leave {names} out")
    vocabulary = stored_vocabulary(stage.folder, stage.settings)
    documents, continuations = [], []  # ids
    for context, text in texts:
        ids = encode(vocabulary, text)
        if scoring.end:
            ids = [*ids, vocabulary.eos]
        continuations.append(ids)
        documents.append(encode(vocabulary, context) + ids)
    tokens, offsets = texts_as_counted(documents)
    log_probs = token_log_probs(stage.model(), tokens, offsets)
    results: list[dict[str, Any]] = []
    for end, ids in zip(offsets[1:].tolist(), continuations, strict=True):
        log_prob = float(log_probs[end - len(ids) : end].sum())
        unknown = sum(token == vocabulary.unk for token in ids)
        results.append({"log_prob": log_prob, "tokens": len(ids), "unknown": unknown})
    return results


def score_by_network(
    run: Path,
    stages: "Sequence[Stage]",
    texts: Sequence[tuple[str, str]],
    scoring: Scoring,
    encode: Callable[[Tokenizer, str], list[int]],
) -> list[dict[str, Any]]:
    """Return log-probability and tokens of each continuation by a network.

    Raises SettingError if EOS is asked for and was never trained on. By masked diffusion ``log_prob`` is an
    estimate of a lower bound, and ``variance`` that of the estimate.
    """
    from experiments.runs.trained import knows_eos, language_models, open_run
    from lm.evaluate.likelihood_bound import continuation_bounds
    from lm.evaluate.loglikelihood import Masking, continuation_log_probs

    trained = open_run(run, language_models(stages, scoring.mixture), scoring.mixture)
    if scoring.end and not knows_eos(trained.stage):
        raise SettingError("--end: this model was trained without EOS (objective.eos none); leave --end out")
    UNBROKEN.print(f"[dim]{escape(trained.description)}[/]")
    if trained.config.has_encoder and trained.config.has_decoder and not all(context for context, _ in texts):
        print_line(ENCODER_DECODER_NOTE)
    masking = None if trained.config.has_decoder else Masking.of(trained.vocabulary)
    is_bound = masking is not None and trained.stage.settings.objective.corruption.bounds_likelihood
    if masking is not None and not is_bound:
        print_line(ENCODER_NOTE)
    requests: list[Request] = []
    text_indices: list[int] = []
    for index, (context, continuation) in enumerate(texts):
        scored_ids = encode(trained.vocabulary, continuation)
        text_requests = list(make_requests(trained, context, scored_ids, scoring))
        requests += text_requests
        text_indices += [index] * len(text_requests)
    results: list[dict[str, Any]] = [{"log_prob": 0.0, "tokens": 0, "unknown": 0} for _ in texts]
    if masking is not None and is_bound:
        bounds = continuation_bounds(trained.model, requests, trained.shard_batch, masking, scoring.draws)
        log_probs = -bounds.nats
        for result in results:  # also of a text without tokens, which has no windows
            result["variance"] = 0.0
        for index, variance in zip(text_indices, bounds.variances.tolist(), strict=True):
            results[index]["variance"] += variance
    else:
        log_probs = continuation_log_probs(trained.model, requests, trained.shard_batch, masking)
    for index, log_prob, (_, scored) in zip(text_indices, log_probs.tolist(), requests, strict=True):
        results[index]["log_prob"] += log_prob
        results[index]["tokens"] += len(scored)
        results[index]["unknown"] += [*scored].count(trained.vocabulary.unk)
    return results


def corpus_texts(name: str, scoring: Scoring, cache: Path) -> list[tuple[str, str]]:
    """Return the texts of a split of a corpus, none with a context; SettingError if there are none."""
    found = iter_documents(corpus_shards(name, scoring.split, cache))
    texts = [("", text) for text in islice(found, scoring.texts or None) if text]
    if not texts:
        raise SettingError(f"{name} has no text in its {scoring.split} split")
    return texts


def read_texts(file: Path) -> list[tuple[str, str]]:
    """Return (context, continuation) of each line that is not blank.

    SettingError for a line with nothing to score, and for a file without lines.
    """
    try:
        data = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
        lines = files.split_lines(data.decode("utf-8-sig"))
    except (OSError, ValueError) as error:
        raise SettingError(f"{file} cannot be read as text: {error}") from error
    texts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if files.is_json_lines(file):
            fields = parse_json(line, f"{file}, line {number},")
            if not isinstance(fields, dict):
                fields = {}
            context, continuation = fields.get("context", ""), fields.get("continuation")
        else:
            context, _, continuation = line.rpartition("\t")
        if not isinstance(context, str) or not isinstance(continuation, str) or not continuation:
            raise SettingError(f"{file}, line {number}, has no continuation to score")
        files.check_characters([context, continuation], f"{file}, line {number}")
        texts.append((context, continuation))
    if not texts:
        raise SettingError(f"{file} has no lines to score")
    return texts


def make_requests(run: "Trained", context: str, scored: list[int], scoring: Scoring) -> "Iterator[Request]":
    """Yield the requests that score the ids ``scored`` after a context, which is encoded as in training.

    With a context this is one request; a text without a context is scored in windows.
    """
    from experiments.runs.trained import boundary_ids
    from lm.evaluate.loglikelihood import Window, windows, without_start

    config = run.config
    if scoring.end and config.special.eos is not None:
        scored = [*scored, config.special.eos]
    if context:
        if config.has_decoder:
            yield without_start(run.encode(context), config), scored
        else:
            yield run.vocabulary.encode_prompt(context), scored
        return
    if config.special.start is None and not config.has_encoder:
        # Without a start token the first id of a row cannot be scored. If a tokenizer's texts begin with a
        # special id, it stands there, so that the first token of the text is scored.
        begin, _ = boundary_ids(run.stage, run.vocabulary)
        scored = [*run.vocabulary.encode_with_special_tokens("", begin, None), *scored]
    length = scoring.length or trained_length(run.stage)
    if config.has_max_length:
        length = min(length, config.positions.max_length)
    if not config.has_decoder:
        length -= 2  # for the tokens around an encoder's text
        if length < 1:
            raise SettingError("--length should be at least 3: two tokens stand around an encoder's text")
    stride = scoring.stride or max(1, length // 2)
    yield from windows(scored, Window(length, min(stride, length)), config)


def trained_length(stage: "Stage") -> int:
    """Return the length of the rows that a stage was trained on.

    Positions beyond it are new to the model: learned ones were never trained. For a model that was first
    trained elsewhere it is IMPORTED_ROW_LENGTH.
    """
    from lm.data.packing import row_length

    settings = stage.settings
    if settings.model.published or settings.start.model:
        return IMPORTED_ROW_LENGTH
    lengths = stage.lengths
    return max(lengths.inputs, row_length(settings.model.architecture, lengths))


def text_rates(results: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Return perplexity per token, and bits per byte and per character, of all these texts together.

    With ``variance`` in the results, ``bits_per_byte_interval`` is half the width of the 95 % interval of
    ``bits_per_byte``. The perplexity is None for texts without tokens, such as blanks alone, and inf if it is
    too large for a float.
    """
    variance = None
    if any("variance" in result for result in results):
        variance = sum(result["variance"] for result in results)
    found = Likelihood(
        nats=-sum(result["log_prob"] for result in results),
        tokens=sum(result["tokens"] for result in results),
        words=0,
        bytes=sum(result["bytes"] for result in results),
        variance=variance,
    )
    interval = {"bits_per_byte_interval": found.bits_per_byte_interval} if found.is_bound else {}
    characters = sum(result["characters"] for result in results)
    return interval | {
        "perplexity": found.perplexity if found.tokens else None,
        "bits_per_byte": found.bits_per_byte,
        "bits_per_character": found.nats / math.log(2) / characters,
    }


def json_line(result: dict[str, Any]) -> str:
    """Return a result as a line of JSON, in which null stands for infinities and NaN."""
    not_finite = [
        name for name, value in result.items() if isinstance(value, float) and not math.isfinite(value)
    ]
    return json.dumps(result | dict.fromkeys(not_finite)) + "\n"


def show_likelihoods(texts: Sequence[str], results: Sequence[dict[str, Any]]) -> None:
    """Print a line for each of ``texts``, which may be none, and one for all results."""
    heads = ["text", "nats", "tokens", "unknown", "perplexity", "bits/byte", "bits/char"]
    has_unknown = any(result["unknown"] for result in results)
    grid = listing(*(head for head in heads if head != "unknown" or has_unknown))
    for text, result in zip(texts, results, strict=False):
        shown = text
        if len(text) > SHOWN_TEXT:
            shown = f"{text[: SHOWN_TEXT - 1]}…"
        grid.add_row(escape(shown.strip()), *_numbers([result], has_unknown))
    grid.add_row("all" if texts else f"all {len(results):,}", *_numbers(results, has_unknown))
    CONSOLE.print(grid)
    if (interval := text_rates(results).get("bits_per_byte_interval")) is not None:
        CONSOLE.print(
            "A bound: the model needs at most so many bits. It is estimated from random masks (--draws); the "
            f"95 % interval is ± {interval:.4f} bits per byte."
        )
    if count := sum(result["unknown"] for result in results):
        CONSOLE.print(
            f"[yellow]{count:,} tokens are unknown[/]: characters that the vocabulary cannot write. Their "
            "likelihood is that of <unk>, which stands for any of them, so that all numbers are too good. A "
            "run with --data.unknown bytes writes every character."
        )


def _numbers(results: Sequence[dict[str, Any]], has_unknown: bool) -> list[str]:
    """Return the cells of a line of ``show_likelihoods``, for some texts together."""
    log_prob = sum(result["log_prob"] for result in results)
    tokens = sum(result["tokens"] for result in results)
    unknown = [f"{sum(result['unknown'] for result in results):,}"] if has_unknown else []
    rates = text_rates(results)
    perplexity = "– (no token)"
    if rates["perplexity"] is not None:
        perplexity = f"{rates['perplexity']:,.2f}"
    bits = [f"{rates[name]:.4f}" for name in ("bits_per_byte", "bits_per_character")]
    return [f"{log_prob:,.3f}", f"{tokens:,}", *unknown, perplexity, *bits]

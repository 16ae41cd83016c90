"""``lm generate``: what a run's model writes after prompts, or puts into the gaps of a text."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import tyro

from experiments.cli.settings import Mixture
from experiments.evaluate.generation import (
    GREEDY,
    Filling,
    fill_gaps,
    generate_with_ngrams,
    is_masked_diffusion,
    write_answers,
)
from lm.config.base import SettingError, check_seed
from lm.config.decoding import Decoding
from lm.files import check_characters
from lm.tokenizers.tokenizer import MASK

GAP = re.compile(r"\[MASK\]|<mask>|<extra_id_\d+>")  # [MASK], and how published models write it
CANDIDATES = Filling()


def generate(
    run: Path,
    /,
    prompt: tuple[str, ...],
    mixture: Mixture = "",
    decoding: Annotated[Decoding, tyro.conf.arg(name="")] = GREEDY,
    filling: Annotated[Filling, tyro.conf.arg(name="")] = CANDIDATES,
    seed: int = 0,
) -> None:
    """Show what a run's model writes after prompts, or what it puts into the gaps of a text with [MASK].

    Prompts are answered greedily, by sampling (--temperature) or by beam search (--beams). In a text with
    gaps, an encoder predicts one token per gap, an encoder-decoder (BART, T5) any number; <mask> and
    <extra_id_0>, <extra_id_1>, ... mean the same as [MASK]. Masked diffusion continues a prompt by
    --max-length masks, which it fills in as many passes as --iterations says. n-grams continue a prompt as
    the beginning of a document, greedily or by sampling.

        lm generate runs/nano/gpt/base/seed-0 \\
          --prompt 'Once' --temperature 0.8 --top-p 0.9
        lm generate runs/nano/t5/1-baseline/baseline/seed-0 \\
          --prompt 'Paris is the [MASK] of France.'
        lm generate runs/nano/now/4-diffusion/masked-diffusion/seed-0 \\
          --prompt 'Once' --max-length 32 --iterations 16 --passes ancestral

    Args:
        run: Folder of a run, @NAME or @last.
        prompt: One or more texts to answer, to continue or to fill.
        seed: Seed of sampling.
    """
    from experiments.runs.trained import open_ngrams  # with jax, which takes a second

    if not prompt:
        raise SettingError("--prompt: give one or more texts to answer, to continue or to fill")
    check_seed(seed, "--seed")
    check_characters([*prompt], "--prompt")
    texts = [GAP.sub(MASK, text) for text in prompt]
    gaps = ", ".join(dict.fromkeys(gap for text in prompt for gap in GAP.findall(text)))
    with_gaps = [text for text in texts if MASK in text]
    if 0 < len(with_gaps) < len(texts):
        raise SettingError(f"--prompt: all texts or none should have {gaps}, which is filled")
    if (ngrams := open_ngrams(run, mixture)) is not None:
        generate_with_ngrams(ngrams, prompt, decoding, filling, seed, gaps)
    elif not with_gaps and is_masked_diffusion(run):
        texts = [text + MASK * decoding.max_length for text in texts]
        filling = replace(filling, iterations=filling.iterations or decoding.max_length)
        without_length = replace(decoding, max_length=GREEDY.max_length)  # the masks have it
        fill_gaps(run, texts, mixture, filling, seed, without_length)
    elif not with_gaps:
        write_answers(run, prompt, mixture, decoding, filling, seed)
    else:
        fill_gaps(run, texts, mixture, filling, seed, decoding, gaps)

"""Content tokens, the targets that have to be predicted from a text, and the unigram loss on them.

A target is a content token unless it is a sentinel, an EOS, or visible in the inputs at the same position: an
unchanged word of a text that is reconstructed, or the prefix of a prefix decoder. ``Side.content``, bool
[B,T], marks them in the decoder or, if there is none, in the encoder. There they are all tokens that a masked
LM predicts, also those that BERT shows unchanged: the model cannot know which these are. In the answers to a
task all tokens but EOS are content tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lm.batch import Batch
from lm.tokenizers.tokenizer import Tokenizer

NUM_FREQUENT = 10  # most frequent tokens, which a model predicts while it does not yet use the context


class UnigramBaseline(NamedTuple):
    """Holds what a model without context reaches on content tokens.

    It knows how frequent tokens are and, in a masked LM, the input token at the position of the target.
    """

    loss: float | None  # [nats per content token]; None without content tokens, as in copying
    frequent_tokens: np.ndarray  # int32 [NUM_FREQUENT]: the most frequent; -1 where there are fewer


def unigram_baseline(batches: Sequence[Batch], tokenizer: Tokenizer, text: np.ndarray) -> UnigramBaseline:
    """Return the unigram baseline on the content tokens of held-out ``batches``.

    The loss is the unigram cross-entropy plus the surprise that a content token comes next and no sentinel.
    A masked LM may show some of the tokens that it predicts, unchanged or replaced (BERT). The model then
    knows the token at that position too; otherwise copying would pass for learning.
    Frequencies are counted in ``batches`` and in their text, ``text`` int [tokens]. In the few thousand
    content tokens alone the entropy would be too low, and lowest for an objective with the fewest.
    """
    is_encoder = "decoder" not in batches[0].sides
    sides = [batch.side("encoder" if is_encoder else "decoder") for batch in batches]
    targets = np.concatenate([side.targets for side in sides])
    is_content = np.concatenate([side.content for side in sides])
    segments = np.concatenate([side.segment_ids for side in sides])
    content_tokens = targets[is_content]
    content_counts = np.bincount(content_tokens, minlength=tokenizer.vocab_size)
    counts = content_counts + np.bincount(text, minlength=tokenizer.vocab_size)
    frequent = np.argsort(-content_counts, kind="stable")[:NUM_FREQUENT]
    frequent_tokens = np.where(content_counts[frequent] > 0, frequent, -1).astype(np.int32)
    if not len(content_tokens):
        return UnigramBaseline(None, frequent_tokens)
    frequencies = counts / counts.sum()
    probabilities = frequencies[content_tokens]
    if is_encoder:
        inputs = np.concatenate([side.tokens for side in sides])[is_content]
        probabilities = _probabilities_given_inputs(content_tokens, inputs, frequencies, tokenizer)
    entropy = -np.log(probabilities).mean()
    is_sentinel = (segments > 0) & ~is_content & (targets >= tokenizer.vocab_size - tokenizer.num_sentinels)
    loss = float(entropy) + _content_surprise(is_content, is_sentinel, segments)
    return UnigramBaseline(loss, frequent_tokens)


def _probabilities_given_inputs(
    targets: np.ndarray, inputs: np.ndarray, frequencies: np.ndarray, tokenizer: Tokenizer
) -> np.ndarray:
    """Return the probability of each target of a masked LM given the input token at its position, float [N].

    targets, inputs: int [N]; frequencies [V]: of all tokens, which are the probabilities at mask tokens. A
    shown token is the target itself or uniformly random, and Bayes' rule says how likely each is. Inputs
    without a mask token, as in causal encoders, show no targets.
    """
    probabilities = frequencies[targets]
    is_shown = inputs != tokenizer.mask
    if is_shown.all() or not is_shown.any():
        return probabilities
    shown, is_same = inputs[is_shown], (inputs == targets)[is_shown]
    same = is_same.mean() * frequencies[shown]
    random = (1 - is_same.mean()) / (tokenizer.vocab_size - tokenizer.first_regular_id)
    share_same = same / (same + random)
    probabilities[is_shown] = share_same * is_same + (1 - share_same) * probabilities[is_shown]
    return probabilities


def _content_surprise(is_content: np.ndarray, is_sentinel: np.ndarray, segments: np.ndarray) -> float:
    """Return the surprise that content tokens are no sentinels, given which of both the targets before are.

    It is in nats per content token; arrays are bool and int [B,T]. For i.i.d. noise at 15 % it is 0.28: 15 %
    of the content tokens follow another one, and each of these costs -ln 0.15.
    """
    is_either = is_content | is_sentinel
    is_pair = is_either[:, 1:] & is_either[:, :-1] & (segments[:, 1:] == segments[:, :-1])
    before, after, total = is_content[:, :-1][is_pair], is_content[:, 1:][is_pair], 0.0
    for is_content_after in (after[before], after[~before]):
        if is_content_after.any():
            total -= is_content_after.sum() * np.log(is_content_after.mean())
    return float(total) / max(int(is_content.sum()), 1)

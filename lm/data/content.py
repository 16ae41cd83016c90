"""Content tokens, whose predictions say something about a text, and the unigram loss on them as a baseline.

A target is content unless it is a sentinel, an EOS, or shown at the same position by the inputs: an unchanged
word of a text that is reconstructed, or the prefix of a prefix decoder. ``Side.content``, bool [B,T], marks
them in the decoder or, if there is none, in the encoder: its masked tokens. In the answers to a task all
tokens but EOS are content.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lm.batch import Batch
from lm.tokenizers.tokenizer import Tokenizer

NUM_FREQUENT = 10  # most frequent tokens, which a model predicts that does not yet use the context


class UnigramBaseline(NamedTuple):
    """The results of a model that knows nothing but the frequency of tokens, on content tokens."""

    loss: float  # [nats per content token]
    frequent: np.ndarray  # int32 [NUM_FREQUENT]: the most frequent tokens; -1 where there are fewer


def unigram_baseline(batches: Sequence[Batch], tokenizer: Tokenizer, text: np.ndarray) -> UnigramBaseline:
    """Return the unigram baseline on the content tokens of held-out ``batches``.

    The loss is the unigram cross-entropy plus the surprise that a content token comes next and no sentinel.
    Frequencies are counted in ``batches`` and in ``text``, int [tokens], which they are made of: in a few
    thousand content tokens alone the entropy would be too low, the more so the fewer an objective has.
    """
    sides = [batch.encoder if batch.decoder is None else batch.decoder for batch in batches]
    names = ("targets", "content", "segment_ids")
    targets, content, segments = (np.concatenate([getattr(side, name) for side in sides]) for name in names)
    tokens = targets[content]
    target_counts = np.bincount(tokens, minlength=tokenizer.vocab_size)
    counts = target_counts + np.bincount(text, minlength=tokenizer.vocab_size)
    entropy = -np.log(counts[tokens] / counts.sum()).sum() / max(len(tokens), 1)
    frequent = np.argsort(-target_counts, kind="stable")[:NUM_FREQUENT]
    sentinels = (segments > 0) & ~content & (targets >= tokenizer.vocab_size - tokenizer.num_sentinels)
    loss = float(entropy) + _surprise(content, sentinels, segments)
    return UnigramBaseline(loss, np.where(target_counts[frequent] > 0, frequent, -1).astype(np.int32))


def _surprise(content: np.ndarray, sentinels: np.ndarray, segments: np.ndarray) -> float:
    """Return the surprise that a content token is no sentinel, given whether the target before it is one.

    It is in nats per content token; all arrays are bool or int [B,T]. For i.i.d. noise at 15 % it is 0.28:
    15 % of the words follow a word, and each of these costs -ln 0.15.
    """
    either = content | sentinels
    follows = either[:, 1:] & either[:, :-1] & (segments[:, 1:] == segments[:, :-1])
    before, word, total = content[:, :-1][follows], content[:, 1:][follows], 0.0
    for after in (word[before], word[~before]):
        total -= after.sum() * np.log(after.mean()) if after.any() else 0.0
    return float(total) / max(int(content.sum()), 1)

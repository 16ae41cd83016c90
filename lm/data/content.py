"""Content tokens: which predictions say something about a text, and how well no context predicts them.

A target is content unless it is a sentinel, an EOS, or shown at the same place by the inputs: an unchanged
word of a text that is written again, or the prefix of a prefix decoder. Batches mark them, bool [B,T], in
the decoder's ``content`` or, of an encoder, in its own: its hidden tokens. In the answers to a task all
tokens but EOS are content.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lm.batch import Batch
from lm.tokenizers.tokenizer import Vocabulary

TOP = 10  # of the most frequent pieces, which a model that does not yet learn from its context predicts


class WithoutContext(NamedTuple):
    """What a model reaches on content tokens that knows how frequent each piece is, and nothing else."""

    loss: float  # nats a content token
    frequent: np.ndarray  # int32 [TOP]: the most frequent pieces; -1 where there are fewer


def without_context(batches: Sequence[Batch], vocabulary: Vocabulary, text: np.ndarray) -> WithoutContext:
    """Of the content of held-out ``batches``; ``text`` int [tokens]: what they are made of, to count pieces.

    The loss is the entropy of single pieces plus the surprise that a word comes next and no sentinel. Counted
    in a few thousand content tokens the entropy would be too low, the more so the fewer an objective has.
    """
    sides = [batch.encoder if batch.decoder is None else batch.decoder for batch in batches]
    names = ("targets", "content", "segment_ids")
    targets, content, segments = (np.concatenate([getattr(side, name) for side in sides]) for name in names)
    pieces = targets[content]
    own = np.bincount(pieces, minlength=vocabulary.size)
    counts = own + np.bincount(text, minlength=vocabulary.size)
    entropy = -np.log(counts[pieces] / counts.sum()).sum() / max(len(pieces), 1)
    frequent = np.argsort(-own, kind="stable")[:TOP]
    sentinels = (segments > 0) & ~content & (targets >= vocabulary.size - vocabulary.num_sentinels)
    loss = float(entropy) + _surprise(content, sentinels, segments)
    return WithoutContext(loss, np.where(own[frequent] > 0, frequent, -1).astype(np.int32))


def _surprise(content: np.ndarray, sentinels: np.ndarray, segments: np.ndarray) -> float:
    """Nats a content token: that it is none of the ``sentinels``, given whether the target before it is one.

    0.28 of i.i.d. noise at 15 %, where 15 % of the words follow a word, and each of these costs -ln 0.15.
    """
    either = content | sentinels
    follows = either[:, 1:] & either[:, :-1] & (segments[:, 1:] == segments[:, :-1])
    before, word, total = content[:, :-1][follows], content[:, 1:][follows], 0.0
    for after in (word[before], word[~before]):
        total -= after.sum() * np.log(after.mean()) if after.any() else 0.0
    return float(total) / max(int(content.sum()), 1)

"""A model with a text before it, and what it makes of it: weights, guesses and gates, as figures."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import numpy as np
from matplotlib.figure import Figure

from experiments.drawings.panels import Heat, Scale, heatmaps
from lm.batch import Batch
from lm.config.base import SettingError
from lm.evaluate.lens import logit_lens
from lm.evaluate.mask_filling import top_k_tokens
from lm.evaluate.rnn_states import MEMORY, STATES, gate_activations, recurrent_layers
from lm.nn.transformer import Transformer
from lm.tokenizers.tokenizer import Tokenizer

PANELS_A_LINE = 2  # of a few chosen heads
READABLE = 40  # longest text that is drawn with words in cells [tokens]
WEIGHT = Scale("attention weight; a query's sum is 1", 0, 1, "Greys")
PROBABILITY = Scale("probability", 0, 1)
OPENNESS = Scale("share let through", 0, 1)
STATE = Scale("value", -1, 1, "RdBu_r")


@dataclass(frozen=True)
class Reading:
    """A model that reads a text, and has written an answer if it is an encoder-decoder."""

    model: Transformer
    vocabulary: Tokenizer
    batch: Batch  # its first row is the text
    ids: dict[str, list[int]]  # tokens of "encoder" and "decoder", of those there are
    masks: bool = False  # whether inputs of pre-training have a mask

    @property
    def labels(self) -> dict[str, list[str]]:
        """A label of each token of each side."""
        labels = {side: list(map(self._label, ids)) for side, ids in self.ids.items()}
        start = self.model.config.special.start
        if start is not None and self.ids.get("decoder", [None])[0] == start:  # T5 begins with padding
            labels["decoder"][0] = "[START]"
        return labels

    @property
    def predicting(self) -> list[str]:
        """Labels of the tokens at which a word is predicted; SettingError if they are too many to read."""
        tokens = self.labels["decoder" if self.model.config.has_decoder else "encoder"]
        if len(tokens) > READABLE:
            raise SettingError(
                f"--text has {len(tokens)} tokens: at most {READABLE} can be read in this picture"
            )
        return tokens

    @property
    def maps(self) -> dict[str, np.ndarray]:
        """``{"encoder", "decoder", "cross": float32 [layers,N,T,S]}``: weights of those there are."""
        weights = self.model.attention_weights(self.batch)
        return {name: np.asarray(layers[:, 0]) for name, layers in weights.items()}

    def words(self, ids: np.ndarray) -> np.ndarray:
        """str, a label of each token of an array of ids."""
        return np.array([self._label(token) for token in ids.ravel().tolist()]).reshape(ids.shape)

    def _label(self, token: int) -> str:
        return self._names.get(token) or token_label(self.vocabulary, token)

    @property
    def _names(self) -> Mapping[int, str]:
        if not self.model.config.has_decoder:
            return self.vocabulary.special_token_names("bert")
        return self.vocabulary.special_token_names("bart" if self.masks else "t5")


def token_label(vocabulary: Tokenizer, token: int) -> str:
    """A piece as a picture shows it; matplotlib reads a dollar as the start of a formula."""
    piece = next((piece for piece, number in vocabulary.vocab.items() if number == token), f"<{token}>")
    text = (vocabulary.decode([token]).strip() or piece).replace("$", r"\$").replace("\n", "⏎")
    return text if text.isprintable() else f"<{token}>"


def sharpness(weights: np.ndarray, within: bool) -> float:
    """How sharply a head [T,S] looks at other tokens: the mean of each query's highest weight on one.

    ``within``: queries and keys are of one text, where a token's weight on itself does not count, nor that on
    the first one, on which heads rest that have nothing to look for.
    """
    others = weights.copy()
    if within:
        np.fill_diagonal(others, 0)
        others[:, 0] = 0
    return float(others.max(axis=1).mean())


def draw_heads(reading: Reading, most: int = 0) -> Figure:
    """Attention weights of heads, a panel each: of the ``most`` that look sharpest at other tokens.

    0: of all, a line of panels for a layer.
    """
    labels, panels, maps = reading.labels, [], reading.maps
    if not maps:
        raise SettingError(f"model.mixer.kind={reading.model.config.mixer.kind!r} has no attention to draw")
    wide = max(len(heads) for layers in maps.values() for heads in layers)
    marks: list[float] = []
    for name, layers in maps.items():
        queries, keys = ("decoder", "encoder") if name == "cross" else (name, name)
        for layer, heads in enumerate(layers, 1):
            for head, weights in enumerate(heads, 1):
                title = f"{name} {layer}, head {head}"
                panels.append(Heat(title, weights, WEIGHT, labels[queries], labels[keys]))
                marks.append(sharpness(weights[: len(labels[queries]), : len(labels[keys])], queries == keys))
    if 0 < most < len(panels):
        chosen = np.sort(np.argsort(-np.array(marks), kind="stable")[:most])
        panels, wide = [panels[place] for place in chosen], min(PANELS_A_LINE, most)
    return heatmaps(panels, "key: what is seen", "query: what looks", wide)


def draw_alignment(reading: Reading) -> Figure:
    """Cross-attention of each layer, the mean of its heads."""
    config = reading.model.config
    if not config.has_encoder or not config.has_decoder:
        raise SettingError(
            f"model.architecture={config.architecture!r} has no cross-attention: see lm draw attention"
        )
    if "cross" not in (maps := reading.maps):
        raise SettingError(f"{config.mixer.kind!r}: this decoder has no cross-attention to draw")
    rows, columns = reading.labels["decoder"], reading.labels["encoder"]
    panels = [
        Heat(f"layer {layer}, mean of {len(heads)} heads", heads.mean(0), WEIGHT, rows, columns)
        for layer, heads in enumerate(maps["cross"], 1)
    ]
    return heatmaps(panels, "read by the encoder", "read by the decoder", 2)


def draw_lens(reading: Reading) -> Figure:
    """The likeliest token at each layer, the last one at the top, and its probability."""
    columns = reading.predicting
    lens = jax.nn.softmax(logit_lens(reading.model, reading.batch)[:, 0, : len(columns)])
    best = np.asarray(lens.argmax(-1))[::-1]
    panel = Heat(
        "",
        np.asarray(lens.max(-1))[::-1],
        PROBABILITY,
        layer_names(len(best))[::-1],
        columns,
        reading.words(best),
    )
    return heatmaps([panel], "token read", "after layer")


def draw_next(reading: Reading, k: int) -> Figure:
    """The ``k`` likeliest tokens at each position, with their probabilities and that of all others."""
    columns, config = reading.predicting, reading.model.config
    found = top_k_tokens(reading.model, reading.batch, k=min(k, config.vocab_size))
    tokens, shares = (np.asarray(array)[0, : len(columns)].T for array in found)
    values = np.concatenate([shares, 1 - shares.sum(0, keepdims=True)])
    words = np.concatenate([reading.words(tokens), [[f"{100 * value:.0f} %" for value in values[-1]]]])
    rows = [*(f"{rank}." for rank in range(1, len(tokens) + 1)), "all others"]
    shown = "next token, by rank" if config.has_decoder else "token in its place, by rank"
    return heatmaps([Heat("", values, PROBABILITY, rows, columns, words)], "token read", shown)


def draw_gates(reading: Reading) -> Figure:
    """What the gates of each layer let through at each token, and the state after it, a line for a layer."""
    side = "encoder" if reading.model.config.has_encoder else "decoder"
    columns, panels = reading.labels[side], []
    for layer, (direction, x) in enumerate(recurrent_layers(reading.model, reading.batch), 1):
        arrays = {
            name: np.asarray(each[0, : len(columns)].T)
            for name, each in gate_activations(direction, x).items()
        }
        if set(arrays) <= set(STATES):
            mixer = direction.config.mixer.kind
            raise SettingError(f"model.mixer.kind={mixer!r} has no gates: open a run of 'lstm' or 'gru'")
        for name, values in arrays.items():
            title, scale = f"layer {layer}, {name}", STATE if name in STATES else OPENNESS
            if name == MEMORY:  # as the output gate gets it
                title, values = f"layer {layer}, tanh of {name}", np.tanh(values)
            panels.append(Heat(title, values, scale, (), columns))
    return heatmaps(panels, "token read", "feature of the state", len(arrays))


def layer_names(count: int) -> list[str]:
    """Of the states between blocks: the first block's input, and each one's output."""
    return ["input", *(str(layer) for layer in range(1, count))]

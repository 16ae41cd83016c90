"""Draws what a model makes of a text: attention weights, predictions and gates."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np
from matplotlib.figure import Figure

from experiments.figures.draw import draw_heat_maps
from experiments.figures.panels import HeatMap, Scale
from experiments.runs.trained import TrainedNgrams
from lm.batch import Batch
from lm.classical.ngram import KneserNey, next_token_probs
from lm.config.base import SettingError
from lm.evaluate.lens import logit_lens
from lm.evaluate.mask_filling import top_k_tokens
from lm.evaluate.rnn_states import MEMORY, STATES, gate_activations, recurrent_layers
from lm.nn.transformer import Transformer
from lm.tokenizers.tokenizer import Tokenizer

START = "[START]"  # label of the token that a decoder starts with
MAX_TOKENS = 40  # longest text whose predictions are drawn [tokens]
WEIGHT = Scale("attention weight; a query's sum is 1", 0, 1, "Greys")
PROBABILITY = Scale("probability", 0, 1)
GATE = Scale("share let through", 0, 1)
STATE = Scale("value", -1, 1, "RdBu_r")


@dataclass(frozen=True)
class ModelOnText:
    """A model and a text that it reads; an encoder-decoder has written an answer."""

    model: Transformer
    vocabulary: Tokenizer
    batch: Batch  # its first sequence is the text
    ids: dict[str, list[int]]  # tokens of "encoder" and "decoder", where the model has them
    uses_mask_token: bool = False  # whether its pre-training inputs have a mask token

    @property
    def labels(self) -> dict[str, list[str]]:
        """Return a label per token of "encoder" and "decoder"."""
        labels = {side: list(map(self._label, ids)) for side, ids in self.ids.items()}
        if self.has_start:  # T5 starts with padding
            labels["decoder"][0] = START
        return labels

    @property
    def has_start(self) -> bool:
        """Return whether the first token of the decoder is the one that it starts with."""
        start = self.model.config.special.start
        return start is not None and self.ids.get("decoder", [None])[0] == start

    @property
    def prediction_labels(self) -> list[str]:
        """Return a label per token at which a word is predicted; SettingError for too many to read."""
        tokens = self.labels["decoder" if self.model.config.has_decoder else "encoder"]
        check_legible(tokens)
        return tokens

    @property
    def attention_maps(self) -> dict[str, np.ndarray]:
        """Return attention weights of "encoder", "decoder" and "cross", float32 [layers,N,T,S] each."""
        weights = self.model.attention_weights(self.batch)
        return {name: np.asarray(layers[:, 0]) for name, layers in weights.items()}

    def token_labels(self, ids: np.ndarray) -> np.ndarray:
        """Return a label per token id, str of the same shape."""
        return np.array([self._label(token) for token in ids.ravel().tolist()]).reshape(ids.shape)

    def _label(self, token: int) -> str:
        return label_of(self.vocabulary, self._special_token_names, token)

    @property
    def _special_token_names(self) -> Mapping[int, str]:
        if not self.model.config.has_decoder:
            return self.vocabulary.special_token_names("bert")
        return self.vocabulary.special_token_names("bart" if self.uses_mask_token else "t5")


def label_of(vocabulary: Tokenizer, special_tokens: Mapping[int, str], token: int) -> str:
    """Return the label of a token: the name of a special token, or its text."""
    return special_tokens.get(token) or token_label(vocabulary, token)


def check_legible(tokens: Sequence[str]) -> None:
    """Raise SettingError if ``tokens`` are too many for a picture with a column per token."""
    if len(tokens) > MAX_TOKENS:
        raise SettingError(
            f"--text has {len(tokens)} tokens: at most {MAX_TOKENS} can be read in this picture"
        )


def token_label(vocabulary: Tokenizer, token: int) -> str:
    """Return a token's text for a figure, with dollars escaped, which matplotlib reads as formulas."""
    piece = next((piece for piece, number in vocabulary.vocab.items() if number == token), f"<{token}>")
    text = (vocabulary.decode([token]).strip() or piece).replace("$", r"\$").replace("\n", "⏎")
    return text if text.isprintable() else f"<{token}>"


def sharpness(weights: np.ndarray, is_self_attention: bool) -> float:
    """Return how sharply a head [T,S] attends to other tokens: the mean of each query's largest weight.

    In self-attention a token's weight on itself does not count, nor the weight on the first token, where
    heads rest that have nothing to attend to.
    """
    others = weights.copy()
    if is_self_attention:
        np.fill_diagonal(others, 0)
        others[:, 0] = 0
    return float(others.max(axis=1).mean())


def draw_heads(inspected: ModelOnText, num_heads: int = 0) -> Figure:
    """Draw the attention weights of the ``num_heads`` sharpest heads; 0: of all, one line per layer."""
    labels, maps = inspected.labels, inspected.attention_maps
    if not maps:
        raise SettingError(f"model.mixer.kind={inspected.model.config.mixer.kind!r} has no attention to draw")
    columns = max(len(heads) for layers in maps.values() for heads in layers)
    panels: list[HeatMap] = []
    values: list[float] = []
    for name, layers in maps.items():
        part = "layer" if len(maps) == 1 else f"{name} layer"
        query_side, key_side = ("decoder", "encoder") if name == "cross" else (name, name)
        queries, keys = labels[query_side], labels[key_side]
        for layer, heads in enumerate(layers, 1):
            for head, weights in enumerate(heads, 1):
                panels.append(HeatMap(f"{part} {layer}, head {head}", weights, WEIGHT, queries, keys))
                values.append(sharpness(weights[: len(queries), : len(keys)], query_side == key_side))
    if 0 < num_heads < len(panels):
        sharpest = np.sort(np.argsort(-np.array(values), kind="stable")[:num_heads])
        panels, columns = [panels[i] for i in sharpest], min(2, num_heads)
    return draw_heat_maps(panels, "key", "query", columns)


def draw_alignment(inspected: ModelOnText) -> Figure:
    """Draw the cross-attention of each layer, averaged over its heads."""
    config = inspected.model.config
    if not config.has_encoder or not config.has_decoder:
        raise SettingError(
            f"model.architecture={config.architecture!r} has no cross-attention: see lm draw attention"
        )
    maps = inspected.attention_maps
    if "cross" not in maps:
        raise SettingError(f"{config.mixer.kind!r}: this decoder has no cross-attention to draw")
    rows, columns = inspected.labels["decoder"], inspected.labels["encoder"]
    panels = [
        HeatMap(f"layer {layer}, mean of {len(heads)} heads", heads.mean(0), WEIGHT, rows, columns)
        for layer, heads in enumerate(maps["cross"], 1)
    ]
    return draw_heat_maps(panels, "encoder's token", "decoder's token", 2)


def draw_lens(inspected: ModelOnText) -> Figure:
    """Draw the likeliest token after each layer and its probability, the last layer at the top."""
    tokens = inspected.prediction_labels
    probabilities = jax.nn.softmax(logit_lens(inspected.model, inspected.batch)[:, 0, : len(tokens)])
    best = np.asarray(probabilities.argmax(-1))[::-1]
    panel = HeatMap(
        "",
        np.asarray(probabilities.max(-1))[::-1],
        PROBABILITY,
        layer_names(len(best))[::-1],
        tokens,
        inspected.token_labels(best),
    )
    x_label = "token read"
    if inspected.has_start:  # which the first column may answer, by its own name
        start = inspected.token_labels(np.array([inspected.ids["decoder"][0]]))[0]
        x_label += f" ({START}: {start}, with which the decoder starts)"
    return draw_heat_maps([panel], x_label, "after layer")


def draw_next_tokens(inspected: ModelOnText, k: int) -> Figure:
    """Draw the ``k`` likeliest tokens at each position with their probabilities, and that of all others."""
    columns, config = inspected.prediction_labels, inspected.model.config
    top_k = top_k_tokens(inspected.model, inspected.batch, k=min(k, config.vocab_size))
    tokens, probabilities = (np.asarray(array)[0, : len(columns)] for array in top_k)
    y_label = "next token, by rank" if config.has_decoder else "token in its place, by rank"
    return draw_ranked_tokens(columns, inspected.token_labels(tokens), probabilities, y_label)


def draw_next_tokens_of_ngrams(ngrams: TrainedNgrams, text: str, k: int) -> Figure:
    """Draw the ``k`` likeliest tokens, by n-grams, at the beginning of a document and after each token."""
    vocabulary = ngrams.vocabulary
    ids = vocabulary.encode_prompt(text)
    label = partial(label_of, vocabulary, vocabulary.special_token_names("t5"))
    columns = [START, *map(label, ids)]
    check_legible(columns)
    tokens, probabilities = ranked_next_tokens(ngrams.model, ids, k)
    labels = np.array([[label(token) for token in ranked] for ranked in tokens.tolist()])
    return draw_ranked_tokens(columns, labels, probabilities, "next token, by rank")


def ranked_next_tokens(model: KneserNey, ids: Sequence[int], k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the ``k`` likeliest tokens at the beginning and after each of T ids, and their probabilities.

    The tokens are int64 [T+1,k], the likeliest first, the probabilities float64 [T+1,k].
    """
    probabilities = np.stack([next_token_probs(model, ids[:end]) for end in range(len(ids) + 1)])
    tokens = np.argsort(-probabilities, axis=1, kind="stable")[:, :k]
    return tokens, np.take_along_axis(probabilities, tokens, axis=1)


def draw_ranked_tokens(
    columns: Sequence[str], labels: np.ndarray, probabilities: np.ndarray, y_label: str
) -> Figure:
    """Draw T columns of the ``k`` likeliest tokens, and the probability that is left to all others.

    ``labels`` are str [T,k], the likeliest first, ``probabilities`` float [T,k].
    """
    others = np.maximum(1 - probabilities.sum(1, keepdims=True), 0)  # rounding may make the sum more than 1
    values = np.concatenate([probabilities, others], axis=1).T
    annotations = np.concatenate([labels.T, [[f"{100 * value:.0f} %" for value in others[:, 0]]]])
    rows = [*(f"{rank}." for rank in range(1, labels.shape[1] + 1)), "all others"]
    return draw_heat_maps(
        [HeatMap("", values, PROBABILITY, rows, columns, annotations)], "token read", y_label
    )


def draw_gates(inspected: ModelOnText) -> Figure:
    """Draw what gates let through at each token, and the state after it, one line per layer."""
    side = "encoder" if inspected.model.config.has_encoder else "decoder"
    columns, panels = inspected.labels[side], []
    for layer, (direction, x) in enumerate(recurrent_layers(inspected.model, inspected.batch), 1):
        arrays = {
            name: np.asarray(each[0, : len(columns)].T)
            for name, each in gate_activations(direction, x).items()
        }
        if set(arrays) <= set(STATES):
            mixer = direction.config.mixer.kind
            raise SettingError(f"model.mixer.kind={mixer!r} has no gates: open a run of 'lstm' or 'gru'")
        for name, values in arrays.items():
            title, scale = f"layer {layer}, {name}", STATE if name in STATES else GATE
            if name == MEMORY:  # as the output gate gets it
                title, values = f"layer {layer}, tanh of {name}", np.tanh(values)
            panels.append(HeatMap(title, values, scale, (), columns))
    return draw_heat_maps(panels, "token read", "feature of the state", len(arrays))


def layer_names(count: int) -> list[str]:
    """Return the names of the hidden states: the input of the first layer, then the output of each."""
    return ["input", *(str(layer) for layer in range(1, count))]

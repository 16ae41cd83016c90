"""Where each family keeps our parameters: the names of its tensors, and how they are laid out."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from ml_dtypes import finfo

from lm.nn.config import ModelConfig
from lm.ops.positions import sinusoids

Shape = tuple[int, ...]
POSITIONS = ("embed_positions.weight", "position_embeddings.weight")
LEAVES = {"kernel": "weight", "scale": "weight", "table": "weight", "bias": "bias"}  # ours: theirs


@dataclass(frozen=True)
class Names:
    """One family's table. "#" is the number of the layer, which we keep as the first axis of one array.

    "?" is "_0" where the feed-forward layer is gated, and nothing elsewhere.
    """

    prefix: str  # of what the model without its output layers has too, and is saved without
    # our module -> theirs; "a.b+c" are the modules a.b and a.c fused into one of theirs
    base: Mapping[str, str]
    top: Mapping[str, str]  # the same of what stands above; parameters that are no module's are named in full
    copies: Mapping[str, str]  # their name -> our parameter that such a tensor repeats
    conv1d: bool = False  # linear layers keep [in,out], as we do; elsewhere [out,in]
    per_head: bool = False  # fused q, k, v: of head 0, of head 1, ...; elsewhere all q, all k, all v

    @property
    def modules(self) -> dict[str, str]:
        found = {}
        for ours, theirs in [(o, self.prefix + t) for o, t in self.base.items()] + list(self.top.items()):
            first, *others = ours.split("+")
            found |= dict.fromkeys(
                (first, *(f"{first.rpartition('.')[0]}.{other}" for other in others)), theirs
            )
        return found


@dataclass(frozen=True)
class Tensor:
    """One tensor of theirs: of which of our arrays, or of which layer of them, it is made, and how."""

    parts: tuple[tuple[str, int | None], ...]
    widths: tuple[int, ...]  # of the parts, along the last axis
    shape: Shape  # theirs
    turned: bool = False  # theirs is our transpose
    row: bool = False  # theirs has a first axis of 1
    heads: int = 0  # fused head by head; 0: one whole part after the other

    def join(self, parts: list[np.ndarray]) -> np.ndarray:
        """Theirs, from our parts."""
        if len(parts) == 1:
            whole = parts[0]
        elif self.heads:
            lead = parts[0].shape[:-1]
            whole = np.stack([part.reshape(*lead, self.heads, -1) for part in parts], -2).reshape(*lead, -1)
        else:
            whole = np.concatenate(parts, -1)
        return (whole.T if self.turned else whole).reshape(self.shape)

    def split(self, theirs: np.ndarray) -> list[np.ndarray]:
        """Our parts; the inverse of ``join``."""
        whole = theirs[0] if self.row else theirs.T if self.turned else theirs
        if not self.heads:
            return np.split(whole, np.cumsum(self.widths)[:-1], -1)
        lead = whole.shape[:-1]
        whole = whole.reshape(*lead, self.heads, len(self.parts), -1)
        return [whole[..., part, :].reshape(*lead, -1) for part in range(len(self.parts))]


def tensors(names: Names, config: ModelConfig, shapes: Mapping[str, Shape]) -> dict[str, Tensor]:
    """``{their name: tensor}`` of a model whose parameters have these names and shapes."""
    gate = "_0" if config.mlp.startswith("gated") else ""
    modules, grouped = {ours: theirs.replace("?", gate) for ours, theirs in names.modules.items()}, {}
    for path in shapes:
        module, _, leaf = path.rpartition(".")
        grouped.setdefault(
            modules[path] if path in modules else f"{modules[module]}.{LEAVES[leaf]}", []
        ).append(path)
    found, order = {}, list(modules)
    for name, paths in grouped.items():
        paths = sorted(
            paths, key=lambda path: order.index(path if path in modules else path.rpartition(".")[0])
        )
        turned = paths[0].endswith("kernel") and not (names.conv1d and ".c_" in name)
        layers = range(shapes[paths[0]][0]) if "#" in name else [None]
        ours = [shapes[path][1:] if "#" in name else shapes[path] for path in paths]
        widths = tuple(shape[-1] for shape in ours)
        shape, row = (*ours[0][:-1], sum(widths)), name == "final_logits_bias"
        shape = (1, *shape) if row else shape[::-1] if turned else shape
        heads = config.num_heads if names.per_head and len(paths) > 1 else 0
        for layer in layers:
            parts = tuple((path, layer) for path in paths)
            found[name.replace("#", str(layer))] = Tensor(parts, widths, shape, turned, row, heads)
    return found


def is_constant(name: str, tensor: np.ndarray, config: ModelConfig) -> bool:
    """Whether a tensor is what every model of the settings has, and older files hold beside the
    parameters.
    """
    size = tensor.shape[-1] if tensor.ndim else 1
    if name.endswith("position_ids"):
        return np.array_equal(tensor.reshape(-1), np.arange(size))
    if re.search(r"att(n|ention)\.bias$", name):  # the causal mask of GPT-2 and GPT-NeoX
        square = size * size == tensor.size
        return square and np.array_equal(tensor.reshape(size, size) != 0, np.tri(size, dtype=bool))
    if name.endswith("masked_bias"):
        return tensor.size == 1 and bool((tensor <= -1e4).all())
    if name.endswith("rotary_emb.inv_freq"):
        due = config.rotary.base ** -(np.arange(size) * 2 / config.rotary_width)
        return 2 * size == config.rotary_width and np.allclose(tensor, due, rtol=1e-2)
    if name.endswith(POSITIONS) and config.positions == "sinusoidal" and tensor.ndim == 2:
        rounding = max(1e-5, float(finfo(tensor.dtype).eps))
        return np.allclose(
            tensor, sinusoids(np.arange(len(tensor)), size, layout=config.sinusoid), atol=rounding
        )
    # Written by the first export of T5, and read by nothing: cross-attention has no bias.
    return name == "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"


def _under(ours: str, theirs: str, table: Mapping[str, str]) -> dict[str, str]:
    return {ours + key: theirs + value for key, value in table.items()}


def _t5(side: str, mlp: int) -> dict[str, str]:
    kernels = {"query": "q", "key": "k", "value": "v", "out": "o"}
    return _under(
        f"{side}.",
        f"{side}.",
        {
            # the first layer's is all layers'
            "relative": "block.0.layer.0.SelfAttention.relative_attention_bias",
            "norm": "final_layer_norm",
            **_under(
                "blocks.",
                "block.#.layer.",
                {
                    "relative": "0.SelfAttention.relative_attention_bias",  # UMT5
                    **_under("attention.", "0.SelfAttention.", kernels),
                    **_under("cross.", "1.EncDecAttention.", kernels),
                    **_under(
                        "mlp.", f"{mlp}.DenseReluDense.", {"hidden": "wi?", "linear": "wi_1", "out": "wo"}
                    ),
                    "attention_norm": "0.layer_norm",
                    "cross_norm": "1.layer_norm",
                    "mlp_norm": f"{mlp}.layer_norm",
                },
            ),
        },
    )


def _bart(side: str) -> dict[str, str]:
    kernels = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "out_proj"}
    return _under(
        f"{side}.",
        f"{side}.",
        {
            "positions": "embed_positions",
            "embed_norm": "layernorm_embedding",
            **_under(
                "blocks.",
                "layers.#.",
                {
                    **_under("attention.", "self_attn.", kernels),
                    **_under("cross.", "encoder_attn.", kernels),
                    "mlp.hidden": "fc1",
                    "mlp.out": "fc2",
                    "attention_norm": "self_attn_layer_norm",
                    "cross_norm": "encoder_attn_layer_norm",
                    "mlp_norm": "final_layer_norm",
                },
            ),
        },
    )


_FUSED = "attention.query+key+value"
_GPT2_BLOCK = _under(
    "decoder.blocks.",
    "h.#.",
    {
        _FUSED: "attn.c_attn",
        "attention.out": "attn.c_proj",
        "attention_norm": "ln_1",
        "mlp.hidden": "mlp.c_fc",
        "mlp.out": "mlp.c_proj",
        "mlp_norm": "ln_2",
    },
)
_GPT2 = {"embed": "wte", "decoder.positions": "wpe", "decoder.norm": "ln_f", **_GPT2_BLOCK}
_GPT = {"embed": "tokens_embed", "decoder.positions": "positions_embed", **_GPT2_BLOCK}
_NEOX_BLOCK = {
    "attention.out": "dense",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.hidden": "mlp.dense_h_to_4h",
    "mlp.out": "mlp.dense_4h_to_h",
}
_NEOX = {
    "embed": "embed_in",
    "decoder.norm": "final_layer_norm",
    **_under(
        "decoder.blocks.",
        "layers.#.",
        {
            **_NEOX_BLOCK,
            _FUSED: "attention.query_key_value",
            "attention.out": "attention.dense",
        },
    ),
}
_BLOOM = {
    "embed": "word_embeddings",
    "decoder.embed_norm": "word_embeddings_layernorm",
    "decoder.norm": "ln_f",
    **_under(
        "decoder.blocks.",
        "h.#.",
        {
            **_NEOX_BLOCK,
            _FUSED: "self_attention.query_key_value",
            "attention.out": "self_attention.dense",
        },
    ),
}
_LLAMA = {
    "embed": "embed_tokens",
    "decoder.norm": "norm",
    **_under(
        "decoder.blocks.",
        "layers.#.",
        {
            **_under(
                "attention.",
                "self_attn.",
                {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "o_proj"},
            ),
            "mlp.hidden": "mlp.gate_proj",
            "mlp.linear": "mlp.up_proj",
            "mlp.out": "mlp.down_proj",
            "attention_norm": "input_layernorm",
            "mlp_norm": "post_attention_layernorm",
        },
    ),
}

_EMBEDDINGS = {
    "embed": "embeddings.word_embeddings",
    "encoder.positions": "embeddings.position_embeddings",
    "encoder.types": "embeddings.token_type_embeddings",
    "encoder.embed_norm": "embeddings.LayerNorm",
}
_SELF = {"query": "query", "key": "key", "value": "value"}
_BERT = {
    **_EMBEDDINGS,
    "pooler": "pooler.dense",
    **_under(
        "encoder.blocks.",
        "encoder.layer.#.",
        {
            **_under("attention.", "attention.self.", _SELF),
            "attention.out": "attention.output.dense",
            # Longformer
            **_under("attention.globals.", "attention.self.", {part: f"{part}_global" for part in _SELF}),
            "attention_norm": "attention.output.LayerNorm",
            "mlp.hidden": "intermediate.dense",
            "mlp.out": "output.dense",
            "mlp_norm": "output.LayerNorm",
        },
    ),
}
_ELECTRA = {**_BERT, "encoder.projection": "embeddings_project"}
_ALBERT = {
    **_EMBEDDINGS,
    "pooler": "pooler",
    "encoder.projection": "encoder.embedding_hidden_mapping_in",
    **_under(
        "encoder.blocks.",
        "encoder.albert_layer_groups.#.albert_layers.0.",
        {  # one group of one layer
            **_under("attention.", "attention.", _SELF),
            "attention.out": "attention.dense",
            "attention_norm": "attention.LayerNorm",
            "mlp.hidden": "ffn",
            "mlp.out": "ffn_output",
            "mlp_norm": "full_layer_layer_norm",
        },
    ),
}
_DISTILBERT = {
    **_EMBEDDINGS,
    **_under(
        "encoder.blocks.",
        "transformer.layer.#.",
        {
            **_under(
                "attention.",
                "attention.",
                {"query": "q_lin", "key": "k_lin", "value": "v_lin", "out": "out_lin"},
            ),
            "attention_norm": "sa_layer_norm",
            "mlp.hidden": "ffn.lin1",
            "mlp.out": "ffn.lin2",
            "mlp_norm": "output_layer_norm",
        },
    ),
}


def _transform(dense: str, norm: str, bias: str, **more: str) -> dict[str, str]:
    return {"transform.dense": dense, "transform.norm": norm, "logits_bias": bias, **more}


def _output(name: str) -> dict[str, str]:
    """The copies of an output matrix that is the embedding, and of its bias."""
    return {f"{name}.weight": "embed.table", f"{name}.bias": "logits_bias"}


_ROBERTA_TOP = _transform("lm_head.dense", "lm_head.layer_norm", "lm_head.bias")
_COPIES = {f"{s}.embed_tokens.weight": "embed.table" for s in ("encoder", "decoder")}
_BART = Names(
    "model.",
    {"embed": "shared", **_bart("encoder"), **_bart("decoder")},
    {"logits_bias": "final_logits_bias"},
    {f"model.{name}": copy for name, copy in _COPIES.items()} | _output("lm_head"),
)
_T5 = Names(
    "",
    {"embed": "shared", **_t5("encoder", 1), **_t5("decoder", 2)},
    {"head": "lm_head"},
    _COPIES | _output("lm_head"),
)
_HEAD = {"head": "lm_head"}

NAMES: dict[str, Names] = {
    "t5": _T5,
    "umt5": _T5,
    "bart": _BART,
    "marian": _BART,
    "gpt2": Names("transformer.", _GPT2, _HEAD, _output("lm_head"), conv1d=True),
    "openai-gpt": Names("transformer.", _GPT, _HEAD, _output("lm_head"), conv1d=True),
    "gpt_bigcode": Names("transformer.", _GPT2, _HEAD, _output("lm_head")),
    "gpt_neox": Names("gpt_neox.", _NEOX, {"head": "embed_out"}, _output("embed_out"), per_head=True),
    "bloom": Names("transformer.", _BLOOM, _HEAD, _output("lm_head"), per_head=True),
    "llama": Names("model.", _LLAMA, _HEAD, _output("lm_head")),
    "bert": Names(
        "bert.",
        _BERT,
        _transform(
            "cls.predictions.transform.dense",
            "cls.predictions.transform.LayerNorm",
            "cls.predictions.bias",
            next_sentence="cls.seq_relationship",
        ),
        _output("cls.predictions.decoder"),
    ),
    "roberta": Names("roberta.", _BERT, _ROBERTA_TOP, _output("lm_head.decoder")),
    "longformer": Names("longformer.", _BERT, _ROBERTA_TOP, _output("lm_head.decoder")),
    "distilbert": Names(
        "distilbert.",
        _DISTILBERT,
        _transform("vocab_transform", "vocab_layer_norm", "vocab_projector.bias"),
        _output("vocab_projector"),
    ),
    "albert": Names(
        "albert.",
        _ALBERT,
        _transform(
            "predictions.dense",
            "predictions.LayerNorm",
            "predictions.bias",
            sentence_order="sop_classifier.classifier",
        ),
        _output("predictions.decoder"),
    ),
    "electra": Names(
        "electra.",
        _ELECTRA,
        _transform(
            "generator_predictions.dense",
            "generator_predictions.LayerNorm",
            "generator_lm_head.bias",
            **_under(
                "replaced.", "discriminator_predictions.", {"dense": "dense", "out": "dense_prediction"}
            ),
        ),
        _output("generator_lm_head"),
    ),
}

"""T5 1.0 and 1.1 as they are published: our names and theirs, our settings and theirs."""

from typing import Any

from lm.config import SettingError, nearest
from lm.nn.config import ModelConfig

MODULES = {  # ours: theirs; "#" is the number of the layer, which we keep as the first axis of one array
    "embed": "shared",
    "head": "lm_head",
    "encoder.relative": "encoder.block.0.layer.0.SelfAttention.relative_attention_bias",
    "encoder.blocks.attention_norm": "encoder.block.#.layer.0.layer_norm",
    "encoder.blocks.attention": "encoder.block.#.layer.0.SelfAttention",
    "encoder.blocks.mlp_norm": "encoder.block.#.layer.1.layer_norm",
    "encoder.blocks.mlp": "encoder.block.#.layer.1.DenseReluDense",
    "encoder.norm": "encoder.final_layer_norm",
    "decoder.relative": "decoder.block.0.layer.0.SelfAttention.relative_attention_bias",
    "decoder.blocks.attention_norm": "decoder.block.#.layer.0.layer_norm",
    "decoder.blocks.attention": "decoder.block.#.layer.0.SelfAttention",
    "decoder.blocks.cross_norm": "decoder.block.#.layer.1.layer_norm",
    "decoder.blocks.cross": "decoder.block.#.layer.1.EncDecAttention",
    "decoder.blocks.mlp_norm": "decoder.block.#.layer.2.layer_norm",
    "decoder.blocks.mlp": "decoder.block.#.layer.2.DenseReluDense",
    "decoder.norm": "decoder.final_layer_norm",
}
KERNELS = {"query": "q", "key": "k", "value": "v", "out": "o"}
MLP_KERNELS = {"relu": {"hidden": "wi", "out": "wo"}, "gated-gelu": {"hidden": "wi_0", "linear": "wi_1", "out": "wo"}}
COPIES = (
    "encoder.embed_tokens.weight",
    "decoder.embed_tokens.weight",
    "lm_head.weight",
)  # of "shared.weight", or left out
# Written by the first export of the released models, and read by nothing: cross-attention has no bias.
UNUSED = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",)


def name(path: str, config: ModelConfig) -> str:
    """Their name of our parameter at dotted ``path``."""
    module = max((m for m in MODULES if path.startswith(m + ".")), key=len)
    inner = path[len(module) + 1 :].split(".")[:-1]  # without the name of the parameter itself
    kernels = MLP_KERNELS[config.mlp] if module.endswith("mlp") else KERNELS
    return ".".join([MODULES[module], *(kernels[part] for part in inner), "weight"])


def model_config(settings: dict[str, Any]) -> ModelConfig:
    """Our settings from the contents of their ``config.json``."""
    mlp = settings.get("feed_forward_proj", "relu")
    if mlp not in MLP_KERNELS:
        raise SettingError(f"feed_forward_proj={mlp!r} in config.json is not supported{nearest(mlp, MLP_KERNELS)}")
    layers = settings["num_layers"]
    return ModelConfig(
        vocab_size=settings["vocab_size"],
        num_encoder_layers=layers,
        num_decoder_layers=settings.get("num_decoder_layers") or layers,
        d_model=settings["d_model"],
        d_ff=settings["d_ff"],
        d_kv=settings["d_kv"],
        num_heads=settings["num_heads"],
        mlp=mlp,
        logits="tied" if settings.get("tie_word_embeddings", True) else "separate",
        relative_buckets=settings["relative_attention_num_buckets"],
        relative_max_distance=settings.get("relative_attention_max_distance", 128),
        norm_epsilon=settings["layer_norm_epsilon"],
        dropout=settings["dropout_rate"],
    )

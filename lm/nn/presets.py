"""Published models by name, each a change to the first of its family; sources stand beside them."""

from dataclasses import replace
from typing import Any

from lm.config.attention import RotaryConfig, SparsityConfig
from lm.config.base import changes
from lm.config.layers import AttentionConfig, MlpConfig, NormConfig, OutputConfig
from lm.config.model import ModelConfig, SpecialTokens

Changes = dict[str, Any]  # dotted path of a setting of ModelConfig -> its value


def _family(
    base: ModelConfig,
    vocab_size: int,
    special: tuple[int, int | None, int | None],
    new: Changes | None = None,
) -> ModelConfig:
    """Return ``base`` with ``new`` settings and a vocabulary whose ``special`` ids are (pad, eos, start)."""
    return changes(base, {"vocab_size": vocab_size, "special": SpecialTokens(*special)} | (new or {}))


def _sized(
    family: ModelConfig,
    layers: int,
    d_model: int,
    num_heads: int,
    new: Changes | None = None,
    *,
    d_ff: int = 0,
    d_kv: int = 0,
) -> ModelConfig:
    """Return a model of ``family`` with the usual proportions: d_ff is 4 d_model, heads share d_model."""
    sizes: Changes = {
        "num_encoder_layers": layers,
        "num_decoder_layers": layers,
        "d_model": d_model,
        "attention.num_heads": num_heads,
        "attention.d_kv": d_kv or d_model // num_heads,
        "mlp.d_ff": d_ff or 4 * d_model,
    }
    return changes(family, sizes | (new or {}))


_T5 = ModelConfig()
# Fedus et al. 2021: experts in every second layer. In Hugging Face's transformers an expert of the released
# weights reads at most 64 tokens of a text.
_SWITCH = changes(_T5, {"experts.every": 2, "experts.eval_capacity": 64})
_T5_1_1 = changes(_T5, {"mlp.activation": "gated-gelu", "output.logits": "separate"})
_MT5 = changes(_T5_1_1, {"vocab_size": 250_112})  # Xue et al. 2021
_UMT5 = changes(_T5_1_1, {"positions.kind": "relative-per-layer", "vocab_size": 256_384})  # Chung et al. 2023

# All other families start from these settings, and change some of them: scaled scores, layer norm, biases,
# and an output matrix that is the embedding.
_CLASSIC = ModelConfig(
    attention=AttentionConfig(scores="scaled-dot"),
    norm=NormConfig(kind="layer", epsilon=1e-5),
    bias=True,
    output=OutputConfig(logits="tied"),
    mlp=MlpConfig(activation="gelu"),
)
_POST_NORM = changes(_CLASSIC, {"positions.kind": "learned", "residual": "post-norm"})
_SINUSOIDAL = changes(
    _CLASSIC, {"positions.kind": "sinusoidal", "residual": "post-norm", "embedding.scale": "sqrt"}
)
_MASKED_LM_OUTPUT: Changes = {"embedding.norm": True, "output.transform": True, "output.bias": True}

# Vaswani et al. 2017
_TRANSFORMER = changes(
    _SINUSOIDAL, {"vocab_size": 37_000, "positions.sinusoid": "tensor2tensor", "mlp.activation": "relu"}
)
# Junczys-Dowmunt et al. 2018; Tiedemann and Thottingal 2020
_MARIAN = _family(
    _SINUSOIDAL,
    58_101,
    (58_100, 0, 58_100),
    {"positions.sinusoid": "halves", "mlp.activation": "silu", "output.bias": True},
)
# Lewis et al. 2020
_BART = _family(
    _POST_NORM,
    50_265,
    (1, 2, 2),
    {"positions.max_length": 1_024, "positions.offset": 2, "embedding.norm": True, "output.bias": True},
)
# Liu et al. 2020: 25 languages, whose codes start the targets
_MBART = _family(
    _BART, 250_027, (1, 2, None), {"residual": "pre-norm", "embedding.scale": "sqrt", "output.bias": True}
)
# Zhang et al. 2020
_PEGASUS = _family(
    _SINUSOIDAL,
    96_103,
    (0, 1, 0),
    {
        "positions.sinusoid": "halves",
        "residual": "pre-norm",
        "mlp.activation": "relu",
        "output.bias": True,
    },
)

_ENCODER = changes(
    _POST_NORM,
    {"architecture": "encoder", "norm.epsilon": 1e-12, "embedding.type_vocab_size": 2, **_MASKED_LM_OUTPUT},
)
# Devlin et al. 2019
_BERT = _family(_ENCODER, 30_522, (0, None, None), {"heads": ("pooler", "next-sentence")})
# Liu et al. 2019
_ROBERTA = _family(
    _BERT,
    50_265,
    (1, 2, 0),
    {"positions.offset": 2, "embedding.type_vocab_size": 1, "norm.epsilon": 1e-5, "heads": ()},
)
_XLM_ROBERTA = changes(_ROBERTA, {"vocab_size": 250_002})  # Conneau et al. 2020
_CAMEMBERT = changes(_ROBERTA, {"vocab_size": 32_005})  # Martin et al. 2020
# Song et al. 2020
_MPNET = changes(
    _ROBERTA,
    {"vocab_size": 30_527, "positions.kind": "relative-and-learned", "embedding.type_vocab_size": 0},
)
_DISTILBERT = changes(_BERT, {"embedding.type_vocab_size": 0, "heads": ()})  # Sanh et al. 2019
_ALBERT = changes(
    _BERT,
    {"vocab_size": 30_000, "embedding.d_embed": 128, "shared_layers": True, "mlp.activation": "gelu-tanh"},
)
_ALBERT = changes(_ALBERT, {"heads": ("pooler", "sentence-order")})  # Lan et al. 2020
_ELECTRA = changes(
    _BERT,
    {"output.logits": "none", "output.transform": False, "output.bias": False, "heads": ("replaced-token",)},
)
_ELECTRA_GENERATOR = changes(_BERT, {"heads": ()})  # Clark et al. 2020
# He et al. 2021: an embedding of each distance up to 512, projected by matrices of its own, and keys without
# a bias
_DEBERTA = _family(
    _ENCODER,
    50_265,
    (0, None, None),
    {
        "norm.epsilon": 1e-7,
        "positions.kind": "relative-disentangled",
        "positions.relative_buckets": 1_024,
        "positions.relative_max_distance": 512,
        "positions.relative_projections": "separate",
        "positions.relative_norm": False,
        "attention.key_bias": False,
        "embedding.type_vocab_size": 0,
    },
)
# He et al. 2023, version 3: 256 buckets on each side of the query
_DEBERTA_V3 = changes(
    _DEBERTA,
    {
        "vocab_size": 128_100,
        "positions.relative_buckets": 512,
        "positions.relative_projections": "shared",
        "positions.relative_norm": True,
        "attention.key_bias": None,
    },
)
_DEBERTA_V2 = changes(_DEBERTA_V3, {"embedding.convolution": 3})  # which version 3 left out again
# Yang et al. 2019: relative positions and relative token types, of which there are three
_XLNET = _family(
    _ENCODER,
    32_000,
    (5, 2, None),
    {
        "bias": False,
        "mlp.bias": True,
        "positions.kind": "relative-sinusoids",
        "positions.relative_types": True,
        "embedding.norm": False,
        "embedding.type_vocab_size": 0,
        "output.transform": False,
        "heads": ("query-stream",),
    },
)
# Beltagy et al. 2020
_LONGFORMER_WINDOW = SparsityConfig(window=256, projections="separate")
_LONGFORMER = changes(_ROBERTA, {"positions.max_length": 4_096, "sparsity": _LONGFORMER_WINDOW})
# Warner et al. 2024: of three layers the first sees everything, the others 64 tokens on each side
_MODERNBERT = _family(
    _ENCODER,
    50_368,
    (50_283, 50_282, 50_281),
    {
        "residual": "pre-norm",
        "bias": False,
        "norm.epsilon": 1e-5,
        "norm.bias": False,
        "norm.first_attention": "none",
        "positions.kind": "rotary",
        "positions.rotary": RotaryConfig(base=160_000.0, window_base=10_000.0),
        "mlp.activation": "gated-gelu-erf",
        "embedding.type_vocab_size": 0,
    },
)

# Radford et al. 2018, 2019
_GPT = _family(
    _POST_NORM, 40_478, (0, None, None), {"architecture": "decoder", "mlp.activation": "gelu-tanh"}
)
_GPT2 = _family(_GPT, 50_257, (0, 50_256, None), {"positions.max_length": 1_024, "residual": "pre-norm"})
# Brown et al. 2020, table 2.1; its sparse layers are not published
_GPT3 = changes(_GPT2, {"positions.max_length": 2_048})
# Ben Allal et al. 2023; Li et al. 2023
_BIGCODE = _family(
    _GPT2, 49_152, (0, 0, None), {"attention.num_key_value_heads": 1, "positions.max_length": 8_192}
)
_ROTARY = changes(_GPT2, {"positions.kind": "rotary", "output.logits": "separate"})
# Black et al. 2022; Biderman et al. 2023
_NEOX = _family(
    _ROTARY,
    50_432,
    (0, 0, None),
    {"positions.rotary": RotaryConfig(fraction=0.25), "residual": "parallel", "mlp.activation": "gelu"},
)
_PYTHIA = changes(_NEOX, {"vocab_size": 50_304})
# Wang and Komatsuzaki 2021
_GPT_J = _family(
    _ROTARY,
    50_400,
    (0, 50_256, None),
    {
        "positions.rotary": RotaryConfig(fraction=0.25, layout="pairs"),
        "residual": "parallel-one-norm",
        "bias": False,
        "mlp.bias": True,
        "output.bias": True,
    },
)
# Almazrouei et al. 2023: 7B has one head of keys and one norm in a block
_FALCON = _family(
    _ROTARY,
    65_024,
    (0, 11, None),
    {
        "residual": "parallel-one-norm",
        "bias": False,
        "mlp.activation": "gelu",
        "output.logits": "tied",
    },
)
# Black et al. 2021: every second layer sees 256 tokens
_GPT_NEO = changes(
    _GPT2, {"positions.max_length": 2_048, "attention.scores": "dot", "attention.qkv_bias": False}
)
# Zhang et al. 2022
_OPT = _family(
    _GPT2,
    50_272,
    (1, 2, None),
    {
        "positions.max_length": 2_048,
        "positions.offset": 2,
        "mlp.activation": "relu",
        "embedding.projected": "tokens",
    },
)
# Le Scao et al. 2022
_BLOOM = _family(_GPT2, 250_880, (3, 2, None), {"positions.kind": "alibi", "embedding.norm": True})
# MosaicML 2023
_MPT = _family(
    _GPT2,
    50_432,
    (0, 0, None),
    {"positions.kind": "alibi", "bias": False, "norm.bias": False, "mlp.activation": "gelu"},
)
# Chowdhery et al. 2022: all heads share keys and values. The ids of its special tokens are not published.
_PALM = _family(
    _ROTARY,
    256_000,
    (0, 1, None),
    {
        "residual": "parallel-one-norm",
        "bias": False,
        "norm.bias": False,
        "mlp.activation": "gated-silu",
        "attention.num_key_value_heads": 1,
        "output.logits": "tied-scaled",
    },
)
# Touvron et al. 2023
_LLAMA = _family(
    _ROTARY,
    32_000,
    (0, 2, None),
    {"norm.kind": "rms", "norm.epsilon": 1e-6, "bias": False, "mlp.activation": "gated-silu"},
)
# num_heads is a placeholder that 8 divides; ``_sized`` sets it.
_GROUPED: Changes = {"attention.num_heads": 32, "attention.num_key_value_heads": 8}
_LLAMA2 = changes(_LLAMA, {"norm.epsilon": 1e-5})
# Young et al. 2024
_YI = changes(_LLAMA2, {"vocab_size": 64_000, "positions.rotary": RotaryConfig(base=5e6)})
# Jiang et al. 2023: each layer sees 4,096 tokens
_MISTRAL = changes(_LLAMA2, {"sparsity": SparsityConfig(window=4_095), **_GROUPED})
# Jiang et al. 2024: eight experts, of which a token passes two; without a capacity
_MIXTRAL = changes(
    _LLAMA2,
    {
        "positions.rotary": RotaryConfig(base=1e6),
        "experts.count": 8,
        "experts.per_token": 2,
        "experts.capacity_factor": None,
        **_GROUPED,
    },
)
# Abdin et al. 2024a, 2024b
_PHI3 = _family(_LLAMA2, 32_064, (32_000, 32_000, None), {"sparsity": SparsityConfig(window=2_046)})
_PHI4 = _family(
    _LLAMA2,
    100_352,
    (100_349, 100_265, None),
    {"positions.rotary": RotaryConfig(base=250_000.0)},
)
# Yang et al. 2024: Qwen2, Qwen2.5
_QWEN2 = _family(
    _LLAMA,
    151_936,
    (151_643, 151_643, None),
    {"attention.qkv_bias": True, "positions.rotary": RotaryConfig(base=1e6)},
)
_QWEN2_FROM_7B = changes(_QWEN2, {"vocab_size": 152_064})
_QWEN2_FROM_14B = changes(_QWEN2_FROM_7B, {"norm.epsilon": 1e-5, **_GROUPED})
# Yang et al. 2025
_QWEN3 = changes(_QWEN2, {"attention.qkv_bias": None, "attention.qk_norm": True, **_GROUPED})
_TIED: Changes = {"output.logits": "tied"}
_TWO_KEY_HEADS_TIED = {"attention.num_key_value_heads": 2, **_TIED}
_LLAMA3_1 = RotaryConfig(base=500_000.0, scaling="llama3", factor=8.0, original_length=8_192)
_LLAMA3_2 = replace(_LLAMA3_1, factor=32.0)
# Grattafiori et al. 2024
_LLAMA3 = _family(_LLAMA2, 128_256, (0, 128_001, None), {"positions.rotary": _LLAMA3_1, **_GROUPED})
# Gemma Team 2024a
_GEMMA = _family(
    _LLAMA,
    256_000,
    (0, 1, None),
    {
        "norm.zero_centered": True,
        "mlp.activation": "gated-gelu",
        "embedding.scale": "sqrt",
        "output.logits": "tied",
    },
)
# Gemma Team 2024b
_GEMMA2 = changes(
    _GEMMA, {"residual": "sandwich-norm", "attention.logit_cap": 50.0, "output.logit_cap": 30.0}
)
# Zhang et al. 2025
_T5GEMMA = _family(
    _GEMMA2, 256_000, (0, 1, 2), {"architecture": "encoder-decoder", "embedding.encoder": "separate"}
)
# Gemma Team 2025, the language models: in rows of 131,072 tokens (1B: 32,768), of six layers the last sees
# everything
_GEMMA3 = changes(
    _GEMMA,
    {
        "residual": "sandwich-norm",
        "attention.qk_norm": True,
        "vocab_size": 262_208,
        "positions.rotary": RotaryConfig(
            base=1e6, window_base=10_000.0, window_scaling="none", scaling="linear", factor=8.0
        ),
    },
)
_GEMMA3_SHORT = changes(
    _GEMMA3, {"vocab_size": 262_144, "positions.rotary": RotaryConfig(base=1e6, window_base=10_000.0)}
)
# OLMo Team 2024
_OLMO2 = _family(
    _LLAMA,
    100_352,
    (100_277, 100_257, None),
    {
        "residual": "output-norm",
        "attention.qk_norm": True,
        "attention.qk_norm_features": "all-heads",
        "positions.rotary": RotaryConfig(base=500_000.0),
    },
)
# Granite Team 2024
_GRANITE = _family(
    _LLAMA2,
    49_155,
    (0, 0, None),
    {
        "output.logits": "tied",
        "embedding.multiplier": 12.0,
        "residual_multiplier": 0.22,
        **_GROUPED,
    },
)


def _alternating(layers: int) -> SparsityConfig:
    """Return the windows of GPT-Neo's layers: none, 256 tokens, none, ..."""
    return SparsityConfig(layer_windows=(None, 255) * (layers // 2))


def _every_third(layers: int) -> SparsityConfig:
    """Return the windows of ModernBERT's layers: none, 64 tokens on each side, 64, none, ..."""
    return SparsityConfig(layer_windows=tuple(64 if layer % 3 else None for layer in range(layers)))


def _gemma2_windows(layers: int, key_value_heads: int) -> Changes:
    """Return the windows of Gemma 2's layers, 4,096 tokens, none, 4,096, ..., and the heads of keys."""
    windows = SparsityConfig(layer_windows=(4_095, None) * (layers // 2))
    return {"sparsity": windows, "attention.num_key_value_heads": key_value_heads}


def _gemma3_windows(layers: int, window: int, key_value_heads: int) -> Changes:
    """Return the windows of Gemma 3's layers, all but every sixth, and the heads of keys."""
    windows = tuple(window - 1 if (layer + 1) % 6 else None for layer in range(layers))
    sparsity = SparsityConfig(layer_windows=windows)
    return {"sparsity": sparsity, "attention.num_key_value_heads": key_value_heads}


def _t5gemma_windows(layers: int, key_value_heads: int) -> Changes:
    """Return the same of T5Gemma, whose encoder sees 4,096 tokens on each side."""
    encoder = {"encoder.layer_windows": (4_096, None) * (layers // 2)}
    return _gemma2_windows(layers, key_value_heads) | encoder


PRESETS = {
    "t5-small": _sized(_T5, 6, 512, 8),
    "t5-base": _sized(_T5, 12, 768, 12),
    "t5-large": _sized(_T5, 24, 1_024, 16),
    "t5-3b": _sized(_T5, 24, 1_024, 32, d_ff=16_384, d_kv=128),
    "t5-11b": _sized(_T5, 24, 1_024, 128, d_ff=65_536, d_kv=128),
    "t5-1.1-small": _sized(_T5_1_1, 8, 512, 6, d_ff=1_024, d_kv=64),
    "t5-1.1-base": _sized(_T5_1_1, 12, 768, 12, d_ff=2_048),
    "t5-1.1-large": _sized(_T5_1_1, 24, 1_024, 16, d_ff=2_816),
    "t5-1.1-xl": _sized(_T5_1_1, 24, 2_048, 32, d_ff=5_120),
    "t5-1.1-xxl": _sized(_T5_1_1, 24, 4_096, 64, d_ff=10_240),
    "umt5-small": _sized(_UMT5, 8, 512, 6, d_ff=1_024, d_kv=64),
    "umt5-base": _sized(_UMT5, 12, 768, 12, d_ff=2_048),
    "mt5-small": _sized(_MT5, 8, 512, 6, d_ff=1_024, d_kv=64),
    "mt5-base": _sized(_MT5, 12, 768, 12, d_ff=2_048),
    "mt5-large": _sized(_MT5, 24, 1_024, 16, d_ff=2_816),
    "mt5-xl": _sized(_MT5, 24, 2_048, 32, d_ff=5_120),
    "mt5-xxl": _sized(_MT5, 24, 4_096, 64, d_ff=10_240),
    **{
        f"switch-base-{count}": _sized(_SWITCH, 12, 768, 12, {"experts.count": count})
        for count in (8, 16, 32, 64, 128, 256)
    },
    "switch-large-128": _sized(_SWITCH, 24, 1_024, 16, {"experts.count": 128}),
    "transformer-base": _sized(_TRANSFORMER, 6, 512, 8),
    "transformer-big": _sized(_TRANSFORMER, 6, 1_024, 16),
    "marian": _sized(_MARIAN, 6, 512, 8),
    "bart-base": _sized(_BART, 6, 768, 12),
    "bart-large": _sized(_BART, 12, 1_024, 16),
    "mbart-large": _sized(_MBART, 12, 1_024, 16),
    "pegasus-large": _sized(_PEGASUS, 16, 1_024, 16),
    # Turc et al. 2019
    "bert-tiny": _sized(_BERT, 2, 128, 2),
    "bert-mini": _sized(_BERT, 4, 256, 4),
    "bert-small": _sized(_BERT, 4, 512, 8),
    "bert-medium": _sized(_BERT, 8, 512, 8),
    # Devlin et al. 2019
    "bert-base": _sized(_BERT, 12, 768, 12),
    "bert-large": _sized(_BERT, 24, 1_024, 16),
    # Joshi et al. 2020
    "spanbert-base": _sized(changes(_BERT, {"vocab_size": 28_996, "heads": ("pooler",)}), 12, 768, 12),
    "spanbert-large": _sized(changes(_BERT, {"vocab_size": 28_996, "heads": ("pooler",)}), 24, 1_024, 16),
    "roberta-base": _sized(_ROBERTA, 12, 768, 12),
    "roberta-large": _sized(_ROBERTA, 24, 1_024, 16),
    "xlm-roberta-base": _sized(_XLM_ROBERTA, 12, 768, 12),
    "xlm-roberta-large": _sized(_XLM_ROBERTA, 24, 1_024, 16),
    "camembert-base": _sized(_CAMEMBERT, 12, 768, 12),
    "mpnet-base": _sized(_MPNET, 12, 768, 12),
    "distilbert": _sized(_DISTILBERT, 6, 768, 12),
    "albert-base": _sized(_ALBERT, 12, 768, 12),
    "albert-large": _sized(_ALBERT, 24, 1_024, 16),
    "albert-xlarge": _sized(_ALBERT, 24, 2_048, 16),
    "albert-xxlarge": _sized(_ALBERT, 12, 4_096, 64),
    "electra-small": _sized(_ELECTRA, 12, 256, 4, {"embedding.d_embed": 128}),
    "electra-base": _sized(_ELECTRA, 12, 768, 12),
    "electra-large": _sized(_ELECTRA, 24, 1_024, 16),
    "electra-small-generator": _sized(_ELECTRA_GENERATOR, 12, 256, 4, {"embedding.d_embed": 128}),
    "electra-base-generator": _sized(_ELECTRA_GENERATOR, 12, 256, 4, {"embedding.d_embed": 768}),
    "electra-large-generator": _sized(_ELECTRA_GENERATOR, 24, 256, 4, {"embedding.d_embed": 1_024}),
    "deberta-base": _sized(_DEBERTA, 12, 768, 12),
    "deberta-large": _sized(_DEBERTA, 24, 1_024, 16),
    "deberta-xlarge": _sized(_DEBERTA, 48, 1_024, 16),
    "deberta-v2-xlarge": _sized(_DEBERTA_V2, 24, 1_536, 24),
    "deberta-v2-xxlarge": _sized(_DEBERTA_V2, 48, 1_536, 24),
    "xlnet-base": _sized(_XLNET, 12, 768, 12),
    "xlnet-large": _sized(_XLNET, 24, 1_024, 16),
    "deberta-v3-xsmall": _sized(_DEBERTA_V3, 12, 384, 6),
    "deberta-v3-small": _sized(_DEBERTA_V3, 6, 768, 12),
    "deberta-v3-base": _sized(_DEBERTA_V3, 12, 768, 12),
    "deberta-v3-large": _sized(_DEBERTA_V3, 24, 1_024, 16),
    "mdeberta-v3-base": _sized(changes(_DEBERTA_V3, {"vocab_size": 251_000}), 12, 768, 12),
    "longformer-base": _sized(_LONGFORMER, 12, 768, 12),
    "longformer-large": _sized(_LONGFORMER, 24, 1_024, 16),
    "modernbert-base": _sized(_MODERNBERT, 22, 768, 12, {"sparsity": _every_third(22)}, d_ff=1_152),
    "modernbert-large": _sized(_MODERNBERT, 28, 1_024, 16, {"sparsity": _every_third(28)}, d_ff=2_624),
    "gpt": _sized(_GPT, 12, 768, 12),
    "gpt2": _sized(_GPT2, 12, 768, 12),
    "gpt2-medium": _sized(_GPT2, 24, 1_024, 16),
    "gpt2-large": _sized(_GPT2, 36, 1_280, 20),
    "gpt2-xl": _sized(_GPT2, 48, 1_600, 25),
    "gpt3-small": _sized(_GPT3, 12, 768, 12),
    "gpt3-medium": _sized(_GPT3, 24, 1_024, 16),
    "gpt3-large": _sized(_GPT3, 24, 1_536, 16),
    # 24 heads in print, which would be 1.5 billion parameters instead of 1.3
    "gpt3-xl": _sized(_GPT3, 24, 2_048, 16),
    "gpt3-2.7b": _sized(_GPT3, 32, 2_560, 32),
    "gpt3-6.7b": _sized(_GPT3, 32, 4_096, 32),
    "gpt3-13b": _sized(_GPT3, 40, 5_140, 40, d_kv=128),
    "gpt3": _sized(_GPT3, 96, 12_288, 96),
    "starcoder": _sized(_BIGCODE, 40, 6_144, 48),
    "santacoder": _sized(
        _family(_BIGCODE, 49_280, (0, 49_152, None), {"positions.max_length": 2_048}), 24, 2_048, 16
    ),
    "gpt-neo-125m": _sized(_GPT_NEO, 12, 768, 12, {"sparsity": _alternating(12)}),
    "gpt-neo-1.3b": _sized(_GPT_NEO, 24, 2_048, 16, {"sparsity": _alternating(24)}),
    "gpt-neo-2.7b": _sized(_GPT_NEO, 32, 2_560, 20, {"sparsity": _alternating(32)}),
    "gpt-j-6b": _sized(_GPT_J, 28, 4_096, 16),
    "falcon-7b": _sized(_FALCON, 32, 4_544, 71, {"attention.num_key_value_heads": 1}),
    "falcon-40b": _sized(
        _FALCON, 60, 8_192, 128, {"residual": "parallel", "attention.num_key_value_heads": 8}
    ),
    "pythia-70m": _sized(_PYTHIA, 6, 512, 8),
    "pythia-160m": _sized(_PYTHIA, 12, 768, 12),
    "pythia-410m": _sized(_PYTHIA, 24, 1_024, 16),
    "pythia-1b": _sized(_PYTHIA, 16, 2_048, 8),
    "pythia-1.4b": _sized(_PYTHIA, 24, 2_048, 16),
    "pythia-2.8b": _sized(_PYTHIA, 32, 2_560, 32),
    "pythia-6.9b": _sized(_NEOX, 32, 4_096, 32),
    "pythia-12b": _sized(changes(_NEOX, {"vocab_size": 50_688}), 36, 5_120, 40),
    # its config.json has gelu_fast, which is the tanh form
    "gpt-neox-20b": _sized(_NEOX, 44, 6_144, 64, {"mlp.activation": "gelu-tanh"}),
    "bloom-560m": _sized(_BLOOM, 24, 1_024, 16),
    "bloom-1b7": _sized(_BLOOM, 24, 2_048, 16),
    "bloom-7b1": _sized(_BLOOM, 30, 4_096, 32),
    "bloom": _sized(_BLOOM, 70, 14_336, 112),
    "mpt-7b": _sized(_MPT, 32, 4_096, 32),
    "mpt-30b": _sized(_MPT, 48, 7_168, 64),
    "palm-8b": _sized(_PALM, 32, 4_096, 16),
    "palm-62b": _sized(_PALM, 64, 8_192, 32),
    "palm-540b": _sized(_PALM, 118, 18_432, 48, d_kv=256),
    "opt-125m": _sized(_OPT, 12, 768, 12),
    "opt-350m": _sized(_OPT, 24, 1_024, 16, {"embedding.d_embed": 512, "residual": "post-norm"}),
    "opt-1.3b": _sized(_OPT, 24, 2_048, 32),
    "opt-2.7b": _sized(_OPT, 32, 2_560, 32),
    "opt-6.7b": _sized(_OPT, 32, 4_096, 32),
    "opt-13b": _sized(_OPT, 40, 5_120, 40),
    "opt-30b": _sized(_OPT, 48, 7_168, 56),
    "opt-66b": _sized(_OPT, 64, 9_216, 72),
    "llama-7b": _sized(_LLAMA, 32, 4_096, 32, d_ff=11_008),
    "llama-13b": _sized(_LLAMA, 40, 5_120, 40, d_ff=13_824),
    "llama-30b": _sized(_LLAMA, 60, 6_656, 52, d_ff=17_920),
    "llama-65b": _sized(_LLAMA2, 80, 8_192, 64, d_ff=22_016),
    "yi-6b": _sized(_YI, 32, 4_096, 32, {"attention.num_key_value_heads": 4}, d_ff=11_008),
    "yi-9b": _sized(_YI, 48, 4_096, 32, {"attention.num_key_value_heads": 4}, d_ff=11_008),
    "yi-34b": _sized(_YI, 60, 7_168, 56, {"attention.num_key_value_heads": 8}, d_ff=20_480),
    "llama-2-7b": _sized(_LLAMA2, 32, 4_096, 32, d_ff=11_008),
    "llama-2-13b": _sized(_LLAMA2, 40, 5_120, 40, d_ff=13_824),
    "llama-2-70b": _sized(_LLAMA2, 80, 8_192, 64, {"attention.num_key_value_heads": 8}, d_ff=28_672),
    "llama-3.1-8b": _sized(_LLAMA3, 32, 4_096, 32, d_ff=14_336),
    "llama-3.1-70b": _sized(_LLAMA3, 80, 8_192, 64, d_ff=28_672),
    "llama-3.2-1b": _sized(
        _LLAMA3, 16, 2_048, 32, {"output.logits": "tied", "positions.rotary": _LLAMA3_2}, d_ff=8_192
    ),
    "mistral-7b": _sized(_MISTRAL, 32, 4_096, 32, d_ff=14_336),  # version 0.1
    "mixtral-8x7b": _sized(_MIXTRAL, 32, 4_096, 32, d_ff=14_336),
    "phi-3-mini": _sized(_PHI3, 32, 3_072, 32, d_ff=8_192),  # with rows of 4,096 tokens
    "phi-4": _sized(_PHI4, 40, 5_120, 40, {"attention.num_key_value_heads": 10}, d_ff=17_920),
    "qwen2.5-0.5b": _sized(_QWEN2, 24, 896, 14, _TWO_KEY_HEADS_TIED, d_ff=4_864),
    "qwen2.5-1.5b": _sized(_QWEN2, 28, 1_536, 12, _TWO_KEY_HEADS_TIED, d_ff=8_960),
    "qwen2.5-3b": _sized(_QWEN2, 36, 2_048, 16, _TWO_KEY_HEADS_TIED, d_ff=11_008),
    "qwen2.5-7b": _sized(_QWEN2_FROM_7B, 28, 3_584, 28, {"attention.num_key_value_heads": 4}, d_ff=18_944),
    "qwen2.5-14b": _sized(_QWEN2_FROM_14B, 48, 5_120, 40, d_ff=13_824),
    "qwen2.5-32b": _sized(_QWEN2_FROM_14B, 64, 5_120, 40, d_ff=27_648),
    "qwen2.5-72b": _sized(_QWEN2_FROM_14B, 80, 8_192, 64, d_ff=29_568),
    "qwen3-0.6b": _sized(_QWEN3, 28, 1_024, 16, _TIED, d_ff=3_072, d_kv=128),
    "qwen3-1.7b": _sized(_QWEN3, 28, 2_048, 16, _TIED, d_ff=6_144, d_kv=128),
    "qwen3-4b": _sized(_QWEN3, 36, 2_560, 32, _TIED, d_ff=9_728, d_kv=128),
    "qwen3-8b": _sized(_QWEN3, 36, 4_096, 32, d_ff=12_288, d_kv=128),
    "qwen3-14b": _sized(_QWEN3, 40, 5_120, 40, d_ff=17_408, d_kv=128),
    "qwen3-32b": _sized(_QWEN3, 64, 5_120, 64, d_ff=25_600, d_kv=128),
    "gemma-2b": _sized(_GEMMA, 18, 2_048, 8, {"attention.num_key_value_heads": 1}, d_ff=16_384, d_kv=256),
    "gemma-7b": _sized(_GEMMA, 28, 3_072, 16, d_ff=24_576, d_kv=256),
    "gemma-2-2b": _sized(_GEMMA2, 26, 2_304, 8, _gemma2_windows(26, 4), d_ff=9_216, d_kv=256),
    "gemma-2-9b": _sized(_GEMMA2, 42, 3_584, 16, _gemma2_windows(42, 8), d_ff=14_336, d_kv=256),
    "gemma-2-27b": _sized(
        changes(_GEMMA2, {"attention.query_pre_attn_scalar": 4_608 // 32}),
        *(46, 4_608, 32, _gemma2_windows(46, 16)),
        d_ff=36_864,
        d_kv=128,
    ),
    "gemma-3-270m": _sized(_GEMMA3_SHORT, 18, 640, 4, _gemma3_windows(18, 512, 1), d_ff=2_048, d_kv=256),
    "gemma-3-1b": _sized(_GEMMA3_SHORT, 26, 1_152, 4, _gemma3_windows(26, 512, 1), d_ff=6_912, d_kv=256),
    "gemma-3-4b": _sized(_GEMMA3, 34, 2_560, 8, _gemma3_windows(34, 1_024, 4), d_ff=10_240, d_kv=256),
    "gemma-3-12b": _sized(_GEMMA3, 48, 3_840, 16, _gemma3_windows(48, 1_024, 8), d_ff=15_360, d_kv=256),
    "gemma-3-27b": _sized(
        changes(_GEMMA3, {"attention.query_pre_attn_scalar": 5_376 // 32}),
        *(62, 5_376, 32, _gemma3_windows(62, 1_024, 16)),
        d_ff=21_504,
        d_kv=128,
    ),
    "olmo-2-1b": _sized(_OLMO2, 16, 2_048, 16, d_ff=8_192),
    "olmo-2-7b": _sized(_OLMO2, 32, 4_096, 32, d_ff=11_008),
    "olmo-2-13b": _sized(_OLMO2, 40, 5_120, 40, d_ff=13_824),
    "olmo-2-32b": _sized(_OLMO2, 64, 5_120, 40, {"attention.num_key_value_heads": 8}, d_ff=27_648),
    "granite-3.0-2b": _sized(
        _GRANITE, 40, 2_048, 32, {"attention.scale": 1 / 64, "output.logit_divisor": 8.0}, d_ff=8_192
    ),
    "granite-3.0-8b": _sized(
        _GRANITE, 40, 4_096, 32, {"attention.scale": 1 / 128, "output.logit_divisor": 16.0}, d_ff=12_800
    ),
    "t5gemma-2b-2b": _sized(_T5GEMMA, 26, 2_304, 8, _t5gemma_windows(26, 4), d_ff=9_216, d_kv=256),
    "t5gemma-9b-9b": _sized(_T5GEMMA, 42, 3_584, 16, _t5gemma_windows(42, 8), d_ff=14_336, d_kv=256),
}

# Row lengths in pre-training, (inputs, targets) [tokens]: (0, row) of a decoder, (row, 0) of an encoder. A
# key is the start of a model's name; the longest that fits counts. Models with learned positions are not
# listed: their rows are as long as their positions reach.
_ROW_LENGTHS = {
    "t5-": (512, 114),  # Raffel et al. 2020: spans of 3 tokens, 15 % of the text
    "umt5-": (512, 114),  # Chung et al. 2023: chunks of 568 tokens
    "mt5-": (1_024, 229),  # Xue et al. 2021
    "switch-": (512, 114),  # as T5
    "pegasus-": (512, 256),  # Zhang et al. 2020, section 6.1
    "gpt-j-": (0, 2_048),
    "gpt-neox-": (0, 2_048),
    "pythia-": (0, 2_048),
    "falcon-": (0, 2_048),
    "bloom": (0, 2_048),
    "mpt-7b": (0, 2_048),
    "mpt-30b": (0, 8_192),
    "palm-": (0, 2_048),
    "yi-": (0, 4_096),
    "llama-": (0, 2_048),
    "llama-2-": (0, 4_096),
    "llama-3.": (0, 8_192),  # before rows were lengthened to 131,072
    "mistral-": (0, 8_192),
    "mixtral-": (0, 32_768),
    "phi-3-": (0, 4_096),
    "phi-4": (0, 4_096),  # before rows were lengthened to 16,384
    "qwen2.5-": (0, 4_096),  # before rows were lengthened to 32,768
    "qwen3-": (0, 4_096),  # likewise
    "gemma-": (0, 8_192),
    "gemma-3-": (0, 32_768),  # before rows were lengthened
    "olmo-2-": (0, 4_096),
    "granite-3.0-": (0, 4_096),
    "t5gemma-": (4_096, 4_096),  # a row of Gemma 2, half of it as targets
    "deberta-": (512, 0),
    "mdeberta-": (512, 0),
    "xlnet-": (512, 0),
    "modernbert-": (1_024, 0),  # before rows were lengthened to 8,192
}


def row_lengths(name: str, model: ModelConfig) -> tuple[int, int] | None:
    """Return the lengths of the rows that a published model was pre-trained on, (inputs, targets) [tokens].

    ``model`` is the published model or a change of it: where its positions are learned, rows are as long as
    they reach. The targets of an encoder are 0, and so are the inputs of a decoder. None: the model was
    trained on sentences, whose lengths vary.
    """
    if model.positions.is_learned:
        longest = model.positions.max_length
        return longest if model.has_encoder else 0, longest if model.has_decoder else 0
    starts = [start for start in _ROW_LENGTHS if name.startswith(start)]
    return _ROW_LENGTHS[max(starts, key=len)] if starts else None

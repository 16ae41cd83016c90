"""Settings of the parts of a Transformer: a group for each, with the checks that concern it alone.

Sources: of T5 Raffel et al. 2020, sections 3.1.2 and 3.7; of the others the paper named beside them and,
where that is silent, the configuration released with the weights.
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from lm.config.attention import RotaryConfig
from lm.config.base import (
    ABOVE_0,
    GIVEN,
    Condition,
    Conditions,
    SettingError,
    Values,
    check_above_0,
    check_at_least,
    check_at_most,
    setting,
)

ConvolutionName = Literal["lightweight-convolution", "dynamic-convolution"]
MixerName = Literal[
    "attention",
    "synthesizer",
    "rnn",
    "gru",
    "lstm",
    "window",
    ConvolutionName,
    "none",
]
CrossName = Literal["heads", "merged", "dot", "multiplicative", "additive", "none"]
# relative-and-learned: a table of biases and one of embeddings (MPNet)
BucketedPositions = Literal[
    "relative", "relative-per-layer", "relative-and-learned", "relative-keys", "relative-disentangled"
]
RelativePositions = Literal[BucketedPositions, "relative-sinusoids"]
Positions = Literal["none", "learned", "sinusoidal", RelativePositions, "rotary", "alibi"]
# silu is Swish with beta 1. A gated form multiplies the activation of one projection by a second projection:
# sigmoid (GLU), none (gated-linear: bilinear), relu (ReGLU), gelu in its tanh form (GEGLU) or by the error
# function (gated-gelu-erf: ModernBERT), silu (SwiGLU).
_UngatedActivation = Literal[
    "relu",
    "squared-relu",
    "gelu",
    "gelu-tanh",
    "silu",
    "elu",
    "selu",
    "sigmoid",
    "softplus",
]
GatedActivation = Literal[
    "gated-sigmoid",
    "gated-linear",
    "gated-relu",
    "gated-gelu",
    "gated-gelu-erf",
    "gated-silu",
]
Activation = Literal[_UngatedActivation, GatedActivation, "none"]
Logits = Literal["tied-scaled", "tied", "separate-scaled", "separate", "none"]

# Tensors of a block that remat policies choose from: the block's input; queries, keys and values as they are
# projected; attention's output before (context) and after its last projection; the hidden features of the
# feed-forward layer before the activation, and its output. Cross-attention's have the same names.
SavedTensor = Literal["query_proj", "key_proj", "value_proj", "context", "out_proj", "mlp_hidden", "mlp_out"]
OffloadedTensor = Literal["block_input", SavedTensor]
Remat = Literal["none", "dots", "attention", "full", "full-offloaded", "names"]
ATTENTION_TENSORS = ("query_proj", "key_proj", "value_proj", "context", "out_proj")
MLP_TENSORS = ("mlp_hidden", "mlp_out")

# Kinds of positions that multiply queries or keys with vectors of relative positions. They need the whole
# matrix of scores in memory, which the flash and cuDNN kernels do not store.
RELATIVE_VECTOR_KINDS = ("relative-keys", "relative-disentangled", "relative-sinusoids")
# Kinds of positions that begin so add something to each score which depends on the relative position: a bias,
# or a product with a vector.
RELATIVE_KIND_PREFIXES = ("relative", "alibi")
RECURRENT = ("rnn", "gru", "lstm")  # mixers that carry a state from token to token
CONVOLUTIONS = get_args(ConvolutionName)
# built-in mixers that compute attention logits: those whose class has ``has_attention_logits``
MIXERS_WITH_LOGITS = ("attention", "synthesizer")


@dataclass(frozen=True)
class Mixers(Values):
    """Values of model.mixer.kind that read a setting.

    They are some of the built-in mixers, and any of a user's own, which may read all settings.
    """

    def has(self, value: Any) -> bool:
        """Return whether the mixer of this name is one of them."""
        return value in self.among or value not in get_args(MixerName)


# ``read_if`` of settings: on which others of their group they depend
LEARNED: Condition = {"kind": ("learned", "relative-and-learned")}
BUCKETED: Condition = {"kind": get_args(BucketedPositions)}
BIAS_TABLES = ("relative", "relative-per-layer", "relative-and-learned")  # a number per head and bucket
RELATIVE_BIASES: Condition = {"kind": BIAS_TABLES}
DISENTANGLED: Condition = {"kind": ("relative-disentangled",)}
SINUSOIDS: Condition = {"kind": ("relative-sinusoids",)}
BY_HEADS = ("heads", "merged")  # kinds of cross-attention whose queries and keys are those of heads
FEED_FORWARD: Condition = {"activation": Values(exclude=("none",))}
SYNTHESIZER: Condition = {"kind": Mixers(("synthesizer",))}
CONVOLUTION: Condition = {"kind": Mixers(CONVOLUTIONS)}
HEAD_NORMS: Conditions = ({"qk_norm": (True,)}, {"value_norm": (True,)}, {"output_norm": (True,)})


@dataclass(frozen=True)
class AttentionConfig:
    """Multi-head attention; cross-attention has the same heads."""

    num_heads: int = 12  # number of attention heads [heads]
    # number of key and value heads, each shared by several query heads; None: num_heads [heads]
    num_key_value_heads: int | None = None
    d_kv: int = 64  # width of the queries and keys of one head [features]
    d_v: int | None = None  # width of the values of one head; None: d_kv [features]
    # attention scores: the product of query and key (dot: T5), that product divided by sqrt(d_kv)
    # (scaled-dot), or the product with a learned matrix between the two, also divided by it (bilinear)
    scores: Literal["dot", "scaled-dot", "bilinear"] = "dot"
    # number whose square root divides the scores, in place of d_kv (Gemma 2 27B: d_model / num_heads); None:
    # d_kv
    query_pre_attn_scalar: int | None = setting(None, {"scores": ("scaled-dot", "bilinear")})
    # number by which the scores are multiplied, in place of being divided by that square root (Granite);
    # None: they are divided
    scale: float | None = setting(None, {"scores": ("scaled-dot", "bilinear")})
    # soft cap of the attention logits c: cap * tanh(c / cap) (Gemma 2); None: no cap
    logit_cap: float | None = None
    # whether the projections of queries, keys and values have a bias; None: as model.bias
    qkv_bias: bool | None = None
    # whether the projection of keys has a bias; None: as those of queries and values (DeBERTa 1: it has none)
    key_bias: bool | None = None
    qk_norm: bool = False  # whether each head's queries and keys are normalised (Qwen3)
    # features of queries, and of keys, that one norm takes together: a head's (Qwen3), or all heads' (OLMo 2)
    qk_norm_features: Literal["head", "all-heads"] = setting("head", {"qk_norm": (True,)})
    value_norm: bool = False  # whether each head's values are normalised (RedLLM, Zhang et al. 2025)
    # whether each head's output is normalised before all are projected (RedLLM)
    output_norm: bool = False
    # whether the norms of heads have learned scales (Qwen3) or no parameters (RedLLM)
    norm_scale: bool = setting(True, HEAD_NORMS)
    # whether heads are projected together, or each of them passes the feed-forward layer by itself, and all
    # are added with weights that are learned and sum to 1 (weighted: Ahmed et al. 2017)
    branching: Literal["none", "weighted"] = "none"
    # number of neighbouring tokens of which a convolution makes one key and one value; 1: each token has its
    # own (3: memory-compressed attention, Liu et al. 2018) [tokens]
    compression: int = 1
    # mask of a decoder's self-attention; with none, it sees the tokens that it is to predict
    mask: Literal["causal", "none"] = "causal"
    # mask of an encoder's self-attention: none, or causal, with which it may predict the next token
    encoder_mask: Literal["none", "causal"] = "none"
    # implementation of attention; auto chooses by device and length (xla on CPUs)
    implementation: Literal["auto", "xla", "cudnn", "flash"] = "auto"

    def __post_init__(self):
        check_at_least(self, "model.attention.", d_kv=1, num_heads=1, num_key_value_heads=1, d_v=1)
        check_at_least(self, "model.attention.", query_pre_attn_scalar=1, compression=1)
        check_above_0(self, "model.attention.", "logit_cap scale")
        if self.scale is not None and self.query_pre_attn_scalar is not None:
            raise SettingError(
                f"model.attention.scale={self.scale} takes the place of "
                f"model.attention.query_pre_attn_scalar={self.query_pre_attn_scalar}: one of the two "
                "should be None"
            )
        # limits the memory for tables with a number per head, which are made on the host
        check_at_most(self, "model.attention.", num_heads=2**16)
        if self.num_heads % self.key_value_heads:
            heads = f"model.attention.num_key_value_heads={self.num_key_value_heads}"
            raise SettingError(f"{heads} should divide model.attention.num_heads={self.num_heads}")

    @property
    def key_value_heads(self) -> int:
        return self.num_key_value_heads or self.num_heads

    @property
    def product_scale(self) -> float:
        """Return the factor of scaled products of queries and keys."""
        # Vaswani et al. 2017. Multiplying queries by a bilinear weight, as initialised, does not change their
        # variance, so the same factor fits bilinear scores.
        usual = (self.query_pre_attn_scalar or self.d_kv) ** -0.5
        return usual if self.scale is None else self.scale

    @property
    def has_head_norms(self) -> bool:
        """Return whether the features of single heads are normalised anywhere."""
        return self.qk_norm or self.value_norm or self.output_norm

    @property
    def value_width(self) -> int:
        return self.d_v or self.d_kv


@dataclass(frozen=True)
class CrossAttentionConfig:
    """Cross-attention: how a decoder reads its encoder."""

    # how a decoder reads its encoder: by heads as in self-attention, by its self-attention itself, which has
    # the encoder's states as further keys (merged: T5Gemma 2), by one mean of the encoder's states (dot and
    # multiplicative: Luong et al. 2015, additive: Bahdanau et al. 2015), or only from the encoder's last
    # state (none: Sutskever et al. 2014)
    kind: CrossName = "heads"
    # initialisation: random, or queries and keys of each head alike, so that a position of the decoder
    # attends to the same token in the encoder (mimetic: Trockman and Kolter 2023)
    start: Literal["normal", "mimetic"] = setting("normal", {"kind": ("heads",)})
    # rotary positions in cross-attention: queries and keys are not rotated (none), or the decoder's positions
    # continue after the encoder's last one (continued: RedLLM)
    positions: Literal["none", "continued"] = setting("none", {"kind": BY_HEADS})
    # layers of the encoder that a layer of the decoder reads: the last, or a mean of all whose weights each
    # layer of the decoder learns (weighted: transparent attention, Bapna et al. 2018)
    encoder_layers: Literal["last", "weighted"] = setting("last", {"kind": ("heads",)})
    # number of heads of cross-attention, if other than of self-attention [heads]
    num_heads: int | None = setting(None, {"kind": ("heads",)})
    # width of the heads of cross-attention, if other than of self-attention [features]
    d_kv: int | None = setting(None, {"kind": ("heads",)})

    def __post_init__(self):
        check_at_least(self, "model.cross_attention.", num_heads=1, d_kv=1)
        check_at_most(self, "model.cross_attention.", num_heads=2**16)
        for name in ("num_heads", "d_kv"):
            if getattr(self, name) is not None and self.kind != "heads":
                raise SettingError(
                    f"model.cross_attention.{name}={getattr(self, name)} is of heads of its own, which "
                    f"model.cross_attention.kind={self.kind!r} does not have: choose 'heads', or None"
                )
        if self.start != "normal" and self.kind != "heads":
            raise SettingError(
                f"model.cross_attention.start={self.start!r} is of heads, not "
                f"model.cross_attention.kind={self.kind!r}"
            )
        if self.positions != "none" and self.kind not in BY_HEADS:
            raise SettingError(
                f"model.cross_attention.positions={self.positions!r} turns the features of heads: "
                f"model.cross_attention.kind={self.kind!r} should be 'heads' or 'merged'"
            )


@dataclass(frozen=True)
class MixerConfig:
    """The token mixer: what mixes the positions of a row."""

    # token mixer of a block: attention, attention with logits that are no products of queries and keys
    # (synthesizer: Tay et al. 2021), a recurrent layer (Elman, GRU, LSTM), the concatenation of the last
    # tokens (window: Bengio et al. 2003), a convolution whose kernels are parameters (lightweight) or come
    # from each position (dynamic: Wu et al. 2019), or none
    kind: MixerName = "attention"
    # width of the recurrent state, or of the window's hidden layer; None: d_model [features]
    width: int | None = setting(None, {"kind": Mixers((*RECURRENT, "window"))})
    # number of tokens that a window reads: the current one and those before it; in an encoder also as many
    # after it, so that it reads 2 * window - 1 [tokens]
    window: int = setting(3, {"kind": Mixers(("window",))})
    # length of the chunks within which gradients of recurrent states flow; None: the whole row [tokens]
    truncation: int | None = setting(None, {"kind": Mixers(RECURRENT)})
    # logits of a synthesizer: computed from the query's own position (dense), or parameters, the same for all
    # texts, as they are (random) or as a product of low rank (factorized)
    logits: Literal["dense", "random", "factorized"] = setting("dense", SYNTHESIZER)
    # whether a synthesizer has products of queries and keys too: no, added to its logits, or mixed with them
    # by a weight that each layer learns
    products: Literal["none", "added", "mixed"] = setting("none", SYNTHESIZER)
    # rank of a synthesizer's factorised logits [features]
    rank: int = setting(16, SYNTHESIZER | {"logits": ("factorized",)})
    # number of tokens that a convolution reads, including the current one: the last of them in a decoder, the
    # middle one in an encoder [tokens]
    kernel_size: int = setting(9, CONVOLUTION)
    # number of kernels of a convolution, each shared by as many features; None: one for each [kernels]
    kernels: int | None = setting(None, CONVOLUTION)

    def __post_init__(self):
        check_at_least(self, "model.mixer.", window=1, width=1, truncation=1, rank=1)
        check_at_least(self, "model.mixer.", kernel_size=1, kernels=1)
        if self.truncation is not None and self.kind not in RECURRENT:
            wants = f"needs model.mixer.kind='rnn', 'gru' or 'lstm', not {self.kind!r}"
            raise SettingError(f"model.mixer.truncation={self.truncation} {wants}")


@dataclass(frozen=True)
class MlpConfig:
    """The feed-forward layer, and the adapter after it."""

    activation: Activation = "relu"  # activation of the feed-forward layer; none: no such layer
    d_ff: int = setting(3_072, FEED_FORWARD)  # width of the feed-forward layer [features]
    # whether the feed-forward layer has biases; None: as model.bias
    bias: bool | None = setting(None, FEED_FORWARD)
    # inner width of the adapter after each feed-forward layer; 0: no adapter [features]
    adapter_width: int = 0

    def __post_init__(self):
        check_at_least(self, "model.mlp.", d_ff=1, adapter_width=0)


@dataclass(frozen=True)
class PositionsConfig:
    """Position encoding: how a model knows the order of its tokens."""

    # position encoding; relative: a number for each relative position and head is added to the scores;
    # relative-keys: the product of the query and a vector for each of them (Shaw et al. 2018);
    # relative-disentangled: products of the query, and of the key, with projections of an embedding for each
    # of them (DeBERTa); relative-sinusoids: the product of the query with a projection of the sinusoid of
    # each of them, and learned biases of queries (Transformer-XL, XLNet)
    kind: Positions = "relative"
    # longest row with learned positions or a synthesizer [tokens]
    max_length: int = 512
    # number of unused rows before the learned positions; 2 in BART and RoBERTa [rows]
    offset: int = setting(0, LEARNED)
    # order of sines and cosines in sinusoidal positions
    sinusoid: Literal["interleaved", "halves", "tensor2tensor"] = setting(
        "interleaved", {"kind": ("sinusoidal",)}
    )
    relative_buckets: int = setting(32, BUCKETED)  # number of buckets of relative positions [buckets]
    # distance from which all relative positions share a bucket [tokens]
    relative_max_distance: int = setting(128, BUCKETED)
    # initialisation of the relative-position biases: random as in T5, or straight lines as in ALiBi
    relative_bias_start: Literal["normal", "slopes"] = setting("normal", RELATIVE_BIASES)
    # products that disentangled attention adds: those of queries with relative positions
    # (content-to-position), those of keys with them (position-to-content), or both
    relative_products: Literal["both", "content-to-position", "position-to-content"] = setting(
        "both", DISENTANGLED
    )
    # projections of the embeddings of relative positions in each layer: those of its queries and keys
    # (shared: DeBERTa 2 and 3), or matrices of their own (separate: DeBERTa 1)
    relative_projections: Literal["shared", "separate"] = setting("shared", DISENTANGLED)
    # whether the embeddings of relative positions are normalised (DeBERTa 2 and 3)
    relative_norm: bool = setting(True, DISENTANGLED)
    # whether a score also depends on whether query and key have the same token type (XLNet's relative segment
    # encodings)
    relative_types: bool = setting(False, SINUSOIDS)
    rotary: RotaryConfig = setting(RotaryConfig(), {"kind": ("rotary",)})

    def __post_init__(self):
        check_at_least(self, "model.positions.", relative_max_distance=1, max_length=1, offset=0)
        check_at_least(self, "model.positions.", relative_buckets=2)
        # limits the memory for tables with a number per bucket or distance, which are made on the host
        check_at_most(self, "model.positions.", relative_buckets=2**16, relative_max_distance=2**20)
        if self.kind == "relative-disentangled":
            self._check_disentangled()

    def _check_disentangled(self) -> None:
        """Check that the buckets can be divided equally between keys before and after the query."""
        has_one_per_distance = self.relative_buckets == 2 * self.relative_max_distance
        has_fewer = self.relative_buckets < 2 * self.relative_max_distance  # far distances share buckets
        divides_equally = self.relative_buckets >= 8 and self.relative_buckets % 4 == 0
        if has_one_per_distance or (has_fewer and divides_equally):
            return
        raise SettingError(
            f"model.positions.relative_buckets={self.relative_buckets} of "
            f"model.positions.kind={self.kind!r} should be twice model.positions.relative_max_distance="
            f"{self.relative_max_distance}, one for each distance, or fewer: 8 or more, a multiple of 4"
        )

    @property
    def has_position_keys(self) -> bool:
        """Return whether the product of the query and a key of the relative position is added to a score."""
        return self.kind == "relative-disentangled" and self.relative_products != "position-to-content"

    @property
    def has_position_queries(self) -> bool:
        """Return whether the product of the key and a query of the relative position is added to a score."""
        return self.kind == "relative-disentangled" and self.relative_products != "content-to-position"

    @property
    def has_own_projections(self) -> bool:
        """Return whether layers project relative positions by other matrices than contents."""
        return self.relative_projections == "separate"

    @property
    def score_terms(self) -> int:
        """Return how many products are added up to a score: more than one in disentangled attention."""
        return 1 + self.has_position_keys + self.has_position_queries

    @property
    def has_buckets(self) -> bool:
        """Return whether relative positions that lie far away share a bucket."""
        return self.kind in get_args(BucketedPositions)

    @property
    def is_learned(self) -> bool:
        """Return whether each position has a learned embedding, of which there are ``max_length``."""
        return self.kind in ("learned", "relative-and-learned")


@dataclass(frozen=True)
class EmbeddingConfig:
    """The embeddings of tokens and of their types, and what happens to them before the first block."""

    # width of the embedding, if it is projected to d_model; None: d_model [features]
    d_embed: int | None = None
    # where the projection to d_model is: after the sum of all embeddings (ALBERT), or directly after the
    # embeddings of tokens, with a projection back to d_embed before the output matrix (OPT)
    projected: Literal["sum", "tokens"] = setting("sum", {"d_embed": GIVEN})
    norm: bool = False  # whether embeddings are normalised (BERT, BART, BLOOM)
    # factor of the embeddings: 1 (none) or d_model^0.5 (sqrt: Vaswani et al. 2017)
    scale: Literal["none", "sqrt"] = "none"
    multiplier: float = 1.0  # a further factor of the embeddings of tokens (Granite)
    # whether the encoder has the decoder's embedding of tokens or one of its own; model.output.logits says
    # whether the decoder's is the output matrix too
    encoder: Literal["shared", "separate"] = "shared"
    # number of token types with an embedding, such as first and second sentence (BERT) [types]
    type_vocab_size: int = 0
    # number of tokens of a convolution of the first layer's input, whose output is added to the output of
    # that layer (DeBERTa 2: 3); 0: none [tokens]
    convolution: int = 0
    # activation of the output of that convolution
    convolution_activation: Literal["gelu", "tanh"] = setting("gelu", {"convolution": ABOVE_0})
    # numbers of tokens of the first clusters of an adaptive embedding (Baevski and Auli 2019), whose ids
    # should be those of frequent tokens; the last cluster has the rest [tokens]
    clusters: tuple[int, ...] = ()
    # width of the embeddings of each cluster, which are projected to d_model where it is another [features]
    cluster_widths: tuple[int, ...] = ()

    def __post_init__(self):
        check_at_least(self, "model.embedding.", d_embed=1, type_vocab_size=0, convolution=0)
        if self.convolution and self.convolution % 2 == 0:
            raise SettingError(
                f"model.embedding.convolution={self.convolution} should be odd, so that as many tokens lie "
                "before a position as after it"
            )
        check_above_0(self, "model.embedding.", "multiplier")
        if min((*self.clusters, *self.cluster_widths), default=1) < 1:
            raise SettingError(
                f"model.embedding.clusters={self.clusters} and model.embedding.cluster_widths="
                f"{self.cluster_widths} should be numbers from 1 on"
            )
        if self.clusters and len(self.cluster_widths) != len(self.clusters) + 1:
            raise SettingError(
                f"model.embedding.cluster_widths={self.cluster_widths} should be {len(self.clusters) + 1} "
                f"widths: one for each of model.embedding.clusters={self.clusters}, and one for the rest"
            )
        if self.clusters and self.d_embed is not None:
            raise SettingError(
                f"model.embedding.clusters={self.clusters} have widths of their own: model.embedding.d_embed="
                f"{self.d_embed} should be None"
            )
        if self.cluster_widths and not self.clusters:
            raise SettingError(
                f"model.embedding.cluster_widths={self.cluster_widths} needs model.embedding.clusters, the "
                "numbers of tokens of all clusters but the last"
            )


@dataclass(frozen=True)
class NormConfig:
    """The norm that all blocks have; model.residual says where."""

    # normalisation; rms leaves out the mean and the bias (T5, Llama)
    kind: Literal["rms", "layer", "none"] = "rms"
    # share of the features, the first ones, whose mean square rms takes (partial RMS norm, Zhang and Sennrich
    # 2019)
    fraction: float = setting(1.0, {"kind": ("rms",)})
    # added to the mean square (or the variance) before its root is taken
    epsilon: float = setting(1e-6, {"kind": ("rms", "layer")})
    # whether layer norms have a bias (ModernBERT has none)
    bias: bool = setting(True, {"kind": ("layer",)})
    # whether the scale of a norm is 1 plus the parameter, which starts at 0, as in Gemma; weight decay then
    # draws the scale to 1
    zero_centered: bool = setting(False, {"kind": ("rms", "layer")})
    # whether the first layer has a norm before attention, as the others do, or none, since the embeddings are
    # normalised already (ModernBERT)
    first_attention: Literal["norm", "none"] = setting("norm", {"kind": ("rms", "layer")})

    def __post_init__(self):
        check_above_0(self, "model.norm.", "epsilon fraction")
        check_at_most(self, "model.norm.", fraction=1)


@dataclass(frozen=True)
class OutputConfig:
    """The output layer: how the last hidden states become logits."""

    # output matrix: tied to the embedding or separate, scaled by d_model^-0.5 or not (T5 1.0: tied-scaled);
    # none: no output matrix
    logits: Logits = "tied-scaled"
    transform: bool = False  # whether a dense layer and a norm precede the output matrix (BERT's masked LM)
    bias: bool = False  # whether the logits have a bias per token (BERT, BART)
    # soft cap of the logits c: cap * tanh(c / cap) (Gemma 2); None: no cap
    logit_cap: float | None = setting(None, {"logits": Values(exclude=("none",))})
    # number by which the logits are divided (Granite)
    logit_divisor: float = setting(1.0, {"logits": Values(exclude=("none",))})
    # number of softmaxes whose mixture gives the probabilities (Yang et al. 2018); 1: no mixture [softmaxes]
    softmaxes: int = setting(1, {"logits": Values(exclude=("none",))})
    # how logits become probabilities: one softmax over all tokens, or one over the first of
    # model.embedding.clusters and the names of the others, and one in each of these (Grave et al. 2017)
    softmax: Literal["full", "adaptive"] = setting("full", {"logits": Values(exclude=("none",))})

    def __post_init__(self):
        check_above_0(self, "model.output.", "logit_cap logit_divisor")
        check_at_least(self, "model.output.", softmaxes=1)
        check_at_most(self, "model.output.", softmaxes=2**16)
        if self.softmaxes > 1 and self.logits == "none":
            raise SettingError(
                f"model.output.softmaxes={self.softmaxes} needs an output matrix: model.output.logits='none' "
                "should be 'tied' or 'separate'"
            )
        if self.softmax == "adaptive" and (self.logits == "none" or self.softmaxes > 1):
            raise SettingError(
                "model.output.softmax='adaptive' needs an output matrix and a single softmax, not "
                f"model.output.logits={self.logits!r} with model.output.softmaxes={self.softmaxes}"
            )


@dataclass(frozen=True)
class CompileConfig:
    """Says how a model is compiled, which does not change what it computes."""

    # whether the stack is compiled as a scan over layers or unrolled
    layers: Literal["scan", "unroll"] = "scan"
    # what the backward pass recomputes: nothing; all but products with parameters (dots); all but attention
    # (attention); all of a block (full); all of a block, whose input waits in the host's memory
    # (full-offloaded); or all but the tensors of saved and offloaded (names)
    remat: Remat = "none"
    # tensors of a block that the backward pass finds on the device
    saved: tuple[SavedTensor, ...] = setting((), {"remat": ("names",)})
    # tensors of a block that wait for the backward pass in the host's memory
    offloaded: tuple[OffloadedTensor, ...] = setting((), {"remat": ("names",)})
    # number of chunks of a row whose logits and loss are computed one after the other, so that memory holds
    # the logits of one chunk
    loss_chunks: int = 1

    def __post_init__(self):
        check_at_least(self, "model.compile.", loss_chunks=1)
        if self.remat == "names" and not self.saved + self.offloaded:
            raise SettingError(
                "model.compile.remat='names' should have tensors in model.compile.saved or "
                f"model.compile.offloaded, such as 'context' (of {', '.join(get_args(OffloadedTensor))}); "
                "model.compile.remat='full' saves none"
            )
        if both := set(self.saved) & set(self.offloaded):
            raise SettingError(
                f"model.compile.saved={self.saved} and model.compile.offloaded={self.offloaded} both have "
                f"{', '.join(sorted(both))}: a tensor should be in one of them"
            )

    @property
    def saved_tensors(self) -> tuple[str, ...]:
        """Return the tensors of a block that the policy saves by name on the device."""
        if self.remat == "names":
            return self.saved
        return ATTENTION_TENSORS if self.remat == "attention" else ()

    @property
    def offloaded_tensors(self) -> tuple[str, ...]:
        """Return the tensors of a block that the policy sends to the host's memory."""
        if self.remat == "names":
            return self.offloaded
        return ("block_input",) if self.remat == "full-offloaded" else ()

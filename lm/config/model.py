"""The settings of a Transformer: its architecture, and how it is compiled.

Sources: of T5 Raffel et al. 2020, sections 3.1.2 and 3.7; of the others the paper named beside them and,
where that is silent, the configuration released with the weights.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from lm.config.attention import RotaryConfig, SparsityConfig
from lm.config.base import (
    ABOVE_0,
    GIVEN,
    Condition,
    Conditions,
    SettingError,
    Values,
    above_0,
    at_least,
    at_most,
    setting,
)

Architecture = Literal["encoder-decoder", "shared-encoder-decoder", "decoder", "prefix-decoder", "encoder"]
Positions = Literal["none", "learned", "sinusoidal", "relative", "relative-per-layer", "rotary", "alibi"]
MixerName = Literal["attention", "rnn", "gru", "lstm", "window", "none"]
BIASES = ("relative", "alibi")  # positions that begin so are biases of the attention scores
Pool = Literal["first", "last", "mean", "max"]
CrossName = Literal["heads", "dot", "multiplicative", "additive", "none"]
RECURRENT = ("rnn", "gru", "lstm")  # mixers that carry a state
WITH_SCORES = ("attention",)  # mixers whose positions weigh each other, as their classes say too
# What makes a mixer, by model.mixer: filled by lm.nn.mixers, which needs flax, and by modules of a user's
# own. Settings ask of a class there what it can do.
MIXERS: dict[str, Callable[..., Any]] = {}
HeadKind = Literal["classes", "regression", "tokens", "span", "choice"]
HeadLayers = Literal["last", "last-frozen", "mixed-frozen"]
Logits = Literal["tied-scaled", "tied", "separate-scaled", "separate", "none"]
Activation = Literal["relu", "gelu", "gelu-tanh", "silu", "gated-relu", "gated-gelu", "gated-silu", "none"]
# of each attention, own and cross; "mlp" is all matrices of the feed-forward layer
LoraMatrix = Literal["query", "key", "value", "out", "mlp"]
# backward: a second language model, which reads the text from its end (ELMo)
PretrainingHead = Literal["pooler", "next-sentence", "sentence-order", "replaced-token", "backward"]


# ``read_if`` of settings: on which others they depend
ENCODERS: Condition = {
    "architecture": Values(
        ("encoder-decoder", "shared-encoder-decoder", "encoder"), said="models with an encoder"
    )
}
DECODERS: Condition = {"architecture": Values(but=("encoder",), said="models with a decoder")}
TWO_STACKS: Condition = {
    "architecture": Values(
        ("encoder-decoder", "shared-encoder-decoder"), said="models with an encoder and a decoder"
    )
}


@dataclass(frozen=True)
class Mixers(Values):
    """Mixers that read a setting: some of the built-in ones, and any of a user's own, which may read all."""

    def has(self, value: Any) -> bool:
        """Return whether the mixer of this name is one of them."""
        return value in self.among or value not in get_args(MixerName)


SELF_ATTENTION: Condition = {"mixer": Mixers(("attention",))}
CROSS_HEADS: Condition = TWO_STACKS | {"cross_attention": ("heads",)}
ATTENTION: Conditions = (SELF_ATTENTION, CROSS_HEADS)
STATES: Condition = {"mixer": Mixers(RECURRENT)}
LEARNED: Condition = {"positions": ("learned",)}
RELATIVE: Condition = {"positions": ("relative", "relative-per-layer")}
FEED_FORWARD: Condition = {"mlp": Values(but=("none",))}
LOW_RANK: Condition = {"rank": ABOVE_0}


@dataclass(frozen=True)
class SideConfig:
    """Sizes of an encoder's blocks that differ from its decoder's (BART, Marian); None: they do not."""

    d_ff: int | None = None  # width of the feed-forward layer [features]
    d_kv: int | None = None  # width of one attention head [features]
    num_heads: int | None = None  # attention heads [heads]


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank updates of matrices, which are tuned in their place (LoRA, Hu et al. 2021)."""

    rank: int = 0  # inner width of an update; 0: there are none [features]
    alpha: float = setting(8.0, LOW_RANK)  # over the rank: what updates are multiplied by
    matrices: tuple[LoraMatrix, ...] = setting(("query", "value"), LOW_RANK)  # that have an update

    def __post_init__(self):
        at_least(self, "lora.", rank=0)
        if not (self.alpha > 0 and self.matrices):
            raise SettingError(f"lora.alpha={self.alpha} should be above 0, lora.matrices name one or more")


@dataclass(frozen=True)
class SpecialTokens:
    """Ids that decoding knows."""

    pad: int = 0  # written after the end
    eos: int | None = 1  # ends a text; None: nothing does
    start: int | None = 0  # what the decoder of an encoder-decoder reads first


_AT_LEAST_1 = """
    vocab_size num_encoder_layers num_decoder_layers d_model d_ff d_kv num_heads num_key_value_heads
    relative_max_distance max_length mixer_window d_v d_embed
""".split()


@dataclass(frozen=True)
class ModelConfig:
    """Model architecture, and how it is compiled."""

    architecture: Architecture = "encoder-decoder"  # which stacks there are, and what each position sees
    vocab_size: int = 32_128  # rows of the embedding; at least the vocabulary with its sentinels [tokens]
    num_encoder_layers: int = setting(12, ENCODERS)  # blocks of the encoder [layers]
    num_decoder_layers: int = setting(12, DECODERS)  # blocks of the decoder [layers]
    d_model: int = 768  # width of the residual stream [features]
    # what mixes the positions of a row: attention, a recurrent layer (Elman's, GRU, LSTM), the concatenated
    # last tokens (Bengio et al. 2003), or nothing; what reads the encoder: cross_attention
    mixer: MixerName = "attention"
    # of a state or a window's hidden layer; None: d_model [features]
    mixer_width: int | None = setting(None, {"mixer": Mixers((*RECURRENT, "window"))})
    # tokens that a window reads, the current one included, to each side [tokens]
    mixer_window: int = setting(3, {"mixer": Mixers(("window",))})
    # of a decoder's self-attention; none: it sees what it is to predict, and when it writes what is written
    mask: Literal["causal", "none"] = setting("causal", DECODERS | SELF_ATTENTION)
    # chunks that gradients of recurrent states stay in; None: rows [tokens]
    truncation: int | None = setting(None, STATES)
    d_ff: int = setting(3_072, FEED_FORWARD)  # width of the feed-forward layer [features]
    d_kv: int = setting(64, ATTENTION)  # width of one attention head [features]
    # width of its values; None: d_kv, that of its queries and keys [features]
    d_v: int | None = setting(None, ATTENTION)
    num_heads: int = setting(12, ATTENTION)  # attention heads [heads]
    # of keys and values, which query heads share; None: num_heads
    num_key_value_heads: int | None = setting(None, ATTENTION)
    encoder: SideConfig = setting(SideConfig(), {"architecture": ("encoder-decoder",)})
    d_embed: int | None = None  # width of the embedding, if it is projected to d_model [features]
    # what is: the sum of all embeddings (ALBERT), or tokens alone, without a bias, and states back (OPT)
    projected: Literal["sum", "tokens"] = setting("sum", {"d_embed": GIVEN})
    shared_layers: bool = False  # whether all blocks of a stack are one and the same (ALBERT)
    positions: Positions = "relative"  # position encoding
    # longest row with learned positions or random blocks [tokens]
    max_length: int = setting(512, (LEARNED, {"sparsity.random_blocks": ABOVE_0}))
    # unused rows in front of the learned positions; 2 in BART and RoBERTa [rows]
    position_offset: int = setting(0, LEARNED)
    # order of sines and cosines
    sinusoid: Literal["interleaved", "halves", "tensor2tensor"] = setting(
        "interleaved", {"positions": ("sinusoidal",)}
    )
    relative_buckets: int = setting(32, RELATIVE)  # rows of the relative-position bias table [buckets]
    # distance from which on all positions share a bucket [tokens]
    relative_max_distance: int = setting(128, RELATIVE)
    # how that table starts: at random as in T5, or as ALiBi's slopes, 1 and its halves over the heads
    relative_bias_start: Literal["normal", "slopes"] = setting("normal", RELATIVE)
    rotary: RotaryConfig = setting(RotaryConfig(), {"positions": ("rotary",)})
    sparsity: SparsityConfig = setting(SparsityConfig(), SELF_ATTENTION)
    # how cross-attention starts: at random, or each head's queries as its keys, so that a position of the
    # decoder looks where the encoder has the same token (Trockman and Kolter 2023)
    cross_attention_start: Literal["normal", "mimetic"] = setting("normal", CROSS_HEADS)
    # heads as in self-attention, one mean of the encoder's states (Luong et al. 2015, additive: Bahdanau et
    # al. 2015), or none: a recurrent decoder starts from the encoder's last state (Sutskever et al. 2014)
    cross_attention: CrossName = setting("heads", TWO_STACKS)
    # query times key; in T5 not scaled by d_kv^-0.5
    scores: Literal["dot", "scaled-dot", "bilinear"] = setting("dot", ATTENTION)
    # attention logits c become cap * tanh(c / cap), within (-cap, cap) (Gemma 2); None: no cap
    logit_cap: float | None = setting(None, ATTENTION)
    mlp: Activation = "relu"  # activation of the feed-forward layer; none: there is no such layer
    adapter_width: int = 0  # inner width of the adapter after each feed-forward layer; 0: none [features]
    lora: LoraConfig = LoraConfig()
    norm: Literal["rms", "layer", "none"] = "rms"  # T5 and Llama leave out the mean and the bias
    # where norms are; parallel: GPT-NeoX, with one norm for all sub-layers of a block: GPT-J; none: as
    # pre-norm, but no sub-layer's input is added to its output
    residual: Literal["pre-norm", "post-norm", "parallel", "parallel-one-norm", "none"] = "pre-norm"
    # added to the (mean) square before its root is taken
    norm_epsilon: float = setting(1e-6, {"norm": ("rms", "layer")})
    # whether embeddings are normalised too (BERT, BART, BLOOM)
    embed_norm: bool = setting(False, {"norm": ("rms", "layer")})
    embed_scale: Literal["none", "sqrt"] = "none"  # sqrt: embeddings times d_model^0.5 (Vaswani et al. 2017)
    type_vocab_size: int = 0  # kinds of tokens with an embedding: first and second sentence (BERT) [types]
    bias: bool = False  # whether linear layers add a bias
    # whether those of the feed-forward layer do; None: as the others
    mlp_bias: bool | None = setting(None, FEED_FORWARD)
    # whether those of queries, keys and values do; None: as the others
    qkv_bias: bool | None = setting(None, ATTENTION)
    qk_norm: bool = setting(False, ATTENTION)  # whether each head's queries and keys are normalised (Qwen3)
    logits: Logits = "tied-scaled"  # output matrix: the embedding or its own; scaled by d_model^-0.5 (T5 1.0)
    logits_transform: bool = False  # whether a dense layer and a norm come before it (BERT's masked LM)
    logits_bias: bool = False  # whether each token has a bias (BERT, BART)
    heads: tuple[PretrainingHead, ...] = ()  # what else is trained with the model
    special: SpecialTokens = SpecialTokens()
    dropout: float = 0.1  # rate at which activations and attention weights are zeroed in training
    dtype: Literal["float32", "bfloat16"] = "float32"  # of activations; parameters and softmax stay float32
    # auto: by device and length; CPU: xla
    attention: Literal["auto", "xla", "cudnn", "flash"] = setting("auto", ATTENTION)
    layers: Literal["scan", "unroll"] = "scan"  # how the stack is compiled; the numbers are the same
    published: str = ""  # the config.json that the model was loaded with, kept for lm convert export
    # the backward pass recomputes nothing, all but products with parameters, or all
    remat: Literal["none", "dots", "full"] = "none"

    def __post_init__(self):
        optional = dict.fromkeys(("position_offset", "type_vocab_size", "adapter_width"), 0)
        at_least(self, "model.", **dict.fromkeys(_AT_LEAST_1, 1), **optional)
        at_least(self, "model.", relative_buckets=2)
        # tables of so many numbers are made on the host
        at_most(self, "model.", num_heads=2**16, relative_buckets=2**16, relative_max_distance=2**20)
        at_most(self.encoder, "model.encoder.", num_heads=2**16)
        above_0(self, "model.", "norm_epsilon")
        if not 0 <= self.dropout < 1:
            raise SettingError(f"model.dropout={self.dropout} should be in [0, 1)")
        self._check_heads()
        self._check_positions()
        self._check_attention()
        self._check_mixer()
        self._check_cross()
        self._check_stacks()

    def _check_heads(self) -> None:
        """Heads of attention, of pre-training, and the output matrix."""
        if self.num_heads % self.key_value_heads:
            heads = f"model.num_key_value_heads={self.num_key_value_heads}"
            raise SettingError(f"{heads} should divide model.num_heads={self.num_heads}")
        if {"next-sentence", "sentence-order"} & set(self.heads) and "pooler" not in self.heads:
            raise SettingError(f"model.heads={self.heads} needs 'pooler' too, which judges pairs of texts")
        if "backward" in self.heads and self.architecture != "decoder":
            raise SettingError(
                f"model.heads={self.heads} needs model.architecture='decoder', whose text 'backward' reads "
                f"from its end, not {self.architecture!r}"
            )
        back = self.logits_transform or self.projected == "tokens"
        if self.logits.startswith("tied") and self.embed_width != self.d_model and not back:
            raise SettingError(
                f"model.d_embed={self.d_embed} needs model.logits_transform=True or model.projected='tokens' "
                "to bring states back to that width, or model.logits='separate' or 'none'"
            )

    def _check_positions(self) -> None:
        if self.positions == "sinusoidal" and self.sum_width % 2:
            raise SettingError(f"model.d_model={self.sum_width} should be even for sinusoidal positions")
        if self.positions == "rotary" and (self.rotary_width % 2 or not 0 < self.rotary_width <= self.d_kv):
            turned = f"model.rotary.fraction={self.rotary.fraction} turns {self.rotary_width}"
            raise SettingError(
                f"{turned} of model.d_kv={self.d_kv} features: it should be an even number of them"
            )

    def _check_attention(self) -> None:
        """What a sparse model or an implementation of attention cannot do."""
        if self.sparsity.projections == "separate" and self.has_decoder:
            message = "model.sparsity.projections='separate' needs model.architecture='encoder'"
            raise SettingError(f"{message}, not {self.architecture!r}")
        windows = self.sparsity.layer_windows
        side = "decoder" if self.has_decoder else "encoder"
        layers = getattr(self, f"num_{side}_layers")
        if windows and (self.has_encoder and self.has_decoder or len(windows) != layers):
            raise SettingError(
                f"model.sparsity.layer_windows has {len(windows)} windows: it needs one for each of "
                f"model.num_{side}_layers={layers}, and an encoder or a decoder alone, not "
                f"model.architecture={self.architecture!r}"
            )
        if self.attention in ("flash", "cudnn") and (count := self.sparsity.random_blocks):
            message = f"model.attention={self.attention!r} lacks model.sparsity.random_blocks={count}"
            raise SettingError(f"{message}: choose 'auto'")
        unfit = self.dtype != "bfloat16" or self.d_kv > 128 or self.d_kv % 8 or self.value_width != self.d_kv
        if self.attention == "cudnn" and (unfit or self.positions.startswith(BIASES)):
            raise SettingError(
                "model.attention='cudnn' needs model.dtype='bfloat16', model.d_kv of 8, 16, ..., 128, "
                "model.d_v as wide, and model.positions that are no bias, not "
                f"{self.dtype!r}, {self.d_kv}, {self.d_v} and {self.positions!r}: choose 'auto'"
            )

    def _check_mixer(self) -> None:
        """What only attention has, and what has one direction."""
        at_least(self, "model.", mixer_width=1)
        if self.has_scores:
            return
        mixer = f"model.mixer={self.mixer!r}"
        if self.lora.rank and self.lora.matrices != ("mlp",):
            raise SettingError(
                f"{mixer} has no attention for lora.matrices={self.lora.matrices}: use ('mlp',)"
            )
        if self.mixer == "none" and self.residual == "none":
            raise SettingError(f"{mixer} passes nothing on with model.residual='none': choose 'pre-norm'")
        if self.mask == "none":
            raise SettingError(f"{mixer} has no mask to leave out: model.mask='none' should be 'causal'")
        if self.positions in ("rotary", "alibi") or self.positions.startswith("relative"):
            raise SettingError(
                f"{mixer} has no scores for model.positions={self.positions!r}: choose 'none', 'learned' or "
                "'sinusoidal'"
            )
        if self.sparsity != SparsityConfig():
            raise SettingError(f"{mixer} has no mask for model.sparsity={self.sparsity}: leave it as it is")
        if self.mixer != "none" and self.architecture in ("prefix-decoder", "shared-encoder-decoder"):
            raise SettingError(
                f"{mixer} reads either both ways or only back, model.architecture={self.architecture!r} does "
                "both: choose 'decoder', 'encoder' or 'encoder-decoder'"
            )

    def _check_cross(self) -> None:
        """What needs a state to carry, or an encoder to read."""
        at_least(self, "model.", truncation=1)
        cross = f"model.cross_attention={self.cross_attention!r}"
        wants = f"needs model.mixer='rnn', 'gru' or 'lstm', not {self.mixer!r}"
        if self.truncation is not None and self.mixer not in RECURRENT:
            raise SettingError(f"model.truncation={self.truncation} {wants}")
        if self.cross_attention == "none" and self.mixer not in RECURRENT:
            raise SettingError(f"{cross} {wants}")
        if self.cross_attention == "heads":
            return
        if not (self.has_encoder and self.has_decoder):
            raise SettingError(f"{cross} reads an encoder, not of model.architecture={self.architecture!r}")
        if (start := self.cross_attention_start) != "normal":
            raise SettingError(f"model.cross_attention_start={start!r} is of heads, not {cross}")

    def _check_stacks(self) -> None:
        """An encoder and a decoder that differ, that share their parameters, or that lack a part."""
        if self.mask == "none" and not self.has_decoder:
            raise SettingError("model.mask='none' is of decoders: model.architecture='encoder' has no mask")
        if self.mlp == "none" and (self.logits_transform or "replaced-token" in self.heads):
            readers = "model.logits_transform=True or the head 'replaced-token'"
            raise SettingError(f"model.mlp='none' leaves {readers} no activation: choose another, or neither")
        if self.mlp == "none" and self.lora.rank and "mlp" in self.lora.matrices:
            raise SettingError(f"model.mlp='none' has no matrix for lora.matrices={self.lora.matrices}")
        if self.encoder != SideConfig():
            if self.architecture != "encoder-decoder":
                message = f"model.encoder={self.encoder} needs model.architecture='encoder-decoder'"
                raise SettingError(f"{message}, not {self.architecture!r}")
            at_least(self.encoder_side, "model.encoder.", d_ff=1, d_kv=1, num_heads=1)
        encoder, decoder = self.num_encoder_layers, self.num_decoder_layers
        if self.architecture == "shared-encoder-decoder" and encoder != decoder:
            layers = f"model.num_encoder_layers={encoder} should equal model.num_decoder_layers={decoder}"
            raise SettingError(f"{layers} when the two stacks share their parameters")
        if self.shared_layers and encoder * self.has_encoder <= 1 and decoder * self.has_decoder <= 1:
            raise SettingError("model.shared_layers=True needs two or more layers: one shares nothing")

    @property
    def has_encoder(self) -> bool:
        return self.architecture in ("encoder-decoder", "shared-encoder-decoder", "encoder")

    @property
    def has_decoder(self) -> bool:
        return self.architecture != "encoder"

    @property
    def has_scores(self) -> bool:
        """Whether positions weigh each other by scores, which take biases, masks and windows."""
        if self.mixer in MIXERS:
            return getattr(MIXERS[self.mixer], "has_scores", False)
        return self.mixer in WITH_SCORES

    @property
    def encoder_side(self) -> "ModelConfig":
        """The settings as the encoder's blocks have them."""
        sizes = {name: value for name, value in asdict(self.encoder).items() if value is not None}
        return replace(self, encoder=SideConfig(), **sizes) if sizes else self

    @property
    def mlp_has_bias(self) -> bool:
        return self.bias if self.mlp_bias is None else self.mlp_bias

    @property
    def qkv_has_bias(self) -> bool:
        return self.bias if self.qkv_bias is None else self.qkv_bias

    @property
    def value_width(self) -> int:
        return self.d_v or self.d_kv

    @property
    def key_value_heads(self) -> int:
        return self.num_key_value_heads or self.num_heads

    @property
    def state_width(self) -> int:
        """Features of a recurrent state, or of a window's hidden layer."""
        return self.mixer_width or self.d_model

    @property
    def embed_width(self) -> int:
        return self.d_embed or self.d_model

    @property
    def sees_ahead(self) -> bool:
        """Whether positions of a decoder see later ones: those of a prefix, or all without a mask."""
        return self.architecture == "prefix-decoder" or self.mask == "none"

    @property
    def sum_width(self) -> int:
        """Width in which embeddings of tokens, positions and types are added up."""
        return self.embed_width if self.projected == "sum" else self.d_model

    @property
    def feature_width(self) -> int:
        """Features of a position that a head reads: of both directions of a bidirectional language model."""
        return self.d_model * (1 + ("backward" in self.heads))

    def reads_both_ways(self, crosses: bool) -> bool:
        """Whether a stack, with cross-attention or without, reads ahead too; True of one that is shared."""
        own = not crosses if self.architecture == "encoder-decoder" else self.architecture != "decoder"
        return own or self.sees_ahead

    @property
    def rotary_width(self) -> int:
        """Features of a head that rotary positions turn."""
        return int(self.rotary.fraction * self.d_kv)


@dataclass(frozen=True)
class HeadConfig:
    """What a model is fine-tuned to predict instead of the next token (lm.nn.heads)."""

    kind: HeadKind  # classes and regression: of a text; tokens, span: of its positions; choice: of texts
    classes: int = 1  # of "classes" and "tokens" [classes]
    pool: Pool = "first"  # which position speaks for a text, or all
    layers: HeadLayers = "last"  # mixed: a learned mean of all; frozen: only the head is trained

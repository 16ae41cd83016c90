"""The settings of a Transformer: those of the whole model, and the checks of its parts against each other.

The groups of settings for its parts, and the sources, are in lm.config.layers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Literal

from lm.config.attention import SparsityConfig, windows_are_valid
from lm.config.base import (
    ABOVE_0,
    GIVEN,
    Condition,
    Conditions,
    SettingError,
    Values,
    changes,
    check_above_0,
    check_at_least,
    check_at_most,
    setting,
)
from lm.config.experts import ExpertsConfig
from lm.config.funnel import FunnelConfig
from lm.config.layers import (
    ATTENTION_TENSORS,
    BY_HEADS,
    MIXERS_WITH_LOGITS,
    MLP_TENSORS,
    RECURRENT,
    RELATIVE_KIND_PREFIXES,
    RELATIVE_VECTOR_KINDS,
    Activation,
    AttentionConfig,
    CompileConfig,
    CrossAttentionConfig,
    EmbeddingConfig,
    MixerConfig,
    Mixers,
    MlpConfig,
    NormConfig,
    OutputConfig,
    PositionsConfig,
)
from lm.config.memory import MemoryConfig
from lm.config.mup import COVERED, MupConfig
from lm.config.universal import UniversalConfig

Architecture = Literal["encoder-decoder", "shared-encoder-decoder", "decoder", "prefix-decoder", "encoder"]
Pool = Literal["first", "last", "mean", "max"]
# What makes a mixer, by model.mixer.kind: filled by lm.nn.mixers, which needs flax, and by modules of a
# user's own. Settings ask of a class there what it can do.
MIXERS: dict[str, Callable[..., Any]] = {}
HeadKind = Literal["classes", "regression", "tokens", "span", "choice"]
HeadLayers = Literal["last", "last-frozen", "mixed-frozen"]
# Activation of a dense layer in a head: as in RoBERTa and BERT (tanh), DistilBERT (relu), ELECTRA (gelu).
HeadDense = Literal["none", "tanh", "relu", "gelu"]
# of each attention, own and cross; "mlp" is all matrices of the feed-forward layer
LoraMatrix = Literal["query", "key", "value", "out", "mlp"]
# replaced-token and generator: the model reads a generator's samples, and classifies tokens or restores the
# text's; copy: a gate by which it may predict the token that it reads (Clark et al. 2020, section 3.5)
# backward: a second language model, which reads the text from its end (ELMo)
# query-stream: states that predict tokens without having read them (XLNet, Yang et al. 2019)
PretrainingHead = Literal[
    "pooler",
    "next-sentence",
    "sentence-order",
    "replaced-token",
    "generator",
    "copy",
    "backward",
    "query-stream",
]


# ``read_if`` of settings: on which others they depend
ENCODERS: Condition = {
    "architecture": Values(
        ("encoder-decoder", "shared-encoder-decoder", "encoder"), description="models with an encoder"
    )
}
DECODERS: Condition = {"architecture": Values(exclude=("encoder",), description="models with a decoder")}
TWO_STACKS: Condition = {
    "architecture": Values(
        ("encoder-decoder", "shared-encoder-decoder"), description="models with an encoder and a decoder"
    )
}

OWN_ENCODER: Condition = {"architecture": ("encoder-decoder",)}  # beside a decoder

SELF_ATTENTION: Condition = {"mixer.kind": Mixers(MIXERS_WITH_LOGITS)}
CROSS_HEADS: Condition = TWO_STACKS | {"cross_attention.kind": BY_HEADS}
CROSS_ROTARY: Condition = CROSS_HEADS | {"positions.kind": ("rotary",)}
ATTENTION: Conditions = (SELF_ATTENTION, CROSS_HEADS)
NORMED: Condition = {"norm.kind": ("rms", "layer")}
# Models whose rows end at ``positions.max_length`` (``ModelConfig.has_max_length``).
ROW_LENGTHS: Conditions = (
    {"positions.kind": ("learned", "relative-and-learned")},
    {"mixer.kind": ("synthesizer",)},
)
WINDOWED: Conditions = tuple(
    {path: GIVEN} for path in ("sparsity.window", "sparsity.layer_windows", "encoder.layer_windows")
)
LOW_RANK: Condition = {"rank": ABOVE_0}


@dataclass(frozen=True)
class EncoderConfig:
    """Hold the sizes, activation and windows of an encoder that differ from its decoder's (BART, Marian).

    None, or no windows, means those of the decoder.
    """

    # width of the encoder's feed-forward layer, if other than the decoder's [features]
    d_ff: int | None = None
    d_kv: int | None = None  # width of the encoder's attention heads, if other than the decoder's [features]
    # number of the encoder's attention heads, if other than the decoder's [heads]
    num_heads: int | None = None
    # activation of the encoder's feed-forward layer, if other than the decoder's
    activation: Activation | None = None
    # window of each of the encoder's layers, if other than the decoder's (T5Gemma); None: that layer attends
    # to all positions; empty: the decoder's [blocks]
    layer_windows: tuple[int | None, ...] = ()

    def __post_init__(self):
        check_at_least(self, "model.encoder.", d_ff=1, d_kv=1, num_heads=1)
        check_at_most(self, "model.encoder.", num_heads=2**16)
        if not windows_are_valid(self.layer_windows):
            raise SettingError(
                f"model.encoder.layer_windows={self.layer_windows} should be numbers from 0 on, or None "
                "where a layer has no window"
            )


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank updates of matrices, trained instead of the matrices (LoRA, Hu et al. 2021)."""

    rank: int = 0  # rank of the update of a matrix; 0: no updates [features]
    alpha: float = setting(8.0, LOW_RANK)  # scale of the updates: they are multiplied by alpha / rank
    matrices: tuple[LoraMatrix, ...] = setting(("query", "value"), LOW_RANK)  # matrices that are updated

    def __post_init__(self):
        check_at_least(self, "lora.", rank=0)
        if not (self.alpha > 0 and self.matrices):
            raise SettingError(f"lora.alpha={self.alpha} should be above 0, lora.matrices name one or more")


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of the special tokens that decoding uses."""

    pad: int = 0  # id that is written after the end of a text
    eos: int | None = 1  # id that ends a text; None: there is none
    start: int | None = 0  # id that the decoder of an encoder-decoder reads first


@dataclass(frozen=True)
class ModelConfig:
    """A Transformer: settings of the whole model, and a group of settings for each part."""

    # stacks of the model and the mask of each: encoder, decoder, prefix-decoder, encoder-decoder, or one with
    # shared parameters
    architecture: Architecture = "encoder-decoder"
    # number of rows of the embedding, at least the size of the vocabulary with its sentinels [tokens]
    vocab_size: int = 32_128
    num_encoder_layers: int = setting(12, ENCODERS)  # number of encoder layers [layers]
    num_decoder_layers: int = setting(12, DECODERS)  # number of decoder layers [layers]
    d_model: int = 768  # width of the residual stream [features]
    shared_layers: bool = False  # whether all layers of a stack share their parameters (ALBERT)
    # stacks whose layers share their parameters (Narang et al. 2021)
    shared_stack: Literal["both", "encoder", "decoder"] = setting(
        "both", OWN_ENCODER | {"shared_layers": (True,)}
    )
    # what layers share: all parameters, or those of attention or of the feed-forward layer alone, with their
    # norms (ALBERT, Lan et al. 2020, Table 4)
    shared_parts: Literal["all", "attention", "mlp"] = setting("all", {"shared_layers": (True,)})
    # position of the norms and residuals: sandwich-norm: a norm of each sub-layer's input and one of its
    # output (Gemma 2), output-norm: only one of its output (OLMo 2), parallel as in GPT-NeoX,
    # parallel-one-norm as in GPT-J; rezero: as pre-norm, with a factor of each sub-layer that starts at 0;
    # fixup: scalars and smaller initial values in place of norms; none: norms as in pre-norm, but no
    # residuals
    residual: Literal[
        "pre-norm",
        "post-norm",
        "sandwich-norm",
        "output-norm",
        "parallel",
        "parallel-one-norm",
        "rezero",
        "fixup",
        "none",
    ] = "pre-norm"
    # blocks of all stacks: attention and a feed-forward layer (transformer), or two further sub-layers before
    # these: a gated linear layer or attention, and branches of convolutions (evolved: So et al. 2019)
    block: Literal["transformer", "evolved"] = "transformer"
    residual_multiplier: float = 1.0  # factor of a sub-layer's output before it is added (Granite)
    bias: bool = False  # whether linear layers have biases, unless a setting of their own says otherwise
    dropout: float = 0.1  # dropout rate of activations and attention weights
    # type of activations; parameters and softmax stay float32
    dtype: Literal["float32", "bfloat16"] = "float32"
    embedding: EmbeddingConfig = setting(
        EmbeddingConfig(), overrides={"norm": NORMED, "encoder": OWN_ENCODER}
    )
    positions: PositionsConfig = setting(
        PositionsConfig(), overrides={"max_length": ROW_LENGTHS, "rotary.window_base": WINDOWED}
    )
    mixer: MixerConfig = MixerConfig()
    attention: AttentionConfig = setting(
        AttentionConfig(),
        ATTENTION,
        overrides={
            "mask": DECODERS | SELF_ATTENTION,
            "encoder_mask": SELF_ATTENTION | {"architecture": ("encoder",)},
        },
    )
    sparsity: SparsityConfig = setting(SparsityConfig(), SELF_ATTENTION)
    cross_attention: CrossAttentionConfig = setting(
        CrossAttentionConfig(), TWO_STACKS, overrides={"positions": CROSS_ROTARY}
    )
    mlp: MlpConfig = MlpConfig()
    experts: ExpertsConfig = setting(ExpertsConfig(), {"mlp.activation": Values(exclude=("none",))})
    memory: MemoryConfig = setting(MemoryConfig(), {"mlp.activation": Values(exclude=("none",))})
    universal: UniversalConfig = UniversalConfig()
    norm: NormConfig = NormConfig()
    output: OutputConfig = OutputConfig()
    mup: MupConfig = MupConfig()
    encoder: EncoderConfig = setting(EncoderConfig(), OWN_ENCODER)
    funnel: FunnelConfig = setting(FunnelConfig(), OWN_ENCODER)
    lora: LoraConfig = LoraConfig()
    heads: tuple[PretrainingHead, ...] = ()  # heads that are pre-trained with the model
    special: SpecialTokens = SpecialTokens()
    compile: CompileConfig = CompileConfig()
    published: str = ""  # config.json of the imported checkpoint, for lm convert export

    def __post_init__(self):
        check_at_least(self, "model.", vocab_size=2, num_encoder_layers=1, num_decoder_layers=1, d_model=1)
        check_above_0(self, "model.", "residual_multiplier")
        if not 0 <= self.dropout < 1:
            raise SettingError(f"model.dropout={self.dropout} should be in [0, 1)")
        self._check_heads()
        self._check_positions()
        self._check_attention()
        self._check_compression()
        self._check_mixer()
        self._check_synthesizer()
        self._check_branches()
        self._check_cross()
        self._check_residual()
        self._check_sharing()
        self._check_stacks()
        self._check_convolution()
        self._check_experts()
        self._check_memory()
        self._check_universal()
        self._check_funnel()
        self._check_evolved()
        self._check_mup()
        self._check_compile()
        # Last: what the other checks refuse they refuse in a stack of other sizes too.
        _ = self.encoder_config, self.cross_config

    def _check_heads(self) -> None:
        """Check that pre-training heads, and the output matrix, have what they need."""
        if {"next-sentence", "sentence-order"} & set(self.heads) and "pooler" not in self.heads:
            raise SettingError(f"model.heads={self.heads} needs 'pooler' too, which judges pairs of texts")
        if "copy" in self.heads and "generator" not in self.heads:
            raise SettingError(f"model.heads={self.heads} needs 'generator' too, whose tokens 'copy' copies")
        if "backward" in self.heads and self.architecture != "decoder":
            raise SettingError(
                f"model.heads={self.heads} needs model.architecture='decoder', whose text 'backward' reads "
                f"from its end, not {self.architecture!r}"
            )
        if "query-stream" in self.heads:
            self._check_query_stream()
        if self.embedding.clusters and self.cluster_sizes[-1] < 1:
            raise SettingError(
                f"model.embedding.clusters={self.embedding.clusters} leave no token of "
                f"model.vocab_size={self.vocab_size} for the last cluster: make them smaller"
            )
        if self.output.softmax == "adaptive" and not self.embedding.clusters:
            raise SettingError(
                "model.output.softmax='adaptive' needs model.embedding.clusters, the numbers of tokens of "
                "all clusters but the last"
            )
        if self.embedding.clusters and {"replaced-token", "generator"} & set(self.heads):
            raise SettingError(
                f"model.embedding.clusters={self.embedding.clusters} have no width that a generator could "
                f"share: model.heads={self.heads} should be without 'replaced-token' and 'generator'"
            )
        back = self.output.transform or self.embedding.projected == "tokens"
        if self.output.logits.startswith("tied") and self.embed_width != self.d_model and not back:
            raise SettingError(
                f"model.embedding.d_embed={self.embedding.d_embed} needs model.output.transform=True or "
                "model.embedding.projected='tokens' to bring states back to that width, or "
                "model.output.logits='separate' or 'none'"
            )

    def _check_query_stream(self) -> None:
        """Check that both streams have the same keys, and that queries know positions and no targets."""
        needed: dict[str, tuple[object, ...]] = {
            "architecture": ("encoder",),
            "mixer.kind": ("attention",),
            "sparsity": (SparsityConfig(),),
            "experts.count": (0,),
            "funnel.blocks": (1,),
            # convolutions would carry a token to neighbours that its own query sees
            "block": ("transformer",),
            "embedding.convolution": (0,),
        }
        for path, allowed in needed.items():
            if (value := attrgetter(path)(self)) not in allowed:
                raise SettingError(
                    f"model.heads={self.heads} with 'query-stream' needs model.{path}={allowed[0]!r}, not "
                    f"{value!r}"
                )
        if self.positions.kind == "none":
            raise SettingError(
                f"model.heads={self.heads} with 'query-stream' predicts the token of a position, which "
                "model.positions.kind='none' does not say: choose 'relative-sinusoids', or any other"
            )

    def _check_positions(self) -> None:
        if self.positions.kind == "sinusoidal" and self.sum_width % 2:
            raise SettingError(f"model.d_model={self.sum_width} should be even for sinusoidal positions")
        if self.positions.kind == "relative-sinusoids" and self.d_model % 2:
            raise SettingError(f"model.d_model={self.d_model} should be even for sinusoids of positions")
        check_at_least(self.positions.rotary, "model.positions.rotary.", fraction=0)
        check_at_most(self.positions.rotary, "model.positions.rotary.", fraction=1)
        width, turned = self.attention.d_kv, self.rotary_width
        if self.positions.kind == "rotary" and (turned % 2 or not 0 < turned <= width):
            raise SettingError(
                f"model.positions.rotary.fraction={self.positions.rotary.fraction} turns {turned} of "
                f"model.attention.d_kv={width} features: it should be an even number of them"
            )

    def _check_attention(self) -> None:
        """Check that sparse masks and the implementation of attention fit the model."""
        if self.sparsity.projections == "separate" and self.has_decoder:
            message = "model.sparsity.projections='separate' needs model.architecture='encoder'"
            raise SettingError(f"{message}, not {self.architecture!r}")
        self._check_layer_windows()
        attention = self.attention
        is_stored = attention.implementation in ("auto", "xla") and self.sparsity.projections == "shared"
        if self.positions.kind in RELATIVE_VECTOR_KINDS and not is_stored:
            raise SettingError(
                f"model.positions.kind={self.positions.kind!r} stores its scores, of one set of projections: "
                f"model.attention.implementation={attention.implementation!r} should be 'auto', "
                f"model.sparsity.projections={self.sparsity.projections!r} 'shared'"
            )
        needs_other = self.has_decoder or attention.scores == "bilinear"
        if self.positions.kind in ("relative-disentangled", "relative-sinusoids") and needs_other:
            raise SettingError(
                f"model.positions.kind={self.positions.kind!r} compares the positions of whole rows, by "
                f"products of vectors: model.architecture={self.architecture!r} should be 'encoder', "
                f"model.attention.scores={attention.scores!r} 'scaled-dot' or 'dot'"
            )
        implementation = f"model.attention.implementation={attention.implementation!r}"
        if attention.implementation in ("flash", "cudnn") and (count := self.sparsity.random_blocks):
            raise SettingError(f"{implementation} lacks model.sparsity.random_blocks={count}: choose 'auto'")
        width = attention.d_kv
        unfit = self.dtype != "bfloat16" or width > 128 or width % 8 or attention.value_width != width
        if attention.implementation == "cudnn" and (
            unfit or self.positions.kind.startswith(RELATIVE_KIND_PREFIXES)
        ):
            raise SettingError(
                f"{implementation} needs model.dtype='bfloat16', model.attention.d_kv of 8, 16, ..., 128, "
                "model.attention.d_v as wide, and model.positions.kind that adds nothing to the scores, not "
                f"{self.dtype!r}, {width}, {attention.d_v} and {self.positions.kind!r}: choose 'auto'"
            )

    def _check_compression(self) -> None:
        """Check that keys are compressed in a causal decoder without sparse masks that stores its scores."""
        if self.attention.compression == 1:
            return
        needed: Condition = {
            "architecture": ("decoder",),
            "block": ("transformer",),
            "mixer.kind": ("attention",),
            "attention.mask": ("causal",),
            "attention.implementation": ("auto", "xla"),
            "sparsity": (SparsityConfig(),),
        }
        compression = f"model.attention.compression={self.attention.compression}"
        why = f"{compression} shows a query the blocks of keys that have ended, which does not fit"
        self._require(needed, why, "model.attention.compression be 1")
        if self.positions.kind in RELATIVE_VECTOR_KINDS:
            raise SettingError(
                f"model.attention.compression={self.attention.compression} leaves no single key for the "
                f"vectors of model.positions.kind={self.positions.kind!r}: choose 'relative', 'rotary', "
                "'alibi', 'learned', 'sinusoidal' or 'none'"
            )

    def _check_layer_windows(self) -> None:
        """Check that each stack has as many windows as layers, if they differ by layer."""
        decoder = self.sparsity.layer_windows
        encoder = self.encoder.layer_windows or decoder
        group = "encoder" if self.encoder.layer_windows else "sparsity"
        if self.has_encoder and encoder and len(encoder) != self.num_encoder_layers:
            raise SettingError(
                f"model.{group}.layer_windows has {len(encoder)} windows: it needs one for each of "
                f"model.num_encoder_layers={self.num_encoder_layers}"
            )
        if self.has_decoder and decoder and len(decoder) != self.num_decoder_layers:
            raise SettingError(
                f"model.sparsity.layer_windows has {len(decoder)} windows: it needs one for each of "
                f"model.num_decoder_layers={self.num_decoder_layers}"
            )

    def _check_mixer(self) -> None:
        """Check that a mixer without attention scores has no settings that need them."""
        if self.mixer.kernels is not None and self.d_model % self.mixer.kernels:
            raise SettingError(
                f"model.mixer.kernels={self.mixer.kernels} should divide model.d_model={self.d_model}: each "
                "kernel is shared by as many features"
            )
        if self.has_attention_logits:
            return
        mixer = f"model.mixer.kind={self.mixer.kind!r}"
        if self.lora.rank and self.lora.matrices != ("mlp",):
            raise SettingError(
                f"{mixer} has no attention for lora.matrices={self.lora.matrices}: use ('mlp',)"
            )
        if self.mixer.kind == "none" and self.residual == "none":
            raise SettingError(f"{mixer} passes nothing on with model.residual='none': choose 'pre-norm'")
        if self.attention.encoder_mask == "causal":
            raise SettingError(f"{mixer} has no mask: model.attention.encoder_mask='causal' should be 'none'")
        if self.attention.mask == "none":
            raise SettingError(
                f"{mixer} has no mask to leave out: model.attention.mask='none' should be 'causal'"
            )
        if self.positions.kind in ("rotary", "alibi") or self.positions.kind.startswith("relative"):
            raise SettingError(
                f"{mixer} has no scores for model.positions.kind={self.positions.kind!r}: choose 'none', "
                "'learned' or 'sinusoidal'"
            )
        if self.sparsity != SparsityConfig():
            raise SettingError(f"{mixer} has no mask for model.sparsity={self.sparsity}: leave it as it is")
        if self.encoder.layer_windows:
            raise SettingError(
                f"{mixer} has no mask for model.encoder.layer_windows={self.encoder.layer_windows}: leave it "
                "empty"
            )
        if self.mixer.kind != "none" and self.architecture in ("prefix-decoder", "shared-encoder-decoder"):
            raise SettingError(
                f"{mixer} reads either both ways or only back, model.architecture={self.architecture!r} does "
                "both: choose 'decoder', 'encoder' or 'encoder-decoder'"
            )

    def _check_synthesizer(self) -> None:
        """Check that nothing acts on queries, keys or kernels that a synthesizer lacks."""
        if self.mixer.kind != "synthesizer":
            return
        mixer, cross = "model.mixer.kind='synthesizer'", self.cross_attention.kind
        if self.attention.implementation not in ("auto", "xla"):
            raise SettingError(
                f"{mixer} stores its logits, which model.attention.implementation="
                f"{self.attention.implementation!r} does not: choose 'auto'"
            )
        if self.attention.scores == "bilinear" or self.positions.kind in ("rotary", *RELATIVE_VECTOR_KINDS):
            raise SettingError(
                f"{mixer} has logits that model.attention.scores={self.attention.scores!r} and "
                f"model.positions.kind={self.positions.kind!r} do not change: choose 'dot' or 'scaled-dot', "
                "and positions such as 'relative'"
            )
        if cross == "merged" or self.sparsity.projections == "separate":
            raise SettingError(
                f"{mixer} has logits for the keys of its own row alone, and one set of projections: "
                f"model.cross_attention.kind={cross!r} should be 'heads', model.sparsity.projections="
                f"{self.sparsity.projections!r} 'shared'"
            )
        missing = set()
        if self.mixer.products == "none":
            missing = {"key"} if self.mixer.logits == "dense" else {"query", "key"}
        if self.lora.rank and (lacking := missing & set(self.lora.matrices)):
            raise SettingError(
                f"{mixer} with model.mixer.logits={self.mixer.logits!r} has no matrix for "
                f"{', '.join(sorted(lacking))} of lora.matrices={self.lora.matrices}: leave them out"
            )

    def _check_branches(self) -> None:
        """Check that branches of attention have heads and a feed-forward layer, which no other layer has."""
        if self.attention.branching == "none":
            return
        branches = f"model.attention.branching={self.attention.branching!r}"
        needed: Condition = {
            "mixer.kind": ("attention",),
            "cross_attention.kind": ("heads",),
            "mlp.activation": Values(exclude=("none",)),
            "experts.count": (0,),
            "memory.keys": (0,),
            "residual": Values(exclude=("fixup",)),
        }
        why = f"{branches} passes each head of attention through the feed-forward layer, unlike"
        self._require(needed, why, "model.attention.branching be 'none'")
        if self.lora.rank and (lacking := {"out", "mlp"} & set(self.lora.matrices)):
            raise SettingError(
                f"{branches} has no single matrix for {', '.join(sorted(lacking))} of lora.matrices="
                f"{self.lora.matrices}: leave them out"
            )

    @property
    def has_feed_forward(self) -> bool:
        """Return whether blocks have a feed-forward layer beside attention."""
        return self.mlp.activation != "none" and self.attention.branching == "none"

    def _check_cross(self) -> None:
        """Check that a decoder has an encoder to read, or carries its state if it does not attend."""
        cross = f"model.cross_attention.kind={self.cross_attention.kind!r}"
        if self.cross_attention.kind == "none" and self.mixer.kind not in RECURRENT:
            raise SettingError(
                f"{cross} needs model.mixer.kind='rnn', 'gru' or 'lstm', not {self.mixer.kind!r}"
            )
        if self.cross_attention.kind != "heads" and not (self.has_encoder and self.has_decoder):
            raise SettingError(f"{cross} reads an encoder, not of model.architecture={self.architecture!r}")
        positions = f"model.positions.kind={self.positions.kind!r}"
        if self.cross_attention.positions != "none" and self.positions.kind != "rotary":
            raise SettingError(
                f"model.cross_attention.positions={self.cross_attention.positions!r} are rotary: {positions} "
                "should be 'rotary'"
            )
        if self.has_transparent_attention:
            shares = self.shares_layers("decoder") and self.shared_parts != "mlp"
            if self.architecture != "encoder-decoder" or self.cross_attention.kind != "heads" or shares:
                raise SettingError(
                    "model.cross_attention.encoder_layers='weighted' gives each layer of a decoder keys and "
                    "values of its own: it needs model.architecture='encoder-decoder', "
                    "model.cross_attention.kind='heads' and a decoder whose layers share no attention, not "
                    f"{self.architecture!r}, {self.cross_attention.kind!r} and "
                    f"model.shared_layers={self.shared_layers}"
                )
        has_no_place = not self.has_attention_logits or self.positions.kind.startswith(RELATIVE_KIND_PREFIXES)
        if self.has_merged_attention and has_no_place:
            raise SettingError(
                f"{cross} gives self-attention keys without a place in its row: it needs "
                "model.mixer.kind='attention' and positions that add nothing to the scores, not "
                f"{self.mixer.kind!r} and {positions}"
            )

    def _check_residual(self) -> None:
        """Check that a residual form has the sub-layers, and the norms, that it is made for."""
        lacks_own_norm = ("post-norm", "output-norm", "parallel-one-norm", "fixup")
        if self.norm.first_attention == "none" and self.residual in lacks_own_norm:
            raise SettingError(
                "model.norm.first_attention='none' leaves out a norm of attention's input alone, which "
                f"model.residual={self.residual!r} does not have: choose 'pre-norm' or 'sandwich-norm'"
            )
        if self.residual != "fixup":
            return
        if self.norm.kind != "none":
            raise SettingError(
                "model.residual='fixup' takes the place of norms: model.norm.kind="
                f"{self.norm.kind!r} should be 'none'"
            )
        if not self.has_attention_logits or self.cross_attention.kind != "heads":
            raise SettingError(
                "model.residual='fixup' scales the matrices of attention: it needs "
                "model.mixer.kind='attention' and model.cross_attention.kind='heads', not "
                f"{self.mixer.kind!r} and {self.cross_attention.kind!r}"
            )

    def _check_sharing(self) -> None:
        """Check that what layers, or the two stacks, share or have apart is there."""
        sharing = {
            "embedding.encoder": (self.embedding.encoder, "shared"),
            "shared_stack": (self.shared_stack, "both"),
        }
        for name, (value, default) in sharing.items():
            if value != default and self.architecture != "encoder-decoder":
                raise SettingError(
                    f"model.{name}={value!r} needs model.architecture='encoder-decoder', not "
                    f"{self.architecture!r}"
                )
        encoder = self.num_encoder_layers if self.has_encoder and self.shares_layers("encoder") else 0
        decoder = self.num_decoder_layers if self.has_decoder and self.shares_layers("decoder") else 0
        if self.shared_layers and max(encoder, decoder) <= 1:
            raise SettingError("model.shared_layers=True needs two or more layers: one shares nothing")
        if self.shared_layers and self.norm.first_attention == "none":
            raise SettingError(
                "model.norm.first_attention='none' leaves a norm out of the first layer alone: with "
                "model.shared_layers=True it should be 'norm'"
            )
        if self.shared_parts == "mlp" and self.mlp.activation == "none":
            raise SettingError(
                "model.shared_parts='mlp' needs a feed-forward layer: model.mlp.activation='none' has none"
            )

    def shares_layers(self, side: str) -> bool:
        """Return whether the layers of the "encoder" or of the "decoder" share parameters."""
        return self.shared_layers and self.shared_stack in ("both", side)

    def _check_stacks(self) -> None:
        """Check stacks that differ in size, share their parameters, or lack a part."""
        if self.attention.mask == "none" and not self.has_decoder:
            raise SettingError(
                "model.attention.mask='none' is of decoders: model.architecture='encoder' has no mask"
            )
        if self.attention.encoder_mask == "causal" and self.architecture != "encoder":
            raise SettingError(
                "model.attention.encoder_mask='causal' needs model.architecture='encoder', not "
                f"{self.architecture!r}, whose decoder is causal"
            )
        is_linear = self.mlp.activation in ("none", "gated-linear")
        if is_linear and (self.output.transform or "replaced-token" in self.heads):
            readers = "model.output.transform=True or the head 'replaced-token'"
            raise SettingError(
                f"model.mlp.activation={self.mlp.activation!r} leaves {readers} no activation: choose "
                "another, or neither"
            )
        if self.mlp.activation == "none" and self.lora.rank and "mlp" in self.lora.matrices:
            raise SettingError(
                f"model.mlp.activation='none' has no matrix for lora.matrices={self.lora.matrices}"
            )
        if self.encoder != EncoderConfig():
            if self.architecture != "encoder-decoder":
                message = f"model.encoder={self.encoder} needs model.architecture='encoder-decoder'"
                raise SettingError(f"{message}, not {self.architecture!r}")
        encoder, decoder = self.num_encoder_layers, self.num_decoder_layers
        if self.architecture == "shared-encoder-decoder" and encoder != decoder:
            layers = f"model.num_encoder_layers={encoder} should equal model.num_decoder_layers={decoder}"
            raise SettingError(f"{layers} when the two stacks share their parameters")

    def _check_convolution(self) -> None:
        """Check that a convolution beside the first layer may look ahead, and that this layer is its own."""
        if not self.embedding.convolution:
            return
        needed: Condition = {
            "architecture": ("encoder",),
            "block": ("transformer",),
            "attention.encoder_mask": ("none",),
            "shared_layers": (False,),
        }
        why = (
            f"model.embedding.convolution={self.embedding.convolution} reads tokens after a position, beside "
            "a first layer of its own, which does not fit"
        )
        self._require(needed, why, "model.embedding.convolution be 0")

    def _check_experts(self) -> None:
        """Check that mixtures of experts have layers to take the place of, and fit the other parts."""
        if not self.experts.count:
            return
        experts = f"model.experts.count={self.experts.count}"
        if self.mlp.activation == "none":
            raise SettingError(
                f"{experts} takes the place of feed-forward layers: model.mlp.activation='none' has none"
            )
        if self.residual == "fixup":
            raise SettingError(
                f"{experts} has no initial values for model.residual='fixup': choose 'pre-norm'"
            )
        if self.lora.rank and "mlp" in self.lora.matrices:
            raise SettingError(
                f"{experts} has no single matrix for lora.matrices={self.lora.matrices}: leave out 'mlp'"
            )
        untrained = {"replaced-token", "generator", "backward"} & set(self.heads)
        if untrained:
            raise SettingError(
                f"{experts} has losses of its own, which pre-training of model.heads={self.heads} lacks: "
                f"leave out {', '.join(sorted(untrained))}"
            )
        every = f"model.experts.every={self.experts.every}"
        if self.shared_layers and self.experts.every > 1:
            raise SettingError(
                f"{every} makes layers that differ: with model.shared_layers=True it should be 1"
            )
        stacks = {"encoder": self.has_encoder, "decoder": self.has_decoder}
        for stack in [name for name, is_there in stacks.items() if is_there]:
            layers = getattr(self, f"num_{stack}_layers")
            if not self.experts.layers(layers):
                raise SettingError(
                    f"{every} leaves model.num_{stack}_layers={layers} without experts: make it at most "
                    f"{layers}"
                )
        is_causal = self.has_decoder or self.is_causal_encoder
        if self.experts.kind == "expert-choice" and is_causal:
            raise SettingError(
                "model.experts.kind='expert-choice' compares a row's tokens with later ones, which a causal "
                "model may not read: choose 'token-choice', or model.architecture='encoder' without a mask"
            )

    def _check_memory(self) -> None:
        """Check that a product-key memory has one feed-forward layer to take the place of."""
        if not self.memory.keys:
            return
        memory = f"model.memory.keys={self.memory.keys}"
        has_layer = self.mlp.activation != "none" and not self.experts.count and self.residual != "fixup"
        if not has_layer or self.shared_layers or self.architecture == "shared-encoder-decoder":
            raise SettingError(
                f"{memory} takes the place of the feed-forward layer of one layer alone: "
                f"model.mlp.activation={self.mlp.activation!r} should not be 'none', "
                f"model.experts.count={self.experts.count} be 0, model.residual={self.residual!r} not be "
                "'fixup', and neither layers nor stacks share parameters"
            )
        if self.lora.rank and "mlp" in self.lora.matrices:
            raise SettingError(
                f"{memory} has no matrix for lora.matrices={self.lora.matrices}: leave out 'mlp'"
            )
        name = "num_decoder_layers" if self.has_decoder else "num_encoder_layers"
        if -self.memory.layer > getattr(self, name):
            raise SettingError(
                f"model.memory.layer={self.memory.layer} should be from -{getattr(self, name)} to -1, one of "
                f"model.{name}={getattr(self, name)}"
            )

    def _check_universal(self) -> None:
        """Check that positions are added once, or at each step, and that a gate has a sum to act on."""
        adds_positions = self.universal.embedding == "step-and-position"
        if adds_positions and (self.positions.kind == "sinusoidal" or self.d_model % 2):
            raise SettingError(
                "model.universal.embedding='step-and-position' adds sines and cosines of positions at each "
                f"step: model.positions.kind={self.positions.kind!r} should not be 'sinusoidal', and "
                f"model.d_model={self.d_model} be even"
            )
        if self.universal.gate != "none" and self.residual in ("fixup", "none"):
            raise SettingError(
                f"model.universal.gate={self.universal.gate!r} is a gate of what is added to a sub-layer's "
                f"input: model.residual={self.residual!r} should be 'pre-norm'"
            )

    def _check_funnel(self) -> None:
        """Check that an encoder whose rows get shorter has no part that needs rows of one length."""
        if self.funnel.blocks == 1:
            return
        funnel = f"model.funnel.blocks={self.funnel.blocks}"
        if self.architecture != "encoder-decoder":
            raise SettingError(
                f"{funnel} makes the rows of an encoder shorter, which a decoder reads: "
                f"model.architecture={self.architecture!r} should be 'encoder-decoder'"
            )
        if self.funnel.blocks > self.num_encoder_layers:
            raise SettingError(
                f"{funnel} should be at most model.num_encoder_layers={self.num_encoder_layers}: each block "
                "has a layer or more"
            )
        whole_rows: Condition = {
            "sparsity": (SparsityConfig(),),
            "encoder.layer_windows": ((),),
            "cross_attention.encoder_layers": ("last",),
            "universal.halting": ("last-step",),
            "experts.count": (0,),
            "residual": Values(exclude=("parallel", "parallel-one-norm")),
        }
        why = f"{funnel} gives layers rows of different lengths, unlike"
        self._require(whole_rows, why, "model.funnel.blocks be 1")

    def _check_evolved(self) -> None:
        """Check that the blocks of the Evolved Transformer read ahead in encoders alone, and whole rows."""
        if self.block != "evolved":
            return
        needed: Condition = {
            "architecture": ("encoder-decoder", "decoder", "encoder"),
            "mixer.kind": ("attention",),
            "attention.mask": ("causal",),
            "attention.encoder_mask": ("none",),
            "attention.branching": ("none",),
            "cross_attention.kind": ("heads",),
            "cross_attention.encoder_layers": ("last",),
            "positions.kind": Values(exclude=("alibi", "relative-disentangled")),
            "sparsity": (SparsityConfig(),),
            "encoder.layer_windows": ((),),
            "residual": ("pre-norm", "post-norm"),
            "universal.embedding": ("none",),
            "universal.gate": ("none",),
            "lora.rank": (0,),
        }
        why = f"model.block={self.block!r} has attentions and convolutions of its own, which do not fit"
        self._require(needed, why, "model.block be 'transformer'")

    def has_product_key_memory(self, has_cross_attention: bool) -> bool:
        """Return whether a stack, with or without cross-attention, has a product-key memory.

        Of an encoder-decoder only the decoder has one.
        """
        is_encoder_decoder = self.has_encoder and self.has_decoder
        return self.memory.keys > 0 and (has_cross_attention or not is_encoder_decoder)

    def _check_mup(self) -> None:
        """Check that muP has a rule for all parts of the model."""
        if not self.mup.base:
            return
        if self.published:
            raise SettingError(
                f"model.mup.base={self.mup.base} is for models that start from random parameters, not for "
                "published weights, which have the standard parametrisation: it should be 0"
            )
        self._require(COVERED, f"model.mup.base={self.mup.base} has no rule for", "model.mup.base be 0")

    def _require(self, needed: Condition, why: str, otherwise: str) -> None:
        """Check that settings have the values that a part needs.

        An error says ``why`` a setting does not fit, what it should be, and what else could be changed.
        """
        for path, expected in needed.items():
            values = expected if isinstance(expected, Values) else Values(among=expected)
            value = attrgetter(path)(self)
            if not values.has(value):
                if values.among:
                    allowed = " or ".join(map(repr, values.among))
                else:
                    allowed = f"another than {' and '.join(map(repr, values.exclude))}"
                raise SettingError(f"{why} model.{path}={value!r}: it should be {allowed}, or {otherwise}")

    def _check_compile(self) -> None:
        """Check that the loss can be computed in chunks, and that blocks have the tensors that are named."""
        whole = set(self.heads) & {"generator", "replaced-token", "backward"}
        if whole and self.compile.loss_chunks > 1:
            raise SettingError(
                f"model.compile.loss_chunks={self.compile.loss_chunks} should be 1 with "
                f"{', '.join(sorted(whole))} in model.heads: the loss reads the logits of whole rows"
            )
        is_two_stacks = self.has_encoder and self.has_decoder
        has_heads = self.has_attention_logits or (is_two_stacks and self.cross_attention.kind in BY_HEADS)
        for name in ("saved", "offloaded"):
            tensors = getattr(self.compile, name)
            assignment = f"model.compile.{name}={tensors}"
            if not has_heads and (lacking := set(tensors) & set(ATTENTION_TENSORS)):
                raise SettingError(
                    f"{assignment} has {', '.join(sorted(lacking))}, which model.mixer.kind="
                    f"{self.mixer.kind!r} does not compute: leave them out"
                )
            if self.mlp.activation == "none" and (lacking := set(tensors) & set(MLP_TENSORS)):
                raise SettingError(
                    f"{assignment} has {', '.join(sorted(lacking))}, and model.mlp.activation='none' leaves "
                    "out the feed-forward layer: leave them out"
                )

    @property
    def has_encoder(self) -> bool:
        return self.architecture in ("encoder-decoder", "shared-encoder-decoder", "encoder")

    @property
    def has_decoder(self) -> bool:
        return self.architecture != "encoder"

    @property
    def has_attention_logits(self) -> bool:
        """Return whether the token mixer computes attention logits, which take biases, masks and windows."""
        if self.mixer.kind in MIXERS:
            return getattr(MIXERS[self.mixer.kind], "has_attention_logits", False)
        return self.mixer.kind in MIXERS_WITH_LOGITS

    def encoder_lengths(self, length: int) -> list[int]:
        """Return the lengths of the input of each layer of an encoder, and last that of its output."""
        return self.funnel.row_lengths(self.num_encoder_layers, length)

    @property
    def has_merged_attention(self) -> bool:
        """Return whether a decoder's self-attention is its cross-attention too."""
        return self.cross_attention.kind == "merged"

    @property
    def has_transparent_attention(self) -> bool:
        """Return whether a decoder's layers read all layers of the encoder."""
        return self.cross_attention.encoder_layers == "weighted"

    @property
    def has_max_length(self) -> bool:
        """Return whether rows are at most ``positions.max_length`` long."""
        return self.positions.is_learned or self.mixer.kind == "synthesizer"

    @property
    def cross_config(self) -> "ModelConfig":
        """Return the settings of cross-attention: these with its own sizes where it has any."""
        paths = {"num_heads": "attention.num_heads", "d_kv": "attention.d_kv"}
        return self._with_sizes_of("cross_attention", paths)

    @property
    def encoder_config(self) -> "ModelConfig":
        """Return the settings of the encoder: these with the sizes of ``encoder`` where it has its own."""
        paths = {
            "d_ff": "mlp.d_ff",
            "activation": "mlp.activation",
            "d_kv": "attention.d_kv",
            "num_heads": "attention.num_heads",
        }
        return self._with_sizes_of("encoder", paths)

    def _with_sizes_of(self, part: str, paths: Mapping[str, str]) -> "ModelConfig":
        """Return these settings with the sizes that ``part``, "encoder" or "cross_attention", has of its own.

        ``paths`` maps settings of the part, which are None in the result, to those that they replace. Raises
        SettingError, which names the part's settings, if they do not fit the others.
        """
        new: dict[str, Any] = {}
        assignments = []
        for name, path in paths.items():
            value = getattr(getattr(self, part), name)
            if value is not None:
                new |= {path: value, f"{part}.{name}": None}
                assignments.append(f"model.{part}.{name}={value!r}")
        if not new:
            return self
        try:
            return changes(self, new)
        except SettingError as error:
            given = " and ".join(assignments)
            raise SettingError(f"{given} should fit the other settings: {error}") from error

    def windows(self, side: str) -> tuple[int | None, ...]:
        """Return the window of each layer of the "encoder" or the "decoder" [blocks]; None: it has none."""
        own = self.encoder.layer_windows if side == "encoder" else ()
        layers = self.num_encoder_layers if side == "encoder" else self.num_decoder_layers
        return own or self.sparsity.layer_windows or (self.sparsity.window,) * layers

    def has_window(self, side: str) -> bool:
        """Return whether any layer of the "encoder" or the "decoder" has a window."""
        return any(window is not None for window in self.windows(side))

    @property
    def expert_d_ff(self) -> int:
        """Return the width of an expert's hidden layer [features]."""
        return self.mlp.d_ff if self.experts.d_ff is None else self.experts.d_ff

    @property
    def num_expert_layers(self) -> int:
        """Return the number of layers of all stacks that have experts."""
        encoder = len(self.experts.layers(self.num_encoder_layers)) if self.has_encoder else 0
        decoder = len(self.experts.layers(self.num_decoder_layers)) if self.has_decoder else 0
        return encoder + decoder

    @property
    def width_factor(self) -> float:
        """Return the width of muP's base as a share of d_model; 1 in the standard parametrisation."""
        return self.mup.base / self.d_model if self.mup.base else 1.0

    @property
    def base_width(self) -> int:
        """Return the width that initial standard deviations and fixed scales are computed from.

        It is d_model of muP's base model or, without muP, the model's own.
        """
        return self.mup.base or self.d_model

    @property
    def base_attention(self) -> AttentionConfig:
        """Return the settings of attention with the d_kv of muP's base, or with its own."""
        if self.mup.base_d_kv is None:
            return self.attention
        return replace(self.attention, d_kv=self.mup.base_d_kv)

    @property
    def mlp_has_bias(self) -> bool:
        return self.bias if self.mlp.bias is None else self.mlp.bias

    @property
    def qkv_has_bias(self) -> bool:
        return self.bias if self.attention.qkv_bias is None else self.attention.qkv_bias

    @property
    def key_has_bias(self) -> bool:
        return self.qkv_has_bias if self.attention.key_bias is None else self.attention.key_bias

    @property
    def state_width(self) -> int:
        """Return the width of a recurrent state, or of the hidden layer of the mixer "window" [features]."""
        return self.mixer.width or self.d_model

    @property
    def cluster_sizes(self) -> tuple[int, ...]:
        """Return the number of tokens of each cluster of an adaptive embedding; empty without clusters."""
        first = self.embedding.clusters
        return (*first, self.vocab_size - sum(first)) if first else ()

    @property
    def embed_width(self) -> int:
        return self.embedding.d_embed or self.d_model

    @property
    def has_non_causal_decoder(self) -> bool:
        """Return whether positions of a decoder see later ones: those of a prefix, or all without a mask."""
        return self.architecture == "prefix-decoder" or self.attention.mask == "none"

    @property
    def is_causal_encoder(self) -> bool:
        """Return whether it is an encoder whose positions see only those before them."""
        return self.architecture == "encoder" and self.attention.encoder_mask == "causal"

    @property
    def sum_width(self) -> int:
        """Return the width in which embeddings of tokens, positions and types are added up [features]."""
        return self.embed_width if self.embedding.projected == "sum" else self.d_model

    @property
    def feature_width(self) -> int:
        """Return the width of the features that a head reads at a position.

        A bidirectional language model has those of both directions.
        """
        return self.d_model * (1 + ("backward" in self.heads))

    def is_bidirectional(self, has_cross_attention: bool) -> bool:
        """Return whether a stack, with or without cross-attention, is built to read in both directions.

        This is also True of a stack that encoder and decoder share, and of a causal encoder. Only the mask of
        a causal encoder is causal: it keeps the position bias of an encoder, so that its parameters mean the
        same with either mask.
        """
        if self.has_non_causal_decoder:
            return True
        if self.architecture == "encoder-decoder":
            return not has_cross_attention
        return self.architecture != "decoder"

    @property
    def rotary_width(self) -> int:
        """Return how many features of a head rotary positions rotate."""
        return int(self.positions.rotary.fraction * self.attention.d_kv)


@dataclass(frozen=True)
class HeadConfig:
    """The head of a fine-tuned model, which replaces the prediction of the next token (lm.nn.heads)."""

    kind: HeadKind  # classes and regression: of a text; tokens, span: of its positions; choice: of texts
    classes: int = 1  # of "classes" and "tokens" [classes]
    pool: Pool = "first"  # which position speaks for a text, or all
    layers: HeadLayers = "last"  # mixed: a learned mean of all; frozen: only the head is trained
    dense: HeadDense = "none"  # activation of a dense layer between a pooled text and the output

    @property
    def is_pooled(self) -> bool:
        """Return whether it reads one state per text, and not those of all positions."""
        return self.kind not in ("tokens", "span")

"""Models of every architecture and family, small enough for tests, and batches for them."""

from dataclasses import replace
from functools import cache, partial
from operator import attrgetter

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lm.batch import Batch, Side
from lm.config.attention import RotaryConfig, SparsityConfig
from lm.config.base import changes
from lm.config.layers import AttentionConfig, MlpConfig, PositionsConfig
from lm.config.model import ModelConfig
from lm.nn.presets import PRESETS
from lm.nn.transformer import Transformer
from lm.ops.losses import cross_entropy
from lm.sharding import named

TINY = ModelConfig(
    vocab_size=40,
    num_encoder_layers=2,
    num_decoder_layers=2,
    d_model=16,
    mlp=MlpConfig(d_ff=24),
    attention=AttentionConfig(d_kv=8, num_heads=4),
    dropout=0.1,
    positions=PositionsConfig(relative_buckets=8, relative_max_distance=6, max_length=16),
)
SHAPE = {
    path: attrgetter(path)(TINY)
    for path in (
        "vocab_size",
        "num_encoder_layers",
        "num_decoder_layers",
        "d_model",
        "mlp.d_ff",
        "attention.d_kv",
        "attention.num_heads",
        "positions.max_length",
    )
}
ARCHITECTURES = ["encoder-decoder", "shared-encoder-decoder", "decoder", "prefix-decoder", "encoder"]
POSITIONS = ["none", "learned", "sinusoidal", "relative-per-layer", "rotary", "alibi"]  # besides TINY's
WINDOW = {"sparsity": SparsityConfig(window=2, global_tokens=1, projections="separate")}
BLOCKS = {"sparsity": SparsityConfig(window=0, global_tokens=1, block=2, random_blocks=1)}


def tiny(size, **new):
    """The family of a published size, as small as TINY."""
    return changes(
        PRESETS[size], SHAPE | {"embedding.d_embed": 8 if PRESETS[size].embedding.d_embed else None} | new
    )


CONFIGS = {a: replace(TINY, architecture=a) for a in ARCHITECTURES}
CONFIGS |= {
    f"{a}, {p}": changes(
        TINY, {"architecture": a, "positions.kind": p, "positions.rotary": RotaryConfig(fraction=0.5)}
    )
    for a in ("encoder-decoder", "decoder", "encoder")
    for p in POSITIONS
}
CONFIGS |= {
    name: tiny(name)
    for name in (
        "umt5-small",
        "transformer-base",
        "marian",
        "bart-base",
        "bert-base",
        "roberta-base",
        "albert-base",
        "electra-small",
        "gpt",
        "gpt2",
        "gpt-neox-20b",
        "bloom",
        "llama-7b",
    )
}
CONFIGS |= {
    "llama-3.1-8b": tiny("llama-3.1-8b", **{"attention.num_key_value_heads": 2}),
    "santacoder": tiny("santacoder", **{"attention.num_key_value_heads": 1}),
    "longformer-base": tiny("longformer-base", **WINDOW),
    "sparse decoder": changes(TINY, {"architecture": "decoder", **BLOCKS}),
    "windowed decoder": replace(TINY, architecture="decoder", sparsity=SparsityConfig(window=1, dilation=2)),
    "bilinear": changes(TINY, {"attention.scores": "bilinear"}),
    "adapters": changes(TINY, {"mlp.adapter_width": 4}),
    "no mask": changes(TINY, {"architecture": "decoder", "attention.mask": "none"}),
    "no feed-forward": changes(TINY, {"mlp.activation": "none"}),
    "no residual": replace(TINY, residual="none"),
    "no norm": changes(TINY, {"norm.kind": "none", "mlp.adapter_width": 4}),
}
CONFIGS |= {
    "modernbert-base": tiny("modernbert-base", sparsity=SparsityConfig(layer_windows=(None, 1))),
    "t5gemma-2b-2b": tiny(
        "t5gemma-2b-2b",
        **{
            "attention.num_key_value_heads": 2,
            "attention.logit_cap": 2.0,
            "output.logit_cap": 3.0,
            "sparsity": SparsityConfig(layer_windows=(1, None)),
            "encoder.layer_windows": (None, 1),
        },
    ),
}
CONFIGS |= {
    f"{mixer} encoder-decoder": changes(
        TINY, {"mixer.kind": mixer, "mixer.width": 12, "positions.kind": "none"}
    )
    for mixer in ("rnn", "gru", "lstm", "window", "none")
}
CONFIGS |= {
    f"{mixer} decoder, {cross} cross-attention": changes(
        TINY,
        {"mixer.kind": mixer, "mixer.width": 12, "positions.kind": "none", "cross_attention.kind": cross},
    )
    for mixer, cross in (("lstm", "none"), ("gru", "none"), ("lstm", "dot"), ("lstm", "additive"))
}
CONFIGS |= {
    "dense synthesizer": changes(
        TINY, {"mixer.kind": "synthesizer", "cross_attention.num_heads": 2, "cross_attention.d_kv": 6}
    ),
    "decoder, random synthesizer": changes(
        TINY,
        {
            "architecture": "decoder",
            "mixer.kind": "synthesizer",
            "mixer.logits": "random",
            "mixer.products": "mixed",
        },
    ),
}
CONFIGS |= {
    "lightweight convolution": changes(
        TINY,
        {
            "mixer.kind": "lightweight-convolution",
            "mixer.kernel_size": 3,
            "mixer.kernels": 4,
            "positions.kind": "none",
        },
    ),
    "decoder, dynamic convolution": changes(
        TINY,
        {
            "architecture": "decoder",
            "mixer.kind": "dynamic-convolution",
            "mixer.kernel_size": 4,
            "positions.kind": "learned",
        },
    ),
}
CONFIGS |= {
    "decoder, adaptive embedding": changes(
        TINY,
        {
            "architecture": "decoder",
            "embedding.clusters": (5, 15),
            "embedding.cluster_widths": (16, 6, 2),
        },
    ),
}
CONFIGS["decoder, adaptive softmax"] = changes(
    CONFIGS["decoder, adaptive embedding"], {"output.softmax": "adaptive"}
)
MEMORY = {"memory.keys": 6, "memory.heads": 2, "memory.key_width": 4, "memory.neighbours": 3}
CONFIGS |= {"product-key memory": changes(TINY, MEMORY)}
CONFIGS |= {"encoder-decoder, relative-keys": changes(TINY, {"positions.kind": "relative-keys"})}
CONFIGS |= {"transparent attention": changes(TINY, {"cross_attention.encoder_layers": "weighted"})}
UNIVERSAL = {
    "shared_layers": True,
    "universal.embedding": "step-and-position",
    "universal.gate": "gru",
    "universal.halting": "adaptive",
}
CONFIGS |= {"universal": changes(TINY, UNIVERSAL)}
CONFIGS |= {"funnel": changes(TINY, {"funnel.blocks": 2})}
CONFIGS |= {"branches": changes(TINY, {"attention.branching": "weighted", "mlp.activation": "gated-silu"})}
CONFIGS |= {
    "evolved": changes(TINY, {"block": "evolved", "encoder.activation": "silu"}),
    "decoder, evolved": changes(
        TINY, {"block": "evolved", "architecture": "decoder", "positions.kind": "rotary"}
    ),
}
EXPERTS = {"experts.count": 4, "experts.per_token": 2}
CONFIGS |= {
    "experts": changes(TINY, EXPERTS),
    "decoder, experts in every second layer": changes(
        TINY, EXPERTS | {"architecture": "decoder", "experts.every": 2, "mlp.bias": True}
    ),
    "encoder, one expert per token": changes(
        TINY,
        {"architecture": "encoder", "experts.count": 3, "mlp.activation": "gated-silu"},
    ),
}
CONFIGS |= {"multiplicative cross-attention": changes(TINY, {"cross_attention.kind": "multiplicative"})}
CONTINUED = {"positions.kind": "rotary", "cross_attention.positions": "continued"}
HEAD_NORMS = {
    "attention.scores": "scaled-dot",
    "attention.qk_norm": True,
    "attention.value_norm": True,
    "attention.output_norm": True,
    "attention.norm_scale": False,
}
CONFIGS |= {
    "continued positions": changes(TINY, CONTINUED),
    "redllm": changes(TINY, CONTINUED | HEAD_NORMS | {"attention.num_key_value_heads": 2}),
    "merged attention": changes(TINY, {"positions.kind": "rotary", "cross_attention.kind": "merged"}),
    "merged, continued": changes(TINY, CONTINUED | {"cross_attention.kind": "merged", "attention.d_v": 4}),
    "merged, one stack": changes(
        TINY,
        CONTINUED | {"cross_attention.kind": "merged", "architecture": "shared-encoder-decoder"},
    ),
}


@cache
def made(config):
    return Transformer(config, nnx.Rngs(params=jax.random.key(0)))


@cache
def shapes(config):
    """A model of shapes instead of arrays."""
    return jax.eval_shape(lambda: Transformer(config, nnx.Rngs(params=0)))


def make(name, **settings):
    """The same parameters for all ``settings``, none of which changes their shapes."""
    if not settings:
        return jax.tree.map(lambda leaf: leaf, made(CONFIGS[name]))
    config = changes(CONFIGS[name], settings)
    return jax.tree.unflatten(jax.tree.structure(shapes(config)), jax.tree.leaves(made(CONFIGS[name])))


def filled(shapes):
    """The model of these shapes, none of whose parameters is 0 or 1."""
    random = np.random.default_rng(1)  # jax would compile a program for each shape
    drawn = [
        jnp.asarray(name.endswith("scale") + 0.3 * random.normal(size=leaf.shape), leaf.dtype)
        for name, leaf in named(shapes).items()
    ]
    return jax.tree.unflatten(jax.tree.structure(shapes), drawn)


def moved(config):
    """A model none of whose parameters is 0 or 1."""
    return filled(shapes(config))


def example(seed, source, target, prefix=0):
    """One sequence pair alone in a batch; ``prefix`` positions of the target see one another."""
    random = np.random.default_rng(seed)
    prefix = (np.arange(target) < prefix)[None].astype(int)
    source, target = (random.integers(2, 40, (1, length)) for length in (source, target))
    return Batch(
        encoder=Side(tokens=source, segment_ids=np.ones_like(source)),
        decoder=Side(tokens=target, segment_ids=np.ones_like(target), causal_attention=prefix),
    )


def joined(examples):
    """The examples packed into one row."""
    numbered = [
        b.map_sides(lambda side, k=k: replace(side, segment_ids=side.segment_ids * (k + 1)))
        for k, b in enumerate(examples)
    ]
    return jax.tree.map(lambda *arrays: np.concatenate(arrays, axis=1), *numbered)


def with_side(batch, name, **new):
    """The batch with other arrays on one side."""
    return replace(batch, **{name: replace(batch.side(name), **new)})


def padded(batch, length):
    return batch.map(lambda value: np.pad(value, ((0, 0), (0, length - value.shape[1]))))


run = jax.jit(lambda model, batch, key=None: model(batch, key))
features = jax.jit(Transformer.features)
encode = jax.jit(Transformer.encode)
hidden_states = jax.jit(Transformer.hidden_states)
attention_weights = jax.jit(Transformer.attention_weights)


def log_probabilities(model, batch):
    logits = np.asarray(run(model, batch))
    highest = logits.max(-1, keepdims=True)
    return logits - highest - np.log(np.exp(logits - highest).sum(-1, keepdims=True))


def logits_of_steps(model, cache, tokens):
    """The logits [T,B,V] after each of these tokens [B,T], which are read one by one over the cache."""

    def step(cache, tokens):
        logits, cache = model.step(tokens, cache)
        return cache, logits

    return jax.lax.scan(step, cache, tokens.T)[1]


@partial(jax.jit, static_argnames="unstacked")
def cached_logits(model, batch, unstacked=False):
    """Logits of the decoder's fourth token, read with those before it, and of each later one by a step."""
    prompt = replace(batch, decoder=batch.decoder.map(lambda value: value[:, :4]))
    first, cached = model.prefill(prompt, 11)
    if unstacked:
        model, cached = model.unstack(cached)
    return jnp.concatenate([first[None], logits_of_steps(model, cached, batch.decoder.tokens[:, 4:])])


class Given(nnx.Module):
    """Embeddings that stand for themselves."""

    dtype = "float32"

    def __init__(self, embedded):
        self.embedded = nnx.Param(embedded)

    def __call__(self, tokens):
        return self.embedded[...]

    def logits(self, x):
        return x


def influence(name, prefix=0):
    """bool [T,T]: which input positions move each position's output, through the embedding of each."""
    model, batch = make(name), example(3, 6, 6, prefix=prefix)
    if model.config.has_decoder and model.config.has_encoder:
        # not under test: nobody sees the encoder's output
        batch = with_side(batch, "encoder", segment_ids=np.zeros((1, 6), int))
    side = "decoder" if model.config.has_decoder else "encoder"

    def outputs(embedded):
        changed = jax.tree.unflatten(jax.tree.structure(model), jax.tree.leaves(model))
        changed.embed = Given(embedded)
        return changed.features(batch)[0]

    jacobian = np.asarray(jax.jit(jax.jacobian(outputs))(model.embed(batch.side(side).tokens)))
    return np.abs(jacobian[:, :, 0]).max((1, 3)) > 0


def loss_and_gradients(model, batch, key):
    def loss(model):
        side = "decoder" if model.config.has_decoder else "encoder"
        targets = np.roll(batch.side(side).tokens, -1, axis=1)
        weights = batch.side(side).segment_ids > 0
        return cross_entropy(model(batch, key), targets, weights, z_loss=1e-4, label_smoothing=0.0)[0]

    value, gradients = jax.jit(jax.value_and_grad(loss))(model)
    return {"loss": value} | named(gradients)

"""What decoding and mixers cost on this machine: seconds by the clock, bytes by the compiler's account."""

import os
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.stages import Compiled

from lm.batch import Batch, Side
from lm.config.base import SettingError
from lm.config.layers import AttentionConfig, MlpConfig, PositionsConfig
from lm.config.model import ModelConfig
from lm.nn.attention_inputs import make_attention_inputs
from lm.nn.mixers import MIXERS, Mixer
from lm.nn.transformer import Transformer

TIMINGS = 15  # of which the least counts: others use the machine too
SOURCE = 32  # what the encoder of an encoder-decoder reads [tokens]
# a decoder whose decoding is timed where there is no run
SMALL_DECODER = ModelConfig(
    "decoder",
    vocab_size=4_096,
    num_decoder_layers=4,
    d_model=256,
    mlp=MlpConfig(d_ff=1_024),
    attention=AttentionConfig(num_heads=4),
    positions=PositionsConfig(kind="rotary"),
)


class Cost(NamedTuple):
    """Of one call of a compiled program."""

    seconds: float
    temporaries: int  # what it needs besides arguments and result, by the compiler [bytes]


def call_costs(calls: Sequence[tuple[Callable, tuple[object, ...]]]) -> list[Cost]:
    """The cost of each call, a function and its arguments, compiled first.

    They take turns, so that what else the machine does meets all alike.
    """
    compiled = [jax.jit(function).lower(*arguments).compile() for function, arguments in calls]
    taken = np.empty((TIMINGS + 1, len(calls)))  # the first round is no measurement
    for timing in taken:
        for i, (program, (_, arguments)) in enumerate(zip(compiled, calls, strict=True)):
            start = perf_counter()
            jax.block_until_ready(program(*arguments))
            timing[i] = perf_counter() - start
    return [Cost(*each) for each in zip(taken[1:].min(0).tolist(), map(_temporaries, compiled), strict=True)]


def _temporaries(program: Compiled) -> int:
    memory = program.memory_analysis()
    return 0 if memory is None else memory.temp_size_in_bytes


def machine() -> str:
    """What costs are measured on."""
    device = jax.devices()[0]
    return f"{os.cpu_count()} CPU cores" if device.platform == "cpu" else device.device_kind


def decoding_costs(model: Transformer, lengths: Sequence[int]) -> dict[str, list[Cost]]:
    """The cost of the last token of rows of each of ``lengths``, with a cache of the others and without.

    Without a cache everything is computed again, the encoder's output too.
    """
    config = model.config
    if not config.has_decoder:
        raise SettingError("model.architecture='encoder' writes no text: nothing to measure")
    if config.positions.kind == "learned" and max(lengths) > config.positions.max_length:
        raise SettingError(
            f"--lengths {max(lengths)} is above model.positions.max_length={config.positions.max_length}"
        )

    def batch(length: int) -> Batch:
        prefix = jnp.zeros((1, length), jnp.int32) if config.architecture == "prefix-decoder" else None
        decoder = Side(tokens=jnp.ones((1, length), jnp.int32), causal_attention=prefix)
        if not config.has_encoder:
            return Batch(decoder=decoder)
        return Batch(encoder=Side(tokens=jnp.ones((1, SOURCE), jnp.int32)), decoder=decoder)

    def whole(model: Transformer, batch: Batch) -> Array:
        return model.logits(model.features(batch)[:, -1:])

    def cached(length: int) -> tuple[object, ...]:
        _, cache = jax.jit(Transformer.prefill, static_argnums=2)(model, batch(length - 1), length)
        return model, jnp.ones(1, jnp.int32), cache

    again = [(whole, (model, batch(length))) for length in lengths]
    costs = call_costs([*again, *((Transformer.step, cached(length)) for length in lengths)])
    return {"without cache": costs[: len(lengths)], "with cache": costs[len(lengths) :]}


def mixer_costs(configs: Sequence[ModelConfig], lengths: Sequence[int]) -> list[list[Cost]]:
    """The cost of a layer's mixer, forward, over a causal row: for each of ``configs`` one of each length."""
    calls = [_mixer_call(config, length) for config in configs for length in lengths]
    costs = call_costs(calls)
    return [costs[i : i + len(lengths)] for i in range(0, len(costs), len(lengths))]


def _mixer_call(config: ModelConfig, length: int) -> tuple[Callable, tuple[object, ...]]:
    def call(mixer: Mixer, x: Array) -> Array:
        tokens = jnp.zeros(x.shape[:2], jnp.int32)
        return mixer(
            x, make_attention_inputs(config, Batch(decoder=Side(tokens=tokens)), "decoder", None), None, {}
        )[0]

    mixer = MIXERS[config.mixer.kind](config, nnx.Rngs(params=jax.random.key(0)), False)
    return call, (mixer, jax.random.normal(jax.random.key(length), (1, length, config.d_model), config.dtype))


def milliseconds(costs: Sequence[Cost]) -> np.ndarray:
    """Of each call [ms]."""
    return np.array([1e3 * cost.seconds for cost in costs])

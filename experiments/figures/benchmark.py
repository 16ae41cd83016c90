"""Measures what decoding and mixers cost on this machine: seconds of wall time, bytes by the compiler."""

import os
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from experiments.figures.panels import Curve
from lm.batch import Batch, Side
from lm.config.base import SettingError
from lm.config.layers import AttentionConfig, MlpConfig, PositionsConfig
from lm.config.model import ModelConfig
from lm.nn.attention_inputs import make_attention_inputs
from lm.nn.mixers import MIXERS, Mixer
from lm.nn.transformer import Transformer

REPEATS = 15  # timings per call; the least counts, since other programs use the machine too
ENCODER_LENGTH = 32  # inputs of an encoder-decoder whose decoding is timed [tokens]
# the decoder whose decoding is timed if no run is given
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
    """The cost of one call of a compiled function."""

    seconds: float
    temporary_bytes: int  # memory beside arguments and result, by the compiler's account


Call = tuple[Callable, tuple[object, ...]]  # function, arguments


def measure_calls(calls: Sequence[Call]) -> list[Cost]:
    """Compile each call, then time them in turns, so that other load on the machine affects all alike."""
    programs = [jax.jit(function).lower(*arguments).compile() for function, arguments in calls]
    seconds = np.empty((REPEATS + 1, len(calls)))  # the first round warms up
    for timing in seconds:
        for i, (program, (_, arguments)) in enumerate(zip(programs, calls, strict=True)):
            start = perf_counter()
            jax.block_until_ready(program(*arguments))
            timing[i] = perf_counter() - start
    memory = [program.memory_analysis() for program in programs]
    sizes = [0 if each is None else each.temp_size_in_bytes for each in memory]
    return [Cost(*each) for each in zip(seconds[1:].min(0).tolist(), sizes, strict=True)]


def device_name() -> str:
    """Return the name of the device that costs are measured on."""
    device = jax.devices()[0]
    return f"{os.cpu_count()} CPU cores" if device.platform == "cpu" else device.device_kind


def measure_decoding(model: Transformer, lengths: Sequence[int]) -> dict[str, list[Cost]]:
    """Measure the last token of sequences of each length, "with cache" of the others and "without cache".

    Without a cache everything is computed again, including the encoder's output.
    """
    config = model.config
    if not config.has_decoder:
        raise SettingError("model.architecture='encoder' writes no text: nothing to measure")
    if config.has_max_length and max(lengths) > config.positions.max_length:
        raise SettingError(
            f"--lengths {max(lengths)} is above model.positions.max_length={config.positions.max_length}"
        )

    def batch(length: int) -> Batch:
        prefix = jnp.zeros((1, length), jnp.int32) if config.architecture == "prefix-decoder" else None
        decoder = Side(tokens=jnp.ones((1, length), jnp.int32), causal_attention=prefix)
        if not config.has_encoder:
            return Batch(decoder=decoder)
        return Batch(encoder=Side(tokens=jnp.ones((1, ENCODER_LENGTH), jnp.int32)), decoder=decoder)

    def last_logits(model: Transformer, batch: Batch) -> Array:
        return model.logits(model.features(batch)[:, -1:])

    def step_arguments(length: int) -> tuple[object, ...]:
        _, cache = jax.jit(Transformer.prefill, static_argnums=2)(model, batch(length - 1), length)
        return model, jnp.ones(1, jnp.int32), cache

    without_cache: list[Call] = [(last_logits, (model, batch(length))) for length in lengths]
    with_cache: list[Call] = [(Transformer.step, step_arguments(length)) for length in lengths]
    costs = measure_calls([*without_cache, *with_cache])
    return {"without cache": costs[: len(lengths)], "with cache": costs[len(lengths) :]}


def measure_mixers(configs: Sequence[ModelConfig], lengths: Sequence[int]) -> list[list[Cost]]:
    """Measure the forward pass of one mixer per config over a causal sequence of each length."""
    costs = measure_calls([_mixer_call(config, length) for config in configs for length in lengths])
    return [costs[i : i + len(lengths)] for i in range(0, len(costs), len(lengths))]


def _mixer_call(config: ModelConfig, length: int) -> Call:
    def forward(mixer: Mixer, x: Array) -> Array:
        batch = Batch(decoder=Side(tokens=jnp.zeros(x.shape[:2], jnp.int32)))
        return mixer(x, make_attention_inputs(config, batch, "decoder", None), None, {})[0]

    mixer = MIXERS[config.mixer.kind](config, nnx.Rngs(params=jax.random.key(0)), False)
    return forward, (
        mixer,
        jax.random.normal(jax.random.key(length), (1, length, config.d_model), config.dtype),
    )


def milliseconds(lengths: Sequence[int], costs: Sequence[Cost]) -> Curve:
    """Return the time of each call over the length of its sequence [ms]."""
    return Curve(lengths, [1e3 * cost.seconds for cost in costs])

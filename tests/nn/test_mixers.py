"""Laws of the mixers beside attention. Packing and decoding of them are in test_transformer.py too."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sharded_training
import small_models
import toy
from decode_prompts import with_special
from flax import nnx
from paths import GOLDEN
from variants import with_quick

from lm.batch import Batch, Side
from lm.config.attention import SparsityConfig
from lm.config.base import SettingError, changes
from lm.config.decoding import Decoding
from lm.config.layers import MixerConfig, PositionsConfig
from lm.config.mesh import MeshConfig
from lm.config.model import ModelConfig, SpecialTokens
from lm.config.training import OptimizerConfig
from lm.evaluate.generate import beam_search
from lm.nn.attention_inputs import AttentionInputs
from lm.nn.layers import num_parameters
from lm.nn.mixers import MIXERS
from lm.nn.rnn import Direction
from lm.nn.transformer import Transformer
from lm.ops.recurrence import CELLS, StateWeights, rnn_scan, segment_resets
from lm.sharding import make_mesh
from lm.train.flops import step_flops
from lm.train.step import StepSpec, build

TORCH = np.load(GOLDEN / "recurrent.npz")
CELL_NAMES = sorted(CELLS)


def config_of(mixer, architecture="decoder", **new):
    settings = {"mixer.kind": mixer, "architecture": architecture, "positions.kind": "none"}
    return changes(small_models.TINY, settings | new)


def mixer_of(config, both_ways=False):
    return MIXERS[config.mixer.kind](config, nnx.Rngs(params=jax.random.key(0)), both_ways)


@jax.jit
def mixed(mixer, x):
    return mixer(x, AttentionInputs(), None, {})[0]


def as_torch(mixer, arrays):
    """The mixer with weights by torch's names, its two biases added up but where GRU keeps them apart."""

    def fill(direction, suffix):
        inward, state, bias, state_bias = (
            arrays[f"{kind}_l0{suffix}"] for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )
        direction.input[...], direction.state[...] = inward.T, state.T
        if direction.state_bias is None:
            direction.bias[...] = bias + state_bias
        else:
            split = 2 * state.shape[1]
            direction.bias[...] = bias + np.where(np.arange(len(bias)) < split, state_bias, 0)
            direction.state_bias[...] = state_bias[split:]

    fill(mixer.forward, "")
    if mixer.backward is not None:
        fill(mixer.backward, "_reverse")
        mixer.out.kernel[...] = np.eye(len(mixer.out.kernel[...]))  # leaves both directions side by side
    return mixer


@pytest.mark.parametrize("ways", ["one", pytest.param("both", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CELL_NAMES)
def test_outputs_and_gradients_are_torchs_of_the_same_weights(name, ways):
    arrays = {what.split("/", 2)[2]: TORCH[what] for what in TORCH if what.startswith(f"{name}/{ways}/")}
    config = changes(config_of(name), {"d_model": 6, "mixer.width": 6 if ways == "one" else 3})
    mixer = as_torch(mixer_of(config, ways == "both"), arrays)

    def total(mixer, x):
        y = mixed(mixer, x)
        return (y * arrays["up"]).sum(), y

    (_, y), (by_weight, by_x) = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(mixer, arrays["x"])
    by_weight = jax.tree.map(np.asarray, by_weight)
    np.testing.assert_allclose(y, arrays["y"], atol=1e-5)
    np.testing.assert_allclose(by_x, arrays["grad/x"], atol=1e-5)
    for direction, suffix in ((by_weight.forward, ""), (by_weight.backward, "_reverse")):
        if direction is None:
            continue
        expected = [arrays[f"grad/{kind}_l0{suffix}"] for kind in ("weight_ih", "weight_hh", "bias_ih")]
        found = direction.input[...].T, direction.state[...].T, direction.bias[...]
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)
        if direction.state_bias is not None:
            last = arrays[f"grad/bias_hh_l0{suffix}"][-len(direction.state_bias[...]) :]
            np.testing.assert_allclose(direction.state_bias[...], last, atol=1e-5)


def drawn(cell, length=6, rows=3, width=4):
    """Weights, products with inputs and a first state."""
    columns, random = cell.gates * width, np.random.default_rng(1)
    kernel, bias, inputs, state = (
        random.normal(size=shape).astype(np.float32)
        for shape in ((width, columns), (columns,), (length, rows, columns), (cell.states, rows, width))
    )
    return StateWeights(kernel, bias), inputs, tuple(state)


SEGMENTS = np.array([[1, 1, 2, 2, 2, 0], [0, 0, 1, 0, 1, 3], [1, 1, 1, 1, 1, 1]])


def looped(cell, weights, inputs, state):
    """As ``recur``, token by token in Python: a segment begins with zeros, padding is passed over."""
    rows = []
    for row, segments in enumerate(SEGMENTS):
        now, last, shown = tuple(array[row : row + 1] for array in state), None, []
        for place, segment in enumerate(segments):
            if segment:
                now = tuple(map(jnp.zeros_like, now)) if last not in (None, segment) else now
                products = now[0] @ weights.kernel + weights.bias[None]
                gates = (jnp.split(x, cell.gates, -1) for x in (inputs[place, row : row + 1], products))
                now, last = cell.advance(*gates, now), segment
            shown.append(now)
        rows.append([jnp.concatenate(states) for states in zip(*shown, strict=True)])
    return tuple(jnp.stack(states, axis=1) for states in zip(*rows, strict=True))


@pytest.mark.parametrize("name", with_quick(("lstm", "rnn"), CELL_NAMES))
def test_states_and_gradients_are_those_of_a_plain_loop_that_passes_over_padding_and_begins_segments_anew(
    name,
):
    cell, given = CELLS[name], drawn(CELLS[name])

    def gradients_and_states(run):
        def total(*given):
            states = run(*given)
            return sum(jnp.sin(k + each).sum() for k, each in enumerate(states)), states

        return jax.jit(jax.grad(total, (0, 1, 2), has_aux=True))(*given)

    def ours(*given):
        return rnn_scan(cell, *given, segment_resets(jnp.asarray(SEGMENTS)))

    found, expected = gradients_and_states(ours), gradients_and_states(partial(looped, cell))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_the_gradient_of_the_weights_is_the_sum_over_all_earlier_states():
    """Backpropagation through time as it is written: dL/dW = sum_k dL/dh_T (prod_j dh_j/dh_j-1) dh_k/dW."""
    rng = np.random.default_rng(0)
    kernel, inputs = rng.normal(size=(3, 3)), rng.normal(size=(6, 3))
    cell, weights = CELLS["rnn"], StateWeights(jnp.asarray(kernel, jnp.float32))
    rows = jnp.asarray(inputs[:, None], jnp.float32)

    def last(weights):
        return rnn_scan(cell, weights, rows, (jnp.zeros((1, 3)),), None)[0][-1].sum()

    states = [np.zeros(3)]
    for x in inputs:
        states.append(np.tanh(x + states[-1] @ kernel))
    slopes = [1 - state**2 for state in states]  # tanh' = 1 - tanh^2
    total, reaching = np.zeros((3, 3)), np.ones(3)  # dL/dh_T
    for k in range(len(inputs), 0, -1):
        total += np.outer(states[k - 1], reaching * slopes[k])
        reaching = kernel @ (reaching * slopes[k])  # through dh_k/dh_k-1
    np.testing.assert_allclose(jax.grad(last)(weights).kernel, total, atol=1e-5)


def test_a_forget_gate_of_1_and_an_input_gate_of_0_keep_the_memory_exactly():
    cell, (weights, inputs, state) = CELLS["lstm"], drawn(CELLS["lstm"], length=50)
    write, forget, *others = np.split(inputs, 4, axis=-1)
    inputs = np.concatenate([write - 1e3, forget + 1e3, *others], axis=-1)
    _, memory = jax.jit(partial(rnn_scan, cell))(weights, inputs, state, None)
    np.testing.assert_array_equal(memory, np.broadcast_to(state[1], memory.shape))


# h(h+d+1) for each gate; torch has h more for each. GRU keeps one of these second biases.
@pytest.mark.parametrize(
    ("name", "numbers"), [("rnn", 393_728), ("lstm", 1_574_912), ("gru", 3 * 393_728 + 512)]
)
def test_a_layer_of_512_features_that_reads_256_has_as_many_parameters_as_the_course_prints(name, numbers):
    config = changes(config_of(name), {"d_model": 256, "mixer.width": 512})
    assert num_parameters(jax.eval_shape(lambda: Direction(config, nnx.Rngs(params=0)))) == numbers


def test_the_matrix_of_a_window_grows_with_it_and_has_rows_of_its_own_for_each_place():
    for size in (1, 2, 5):
        config = config_of("window", **{"mixer.window": size, "mixer.width": 7})
        assert jax.eval_shape(partial(mixer_of, config)).hidden.kernel.shape == (size * 16, 7)
    x = np.random.default_rng(2).normal(size=(1, 4, 16)).astype(np.float32)
    mixer = mixer_of(config_of("window", **{"mixer.window": 3}))
    one, other = (np.asarray(mixed(mixer, each)) for each in (x, x[:, [1, 0, 2, 3]]))
    assert np.abs(one - other)[0, 2].max() > 1e-2  # reads both, in another order


DISTANCE = np.arange(6)[:, None] - np.arange(6)[None, :]
SEEN = {  # by one layer that reads back, and by one that reads both ways
    "rnn": (DISTANCE >= 0, DISTANCE < 9),
    "gru": (DISTANCE >= 0, DISTANCE < 9),
    "lstm": (DISTANCE >= 0, DISTANCE < 9),
    "window": ((DISTANCE >= 0) & (DISTANCE < 3), abs(DISTANCE) < 3),
    "lightweight-convolution": ((DISTANCE >= 0) & (DISTANCE < 3), abs(DISTANCE) < 2),
    "dynamic-convolution": ((DISTANCE >= 0) & (DISTANCE < 3), abs(DISTANCE) < 2),
    "none": (DISTANCE > 9, DISTANCE > 9),  # what it adds to the stream depends on nothing
}


# a state of "gru" follows its beam as each of the two of "lstm"
@pytest.mark.parametrize("mixer", [pytest.param("gru", marks=pytest.mark.slow), "lstm", "window"])
def test_scores_of_beams_are_those_of_the_whole_rows(mixer):
    """A beam that goes on from another's state would have the scores of a text that it is not."""
    model = Transformer(config_of(mixer, **{"output.logits": "separate"}), nnx.Rngs(params=jax.random.key(4)))
    prompt = np.array([[3, 5, 4], [7, 2, 9]])
    endless = with_special(model, SpecialTokens(eos=None))
    tokens, scores = map(
        np.asarray, beam_search(endless, Batch(decoder=Side(tokens=prompt)), Decoding(5, 4, 0.0))
    )
    for row, written, found in zip(prompt, tokens, scores, strict=True):
        rows = np.concatenate([np.tile(row, (4, 1)), written], axis=1)
        logits = small_models.log_probabilities(model, Batch(decoder=Side(tokens=rows)))[:, 2:-1]
        expected = np.take_along_axis(logits, written[:, :, None], axis=-1).sum((1, 2))
        np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize(  # a layer of "rnn" or "gru" reads in the directions in which one of "lstm" does
    "mixer", [pytest.param(name, marks=[pytest.mark.slow] * (name in ("rnn", "gru"))) for name in SEEN]
)
def test_a_decoder_reads_back_and_an_encoder_both_ways_as_far_as_its_mixer(mixer):
    for both_ways, seen in enumerate(SEEN[mixer]):
        module = mixer_of(config_of(mixer, **{"mixer.kernel_size": 3}), bool(both_ways))
        x = np.random.default_rng(3).normal(size=(1, 6, 16)).astype(np.float32)
        jacobian = jax.jit(jax.jacrev(lambda x, module=module: mixed(module, x).sum(-1)[0]))(x)
        np.testing.assert_array_equal(np.abs(jacobian[:, 0]).max(-1) > 0, seen)


def test_a_lightweight_convolution_is_a_mean_of_neighbours_with_weights_that_do_not_depend_on_the_text():
    """So it is linear in its gated inputs; a dynamic one is not."""
    kernel_weights = jax.jit(lambda mixer, x: mixer.kernel_weights(x))
    x, y = np.random.default_rng(5).normal(size=(2, 1, 6, 16)).astype(np.float32)
    for kind, is_linear in (("lightweight-convolution", True), ("dynamic-convolution", False)):
        mixer = mixer_of(config_of(kind, **{"mixer.kernel_size": 3, "mixer.kernels": 4}))
        mixer.gate.kernel[...] = np.zeros((16, 16), np.float32)  # a gate of one half everywhere
        apart, together, rest = (np.asarray(mixed(mixer, each)) for each in (x, x + y, y))
        assert (np.abs(apart + rest - together).max() < 1e-5) == is_linear
        np.testing.assert_allclose(kernel_weights(mixer, x).sum(2), 1, rtol=1e-5)


@pytest.mark.parametrize("mixer", ["rnn", "gru", "lstm", "window"])
def test_what_decoding_remembers_does_not_grow_with_the_text(mixer):
    module = mixer_of(config_of(mixer))
    short, long = (
        [leaf.shape for leaf in jax.tree.leaves(module.init_carry(2, slots))] for slots in (4, 4_000)
    )
    assert short == long and {shape[0] for shape in short} == {2}


@pytest.mark.slow
def test_scanned_and_unrolled_recurrent_stacks_give_the_same_loss_and_gradients():
    batch, key = small_models.example(4, 5, 6), jax.random.key(7)
    one, *others = (
        small_models.loss_and_gradients(small_models.make("lstm encoder-decoder", **settings), batch, key)
        for settings in ({}, {"compile.layers": "unroll"}, {"compile.remat": "full"})
    )
    for other in others:
        for name, value in one.items():
            np.testing.assert_allclose(other[name], value, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mixer", "new"),
    [
        ("window", {}),
        ("dynamic-convolution", {"mixer.kernels": 6}),
        ("gru", {}),
        ("lstm", {}),
        ("rnn", {"compile.layers": "scan"}),
        ("lstm", {"cross_attention.kind": "dot"}),
        ("gru", {"cross_attention.kind": "multiplicative", "compile.layers": "scan"}),
    ],
)
def test_a_recurrent_model_trains_alike_on_one_device_and_on_eight(mixer, new):
    model = changes(
        sharded_training.MODEL,
        {
            "architecture": "encoder-decoder",
            "mixer.kind": mixer,
            "mixer.width": 12,
            "positions.kind": "none",
            "attention.num_heads": 8,
            "attention.d_kv": 2,
            **{"compile.layers": "unroll"} | new,
        },
    )
    spec = StepSpec(model, OptimizerConfig(factor_from=16))
    meshes = (MeshConfig(), 1), (MeshConfig(data=2, fsdp=2, tensor=2), 8)
    (one, params), (eight, others) = (
        sharded_training.trained(build(spec, make_mesh(mesh, jax.devices()[:devices])))
        for mesh, devices in meshes
    )
    np.testing.assert_allclose(eight, one, rtol=1e-5)
    for name, value in params.items():
        np.testing.assert_allclose(others[name], value, rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("mixer", ["lstm", "window"])
def test_a_recurrent_run_in_two_sessions_is_the_run_in_one_bit_for_bit(mixer, tmp_path):
    model = config_of(mixer, vocab_size=toy.MODEL.vocab_size, dropout=0.5)
    for total in (4, 8):
        resumed = toy.run(tmp_path / "two", total, model=model, module=Transformer)
    one = toy.run(tmp_path / "one", 8, model=model, module=Transformer)
    assert toy.numbers(resumed) == toy.numbers(one)


def test_attention_maps_of_a_recurrent_encoder_decoder_are_its_alignment_alone():
    batch = small_models.example(8, 5, 7)
    model = small_models.make("lstm encoder-decoder")
    (name, weights), *others = small_models.attention_weights(model, batch).items()
    assert (name, weights.shape, others) == ("cross", (2, 1, 4, 7, 5), [])
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-5)


def test_a_step_counts_the_products_with_inputs_and_with_states():
    def flops(mixer, architecture="decoder", **new):
        return step_flops(config_of(mixer, architecture, **new), 1, 10, 10)

    d, h, layers, positions = 16, 12, 2, 10
    found = flops("lstm", **{"mixer.width": h}) - flops("none")
    assert found == 6 * layers * positions * (4 * h * (h + d) + h * d)
    found = flops("gru", "encoder") - flops("none", "encoder")
    assert found == 6 * layers * positions * (2 * 3 * d * 2 * d + 2 * d * d)
    assert flops("window") - flops("none") == 6 * layers * positions * 3 * d * d
    sizes = {"mixer.kernel_size": 5, "mixer.kernels": 4}
    light = flops("lightweight-convolution", **sizes)
    assert light - flops("none") == 6 * layers * positions * (4 * d * d + 5 * d)
    assert flops("dynamic-convolution", **sizes) - light == 6 * layers * positions * d * 5 * 4


@pytest.mark.parametrize("kind", ["rotary", "relative", "alibi", "relative-per-layer"])
def test_positions_that_live_in_scores_need_attention(kind):
    with pytest.raises(SettingError, match=f"model.mixer.kind='lstm'.*model.positions.kind='{kind}'"):
        ModelConfig("decoder", mixer=MixerConfig(kind="lstm"), positions=PositionsConfig(kind=kind))


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ({"sparsity": SparsityConfig(window=2)}, "model.mixer.kind='gru' has no mask for model.sparsity"),
        ({"architecture": "prefix-decoder"}, "model.mixer.kind='gru'.*model.architecture='prefix-decoder'"),
        ({"architecture": "shared-encoder-decoder"}, "model.architecture='shared-encoder-decoder'"),
        ({"mixer.kind": "dynamic-convolution", "mixer.kernels": 7}, "model.mixer.kernels=7 should divide"),
        ({"mixer.width": 0}, "model.mixer.width=0"),
        ({"mixer.window": 0}, "model.mixer.window=0"),
    ],
)
def test_what_a_mixer_cannot_do_is_refused_by_the_names_of_both_settings(new, message):
    with pytest.raises(SettingError, match=message):
        changes(
            ModelConfig(), {"architecture": "decoder", "mixer.kind": "gru", "positions.kind": "none"} | new
        )

"""Laws of what a decoder reads of an encoder, and of gradients that stay in a chunk of a row.

That packing and decoding hold for every kind of cross-attention too, test_transformer.py says.
"""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sharded_training
import small_models
from decode_prompts import with_special
from flax import nnx
from variants import with_quick

from lm.batch import Batch, Side
from lm.config.base import SettingError, changes
from lm.config.decoding import Decoding
from lm.config.mesh import MeshConfig
from lm.config.model import ModelConfig, SpecialTokens
from lm.config.training import OptimizerConfig
from lm.convert.config_json import config_json
from lm.evaluate.generate import beam_search
from lm.nn.attention_inputs import (
    AttentionInputs,
    continue_positions,
    last_encoder_states,
    make_attention_inputs,
)
from lm.nn.mixers import CROSS_ATTENTION
from lm.nn.presets import PRESETS
from lm.nn.transformer import Transformer
from lm.ops.attention import additive_attention, additive_scores, scaled_dot_product_attention
from lm.ops.positions import rotate
from lm.ops.recurrence import CELLS, StateWeights, rnn_scan, segment_resets
from lm.sharding import make_mesh
from lm.train.flops import cache_bytes, costs, step_flops
from lm.train.step import StepSpec, build

STATES = ("dot", "multiplicative", "additive")  # kinds that read the encoder's states as they are


def config_of(kind, mixer="lstm", **new):
    settings = {"mixer.kind": mixer, "positions.kind": "none", "cross_attention.kind": kind}
    return changes(small_models.TINY, settings | new)


@cache
def model_of(kind, **new):
    return Transformer(config_of(kind, **new), nnx.Rngs(params=jax.random.key(0)))


def cross_of(kind):
    return CROSS_ATTENTION[kind](config_of(kind), nnx.Rngs(params=jax.random.key(0)))


def normals(*shapes):
    random = np.random.default_rng(1)  # jax would compile a program for each shape
    return [jnp.asarray(random.normal(size=shape).astype(np.float32)) for shape in shapes]


def softmax(scores):
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def test_an_additive_score_is_v_times_the_tanh_of_query_plus_key():
    arrays = normals((2, 3, 4, 5), (2, 6, 4, 5), (4, 5))
    found = np.asarray(additive_scores(*arrays))
    query, key, vector = map(np.asarray, arrays)
    assert found.shape == (2, 4, 3, 6) and found.dtype == jnp.float32
    for b, n, t, s in np.ndindex(found.shape):
        expected = vector[n] @ np.tanh(query[b, t, n] + key[b, s, n])
        np.testing.assert_allclose(found[b, n, t, s], expected, atol=1e-5)


def test_additive_attention_is_the_mean_of_what_is_seen_and_0_with_no_gradient_where_nothing_is():
    query, key, value, vector, up = normals((2, 3, 4, 5), (2, 6, 4, 5), (2, 6, 4, 7), (4, 5), (2, 3, 4, 7))
    mask = np.random.default_rng(2).random((2, 3, 6)) < 0.5
    mask[:, 1], mask[:, 0, 0] = False, True
    keep = np.tile(np.float32([0, 2, 2, 0, 2, 2]), (2, 4, 1, 1))

    def total(*arrays):
        out = additive_attention(*arrays, jnp.asarray(mask[:, None]), dropout_factors=jnp.asarray(keep))
        return (out * up).sum(), out

    scores = np.where(mask[:, None], additive_scores(query, key, vector), -1e9)
    weights = np.where(mask[:, None], softmax(scores), 0) * keep
    gradients, out = jax.jit(jax.grad(total, (0, 1, 2, 3), has_aux=True))(query, key, value, vector)
    np.testing.assert_allclose(out, np.einsum("bnts,bsnd->btnd", weights, value), atol=1e-5)
    assert all(np.isfinite(gradient).all() for gradient in gradients)
    of_query = np.asarray(gradients[0])
    assert not of_query[:, 1].any() and np.abs(of_query[:, 0]).max() > 0


@pytest.mark.parametrize("kind", STATES)
def test_states_are_scored_by_the_formula_of_their_kind_and_their_mean_is_read(kind):
    cross, (x, memory) = cross_of(kind), normals((1, 3, 16), (1, 5, 16))
    decoder, encoder = np.asarray(x), np.asarray(memory)
    dropped = np.array([True, False, True, True, False])[None, None, None]

    @jax.jit
    def computed(cross, x, memory, dropped):
        seen, inputs = cross.key_value(memory, None), AttentionInputs()
        read = (cross.attend_to(x, seen, inputs, mask)[0] for mask in (None, dropped))
        return cross.weights(x, seen, inputs)[0, 0], *read

    found_weights, *found = computed(cross, x, memory, dropped)
    arrays = {name: np.asarray(leaf) for name, leaf in small_models.named(cross).items()}
    score = {
        "dot": lambda s, h: s @ h / 4,  # by the root of 16 features
        "multiplicative": lambda s, h: s @ (h @ arrays["key.kernel"]) / 4,
        "additive": lambda s, h: (
            arrays["vector"][0] @ np.tanh(s @ arrays["query.kernel"] + h @ arrays["key.kernel"])
        ),
    }[kind]
    weights = softmax(np.array([[score(s, h) for h in encoder[0]] for s in decoder[0]]))
    np.testing.assert_allclose(found_weights, weights, atol=1e-5)
    np.testing.assert_allclose(found[0], weights @ encoder[0] @ arrays["out.kernel"], atol=1e-5)
    kept = weights * dropped[0, 0] / 0.9
    np.testing.assert_allclose(found[1], kept @ encoder[0] @ arrays["out.kernel"], atol=1e-5)


def test_a_position_starts_from_the_last_state_of_its_segment_and_from_zeros_where_there_is_none():
    encoded = jnp.arange(1.0, 13).reshape(2, 6, 1)
    encoder = jnp.array([[1, 1, 2, 2, 2, 0], [0, 3, 3, 0, 0, 0]])
    decoder = jnp.array([[1, 2, 2, 0], [3, 3, 4, 0]])
    last_states = jax.jit(lambda *arrays: last_encoder_states(*arrays)[:, :, 0])
    found = last_states(encoded, decoder, encoder)
    np.testing.assert_array_equal(found, [[2, 5, 5, 0], [9, 9, 0, 0]])
    np.testing.assert_array_equal(last_states(encoded, None, encoder), [[5], [9]])
    np.testing.assert_array_equal(last_states(encoded, decoder, None), [[6], [12]])


def test_without_cross_attention_a_decoder_knows_of_the_encoder_its_last_state_alone():
    model = model_of("none")
    batch = small_models.joined([small_models.example(1, 5, 3), small_models.example(2, 4, 2)])

    def outputs(encoded):
        return model.decoder(*model._decoder_inputs(batch, encoded))[0][0]

    jacobian = np.asarray(jax.jit(jax.jacobian(outputs))(small_models.encode(model, batch)))
    seen = np.abs(jacobian[:, :, 0]).max((1, 3)) > 0
    expected = np.zeros((5, 9), bool)
    expected[:3, 4] = expected[3:, 8] = True
    np.testing.assert_array_equal(seen, expected)


def drawn(cell, length=7, rows=3, width=4):
    """Weights, products with inputs, a first state, and the states that later segments start from."""
    columns = cell.gates * width
    kernel, bias, inputs, *states = normals(
        (width, columns),
        (columns,),
        (length, rows, columns),
        *[(rows, width)] * cell.states,
        *[(length, rows, width)] * cell.states,
    )
    return StateWeights(kernel, bias), inputs, tuple(states[: cell.states]), tuple(states[cell.states :])


SEGMENTS = np.array([[1, 1, 2, 2, 2, 0, 0], [0, 1, 1, 1, 0, 2, 3], [1, 1, 1, 1, 1, 1, 1]])
FLOW = segment_resets(jnp.asarray(SEGMENTS))
BEGINS = np.asarray(FLOW.is_start)[:, :, 0]
CELL_NAMES = ("gru", "lstm")


def gradients_and_states(run, *given):
    """Gradients of a sum over all states, and the states."""

    def total(*given):
        states = run(*given)
        return sum(jnp.sin(k + each).sum() for k, each in enumerate(states)), states

    return jax.jit(jax.grad(total, tuple(range(len(given))), has_aux=True))(*given)


@pytest.mark.parametrize("name", with_quick(("lstm",), CELL_NAMES))
def test_a_later_segment_starts_from_its_own_state_which_alone_gets_its_gradient(name):
    cell = CELLS[name]
    weights, inputs, state, starts = drawn(cell)

    def packed(weights, inputs, state, starts):
        return rnn_scan(cell, weights, inputs, state, FLOW._replace(states=starts))

    def apart(weights, inputs, state, starts):
        """Segment by segment, each alone in its row; what padding shows is the state before."""
        rows = []
        for row, segments in enumerate(SEGMENTS):
            parts, now = [], tuple(array[row : row + 1] for array in state)
            edges = [0, *np.flatnonzero(BEGINS[:, row]), len(segments)]
            for begin, end in zip(edges[:-1], edges[1:], strict=True):
                if begin:
                    now = tuple(array[begin, row : row + 1] for array in starts)
                inside = jnp.asarray(segments[None, begin:end] > 0, int)
                parts.append(
                    rnn_scan(cell, weights, inputs[begin:end, row : row + 1], now, segment_resets(inside))
                )
            rows.append([jnp.concatenate(arrays) for arrays in zip(*parts, strict=True)])
        return tuple(jnp.concatenate(arrays, axis=1) for arrays in zip(*rows, strict=True))

    found, expected = (gradients_and_states(run, weights, inputs, state, starts) for run in (packed, apart))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    (_, _, _, of_starts), _ = found
    assert np.abs(of_starts[0]).max() > 0.01


@pytest.mark.parametrize(("name", "flow"), [("gru", None), ("lstm", FLOW)])
def test_truncated_gradients_are_those_of_chunks_that_are_given_the_state_before_and_values_stay(name, flow):
    cell = CELLS[name]
    weights, inputs, state, _ = drawn(cell)

    def chunks(weights, inputs, state):
        parts = []
        for start in range(0, len(inputs), 3):
            part = None if flow is None else jax.tree.map(lambda x, start=start: x[start : start + 3], flow)
            parts.append(rnn_scan(cell, weights, inputs[start : start + 3], state, part))
            state = jax.lax.stop_gradient(tuple(array[-1] for array in parts[-1]))
        return tuple(jnp.concatenate(arrays) for arrays in zip(*parts, strict=True))

    def cut(weights, inputs, state):
        return rnn_scan(cell, weights, inputs, state, flow, 3)

    given = weights, inputs, state
    (found, states), (expected, _) = (gradients_and_states(run, *given) for run in (cut, chunks))
    whole = jax.jit(lambda *given: rnn_scan(cell, *given, flow))
    for one, other in zip(states, whole(*given), strict=True):
        np.testing.assert_array_equal(one, other)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_a_truncated_model_computes_the_same_and_its_gradient_stays_in_a_chunk():
    config = changes(config_of("heads"), {"architecture": "decoder", "dropout": 0.0, "mixer.truncation": 3})
    cut, whole = (
        Transformer(each, nnx.Rngs(params=jax.random.key(0)))
        for each in (config, changes(config, {"mixer.truncation": None}))
    )
    batch = Batch(decoder=Side(tokens=np.arange(2, 10)[None]))
    np.testing.assert_array_equal(small_models.run(cut, batch), small_models.run(whole, batch))

    def reached(model):
        def outputs(embedded):
            changed = jax.tree.unflatten(jax.tree.structure(model), jax.tree.leaves(model))
            changed.embed = small_models.Given(embedded)
            return changed.features(batch)[0]

        embedded = np.asarray(model.embed.table[...])[batch.decoder.tokens]
        jacobian = np.asarray(jax.jit(jax.jacobian(outputs))(embedded))
        return np.abs(jacobian[:, :, 0]).max((1, 3)) > 0

    chunk = np.arange(8) // 3
    np.testing.assert_array_equal(reached(cut), np.tri(8, dtype=bool) & (chunk[:, None] == chunk[None]))
    np.testing.assert_array_equal(reached(whole), np.tri(8, dtype=bool))


def assert_scores_are_those_of_the_whole_answers(model):
    """A beam that goes on from another's state would have the scores of an answer that it is not."""
    tokens = np.array([[3, 5, 4, 8], [7, 2, 0, 0]])
    source = Batch(encoder=Side(tokens=tokens, segment_ids=(tokens > 0) * 1))
    endless = with_special(model, SpecialTokens(eos=None))
    answers, scores = map(np.asarray, beam_search(endless, source, Decoding(5, 4, 0.0)))
    for row, written in enumerate(answers):
        batch = source.map(lambda value, row=row: np.tile(value[row], (4, 1)))
        batch = replace(batch, decoder=Side(tokens=np.pad(written[:, :-1], ((0, 0), (1, 0)))))
        expected = np.take_along_axis(
            small_models.log_probabilities(model, batch), written[:, :, None], axis=-1
        ).sum((1, 2))
        np.testing.assert_allclose(scores[row], expected, atol=1e-4)


# what a beam of "none" remembers, the states of an LSTM, one of "additive" does too
@pytest.mark.parametrize("kind", [pytest.param("none", marks=pytest.mark.slow), "additive"])
def test_scores_of_beams_are_those_of_the_whole_answers(kind):
    assert_scores_are_those_of_the_whole_answers(model_of(kind, **{"output.logits": "separate"}))


@pytest.mark.parametrize("name", ["redllm", pytest.param("merged, continued", marks=pytest.mark.slow)])
def test_scores_of_beams_that_attend_by_heads_are_those_of_the_whole_answers(name):
    assert_scores_are_those_of_the_whole_answers(small_models.make(name))


@pytest.mark.parametrize(
    "name", [pytest.param("continued positions", marks=pytest.mark.slow), "merged, continued"]
)
def test_rotary_cross_attention_depends_on_distances_alone_and_on_all_of_them(name):
    model, batch = small_models.make(name), small_models.example(1, 5, 4)

    def moved(encoder, decoder):
        sides = zip(("encoder", "decoder"), (encoder, decoder), (5, 4), strict=True)
        placed = batch
        for side, start, length in sides:
            placed = small_models.with_side(placed, side, positions=start + np.arange(length)[None])
        return np.asarray(small_models.features(model, placed))

    here = np.asarray(small_models.features(model, batch))
    np.testing.assert_allclose(moved(0, 0), here, atol=1e-5)
    # the decoder's positions count from the encoder's end, wherever that is
    np.testing.assert_allclose(moved(7, 0), here, atol=2e-5)
    assert np.abs(moved(0, 1) - here).max() > 1e-3
    plain = small_models.made(changes(model.config, {"cross_attention.positions": "none"}))
    assert np.abs(small_models.features(plain, batch) - here).max() > 1e-3


def test_positions_of_a_segment_go_on_after_the_encoders_of_the_same_segment():
    config = small_models.CONFIGS["continued positions"]
    encoder = Side(tokens=np.ones((1, 6), int), segment_ids=np.array([[1, 1, 2, 2, 2, 0]]))
    decoder = Side(tokens=np.ones((1, 5), int), segment_ids=np.array([[1, 1, 2, 2, 0]]))
    inputs = make_attention_inputs(config, Batch(encoder=encoder, decoder=decoder), "decoder", None)
    found, _ = continue_positions(inputs, encoder, decoder.segment_ids)
    np.testing.assert_array_equal(found.positions[0, :4], [2, 3, 3, 4])
    np.testing.assert_array_equal(found.encoder_positions[0, :5], [0, 1, 0, 1, 2])
    alone, offset = continue_positions(inputs, replace(encoder, segment_ids=None), None)
    assert offset.tolist() == [[6]] and alone.encoder_positions[0].tolist() == list(range(6))


def test_redllms_cross_attention_is_its_formula():
    """Heads are unit-RMS vectors, turned by their places in one text; their outputs are normalised too."""
    config = small_models.CONFIGS["redllm"]
    layer = CROSS_ATTENTION["heads"](config, nnx.Rngs(params=jax.random.key(0)))
    assert sorted(small_models.named(layer)) == [f"{x}.kernel" for x in ("key", "out", "query", "value")]
    x, memory = normals((1, 3, 16), (1, 5, 16))

    rotary = config.positions.rotary
    frequencies, places = rotary.frequencies(8), 5 + np.arange(3)[None]

    @jax.jit
    def formula(layer, x, memory):
        def heads(projection, array, count):
            return projection(array).reshape(1, -1, count, 8)

        def normed(array):
            return array / jnp.sqrt(jnp.square(array).mean(-1, keepdims=True) + config.norm.epsilon)

        query = rotate(normed(heads(layer.query, x, 4)), jnp.asarray(places), *frequencies, rotary.layout)
        key = rotate(normed(heads(layer.key, memory, 2)), jnp.arange(5)[None], *frequencies, rotary.layout)
        out = scaled_dot_product_attention(query, key, normed(heads(layer.value, memory, 2)))
        return layer.out(normed(out).reshape(1, 3, 32))

    @jax.jit
    def computed(layer, x, memory):
        kv = layer.key_value(memory, jnp.arange(5)[None])
        return layer.attend_to(x, kv, AttentionInputs(positions=jnp.asarray(places)), None)

    np.testing.assert_allclose(computed(layer, x, memory), formula(layer, x, memory), atol=1e-5)


def test_merged_attention_is_one_softmax_over_the_texts_and_the_encoders_keys():
    model, batch = small_models.make("merged attention"), small_models.example(2, 5, 3)
    assert not [name for name in small_models.named(model) if "cross" in name]
    weights = jax.tree.map(np.asarray, small_models.attention_weights(model, batch))
    assert (weights["decoder"].shape, weights["cross"].shape) == ((2, 1, 4, 3, 3), (2, 1, 4, 3, 5))
    np.testing.assert_allclose(weights["decoder"].sum(-1) + weights["cross"].sum(-1), 1, rtol=1e-5)
    assert (weights["cross"] > 0).all() and not np.triu(weights["decoder"][0, 0, 0], 1).any()
    alone = jax.jit(lambda model: model.decoder.hidden_states(*model._decoder_inputs(batch, None)))(model)
    text, both = (np.asarray(x)[1] for x in (alone, small_models.hidden_states(model, batch)["decoder"]))
    assert np.abs(text - both).max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["none", "additive"])
def test_scanned_unrolled_and_recomputed_stacks_give_the_same_loss_and_gradients(kind):
    name = f"lstm decoder, {kind} cross-attention"
    batch, key = (
        small_models.joined([small_models.example(4, 5, 6), small_models.example(5, 3, 4)]),
        jax.random.key(7),
    )
    one, *others = (
        small_models.loss_and_gradients(small_models.make(name, **settings), batch, key)
        for settings in ({}, {"compile.layers": "unroll"}, {"compile.remat": "full"})
    )
    for other in others:
        for parameter, value in one.items():
            np.testing.assert_allclose(other[parameter], value, rtol=1e-5, atol=1e-5, err_msg=parameter)


RECURRENT = {"mixer.kind": "gru", "positions.kind": "none"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "new",
    [
        RECURRENT | {"cross_attention.kind": "none"},
        RECURRENT | {"cross_attention.kind": "additive"},
        small_models.CONTINUED | small_models.HEAD_NORMS | {"attention.d_kv": 4},
        small_models.CONTINUED | {"cross_attention.kind": "merged"},
    ],
    ids=["none", "additive", "redllm", "merged"],
)
def test_a_model_trains_alike_on_one_device_and_on_eight(new):
    sizes = {"attention.num_heads": 8, "attention.d_kv": 2, "compile.layers": "unroll"}
    model = changes(sharded_training.MODEL, {"architecture": "encoder-decoder", **sizes, **new})
    spec = StepSpec(model, OptimizerConfig(factor_from=16))
    meshes = (MeshConfig(), 1), (MeshConfig(data=2, fsdp=2, tensor=2), 8)
    (one, params), (eight, others) = (
        sharded_training.trained(build(spec, make_mesh(mesh, jax.devices()[:devices])))
        for mesh, devices in meshes
    )
    np.testing.assert_allclose(eight, one, rtol=1e-5)
    for name, value in params.items():
        np.testing.assert_allclose(others[name], value, rtol=1e-3, atol=1e-5, err_msg=name)


def test_the_alignment_is_shown_of_one_head_and_none_of_a_decoder_that_reads_one_state():
    batch = small_models.example(8, 5, 7)
    weights_of = small_models.attention_weights
    (name, weights), *others = weights_of(model_of("additive"), batch).items()
    assert (name, weights.shape, others) == ("cross", (2, 1, 1, 7, 5), [])
    np.testing.assert_allclose(np.asarray(weights).sum(-1), 1, rtol=1e-5)
    assert weights_of(model_of("none"), batch) == {}


def test_a_step_counts_the_products_of_each_kind():
    def flops(kind):
        return step_flops(config_of(kind, **{"mixer.width": 12}), 1, inputs=10, targets=7)

    layers, d, h, inputs, targets = 2, 16, 12, 10, 7
    without = flops("none") - 6 * layers * targets * d * 2 * h  # the first state, of each position
    reading = 2 * d * inputs * targets  # scores, and the mean of the states
    expected = {
        "heads": 2 * d * 32 * (inputs + targets) + 2 * 32 * inputs * targets,
        "dot": d * d * targets + reading,
        "multiplicative": d * d * (inputs + targets) + reading,
        "additive": d * d * (inputs + 2 * targets) + reading,
    }
    assert {kind: flops(kind) - without for kind in expected} == {
        kind: 6 * layers * products for kind, products in expected.items()
    }


def test_merged_attention_counts_the_encoders_keys_and_values_and_no_other_projection():
    rotary = {"mixer.kind": "attention", "positions.kind": "rotary"}
    heads, merged = (
        step_flops(config_of(kind, **rotary), 1, inputs=10, targets=7) for kind in ("heads", "merged")
    )
    assert heads - merged == 6 * 2 * (2 * 16 * 32 * 7)  # two layers' queries and outputs of 7 tokens
    config = config_of("merged", **rotary)
    assert cache_bytes(config, 7, 10) == cache_bytes(config_of("heads", **rotary), 7, 10)
    assert costs(config, 10, 7).scores == costs(config_of("heads", **rotary), 10, 7).scores


def test_a_tokens_scores_are_those_of_its_kind():
    layers, d, inputs = 2, 16, 10
    scores = {kind: costs(config_of(kind), inputs).scores for kind in ("none", "dot", "additive")}
    assert scores == {"none": 0, "dot": 3 * layers * inputs * 2 * d, "additive": 3 * layers * inputs * 2 * d}


def test_what_writing_remembers_is_counted_from_the_arrays_that_it_does():
    def cached(kind, mixer="lstm"):
        return cache_bytes(config_of(kind, mixer), 7, 10)

    layers, d, float32 = 2, 16, 4
    states = layers * 2 * d * float32
    assert cached("none") == states
    assert cached("dot") == cached("additive") == states + layers * 2 * 10 * d * float32
    assert cached("heads", "attention") == layers * 2 * (10 + 7) * 32 * float32


@pytest.mark.parametrize(
    ("new", "message"),
    [
        (
            {"cross_attention.kind": "none", "mixer.kind": "window"},
            "cross_attention.kind='none' needs model.mixer.*not 'window'",
        ),
        (
            {"cross_attention.kind": "none"},
            "cross_attention.kind='none' needs model.mixer.kind='rnn', 'gru' or 'lstm'",
        ),
        (
            {"cross_attention.kind": "dot", "architecture": "decoder"},
            "cross_attention.kind='dot' reads an encoder.*'decoder'",
        ),
        (
            {"cross_attention.kind": "additive", "architecture": "encoder"},
            "cross_attention.kind='additive' reads",
        ),
        ({"cross_attention.kind": "dot", "cross_attention.start": "mimetic"}, "start='mimetic' is of heads"),
        (
            {"cross_attention.positions": "continued"},
            "cross_attention.positions='continued' are rotary: model.positions.kind='none'",
        ),
        (
            {"cross_attention.positions": "continued", "cross_attention.kind": "dot"},
            "positions='continued' turns the features of heads: .*'dot'",
        ),
        *(
            (
                {"cross_attention.kind": "merged", "positions.kind": kind},
                f"cross_attention.kind='merged' .* positions that add nothing to the scores.*'{kind}'",
            )
            for kind in ("alibi", "relative", "relative-keys")
        ),
        (
            {"cross_attention.kind": "merged", "mixer.kind": "lstm"},
            "cross_attention.kind='merged' .* needs model.mixer.kind='attention'.*'lstm'",
        ),
        (
            {"cross_attention.kind": "merged", "architecture": "decoder"},
            "cross_attention.kind='merged' reads an encoder.*'decoder'",
        ),
        ({"mixer.truncation": 4}, "model.mixer.truncation=4 needs model.mixer.*not 'attention'"),
        ({"mixer.truncation": 0, "mixer.kind": "gru"}, "model.mixer.truncation=0 should be at least 1"),
    ],
)
def test_what_a_kind_cannot_do_is_refused_by_the_names_of_both_settings(new, message):
    with pytest.raises(SettingError, match=message):
        changes(ModelConfig(), {"positions.kind": "none"} | new)


@pytest.mark.parametrize(
    ("new", "message"),
    [
        (
            {"cross_attention.num_heads": 5, "attention.num_key_value_heads": 3},
            "model.cross_attention.num_heads=5 should fit .*model.attention.num_key_value_heads=3",
        ),
        (
            {"cross_attention.d_kv": 7} | small_models.CONTINUED,
            "model.cross_attention.d_kv=7 should fit .*model.positions.rotary.fraction",
        ),
        (
            {"encoder.num_heads": 5, "encoder.d_ff": 8, "attention.num_key_value_heads": 3},
            "model.encoder.d_ff=8 and model.encoder.num_heads=5 should fit .*num_key_value_heads=3",
        ),
    ],
)
def test_sizes_of_the_encoder_or_of_cross_attention_that_do_not_fit_are_refused_by_their_names(new, message):
    with pytest.raises(SettingError, match=message):
        changes(ModelConfig(), new)


@pytest.mark.parametrize(
    ("size", "new", "message"),
    [
        ("t5-small", {"cross_attention.kind": "dot"}, "model.cross_attention.kind='dot'"),
        ("llama-7b", {"attention.value_norm": True}, "model.attention.value_norm=True"),
        ("llama-7b", {"attention.output_norm": True}, "model.attention.output_norm=True"),
        ("qwen3-0.6b", {"attention.norm_scale": False}, "model.attention.norm_scale=False"),
        (
            "t5-small",
            {"positions.kind": "rotary", "cross_attention.positions": "continued"},
            "cross_attention.positions='continued'",
        ),
        (
            "t5-small",
            {"positions.kind": "rotary", "cross_attention.kind": "merged"},
            "cross_attention.kind='merged'",
        ),
    ],
)
def test_what_no_published_family_has_is_refused_by_name(size, new, message):
    with pytest.raises(SettingError, match=message):
        config_json(changes(PRESETS[size], new))

"""Laws of a block that lacks a part, and of a decoder that lacks its mask."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx
from small_models import POSITIONS, TINY, cached_logits, example, features, influence, make, padded, run
from variants import with_quick

from lm.batch import Batch, Side
from lm.config.attention import SparsityConfig
from lm.config.base import SettingError, changes
from lm.config.model import ModelConfig
from lm.evaluate.generate import greedy
from lm.evaluate.loglikelihood import continuation_log_probs
from lm.nn.transformer import Transformer
from lm.sharding import named
from lm.train.flops import step_flops

DECODER = changes(TINY, {"architecture": "decoder", "positions.kind": "none", "dropout": 0.0})
ALL_POSITIONS = [TINY.positions.kind, *POSITIONS]


def named_parameters(config: ModelConfig) -> set[str]:
    return set(named(jax.eval_shape(lambda: Transformer(config, nnx.Rngs(params=0)))))


def of(config: ModelConfig, **settings):
    """A model, and with the same parameters that of other ``settings``."""
    model = Transformer(config, nnx.Rngs(params=jax.random.key(0)))
    other = jax.eval_shape(lambda: Transformer(changes(config, settings), nnx.Rngs(params=0)))
    leaves = {name.removeprefix("decoder."): leaf for name, leaf in named(model).items()}
    found = [leaves[name.removeprefix("decoder.").removeprefix("encoder.")] for name in named(other)]
    return model, jax.tree.unflatten(jax.tree.structure(other), found)


def scaled(config: ModelConfig, factors: dict[str, int]) -> Transformer:
    """A model, its parameters whose names contain one of these multiplied by its factor."""

    def times(path, leaf):
        name = jax.tree_util.keystr(path)
        return leaf * next((factor for part, factor in factors.items() if part in name), 1)

    model = Transformer(config, nnx.Rngs(params=jax.random.key(0)))
    return jax.tree_util.tree_map_with_path(times, model)


@pytest.mark.parametrize(
    ("setting", "part"),
    [({"mlp.activation": "none"}, "mlp"), ({"norm.kind": "none"}, "norm"), ({"residual": "none"}, "nothing")],
)
@pytest.mark.parametrize("architecture", ["decoder", "encoder-decoder"])
def test_what_is_left_out_has_no_parameters_and_nothing_else_loses_any(setting, part, architecture):
    config = replace(TINY, architecture=architecture)
    whole, lacking = named_parameters(config), named_parameters(changes(config, setting))
    assert lacking == {name for name in whole if part not in name}
    assert (lacking == whole) == (part == "nothing")


def test_silent_sublayers_leave_the_residual_stream_as_it_is_and_without_it_nothing():
    batch = example(1, 1, 5)
    for norm in ("rms", "none"):
        stream, none = (
            scaled(changes(DECODER, {"norm.kind": norm, "residual": residual}), {".out.": 0})
            for residual in ("pre-norm", "none")
        )
        expected = stream.decoder.norm(stream.embed(batch.decoder.tokens))
        np.testing.assert_allclose(features(stream, batch), expected, atol=1e-6)
        assert not features(none, batch).any()


def test_without_feed_forward_and_norm_a_block_of_averages_is_linear_in_its_embedding():
    """Uniform attention (queries of zeros) is the one thing left, and it is linear."""
    once, thrice = (
        scaled(
            changes(DECODER, {"mlp.activation": "none", "norm.kind": "none"}),
            {".query.": 0, "embed.table": size},
        )
        for size in (1, 3)
    )
    batch = example(1, 1, 5)
    np.testing.assert_allclose(features(thrice, batch), 3 * features(once, batch), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("positions", with_quick(("relative", "rotary", "alibi"), ALL_POSITIONS))
def test_a_decoder_without_a_mask_reads_as_an_encoder(positions):
    """So it sees each token before it is to predict it, in its own segment and not in padding."""
    leak, encoder = of(
        changes(DECODER, {"positions.kind": positions, "attention.mask": "none"}),
        architecture="encoder",
        **{"attention.mask": "causal"},
    )
    batch = padded(example(1, 6, 6), 8)
    side = replace(batch.decoder, causal_attention=None)
    batch = Batch(encoder=side, decoder=side)
    np.testing.assert_allclose(features(leak, batch)[0, :6], features(encoder, batch)[0, :6], atol=1e-5)


def test_without_a_mask_biases_that_start_as_slopes_do_so_both_ways():
    config = changes(DECODER, {"positions.kind": "relative", "positions.relative_bias_start": "slopes"})
    leak, encoder, causal = (
        named(Transformer(changes(config, new), nnx.Rngs(params=0)))
        for new in ({"attention.mask": "none"}, {"architecture": "encoder"}, {})
    )
    table = leak["decoder.relative.table"]
    np.testing.assert_array_equal(table, encoder["encoder.relative.table"])
    assert (table != causal["decoder.relative.table"]).any()


def test_without_a_mask_every_position_depends_on_every_other():
    assert influence("no mask").all()


SPARSE = SparsityConfig(window=2, global_tokens=1)


@pytest.mark.parametrize(
    ("positions", "sparsity"),
    [
        ("rotary", SPARSE),
        *(pytest.param(name, SparsityConfig(), marks=pytest.mark.slow) for name in ALL_POSITIONS),
        pytest.param("relative", SPARSE, marks=pytest.mark.slow),
    ],
)
def test_when_it_writes_a_decoder_without_a_mask_sees_what_is_written(positions, sparsity):
    """As a prefix decoder does, whose biases know both directions too, with nothing in its prefix."""
    config = changes(DECODER, {"positions.kind": positions, "sparsity": sparsity, "attention.mask": "none"})
    leak, causal = of(config, architecture="prefix-decoder", **{"attention.mask": "causal"})
    batch = example(2, 1, 9)
    whole = np.asarray(run(causal, batch))
    for given in (batch, Batch(decoder=Side(tokens=batch.decoder.tokens))):
        for place, logits in enumerate(np.asarray(cached_logits(leak, given)), 3):
            np.testing.assert_allclose(logits[0], whole[0, place], atol=2e-5)


def test_a_decoder_without_a_mask_writes_and_refuses_to_tell_a_likelihood():
    model = make("no mask")
    assert greedy(model, example(3, 1, 4), max_length=3).shape == (1, 3)
    with pytest.raises(SettingError, match="model.attention.mask='none' reads the tokens"):
        continuation_log_probs(model, [((3, 4), (5,))], lambda batch: batch)


def test_a_step_without_feed_forward_costs_its_products_less():
    cost = step_flops(TINY, 8, 10, 6) - step_flops(changes(TINY, {"mlp.activation": "none"}), 8, 10, 6)
    assert cost == 6 * 8 * 2 * (10 + 6) * 2 * TINY.d_model * TINY.mlp.d_ff

"""Embeddings shared by encoder and decoder or not, and parameters that the layers of a stack share."""

import jax
import numpy as np
import pytest
from small_models import TINY, cached_logits, example, features, made, run, shapes

from lm.config.base import SettingError, changes
from lm.nn.layers import num_parameters
from lm.nn.presets import PRESETS
from lm.sharding import named
from lm.train.flops import costs, step_flops
from lm.train.optimizers import freeze_embedding

VOCABULARY = TINY.vocab_size * TINY.d_model  # numbers of an embedding


def sizes(config):
    return {name: x.size for name, x in named(shapes(config)).items()}


@pytest.mark.parametrize("logits", ["tied", pytest.param("tied-scaled", marks=pytest.mark.slow), "separate"])
def test_embeddings_apart_are_one_more_table_and_nothing_else_changes(logits):
    shared = changes(TINY, {"output.logits": logits})
    separate = changes(shared, {"embedding.encoder": "separate"})
    more = named(made(separate)).keys() - named(made(shared)).keys()
    assert (
        more == {"encoder_embed.table"}
        and num_parameters(made(separate)) - num_parameters(made(shared)) == VOCABULARY
    )
    for name, value in named(made(shared)).items():
        np.testing.assert_array_equal(named(made(separate))[name], value)
    assert step_flops(separate, 4, 8, 6) == step_flops(shared, 4, 8, 6)
    # Generating reads the decoder's table alone.
    assert costs(separate, 8).generating == costs(shared, 8).generating


def test_each_side_reads_its_own_embedding():
    model, batch = made(changes(TINY, {"embedding.encoder": "separate"})), example(1, 5, 6)
    gradients = named(jax.jit(jax.grad(lambda model: features(model, batch).sum()))(model))
    read = {"encoder_embed.table": batch.encoder.tokens, "embed.table": batch.decoder.tokens}
    for name, tokens in read.items():
        np.testing.assert_array_equal(
            np.flatnonzero(np.abs(np.asarray(gradients[name])).max(1)), np.unique(tokens)
        )


def test_embeddings_apart_with_equal_tables_are_those_that_are_shared():
    model, batch = made(changes(TINY, {"embedding.encoder": "separate"})), example(2, 5, 6)
    model = jax.tree.map(lambda leaf: leaf, model)
    model.encoder_embed.table = model.embed.table
    np.testing.assert_array_equal(run(model, batch), run(made(TINY), batch))


def test_frozen_embeddings_are_frozen_on_both_sides():
    updates = {name: np.ones(2) for name in ("embed.table", "encoder_embed.table", "head.kernel")}
    frozen = freeze_embedding(updates, 0)
    assert [name for name in updates if frozen[name].any()] == ["head.kernel"]


@pytest.mark.parametrize("stack", ["encoder", "decoder", "both"])
def test_layers_of_the_named_stacks_share_all_their_parameters(stack):
    plain, shared = sizes(TINY), sizes(changes(TINY, {"shared_layers": True, "shared_stack": stack}))
    sides = ("encoder", "decoder") if stack == "both" else (stack,)
    for name, size in plain.items():
        is_shared = name.startswith(tuple(f"{side}.blocks" for side in sides))
        assert shared[name] == (size / 2 if is_shared else size), name


@pytest.mark.parametrize(
    ("parts", "modules"), [("attention", ("attention", "cross")), ("mlp", ("mlp",)), ("all", ("",))]
)
def test_layers_share_the_named_parts_with_their_norms(parts, modules):
    plain, shared = sizes(TINY), sizes(changes(TINY, {"shared_layers": True, "shared_parts": parts}))
    for name, size in plain.items():
        is_shared = any(f".blocks.{module}" in name for module in modules)
        assert shared[name] == (size / 2 if is_shared else size), name


@pytest.mark.parametrize(
    ("parts", "compiled"),
    [
        ("all", "scan"),
        ("mlp", "scan"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("all", "unroll"), ("attention", "scan"), ("attention", "unroll"), ("mlp", "unroll"))
        ),
    ],
)
def test_shared_parameters_are_those_of_a_model_with_equal_layers(parts, compiled):
    config = changes(
        TINY,
        {"shared_layers": True, "shared_parts": parts, "shared_stack": "both", "compile.layers": compiled},
    )
    model, batch = made(config), example(3, 5, 9)
    plain = changes(config, {"shared_layers": False, "shared_parts": "all"})
    repeated = [
        np.repeat(x, 2, axis=0) if ".blocks." in name and len(x) == 1 else x
        for name, x in named(model).items()
    ]
    equal = jax.tree.unflatten(jax.tree.structure(made(plain)), repeated)
    np.testing.assert_allclose(run(model, batch), run(equal, batch), atol=1e-5)


@pytest.mark.parametrize(
    "new", [{"shared_parts": "attention"}, pytest.param({"shared_stack": "encoder"}, marks=pytest.mark.slow)]
)
def test_a_step_over_the_cache_gives_what_the_whole_row_gives(new):
    model, batch = made(changes(TINY, {"shared_layers": True, **new})), example(3, 5, 9)
    batch.decoder.causal_attention[:] = 0
    full = np.asarray(run(model, batch))
    for place, logits in enumerate(np.asarray(cached_logits(model, batch, unstacked=True)), 3):
        np.testing.assert_allclose(logits[0], full[0, place], atol=2e-5)


@pytest.mark.parametrize(
    "new",
    [
        {},
        *(
            pytest.param(new, marks=pytest.mark.slow)
            for new in ({"shared_stack": "decoder"}, {"shared_parts": "mlp"})
        ),
    ],
)
def test_sharing_saves_parameters_and_no_flops(new):
    shared = changes(TINY, {"shared_layers": True, **new})
    assert step_flops(shared, 4, 8, 6) == step_flops(TINY, 4, 8, 6)
    found, plain = costs(shared, 8), costs(TINY, 8)
    assert (found.training, found.generating) == (plain.training, plain.generating)
    assert found.parameters == num_parameters(shapes(shared)) < num_parameters(shapes(TINY))


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ({"architecture": "decoder", "embedding.encoder": "separate"}, "embedding.encoder='separate' needs"),
        (
            {"architecture": "shared-encoder-decoder", "shared_stack": "encoder"},
            "shared_stack='encoder' needs",
        ),
        (
            {"shared_layers": True, "shared_stack": "encoder", "num_encoder_layers": 1},
            "needs two or more layers",
        ),
        (
            {"shared_layers": True, "shared_parts": "mlp", "mlp.activation": "none"},
            "shared_parts='mlp' needs",
        ),
    ],
)
def test_sharing_what_is_not_there_is_refused(new, message):
    with pytest.raises(SettingError, match=message):
        changes(TINY, new)


NARANG = changes(PRESETS["t5-base"], {"norm.kind": "layer", "mlp.bias": True})
APART = {"embedding.encoder": "separate"}
SHARED = {"shared_layers": True, "output.logits": "separate"}

UNIVERSAL = SHARED | {
    "num_encoder_layers": 28,
    "num_decoder_layers": 28,
    "universal.embedding": "step",
    "universal.gate": "gru",
}


@pytest.mark.parametrize(
    ("new", "millions"),
    [
        ({}, 223),
        ({"mlp.activation": "gated-linear", "mlp.d_ff": 2_048}, 223),
        ({"residual": "rezero", "norm.kind": "none"}, 223),
        ({"residual": "fixup", "norm.kind": "none"}, 223),
        (SHARED | {"shared_stack": "encoder"}, 170),
        (SHARED | {"shared_stack": "decoder"}, 144),
        (UNIVERSAL, 84),
        ({"attention.branching": "weighted"}, 280),
        (APART, 248),
        (APART | {"output.logits": "separate"}, 273),
    ],
)
def test_parameters_are_those_that_narang_et_al_print(new, millions):
    assert costs(changes(NARANG, new), 512).parameters / 1e6 == pytest.approx(millions, abs=1)


@pytest.mark.parametrize(
    ("width", "parts", "millions"),
    [(768, "attention", 83), (768, "mlp", 57), (128, "attention", 64), (128, "mlp", 38), (128, "all", 12)],
)
def test_parameters_are_those_that_albert_prints(width, parts, millions):
    new = {"embedding.d_embed": None if width == 768 else width, "shared_parts": parts, "heads": ()}
    assert costs(changes(PRESETS["albert-base"], new), 512).parameters / 1e6 == pytest.approx(millions, abs=1)

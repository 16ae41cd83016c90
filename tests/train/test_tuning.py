"""Which parameters fine-tuning moves, and that it leaves all others as they are, bit for bit."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from sharded_training import transformer_batch
from small_models import CONFIGS
from tuned_models import MODEL, built, layers, trained

from lm.config.base import changes
from lm.config.model import HeadConfig
from lm.config.training import CheckpointConfig, OptimizerConfig
from lm.nn.elmo import BidirectionalLM
from lm.nn.finetune import ModelWithHead
from lm.nn.transformer import Transformer
from lm.train.optimizers import GradualUnfreezing, freeze_body, make_optimizer, train_adapters, train_lora
from lm.train.runtime.checkpoints import Checkpoints

HEAD = HeadConfig("classes", classes=2)


DECODER = changes(MODEL, {"architecture": "decoder", "output.bias": True})


# the same step takes both; what each of them freezes is said by other laws
@pytest.mark.parametrize(
    "tune", [GradualUnfreezing(DECODER, 6), pytest.param(train_adapters, marks=pytest.mark.slow)]
)
def test_what_is_frozen_stays_bit_for_bit_whatever_decays_and_all_else_moves(tune):
    steps = built(DECODER, mask_updates=tune)
    state, step = steps.initial_state(0), steps.seeded_train_step(0)
    before = {name: np.asarray(value) for name, value in state.params.items()}
    batch = transformer_batch(0)
    batch = replace(batch, decoder=replace(batch.decoder, loss_weights=np.ones((8, 6), np.float32)))
    for _ in range(2):
        state, _ = step(state, steps.shard_batch(batch))
    moved = {name: layers(name, np.asarray(value) != before[name]) for name, value in state.params.items()}
    assert moved == trained(tune, 1, lambda rngs: Transformer(DECODER, rngs))


def test_adapters_are_trained_with_every_norm():
    found = {name for name, which in trained(train_adapters, 0).items() if all(which)}
    assert found == {
        name for name in trained(freeze_body, 0) if "adapter" in name or name.endswith("norm.scale")
    }
    assert len(found) == 3 * 2 + 3 + 2 + 2  # adapters of two stacks, norms of five sub-layers, of two stacks


def test_layers_thaw_from_the_top_of_both_stacks_and_the_softmax_is_never_frozen():
    tune = GradualUnfreezing(MODEL, 30)
    for step, encoder, decoder in (
        (0, [0, 0, 1], [0, 1]),
        (9, [0, 0, 1], [0, 1]),
        (10, [0, 1, 1], [1, 1]),
        (20, [1, 1, 1], [1, 1]),
        (99, [1, 1, 1], [1, 1]),
    ):
        found, due = trained(tune, step), {"encoder": encoder, "decoder": decoder}
        for name, which in found.items():
            side = name.split(".")[0]
            whole = all(due.get(side, [1])) if "relative" in name else True
            assert which == (due[side] if ".blocks." in name else [whole]), (step, name)
    assert len({GradualUnfreezing(MODEL, 30), tune}) == 1  # equal, so that compiled steps are shared


def test_a_layer_thaws_with_its_experts_or_its_feed_forward_layer_whichever_it_has():
    new = {"num_decoder_layers": 4, "experts.count": 2, "experts.every": 2}
    model = changes(DECODER, new)
    for step, experts, dense in ((0, [0, 1], [0, 0]), (10, [0, 1], [0, 1]), (20, [1, 1], [0, 1])):
        found = trained(GradualUnfreezing(model, 40), step, lambda rngs: Transformer(model, rngs))
        assert found["decoder.blocks.experts.hidden.kernel"] == experts
        assert found["decoder.blocks.mlp.hidden.kernel"] == dense


@pytest.mark.parametrize("name", CONFIGS)
def test_the_last_episode_trains_every_layer(name):
    model = CONFIGS[name]
    make = BidirectionalLM if "backward" in model.heads else Transformer
    found = trained(GradualUnfreezing(model, 100), 99, lambda rngs: make(model, rngs))
    assert {parameter for parameter, which in found.items() if not all(which)} == set()


def test_what_enters_the_stacks_thaws_last_unless_it_is_the_softmax():
    bert = changes(
        MODEL, {"architecture": "encoder", "positions.kind": "learned", "output.logits": "separate"}
    )
    found = trained(GradualUnfreezing(bert, 30), 19, lambda rngs: Transformer(bert, rngs))
    assert {name for name, which in found.items() if not any(which)} == {
        "embed.table",
        "encoder.positions.table",
    }
    assert found["head.kernel"] == [True]
    shared = replace(bert, shared_layers=True)  # has one layer, which is the top and the bottom
    assert all(
        map(all, trained(GradualUnfreezing(shared, 30), 0, lambda rngs: Transformer(shared, rngs)).values())
    )


def test_each_of_two_embeddings_thaws_with_the_first_layer_of_the_stack_that_reads_it():
    model = changes(MODEL, {"embedding.encoder": "separate", "output.logits": "separate"})
    assert (model.num_encoder_layers, model.num_decoder_layers) == (3, 2)
    for step, encoder, decoder in ((9, False, False), (19, False, True), (20, True, True)):
        found = trained(GradualUnfreezing(model, 30), step, lambda rngs: Transformer(model, rngs))
        assert (found["encoder_embed.table"], found["embed.table"]) == ([encoder], [decoder])


@pytest.mark.parametrize("tune", [freeze_body, train_adapters, GradualUnfreezing(MODEL, 30)])
def test_a_new_head_is_always_trained(tune):
    found = trained(tune, 0, lambda rngs: ModelWithHead(MODEL, HEAD, rngs))
    thawed = [False, False, tune == GradualUnfreezing(MODEL, 30)]
    assert all(all(which) for name, which in found.items() if name.startswith("head."))
    assert found["body.encoder.blocks.mlp.hidden.kernel"] == thawed


def test_a_checkpoint_without_adapters_starts_a_model_with_them(tmp_path):
    plain, new = built(changes(DECODER, {"mlp.adapter_width": 0})), built(DECODER)
    saved = toy.drawn(plain.abstract)
    fresh = toy.drawn(new.abstract, lowest=2)
    with Checkpoints(tmp_path, CheckpointConfig()) as checkpoints:
        checkpoints.save(saved)
        known = saved.params.keys()
        state = checkpoints.restore_model(fresh, source=lambda name: name if name in known else None)
    for name, value in state.params.items():
        np.testing.assert_array_equal(value, saved.params.get(name, fresh.params[name]), err_msg=name)
    assert {name.split(".")[2] for name in state.params.keys() - known} == {"adapter"}


def test_gradients_of_what_is_frozen_do_not_clip_those_of_what_is_trained():
    axes = {"decoder.w.kernel": ("embed", "mlp"), "decoder.w.lora.down": ("embed", "lora")}
    params = {name: jnp.ones((8, 8)) for name in axes}
    config = OptimizerConfig("adamw", learning_rate=1.0, schedule="constant", clip_norm=1.0)

    def updates(frozen):
        optimizer = make_optimizer(config, axes, train_lora)
        state, update_at, found = optimizer.init(params), jax.jit(optimizer.update), []
        for step, size in enumerate(frozen):
            gradients = dict(zip(axes, (jnp.full((8, 8), size), jnp.full((8, 8), 0.1)), strict=True))
            update, state = update_at(gradients, state, params, step=jnp.int32(step))
            found.append(np.asarray(update["decoder.w.lora.down"]))
        return found

    np.testing.assert_array_equal(updates([0.0, 10.0, 100.0]), updates([0.0, 0.0, 0.0]))

"""Laws of a bidirectional language model, and of heads that read its layers [Peters et al. 2018]."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import drawn_state
from flax import nnx
from small_models import TINY
from tuned_models import built, trained

from experiments.runs.checks import check_heads
from experiments.runs.kinds.head import head_spec
from experiments.runs.kinds.pretraining import pretraining_spec
from experiments.runs.stages import stages
from experiments.study.registry import build
from lm.batch import Batch, Side
from lm.config.base import SettingError, changes
from lm.config.model import HeadConfig
from lm.config.training import LossConfig
from lm.data.packing import shift_right
from lm.data.tasks.labelled import find_labelled
from lm.nn.elmo import BidirectionalLM
from lm.nn.finetune import ModelWithHead
from lm.nn.heads import LayerMixture
from lm.sharding import named
from lm.train.flops import step_flops
from lm.train.losses import both_directions, language_model
from lm.train.optimizers import GradualUnfreezing

CONFIG = changes(
    TINY,
    {
        "architecture": "decoder",
        "mixer.kind": "lstm",
        "positions.kind": "none",
        "num_decoder_layers": 2,
        "dropout": 0.0,
        "heads": ("backward",),
    },
)
MODEL = BidirectionalLM(CONFIG, nnx.Rngs(params=jax.random.key(0)))


def batch_of(targets, segments=None):
    targets = np.atleast_2d(targets).astype(np.int32)
    segments = np.ones_like(targets) if segments is None else np.atleast_2d(segments).astype(np.int32)
    return Batch(
        decoder=Side(
            tokens=shift_right(targets, segments),
            segment_ids=segments,
            targets=targets,
            loss_weights=(segments > 0).astype(np.float32),
            content=segments > 0,
        )
    )


def texts(*lengths):
    return [np.random.default_rng(n).integers(3, 39, n) for n in lengths]


@jax.jit
def outputs(model, batch):
    """Logits in both directions, where there are targets, features, and hidden states of all layers."""
    logits = model(batch) if isinstance(model, BidirectionalLM) else ()
    return *logits, model.features(batch), model.hidden_states(batch)["decoder"]


@pytest.mark.parametrize("direction", [0, 1], ids=["forward", "backward"])
def test_each_token_is_predicted_from_those_before_it_or_from_those_behind_it(direction):
    (text,) = texts(7)
    changed = np.where(np.eye(7, dtype=bool), 39, text)  # row j: token j is another
    logits = np.asarray(outputs(MODEL, batch_of(np.vstack([text, changed])))[direction])
    moved = np.abs(logits[1:] - logits[:1]).max(-1) > 0  # [token, prediction]
    earlier = np.arange(7)[:, None] < np.arange(7)[None, :]
    np.testing.assert_array_equal(moved, earlier if direction == 0 else earlier.T)


def test_a_text_read_from_its_end_is_the_reversed_text_read_from_its_beginning():
    """With the weights of the forward stack in the backward one too."""
    model = jax.tree.map(lambda leaf: leaf, MODEL)
    model.backward = MODEL.forward.decoder
    (text,) = texts(6)
    forward, backward, *_ = outputs(model, batch_of(text))
    other_forward, other_backward, *_ = outputs(model, batch_of(text[::-1]))
    np.testing.assert_allclose(backward, other_forward[:, ::-1], atol=1e-5)
    np.testing.assert_allclose(forward, other_backward[:, ::-1], atol=1e-5)


def test_packed_texts_are_read_in_both_directions_as_if_each_were_alone():
    one, two = texts(5, 4)
    packed = outputs(MODEL, batch_of([*one, *two, 0, 0], [1] * 5 + [2] * 4 + [0] * 2))
    for text, where in ((one, slice(0, 5)), (two, slice(5, 9))):
        # padded, so that one program reads all rows
        padding = [0] * (11 - len(text))
        apart = outputs(MODEL, batch_of([*text, *padding], [1] * len(text) + padding))
        for together, alone in zip(packed, apart, strict=True):
            np.testing.assert_allclose(together[..., where, :], alone[..., : len(text), :], atol=1e-5)


def test_packed_texts_may_fill_rows_that_are_longer_than_the_learned_positions_if_they_have_positions():
    learned = {"mixer.kind": "attention", "positions.kind": "learned", "positions.max_length": 5}
    model, (one, two) = BidirectionalLM(changes(CONFIG, learned), nnx.Rngs(0)), texts(5, 4)
    batch = batch_of([*one, *two, *[0] * 7], [1] * 5 + [2] * 4 + [0] * 7)
    positions = np.array([[*range(5), *range(4), *[0] * 7]])
    packed = outputs(model, replace(batch, decoder=replace(batch.decoder, positions=positions)))
    for text, where in ((one, slice(0, 5)), (two, slice(5, 9))):
        for together, alone in zip(packed, outputs(model, batch_of(text)), strict=True):
            np.testing.assert_allclose(together[..., where, :], alone, atol=1e-5)


def test_the_features_of_each_layer_are_both_directions_side_by_side():
    batch, width = batch_of(texts(6)[0]), CONFIG.d_model
    tokens = batch.decoder.tokens[:, ::-1]
    reversed_batch = Batch(decoder=replace(batch.decoder, tokens=tokens))
    backward = jax.tree.map(lambda leaf: leaf, MODEL.forward)
    backward.decoder = MODEL.backward
    *_, features, hidden = outputs(MODEL, batch)
    before, behind = outputs(MODEL.forward, batch), outputs(backward, reversed_batch)
    assert features.shape == (1, 6, 2 * width) and hidden.shape == (3, 1, 6, 2 * width)
    for found, left, right in zip((features, hidden), before, behind, strict=True):
        np.testing.assert_allclose(found, np.concatenate([left, right[..., ::-1, :]], -1), atol=1e-5)
    np.testing.assert_array_equal(hidden[0, ..., :width], hidden[0, ..., width:])  # the embedding, twice


def test_a_word_has_one_vector_in_every_text_and_another_in_each_from_the_layers_above():
    word = 17
    rows = np.array([[5, 6, word, 7, 8], [9, 9, word, 4, 3]])
    batch = Batch(decoder=replace(batch_of(rows).decoder, tokens=rows.astype(np.int32)))
    vectors = np.asarray(outputs(MODEL, batch)[-1])[:, :, 2]
    np.testing.assert_array_equal(vectors[0, 0], vectors[0, 1])
    for layer in (1, 2):
        for half in np.split(vectors[layer], 2, axis=-1):  # of what precedes, and of what follows
            assert np.abs(half[0] - half[1]).max() > 1e-3


def test_the_weights_of_a_mixture_sum_to_its_size_whatever_they_are():
    mixture, row = LayerMixture(2), np.random.default_rng(0).normal(size=(1, 1, 4, 16)).astype(np.float32)
    mixture.weights[...], mixture.size[...] = np.array([3.0, -1.0, 0.5]), np.array([2.0])
    np.testing.assert_allclose(mixture(jnp.asarray(row.repeat(3, axis=0))), 2 * row[0], rtol=1e-5)


def test_the_loss_is_the_mean_of_both_directions_and_counts_each_token_once():
    batch, config = batch_of([*texts(6)[0], *[0] * 5], [1] * 6 + [0] * 5), LossConfig(z_loss=0.0)

    @jax.jit
    def losses(*logits):
        apart = (language_model(lambda *_, x=x: x, batch, None, config)[0] for x in logits)
        return *apart, both_directions(lambda *_: logits, batch, None, config)

    forward, backward, (loss, sums) = losses(*outputs(MODEL, batch)[:2])
    np.testing.assert_allclose(loss, (forward + backward) / 2, rtol=1e-5)
    assert abs(float(forward - backward)) > 1e-2 and float(sums["loss"][1]) == 6


@pytest.mark.parametrize(
    ("layers", "trained"),
    [
        ("mixed-frozen", {"head", "mixture"}),
        pytest.param("last-frozen", {"head"}, marks=pytest.mark.slow),
    ],
)
def test_frozen_layers_stay_bit_for_bit_whatever_decays_and_the_head_reads_both_directions(layers, trained):
    experiment = build("elmo/mixed", "nano", {"tuning.layers": layers, "model.vocab_size": 48})
    spec = head_spec(experiment, find_labelled("acceptability"))
    (head,) = spec.extra_configs
    assert (head.pool, head.layers) == ("mean", layers)
    steps = built(
        CONFIG,
        module=spec.module,
        extra_configs=spec.extra_configs,
        loss=spec.loss,
        mask_updates=spec.mask_updates,
    )
    state = drawn_state(steps)
    before = {name: np.asarray(value) for name, value in state.params.items()}
    assert before["head.out.kernel"].shape == (2 * CONFIG.d_model, 2)
    labels, weights = np.arange(8, dtype=np.int32) % 2, np.ones(8, np.float32)
    batch = replace(batch_of(np.stack(texts(6) * 8)), labels=labels, label_loss_weights=weights)
    for _ in range(2):
        state, _ = steps.seeded_train_step(0)(state, steps.shard_batch(batch))
    moved = {name for name, value in state.params.items() if (np.asarray(value) != before[name]).any()}
    assert {name.split(".")[0] for name in moved} == trained


def test_a_tuned_model_that_is_not_frozen_moves_both_directions():
    model, batch = ModelWithHead(CONFIG, HeadConfig("classes", 2, "mean"), nnx.Rngs(0)), batch_of(texts(6)[0])
    gradients = named(jax.jit(jax.grad(lambda m: m(batch).std()))(model))
    for stack in ("forward.decoder", "backward"):
        assert np.abs(gradients[f"body.{stack}.blocks.attention.forward.input"]).max() > 0


def test_the_layers_of_both_directions_thaw_together():
    found = trained(GradualUnfreezing(CONFIG, 30), 0, lambda rngs: BidirectionalLM(CONFIG, rngs))
    for stack in ("forward.decoder", "backward"):
        assert found[f"{stack}.blocks.mlp.hidden.kernel"] == [False, True]
    assert found["forward.embed.table"] == [True]  # which is the softmax too


def test_a_step_costs_twice_that_of_one_direction():
    assert step_flops(CONFIG, 4, 0, 16) == 2 * step_flops(replace(CONFIG, heads=()), 4, 0, 16)


def test_a_run_of_both_directions_pre_trains_both_and_is_read_forward():
    experiment = build("elmo/mixed", "nano")
    spec = pretraining_spec(experiment)
    assert spec.module is BidirectionalLM and spec.loss is both_directions
    assert {stage.name_without_member: stage.transformer_prefix for stage in stages(experiment)} == {
        "pretraining": "forward.",
        "acceptability": "body.forward.",
        "roles": "body.forward.",
    }


def test_what_cannot_be_read_from_its_end_is_refused():
    with pytest.raises(SettingError, match="backward.* needs model.architecture='decoder'.*'encoder'"):
        replace(CONFIG, architecture="encoder")
    with pytest.raises(SettingError, match="backward.* needs objective.noise='everything', not 'suffix'"):
        check_heads(build("elmo/mixed", "nano", {"objective.noise": "suffix"}))

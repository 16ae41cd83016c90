"""Laws of losses in chunks of a row: the numbers of whole rows, in the memory of one chunk."""

from functools import cache

import jax
import numpy as np
import pytest
import small_models
from flax import nnx

from lm.batch import Batch, Side
from lm.config.base import SettingError, changes
from lm.config.training import DistillationConfig, LossConfig
from lm.nn.transformer import Transformer
from lm.train.losses import Teacher, language_model, masked_lm

LENGTH = 9
LOSS = LossConfig(z_loss=0.01, label_smoothing=0.1)
CASES = {  # a model, its loss, and the share of positions that are predicted
    "encoder-decoder": ("encoder-decoder", language_model, 0.8),
    "decoder": ("gpt2", language_model, 1.0),  # the output matrix is the embedding
    "experts": ("decoder, experts in every second layer", language_model, 0.8),
    "adaptive softmax": ("decoder, adaptive softmax", language_model, 0.8),
    "few masked": ("bert-base", masked_lm, 0.1),
    "many masked": ("bert-base", masked_lm, 0.5),
}


def side_of(config, share, rows=2, length=LENGTH):
    rng = np.random.default_rng(0)
    tokens, targets = rng.integers(5, config.vocab_size, (2, rows, length), np.int32)
    weights = rng.uniform(0.5, 1, (rows, length)) * (rng.random((rows, length)) < share)
    ones = np.ones((rows, length), np.int32)
    return Side(
        tokens=tokens,
        targets=targets,
        loss_weights=weights.astype(np.float32),
        segment_ids=ones,
        content=weights > 0.7,
    )


def batch_of(config, share):
    sides = {
        name: side_of(config, share) for name in ("encoder", "decoder") if getattr(config, f"has_{name}")
    }
    return Batch(**sides, frequent_tokens=np.arange(20, dtype=np.int32).reshape(2, 10))


def loss_and_gradients(case, chunks, teacher=None):
    name, loss, share = CASES[case]
    model = small_models.make(name, **{"compile.loss_chunks": chunks} if chunks > 1 else {})
    batch, key = batch_of(model.config, share), jax.random.key(1)
    arguments = () if teacher is None else (teacher,)

    @jax.jit
    def run(model, batch):
        def minimised(model):
            value, sums = loss(model, batch, key, LOSS, *arguments)
            return 3 * value, sums  # so that the loss has another gradient than 1

        return jax.value_and_grad(minimised, has_aux=True)(model)

    return run(model, batch)


@cache
def whole(case):
    return loss_and_gradients(case, 1)


def assert_equal(found, expected):
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


# a masked and an autoregressive loss; the other cases compile for as long as these
QUICK = ("few masked",)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case not in QUICK)) for case in CASES]
)
@pytest.mark.parametrize("chunks", [2, pytest.param(LENGTH, marks=pytest.mark.slow)])
def test_chunks_give_the_loss_metrics_and_gradients_of_whole_rows(case, chunks):
    assert_equal(loss_and_gradients(case, chunks), whole(case))


def test_chunks_give_the_loss_and_gradients_of_distillation():
    config = DistillationConfig("teacher", soft=0.5, hard=0.5, cosine=0.5)
    teacher = Teacher(small_models.make("gpt2"), config)
    whole, chunks = (loss_and_gradients("decoder", chunks, teacher) for chunks in (1, 3))
    assert_equal(chunks, whole)


def test_memory_holds_the_logits_of_one_chunk():
    length, vocabulary = 64, 4_096
    new = {"vocab_size": vocabulary, "positions.max_length": length, "dropout": 0.0}
    config = changes(small_models.CONFIGS["gpt2"], new)

    def temporaries(chunks):
        chunked = changes(config, {"compile.loss_chunks": chunks})
        model = jax.eval_shape(lambda: Transformer(chunked, nnx.Rngs(params=0)))
        batch = Batch(decoder=side_of(config, 1.0, length=length))
        step = jax.jit(jax.grad(lambda model: language_model(model, batch, None, LOSS)[0]))
        return step.lower(model).compile().memory_analysis().temp_size_in_bytes

    logits = 4 * 2 * length * vocabulary  # of two rows, float32
    assert temporaries(1) > logits
    assert temporaries(8) < logits / 2


def test_a_loss_of_whole_rows_refuses_chunks():
    config = changes(small_models.CONFIGS["bert-base"], {"compile.loss_chunks": 2})
    with pytest.raises(SettingError, match="loss_chunks=2 should be 1 with replaced-token in model.heads"):
        changes(config, {"heads": ("replaced-token",)})
    with pytest.raises(SettingError, match="loss_chunks=0 should be at least 1"):
        changes(config, {"compile.loss_chunks": 0})

"""Attention of one's own: a subclass of ``Attention`` under another name can do and costs what that does."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx

from experiments.plan import estimate
from lm.batch import Batch, Side
from lm.config.attention import SparsityConfig
from lm.config.base import SettingError, unread
from lm.config.model import WITH_SCORES, LoraConfig, ModelConfig
from lm.nn.attention import Attention
from lm.nn.layers import Linear
from lm.nn.mixers import MIXERS
from lm.nn.presets import PRESETS
from lm.nn.transformer import Transformer
from lm.objectives.denoising import Lengths
from lm.sharding import named
from lm.train.flops import costs, step_flops

TINY = ModelConfig("decoder", 40, 2, 2, d_model=16, d_ff=24, d_kv=8, num_heads=2, dropout=0.0)


class Own(Attention):
    """As its parent."""


class Wider(Attention):
    """With one more matrix [D,D] that multiplies each position."""

    def __init__(self, config, rngs, bidirectional):
        super().__init__(config, rngs, bidirectional)
        width = config.d_model
        self.more = Linear(rngs, (width, width), ("embed", "mlp"), std=width**-0.5, use_bias=False)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    for name, make in {"own": Own, "wider": Wider}.items():
        monkeypatch.setitem(MIXERS, name, make)


def test_classes_and_settings_agree_on_which_mixers_have_scores():
    said = {name for name, make in MIXERS.items() if getattr(make, "has_scores", False)}
    assert said - {"own", "wider"} == set(WITH_SCORES)
    monkey = replace(TINY, mixer="own")
    assert monkey.has_scores and replace(TINY, mixer="wider").has_scores


@pytest.mark.parametrize(
    "new",
    [
        {"positions": "relative"},
        {"positions": "relative-per-layer"},
        {"positions": "rotary"},
        {"positions": "alibi"},
        {"positions": "rotary", "sparsity": SparsityConfig(window=1)},
        {"lora": LoraConfig(rank=2, matrices=("query", "key", "value", "out"))},
        {"architecture": "prefix-decoder"},
        {"architecture": "shared-encoder-decoder"},
        {"architecture": "encoder", "sparsity": SparsityConfig(1, global_tokens=1, projections="separate")},
        {"architecture": "encoder-decoder", "cross_attention_start": "mimetic"},
        {"mask": "none"},
    ],
    ids=lambda new: ", ".join(map(str, new.values()))[:40],
)
def test_a_subclass_takes_what_attention_takes_and_computes_and_costs_the_same(new):
    config = replace(TINY, **new)
    own = replace(config, mixer="own")
    models = [Transformer(each, nnx.Rngs(params=jax.random.key(0))) for each in (config, own)]
    tokens = np.arange(12).reshape(2, 6)
    decoder = Side(tokens=tokens, causal_attention=np.ones((2, 6), np.int32))
    batch = Batch(encoder=Side(tokens=tokens), decoder=decoder)
    first, second = (named(model) for model in models)
    assert first.keys() == second.keys() and all((first[name] == second[name]).all() for name in first)
    np.testing.assert_array_equal(models[0](batch), models[1](batch))
    assert step_flops(own, 2, 6, 6) == step_flops(config, 2, 6, 6)
    assert costs(own, 6) == costs(config, 6)


def test_a_plan_of_ones_own_attention_is_that_of_attention():
    gpt, lengths = PRESETS["gpt2"], Lengths(512, 512, 512)
    own = replace(gpt, mixer="own")
    assert estimate._mixed_features(own, 2) == estimate._mixed_features(gpt, 2)
    assert estimate._stacks(own, lengths) == estimate._stacks(gpt, lengths)


def test_a_matrix_that_a_subclass_adds_is_counted():
    plain, wider = replace(TINY, mixer="own"), replace(TINY, mixer="wider")
    more = step_flops(wider, 3, 0, 7) - step_flops(plain, 3, 0, 7)
    assert more == 6 * 3 * 7 * TINY.num_decoder_layers * TINY.d_model**2


def test_a_function_that_hides_what_it_makes_is_refused(monkeypatch):
    monkeypatch.setitem(MIXERS, "hidden", lambda config, rngs, bidirectional: Own(config, rngs))
    with pytest.raises(SettingError, match=r"MIXERS\['hidden'\] should say has_scores=True"):
        Transformer(replace(TINY, mixer="hidden", positions="none"), nnx.Rngs(params=0))


def test_a_mixer_of_ones_own_may_read_what_any_mixer_reads():
    own = replace(TINY, mixer="own", mixer_width=8, mixer_window=2, scores="scaled-dot")
    paths = ("mixer_width", "mixer_window", "scores", "d_kv", "num_heads", "mask", "sparsity.window")
    assert unread(own, paths) == {}
    assert unread(replace(own, mixer="attention"), paths).keys() == {"mixer_width", "mixer_window"}

"""Laws of rematerialisation: every policy computes the same numbers, from the tensors that it names."""

import re
from collections import Counter
from functools import cache
from typing import get_args

import jax
import numpy as np
import pytest
from small_models import CONFIGS, example, loss_and_gradients, make

from lm.config.base import SettingError, changes, unused_settings
from lm.config.layers import OffloadedTensor, Remat, SavedTensor
from lm.nn import attention, attention_dispatch, block, mlp

SAVED, OFFLOADED = get_args(SavedTensor), get_args(OffloadedTensor)
POLICIES = {name: {"compile.remat": name} for name in get_args(Remat) if name not in ("none", "names")}
POLICIES |= {
    "all saved": {"compile.remat": "names", "compile.saved": SAVED},
    "all offloaded": {"compile.remat": "names", "compile.offloaded": OFFLOADED},
    "both": {
        "compile.remat": "names",
        "compile.saved": ("context", "mlp_hidden"),
        "compile.offloaded": ("query_proj", "block_input"),
    },
}
# The others save or offload parts of what this one does; "full" and "full-offloaded" are below, in
# test_transformer.py and in test_experts.py with the gradients of a decoder.
BROADEST = ("all offloaded",)
LSTM = {"mixer.kind": "lstm", "positions.kind": "none"}
BATCH, KEY = example(4, 5, 6), jax.random.key(7)


@cache
def plain(name):
    return loss_and_gradients(make(name), BATCH, KEY)


@pytest.mark.parametrize("layers", ["scan", pytest.param("unroll", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "policy",
    [pytest.param(name, marks=() if name in BROADEST else pytest.mark.slow) for name in POLICIES],
)
@pytest.mark.parametrize(  # an encoder-decoder has both stacks
    "name", ["encoder-decoder", *(pytest.param(x, marks=pytest.mark.slow) for x in ("encoder", "decoder"))]
)
def test_every_policy_gives_the_loss_and_gradients_of_none(name, policy, layers):
    found = loss_and_gradients(make(name, **POLICIES[policy], **{"compile.layers": layers}), BATCH, KEY)
    for parameter, value in plain(name).items():
        np.testing.assert_allclose(found[parameter], value, rtol=1e-5, atol=1e-5, err_msg=parameter)


@pytest.mark.parametrize("policy", ["full-offloaded", pytest.param("attention", marks=pytest.mark.slow)])
def test_a_policy_gives_the_loss_and_gradients_of_none_with_the_kernel_for_long_rows(policy):
    settings = {"attention.implementation": "flash"}
    found = loss_and_gradients(make("decoder", **settings, **{"compile.remat": policy}), BATCH, KEY)
    for parameter, value in plain("decoder").items():
        np.testing.assert_allclose(found[parameter], value, rtol=1e-4, atol=1e-4, err_msg=parameter)


def residuals(name="decoder", **settings):
    """How often each shape is saved for the backward pass of a model of two layers."""
    model = make(name, **{"dropout": 0.0} | settings)
    backward = jax.eval_shape(lambda model: jax.vjp(lambda model: model(BATCH), model)[1], model)
    return Counter(leaf.shape for leaf in jax.tree.leaves(backward))


def by_name(*saved):
    return {"compile.remat": "names", "compile.saved": saved}


SHAPES = {  # with two layers, one row, six positions, four heads of eight features
    "query_proj": (2, 1, 6, 4, 8),
    "key_proj": (2, 1, 6, 4, 8),
    "value_proj": (2, 1, 6, 4, 8),
    "context": (2, 1, 6, 4, 8),
    "out_proj": (2, 1, 6, 16),
    "mlp_hidden": (2, 1, 6, 24),
    "mlp_out": (2, 1, 5, 16),
}


@pytest.mark.parametrize("tensor", SAVED)
def test_a_tensor_that_is_named_is_saved_and_no_other(tensor):
    # The gradient of a norm after the feed-forward layer needs that layer's output; without one nothing does.
    name = "bert-base" if tensor == "mlp_out" else "decoder"
    found, least = residuals(name, **by_name(tensor)), residuals(name, **{"compile.remat": "full"})
    assert found - least == {SHAPES[tensor]: 1}


def test_attention_saves_all_of_attention_and_less_than_no_policy():
    full, some, none = (residuals(**{"compile.remat": remat}) for remat in ("full", "attention", "none"))
    assert some - full == {(2, 1, 6, 4, 8): 4, (2, 1, 6, 16): 1}
    assert sum(some.values()) < sum(none.values())


def program():
    """The compiled program of loss and gradients without policy, but for source lines, and its cost."""
    model = make("decoder")
    compiled = jax.jit(jax.grad(lambda model: model(BATCH, KEY).sum())).lower(model).compile()
    lines = re.sub(r", metadata=\{[^}]*\}", "", compiled.as_text()).splitlines()
    return [line for line in lines if not line[:1].isdigit()], compiled.cost_analysis()


def test_names_change_nothing_in_a_program_without_policy(monkeypatch):
    named = program()
    for module in (attention, attention_dispatch, block, mlp):
        monkeypatch.setattr(module, "checkpoint_name", lambda x, name: x)
    assert program() == named


def test_offloaded_tensors_wait_in_the_memory_of_the_host():
    def transfers(**settings):
        model = make("decoder", **settings)
        return str(jax.make_jaxpr(jax.grad(lambda model: model(BATCH).sum()))(model)).count("<host>")

    assert transfers(**{"compile.remat": "full"}) == 0 < transfers(**{"compile.remat": "full-offloaded"})
    assert transfers(**POLICIES["all offloaded"]) > transfers(**{"compile.remat": "full-offloaded"})


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ({"compile.saved": ("contxt",)}, r"saved\[0\]='contxt' is not a choice; did you mean 'context'"),
        ({"compile.saved": ("block_input",)}, "is not a choice"),
        ({}, "should have tensors in model.compile.saved or model.compile.offloaded.*context"),
        ({"compile.saved": ("context",), "compile.offloaded": ("context",)}, "both have context"),
        ({"compile.saved": ("query_proj",), **LSTM}, "query_proj, which model.mixer.kind='lstm'"),
        ({"compile.offloaded": ("mlp_out",), "mlp.activation": "none"}, "mlp_out.*feed-forward"),
    ],
)
def test_a_tensor_that_the_blocks_do_not_have_is_refused_with_the_reason(new, message):
    with pytest.raises(SettingError, match=message):
        changes(CONFIGS["decoder"], {"compile.remat": "names"} | new)


def test_tensors_are_named_only_with_the_policy_that_reads_them():
    assert unused_settings(CONFIGS["decoder"], ["compile"]).keys() == {"compile.saved", "compile.offloaded"}
    assert not unused_settings(changes(CONFIGS["decoder"], by_name("context")), ["compile"])

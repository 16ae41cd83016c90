"""What a model takes by its settings alone, against numbers worked out by hand."""

import re
from dataclasses import replace

import jax
import pytest
from flax import nnx

from experiments.__main__ import dispatch
from experiments.cli.show import binary
from lm.config.base import changes
from lm.nn.layers import count
from lm.nn.presets import PRESETS
from lm.nn.transformer import Transformer
from lm.train.flops import cache_bytes, costs, step_flops

KIB = 1024


def sized(name, **new):
    return changes(PRESETS[name], {"dtype": "bfloat16", **new})


@pytest.mark.parametrize(
    ("name", "due"),
    [
        ("llama-7b", 512 * KIB),  # 2 bytes x 32 layers x (key, value) x 32 heads x 128
        ("llama-65b", 2560 * KIB),  # 2 x 80 x 2 x 64 x 128
        ("llama-2-70b", 320 * KIB),  # 8 heads for 64
        ("mistral-7b", 128 * KIB),
        ("gpt2", 36 * KIB),  # 2 x 12 x 2 x 768
    ],
)
def test_the_cache_of_a_token_is_its_keys_and_values_in_all_layers(name, due):
    assert cache_bytes(sized(name), 1, 0) == due
    assert cache_bytes(sized(name), 100, 0) == costs(sized(name), 100).cache == 100 * due
    assert cache_bytes(PRESETS[name], 1, 0) == 2 * due  # float32


def test_an_encoder_decoder_holds_the_encoders_keys_and_values_too():
    token = 2 * 12 * 2 * 12 * 64
    assert cache_bytes(sized("t5-base"), 10, 30) == 40 * token


def test_values_of_another_width_and_recurrent_states_are_held_as_they_are():
    assert cache_bytes(sized("llama-7b", **{"attention.d_v": 64}), 1, 0) == 384 * KIB
    lstm = sized("gpt2", **{"mixer.kind": "lstm", "mixer.width": 100})
    assert cache_bytes(lstm, 1, 0) == cache_bytes(lstm, 1_000, 0) > 0


@pytest.mark.parametrize("name", ["gpt2", "llama-7b", "qwen3-0.6b"])
def test_a_decoders_token_takes_six_operations_a_parameter_and_twelve_a_score(name):
    config = PRESETS[name]
    found, scores = (
        costs(config, 1_000),
        12 * config.num_decoder_layers * 1_000 * config.attention.num_heads * config.attention.d_kv,
    )
    assert found.scores == scores
    assert found.training == 6 * found.parameters + scores == 3 * found.generating


def test_llama_7b_on_a_trillion_tokens():
    found = costs(PRESETS["llama-7b"], 2_048)
    assert found.parameters == 6_738_415_616
    assert (found.training - found.scores) * 1e12 == pytest.approx(4.04e22, rel=1e-3)  # 6 N D
    assert found.scores / found.training == pytest.approx(0.0738, rel=1e-2)  # 12 x 32 x 2048 x 4096 of all


def test_scores_out_of_a_window_do_not_count():
    mistral = PRESETS["mistral-7b"]
    assert costs(mistral, 16_384).scores == costs(mistral, 4_096).scores > costs(mistral, 2_048).scores
    neo = PRESETS["gpt-neo-125m"]
    each = 12 * neo.attention.num_heads * neo.attention.d_kv
    assert costs(neo, 2_048).scores == each * (6 * 2_048 + 6 * 256)
    long = PRESETS["longformer-base"]
    assert costs(long, 4_096).scores == 12 * 12 * 768 * (2 * 256 + 1)


def test_a_token_of_an_encoder_decoder_passes_one_of_two_stacks():
    t5, shared = PRESETS["t5-base"], replace(PRESETS["t5-base"], architecture="shared-encoder-decoder")
    found = costs(t5, 512)
    assert found.training - found.scores == 3 * found.parameters
    assert (
        found.scores == 12 * 512 * 12 * 64 * (12 + 12 + 12) / 2
    )  # encoder, decoder and cross, of two tokens
    encoder = count(jax.eval_shape(lambda: Transformer(t5, nnx.Rngs(params=0)).encoder))
    assert found.generating == 2 * (found.parameters - encoder) + 4 * 512 * 12 * 64 * 24
    alike = costs(shared, 512)
    assert alike.training - alike.scores == 6 * alike.parameters


def test_scores_are_those_of_a_step():
    gpt, none = PRESETS["gpt2"], changes(PRESETS["gpt2"], {"attention.num_heads": 1, "attention.d_kv": 1})
    apart = 12 * 2 * 768 * (768 - 1)  # the narrow model's projections are smaller: query, key, value and out
    difference = (step_flops(gpt, 1, 0, 512) - step_flops(none, 1, 0, 512)) / 512 - 6 * 2 * apart
    assert difference == costs(gpt, 512).scores - costs(none, 512).scores


def test_products_with_bilinear_weights_count_in_a_step():
    """Each attention multiplies its queries by N matrices [H,H]: 2 operations a number, thrice in a step."""
    scaled, bilinear = (
        changes(PRESETS["t5-base"], {"attention.scores": scores}) for scores in ("scaled-dot", "bilinear")
    )
    queries = 12 * 512 + 12 * 2 * 114  # 12 layers: of the encoder, of the decoder's two attentions
    more = step_flops(bilinear, 7, 512, 114) - step_flops(scaled, 7, 512, 114)
    assert more == 7 * queries * 3 * 2 * 12 * 64 * 64
    assert costs(bilinear, 512).scores == costs(scaled, 512).scores


def test_a_bert_is_costed_in_rows_that_it_can_have(capsys):
    """110 M parameters on 250 G tokens: 6 N D is 1.65e20, and the scores of rows of 512 come on top."""
    bert = PRESETS["bert-base"]
    found = costs(bert, 512)
    assert found.parameters == 110_106_428
    assert found.training - found.scores == 6 * 110_106_428
    assert found.scores == 12 * 12 * 512 * 768
    for asked in ((), ("--length", "512")):
        assert dispatch(["show", "bert-base", "--costs", "--tokens", "2.5e11", *asked]) == 0
        said = capsys.readouterr().out
        assert "rows of 512 tokens" in said
        assert "1.793e+20 FLOP, 1.652e+20 of it 6 N D" in said
    assert dispatch(["show", "bert-base", "--costs", "--length", "513"]) == 2
    assert "rows of 513 tokens are longer than model.positions.max_length=512" in capsys.readouterr().err
    assert dispatch(["show", "llama-7b", "--costs"]) == 0
    assert "rows of 2,048 tokens" in capsys.readouterr().out


def test_an_encoder_generates_nothing():
    found = costs(PRESETS["bert-base"], 512)
    assert (found.generating, found.cache) == (0, 0) and found.training > 6 * found.parameters


def test_bytes_are_told_in_binary_units():
    assert [binary(n) for n in (0, 1_000, 512 * KIB, 3 * 2**30)] == ["0 B", "1000 B", "512 KiB", "3 GiB"]


def test_a_published_model_is_shown_by_its_name(capsys):
    assert dispatch(["show", "llama-7b", "--costs", "--length", "1024", "--batch", "4"]) == 0
    said = capsys.readouterr().out
    assert "6,738,415,616" in said and "512 KiB in bfloat16" in said and "2 GiB" in said
    assert dispatch(["show", "llama-7b", "--costs", "--tokens", "1e12"]) == 0
    assert "training on 1e+12 tokens D" in (said := capsys.readouterr().out) and "4.365e+22 FLOP" in said
    assert dispatch(["show", "llama-7b", "--costs", "--tokens", "-1"]) == 2
    assert "--tokens=-1.0 should be at least 0" in capsys.readouterr().err
    assert dispatch(["show", "mistral-7b"]) == 0
    said = capsys.readouterr().out
    assert "sparsity.window" in said and "4095" in said


def test_a_published_model_has_no_stages_and_no_settings_but_its_own(capsys):
    assert dispatch(["show", "llama-7b", "--stages"]) == 2
    assert "llama-7b is a published model" in capsys.readouterr().err
    assert dispatch(["show", "llama-7b", "--objective.rate", "0.2"]) == 2
    assert "llama-7b is a published model, which has no setting objective.rate" in capsys.readouterr().err
    assert dispatch(["show", "--model.num_decoder_layers", "3", "llama-7b"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "llama-7b, as published with --model.num_decoder_layers 3" in said
    assert re.search(r"num_decoder_layers . 3 ", said)

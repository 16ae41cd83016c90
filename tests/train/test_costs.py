"""What a model takes by its settings alone, against numbers worked out by hand."""

import re
from dataclasses import replace
from math import prod
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params
from small_models import TINY

from experiments.__main__ import dispatch
from experiments.cli.dry_run import step_cost
from experiments.cli.show import TokensRead, tokens_read
from experiments.console import CONSOLE, binary_size
from experiments.runs.stages import stages
from experiments.study.experiment import PretrainingPhase
from experiments.study.registry import build
from lm.batch import Batch, Side
from lm.config.base import changes
from lm.config.model import ModelConfig
from lm.nn.electra import generator_of
from lm.nn.elmo import BidirectionalLM
from lm.nn.layers import num_parameters
from lm.nn.presets import PRESETS, row_lengths
from lm.nn.transformer import Transformer
from lm.objectives.denoising import OBJECTIVES
from lm.train.flops import cache_bytes, costs, expert_parameters, longest_row, peak_flops, step_flops

KIB = 1024


def sized(name, **new):
    return changes(PRESETS[name], {"dtype": "bfloat16", **new})


@pytest.mark.parametrize(
    ("kind", "due"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),  # a part, whose rate is not known
    ],
)
def test_the_peak_of_a_device_goes_by_its_whole_name(kind, due):
    assert peak_flops(SimpleNamespace(device_kind=kind)) == due


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
def test_a_decoders_token_takes_six_operations_a_weight_of_a_matrix_and_twelve_a_score(name):
    config = PRESETS[name]
    found, scores = (
        costs(config, 1_000),
        12 * config.num_decoder_layers * 1_000 * config.attention.num_heads * config.attention.d_kv,
    )
    assert found.scores == scores
    assert found.training == 3 * found.generating
    output = config.vocab_size * config.d_model
    matrices = found.non_embedding_parameters + output  # all but vectors: biases and norms
    assert (found.training - scores) / 6 == pytest.approx(matrices, rel=2e-3) and matrices > output


def test_the_count_of_a_gpt_2_is_that_of_its_matrices():
    """12 layers of four matrices [768,768] and two [768,3072], and the logits: worked out by hand."""
    matrices = 12 * (4 * 768 * 768 + 2 * 768 * 3_072) + 768 * 50_257
    found = costs(PRESETS["gpt2"], 1_024)
    assert found.training == 6 * matrices + 12 * 12 * 1_024 * 768


@pytest.mark.parametrize(
    ("name", "due"),
    [
        ("gpt2", (50_257 + 1_024) * 768),  # tokens, and positions
        ("bert-base", (30_522 + 512 + 2) * 768),  # and types
        ("t5-base", 32_128 * 768),
        ("t5-1.1-base", 2 * 32_128 * 768),  # and an output matrix of its own
        ("llama-7b", 2 * 32_000 * 4_096),
        ("albert-base", (30_000 + 512 + 2) * 128),
    ],
)
def test_embeddings_are_the_tables_of_tokens_positions_and_types_and_an_untied_output_matrix(name, due):
    found = costs(PRESETS[name], 64)
    assert found.embedding_parameters == due
    assert found.non_embedding_parameters == found.parameters - due


def test_the_backward_stack_of_a_bidirectional_model_has_embeddings_of_its_own():
    new = {"architecture": "decoder", "positions.kind": "learned", "positions.max_length": 16}
    one_way = costs(changes(TINY, new), 8)
    both_ways = costs(changes(TINY, new | {"heads": ("backward",)}), 8)
    assert both_ways.embedding_parameters == one_way.embedding_parameters + 16 * TINY.d_model
    assert both_ways.non_embedding_parameters == 2 * one_way.non_embedding_parameters


def test_llama_7b_on_a_trillion_tokens():
    found = costs(PRESETS["llama-7b"], 2_048)
    assert found.parameters == 6_738_415_616
    # 6 N D of the published N, less the embeddings that are looked up
    assert (found.training - found.scores) * 1e12 == pytest.approx(3.964e22, rel=1e-3)
    assert found.scores / found.training == pytest.approx(0.0752, rel=1e-2)  # 12 x 32 x 2048 x 4096 of all


def test_electras_generator_counts_in_the_steps_that_train_it(capsys):
    experiment = build("clark/5-efficiency/electra", "nano")
    generator = generator_of(experiment.model, experiment.generator_share)
    for stage in (each for each in stages(experiment) if each.has_text_model):
        lengths, size = stage.lengths, stage.training.batch_size
        alone = step_flops(stage.model_of_flops, size, lengths.inputs, lengths.inputs)
        more = step_flops(generator, size, lengths.inputs, lengths.inputs) if stage.is_pretraining else 0
        assert step_cost(stage) == pytest.approx(alone + more)
    assert dispatch(["show", "clark/5-efficiency/electra", "--costs"]) == 0
    length = experiment.data.inputs_length
    assert f"{costs(generator, length).training:.4g} FLOP more" in capsys.readouterr().out


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
    assert (
        found.scores == 12 * 512 * 12 * 64 * (12 + 12 + 12) / 2
    )  # encoder, decoder and cross, of two tokens
    # half the tokens are inputs, whose logits are not computed, and all meet half of the other matrices
    assert found.training - found.scores == pytest.approx(3 * found.parameters, rel=1e-3)
    encoder = num_parameters(jax.eval_shape(lambda: Transformer(t5, nnx.Rngs(params=0)).encoder))
    cross_keys = 12 * 2 * 768 * 768  # computed once for a row of inputs
    products = found.parameters - encoder - cross_keys
    assert found.generating == pytest.approx(2 * products + 4 * 512 * 12 * 64 * 24, rel=1e-3)
    alike = costs(shared, 512)
    block, cross, logits = 4 * 768 * 768 + 2 * 768 * 3_072, 4 * 768 * 768, 768 * 32_128
    assert alike.training - alike.scores == 3 * (2 * 12 * block + 12 * cross + logits)


@pytest.mark.parametrize(("inputs", "targets"), [(512, 114), (512, 512), (64, 200)])
def test_the_count_of_a_token_is_that_of_a_step_over_the_tokens_of_its_rows(inputs, targets):
    t5 = PRESETS["t5-small"]
    assert costs(t5, inputs, targets).training * (inputs + targets) * 7 == pytest.approx(
        step_flops(t5, 7, inputs, targets)
    )
    for name in ("gpt2", "bert-base"):  # of one stack, whose rows have a single length
        found = costs(PRESETS[name], inputs, targets)
        assert found == costs(PRESETS[name], inputs)
        assert found.training * inputs == pytest.approx(step_flops(PRESETS[name], 1, inputs, inputs))


def test_the_count_leaves_out_scores_outside_of_windows():
    mistral = PRESETS["mistral-7b"]
    length, window = 8_192, 4_096
    outside = 12 * 32 * (length - window) * 32 * 128  # in 32 layers, of 32 heads of 128 features
    whole = step_flops(mistral, 1, 0, length) / length
    assert costs(mistral, length).training == pytest.approx(whole - outside)


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


def test_products_before_the_first_block_and_before_the_output_matrix_count():
    bert = PRESETS["bert-base"]
    plain, narrow = (changes(bert, x) for x in ({"output.transform": False}, {"embedding.d_embed": 128}))
    logits = bert.vocab_size * (128 - 768)
    flops = [step_flops(each, 1, 512, 0) / (3 * 2 * 512) for each in (plain, bert, narrow)]
    assert flops[1] - flops[0] == 768 * 768
    assert flops[2] - flops[1] == logits + 2 * 128 * 768 - 768 * 768  # in, and the narrower transform
    opt = changes(PRESETS["gpt2"], {"embedding.d_embed": 128, "embedding.projected": "tokens"})
    less = costs(PRESETS["gpt2"], 512).generating - costs(opt, 512).generating
    assert less == 2 * (opt.vocab_size * (768 - 128) - 2 * 128 * 768)


def test_a_bert_is_costed_in_rows_that_it_can_have(capsys):
    """110 M parameters on 250 G tokens: 6 N D is 1.65e20."""
    bert = PRESETS["bert-base"]
    found = costs(bert, 512)
    assert found.parameters == 110_106_428
    assert found.scores == 12 * 12 * 512 * 768
    for asked in ((), ("--length", "512")):
        assert dispatch(["show", "bert-base", "--costs", "--tokens", "2.5e11", *asked]) == 0
        said = capsys.readouterr().out
        assert "rows of 512 tokens" in said
        assert re.search(r"6 N D, N with embeddings\W+1.652e\+20 FLOP", said)
    assert dispatch(["show", "llama-7b", "--costs"]) == 0
    assert "rows of 2,048 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("asked", "most"),
    [
        (["bert-base"], 512),
        (["gpt2"], 1_024),
        (["gpt2", "--model.positions.max_length", "64"], 64),
        (["bart-base"], 1_024),
    ],
)
def test_rows_longer_than_the_positions_reach_are_refused(capsys, asked, most):
    assert dispatch(["show", *asked, "--costs", "--length", str(most)]) == 0
    capsys.readouterr()
    assert dispatch(["show", *asked, "--costs", "--length", str(most + 1)]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"--length={most + 1} should be at most {most}" in said
    assert f"model.positions.max_length={most}" in said


@pytest.mark.parametrize("name", ["t5-small", "llama-7b", "marian", "bloom-560m"])
def test_positions_that_are_computed_have_no_end(name):
    assert longest_row(PRESETS[name]) is None
    assert costs(PRESETS[name], 100_000, 100_000).training > 0


@pytest.mark.parametrize(
    ("asked", "due"),
    [
        (["t5-base"], "rows of 512 inputs and 114 targets"),
        (["gpt2"], "rows of 1,024 tokens"),
        (["gpt2", "--model.positions.max_length", "64"], "rows of 64 tokens"),
        (["llama-2-7b"], "rows of 4,096 tokens"),
        (["mistral-7b"], "rows of 8,192 tokens"),
        (["t5/1-baseline/baseline", "--scale", "base"], "rows of 512 inputs and 200 targets"),
        (["t5/1-baseline/baseline", "--scale", "small"], "rows of 128 inputs and"),
        (["gpt/base"], "rows of 64 tokens"),
        (["gpt/base", "--data.inputs_length", "100"], "rows of 100 tokens"),
        (["bert/base"], "rows of 64 tokens"),
    ],
)
def test_costs_are_for_the_rows_that_a_model_is_trained_on(capsys, asked, due):
    assert dispatch(["show", *asked, "--costs"]) == 0
    assert due in " ".join(capsys.readouterr().out.split())


def test_a_model_of_sentences_needs_a_length(capsys):
    assert row_lengths("transformer-base", PRESETS["transformer-base"]) is None
    assert dispatch(["show", "transformer-base", "--costs"]) == 2
    assert "--length should be given: transformer-base was trained on sentences" in capsys.readouterr().err


def test_each_phase_of_pre_training_counts_the_tokens_of_its_own_sequences():
    def tokens(**pretraining):
        return tokens_read("row", build("t5/1-baseline/baseline", "nano", pretraining)).in_pretraining

    prefix_lm, half = OBJECTIVES["prefix-lm"], 0.5
    before = PretrainingPhase(half, prefix_lm)
    phases = tokens(**{"pretraining.phases": (before,)})
    alone = tokens(), tokens(objective=prefix_lm)
    assert alone[0] != alone[1] and phases == half * sum(alone)
    as_encoder = PretrainingPhase(half, OBJECTIVES["masked-lm"], "bidirectional")
    gpt = build("gpt/base", "nano", {"pretraining.phases": (as_encoder,)})
    steps, batch, length = gpt.pretraining.steps, gpt.pretraining.batch_size, gpt.data.inputs_length
    assert tokens_read("gpt/base", gpt) == TokensRead(0, length, steps * batch * length)


def test_the_tokens_of_a_row_with_a_pre_training_per_task_are_those_of_one_model():
    row = "t5/12-multi-task/leave-one-out"
    experiment = build(row, "nano")
    last_phases = [stage for stage in stages(experiment) if stage.is_pretraining and stage.is_compared]
    assert len(last_phases) == len(experiment.tuning.mixtures) > 1
    read = tokens_read(row, experiment)
    pretraining = experiment.pretraining
    assert read.in_pretraining == pretraining.steps * pretraining.batch_size * (read.inputs + read.targets)


def test_a_rows_tokens_are_those_of_its_pre_training_and_the_ratio_is_count_over_6_n(monkeypatch, capsys):
    monkeypatch.setattr(CONSOLE, "width", 160)  # so that no cell is wrapped
    assert dispatch(["show", "gpt/base", "--scale", "nano", "--costs"]) == 0
    said = capsys.readouterr().out
    assert f"training on {300 * 32 * 64:.4g} tokens D" in said
    model = changes(build("gpt/base", "nano").model, {"dtype": "bfloat16"})
    found = costs(model, 64)
    assert f"{found.training * 300 * 32 * 64:.4g} FLOP by count" in said
    assert f"{found.parameters:,} with embeddings, {found.non_embedding_parameters:,} without" in said
    for n in (found.parameters, found.non_embedding_parameters):
        assert f"{6 * n:.4g} FLOP: the count is {found.training / (6 * n):.3g} times this" in said


def test_counts_have_no_costs(capsys):
    assert dispatch(["show", "history/bigram", "--costs"]) == 2
    assert "history/bigram counts its text (counts.model='ngram')" in capsys.readouterr().err


def test_an_encoder_generates_nothing():
    found = costs(PRESETS["bert-base"], 512)
    assert (found.generating, found.cache) == (0, 0) and found.training > 6 * found.non_embedding_parameters


def test_bytes_are_told_in_binary_units():
    assert [binary_size(n) for n in (0, 1_000, 512 * KIB, 3 * 2**30)] == ["0 B", "1000 B", "512 KiB", "3 GiB"]


@pytest.mark.parametrize(
    "options, said",
    [
        (["--costs", "--batch", "8"], "--batch and --dtype are of the cache"),
        (["--costs", "--dtype", "float32"], "--batch and --dtype are of the cache"),
        (["--scale", "mini"], "bert-base is a published model, which has a size of its own"),
    ],
)
def test_an_option_that_a_published_model_does_not_read_is_refused(options, said, capsys):
    assert dispatch(["show", "bert-base", *options]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_published_model_is_shown_by_its_name(capsys):
    assert dispatch(["show", "llama-7b", "--costs", "--length", "1024", "--batch", "4"]) == 0
    said = capsys.readouterr().out
    assert "6,738,415,616" in said and "512 KiB in bfloat16" in said and "2 GiB" in said
    assert dispatch(["show", "llama-7b", "--costs", "--tokens", "1e12"]) == 0
    assert "training on 1e+12 tokens D" in (said := capsys.readouterr().out) and "4.286e+22 FLOP" in said
    assert dispatch(["show", "llama-7b", "--costs", "--tokens", "-1"]) == 2
    assert "--tokens=-1.0 should be at least 0" in capsys.readouterr().err
    for value in ("nan", "inf"):
        assert dispatch(["show", "llama-7b", "--costs", "--tokens", value]) == 2
        assert f"--tokens={value} should be at least 0" in capsys.readouterr().err
    assert dispatch(["show", "mistral-7b"]) == 0
    said = capsys.readouterr().out
    assert "sparsity.window" in said and "4095" in said


def test_the_cache_is_counted_in_the_dtype_in_which_a_row_computes(capsys):
    of_bfloat16, of_float32 = ["--model.dtype", "bfloat16"], ["--dtype", "float32"]
    assert dispatch(["show", "gpt/base", "--scale", "nano", "--costs"]) == 0
    assert "1 KiB in float32" in (in_float32 := capsys.readouterr().out)
    assert dispatch(["show", "gpt/base", "--scale", "nano", "--costs", *of_bfloat16]) == 0
    assert "512 B in bfloat16" in capsys.readouterr().out
    assert dispatch(["show", "gpt/base", "--scale", "nano", "--costs", *of_bfloat16, *of_float32]) == 0
    assert "1 KiB in float32" in (said := capsys.readouterr().out)
    assert said.splitlines()[1:] == in_float32.splitlines()[1:]  # the title says what was given
    assert dispatch(["show", "llama-7b", "--costs", "--model.dtype", "float32"]) == 0
    assert "1 MiB in float32" in capsys.readouterr().out


def test_a_published_model_has_no_stages_and_no_settings_but_its_own(capsys):
    assert dispatch(["show", "llama-7b", "--stages"]) == 2
    assert "llama-7b is a published model" in capsys.readouterr().err
    assert dispatch(["show", "llama-7b", "--objective.rate", "0.2"]) == 2
    assert "llama-7b is a published model, which has no setting objective.rate" in capsys.readouterr().err
    assert dispatch(["show", "--model.num_decoder_layers", "3", "llama-7b"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "llama-7b, as published with --model.num_decoder_layers 3" in said
    assert re.search(r"num_decoder_layers . 3 ", said)


EXPERTS = {"experts.count": 8, "experts.per_token": 2}


def test_a_token_costs_the_experts_that_it_passes_and_their_router():
    dense, mixed = sized("llama-7b"), sized("llama-7b", **EXPERTS)
    layers, d_model, d_ff = dense.num_decoder_layers, dense.d_model, dense.mlp.d_ff
    router, expert = layers * d_model * 8, layers * 3 * d_model * d_ff
    plain, found = costs(dense, 100), costs(mixed, 100)
    assert plain.active_parameters == plain.parameters
    assert found.parameters == plain.parameters + 7 * expert + router
    assert found.active_parameters == plain.parameters + expert + router
    assert found.training - plain.training == 6 * (expert + router)
    assert found.generating - plain.generating == 2 * (expert + router)
    assert expert_parameters(mixed) == 8 * expert and found.cache == plain.cache


def test_where_every_second_layer_has_experts_half_of_the_layers_cost_more():
    new = {"experts.count": 8, "experts.every": 2}
    dense, mixed = costs(sized("t5-base"), 64), costs(sized("t5-base", **new), 64)
    router, expert = 12 * 768 * 8, 12 * 2 * 768 * 3_072
    assert mixed.parameters == dense.parameters + 7 * expert + router
    assert mixed.active_parameters == dense.parameters + router
    assert mixed.training - dense.training == pytest.approx(6 * router / 2)  # a token passes one stack
    shared = costs(sized("t5-base", **{"experts.count": 8, "shared_layers": True}), 64)
    assert shared.parameters - shared.active_parameters == 2 * 7 * 2 * 768 * 3_072


def test_of_expert_choice_the_mean_number_of_experts_is_counted():
    new = {"experts.count": 8, "experts.kind": "expert-choice", "experts.capacity_factor": 2.0}
    chosen = costs(sized("bert-base", **new), 64)
    assert chosen.active_parameters == costs(sized("bert-base", **EXPERTS), 64).active_parameters
    assert chosen.training == costs(sized("bert-base", **EXPERTS), 64).training


def small(**new):
    sizes = {"d_model": 32, "attention.num_heads": 2, "attention.d_kv": 16, "mlp.d_ff": 64, "vocab_size": 64}
    return changes(ModelConfig(), {"architecture": "decoder", "num_decoder_layers": 2} | sizes | new)


def test_both_directions_of_a_bidirectional_model_have_parameters():
    config = small(heads=("backward",))
    model = jax.eval_shape(lambda: BidirectionalLM(config, nnx.Rngs(params=0)))
    assert costs(config, 64).parameters == num_parameters(model) > 1.5 * costs(small(), 64).parameters


@pytest.mark.parametrize("size", [1, 4])
def test_scores_are_those_of_all_blocks_that_a_token_attends_to(size):
    config = small(**{"attention.compression": size})
    width = config.attention.num_heads * (config.attention.d_kv + config.attention.value_width)
    # forward and backward: 3 x (product and sum) x layers x blocks of 64 tokens
    assert costs(config, 64).scores == 3 * 2 * 2 * (64 // size) * width


@pytest.mark.parametrize("cross_attention", ["heads", "none"])
@pytest.mark.parametrize("kind", ["rnn", "gru", "lstm"])
def test_a_generated_token_costs_a_recurrent_decoder_the_products_of_a_step(kind, cross_attention):
    """The start state, which the encoder's output gives where nothing attends to it, is no part of a step."""
    config = changes(TINY, {"mixer.kind": kind, "positions.kind": "none", "dropout": 0.0})
    config = changes(config, {"cross_attention.kind": cross_attention})
    model = nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0)))
    batch = Batch(
        encoder=Side(tokens=np.ones((1, 5), np.int32)), decoder=Side(tokens=np.zeros((1, 1), np.int32))
    )
    _, cache = nnx.eval_shape(lambda model: model.prefill(batch, 8), model)
    step = jax.make_jaxpr(lambda model, cache: model.step(np.ones(1, np.int32), cache))(model, cache)
    assert costs(config, 5).generating == product_flops(step.jaxpr)


def product_flops(program):
    """The FLOPs of the matrix products of a jaxpr and of those inside of it; of branches the dearest."""
    total = 0
    for equation in program.eqns:
        if equation.primitive.name == "dot_general":
            ((contracted, _), _), left = equation.params["dimension_numbers"], equation.invars[0].aval
            inner = prod(left.shape[axis] for axis in contracted)
            total += 2 * inner * equation.outvars[0].aval.size
        parts = [*map(product_flops, jaxprs_in_params(equation.params))]
        if equation.primitive.name == "cond":
            total += max(parts)
        else:
            total += equation.params.get("length", 1) * sum(parts)  # of a scan
    return total

"""What pictures show is what models compute; each is drawn once, and what has no picture is said plainly."""

import re
import tarfile
import warnings
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scored_runs
import small_models
from commands import unboxed
from drawn import drawn_model
from flax import nnx
from matplotlib.backends.backend_agg import FigureCanvasAgg
from paths import GOLDEN, ROOT
from variants import with_quick

from experiments.__main__ import dispatch
from experiments.figures import FIGURES, benchmark, concepts, trained_models
from experiments.figures.benchmark import measure_mixers
from experiments.figures.concepts import LengthsFigure
from experiments.figures.curves import alibi_curves, bias_plots, bucket_curves, rotary_curves
from experiments.figures.draw import draw_heat_maps, draw_plots, save_figure
from experiments.figures.language_models import read_scores
from experiments.figures.masks import MASKS, masked_softmax_steps
from experiments.figures.model_inspection import (
    ModelOnText,
    draw_gates,
    draw_heads,
    draw_lens,
    draw_ranked_tokens,
    sharpness,
    token_label,
)
from experiments.figures.panels import Curve, HeatMap, Plot, PlotGrid, Scale
from experiments.figures.trained_models import (
    DecodingFigure,
    GradientFigure,
    SimilarityFigure,
    contextual_model,
    read_text,
    similarity_curves,
    text_states,
    word_span,
)
from experiments.figures.training import training_figure
from experiments.runs.curves import plotted_metrics
from experiments.runs.paths import save_settings
from experiments.runs.result import write_result
from experiments.runs.stages import stages_of
from experiments.runs.trained import open_run
from experiments.study.paths import run_folder
from experiments.study.registry import TABLES, build
from lm.batch import Batch, Side
from lm.config.attention import RotaryConfig
from lm.config.base import SettingError, changes
from lm.config.layers import MixerConfig, PositionsConfig
from lm.config.model import ModelConfig
from lm.evaluate.distance import layer_distances
from lm.evaluate.lens import logit_lens, mean_similarity, word_similarity
from lm.evaluate.rnn_states import gate_activations, recurrent_layers, state_gradients
from lm.nn.heads import LayerMixture
from lm.nn.rnn import Direction
from lm.objectives.denoising import OBJECTIVES
from lm.ops.recurrence import CELLS, rnn_scan
from lm.tokenizers.huggingface import load_pretrained_tokenizer
from lm.tokenizers.sentencepiece import ByteTokenizer

DECODER = changes(small_models.TINY, {"architecture": "decoder", "dropout": 0.0, "positions.kind": "none"})
SENTENCE = "a key of a set"
LSTM = {"model.architecture": "encoder-decoder", "model.mixer.kind": "lstm", "model.positions.kind": "none"}


def direction_of(mixer, width=6):
    config = ModelConfig(
        "decoder", mixer=MixerConfig(kind=mixer), positions=PositionsConfig(kind="none"), d_model=width
    )
    return Direction(config, nnx.Rngs(params=jax.random.key(1)))


def row(length, width=6):
    return jax.random.normal(jax.random.key(2), (length, width))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def lstm(runs):
    """An encoder-decoder of LSTMs whose head reads a mixture of layers: of it most pictures can be drawn."""
    given = LSTM | {"tuning.mixtures": (), "tuning.heads": ("cola",), "tuning.layers": "mixed-frozen"}
    return scored_runs.run_of(runs, "lstm", given)[0]


@pytest.fixture(scope="module")
def encoder(runs):
    """A BERT with T5's bias."""
    return scored_runs.run_of(runs, "encoder", scored_runs.HEADS)[0]


# What a query at place t may see of a key at place s, in rows of 12.
SEES = {
    "causal (decoder)": lambda t, s: s <= t,
    "fully visible (encoder)": lambda t, s: s >= 0,
    "prefix (prefix decoder)": lambda t, s: (s <= t) | ((s < 4) & (t < 4)),
    "padding (encoder)": lambda t, s: (s < 9) & (t < 9),
    "packed (encoder)": lambda t, s: s // 4 == t // 4,
    "packed (decoder)": lambda t, s: (s // 4 == t // 4) & (s <= t),
    "packed (cross-attention)": lambda t, s: t // 4 == (s >= 6) + 1 * (s >= 10),
    "window of 2 (encoder)": lambda t, s: abs(s - t) <= 2,
    "window of 2 (decoder)": lambda t, s: (t - s <= 2) & (s <= t),
    "window of 2, dilated by 2": lambda t, s: (abs(s - t) <= 4) & ((s - t) % 2 == 0),
    "window of 1, first 2 global": lambda t, s: (abs(s - t) <= 1) | (s < 2) | (t < 2),
}


@pytest.mark.parametrize("name", SEES)
def test_a_mask_shows_what_its_name_says(name):
    t, s = np.indices((12, 12))
    assert (MASKS[name].mask(12) == SEES[name](t, s)).all()


def test_every_mask_but_the_random_one_is_known_here():
    assert [*SEES, "blocks of 2 (BigBird)"] == [*MASKS]


def test_the_softmax_gives_masked_scores_nothing_and_shares_one_among_the_others():
    stages = masked_softmax_steps(6, 8, seed=3)
    above = np.triu(np.ones((6, 6), bool), 1)
    assert (stages["masked"][above] == -np.inf).all() and (stages["weights"][above] == 0).all()
    np.testing.assert_allclose(stages["masked"][~above], stages["scores"][~above])
    np.testing.assert_allclose(stages["weights"], jax.nn.softmax(stages["masked"]), atol=1e-6)


def test_a_rotary_score_is_the_mean_cosine_of_its_angles():
    config, width = RotaryConfig(), 16
    distance, score, _ = rotary_curves(20, width, config)["score of equal vectors"]
    angles = distance[:, None] * config.frequencies(width)[0]
    np.testing.assert_allclose(score, np.cos(angles).mean(1), atol=1e-5)


def test_alibi_falls_evenly_and_a_decoders_bucket_of_a_near_distance_is_the_distance():
    distance, first, _ = alibi_curves(8, num_heads=8)["head 1"]
    np.testing.assert_allclose(first, -abs(distance) / 2)
    distance, bucket, _ = bucket_curves(8, ModelConfig())["decoder"]
    assert bucket.tolist() == np.maximum(-distance, 0).tolist()


def test_a_learnt_bias_is_the_one_that_is_added_to_scores():
    model = drawn_model(changes(DECODER, {"positions.kind": "relative"}))
    (panel,) = bias_plots(model)
    distance, drawn, _ = panel.curves["head 2"]
    added = model.decoder.relative(False).materialize(9, 9)[0, 1]
    for d, value in zip(distance.tolist(), drawn.tolist(), strict=True):
        if -8 <= d <= 0:
            assert value == pytest.approx(float(added[8, 8 + d]))
    assert max(distance) == 0


@pytest.mark.parametrize("mixer", with_quick(("lstm",), CELLS))
def test_a_states_gradient_is_the_one_of_jax(mixer):
    direction, x = direction_of(mixer), row(5)
    cell, weights = direction.cell, direction.state_weights(x.dtype)
    inputs, first = direction.input_products(x[None]), direction.initial_state(1)
    states = rnn_scan(cell, weights, inputs, first, None)
    for distance in (1, 3):
        place = 4 - distance
        state = tuple(array[place] for array in states)

        def last(state, place=place):
            return rnn_scan(cell, weights, inputs[place + 1 :], state, None)[0][-1, 0]

        due = [jnp.linalg.norm(jacobian[:, 0]) / 6**0.5 for jacobian in jax.jit(jax.jacobian(last))(state)]
        found = [size[distance - 1] for size in state_gradients(direction, x)]
        np.testing.assert_allclose(found, due, rtol=1e-4)


@pytest.mark.parametrize("gain", [0.5, 1.0, 1.5])
def test_a_linear_networks_gradient_is_a_power_of_the_distance(gain):
    """At a state of 0 tanh is the identity: turned and scaled by ``gain`` each step, vectors keep that."""
    direction = direction_of("rnn")
    turn, _ = jnp.linalg.qr(direction.state[...])
    direction.state[...] = gain * turn
    (sizes,) = state_gradients(direction, jnp.zeros((9, 6)))
    np.testing.assert_allclose(sizes, gain ** np.arange(1, 9), rtol=1e-4)


def test_a_memory_that_forgets_nothing_and_reads_nothing_keeps_its_gradient():
    direction = direction_of("lstm")
    write, forget = jnp.arange(24) < 6, (jnp.arange(24) >= 6) & (jnp.arange(24) < 12)
    direction.bias[...] = jnp.where(forget, 50.0, jnp.where(write, -50.0, 0.0))
    _, memory = state_gradients(direction, row(9))
    np.testing.assert_allclose(memory / memory[0], np.ones(8), rtol=0.5)
    assert memory[-1] > 0.1


def test_gates_are_those_by_which_an_lstm_goes_on():
    direction, x = direction_of("lstm"), row(7)
    found = {name: array[0] for name, array in gate_activations(direction, x[None]).items()}
    states = [array[:, 0] for array in direction(x[None], None, direction.initial_state(1))]
    np.testing.assert_allclose(found["state h"], states[0], atol=1e-6)
    np.testing.assert_allclose(found["memory C"], states[1], atol=1e-6)
    np.testing.assert_allclose(found["output gate"] * np.tanh(states[1]), states[0], atol=1e-5)
    before = np.concatenate([np.zeros((1, 6)), states[0][:-1]])
    new = np.tanh(
        np.split(direction.input_products(x[None])[:, 0] + before @ direction.state[...], 4, axis=-1)[2]
    )
    memory = np.concatenate([np.zeros((1, 6)), states[1][:-1]])
    kept = found["forget gate"] * memory + found["input gate"] * new
    np.testing.assert_allclose(kept, states[1], atol=1e-5)


def test_gates_of_a_gru_mix_the_state_before_with_a_new_one():
    direction, x = direction_of("gru"), row(7)
    found = {name: array[0] for name, array in gate_activations(direction, x[None]).items()}
    (state,) = (array[:, 0] for array in direction(x[None], None, direction.initial_state(1)))
    before = jnp.concatenate([jnp.zeros((1, 6)), state[:-1]])
    inner = (state - found["update gate"] * before) / (1 - found["update gate"])  # tanh(x + reset * h W)
    products = jnp.split(before @ direction.state[...], 3, axis=-1)[2]
    new = jnp.split(direction.input_products(x[None])[:, 0], 3, axis=-1)[2]
    np.testing.assert_allclose(inner, jnp.tanh(new + found["reset gate"] * products), atol=1e-5)


@pytest.mark.parametrize("residual", ["pre-norm", "post-norm"])
@pytest.mark.parametrize("shared", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_layers_states_are_those_of_its_direction_reading_what_the_mixer_reads(residual, shared):
    config = changes(DECODER, {"mixer.kind": "lstm", "residual": residual, "shared_layers": shared})
    model, batch = drawn_model(config), Batch(decoder=Side(tokens=jnp.array([[3, 1, 4, 1, 5]])))
    layers, hidden = recurrent_layers(model, batch), model.hidden_states(batch)["decoder"]
    assert len(layers) == 2
    for layer, (direction, x) in enumerate(layers):
        block = jax.tree.map(lambda leaf, i=0 if shared else layer: leaf[i], model.decoder.blocks)
        read = hidden[layer] if residual == "post-norm" else block.attention_norm(hidden[layer])
        np.testing.assert_allclose(x, read, atol=1e-6)
        states = direction(x, None, direction.initial_state(1))[0].swapaxes(0, 1)
        np.testing.assert_allclose(gate_activations(direction, x)["state h"], states, atol=1e-6)


@pytest.mark.parametrize("architecture", ["decoder", "encoder", "encoder-decoder"])
def test_the_lens_on_the_last_layer_is_the_model(architecture):
    model = drawn_model(replace(DECODER, architecture=architecture))
    tokens = jnp.array([[3, 1, 4, 1, 5]])
    batch = Batch(encoder=Side(tokens=tokens), decoder=Side(tokens=tokens))
    lens = logit_lens(model, batch)
    assert lens.shape == (3, 1, 5, 40)
    np.testing.assert_allclose(lens[-1], model(batch), atol=1e-5)
    assert abs(lens[0] - lens[-1]).max() > 0.1


def test_a_static_word_is_like_itself_and_tokens_are_compared_pair_by_pair():
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=(3, 4, 5)), rng.normal(size=(3, 2, 5))
    second[0, 1] = 3 * first[0, 2]  # the same direction
    found = word_similarity(first, second, (slice(2, 3), slice(1, 2)))
    assert found[0] == pytest.approx(1) and (abs(found[1:]) < 0.999).all()
    ids = [7, 8, 9, 7], [8, 9]
    due = [
        first[1, i] @ second[1, j] / np.linalg.norm(first[1, i]) / np.linalg.norm(second[1, j])
        for i in range(4)
        for j in range(2)
        if ids[0][i] != ids[1][j]
    ]
    assert len(due) == 6 and mean_similarity(first, second, ids)[1] == pytest.approx(np.mean(due))


@pytest.mark.slow
def test_a_word_has_one_embedding_and_two_states(encoder):
    run = open_run(encoder, stages_of(encoder))
    _, curve, _ = similarity_curves(run, ("the key is it", "a key"), "key")["“key” in both texts"]
    assert curve[0] == pytest.approx(1, abs=1e-5) and (curve[2:] < 0.9999).all()
    _, same, _ = similarity_curves(run, ("a key", "a key"), "key")["“key” in both texts"]
    np.testing.assert_allclose(same, 1, atol=1e-5)


@pytest.mark.slow
def test_of_elmo_a_word_has_states_that_were_read_from_both_ends(runs):
    given = {"model.architecture": "decoder", "model.mixer.kind": "lstm", "model.positions.kind": "none"}
    given |= {"model.heads": ("backward",), "tuning.mixtures": (), "tuning.heads": ("cola",)}
    folder = scored_runs.run_of(runs, "elmo", given | {"objective": OBJECTIVES["causal-lm"]})[0]
    run = open_run(folder, stages_of(folder))
    model, ids = contextual_model(run), run.encode("a key of a set")
    both, forward = text_states(run, model, ids), text_states(run, run.model, ids)
    assert both.shape[-1] == 2 * forward.shape[-1]
    np.testing.assert_allclose(both[1:, :, : forward.shape[-1]], forward[1:], atol=1e-5)
    later = text_states(run, model, [*ids[:-1], ids[0]])
    width = forward.shape[-1]
    assert (later[-1, 0, :width] == both[-1, 0, :width]).all() and (later[-1, 0] != both[-1, 0]).any()


def test_a_word_is_found_whatever_its_pieces_and_another_is_said_to_be_missing():
    vocabulary = ByteTokenizer(100)
    ids = vocabulary.encode("one key too")
    assert vocabulary.decode(ids[word_span(vocabulary, ids, "key")]).strip() == "key"
    with pytest.raises(SettingError, match="--word 'lock'"):
        word_span(vocabulary, ids, "lock")


def test_shares_of_layers_are_what_a_head_weighs_them_by():
    mixture = LayerMixture(2)
    mixture.weights[...] = jnp.array([0.0, 1.0, -1.0])
    assert mixture.layer_weights.sum() == pytest.approx(1)
    hidden = jnp.arange(3.0).reshape(3, 1, 1, 1)
    assert float(mixture(hidden)[0, 0, 0]) == pytest.approx(float(mixture.layer_weights @ jnp.arange(3.0)))


def test_what_a_layer_sets_aside_grows_with_the_square_of_the_length_but_for_recurrence(monkeypatch):
    monkeypatch.setattr(benchmark, "REPEATS", 1)
    config = changes(DECODER, {"d_model": 8, "attention.num_heads": 2, "attention.d_kv": 4})
    full, recurrent = measure_mixers([config, changes(config, {"mixer.kind": "lstm"})], (64, 256))
    assert full[1].temporary_bytes > 8 * full[0].temporary_bytes
    assert recurrent[1].temporary_bytes < 5 * recurrent[0].temporary_bytes
    assert all(cost.seconds > 0 for cost in (*full, *recurrent))


def test_a_call_is_as_dear_as_its_quickest_turn(monkeypatch):
    ticks = iter([0, 9, 9, 12, 20, 21, 30, 35])  # one call: a turn that does not count, of 9, then 3, 1 and 5
    monkeypatch.setattr(benchmark, "REPEATS", 3)
    monkeypatch.setattr(benchmark, "perf_counter", lambda: next(ticks))
    (cost,) = benchmark.measure_calls([(jnp.sin, (jnp.ones(2),))])
    assert cost.seconds == 1


def test_the_text_and_the_answer_that_follows_it_are_labelled(lstm):
    run = open_run(lstm, stages_of(lstm))
    inspected = read_text(run, SENTENCE)
    labels = inspected.labels
    assert "".join(labels["encoder"]) == SENTENCE + "</s>"  # T5's, whose id is [SEP]'s of an encoder
    assert labels["decoder"][0] == "[START]" and len(labels["decoder"]) <= 17
    assert "[START]: <pad>" in draw_lens(inspected).get_supxlabel(), "which its input may answer"
    assert {*inspected.attention_maps} == {"cross"}


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("t5", ("<extra_id_0>", "<extra_id_1>", "<extra_id_2>", "</s>", "<pad>")),
        ("bart", ("[MASK]", "<extra_id_1>", "<extra_id_2>", "</s>", "<pad>")),
        ("bert", ("[MASK]", "[CLS]", "<extra_id_2>", "[SEP]", "[PAD]")),
    ],
)
def test_special_tokens_are_spelt_as_in_the_family_of_the_model(family, names):
    vocabulary = ByteTokenizer(100)
    tokens = (vocabulary.vocab_size - 1, vocabulary.vocab_size - 2, vocabulary.vocab_size - 3, 1, 0)
    spelt = vocabulary.special_token_names(family)
    assert tuple(spelt[token] for token in tokens) == names
    config = DECODER if family != "bert" else replace(DECODER, architecture="encoder")
    inspected = ModelOnText(
        SimpleNamespace(config=config), vocabulary, {}, {}, uses_mask_token=family == "bart"
    )
    assert inspected.token_labels(np.array(tokens)).tolist() == list(names)


def test_a_published_tokenizers_special_tokens_have_its_own_names():
    harness = GOLDEN / "harness"
    for name, expected in (("t5_v1_0", {"</s>", "<pad>"}), ("gpt2", {"<|endoftext|>"})):
        vocabulary = load_pretrained_tokenizer(harness / name, 10**6)
        spelt = vocabulary.special_token_names("bert")
        assert expected <= {*spelt.values()}
        assert all(vocabulary.vocab[piece] == token for token, piece in spelt.items())


def test_the_share_of_all_other_tokens_is_never_negative():
    """Rounding may make the sum of float32 probabilities a little more than 1."""
    probabilities = np.array([[0.9, 0.1 + 1e-6]])
    figure = draw_ranked_tokens(["a"], np.array([["b", "c"]]), probabilities, "next token, by rank")
    texts = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert texts == ["b", "c", "0 %"]


def test_the_heads_that_are_drawn_are_those_that_look_sharpest_at_other_tokens():
    tokens = [f"t{k}" for k in range(5)]
    heads = np.stack([np.eye(5), np.roll(np.eye(5), 1, axis=1), np.full((5, 5), 0.2), np.eye(5)[[0] * 5]])
    inspected = SimpleNamespace(attention_maps={"decoder": heads[None]}, labels={"decoder": tokens})
    assert [sharpness(weights, is_self_attention=True) for weights in heads] == pytest.approx(
        [0, 0.8, 0.2, 0]
    )
    titles = [axes.get_title() for axes in draw_heads(inspected, 2).axes]
    assert [title for title in titles if "head" in title] == ["layer 1, head 2", "layer 1, head 3"]
    titles = [axes.get_title() for axes in draw_heads(inspected).axes]
    assert sum("head" in title for title in titles) == 4


def test_a_dollar_begins_no_formula_and_a_sentinel_has_its_number():
    vocabulary = ByteTokenizer(100)
    (dollar,) = vocabulary.encode("$")
    assert token_label(vocabulary, dollar) == r"\$"
    assert token_label(vocabulary, vocabulary.vocab_size - 1 - 4) == "<extra_id_4>"
    (bell,) = vocabulary.encode("\a")
    assert token_label(vocabulary, bell) == f"<{bell}>"


def curves_of(**losses):
    """Curves of one seed with three evaluations."""
    named = {f"{name.replace('_', ' ')} loss [nats/token]": values for name, values in losses.items()}
    named = {name.replace("held out", "held-out"): values for name, values in named.items()}
    return {name: [[*enumerate(values)]] for name, values in named.items()}


def test_training_is_drawn_once_where_all_targets_are_content_and_what_never_changes_is_a_line():
    falling, flat = (6.0, 5.0, 4.0), (6.1, 6.1, 6.1)
    content = tuple(loss - 0.001 for loss in falling)  # without the ends of documents
    decoder = curves_of(held_out=falling, content=content, unigram=flat)
    (panel,) = training_figure({"GPT": decoder}).panels
    assert (panel.title, panel.levels) == (
        "held-out loss [nats/token]",
        {"unigram model": pytest.approx(6.1)},
    )
    spans = curves_of(held_out=falling, content=(6.5, 5.5, 4.5), unigram=flat)
    for rows in ({"T5": spans}, {"GPT": decoder, "T5": spans}):
        held_out, content = training_figure(rows).panels
        assert (content.title, held_out.levels, [*content.levels]) == (
            "content loss [nats/token]",
            {},
            ["unigram model"],
        )
    other = curves_of(held_out=falling, content=falling, unigram=(5.1, 5.1, 5.1))
    (panel,) = training_figure({"GPT": decoder, "other": other}).panels
    assert (panel.levels, panel.dotted) == ({}, pytest.approx({"GPT": 6.1, "other": 5.1}))
    (axes,) = draw_plots(PlotGrid([panel])).axes
    color_of = {line.get_linestyle(): line.get_color() for line in axes.lines[::-1]}
    assert color_of[":"] == axes.lines[0].get_color(), "a row's dotted line has the color of its curve"


@pytest.mark.parametrize("kind", [LengthsFigure, DecodingFigure])
def test_lengths_in_any_order_make_a_curve_from_left_to_right(kind, monkeypatch):
    for module, name in ((concepts, "measure_mixers"), (trained_models, "measure_decoding")):
        monkeypatch.setattr(module, name, lambda _, lengths, measure=name: costs_of(measure, lengths))
    for axes in kind(lengths=(8, 2, 4, 8)).figure().axes:
        for line in axes.lines:
            assert [*line.get_xdata()] == [2, 4, 8]


def costs_of(measure, lengths):
    costs = [benchmark.Cost(1.0 * length, 2**20) for length in lengths]
    return {"with cache": costs} if measure == "measure_decoding" else [costs] * 3


@pytest.mark.parametrize("word", ["", " "])
def test_a_word_that_is_empty_is_refused_and_is_no_space_of_the_sentences(word, tmp_path):
    with pytest.raises(SettingError, match="--word is empty"):
        SimilarityFigure(runs=(tmp_path,), text="a set", other="a pair", word=word).figure()


@pytest.mark.parametrize("gain", [float("nan"), float("inf")])
def test_a_gain_that_is_no_number_is_refused(gain):
    with pytest.raises(SettingError, match="--gain .* should be a finite factor"):
        GradientFigure(gain=gain).figure()


def test_each_phase_of_pre_training_is_drawn_with_the_unigram_loss_of_its_own_text():
    last = curves_of(held_out=(6.0, 5.0, 4.0), content=(6.0, 5.0, 4.0), unigram=(6.1, 6.1, 6.1))
    first = curves_of(held_out=(9.0, 8.0, 7.0), content=(9.0, 8.0, 7.0), unigram=(9.5, 9.5, 9.5))
    both = {f"phase-1: {name}": curves for name, curves in first.items()} | last
    panels = {panel.title: panel for panel in training_figure({"MLM, then CLM": both, "CLM": last}).panels}
    assert {title: panel.levels for title, panel in panels.items()} == {
        "phase-1: held-out loss [nats/token]": {"unigram model": pytest.approx(9.5)},
        "held-out loss [nats/token]": {"unigram model": pytest.approx(6.1)},
    }
    named = plotted_metrics("phase-1")
    assert {name for _, name in named.values()} == {"loss", "content_loss", "reference_loss"}
    assert {*named} > {*both} - {*last}, "as they are read"


def test_the_history_counts_every_finished_seed_of_a_row(tmp_path):
    for seed in range(TABLES["history"].seeds + 1):
        folder = run_folder(tmp_path, "nano", "history/trigram", seed, {})
        save_settings(folder, build("history/trigram", "nano", {"seed": seed}))
        measured = {"step": 1, "seconds": 1.0, "nats": 900.0, "tokens": 300, "words": 200, "bytes": 1_000}
        scores = {"columns": {}, "tasks": {}, "held_out_loss": None, "seconds": 1.0, "tokens": 9}
        write_result(folder, scores | {"likelihoods": [measured]})
    (score,) = read_scores(tmp_path, "nano", "history")
    assert score.seeds == TABLES["history"].seeds + 1


def test_a_layer_is_as_far_from_what_it_was_as_it_was_moved():
    before, after = drawn_model(DECODER), drawn_model(DECODER)
    kernel = after.decoder.blocks.mlp.hidden.kernel
    kernel[...] = kernel[...].at[1].multiply(3.0)
    (distances,) = layer_distances(before, after).values()
    parts = nnx.to_flat_state(nnx.state(before.decoder.blocks, nnx.Param))
    size = sum(float((value[...][1] ** 2).sum()) for _, value in parts)
    moved = before.decoder.blocks.mlp.hidden.kernel[...][1] * 2
    np.testing.assert_allclose(distances, [0, 0, float((moved**2).sum() / size) ** 0.5], rtol=1e-5)


def test_a_layer_is_measured_by_its_own_experts_and_an_encoder_by_its_own_embedding():
    sparse = changes(DECODER, {"num_decoder_layers": 4, "experts.count": 2, "experts.every": 2})
    before, after = drawn_model(sparse), drawn_model(sparse)
    kernel = after.decoder.blocks.experts.hidden.kernel
    kernel[...] = kernel[...].at[1].multiply(3.0)  # the second layer with experts is the last of four
    (distances,) = layer_distances(before, after).values()
    assert [distance > 0 for distance in distances] == [False, False, False, False, True]
    apart = changes(small_models.TINY, {"embedding.encoder": "separate", "output.logits": "separate"})
    before, after = drawn_model(apart), drawn_model(apart)
    table = after.encoder_embed.table
    table[...] = table[...] * 2
    found = layer_distances(before, after)
    assert found["encoder"][0] == pytest.approx(1) and found["decoder"][0] == 0


RESULTS = str(ROOT / "docs/results/mini.json")
OPTIONS = {
    "claims": [RESULTS],
    "coordinates": ["gpt/base", "--factors", "1", "2", "--steps", "1"],
    "next": ["--text", SENTENCE, "--k", "2"],
    "gradients": ["--width", "4", "--length", "5"],
    "bias": [],
    "mixture": [],
    "similarity": ["--text", SENTENCE, "--other", "a set", "--word", "set"],
    "decoding": ["--lengths", "2", "4"],
    "lengths": ["--lengths", "8", "16", "--heads", "1", "--width", "4"],
    "masks": ["--length", "6"],
    "scores": ["--length", "3"],
    "sinusoids": ["--length", "4", "--width", "4"],
    "distances": ["--reach", "9", "--width", "4"],
}
WITHOUT_RUN = (
    "gradients",
    "decoding",
    "lengths",
    "masks",
    "scores",
    "sinusoids",
    "distances",
    "claims",
    "coordinates",
)


OFTEN = ("attention", "masks", "lens")  # drawn by each run of the tests
OF_TRAINED = ("history", "tuning")  # drawn from runs that were trained: below, and in runs/test_run.py


def test_long_names_of_rows_leave_room_for_their_panels(tmp_path):
    """Of rows with settings given by hand. Otherwise matplotlib warns and draws over the names."""
    settings = ", ".join(f"pretraining.optimizer.setting_{number}=1000" for number in range(4))
    names = {place: f"row {place}, {settings}" for place in range(3)}
    scores = Plot("loss", "", "", {"": Curve([0, 1, 2], [1.0, 2.0, 3.0])}, x_ticks=names, is_categorical=True)
    curves = Plot("loss", "step", "", {name: Curve([0, 1], [1.0, 2.0]) for name in names.values()})
    for panel, size in ((scores, (4.5, 1.7)), (curves, (4.6, 3.6))):
        figure = draw_plots(PlotGrid([panel], "title", panel_size=size, has_shared_legend=True))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            save_figure(figure, tmp_path / "a.png")
        assert figure.axes[0].get_position().height > 0.3


@pytest.mark.parametrize(
    "what",
    [pytest.param(x, marks=[pytest.mark.slow] * (x not in OFTEN)) for x in FIGURES if x not in OF_TRAINED],
)
def test_every_picture_is_drawn(what, lstm, encoder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "REPEATS", 1)
    folder = [] if what in WITHOUT_RUN else [str(encoder if what == "bias" else lstm)]
    options = OPTIONS.get(what, ["--text", SENTENCE])
    assert dispatch(["draw", what, *folder, *options, "--out", str(tmp_path / "a.png")]) == 0
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    assert FIGURES[what].summary in capsys.readouterr().out


@pytest.mark.slow
def test_the_picture_of_history_is_drawn_from_the_published_runs(tmp_path):
    with tarfile.open(ROOT / "docs/results/mini-history.tar.xz") as file:
        file.extractall(tmp_path / "runs", filter="data")
    assert dispatch(["draw", "history", str(tmp_path / "runs"), "--out", str(tmp_path / "a.png")]) == 0
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_a_picture_that_takes_the_place_of_another_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for length, is_said in (("6", False), ("7", True)):
        assert dispatch(["draw", "masks", "--length", length]) == 0
        assert ("takes the place of the masks.png" in capsys.readouterr().out) == is_said
    assert dispatch(["draw", "masks", "--length", "6", "--out", "masks.png"]) == 0
    assert "takes the place" not in capsys.readouterr().out, "that name was given"


@pytest.mark.slow
@pytest.mark.parametrize("what", ["gradients", "decoding"])
def test_a_picture_that_needs_no_run_can_have_one(what, lstm, tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "REPEATS", 1)
    options = ["--text", SENTENCE] if what == "gradients" else ["--lengths", "2", "3"]
    assert dispatch(["draw", what, str(lstm), *options, "--out", str(tmp_path / "a.svg")]) == 0
    assert b"<svg" in (tmp_path / "a.svg").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mask"], "'mask'.*'masks'"),
        (["masks", "--out", "a.gif"], r"--out a\.gif.*\.png"),
        (["masks", "--length", "3"], "--length=3"),
        (["sinusoids", "--width", "5"], "--width 5"),
        (["scores", "--seed", "-1"], "--seed=-1"),
        (["scores", "--seed", "99999999999999999999"], "--seed=99999999999999999999"),
        (["lengths", "--lengths", "0"], r"--lengths \(0,\)"),
        (["decoding", "--lengths", "1"], r"--lengths \(1,\)"),
        (["gradients", "LSTM"], "--text"),
        (["gradients", "--text", SENTENCE], "--text.*name a run"),
        (["gradients", "LSTM", "--text", SENTENCE, "--width", "8"], "--width.*leave"),
        (["gradients", "LSTM", "--text", SENTENCE, "--gain", "3", "--length", "9"], "--length and --gain"),
        (
            ["gradients", "ENCODER", "--text", SENTENCE],
            "model.mixer.kind='attention'",
        ),
        (
            ["gates", "ENCODER", "--text", SENTENCE],
            "model.mixer.kind='attention'",
        ),
        (["alignment", "ENCODER", "--text", SENTENCE], "'encoder'"),
        (["decoding", "ENCODER"], "model.architecture='encoder'"),
        (["bias", "LSTM"], "model.positions.kind='none'.*'relative'"),
        (["mixture", "ENCODER"], "tuning.layers"),
        (["next", "ENCODER", "--text", SENTENCE * 9], "40"),
        (["next", "LSTM", "--text", SENTENCE, "--k", "0"], "--k=0"),
        (["lens", "LSTM", "--text", " "], "--text"),
        (["next", "nowhere", "--text", "a"], "nowhere"),
        (["coordinates", "bert/base"], "model.architecture='encoder'.*with a decoder"),
        (["coordinates", "gpt/base", "--factors", "2"], r"--factors \(2,\)"),
        pytest.param(
            ["coordinates", "gpt/base", "--factors", "1", "2", "--steps", "1", "--rate", "1e30"],
            r"--rate 1e\+30: training diverges",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_cannot_be_drawn_is_said(arguments, message, lstm, encoder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    named = {"LSTM": str(lstm), "ENCODER": str(encoder)}
    assert dispatch(["draw", *(named.get(argument, argument) for argument in arguments)]) == 2
    assert re.search(message, unboxed(capsys.readouterr().err))
    assert not [*tmp_path.iterdir()]


def test_a_model_without_attention_has_no_heads_to_draw_and_an_elman_network_no_gates():
    model = drawn_model(changes(DECODER, {"mixer.kind": "rnn", "vocab_size": 400}))
    ids = [3, 4, 5]
    batch = Batch(decoder=Side(tokens=jnp.array([ids])))
    inspected = ModelOnText(model, ByteTokenizer(100), batch, {"decoder": ids})
    with pytest.raises(SettingError, match="model.mixer.kind='rnn'"):
        draw_heads(inspected)
    with pytest.raises(SettingError, match="model.mixer.kind='rnn'"):
        draw_gates(inspected)


def test_without_a_name_all_pictures_are_listed_in_their_order(capsys):
    assert dispatch(["draw"]) == 0
    out = capsys.readouterr().out
    places = [out.index(f"\n  {what} ") for what in FIGURES]
    assert places == sorted(places)


@pytest.mark.parametrize("count", [3, 40])
def test_a_panel_has_a_line_for_each_category_and_many_labels_stand_beside_their_curves(count):
    names = {i: f"row {i}" for i in range(count)}
    curve = Curve([*names], [1.0] * count)
    categories = Plot("", "", "", {"end": curve}, x_ticks=names, is_categorical=True)
    curves = Plot("", "", "", dict.fromkeys(names.values(), curve))
    figure = draw_plots(PlotGrid([categories, curves]))
    figure.draw_without_rendering()
    first, second = figure.axes
    labels = [label.get_window_extent() for label in first.get_yticklabels()]
    assert all(above.y0 >= below.y1 for above, below in pairwise(labels))
    is_beside = second.get_legend().get_window_extent().x0 >= second.get_window_extent().x1
    assert is_beside == (count > 12)


def test_panels_have_axes_units_and_a_colour_scale():
    scale = Scale("weight", 0, 1)
    figure = draw_heat_maps(
        [HeatMap("one", np.eye(2), scale), HeatMap("two", np.eye(2), scale)], "key", "query"
    )
    labels = [axis.get_ylabel() for axis in figure.axes]
    assert labels.count("weight") == 1 and figure.get_supxlabel() == "key"
    other = [HeatMap("one", np.eye(2), scale), HeatMap("two", np.eye(2), scale._replace(label="score"))]
    labels = [axis.get_ylabel() for axis in draw_heat_maps(other, "key", "query").axes]
    assert {"weight", "score"} <= {*labels}
    panel = Plot("", "x [tokens]", "y [ms]", {"a": Curve([1, 2], [3, 4])}, log="xy")
    (axis,) = draw_plots(PlotGrid([panel])).axes
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("x [tokens]", "y [ms]")
    assert (axis.get_xscale(), axis.get_yscale()) == ("log", "log")


def test_a_title_wider_than_its_figure_is_broken_into_lines_that_fit():
    long = "a title of many words that is wider than one panel"
    panels = [Plot(long, "", "", {"": Curve((0, 1), (1.0, 2.0))})] * 3
    figure = draw_plots(PlotGrid(panels, long * 4))
    figure.canvas = FigureCanvasAgg(figure)
    figure.draw_without_rendering()
    for title in (figure.texts[0], *(axes.title for axes in figure.axes)):
        drawn = title.get_window_extent()
        assert drawn.x0 >= 0 and drawn.x1 <= figure.bbox.width, title


def test_a_title_of_two_lines_leaves_room_for_a_panel_with_one_row(tmp_path):
    panel = Plot(
        "mean z-score\n[deviations]",
        "",
        "",
        {"": Curve((0,), (1.0,))},
        x_ticks={0: "row"},
        is_categorical=True,
    )
    title = "a title of many words that is wider than one panel"
    figure = draw_plots(PlotGrid([panel], title, panel_size=(4.5, 1.16)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib warns where it gives up the layout
        save_figure(figure, tmp_path / "figure.png")

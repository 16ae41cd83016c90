"""Laws of tasks values_from_log_probs by the likelihood of right answers."""

import math
import re

import jax
import numpy as np
import pytest
from flax import nnx

from lm.config.layers import AttentionConfig, MlpConfig
from lm.config.model import ModelConfig
from lm.data.tasks.benchmarks import TASKS
from lm.data.tasks.choices import encode_choices, first_choices, shuffle_inputs
from lm.data.tasks.mixtures import MIXTURES
from lm.evaluate import ranked_choice
from lm.nn.transformer import Transformer
from lm.tokenizers.sentencepiece import ByteTokenizer
from lm.tokenizers.tokenizer import EOS

INPUTS_LENGTH, TARGETS_LENGTH = 20, 8
CLOZE = {"question": "a _ c", "context": "b", "answers": ["bc"], "candidates": ["x", "bc", "äö"]}
NEXT = {"sentences": ["one", "two", "three", "four"], "following": "five", "label": 2}
RESTORE = {"document": "b", "summary": "a very long one"}


def asked(name, *rows):
    return encode_choices(TASKS[name], rows, ByteTokenizer(100), (INPUTS_LENGTH, TARGETS_LENGTH))


def test_rows_are_asked_as_in_training_cut_to_length_with_their_eos():
    found = asked("restore", RESTORE)
    ((pair,),) = found.pairs
    inputs, answer = (ByteTokenizer(100).decode(list(ids)) for ids in pair)
    assert (inputs, answer) == ("restore: b", "a very ")
    assert [ids[-1] for ids in pair] == [EOS, EOS] and len(pair[1]) == TARGETS_LENGTH
    assert (found.num_bytes, found.gold, found.is_choice) == ([[7]], [0], False)  # bytes of what was left


def test_candidates_are_answers_and_premises_inputs_and_the_right_one_is_the_rows():
    found = asked("cloze", CLOZE, CLOZE)
    assert found.num_bytes == [[1, 2, 4]] * 2 and found.gold == [1, 1] and found.is_choice
    assert len({tuple(inputs) for row in found.pairs for inputs, _ in row}) == 1
    found = asked("next", NEXT)
    assert found.gold == [2] and found.num_bytes == [[4] * 4]
    assert len({tuple(answer) for _, answer in found.pairs[0]}) == 1
    assert ByteTokenizer(100).decode(list(found.pairs[0][2][0])) == "next: three"
    found = asked("acceptability", {"context": "x", "sentence": "b a", "damaged": "a b"})
    assert found.gold == [1] and found.num_bytes == [[3, 3]]
    labels = TASKS["sst2"].choices({"sentence": "good", "label": 1})
    assert ([answer for _, answer in labels[0]], labels[1]) == (["negative", "positive"], 1)


def test_shuffled_inputs_are_those_of_other_rows_and_answers_stay():
    rows = [{"context": text, "sentence": f"{text} a", "damaged": f"a {text}"} for text in "xyz"]
    found = asked("acceptability", *rows)
    shuffled = shuffle_inputs(found)
    assert (shuffled.gold, shuffled.num_bytes) == (found.gold, found.num_bytes)
    inputs = [[pair[0] for pair in row] for row in found.pairs]
    assert [[pair[0] for pair in row] for row in shuffled.pairs] == [*inputs[1:], inputs[0]]
    assert [[pair[1] for pair in row] for row in shuffled.pairs] == [
        [pair[1] for pair in row] for row in found.pairs
    ]
    assert first_choices(found, 2).pairs == found.pairs[:2] and first_choices(found, 9) == found


def scored(log_probs, gold):
    return [ranked_choice.ScoredChoice(*row) for row in zip(log_probs, gold, strict=True)]


@pytest.mark.parametrize("chances", [(0.5, 0.25, 0.25), (0.1, 0.1, 0.8), (1e-9, 1e-9, 1e-9)])
def test_bits_above_chance_are_none_for_a_guesser_and_log2_of_the_candidates_for_one_who_knows(chances):
    logs = np.log(np.array(chances)) - 1_000  # unlikely texts: their likelihood alone would be 0
    bits = [ranked_choice.bits_above_chance(row, 1.0) for row in scored([logs] * 3, range(3))]
    shares = np.array(chances) / sum(chances)
    assert bits == pytest.approx((math.log2(3) + np.log2(shares)).tolist())
    assert np.mean(bits) <= 1e-9  # on average over what is right, no fixed preference pays
    assert ranked_choice.bits_above_chance(*scored([np.array([0.0, -np.inf])], [0]), 1.0) == 1


def test_the_inverse_temperature_is_what_suits_other_rows_and_makes_a_guesser_come_to_chance():
    random = np.random.default_rng(0)
    truth = random.normal(size=(1_000, 4))
    chances = np.exp(truth) / np.exp(truth).sum(1, keepdims=True)
    right = [random.choice(4, p=row) for row in chances]
    for power in (0.5, 3.0):  # of a model that is too sure, or not sure enough
        found = ranked_choice.fit_inverse_temperature(scored(power * truth, right))
        assert found == pytest.approx(1 / power, rel=0.2)
    blind = scored(truth[:500] * 20, random.integers(4, size=500))
    power = ranked_choice.fit_inverse_temperature(blind)
    assert np.mean([ranked_choice.bits_above_chance(row, power) for row in blind]) == pytest.approx(
        0, abs=0.01
    )


def test_what_is_measured_is_the_models_and_the_metrics_are_means_of_rows(monkeypatch):
    def likelihood(model, pairs, put):
        return np.array([-len(answer) * math.log(2) for _, answer in pairs])

    def candidates(model, contexts, answers, put):
        return [likelihood(model, [(None, one) for one in each], put) for each in answers]

    monkeypatch.setattr(ranked_choice, "continuation_log_probs", likelihood)
    monkeypatch.setattr(ranked_choice, "candidate_log_probs", candidates)
    values = ranked_choice.gold_likelihoods(None, asked("cloze", CLOZE, CLOZE | {"answers": ["x"]}), None)
    # a bit a token, EOS counted, of 1, 2 and 4 bytes: by bytes the longest answer is the likeliest
    assert values.bits.tolist() == [3, 2] and values.num_bytes.tolist() == [2, 1]
    assert values.ranked_first.tolist() == [0, 0]
    rows = scored([math.log(2) * np.array([-2.0, -3, -5])] * 2, (1, 0))
    scale = ranked_choice.fit_inverse_temperature(rows)
    assert values.bits_above_chance == pytest.approx(
        [ranked_choice.bits_above_chance(row, scale) for row in rows]
    )
    found = values.metrics()
    assert found["bits_per_byte"] == pytest.approx(5 / 3)
    assert found["bits_above_chance"] == pytest.approx(values.bits_above_chance.mean())
    kept = values.example_values()
    assert set(kept) == {"bits", "ranked"} and kept["bits"].mean() == found["bits_above_chance"]
    values = ranked_choice.gold_likelihoods(None, asked("restore", RESTORE), None)
    kept = values.example_values()
    assert kept["bits"].sum() / kept["bytes"].sum() == values.metrics()["bits_per_byte"] == 8 / 7
    values = ranked_choice.gold_likelihoods(None, asked("next", NEXT), None)
    assert values.bits_above_chance == pytest.approx([0])  # the same answer everywhere: chance


def test_a_row_without_likelihoods_has_no_likeliest_answer():
    """The index of the highest of several NaN is that of the first, which may be the right one."""
    choices = asked("cloze", CLOZE, CLOZE)
    undefined = np.array([-1.0, math.nan, -2.0])
    found = ranked_choice.likelihoods_from_log_probs([undefined, np.array([-9.0, -1.0, -9.0])], choices)
    assert math.isnan(found.ranked_first[0]) and found.ranked_first[1] == 1
    assert math.isnan(found.metrics()["ranked_accuracy"])


def test_a_model_that_does_not_read_its_inputs_is_at_chance_where_inputs_are_chosen():
    config = ModelConfig(
        vocab_size=400,
        num_encoder_layers=1,
        num_decoder_layers=1,
        d_model=8,
        mlp=MlpConfig(d_ff=8),
        attention=AttentionConfig(d_kv=4),
    )
    model = Transformer(config, nnx.Rngs(params=jax.random.key(0)))
    state = nnx.state(model)
    silent = jax.tree_util.tree_map_with_path(
        lambda path, x: 0 * x if "cross" in jax.tree_util.keystr(path) else x, state
    )
    assert re.search("cross", str(jax.tree_util.tree_leaves_with_path(state)))
    nnx.update(model, silent)
    values = ranked_choice.gold_likelihoods(model, asked("next", NEXT), jax.device_put)
    assert values.bits_above_chance == pytest.approx([0], abs=1e-4) and values.bits[0] > 1


def test_every_task_of_the_documentation_has_a_report_half_and_counts_by_likelihood():
    for task in MIXTURES["documentation"]:
        assert task.report and task.paper_column and task.measure != "score"
        assert (task.measure == "bits_above_chance") == bool(task.candidates or task.candidate_inputs)
        assert task.direction == (1 if task.measure == "bits_above_chance" else -1)

"""Answers to requests in texts: what the model was trained to read stands around each of them, once."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from lm.config.base import SettingError
from lm.config.layers import AttentionConfig, MlpConfig
from lm.config.model import ModelConfig, PositionsConfig
from lm.evaluate.loglikelihood import Masking, continuation_log_probs
from lm.evaluate.text_model import decoding_from_kwargs
from lm.notebook import make_model
from lm.tokenizers.sentencepiece import ByteTokenizer

TOKENIZER = ByteTokenizer(100)
CONFIG = ModelConfig(
    vocab_size=384,
    architecture="decoder",
    num_encoder_layers=1,
    num_decoder_layers=1,
    d_model=8,
    mlp=MlpConfig(d_ff=8),
    attention=AttentionConfig(d_kv=4),
    positions=PositionsConfig(kind="learned", max_length=16),
)


@pytest.fixture(scope="module")
def decoder():
    """A decoder that reads a start token before each text."""
    return make_model(CONFIG, TOKENIZER, 0)


@pytest.fixture(scope="module")
def unstarted():
    return make_model(replace(CONFIG, special=replace(CONFIG.special, start=None)), TOKENIZER, 0)


@pytest.fixture(scope="module")
def encoder():
    return make_model(replace(CONFIG, architecture="encoder"), TOKENIZER, 0)


def test_a_text_without_a_context_follows_one_start_token(decoder):
    ids = TOKENIZER.encode("abc")
    requests = [([], ids), ([], [*ids, TOKENIZER.eos])]
    alone, ended = continuation_log_probs(decoder.model, requests, jax.device_put)
    ((asked, _),) = decoder.log_likelihoods([("", "abc")])
    assert asked == pytest.approx(alone, abs=1e-4)
    assert decoder.rolling_log_likelihoods(["abc"]) == pytest.approx([ended], abs=1e-4)


def test_an_encoder_reads_a_whole_text_between_its_special_tokens_and_scores_the_text_alone(encoder):
    requests = [([], TOKENIZER.encode("abc"))]
    (alone,) = continuation_log_probs(
        encoder.model, requests, jax.device_put, Masking(TOKENIZER.mask, *ends())
    )
    assert encoder.rolling_log_likelihoods(["abc"]) == pytest.approx([alone], abs=1e-4)
    (longer,) = encoder.rolling_log_likelihoods(["abc " * 20])
    assert np.isfinite(longer) and longer < alone


def ends():
    return (TOKENIZER.cls,), (TOKENIZER.sep,)


def test_a_context_of_blanks_belongs_to_the_continuation(unstarted):
    assert unstarted.log_likelihoods([("\n", "abc")]) == unstarted.log_likelihoods([("", "\nabc")])


def test_a_prompt_that_is_too_long_keeps_the_token_that_begins_a_text(decoder):
    start = decoder.model.config.special.start
    for prompt in ("abcdefgh", "a"):
        whole = decoder.encode_prompt(prompt)
        assert whole[0] == start and decoder._prompt_ids(prompt, 4) == [start, *whole[1:][-3:]]


def test_samples_of_one_prompt_differ_however_many_are_asked_for(decoder):
    settings = {"do_sample": True, "temperature": 1.0, "max_gen_toks": 8, "seed": 3}
    samples = decoder.generate([("ab", settings)] * 40)
    assert samples[:8] != samples[32:], "the second batch is no copy of the first"
    assert samples == decoder.generate([("ab", settings)] * 40)


def test_a_prompt_of_an_encoder_may_be_as_long_as_its_positions():
    positions = PositionsConfig(kind="learned", max_length=20)
    model = make_model(replace(CONFIG, architecture="encoder-decoder", positions=positions), TOKENIZER, 0)
    (answer,) = model.generate([("abcdefghijklmnopqr", {"max_gen_toks": 2})])
    assert isinstance(answer, str)
    with pytest.raises(SettingError, match=r"21 positions .* model.positions.max_length=20"):
        model.generate([("a", {"max_gen_toks": 21})])


def test_rows_may_be_shorter_than_the_positions_of_a_model_and_not_longer(decoder):
    assert replace(decoder, max_length=16).max_text_length == 15
    with pytest.raises(SettingError, match="max_length=17 exceeds model.positions.max_length=16"):
        replace(decoder, max_length=17)


@pytest.mark.parametrize("length", [-1, 0, 1])
def test_rows_have_room_for_a_token_beside_the_special_ones(decoder, encoder, length):
    with pytest.raises(SettingError, match=f"max_length={length} should be at least 2"):
        replace(decoder, max_length=length)
    with pytest.raises(SettingError, match=f"max_length={length + 1} should be at least 3"):
        replace(encoder, max_length=length + 1)
    for model, least in ((decoder, 2), (encoder, 3)):
        assert np.isfinite(replace(model, max_length=least).rolling_log_likelihoods(["abc"])).all()


def test_a_single_text_is_not_read_as_a_list_of_its_letters(decoder):
    with pytest.raises(SettingError, match="expects a list of texts, not the text 'abc'"):
        decoder.rolling_log_likelihoods("abc")
    with pytest.raises(SettingError, match=r"pairs\[0\]='a' should be .*two texts"):
        decoder.log_likelihoods("abc")
    with pytest.raises(SettingError, match=r"pairs\[1\]=\('a',\) should be .*two texts"):
        decoder.log_likelihoods([("a", "b"), ("a",)])


def test_an_answer_that_leaves_no_room_for_a_prompt_is_refused_with_the_most_that_fits(decoder):
    with pytest.raises(SettingError, match="max_gen_toks=256 .* 16 tokens: .*max_gen_toks of at most 15"):
        decoder.generate(["ab"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": "hot"}, "temperature='hot' should be a number"),
        ({"max_gen_toks": [3]}, r"max_gen_toks=\[3\] should be a number"),
        ({"max_gen_toks": 2.5}, r"max_gen_toks=2.5 should be a whole number"),
        ({"do_sample": True, "top_k": float("inf")}, r"top_k=inf should be a number"),
        ({"temperature": -1.0}, "temperature=-1.0 should be 0 or more"),
        ({"temperature": float("nan")}, "temperature=nan should be a number"),
    ],
)
def test_a_setting_of_a_request_that_is_no_number_of_its_kind_is_refused(settings, message):
    with pytest.raises(SettingError, match=message):
        decoding_from_kwargs(settings)


def test_samples_are_of_the_50_likeliest_tokens_unless_more_are_asked_for():
    assert decoding_from_kwargs({"do_sample": True})[0].top_k == 50
    assert decoding_from_kwargs({"temperature": 0.5, "top_k": 0})[0].top_k == 0


def test_samples_need_a_temperature_above_0():
    with pytest.raises(SettingError, match=r"do_sample needs a temperature above 0, not 0\.0"):
        decoding_from_kwargs({"do_sample": True, "temperature": 0.0})


def test_samples_have_no_beams():
    with pytest.raises(SettingError, match="num_beams and do_sample"):
        decoding_from_kwargs({"do_sample": True, "num_beams": 4})

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


def test_samples_are_of_the_50_likeliest_tokens_unless_more_are_asked_for():
    assert decoding_from_kwargs({"do_sample": True})[0].top_k == 50
    assert decoding_from_kwargs({"temperature": 0.5, "top_k": 0})[0].top_k == 0


def test_samples_need_a_temperature_above_0():
    with pytest.raises(SettingError, match=r"do_sample needs a temperature above 0, not 0\.0"):
        decoding_from_kwargs({"do_sample": True, "temperature": 0.0})


def test_samples_have_no_beams():
    with pytest.raises(SettingError, match="num_beams and do_sample"):
        decoding_from_kwargs({"do_sample": True, "num_beams": 4})

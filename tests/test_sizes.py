"""The published sizes: their parameters, counted without allocating any."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx

from lm.nn.layers import count
from lm.nn.sizes import SIZES
from lm.nn.transformer import Transformer

BASE = SIZES["t5-base"]
# Counted from the released weights, tied matrices once; of those not released, as printed in their papers.
PUBLISHED = {
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336,
    "t5-11b": 11_307_321_344,
    "t5-1.1-base": 247_577_856,
    "t5-1.1-xxl": 11_135_332_352,
    "umt5-small": 306_601_984,
    "bart-base": 139_420_416 + 50_265,
    "bart-large": 406_291_456 + 50_265,  # a bias of zeros is counted here
    "bert-base": 110_106_428,
    "bert-large": 336_226_108,
    "roberta-base": 124_697_433,
    "roberta-large": 355_412_057,
    "distilbert": 66_985_530,
    "electra-small": 13_549_057,
    "electra-base": 109_483_009,
    "gpt": 116_534_784,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "starcoder": 15_517_456_384,
    "santacoder": 1_124_886_528,
    "pythia-70m": 70_426_624,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "gpt-neox-20b": 20_554_567_680,
    "bloom-560m": 559_214_592,
    "bloom-7b1": 7_069_016_064,
    "bloom": 176_247_271_424,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
}
PRINTED = {  # as rounded in the papers [millions]
    "transformer-base": 65,
    "transformer-big": 213,
    "albert-base": 12,
    "albert-large": 18,
    "albert-xlarge": 60,
    "albert-xxlarge": 223,
    "longformer-base": 149,
    "longformer-large": 435,
    "marian": 74,
    "gpt3-small": 125,
    "gpt3-medium": 356,
    "gpt3-large": 760,
    "gpt3-xl": 1_300,
    "gpt3-2.7b": 2_700,
    "gpt3-6.7b": 6_700,
    "gpt3-13b": 13_000,
    "gpt3": 175_000,
    "electra-large": 335,
    "spanbert-base": 110,
    "spanbert-large": 340,
}


STUDY = {
    "shared": (replace(BASE, architecture="shared-encoder-decoder"), 137_949_312),
    "six layers": (replace(BASE, num_encoder_layers=6, num_decoder_layers=6), 123_790_080),
    "language model": (replace(BASE, architecture="decoder"), 109_628_544),
    "prefix LM": (replace(BASE, architecture="prefix-decoder"), 109_628_544),
}
COUNTS = {name: (SIZES[name], due, 0.0) for name, due in PUBLISHED.items()}
COUNTS |= {name: (SIZES[name], 1e6 * due, 0.035) for name, due in PRINTED.items()}
COUNTS |= {name: (config, due, 0.0) for name, (config, due) in STUDY.items()}


@pytest.mark.parametrize(("config", "due", "rounding"), COUNTS.values(), ids=COUNTS)
def test_parameter_counts_are_those_of_released_weights_of_the_study_or_about_those_printed(
    config, due, rounding
):
    found = count(jax.eval_shape(lambda: Transformer(config, nnx.Rngs(params=0))))
    np.testing.assert_allclose(found, due, rtol=rounding)

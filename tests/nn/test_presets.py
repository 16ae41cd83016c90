"""The published sizes: their parameters, counted without allocating any."""

import re
from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx

from lm.config.model import SpecialTokens
from lm.nn.layers import num_parameters
from lm.nn.presets import PRESETS
from lm.nn.transformer import Transformer

BASE = PRESETS["t5-base"]
# Counted from the released weights, tied matrices once; of those not released, as printed in their papers.
PUBLISHED = {
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336,
    "t5-11b": 11_307_321_344,
    "t5-1.1-base": 247_577_856,
    "t5-1.1-xxl": 11_135_332_352,
    "switch-base-8": 619_339_008,
    "switch-base-16": 1_072_397_568,
    "switch-base-32": 1_978_514_688,
    "switch-base-64": 3_790_748_928,
    "switch-base-128": 7_415_217_408,
    "switch-base-256": 14_664_154_368,
    "switch-large-128": 26_309_291_008,
    "umt5-small": 306_601_984,
    "mt5-small": 300_176_768,
    "mt5-base": 582_401_280,
    "mt5-large": 1_229_581_312,
    "mt5-xl": 3_742_619_648,
    "mt5-xxl": 12_921_057_280,
    "mbart-large": 610_851_840 + 250_027,
    "pegasus-large": 568_699_904 + 96_103,
    "bart-base": 139_420_416 + 50_265,
    "bart-large": 406_291_456 + 50_265,  # a bias of zeros is counted here
    "bert-base": 110_106_428,
    "bert-large": 336_226_108,
    "roberta-base": 124_697_433,
    "roberta-large": 355_412_057,
    "xlm-roberta-base": 278_295_186,
    "xlm-roberta-large": 560_142_482,
    "camembert-base": 110_655_493,
    "mpnet-base": 109_518_527,
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
    "pythia-1b": 1_011_781_632,
    "pythia-1.4b": 1_414_647_808,
    "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
    "falcon-7b": 6_921_720_704,
    "falcon-40b": 41_303_293_952,
    "gpt-neo-125m": 125_198_592,
    "gpt-neo-1.3b": 1_315_575_808,
    "gpt-neo-2.7b": 2_651_307_520,
    "gpt-j-6b": 6_050_882_784,
    "gpt-neox-20b": 20_554_567_680,
    "bloom-560m": 559_214_592,
    "bloom-7b1": 7_069_016_064,
    "bloom": 176_247_271_424,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "opt-125m": 125_239_296,
    "opt-350m": 331_196_416,
    "opt-1.3b": 1_315_758_080,
    "opt-2.7b": 2_651_596_800,
    "opt-6.7b": 6_658_473_984,
    "opt-13b": 12_853_473_280,
    "opt-30b": 29_974_540_288,
    "llama-30b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "mpt-7b": 6_649_286_656,
    "mpt-30b": 29_957_200_896,
    "yi-6b": 6_061_035_520,
    "yi-34b": 34_388_917_248,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "phi-3-mini": 3_821_079_552,
    "phi-4": 14_659_507_200,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "deberta-base": 139_244_121,
    "deberta-large": 406_264_921,
    "deberta-xlarge": 758_905_945,
    "deberta-v2-xlarge": 887_085_156,
    "deberta-v2-xxlarge": 1_567_041_636,
    "modernbert-base": 149_655_232,
    "xlnet-base": 116_750_336,
    "xlnet-large": 360_300_800,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b": 999_885_952,
    "olmo-2-1b": 1_484_916_736,
    "olmo-2-7b": 7_298_617_344,
    "olmo-2-13b": 13_716_198_400,
    "olmo-2-32b": 32_234_279_936,
    "granite-3.0-2b": 2_533_531_648,
    "granite-3.0-8b": 8_170_848_256,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
}
PRINTED = {  # as rounded in the papers [millions]
    "transformer-base": 65,
    "transformer-big": 213,
    "bert-tiny": 4.4,  # Turc et al. 2019, with the masked and the next-sentence head
    "bert-mini": 11.3,
    "bert-small": 29.1,
    "bert-medium": 41.7,
    "albert-base": 12,
    "albert-large": 18,
    "albert-xlarge": 60,
    "albert-xxlarge": 223,
    "deberta-v3-xsmall": 22 + 48,  # blocks and embedding
    "deberta-v3-small": 44 + 98,
    "deberta-v3-base": 86 + 98,
    "deberta-v3-large": 304 + 131,
    "mdeberta-v3-base": 86 + 190,
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
    "opt-66b": 66_000,
    "palm-8b": 8_630,
    "palm-62b": 62_500,
    "palm-540b": 540_350,
    "yi-9b": 8_830,
    "gpt3": 175_000,
    "electra-large": 335,
    "spanbert-base": 110,
    "spanbert-large": 340,
    "modernbert-large": 395,
    "gemma-3-4b": 3_884,  # without the encoder of pictures
    "gemma-3-12b": 11_771,
    "gemma-3-27b": 27_016,
}


STUDY = {
    "shared": (replace(BASE, architecture="shared-encoder-decoder"), 137_949_312),
    "six layers": (replace(BASE, num_encoder_layers=6, num_decoder_layers=6), 123_790_080),
    "language model": (replace(BASE, architecture="decoder"), 109_628_544),
    "prefix LM": (replace(BASE, architecture="prefix-decoder"), 109_628_544),
}
COUNTS = {name: (PRESETS[name], due, 0.0) for name, due in PUBLISHED.items()}
COUNTS |= {name: (PRESETS[name], 1e6 * due, 0.035) for name, due in PRINTED.items()}
COUNTS |= {name: (config, due, 0.0) for name, (config, due) in STUDY.items()}
FIRST = {re.split(r"[-.\d]", name)[0]: name for name in reversed(COUNTS)}.values()  # of each family
CASES = [
    pytest.param(*case, id=name, marks=[] if name in (*FIRST, *STUDY) else pytest.mark.slow)
    for name, case in COUNTS.items()
]


@pytest.mark.parametrize(("config", "due", "rounding"), CASES)
def test_parameter_counts_are_those_of_released_weights_of_the_study_or_about_those_printed(
    config, due, rounding
):
    found = num_parameters(jax.eval_shape(lambda: Transformer(config, nnx.Rngs(params=0))))
    np.testing.assert_allclose(found, due, rtol=rounding)


def test_gpt_neox_has_the_tanh_form_of_gelu_and_pythia_that_of_the_error_function():
    assert PRESETS["gpt-neox-20b"].mlp.activation == "gelu-tanh"
    assert {PRESETS[name].mlp.activation for name in PRESETS if name.startswith("pythia-")} == {"gelu"}


def test_santacoders_end_of_text_comes_after_its_vocabulary_and_starcoders_is_the_first_token():
    """As in the config.json that bigcode released with each."""
    assert PRESETS["santacoder"].special == SpecialTokens(pad=0, eos=49_152, start=None)
    assert PRESETS["starcoder"].special == SpecialTokens(pad=0, eos=0, start=None)

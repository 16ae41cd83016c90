"""Every case of golden/peer_cases.json: what other projects' functions gave, computed with ours.

A number may differ by the tolerance that the file gives its function.
"""

from collections import Counter
from fnmatch import fnmatchcase
from functools import partial

import jax.numpy as jnp
import numpy as np
import peers
import pytest
from pages import clean_page
from paths import TESTS
from recorded_cases import PATTERNS, PEERS, left_out

from lm import metrics
from lm.c4 import filters
from lm.data.tasks import benchmarks
from lm.data.tasks.benchmarks import TASKS
from lm.data.tasks.mixtures import mixing_rates
from lm.data.tasks.task import class_from_text
from lm.nn.layers import ACTIVATIONS
from lm.ops.masks import CAUSAL
from lm.ops.positions import alibi_slopes, relative_position_bucket
from lm.tokenizers.sentencepiece import ByteTokenizer

SQUAD = {"em": metrics.exact_match, "f1": metrics.answer_f1}
ROUGE = {name: metrics.rouge(name) for name in ("rouge1", "rouge2", "rougeLsum")}
ADAPTERS = {
    "relative_position_bucket": lambda relative_position, **given: relative_position_bucket(
        jnp.arange(relative_position[0], relative_position[1] + 1), **given
    ),
    "t5x.layers.make_decoder_mask": peers.decoder_mask,
    "t5x.layers.make_causal_mask": lambda x: CAUSAL.materialize(len(x[0]), len(x[0])),
    "t5x.layers.make_attention_mask": peers.attention_mask,
    "attention": peers.attention,
    "rope.rotate_half": peers.rotary,
    "alibi.slopes": lambda num_heads: alibi_slopes(num_heads),
    "sinusoidal.halves": partial(peers.sinusoid, "halves"),
    "sinusoidal.interleaved": partial(peers.sinusoid, "interleaved"),
    "flaxformer.initializers.sinusoidal": partial(peers.sinusoid, "tensor2tensor"),
    "t5x.losses.compute_weighted_cross_entropy": peers.weighted_loss,
    "cross_entropy": peers.mean_loss,
    "label_smoothing(hf)": peers.smoothed_loss,
    "rms_norm": partial(peers.norm, "rms"),
    "layer_norm": partial(peers.norm, "layer"),
    "activation": lambda name, x: ACTIVATIONS["gelu-tanh"](jnp.array(x)),
    **dict.fromkeys(("adafactor(t5x)", "adafactor(hf)", "adafactor(optax)"), peers.adafactor),
    "t5x.adafactor.single_step": peers.adafactor_step,
    "adamw(torch)": peers.adamw,
    "clip_by_global_norm": peers.clipped,
    "t5x.utils.create_learning_rate_scheduler": peers.t5x_schedule,
    "hf.schedule.constant_with_warmup": partial(peers.schedule, "constant"),
    "hf.schedule.linear_warmup_linear_decay": partial(peers.schedule, "linear"),
    "hf.schedule.linear_warmup_cosine": partial(peers.schedule, "cosine"),
    "t5.preprocessors.noise_span_to_unique_sentinel": partial(peers.side, "inputs", "sentinels"),
    "t5.preprocessors.noise_token_to_sentinel": partial(peers.side, "inputs", "masks"),
    "t5.preprocessors.drop_noise_tokens": partial(peers.side, "inputs", "drop"),
    "t5.preprocessors.nonnoise_span_to_unique_sentinel": partial(peers.side, "targets", "sentinels"),
    "t5.preprocessors.drop_nonnoise_tokens": partial(peers.side, "targets", "drop"),
    "t5.objective": peers.both_sides,
    "t5.preprocessors.random_spans_noise_mask:counts": peers.span_counts,
    "t5.preprocessors.random_spans_helper": peers.span_lengths,
    "seqio.EncDecFeatureConverter": partial(peers.converted, "encoder-decoder"),
    "seqio.LMFeatureConverter": partial(peers.converted, "decoder"),
    "seqio.PrefixLMFeatureConverter": partial(peers.converted, "prefix-decoder"),
    "seqio.utils.trim_and_pack_dataset": peers.packed_rows,
    "seqio.utils.make_autoregressive_inputs": peers.shifted,
    "seqio.utils._shift_right_by_one": lambda tensor, bos_id: peers.shifted(tensor, bos_id=bos_id),
    "seqio.preprocessors.append_eos_after_trim": peers.cut_before_eos,
    "seqio.utils.mixing_rate_num_examples": lambda num_examples, maximum, scale, temperature: np.divide(
        *mixing_rates(
            {"task": num_examples * scale, "single": 1},
            kind="proportional",
            limit=maximum,
            temperature=temperature,
        ).values()
    ),
    "seqio.ByteVocabulary.encode": lambda text, extra_ids: ByteTokenizer(extra_ids).encode(text),
    "seqio.ByteVocabulary.decode": lambda ids, extra_ids: ByteTokenizer(extra_ids).decode(ids),
    "c4.clean_page": lambda text, **_: {"text": clean_page(text, filters.Rules())},
    "c4.remove_duplicate_lines": peers.deduplicated,
    "c4.badwords_filter": lambda text, language, badwords: {
        "keep": filters.bad_words_test(badwords.get(language, ()), language)(text)
    },
    "c4.is_valid_length": lambda n_chars: bool(
        filters.apply_filters(["x" * n_chars], filters.build_filters(filters.Rules(), ("page-length",)))
    ),
    "c4.paragraph_filter": lambda text, min_paragraphs, min_paragraph_len: filters.has_paragraphs(
        text.split("\n"), min_paragraphs, min_paragraph_len
    ),
    "t5.preprocessors.glue": peers.glue,
    "t5.preprocessors.stsb": peers.stsb,
    "t5.preprocessors.record": peers.record,
    "t5.preprocessors.translate": lambda x, source_language, target_language: peers.example(
        benchmarks.translate(x[0], source_language, target_language)
    ),
    "t5.preprocessors.definite_pronoun_resolution_simple": lambda x: peers.example(
        TASKS["dpr"].to_text(x[0])
    ),
    "t5.preprocessors.wsc_simple": lambda dataset, **_: peers.example(TASKS["wsc"].to_text(dataset[0])),
    "t5.preprocessors._pad_punctuation": benchmarks.space_punctuation,
    "t5.postprocessors.wsc_simple": lambda prediction, example, **_: benchmarks.names_candidate(
        prediction, {"span1_text": example["targets_pretokenized"]}
    ),
    "t5.postprocessors.string_label_to_class_id": lambda string_label, label_classes: class_from_text(
        label_classes
    )(string_label, {}),
    "t5.postprocessors.string_to_float": lambda string: metrics.parse_number(string),
    "t5.qa_utils.normalize_squad": lambda answer: metrics.normalise_answer(answer),
    "t5.qa_utils.qa_metrics": partial(peers.metric, **SQUAD),
    "t5.metrics.squad": partial(peers.metric, **SQUAD),
    "t5.metrics.rouge": partial(peers.metric, **ROUGE),
    "t5.metrics.rouge_mean": partial(peers.metric, **ROUGE),
    "t5.metrics.accuracy": partial(peers.metric, accuracy=metrics.accuracy),
    "t5.metrics.sequence_accuracy": partial(peers.metric, sequence_accuracy=metrics.accuracy),
    "t5.metrics.f1_score_with_invalid": partial(peers.metric, f1=metrics.binary_f1),
    "t5.metrics.mean_multiclass_f1(num_classes=3)": partial(peers.metric, mean_3class_f1=metrics.macro_f1(3)),
    "t5.metrics.sklearn_metrics_wrapper(matthews_corrcoef, metric_post_process_fn=100*x)": partial(
        peers.metric, matthews_corrcoef=metrics.matthews
    ),
    "t5.metrics.pearson_corrcoef": partial(peers.metric, pearson_corrcoef=metrics.pearson),
    "t5.metrics.spearman_corrcoef": partial(peers.metric, spearman_corrcoef=metrics.spearman),
    "t5.metrics.bleu": partial(peers.metric, bleu=metrics.bleu),
    "t5.metrics.mean_group_metric(all_match)": partial(peers.grouped, exact_match=metrics.group_exact_match),
    "t5.metrics.multirc_f1_over_all_answers": partial(peers.grouped, f1=metrics.ungrouped(metrics.binary_f1)),
    "t5.metrics._sequence_f1": lambda target_tokens, prediction_tokens: metrics.word_f1(
        " ".join(target_tokens), " ".join(prediction_tokens)
    ),
}
ELSEWHERE = {  # functions whose cases test_decode.py runs, on a chain that stands in for a model
    "beam_search.exhaustive",
    "sampling.warp_logits",
    "t5x.decoding.beam_search",
    "t5x.decoding.beam_search:markov_toy",
    "t5x.decoding.beam_search:static",
    "t5x.decoding.brevity_penalty",
    "t5x.decoding.temperature_sample:greedy",
    "t5x.decoding.temperature_sample:static",
}
FLOAT32 = {"hf.schedule.": 1e-6}  # theirs are in float64: a looser tolerance by the beginning of a name
# what others give besides, and all that is called idx
NOT_OURS = {"counters", "passthrough", "answers", "label"}


def is_ours(name):
    return name not in NOT_OURS and not name.startswith("idx")


def compare(found, expected, tolerance):
    if isinstance(expected, dict):
        for name in filter(is_ours, expected):
            compare(found[name], expected[name], tolerance)
    elif isinstance(expected, list) and expected and isinstance(expected[0], dict | list):
        for ours, theirs in zip(
            found if isinstance(found, list) else np.asarray(found), expected, strict=True
        ):
            compare(ours, theirs, tolerance)
    elif isinstance(expected, list | int | float) and np.asarray(expected).dtype.kind in "biuf":
        shown = ~np.ma.getmaskarray(np.ma.asarray(found))
        assert shown.shape == np.shape(expected)
        np.testing.assert_allclose(
            np.asarray(found)[shown], np.asarray(expected)[shown], rtol=tolerance, atol=tolerance
        )
    else:
        assert (found if isinstance(expected, str | None) else [found]) == expected


CASES = [case for case in PEERS["cases"] if case["fn"] in ADAPTERS and not left_out(case["id"])]


QUICK_CASES = 3  # of each function; the others run with the slow tests


def cases_of_functions():
    """The cases as parameters of a test."""
    counts = Counter()
    for case in CASES:
        counts[case["fn"]] += 1
        marks = [] if counts[case["fn"]] <= QUICK_CASES else pytest.mark.slow
        yield pytest.param(case, id=case["id"], marks=marks)


@pytest.mark.parametrize("case", [*cases_of_functions()])
def test_ours_gives_what_theirs_gave(case):
    loose = [tolerance for name, tolerance in FLOAT32.items() if case["fn"].startswith(name)]
    compare(
        ADAPTERS[case["fn"]](**case["args"]), case["expected"], *loose or [PEERS["tolerances"][case["fn"]]]
    )


def test_every_function_is_run_or_left_out_for_a_reason():
    functions = {case["fn"] for case in PEERS["cases"]}
    assert functions >= ADAPTERS.keys() | ELSEWHERE
    assert all((name in ADAPTERS) + (name in ELSEWHERE) + left_out(name) == 1 for name in functions)
    names = functions | {case["id"] for case in PEERS["cases"]}
    assert all(any(fnmatchcase(name, pattern) for name in names) for pattern in PATTERNS)
    text = (TESTS / "evaluate" / "test_decode.py").read_text()
    assert all(f'"{name}"' in text for name in ELSEWHERE)

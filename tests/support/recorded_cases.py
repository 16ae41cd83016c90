"""The cases of golden/peer_cases.json, and which of them are left out for which reason."""

import json
from fnmatch import fnmatchcase

from paths import GOLDEN

PEERS = json.loads((GOLDEN / "peer_cases.json").read_text())
LEFT_OUT = {  # why: functions, or single cases by id, as shell patterns
    "statements without numbers; each is a law with a name in the tests of what it is about": "property",
    "no family here turns neighbouring features together": "rope.interleaved",
    "quick_gelu: no family here has it": "activation#0c68c0",
    "is &, is +, is str.lower": "t5x.layers.combine_* t5.postprocessors.lower_text",
    "labels of -100: ours are weights; the shift is that of make_autoregressive_inputs": ""
    "bart.shift_tokens_right",
    "every target token weighs the same": "t5x.losses._sum_weights_per_segment",
    "the loss is always divided by its weights' sum": "t5x.losses.get_loss_normalizing_factor_and_weights",
    "T5's takes no mean of its updates": "adafactor(optax)#146202 adafactor(optax)#9dfc32",
    "shifts its start; T5's does not": "hf.schedule.inverse_sqrt",
    "one sentinel for all runs: no objective shows it": "t5.preprocessors.*noise_span_to_sentinel",
    "as a text; here it is a label of two pieces (test_masked_lm.py)": ""
    "t5.preprocessors.next_sentence_prediction",
    "splits a row anywhere; ours are documents with EOS": "t5.preprocessors.pack_prefix_lm_*",
    "inputs are cut at their end": ""
    "t5.preprocessors.trim_tokens_at_front seqio.preprocessors.truncate_inputs_left",
    "finds what is predicted by the mask's id; ours knows it (test_objectives.py)": ""
    "seqio.EncoderFeatureConverter",
    "examples are packed here, never before": "seqio.PrePackedEncDecFeatureConverter",
    "no task has a third part": "seqio.PrefixSuffixLMFeatureConverter",
    "features of any rank: all of ours are token ids": "seqio.utils.trim_and_pad_dataset",
    "padding is told by segments, never by id": "seqio.feature_converters.non_padding_position",
    "always cut first: append_eos_after_trim": "seqio.preprocessors.append_eos",
    "a task's to_text picks the columns": "seqio.preprocessors.rekey",
    "begins with an id of its own": "seqio.LMFeatureConverter#a6e6f5 seqio.PrefixLMFeatureConverter#aa0e37",
    "sentinels are shown, not dropped": "seqio.ByteVocabulary.decode#c0df24",
    "ReCoRD is evaluated on one row per question: there are no duplicates": "t5.metrics.deduplicate_metric*",
    "within group_exact_match": "t5.metrics.all_match",
    "a task keeps the row beside its answer": ""
    "t5.postprocessors.multirc t5.postprocessors.qa t5.postprocessors.record",
    "needs a vocabulary that is not in this repository; the tokenizers library reads it": "bert_wordpiece*",
    "no search here ends because all that is left is too unlikely": "t5x.decoding.beam_search:static#e1ab4d",
    "no paper here draws so": "sampling.min_p sampling.no_repeat_ngram sampling.repetition_penalty",
    "prompts stay left": "t5x.decoding._right_align_prompts t5x.decoding.flat_batch_beam_expand",
    "of no task of the study": """
        t5.metrics.*coqa_* t5.metrics.trivia_qa t5.metrics.span_squad t5.metrics.*auc
        t5.metrics.rank_classification
        t5.metrics.edit_distance *(mean_absolute_error) t5.metrics.mean_group_metric(accuracy)
        t5.postprocessors.rank_classification t5.postprocessors.span_qa t5.preprocessors._span_answer
        t5.preprocessors.multi_translate t5.preprocessors.*parse*_tsv t5.preprocessors.preprocess_tsv
        t5.preprocessors.rank_classification_formatter t5.preprocessors.split_text_to_words
        t5.preprocessors.squad_span_space_tokenized t5.preprocessors.trivia_qa_truncate_inputs
        t5.qa_utils.normalize_trivia_qa
    """,
}
PATTERNS = " ".join(LEFT_OUT.values()).split()


def left_out(name):
    return any(fnmatchcase(name, pattern) for pattern in PATTERNS)

"""Make heads.npz anew: what the classes of transformers for tuned models compute above the checkpoints here.

    python make_heads.py

Needs torch and transformers 5. Read: the checkpoints here and the inputs in their golden.npz. Poolers and
heads are drawn by their names (drawn.py). Written: ``FAMILY/CLASS``, the logits; of spans [B,L,2], start and
end.
"""

from pathlib import Path

import numpy as np
import torch
import transformers
from drawn import drawn

HERE = Path(__file__).parent
LABELS = {"ForSequenceClassification": 3, "ForTokenClassification": 3}
ENCODER = ["SequenceClassification", "MultipleChoice", "TokenClassification", "QuestionAnswering"]
DECODER = ["SequenceClassification", "TokenClassification", "QuestionAnswering"]
CLASSES = {
    "bert": ENCODER,
    "albert": ENCODER,
    "distilbert": ENCODER,
    "roberta": ENCODER,
    "electra_disc": ENCODER,
    "deberta_v2": ENCODER,
    "xlnet": ["SequenceClassification", "MultipleChoice", "TokenClassification"],
    "gpt2": DECODER,
    "llama_gqa": ["SequenceClassification", "TokenClassification"],
    "mistral": DECODER,
    "gpt_neo": DECODER,
    "gptj": ["SequenceClassification", "QuestionAnswering"],
    "opt": ["SequenceClassification"],
    "bloom_alibi": DECODER,
    "gpt_bigcode_mqa": ["SequenceClassification", "TokenClassification"],
    "gpt_neox_rotary": DECODER,
    "qwen3": ["SequenceClassification", "TokenClassification"],
    "eurobert": ["SequenceClassification", "TokenClassification"],
}
HEADS = ("pooler", "pre_classifier", "classifier", "sequence_summary", "logits_proj", "qa_outputs", "score")
WITHOUT_BIAS = ("xlnet", "eurobert")  # heads of ours above these have no biases
PADDING = 0  # in the recorded inputs of decoders, whose files name none


def redraw(model):
    for name, parameter in model.named_parameters():
        *path, leaf = name.split(".")
        module = next((each for each in HEADS if each in path), None)
        if path == ["dense"]:  # of EuroBERT's class; other layers of this name lie within modules
            module = "dense"
        if module and leaf == "bias" and model.config.model_type in WITHOUT_BIAS:
            parameter.data.zero_()
        elif module:
            of_classifier = module == "classifier" and path[-1] != module  # its layers dense and out_proj
            called = path[-1] if of_classifier else module
            parameter.data = torch.from_numpy(drawn(f"{called}.{leaf}", tuple(parameter.shape)))


@torch.no_grad()
def logits(family, suffix):
    config = transformers.AutoConfig.from_pretrained(HERE / family)
    name = config.architectures[0].removesuffix("LMHeadModel").partition("For")[0]
    made = getattr(transformers, f"{name}For{suffix}")
    sizes = {"num_labels": LABELS[f"For{suffix}"]} if f"For{suffix}" in LABELS else {}
    if config.architectures[0].endswith(("CausalLM", "LMHeadModel")):
        sizes["pad_token_id"] = PADDING
    model = made.from_pretrained(HERE / family, attn_implementation="eager", **sizes).eval()
    redraw(model)
    with np.load(HERE / family / "golden.npz") as arrays:
        names = [
            key[3:]
            for key in arrays.files
            if key in ("in/input_ids", "in/attention_mask", "in/token_type_ids")
        ]
        batch = {key: torch.from_numpy(arrays[f"in/{key}"]).long() for key in names}
    if suffix == "MultipleChoice":  # one row, the texts its candidates
        batch = {key: value[None] for key, value in batch.items()}
    found = model(**batch)
    if suffix == "QuestionAnswering":
        return torch.stack([found.start_logits, found.end_logits], -1).numpy()
    return found.logits.numpy()


def main():
    every = {f"{family}/{suffix}": logits(family, suffix) for family in CLASSES for suffix in CLASSES[family]}
    np.savez_compressed(HERE / "heads.npz", **every)
    for name, array in every.items():
        print(name, array.shape, float(np.abs(array).mean()))


if __name__ == "__main__":
    main()

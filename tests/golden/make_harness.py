"""Record what lm-evaluation-harness's own ``hf`` model answers, with checkpoints of this folder.

``python make_harness.py`` needs lm-eval 0.4.13 and transformers 5, the tests do not.

For each model ``harness/NAME`` gets a tokenizer, and ``harness/answers.json`` what was asked and answered:
(context, continuation) -> log-likelihood and whether it is greedy; text -> log-likelihood by rolling windows;
(prompt, generation settings) -> text.
"""

import json
import shutil
import tempfile
from pathlib import Path

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

HERE = Path(__file__).parent
TEXT = "the cat sat on the mat and the dog ran to the park where a bird sang all day in a tall green tree. "
# model -> special tokens by id, the settings that name them, what is put around a text, backend
MODELS = {
    "gpt2": (
        ["<pad>", "<unk>", "<mask>", "<|endoftext|>"],
        {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"},
        None,
        "causal",
    ),
    "llama_gqa": (["<unk>", "<s>", "</s>"], {"bos_token": "<s>", "eos_token": "</s>"}, "<s> $A", "causal"),
    "t5_v1_0": (
        ["<pad>", "</s>", "<unk>"],
        {"eos_token": "</s>", "pad_token": "<pad>"},
        "$A </s>",
        "seq2seq",
    ),
}
LENGTH = 64  # the harness's max_length [tokens]
PAIRS = [
    ("the cat sat", " on the mat"),
    ("the cat sat ", "on the mat"),
    ("the dog", " ran"),
    ("", "a bird sang"),
    (TEXT * 2, " all day"),  # too long: loses its beginning
    ("where", " z q x"),
]
TEXTS = ["the cat", TEXT, TEXT * 3]
PROMPTS = [
    ("the cat sat on", {"until": [" a", "."], "max_gen_toks": 12}),
    ("a bird", {"until": "e", "max_gen_toks": 6, "do_sample": False}),
    (TEXT * 2, {"max_gen_toks": 8}),
]


def save_tokenizer(name: str, folder: Path) -> None:
    """A small one, trained on TEXT."""
    special, settings, template, _ = MODELS[name]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=100, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([TEXT, "fjkquvxz"], trainer)
    if template is not None:
        ids = [(token, number) for number, token in enumerate(special)]
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")


def asked(kind: str, *arguments: object) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def answers(name: str) -> dict[str, list]:
    """Of the harness's own model."""
    tokenizer = HERE / "harness" / name
    save_tokenizer(name, tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        for file in (
            *(HERE / name / file for file in ("config.json", "model.safetensors")),
            *tokenizer.iterdir(),
        ):
            shutil.copy(file, folder)
        model = HFLM(folder, backend=MODELS[name][-1], device="cpu", dtype="float32", max_length=LENGTH)
        return {
            "pairs": model.loglikelihood([asked("loglikelihood", *pair) for pair in PAIRS]),
            "texts": model.loglikelihood_rolling([asked("loglikelihood_rolling", text) for text in TEXTS]),
            "prompts": model.generate_until([asked("generate_until", *prompt) for prompt in PROMPTS]),
        }


def main() -> None:
    questions = {"pairs": PAIRS, "texts": TEXTS, "prompts": PROMPTS, "max_length": LENGTH}
    found = {name: answers(name) for name in MODELS}
    (HERE / "harness" / "answers.json").write_text(
        json.dumps(questions | {"answers": found}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()

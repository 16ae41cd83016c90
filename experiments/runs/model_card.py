"""Write the README.md of an exported model: what it is, what it was trained on, its scores, how to load it.

It begins with the fields that the Hugging Face hub reads (YAML between two lines of ---). All of it comes
from the records of the run.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from experiments.runs.checks import exported_model
from experiments.runs.kinds.head import HeadFinetuning, head_config
from experiments.runs.kinds.network import NetworkStage
from experiments.runs.kinds.pretraining import ExternalCheckpoint
from experiments.runs.kinds.stage import LabelledStage, Stage
from experiments.runs.kinds.vectors import SkipGram
from experiments.runs.paths import find_cache, start_folder
from experiments.runs.result import read_result
from experiments.runs.scores import held_out
from experiments.runs.start_origin import hub_name, training_of_start
from experiments.study.experiment import Experiment
from lm.config.training import Weights
from lm.convert import SENTENCE_TRANSFORMER
from lm.data.corpus.spec import corpus_parts
from lm.data.tasks.labelled import AnyTask
from lm.data.tasks.names import task_name
from lm.objectives.denoising import OBJECTIVES

CARD = "README.md"
# how the names of English corpora and of the data of English tasks begin
ENGLISH = ("documentation", "c4/en", "glue/", "super_glue/", "squad/")


@dataclass(frozen=True)
class Use:
    """Says how a model of some class is used: its tag on the hub, and the lines of Python that load it."""

    tag: str
    lines: tuple[str, ...]


def _pipeline(tag: str, text: str, options: str = "") -> Use:
    lines = (
        "from transformers import pipeline",
        "",
        f'model = pipeline("{tag}", model="FOLDER"{options})',
        f'print(model("{text}"))',
    )
    return Use(tag, lines)


def _auto(tag: str, auto_class: str) -> Use:
    lines = (
        f"from transformers import AutoTokenizer, {auto_class}",
        "",
        'tokenizer = AutoTokenizer.from_pretrained("FOLDER")',
        f'model = {auto_class}.from_pretrained("FOLDER")',
    )
    return Use(tag, lines)


CUT = ", truncation=True"  # without it transformers reads longer texts than any in training

# The pipeline of transformers would give every token a tag, and guess where words begin, but the head was
# tuned on the first token of each word. The space before a word is given, since byte-level tokenizers
# make it a part of the word's first token.
_tagger = _auto("token-classification", "AutoModelForTokenClassification")
TAGGER = replace(
    _tagger,
    lines=(
        *_tagger.lines,
        'words = ["She", "wrote", "from", "New", "York", "."]',
        'spaced = [words[0], *(f" {word}" for word in words[1:])]',
        'inputs = tokenizer(spaced, is_split_into_words=True, truncation=True, return_tensors="pt")',
        "classes = model(**inputs).logits[0].argmax(-1).tolist()",
        "for number, word in enumerate(words):",
        "    if tokens := inputs.word_to_tokens(number):  # None for a word that was cut off",
        "        print(word, model.config.id2label[classes[tokens.start]])",
    ),
)

# A vocabulary that was trained here spells its mask otherwise than [MASK].
FILL_MASK = Use(
    "fill-mask",
    (
        "from transformers import pipeline",
        "",
        'model = pipeline("fill-mask", model="FOLDER")',
        'print(model(f"The {model.tokenizer.mask_token} is returned."))',
    ),
)

# By how the name of the class ends; the first that fits. transformers has no pipeline for the others.
USES = {
    SENTENCE_TRANSFORMER: Use(
        "sentence-similarity",
        (
            "from sentence_transformers import SentenceTransformer",
            "",
            'model = SentenceTransformer("FOLDER")',
            'print(model.encode(["A text."]))',
        ),
    ),
    "ForSequenceClassification": _pipeline("text-classification", "A text.", CUT),
    "ForTokenClassification": TAGGER,
    "ForQuestionAnswering": _auto("question-answering", "AutoModelForQuestionAnswering"),
    "ForMultipleChoice": _auto("multiple-choice", "AutoModelForMultipleChoice"),
    "ForConditionalGeneration": _auto("text2text-generation", "AutoModelForSeq2SeqLM"),
    "MTModel": _auto("translation", "AutoModelForSeq2SeqLM"),
    "ForMaskedLM": FILL_MASK,
    "ElectraForPreTraining": _auto("feature-extraction", "AutoModelForPreTraining"),  # a discriminator
    "ForPreTraining": FILL_MASK,
    "ForCausalLM": _pipeline("text-generation", "The"),
    "LMHeadModel": _pipeline("text-generation", "The"),
    "": _auto("feature-extraction", "AutoModel"),
}


def model_card(
    run: Path,
    stage: NetworkStage,
    hf_config: Mapping[str, Any],
    class_name: str,
    weights: Weights,
    has_head: bool,
) -> str:
    """Return the text of the README.md of a stage's model.

    ``hf_config`` is its config.json, ``class_name`` the class that it was written as, ``weights`` those that
    were written; ``has_head``: its head was written too.
    """
    use = next(use for ending, use in USES.items() if class_name.endswith(ending))
    if isinstance(stage, HeadFinetuning) and not has_head and class_name != SENTENCE_TRANSFORMER:
        states = _read_by_head(stage, class_name).split("`")[1]
        reads = 'inputs = tokenizer(["A text."], padding=True, truncation=True, return_tensors="pt")'
        use = USES[""]
        use = replace(use, lines=(*use.lines, reads, f"print(model(**inputs).{states})"))
    is_scored = class_name == SENTENCE_TRANSFORMER and has_head
    tag = "text-classification" if is_scored and hf_config.get("id2label") else use.tag
    library = "sentence-transformers" if class_name == SENTENCE_TRANSFORMER else "transformers"
    base = _base_model(run, stage)
    fields = {"library_name": library, "pipeline_tag": tag, "language": _language(stage), "base_model": base}
    known = [f"{name}: {json.dumps(value)}" for name, value in fields.items() if value]
    parts = [
        "\n".join(["---", *known, "---"]),
        f"# {_title(stage, hf_config)}",
        " ".join(_description(stage, hf_config, class_name, has_head)),
        "## Training",
        "\n".join(f"- {line}" for line in training_lines(run, stage)),
        "## Scores",
        _scores(run, stage, weights, has_head),
        "## Use",
        "\n".join(["```python", *use.lines, "```"]),
        "`FOLDER` is this folder, or its name on the hub.",
    ]
    return "\n\n".join(parts) + "\n"


def _title(stage: NetworkStage, hf_config: Mapping[str, Any]) -> str:
    kind = hf_config["model_type"]
    tasks = ", ".join(map(task_name, stage.task_names))
    return f"{kind} tuned for {tasks}" if tasks else kind


def _description(
    stage: NetworkStage, hf_config: Mapping[str, Any], class_name: str, has_head: bool
) -> list[str]:
    """Return sentences on what the model is, and what its head gives."""
    model = stage.settings.model
    layers = []
    if model.has_encoder:
        layers.append(f"encoder layers: {model.num_encoder_layers}")
    if model.has_decoder:
        layers.append(f"decoder layers: {model.num_decoder_layers}")
    count = stage.parameters()
    size = f"{count / 1e6:.1f} M" if count >= 100_000 else f"{count:,}"
    sentences = [
        f"A `{hf_config['model_type']}` of {size} parameters, heads not counted ({', '.join(layers)}, "
        f"width: {model.d_model}, tokens: {model.vocab_size:,}), written as `{class_name}`.",
    ]
    if isinstance(stage, LabelledStage) and has_head:
        sentences.append(_answer(stage, class_name, hf_config))
    elif isinstance(stage, HeadFinetuning):
        sentences.append(f"The tuned head was left out, which has read {_read_by_head(stage, class_name)}.")
    return sentences


def _read_by_head(stage: HeadFinetuning, class_name: str) -> str:
    """Return what the vectors that a head reads are called in the program that loads the model."""
    if class_name == SENTENCE_TRANSFORMER:
        return "what `encode` gives"
    pool = head_config(stage.settings, stage.task).pool
    if pool != "first":
        return f"`last_hidden_state` (tuning.pool: {pool})"
    has_pooler = "pooler" in exported_model(stage.settings).heads
    return "`pooler_output`" if has_pooler else "`last_hidden_state[:, 0]`"


def _answer(stage: LabelledStage, class_name: str, hf_config: Mapping[str, Any]) -> str:
    """Return a sentence on what the head for a task gives."""
    names = ", ".join(f"`{label}`" for label in hf_config.get("id2label", {}).values())
    what = {
        "classes": f"a logit for each of {names}",
        "regression": "a number",
        "tokens": f"for each token a logit for each of {names}",
        "span": "logits of where the answer begins and ends",
        "choice": "a logit for each pair of a text and a candidate",
    }[stage.task.kind]
    if class_name == SENTENCE_TRANSFORMER:
        return f"`encode` gives {what}."
    return f"The head gives {what}."


def training_lines(run: Path, stage: NetworkStage) -> list[str]:
    """Return a line for each stage of training in order, also those of a run that it started from."""
    base = _base_model(run, stage)
    lines: list[str] = []
    current: Stage | None = stage
    while current is not None:
        if isinstance(current, ExternalCheckpoint):
            name = current.settings.start.model
            before = training_of_start(start_folder(name, find_cache(run)))
            line = f"Start: the checkpoint `{base or name}`"
            lines = [*before, line + (", trained as the lines above say" if before else ""), *lines]
        elif isinstance(current, NetworkStage):
            lines.insert(0, _stage_line(current))
        current = current.parent
    return lines


def _stage_line(stage: NetworkStage) -> str:
    """Return what a stage was trained on and for how long."""
    settings, vectors = stage.settings, stage.settings.vectors
    if settings.model.published and not settings.start.model and stage.is_pretraining:
        return "A published checkpoint, as it was imported"
    steps = stage.progress_if_unfinished.removeprefix("step ") or f"{stage.num_steps:,}"
    corpus = " + ".join(map(_without_folder, corpus_parts(settings.data.corpus)))
    if isinstance(stage, SkipGram):
        how = f"passes over the text: {steps}, learning rate {vectors.learning_rate:g}, seed {settings.seed}"
        return f"Skip-gram on `{corpus}`: {how}"
    texts, lengths = [], []
    if stage.reads_corpus:
        texts.append(f"`{corpus}`{_objective(settings)}")
        lengths.append(settings.data.inputs_length)
    if stage.task_names:
        texts.append(f"`{', '.join(map(task_name, stage.task_names))}`")
        lengths.append(settings.tuning.inputs_length)
    kind = "Pre-training" if stage.is_pretraining else "Fine-tuning"
    training = stage.training
    return (
        f"{kind} on {' and on '.join(texts)}{_trained_part(stage)}: {steps} steps of {training.batch_size} "
        f"rows of up to {max(lengths)} tokens, {training.optimizer.name}, learning rate "
        f"{training.optimizer.learning_rate:g}, seed {settings.seed}"
    )


def _trained_part(stage: NetworkStage) -> str:
    """Return which parameters fine-tuning trained, if not all."""
    tuning = stage.settings.tuning
    if stage.has_head and tuning.layers.endswith("frozen"):
        return ", the head alone"
    if tuning.lora.rank:
        return f", updates of rank {tuning.lora.rank} alone, which are merged"
    return ", adapters alone" if tuning.adapters else ""


def _objective(settings: Experiment) -> str:
    """Return the objective's name, if it has one that says what it is, as the study's "baseline" does not."""
    if settings.objective.mixture:
        return f" by `{settings.objective.mixture}`"
    names = [name for name, objective in OBJECTIVES.items() if objective == settings.objective]
    descriptive = [name for name in names if name != "baseline"]
    return f" by `{descriptive[0]}`" if descriptive else ""


def _without_folder(source: str) -> str:
    """Return the name of a corpus or data set, without the folder of a file, which is of one machine."""
    kind, colon, path = source.strip().partition(":")
    return f"{kind}{colon}{Path(path).name}" if colon and kind != "tfds" else source.strip()


def _scores(run: Path, stage: NetworkStage, weights: Weights, has_head: bool) -> str:
    """Return a table of the scores of the stage's tasks, or the loss of pre-training on held-out text."""
    result = read_result(run)
    if result is None:
        return "None: the run has no scores.json."
    results = result.tasks
    if not stage.is_compared:  # fine-tuned before the end of pre-training, which other scores belong to
        step = str(stage.parent_step)
        results = {task: by_step[step] for task, by_step in result.branches.items() if step in by_step}
    scored = [task for task in stage.tasks["validation"] if task.name in results]
    lines = [_score_line(cast(AnyTask, task), results[task.name]) for task in scored]
    loss = held_out(stage.folder)["held_out_loss"] if stage.is_pretraining else None
    if not lines and loss is not None:
        return f"Loss of its objective on held-out text: {loss:.3f} nats per token."
    if not lines:
        return "None."
    table = ["| task | measure | score | split | n |", "|:---|:---|---:|:---|---:|", *lines]
    notes = []
    if any(not task.report for task in scored):
        notes.append("A score on validation rows is that of the checkpoint that was chosen on them.")
    if stage.has_head and not has_head:
        notes.append("The scores are of the head that was left out.")
    if stage.member is not None:
        notes.append("The scores are of the whole ensemble, of which this is one member.")
    if weights != "scored":
        notes.append(f"The scores are of the parameters that evaluations use, the files have `{weights}`.")
    return "\n\n".join(["\n".join(table), *([" ".join(notes)] if notes else [])])


def _score_line(task: AnyTask, scored: Mapping[str, Any]) -> str:
    """Return the row of a task: its measure, score, split and number of rows."""
    count = scored.get("rows")
    measure = scored["metric"] if scored.get("measure", "score") == "score" else scored["measure"]
    score = "undefined" if scored["score"] is None else f"{scored['score']:z.2f}"
    split = f"{_without_folder(task.source)} {task.report or task.validation}"
    return f"| {task.name} | {measure} | {score} | {split} | {count or '–'} |"


def _language(stage: NetworkStage) -> str | None:
    """Return "en" for a model whose texts were all English, by the names of corpora and tasks; else None."""
    settings = stage.settings
    if settings.start.model or settings.model.published or settings.mixing.pretraining != "corpus":
        return None
    sources = (*corpus_parts(settings.data.corpus), *(task.source for task in stage.tasks["validation"]))
    is_english = all(source.removeprefix("tfds:").startswith(ENGLISH) for source in sources)
    return "en" if settings.pretraining.steps and is_english else None


def _base_model(run: Path, stage: NetworkStage) -> str | None:
    """Return the name on the hub of the checkpoint that training began from, or None."""
    name = stage.settings.start.model
    return hub_name(start_folder(name, find_cache(run))) if name else None

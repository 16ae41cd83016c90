"""Scores on tasks: of a run's models, or of answers in a file."""

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.markup import escape

from experiments.console import CONSOLE, RUNS, listing, print_line
from experiments.runs import provenance
from experiments.runs.paths import find_cache, load_settings
from experiments.runs.result import UNDEFINED
from experiments.runs.sources import Sources
from experiments.runs.vocabulary import stored_vocabulary
from lm import files
from lm.batch import Batch
from lm.config.base import SettingError, did_you_mean, parse_json
from lm.data.tasks.benchmarks import TASKS, find_task
from lm.data.tasks.choices import Choices
from lm.data.tasks.labelled import LABELLED, AnyTask, LabelledTask, find_labelled
from lm.data.tasks.mixtures import MIXTURES, mixture
from lm.data.tasks.names import is_task_file, task_name
from lm.data.tasks.prompts import (
    PromptedTask,
    draw_examples,
    find_prompted_task,
    is_prompted_task,
    nearest_examples,
)
from lm.data.tasks.task import BaseTask, Row, Task
from lm.data.tasks.task_files import has_tags, read_task_file
from lm.metrics import Undefined, Value, defined_values, format_value, undefined_reasons

if TYPE_CHECKING:  # with jax, which takes a second
    from experiments.runs.kinds.stage import Stage
    from experiments.runs.trained import Trained

KNOWN = {*TASKS, *LABELLED}
BATCH_ROWS = 32  # that a model answers in a batch [rows]
LONGEST_ANSWER = 64  # to a task of no mixture, and to any few-shot or zero-shot prompt [tokens]
ANSWER_DESCRIPTIONS = {  # what an answer to each kind of task is
    "text": "a text",
    "span": "a text",
    "regression": "a number",
    "classes": "the number of a class",
    "choice": "the number of a candidate",
    "tokens": "a list of the numbers of the words' classes",
}


@dataclass(frozen=True)
class RowSelection:
    """Options that select which rows of a task are scored."""

    # split of the data sets, also an expression of TFDS, such as 'validation[:10%]'
    split: str = "validation"
    limit: int = 0  # score only the first examples of each task; 0: all [examples]
    # folder in which @NAME is found, and the data; those of a run are found beside the run
    runs: Path = RUNS

    def select(self, task: BaseTask, cache: Path) -> Sequence[Row]:
        """Return the selected rows of a task, whose data lie in the folder ``cache``."""
        if self.limit < 0:
            raise SettingError(f"--limit {self.limit} should be at least 0; 0 takes all rows")
        rows = task.rows(self.split, cache)
        task.check_rows(rows)
        return [rows[index] for index in range(min(self.limit or len(rows), len(rows)))]


def score_run(
    folder: Path, names: Sequence[str], stage_name: str, selection: RowSelection, prompt_length: int = 0
) -> None:
    """Print what a run's models score on tasks; answers and scores go to ``scores`` in its folder.

    stage_name: name of the stage or ensemble that answers; "": ``find_members`` selects one for each task.
    prompt_length: the most tokens of a prompt, for tasks named TASK@K, whose prompts have K examples; 0:
        ``model.positions.max_length``, minus room for an answer if the model has no encoder.
    """
    from experiments.runs.trained import open_run
    from lm.evaluate.evaluator import write_predictions

    max_input_length = load_settings(folder).tuning.inputs_length
    cache = find_cache(folder)
    lines, score_folders = [], []
    open_stage = functools.cache(lambda stage: open_run(folder, [stage]))
    members_of_tasks = [find_members(folder, name, stage_name) for name in named_tasks(names)]
    selected_rows = [selection.select(task, cache) for task, _ in members_of_tasks]
    for (task, _), rows in zip(members_of_tasks, selected_rows, strict=True):
        if any(map(task.is_labelled, rows)):  # else there are answers and no scores
            task.check_labels(rows)
    for task, members in members_of_tasks:
        check_model_ends_answers(task, members[0])
    for (task, members), rows in zip(members_of_tasks, selected_rows, strict=True):
        likelihood_metrics: dict[str, Value] = {}
        if members[0].is_count_based:
            answers = answers_by_counts(members[0], rows)
        elif isinstance(task, LabelledTask):
            answers = answers_by_head(task, members[0], rows)
        elif isinstance(task, PromptedTask):
            models = [open_stage(stage) for stage in members]
            rows = prompted_rows(models[0], task, rows, cache, prompt_length)
            answers, likelihood_metrics = answers_to_prompts(models, task, rows)
        else:
            models = [open_stage(stage) for stage in members]
            answers = answers_in_words(models, task, rows, max_input_length)
        warn_of_other_rows(task, selection.split, members[0], cache)
        metrics: dict[str, Value] = {}
        if any(map(task.is_labelled, rows)):  # the labels of many test sets are not public
            metrics = task.evaluate(rows, answers) | likelihood_metrics
        scores = folder / "scores" / members[0].name_without_member / task.name / selection.split
        write_predictions(scores / "predictions.jsonl", task, rows, answers)
        write_metrics(scores / "scores.json", len(rows), metrics)
        score_folders.append(scores)
        lines.append((task.name, ", ".join(stage.name for stage in members), len(rows), metrics))
    show_scores(lines, selection.split)
    print_line(f"Tasks, as prepared for the run: {cache}")
    for scores in score_folders:
        print_line(f"Answers and scores: {scores}")


def write_metrics(path: Path, rows: int, metrics: Mapping[str, Value]) -> None:
    """Write the metrics of a task as JSON: null for infinities, NaN and an undefined one, with its reason."""
    values: dict[str, float | None] = dict.fromkeys(metrics)
    for name, value in defined_values(metrics).items():
        values[name] = value if math.isfinite(value) else None
    record: dict[str, Any] = {"rows": rows, "metrics": values}
    if reasons := undefined_reasons(metrics):
        record[UNDEFINED] = reasons
    files.write(path, json.dumps(record, indent=1) + "\n")


def find_members(folder: Path, name: str, stage_name: str) -> tuple[AnyTask, "list[Stage]"]:
    """Return a task, and the stages of the run in ``folder`` that answer it together.

    Given ``stage_name``, these are that stage or, if it names an ensemble, its members. Else they are those
    of the first stage that was fine-tuned for the task, else of the first that was fine-tuned to answer in
    words, else of pre-training. The task is a ``LabelledTask`` if a fine-tuned head answers it, else one that
    a decoder answers: a ``Task``, or a ``PromptedTask`` for a name like squad@3.
    """
    from experiments.runs.stages import stages_of
    from experiments.runs.trained import select_stage

    experiment = load_settings(folder)
    stages = [stage for stage in stages_of(folder) if stage.has_text_model]
    tuning, writes_text = experiment.tuning, experiment.model.has_decoder
    base_name = task_name(name)
    finetunings_on_task = []  # names of stages
    if base_name in map(task_name, tuning.heads):
        finetunings_on_task.append(base_name)
    for mixture_name in tuning.mixtures:
        finetuning = task_name(mixture_name)
        if finetuning == base_name or mixture(mixture_name).has(base_name):
            finetunings_on_task += [finetuning]
    ensembles: dict[str, list[Stage]] = {}
    for stage in stages:
        ensembles.setdefault(stage.name_without_member, []).append(stage)
    default = next((each for each in finetunings_on_task if each in ensembles), "")
    candidates = {stage.name: [stage] for stage in stages} | ensembles
    if not stage_name and not default:  # a head answers no other task than its own
        without_head = {key: group for key, group in candidates.items() if not group[0].has_head}
        candidates = without_head or candidates
    members = select_stage(folder, candidates, stage_name or default)
    head_task = members[0].labelled_task
    if head_task is None and members[0].is_count_based:
        raise SettingError(
            f"{members[0].folder}: counts.model={experiment.counts.model!r} continues text and answers no "
            f"tasks such as {name!r}; of the models made of counts, only taggers do (tagging/*, entities/*)"
        )
    if head_task is not None and task_name(head_task) == base_name:
        return find_labelled(name), members[:1]
    if head_task is None and writes_text:
        if is_prompted_task(name):
            return find_prompted_task(name), members
        if name in TASKS or is_task_file(name):
            return find_task(name), members
    if is_task_file(name):
        read_task_file(Path(name))  # raises SettingError, with the nearest name, if it is not there
    if stage_name and head_task:
        reason = f"--mixture {stage_name!r} answers by a head for {head_task}"
    else:
        reason = f"its heads are {', '.join(tuning.heads) or 'none'}"
        if not writes_text:
            reason += ", and an encoder writes no text"
    raise SettingError(f"{folder} has no model that answers {name!r}: {reason}")


def check_model_ends_answers(task: AnyTask, stage: "Stage") -> None:
    """Raise SettingError if a task's answers are decoded by a model that was trained without EOS."""
    from experiments.runs.trained import knows_eos

    is_ranked = isinstance(task, PromptedTask) and task.candidates is not None
    if isinstance(task, LabelledTask) or is_ranked or stage.is_count_based or knows_eos(stage):
        return
    raise SettingError(
        f"objective.eos='none' of {stage.folder} should be 'each-example' or 'between-documents': decoding "
        f"of an answer to {task.name} stops at EOS, which this model was never trained to write; or score a "
        "model that is fine-tuned on a task, whose examples end with EOS"
    )


def answers_by_head(task: LabelledTask, stage: "Stage", rows: Sequence[Row]) -> list[Any]:
    """Return the answer of a head to each row."""
    from experiments.runs.kinds.answers import make_eval_task
    from experiments.runs.trained import networks
    from lm import sharding
    from lm.evaluate.evaluator import predict

    (network,), experiment = networks([stage]), stage.settings
    mesh = sharding.make_mesh(experiment.mesh)
    vocabulary = stored_vocabulary(stage.folder, experiment)
    eval_task = make_eval_task(experiment, vocabulary, mesh, task, rows, 0)
    return predict(network.restore_state(mesh).eval_model, eval_task, network.steps(mesh).shard_batch)


def answers_by_counts(stage: "Stage", rows: Sequence[Row]) -> list[Any]:
    """Return the classes of the words of each row, by a tagger."""
    from experiments.runs.kinds.counts import Tagger

    assert isinstance(stage, Tagger), "of counts only taggers answer tasks"
    return stage.tags(stage.model(), rows)


def answers_in_words(
    models: "Sequence[Trained]", task: Task, rows: Sequence[Row], max_input_length: int
) -> list[str]:
    """Return the text that a model, or several as an ensemble, generates for the inputs of each row.

    Inputs are cut to ``max_input_length`` tokens.
    """
    max_length = task.targets_length
    if not task.file or not max_length:
        mixtures = models[0].stage.task_names
        mixture_name = mixtures[0] if len(mixtures) == 1 else ""
        max_length = answer_length(task.name, mixture_name)
    batches = prompt_batches(models[0], [task.to_text(row)[0] for row in rows], max_input_length, max_length)
    return generate_greedily(models, task, rows, batches, max_length)


def generate_greedily(
    models: "Sequence[Trained]", task: Task, rows: Sequence[Row], batches: Sequence[Batch], max_length: int
) -> list[str]:
    """Return the greedy answer of a model, or of several as an ensemble, to each row.

    ``batches`` holds the inputs of the rows.
    """
    from experiments.runs.kinds.answers import decode_answer
    from lm.evaluate.evaluator import EvalTask, predict
    from lm.evaluate.generate import greedy

    first = models[0]
    write, decode = partial(greedy, max_length=max_length), partial(decode_answer, first.vocabulary)
    return predict(combine_models(models), EvalTask(task, rows, batches, write, decode), first.shard_batch)


def combine_models(models: "Sequence[Trained]") -> Any:
    """Return one model, or several as an ensemble."""
    from lm.nn.ensemble import Ensemble

    if len(models) == 1:
        return models[0].model
    return Ensemble([trained.model for trained in models])


def answer_length(name: str, mixture_name: str) -> int:
    """Return the most tokens that an answer to the task ``name`` may have.

    It is that of the mixture ``mixture_name`` if this has the task, else the highest of all mixtures that
    have it, else LONGEST_ANSWER.
    """
    lengths: dict[str, int] = {}
    for other_name, other in MIXTURES.items():
        if name in other.tasks:
            lengths[other_name] = other.targets_length
    return lengths.get(mixture_name) or max(lengths.values(), default=LONGEST_ANSWER)


def prompted_rows(
    run: "Trained", task: PromptedTask, rows: Sequence[Row], cache: Path, prompt_length: int
) -> list[Row]:
    """Return the rows, each with its prompt, which has ``task.shots`` examples, in the field ``prompt``.

    ``prompt_length`` is the most tokens of a prompt; 0: ``positions.max_length``, also for a model that can
    read longer rows, minus room for an answer if the model has no encoder. A prompt is shorter if a longer
    answer is scored after it, of which the model would have no room for the end.
    """
    config, encode = run.config, run.vocabulary.encode
    max_tokens = prompt_length or config.positions.max_length
    if not prompt_length and not config.has_encoder:  # a decoder has prompt and answer in one sequence
        max_tokens -= max_answer_length(task)
    train: Sequence[Row] = ()
    if task.shots:
        train = task.rows("train", cache)
    if task.takes_nearest and task.shots:
        drawn = nearest_examples(task, train, rows, partial(mean_embeddings, run))
    else:
        drawn = draw_examples(task, train, rows)

    def fit(row: Row, examples: Sequence[Row]) -> str:
        most = max_tokens
        if config.has_max_length and not config.has_encoder:
            longest_answer = max(len(encode(f" {text}")) for text in task.continuations(row))
            most = min(most, config.positions.max_length - longest_answer)
        return task.fit_prompt(row, examples, lambda text: len(run.encode_data(text)) <= most)

    pairs = zip(rows, drawn, strict=True)
    return [row | {"prompt": fit(row, examples)} for row, examples in pairs]


def mean_embeddings(run: "Trained", texts: Sequence[str]) -> np.ndarray:
    """Return the mean of the model's input embeddings of the tokens of each text, float32 [N,D]."""
    from experiments.runs.trained import token_embeddings
    from lm import sharding

    table = token_embeddings(sharding.named(run.model), f"{run.stage.folder}")
    means = np.zeros((len(texts), table.shape[1]), np.float32)
    for index, ids in enumerate(run.vocabulary.encode_batch(texts)):
        if len(ids):
            means[index] = table[np.asarray(ids)].mean(axis=0)
    return means


def max_answer_length(task: PromptedTask) -> int:
    """Return the most tokens that an answer to a prompt may have."""
    return min(answer_length(task.base_name, ""), LONGEST_ANSWER)


def answers_to_prompts(
    models: "Sequence[Trained]", task: PromptedTask, rows: Sequence[Row]
) -> tuple[list[str], dict[str, Value]]:
    """Return the answer generated or chosen after each row's prompt, and metrics of likelihood."""
    from lm.evaluate.ranked_choice import likeliest_pairs, likelihoods_from_log_probs, pair_log_probs

    run = models[0]
    texts = [task.continuations(row) for row in rows]
    pairs, sizes = [], []  # ids of (prompt, continuation), and bytes of the continuation
    for row, continuations in zip(rows, texts, strict=True):
        pairs.append([run.encode_continuation(row["prompt"], text) for text in continuations])
        sizes.append([max(len(text.encode()), 1) for text in continuations])
    choices = Choices(pairs, sizes, [task.gold_index(row) for row in rows])
    log_probs = pair_log_probs(combine_models(models), pairs, run.shard_batch)
    metrics: dict[str, Value] = {**likelihoods_from_log_probs(log_probs, choices).metrics()}
    if task.measure != "score":
        metrics["score"] = metrics[task.measure]
    if task.candidates is not None:
        chosen = likeliest_pairs(log_probs, choices)
        return [task.candidates(row)[index] for row, index in zip(rows, chosen, strict=True)], metrics
    max_length, prompts = max_answer_length(task), [row["prompt"] for row in rows]
    longest_prompt = max(len(run.encode_data(prompt)) for prompt in prompts)
    batches = prompt_batches(run, prompts, longest_prompt, max_length)
    answers = generate_greedily(models, task, rows, batches, max_length)
    return [task.extract_answer(text) for text in answers], metrics


def prompt_batches(
    run: "Trained", texts: Sequence[str], max_input_length: int, max_answer_length: int
) -> list[Batch]:
    """Return texts in batches of one shape, as the run's model reads them.

    Each is cut to ``max_input_length`` tokens. SettingError if the model has no room for an answer of
    ``max_answer_length`` tokens.
    """
    config = run.config
    if not config.has_encoder:
        max_input_length += 1  # for the start token of a decoder
    inputs = [_truncate(run.encode_data(text), max_input_length, config.special.eos) for text in texts]
    batches = [
        run.host_batch(inputs[start : start + BATCH_ROWS], max_answer_length)
        for start in range(0, len(inputs), BATCH_ROWS)
    ]
    shape = (-(-BATCH_ROWS // run.devices) * run.devices, max(map(len, inputs)))
    return [batch.map(lambda x: _pad_to(x, shape)) for batch in batches]


def _pad_to(array: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    return np.pad(array, [(0, size - length) for size, length in zip(shape, array.shape, strict=True)])


def _truncate(ids: list[int], max_length: int, eos: int | None) -> list[int]:
    """Return at most ``max_length`` of ``ids``, the last of which is EOS if the last of all is."""
    if len(ids) <= max_length:
        return ids
    if ids[-1] == eos:
        return [*ids[: max_length - 1], ids[-1]]
    return ids[:max_length]


def warn_of_other_rows(task: BaseTask, split: str, stage: "Stage", cache: Path) -> None:
    """Print a warning if a stage was trained or scored on other rows of this split than there are now."""
    known = provenance.read(stage.folder)["data"].get(f"{task.name} {split}")
    sources = Sources(cache, stage.settings.data.corrupt_records)
    if known and sources.stored(task, split).fingerprint != known:
        note = f"these rows are not those that {stage.name} was trained with"
        CONSOLE.print(f"[yellow]{escape(task.name)} {split}[/]: {note}")


def score_file(path: Path, name: str, selection: RowSelection) -> None:
    """Print the metrics of predictions in a file.

    Each line is a text or, in a .jsonl file, an answer or {"prediction": answer}.
    """
    if name not in KNOWN and not is_task_file(name):
        raise SettingError(f"there is no task {name!r}{did_you_mean(name, KNOWN)}")
    task: AnyTask
    if name in LABELLED and name not in TASKS:
        task = LABELLED[name]
    elif is_task_file(name) and has_tags(name):
        task = find_labelled(name)
    else:
        task = find_task(name)
    try:
        lines = files.split_lines(path.read_bytes().decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise SettingError(f"{path} cannot be read as text in UTF-8: save it so ({error})") from error
    except OSError as error:
        raise SettingError(f"{path}, with an answer a line, cannot be read: {error.strerror}") from error
    answers = [
        answer_of(task, line, f"{path}, line {number},", files.is_json_lines(path))
        for number, line in enumerate(lines, 1)
    ]
    examples = selection.select(task, selection.runs / "cache")
    if len(answers) != len(examples):
        raise SettingError(
            f"{path} has {len(answers)} predictions and split {selection.split!r} of {name} has "
            f"{len(examples)} references; as many are needed, in the order of the data set"
        )
    try:
        metrics = task.evaluate(examples, answers)
    except SettingError:
        raise
    except (TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
        raise SettingError(f"{path} has an answer of a kind that {name} has not: {error!r:.200}") from error
    show_scores([(name, str(path), len(examples), metrics)], selection.split)


def answer_of(task: AnyTask, line: str, location: str, is_json: bool) -> Any:
    """Return the answer in a line of predictions.

    Raise SettingError, with the location of the line, for an answer of another kind than the task's.
    A number where a text is expected is its text.
    """
    kind = task.kind if isinstance(task, LabelledTask) else "text"
    is_text = kind in ("text", "span")
    if is_text and not is_json:
        return line
    answer = parse_json(line, location)
    if isinstance(answer, dict):
        if "prediction" not in answer:
            raise SettingError(f'{location} has no field "prediction"')
        answer = answer["prediction"]
    if is_text:
        fits = isinstance(answer, str) or _is_number(answer)
    elif kind == "regression":
        fits = _is_number(answer)
    elif kind == "tokens":
        fits = isinstance(answer, list) and all(type(each) is int for each in answer)
    else:
        fits = type(answer) is int
    if not fits:
        found = json.dumps(answer)
        expected = ANSWER_DESCRIPTIONS[kind]
        raise SettingError(f"{location} has the answer {found:.40}; {task.name} takes {expected}")
    return str(answer) if is_text else answer


def _is_number(answer: Any) -> bool:
    return isinstance(answer, int | float) and not isinstance(answer, bool)


def show_scores(lines: Sequence[tuple[str, str, int, Mapping[str, Value]]], split: str) -> None:
    """Print a line for each (task, source of its answers, number of rows of the split, metrics)."""
    grid = listing("task", "answers of", "split", "rows", "metrics", "score")
    for task, models, rows, metrics in lines:
        others = ", ".join(
            f"{name} {format_value(value)}" for name, value in metrics.items() if name != "score"
        )
        if not metrics:
            score = "no labels"
        elif isinstance(metrics["score"], Undefined):
            score = "–"
        else:
            score = f"{metrics['score']:z.2f}"
        grid.add_row(task, escape(models), escape(split), f"{rows:,}", escape(others), score)
    CONSOLE.print(grid)


def named_tasks(names: Sequence[str]) -> list[str]:
    """Return the names of tasks, with mixtures replaced by their tasks; SettingError for an unknown name."""
    tasks: list[str] = []
    for name in names:
        if name in MIXTURES and not is_task_file(name):
            tasks += [task.name for task in MIXTURES[name].evaluated]
            continue
        if is_prompted_task(name):
            find_prompted_task(name)  # SettingError if there is none
        elif name not in KNOWN and not is_task_file(name):
            raise SettingError(f"there is no task {name!r}{did_you_mean(name, KNOWN | MIXTURES.keys())}")
        tasks.append(name)
    return list(dict.fromkeys(tasks))

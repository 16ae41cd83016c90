"""Scores on tasks: of a run's models, or of answers in a file."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
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
from lm.config.base import SettingError, nearest, parse_json
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
from lm.metrics import Undefined, Value, format_value, undefined_reasons

if TYPE_CHECKING:  # with jax, which takes a second
    from experiments.runs.kinds.stage import Stage
    from experiments.runs.trained import Trained

KNOWN = {*TASKS, *LABELLED}
BATCH_ROWS = 32  # that a model answers in a batch [rows]
LONGEST_ANSWER = 64  # to a task of no mixture [tokens]
ANSWERS = {  # that the kinds of tasks take
    "text": "a text",
    "span": "a text",
    "regression": "a number",
    "classes": "the number of a class",
    "choice": "the number of a candidate",
    "tokens": "a list of the numbers of the words' classes",
}


@dataclass(frozen=True)
class Rows:
    """Options of which examples are scored."""

    # split of the data sets, also an expression of TFDS, such as 'validation[:10%]'
    split: str = "validation"
    limit: int = 0  # score only the first examples of each task; 0: all [examples]
    # folder in which @NAME is found, and the data; those of a run are found beside the run
    runs: Path = RUNS

    def of(self, task: BaseTask, cache: Path) -> Sequence[Row]:
        """These rows of a task, whose data lie in ``cache``."""
        if self.limit < 0:
            raise SettingError(f"--limit {self.limit} should be at least 0; 0 takes all rows")
        rows = task.rows(self.split, cache)
        task.check_rows(rows)
        return [rows[index] for index in range(min(self.limit or len(rows), len(rows)))]


def score_run(folder: Path, names: Sequence[str], mixture: str, rows: Rows, prompt_length: int = 0) -> None:
    """Print what a run's models score on tasks; answers and scores go to ``scores`` in its folder.

    prompt_length: of TASK@K, the longest; 0: ``model.positions.max_length``, minus room for an answer.
    """
    from experiments.runs.trained import open_run
    from lm.evaluate.evaluator import write_predictions

    width, prepared = load_settings(folder).tuning.inputs_length, find_cache(folder)
    lines, written = [], []
    opened = cache(lambda stage: open_run(folder, [stage]))
    members_of_tasks = [find_members(folder, name, mixture) for name in named_tasks(names)]
    references = [rows.of(task, prepared) for task, _ in members_of_tasks]
    for (task, _), examples in zip(members_of_tasks, references, strict=True):
        if any(map(task.is_labelled, examples)):  # else there are answers and no scores
            task.check_labels(examples)
    for task, members in members_of_tasks:
        check_model_ends_answers(task, members[0])
    for (task, members), examples in zip(members_of_tasks, references, strict=True):
        more: dict[str, Value] = {}
        if members[0].is_count_based:
            answers = answers_by_counts(members[0], examples)
        elif isinstance(task, LabelledTask):
            answers = answers_by_head(task, members[0], examples)
        elif isinstance(task, PromptedTask):
            models = [opened(stage) for stage in members]
            examples = prompted_rows(models[0], task, examples, prepared, prompt_length)
            answers, more = answers_to_prompts(models, task, examples)
        else:
            answers = answers_in_words([opened(stage) for stage in members], task, examples, width)
        warn_of_other_rows(task, rows.split, members[0], prepared)
        metrics: dict[str, Value] = {}
        if any(map(task.is_labelled, examples)):  # the labels of many test sets are not public
            metrics = task.evaluate(examples, answers) | more
        scores = folder / "scores" / members[0].name_without_member / task.name / rows.split
        write_predictions(scores / "predictions.jsonl", task, examples, answers)
        write_metrics(scores / "scores.json", len(examples), metrics)
        written.append(scores)
        lines.append((task.name, ", ".join(stage.name for stage in members), len(examples), metrics))
    show_scores(lines, rows.split)
    print_line(f"Tasks, as prepared for the run: {prepared}")
    for scores in written:
        print_line(f"Answers and scores: {scores}")


def write_metrics(path: Path, rows: int, metrics: Mapping[str, Value]) -> None:
    """Write the metrics of a task as JSON: null for an undefined one, whose reason is written too."""
    values: dict[str, float | None] = {}
    for name, value in metrics.items():
        values[name] = None if isinstance(value, Undefined) else value
    record: dict[str, Any] = {"rows": rows, "metrics": values}
    if reasons := undefined_reasons(metrics):
        record[UNDEFINED] = reasons
    path.write_text(json.dumps(record, indent=1) + "\n")


def find_members(folder: Path, name: str, wanted: str) -> tuple[AnyTask, "list[Stage]"]:
    """Return a task, and the stages of the run in ``folder`` that answer it together.

    These are the members of the stage ``wanted``; by default of the first that was fine-tuned for the task,
    else of the first that was fine-tuned to answer in words, else of pre-training. The task is labelled if
    they answer by a head, else it is answered by text.
    """
    from experiments.runs.stages import stages_of
    from experiments.runs.trained import chosen

    experiment = load_settings(folder)
    stages = [stage for stage in stages_of(folder) if stage.has_model]
    tuning, writes_text = experiment.tuning, experiment.model.has_decoder
    asked = task_name(name)
    tuned = []  # names of the fine-tunings on the task
    if asked in map(task_name, tuning.heads):
        tuned.append(asked)
    with_task = [each for each in tuning.mixtures if asked == task_name(each) or mixture(each).has(asked)]
    tuned += map(task_name, with_task)
    ensembles: dict[str, list[Stage]] = {}
    for stage in stages:
        ensembles.setdefault(stage.name_without_member, []).append(stage)
    default = next((group for group in tuned if group in ensembles), "")
    single = {stage.name: [stage] for stage in stages}
    groups = single | ensembles
    if not wanted and not default:  # a head answers no other task than its own
        groups = {name: group for name, group in groups.items() if not group[0].has_head} or groups
    members = chosen(folder, groups, wanted or default)
    head = members[0].labelled_task
    if head is None and members[0].is_count_based:
        raise SettingError(
            f"{members[0].folder}: counts.model={experiment.counts.model!r} continues text and answers no "
            f"tasks such as {name!r}; of the models made of counts, only taggers do (tagging/*, entities/*)"
        )
    if head is not None and task_name(head) == asked:
        return find_labelled(name), members[:1]
    if head is None and writes_text:
        if is_prompted_task(name):
            return find_prompted_task(name), members
        if name in TASKS or is_task_file(name):
            return find_task(name), members
    if wanted and head:
        reason = f"--mixture {wanted!r} answers by a head for {head}"
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
    asked = make_eval_task(experiment, vocabulary, mesh, task, rows, 0)
    return predict(network.restore_state(mesh).eval_model, asked, network.steps(mesh).shard_batch)


def answers_by_counts(stage: "Stage", rows: Sequence[Row]) -> list[Any]:
    """Return the classes of the words of each row, by a tagger."""
    from experiments.runs.kinds.counts import Tagger

    assert isinstance(stage, Tagger), "of counts only taggers answer tasks"
    return stage.tags(stage.model(), rows)


def answers_in_words(models: "Sequence[Trained]", task: Task, rows: Sequence[Row], width: int) -> list[str]:
    """Return what a model, or several together, write to inputs of at most ``width`` tokens."""
    length = task.targets_length
    if not task.file or not length:
        length = answer_length(task.name, "".join(models[0].stage.task_names))
    inputs = prompts(models[0], [task.to_text(row)[0] for row in rows], width, length)
    return written(models, task, rows, inputs, length)


def written(
    models: "Sequence[Trained]", task: Task, rows: Sequence[Row], inputs: Sequence[Any], length: int
) -> list[str]:
    """Return what a model, or several together, write greedily to batches of inputs."""
    from lm.evaluate.evaluator import EvalTask, predict
    from lm.evaluate.generate import greedy

    first = models[0]
    output, decoded = partial(greedy, max_length=length), lambda row, ids: first.vocabulary.decode(ids)
    return predict(together(models), EvalTask(task, rows, inputs, output, decoded), first.put)


def together(models: "Sequence[Trained]") -> Any:
    """Return one model, or several as an ensemble."""
    from lm.nn.ensemble import Ensemble

    if len(models) == 1:
        return models[0].model
    return Ensemble([trained.model for trained in models])


def answer_length(name: str, tuned: str) -> int:
    """Return the longest answer to a task, of a model that was ``tuned`` on a mixture [tokens]."""
    lengths: dict[str, int] = {}
    for mixture_name, each in MIXTURES.items():
        if name in each.tasks:
            lengths[mixture_name] = each.targets_length
    return lengths.get(tuned) or max(lengths.values(), default=LONGEST_ANSWER)


def prompted_rows(
    run: "Trained", task: PromptedTask, rows: Sequence[Row], prepared: Path, longest: int
) -> list[Row]:
    """Return the rows with a ``prompt`` each, of at most ``longest`` tokens; 0: as the model has room."""
    max_tokens = longest
    if not longest:
        max_tokens = run.config.positions.max_length
        if not run.config.has_encoder:  # a decoder has prompt and answer in one sequence
            max_tokens -= prompted_length(task)
    train: Sequence[Row] = ()
    if task.shots:
        train = task.rows("train", prepared)
    if task.takes_nearest and task.shots:
        drawn = nearest_examples(task, train, rows, partial(mean_embeddings, run))
    else:
        drawn = draw_examples(task, train, rows)

    def fits(text: str) -> bool:
        return len(run.encode_data(text)) <= max_tokens

    pairs = zip(rows, drawn, strict=True)
    return [row | {"prompt": task.fit_prompt(row, examples, fits)} for row, examples in pairs]


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


def prompted_length(task: PromptedTask) -> int:
    """Return the longest answer to a prompt [tokens]."""
    return min(answer_length(task.base_name, ""), LONGEST_ANSWER)


def answers_to_prompts(
    models: "Sequence[Trained]", task: PromptedTask, rows: Sequence[Row]
) -> tuple[list[str], dict[str, Value]]:
    """Return the answers written or chosen after each row's prompt, and how likely the right ones are."""
    from lm.evaluate.ranked_choice import likeliest_pairs, likelihoods_from_log_probs, pair_log_probs

    run = models[0]
    texts = [task.continuations(row) for row in rows]
    pairs, sizes = [], []  # ids of (prompt, continuation), and bytes of the continuation
    for row, continuations in zip(rows, texts, strict=True):
        pairs.append([run.continued(row["prompt"], text) for text in continuations])
        sizes.append([max(len(text.encode()), 1) for text in continuations])
    choices = Choices(pairs, sizes, [task.gold_index(row) for row in rows])
    log_probs = pair_log_probs(together(models), pairs, run.put)
    metrics: dict[str, Value] = {**likelihoods_from_log_probs(log_probs, choices).metrics()}
    if task.measure != "score":
        metrics["score"] = metrics[task.measure]
    if task.candidates is not None:
        chosen = likeliest_pairs(log_probs, choices)
        return [task.candidates(row)[place] for row, place in zip(rows, chosen, strict=True)], metrics
    length, asked = prompted_length(task), [row["prompt"] for row in rows]
    inputs = prompts(run, asked, max(len(run.encode_data(text)) for text in asked), length)
    return [task.extract_answer(text) for text in written(models, task, rows, inputs, length)], metrics


def prompts(run: "Trained", inputs: Sequence[str], width: int, answer: int) -> list[Batch]:
    """Return inputs as the run's model reads them, cut to ``width`` tokens, in batches of one shape."""
    config = run.config
    if not config.has_encoder:
        width += 1  # for the start token of a decoder
    texts = [_shortened(run.encode_data(text), width, config.special.eos) for text in inputs]
    batches = [
        run.host_batch(texts[start : start + BATCH_ROWS], answer)
        for start in range(0, len(texts), BATCH_ROWS)
    ]
    shape = (-(-BATCH_ROWS // run.devices) * run.devices, max(map(len, texts)))
    return [batch.map(lambda x: _pad_to(x, shape)) for batch in batches]


def _pad_to(array: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    return np.pad(array, [(0, size - length) for size, length in zip(shape, array.shape, strict=True)])


def _shortened(ids: list[int], width: int, eos: int | None) -> list[int]:
    """Return the first ``width`` of ``ids``, with their EOS if they have one."""
    if len(ids) <= width:
        return ids
    if ids[-1] == eos:
        return [*ids[: width - 1], ids[-1]]
    return ids[:width]


def warn_of_other_rows(task: BaseTask, split: str, stage: "Stage", prepared: Path) -> None:
    """Print a warning if a stage was trained or scored on other rows of this split than there are now."""
    known = provenance.read(stage.folder)["data"].get(f"{task.name} {split}")
    sources = Sources(prepared, stage.settings.data.corrupt_records)
    if known and sources.stored(task, split).fingerprint != known:
        note = f"these rows are not those that {stage.name} was trained with"
        CONSOLE.print(f"[yellow]{escape(task.name)} {split}[/]: {note}")


def score_file(path: Path, name: str, rows: Rows) -> None:
    """Print the metrics of predictions: a text a line, or .jsonl with answers or {"prediction": answer}."""
    if name not in KNOWN and not is_task_file(name):
        raise SettingError(f"there is no task {name!r}{nearest(name, KNOWN)}")
    task: AnyTask
    if name in LABELLED and name not in TASKS:
        task = LABELLED[name]
    else:
        task = find_task(name)
    try:
        lines = files.split_lines(path.read_bytes().decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise SettingError(f"{path} cannot be read as text in UTF-8: save it so ({error})") from error
    except OSError as error:
        raise SettingError(f"{path}, with an answer a line, cannot be read: {error.strerror}") from error
    answers = [
        answer_of(task, line, f"{path}, line {number},", path.suffix == ".jsonl")
        for number, line in enumerate(lines, 1)
    ]
    examples = rows.of(task, rows.runs / "cache")
    if len(answers) != len(examples):
        raise SettingError(
            f"{path} has {len(answers)} predictions and split {rows.split!r} of {name} has {len(examples)} "
            "references; as many are needed, in the order of the data set"
        )
    try:
        metrics = task.evaluate(examples, answers)
    except SettingError:
        raise
    except (TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
        raise SettingError(f"{path} has an answer of a kind that {name} has not: {error!r:.200}") from error
    show_scores([(name, str(path), len(examples), metrics)], rows.split)


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
        raise SettingError(f"{location} has the answer {found:.40}; {task.name} takes {ANSWERS[kind]}")
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
            score = f"{metrics['score']:.2f}"
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
            raise SettingError(f"there is no task {name!r}{nearest(name, KNOWN | MIXTURES.keys())}")
        tasks.append(name)
    return list(dict.fromkeys(tasks))

"""``lm score``: what the models of a run, or answers in a file, get for tasks."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.markup import escape

from experiments.console import CONSOLE, listing
from experiments.runs import origin
from experiments.runs.finetuning import first, head_steps, questions
from experiments.runs.prepare import rows_of
from experiments.runs.stages import Stage, cache_of, load_settings, stages_of
from experiments.runs.trained import Trained, chosen, open_run, restored
from experiments.runs.vocabularies import kept
from experiments.study.experiment import Experiment
from lm import sharding
from lm.data.tasks.benchmarks import TASKS
from lm.data.tasks.labelled import LABELLED, LabelledTask
from lm.data.tasks.mixtures import MIXTURES
from lm.data.tasks.task import Row, Scored, Task
from lm.evaluate.decode import greedy
from lm.evaluate.questions import Questions, predict, write_predictions
from lm.nn.composed import Ensemble
from lm.settings import SettingError, nearest, parse_json

ROWS = 32  # that a model is asked at once [rows]
LONGEST = 64  # answer to a task of no mixture [tokens]
ALL = {*TASKS, *LABELLED}


def score_run(folder: Path, names: Sequence[str], split: str, mixture: str, limit: int) -> None:
    """Print what a run's models score on tasks; answers and scores go to ``scores`` in its folder."""
    experiment = load_settings(folder)
    asked = [ask(folder, experiment, name, mixture) for name in tasks_of(names)]
    rows = [references(task, split, limit, cache_of(folder)) for task, _ in asked]
    opened, lines = cache(lambda stage: open_run(folder, [stage])), []
    for (task, team), given in zip(asked, rows, strict=True):
        if isinstance(task, LabelledTask):
            found = told(task, team[0], given)
        else:
            found = written([opened(stage) for stage in team], task, given, experiment.tuning.inputs_length)
        tell_other_rows(task, split, team[0], cache_of(folder))
        # Labels of test sets are not public.
        metrics = {} if any(row.get("label") == -1 for row in given) else task.evaluate(given, found)
        place = folder / "scores" / team[0].group / task.name / split
        write_predictions(place / "predictions.jsonl", task, given, found)
        (place / "scores.json").write_text(
            json.dumps({"rows": len(given), "metrics": metrics}, indent=1) + "\n"
        )
        lines.append((task.name, ", ".join(stage.name for stage in team), len(given), metrics))
    show(lines)
    CONSOLE.print(f"Answers and scores: {folder / 'scores'}/PHASE/TASK/{split}", highlight=False)


def tell_other_rows(task: Scored, split: str, stage: Stage, cache: Path) -> None:
    """Say it if a stage was trained or scored on other rows of this split than there are now."""
    known = origin.read(stage.folder)["data"].get(f"{task.name} {split}")
    if known and rows_of(task, split, stage.settings, cache).fingerprint != known:
        text = f"these rows are others than those that {stage.name} read in training"
        CONSOLE.print(f"[yellow]{task.name} {split}[/]: {text}")


def score_file(path: Path, name: str, split: str, limit: int, runs: Path) -> None:
    """Print the metrics of predictions: a text a line, or in a .jsonl file answers or {"prediction":
    answer}.
    """
    if name not in ALL:
        raise SettingError(f"--task: there is no task {name!r}{nearest(name, ALL)}")
    try:
        lines = lines_of(path.read_bytes().decode())
        found = [parse_json(line, "a line") for line in lines] if path.suffix == ".jsonl" else lines
        found = [line["prediction"] if isinstance(line, dict) else line for line in found]
    except (OSError, ValueError, KeyError) as error:
        raise SettingError(f"--predictions {path} should hold one answer a line ({error!r})") from error
    task = TASKS.get(name) or LABELLED[name]
    rows = references(task, split, limit, runs / "cache")
    if len(found) != len(rows):
        raise SettingError(
            f"{path} has {len(found)} predictions and split {split!r} of {name} has {len(rows)} references; "
            "as many are needed, in the order of the data set"
        )
    try:
        scored = task.evaluate(rows, found)
    except (TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
        raise SettingError(f"{path} has an answer of a kind that {name} has not: {error!r:.200}") from error
    show([(name, str(path), len(rows), scored)])


def lines_of(text: str) -> list[str]:
    """Cut at newlines alone: an answer may hold a form feed, and JSON U+2028, at which Python cuts too."""
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")] if text else []


def show(lines: Sequence[tuple[str, str, int, Mapping[str, float]]]) -> None:
    """A line for each (task, where its answers come from, rows, metrics)."""
    grid = listing("task", "answers of", "rows", "metrics", "score")
    for task, models, rows, found in lines:
        metrics = ", ".join(f"{name} {value:.2f}" for name, value in found.items() if name != "score")
        score = f"{found['score']:.2f}" if found else "no labels"
        grid.add_row(task, escape(models), f"{rows:,}", metrics, score)
    CONSOLE.print(grid)


def tasks_of(names: Sequence[str]) -> list[str]:
    """The names of tasks, and of all that are in the mixtures among them."""
    for name in names:
        if name not in ALL | MIXTURES.keys():
            raise SettingError(f"--tasks: there is no task {name!r}{nearest(name, ALL | MIXTURES.keys())}")
    parts = [
        [task.name for task in MIXTURES[name].evaluated] if name in MIXTURES else [name] for name in names
    ]
    return list(dict.fromkeys(name for part in parts for name in part))


def references(task: Scored, split: str, limit: int, prepared: Path) -> Sequence[Row]:
    """The rows of a split, or the first ``limit``."""
    if limit < 0:
        raise SettingError(f"--limit {limit} should be at least 0; 0 takes all rows")
    return first(task.rows(split, prepared), limit)


def ask(folder: Path, experiment: Experiment, name: str, wanted: str) -> tuple[Scored, list[Stage]]:
    """A task as it is answered, in words or by a head, and the stages whose models answer it together.

    That is ``wanted``, or the first that was tuned for the task, or pre-training; of an ensemble all
    members'.
    """
    tuning, writes, stages = experiment.tuning, experiment.model.has_decoder, stages_of(folder)
    tuned = [name] * (name in tuning.heads) + [
        each for each in tuning.mixtures if name in MIXTURES[each].tasks
    ]
    teams: dict[str, list[Stage]] = {}
    for stage in stages:
        teams.setdefault(stage.group, []).append(stage)
    default = next((group for group in tuned if group in teams), "")
    team = chosen(folder, {stage.name: [stage] for stage in stages} | teams, wanted or default)
    head = team[0].group if team[0].kind == "head" else None
    if head != name and (head or not writes or name not in TASKS):
        raise SettingError(
            f"{folder} has no model that answers {name!r}: its heads are {', '.join(tuning.heads) or 'none'}"
            + ("" if writes else ", and an encoder writes no text")
        )
    return (LABELLED[name], team[:1]) if head else (TASKS[name], team)


def told(task: LabelledTask, stage: Stage, rows: Sequence[Row]) -> list[Any]:
    """The answers of a head."""
    experiment = stage.settings
    steps = head_steps(experiment, sharding.make_mesh(experiment.mesh), task.name)
    model = restored(stage, steps).model
    made = questions(experiment, kept(stage.folder, experiment), steps.mesh, task, rows, 0)
    return predict(model, made, steps.put)


def written(runs: Sequence[Trained], task: Task, rows: Sequence[Row], width: int) -> list[str]:
    """The answers that a model, or several together, write to inputs of at most ``width`` tokens."""
    run = runs[0]
    lengths = {name: mixed.targets_length for name, mixed in MIXTURES.items() if task.name in mixed.tasks}
    length = lengths.get(run.stage.group) or max(lengths.values(), default=LONGEST)
    output, read = partial(greedy, max_length=length), lambda row, ids: run.vocabulary.decode(ids)
    model = run.model if len(runs) == 1 else Ensemble([each.model for each in runs])
    inputs = prompts(run, [task.to_text(row)[0] for row in rows], width, length)
    return predict(model, Questions(task, rows, inputs, output, read), run.put)


def prompts(run: Trained, inputs: Sequence[str], width: int, answer: int) -> list[dict[str, np.ndarray]]:
    """Inputs as the run's model reads them, cut at their end, in batches of one shape."""
    config = run.config
    width += not config.has_encoder  # a decoder's begin with a token of its own
    texts = [run.encode(text) for text in inputs]
    texts = [ids if len(ids) <= width else cut(ids, width, config.special.eos) for ids in texts]
    count, longest = -(-ROWS // run.devices) * run.devices, max(map(len, texts))
    here = replace(run, put=lambda batch: batch)  # nothing goes to the devices yet
    batches = [here.batch(texts[start : start + ROWS], answer) for start in range(0, len(texts), ROWS)]
    room = [(0, count), (0, longest)]
    return [
        {name: np.pad(x, np.subtract(room, [(0, n) for n in x.shape])) for name, x in b.items()}
        for b in batches
    ]


def cut(ids: list[int], width: int, eos: int) -> list[int]:
    """The first of ``ids``, with their EOS if they have one."""
    end = [eos] * (ids[-1] == eos)
    return ids[: width - len(end)] + end

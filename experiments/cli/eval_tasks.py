"""``lm eval tasks`` and ``lm eval predictions``: scores of a run's models, or of answers in a file."""

from pathlib import Path
from typing import Annotated

import tyro

from experiments.evaluate.tasks import RowSelection, score_file, score_run
from lm.config.base import SettingError

ALL_ROWS = RowSelection()


def eval_tasks(
    run: Path,
    tasks: Annotated[tuple[str, ...], tyro.conf.arg(help_behavior_hint="(required)")],
    /,
    mixture: str = "",
    prompt_length: int = 0,
    rows: Annotated[RowSelection, tyro.conf.arg(name="")] = ALL_ROWS,
) -> None:
    """Score a run or an imported checkpoint on tasks.

    Answers and scores go to RUN/scores/STAGE/TASK/SPLIT. TASK@K asks by a prompt with K examples.

        lm eval tasks runs/nano/t5/1-baseline/baseline/seed-0 documentation-reading
        lm eval tasks runs/t5-small squad@3 glue_small my_task.toml --limit 100

    Args:
        run: Folder of a run, @NAME or @last.
        tasks: Names of tasks or mixtures, or task files; squad@3 prompts with three examples, squad@0 with
            none.
        mixture: Use the model that was fine-tuned on this mixture; by default one that was fine-tuned on the
            task, else the first that was fine-tuned in words, else the pre-trained one.
        prompt_length: Longest prompt of TASK@K; 0: model.positions.max_length, minus room for an answer
            if the model has no encoder [tokens].
    """
    if not tasks:
        raise SettingError("lm eval tasks needs one or more tasks; lm data tasks lists them")
    score_run(run, tasks, mixture, rows, prompt_length)


def eval_predictions(
    predictions: Path, task: str, /, rows: Annotated[RowSelection, tyro.conf.arg(name="")] = ALL_ROWS
) -> None:
    """Score predictions that any program made.

        lm eval predictions answers.txt squad

    Args:
        predictions: File with one text per line, or a .jsonl file with {"prediction": ...} lines.
        task: Task that the predictions answer, or a task file.
    """
    score_file(predictions, task, rows)

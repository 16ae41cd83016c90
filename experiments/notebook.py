"""Open a run's model in Python, in a notebook or a program (docs/notebook.md)."""

from pathlib import Path

from experiments.cli.run_names import resolve_names
from experiments.runs.trained import open_texts
from lm.notebook import TrainableModel


def load_run(run: str | Path, mixture: str = "") -> TrainableModel:
    """Load the model of a run, and print which one it is: as in commands, the fine-tuned one if there is one.

    Args:
        run: Folder of a run, or the name that ``lm run --name`` gave it, such as "@mine" or "@last".
        mixture: Stage of the run, as ``lm show ROW --stages`` lists them, such as a task or "pretraining".
    """
    (name,) = resolve_names([str(run)])
    model, which = open_texts(Path(name), mixture, option="")
    print(which)
    return model

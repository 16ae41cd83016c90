"""Runs that are trained to their end, in one go or torn from work again and again."""

from pathlib import Path

from experiments.runs.kinds.stage import Stage
from experiments.runs.run import Run
from experiments.runs.stages import stages_of


def followed(experiment, folder: Path, cache: Path, steps: int = 0) -> tuple[Stage, ...]:
    """The stages of a run that is trained to its end, torn from work after every few ``steps``, if given."""

    class Torn(Exception):
        pass

    class Reporter:
        left = steps
        is_starting = False

        def start(self, *values) -> None:
            self.is_starting = True

        def __getattr__(self, name):
            return lambda *values: None

        def advance(self, count: int, detail: str = "") -> None:
            # a stage begins with the number of steps that earlier attempts did
            self.left -= count == 1 and not self.is_starting
            self.is_starting = False
            if steps and self.left < 0:
                raise Torn

    for _ in range(20):
        try:
            Run(experiment, folder, cache).train(Reporter())
            return stages_of(folder)
        except Torn:
            continue
    raise AssertionError("it comes to no end")

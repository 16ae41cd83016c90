"""``lm data course``: the small trained models that the course draws."""

import shlex
from importlib.resources import as_file, files

from experiments.cli.settings import Runs
from experiments.console import RUNS, print_line
from experiments.study.names import COURSE_FOLDER
from experiments.study.paths import check_runs

# the models that come along, in the order of the course
COURSE_MODELS = {
    "gpt": "a decoder",
    "lstm": "an LSTM that reads from left to right",
    "seq2seq": "an LSTM that writes, with attention to an LSTM that reads",
    "bert": "an encoder that fills masks",
    "t5": "an encoder-decoder that fills spans",
}


def data_course(runs: Runs = RUNS) -> None:
    """Unpack the small trained models that the course draws, as runs in RUNS/course.

    They come along with the package, so that no network is needed and nothing is trained. Every command that
    reads a trained run reads them too.

        lm data course
    """
    from experiments.runs.packed import unpack_model  # with jax

    check_runs(runs)
    for name, about in COURSE_MODELS.items():
        folder = runs / COURSE_FOLDER / name
        if not folder.exists():
            with as_file(files("experiments") / "course" / f"{name}.npz") as file:
                unpack_model(file, folder, runs / "cache")
        print_line(f"  {str(folder):<22} {about}")
    text = "Return the number of elements in the list."
    command = ["lm", "draw", "next", str(runs / COURSE_FOLDER / "gpt"), "--text", text]
    print_line(f"Try: {shlex.join(command)}")

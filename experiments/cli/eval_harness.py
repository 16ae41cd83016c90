"""``lm eval harness``: lm-evaluation-harness with a run as its model."""

import re
import sys
from collections.abc import Sequence

from experiments.cli import HELP_OPTIONS
from experiments.cli.run_names import resolve_names
from lm.config.base import SettingError

HELP = """Evaluate a run with lm-evaluation-harness, which pip install 'lm-study[harness]' installs.

usage: lm eval harness --model_args run=RUN[,mixture=NAME][,max_length=N] --tasks NAME,NAME [OPTIONS]

mixture: use the model that was fine-tuned on this mixture, by default the first that was fine-tuned in words,
else the pre-trained one.
max_length: tokens that the model reads at once.
All other options are those of `lm_eval run --help`."""


def eval_harness(arguments: Sequence[str]) -> None:
    """Run `lm_eval run`, whose options these are, with a run as its model."""
    if not arguments or {*HELP_OPTIONS} & {*arguments}:
        print(HELP)
        return
    try:
        from lm_eval.__main__ import cli_evaluate
        from lm_eval.api.registry import model_registry
    except ImportError as error:
        needed = "pip install 'lm-study[harness]'"
        raise SettingError(f"lm eval harness needs lm-evaluation-harness and torch: {needed}") from error
    model_registry.register("lm", target="experiments.harness:StudyModel")
    sys.argv = ["lm_eval", "run", "--model", "lm", *map(_with_folder, arguments)]
    cli_evaluate()


def _with_folder(argument: str) -> str:
    """Return an argument with the folder of a run in place of its short name, as in run=@last."""
    return re.sub(r"(?<=\brun=)@[\w.+-]+", lambda found: resolve_names([found[0]])[0], argument)

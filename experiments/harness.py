"""A run as a model of lm-evaluation-harness: ``lm eval harness --model_args run=RUN --tasks NAME,NAME``.

Imported only with the harness (``pip install 'lm-study[harness]'``), which finds it by the name "lm".
"""

import sys
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM

from experiments.runs.stages import stages_of
from experiments.runs.trained import language_models, open_run, texts_of_run
from lm.config.base import SettingError, did_you_mean

IGNORED = ("batch_size", "max_batch_size", "device", "trust_remote_code")  # that lm_eval gives to every model


class StudyModel(LM):
    """A run's model that was fine-tuned on ``mixture``.

    By default it is the first that was fine-tuned in words, else the pre-trained one.

    ``max_length``: tokens read at once, where that is not ``model.positions.max_length``.
    """

    def __init__(self, run: str, mixture: str = "", max_length: int | None = None, **others: Any):
        super().__init__()
        if unknown := sorted(others.keys() - {*IGNORED}):
            names = ("run", "mixture", "max_length")
            raise SettingError(f"--model_args {unknown[0]}: unknown{did_you_mean(unknown[0], names)}")
        trained = open_run(Path(run), language_models(stages_of(Path(run)), mixture), mixture)
        print(trained.description, file=sys.stderr)  # the tables are what is printed
        self.texts = texts_of_run(trained, max_length)

    @property
    def tokenizer_name(self) -> str:
        """Return the name by which chat templates are cached: none, since there are none."""
        return ""

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Return log-probability [nats] and greediness of each (context, continuation)."""
        return self.texts.log_likelihoods([request.args for request in requests])

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Return the log-probability [nats] of each (text,)."""
        return self.texts.rolling_log_likelihoods([request.args[0] for request in requests])

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Return the answer to each (prompt, settings)."""
        return self.texts.generate([request.args for request in requests])

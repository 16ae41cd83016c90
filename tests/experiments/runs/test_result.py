"""What a finished run scored and cost."""

from pathlib import Path

import numpy as np

from experiments.runs.result import Result

COSTS = {"columns": {}, "tasks": {}, "held_out_loss": 1.0, "seconds": 0, "tokens": 1}
TEXT = {"tokens": 5, "words": 2, "bytes": 9}


def test_a_run_of_a_single_step_whose_time_is_unknown_has_the_likelihood_that_was_measured():
    measured = [{"step": 1, "seconds": 0.0, "nats": 10.0, **TEXT}]
    result = Result(**COSTS, folder=Path("seed-0"), likelihoods=measured)
    with np.errstate(all="raise"):  # the logarithm of no time
        assert result.likelihood().nats == result.likelihood(0.0).nats == 10

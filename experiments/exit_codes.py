"""What the exit codes of ``lm`` mean."""

from lm.train.watchdog import STUCK

EXIT_CODES = {
    "done": 0,
    "failed": 1,
    "bad settings": 2,
    "loss not finite": 3,
    "start again": 42,  # stopped by a signal, having saved what there was; or another process is gone
    "stuck": STUCK,  # nothing was done for LM_STEP_TIMEOUT
    "interrupted": 130,  # by Ctrl-C, with nothing to save
}

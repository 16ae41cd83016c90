"""What the exit codes of ``lm`` mean, and the signals that a process is killed by."""

import signal

from lm.train.stopping import STUCK

EXIT_CODES = {
    "done": 0,
    "failed": 1,
    "bad settings": 2,
    "loss not finite": 3,
    "start again": 42,  # stopped by a signal, having saved what there was; or another process is gone
    "stuck": STUCK,  # nothing was done for LM_STEP_TIMEOUT
    "interrupted": 130,  # by Ctrl-C, with nothing to save
    # what is printed, as behind `| head`; run and sweep go on none the less
    "nobody reads": 128 + signal.SIGPIPE,
}

OUT_OF_MEMORY = {
    signal.SIGABRT: "as XLA is where it gets no more memory: see ulimit -v and the container's limit, "
    "or make batch_size / microbatches smaller",
    signal.SIGKILL: "as by Linux where memory runs out",
}


def killed_by(number: int) -> str:
    """``"killed by SIGABRT, ..."``: with the likely cause, where a process cannot say it itself any more."""
    names = {each.value: each.name for each in signal.Signals}
    why = OUT_OF_MEMORY.get(number)
    return f"killed by {names.get(number, f'signal {number}')}" + f" ({why})" * bool(why)

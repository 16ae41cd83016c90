"""Names the exit codes of ``lm``, and what a process has ended by."""

import signal

from lm.train.runtime.preemption import STEP_TIMEOUT

EXIT_CODES = {
    "done": 0,
    "failed": 1,
    "bad settings": 2,
    "loss not finite": 3,
    "preempted": 42,  # a signal ended training, and what there was is saved; or another process is gone
    "step timed out": STEP_TIMEOUT,  # no step was done for LM_STEP_TIMEOUT
    "interrupted": 130,  # by Ctrl-C outside of training, with nothing to save
    "output closed": 128 + signal.SIGPIPE,  # what is printed, as behind `| head`; run and sweep continue
}
PREEMPTED = EXIT_CODES["preempted"]

OUT_OF_MEMORY: dict[int, str] = {
    signal.SIGABRT: "as XLA is where it gets no more memory: see ulimit -v and the container's limit, "
    "or make batch_size / microbatches smaller; so does jax where another process of the run is gone",
    signal.SIGKILL: "as by Linux where memory runs out",
}


def exit_code(status: int) -> int:
    """Return the exit code for the status of a process: its own or, if negative, a signal's number.

    SIGTERM is a request to stop, also for a process that had nothing to save.
    """
    if status == -signal.SIGTERM:
        return PREEMPTED
    return status if status >= 0 else 128 - status


def killed_by(number: int) -> str:
    """Return which signal killed a process, and the likely cause, which the process cannot report itself."""
    names = {known.value: known.name for known in signal.Signals}
    text = f"killed by {names.get(number, f'signal {number}')}"
    if number in OUT_OF_MEMORY:
        text += f" ({OUT_OF_MEMORY[number]})"
    return text

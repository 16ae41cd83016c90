"""Processes side by side, for work on text."""

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any

from lm.config.base import SettingError


@contextmanager
def process_pool(
    workers: int, initializer: Callable[..., object] | None = None, initargs: tuple[Any, ...] = ()
) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool of ``workers`` new processes, each of which imports the script that runs.

    An error leaves out the tasks that no process has been handed, and is raised when the others have ended.
    SettingError if a process ends before its work is done.
    """
    # A fork would inherit jax's threads as they are.
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(workers, context, initializer, initargs) as pool:
            try:
                yield pool
            except BaseException:
                pool.shutdown(cancel_futures=True)  # without waiting, the shutdown below would undo this
                raise
    except BrokenProcessPool as error:
        raise SettingError(
            "a process that shares the work on texts ended early. If your own script runs this, the process "
            'imports it: keep the script in a file, and put what it does below `if __name__ == "__main__":`. '
            "Otherwise something killed the process, such as a lack of memory: start again"
        ) from error

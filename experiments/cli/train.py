"""Every row of a pattern and every seed, one after another; what is finished is left alone."""

import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from experiments.processes.exit_codes import EXIT_CODES
from experiments.processes.group import agreed, cache_compiled
from experiments.runs.origin import allowed
from experiments.runs.origin import check as check_origin
from experiments.runs.progress import Reporter, duration, reporting
from experiments.runs.result import check_settings, read_result
from experiments.runs.stages import check_runs, home_of, stages
from experiments.study.experiment import Changes, Experiment
from experiments.study.registry import baseline_of, build, by_hand, find, run_folder, tables, twin
from lm.files import write
from lm.settings import SettingError

Run = tuple[str, Experiment, Path]  # a row's name, its settings with a seed, and where the run lies


def sweep(
    pattern: str,
    scale: str,
    seeds: int,
    runs: Path,
    given: Changes | None = None,
    *,
    allow: str = "",
) -> None:
    """Train and evaluate every row that matches and has not finished, each with ``given``, then write the
    report.
    """
    if seeds < 1:
        raise SettingError(f"--seeds {seeds} should be at least 1")
    given = given or {}
    if "seed" in given:
        raise SettingError(f"--seed {given['seed']}: a sweep takes --seeds N, and trains seeds 0 to N - 1")
    check_runs(runs)
    rows = find(pattern)
    compared = [row.name for row in rows] + [baseline_of(row.name) for row in rows]
    wanted = []
    for seed in range(seeds):
        for name in dict.fromkeys(map(twin, compared)):
            experiment = build(name, scale, {**given, "seed": seed})
            wanted.append(
                (name, experiment, run_folder(runs, scale, name, seed, by_hand(name, scale, experiment)))
            )
    failed = train(wanted, runs, allowed(allow))
    from experiments.report.report import print_report  # whose pictures take their time to import

    try:
        print_report(tables(rows), scale, (str(runs),), given)
    except SettingError:
        if not failed:
            raise
    if failed:
        sys.exit(failed)


def train(wanted: Sequence[Run], runs: Path, allow: frozenset[str]) -> int:
    """Train those of ``wanted`` that have not finished.

    One that fails is named and left, the others go on; the exit code is that of the first failure.
    """
    todo = [
        (name, experiment, folder)
        for name, experiment, folder in wanted
        if not is_done(experiment, folder, runs / "cache", allow)
    ]
    failed = 0
    if todo:
        cache_compiled(runs / "cache")
        with reporting(sum(work(experiment) for _, experiment, _ in todo)) as reporter:
            reporter.say(f"{len(wanted) - len(todo)} of {len(wanted)} runs are finished; {len(todo)} to go")
            for name, experiment, folder in todo:
                code = one(name, experiment, folder, runs, reporter, allow)
                failed = failed or code
    return failed


def is_done(experiment: Experiment, folder: Path, cache: Path, allow: frozenset[str]) -> bool:
    """Whether the run in ``folder`` is this one and has finished; what is wrong with it is said when its turn
    comes.
    """
    try:
        check_settings(experiment, folder)
        if read_result(folder) is None:
            return False
        check_data(experiment, folder, cache, allow, lambda line: None)
    except SettingError:
        return False
    return True


def check_data(
    experiment: Experiment, folder: Path, cache: Path, allow: frozenset[str], say: Callable[[str], object]
) -> None:
    """SettingError if the finished run in ``folder`` was trained or scored on other data than there are
    now.
    """
    from experiments.runs.prepare import fingerprints

    for stage in stages(experiment, folder, home_of(folder, cache)):
        now = {"data": fingerprints(stage, cache)}
        check_origin(stage.folder, now, "finished", allow, say)


def work(experiment: Experiment) -> int:
    """Steps of a run, for its progress."""
    return sum(stage.training.steps for stage in stages(experiment))


def one(
    name: str,
    experiment: Experiment,
    folder: Path,
    runs: Path,
    reporter: Reporter,
    allow: frozenset[str] = frozenset(),
) -> int:
    """One run to its end; its exit code. Being interrupted ends the process, with how to go on."""
    from experiments.runs.run import run
    from lm.train.checkpoints import CheckpointError
    from lm.train.log import NonFiniteLoss
    from lm.train.stopping import Interrupted

    began = time.perf_counter()
    try:
        done = agreed(lambda: read_result(folder) is not None)  # SettingError if it is damaged
        run(experiment, folder, runs / "cache", reporter, allow - {"settings"} if done else allow)
        found = agreed(lambda: came_to(folder))
    except Interrupted as stopped:
        reporter.say(f"{name}: {stopped}. To go on, give the same command again.")
        sys.exit(EXIT_CODES["start again"])
    except (CheckpointError, NonFiniteLoss, SettingError) as error:
        reporter.complain(f"{name} failed: {error}\n  folder: {folder}")
        kinds = {NonFiniteLoss: "loss not finite", SettingError: "bad settings", CheckpointError: "failed"}
        return EXIT_CODES[next(meaning for kind, meaning in kinds.items() if isinstance(error, kind))]
    except Exception as error:  # the others go on none the less
        text = traceback.format_exc()
        said = f"{type(error).__name__}: {error}"
        if isinstance(error, OSError):
            said = (
                f"{error}. Mend that and give the same command again: it goes on from the newest checkpoint"
            )
        reporter.complain(f"{name} failed: {said}\n  folder: {folder}{keep(text, folder)}")
        return EXIT_CODES["failed"]
    took = duration(time.perf_counter() - began)
    reporter.say(f"{name} seed {experiment.seed}: {found} ({took})")
    return EXIT_CODES["done"]


def keep(text: str, folder: Path) -> str:
    """Where the text of an error is kept, as a line; nothing if it cannot be written, perhaps for the same
    reason.
    """
    import jax

    path = folder / (f"error-{jax.process_index()}.txt" if jax.process_index() else "error.txt")
    try:
        write(path, text)
    except OSError:
        return ""
    return f"\n  more in {path}"


def came_to(folder: Path) -> str:
    """What a finished run scored, in a line."""
    result = read_result(folder)
    shown = ", ".join(f"{column} {score:.2f}" for column, score in result.columns.items())
    return shown or (
        "nothing to score" if (loss := result.held_out_loss) is None else f"held-out loss {loss:.3f}"
    )


def run_row(
    name: str,
    scale: str,
    experiment: Experiment,
    runs: Path,
    check: bool,
    allow: frozenset[str] = frozenset(),
) -> None:
    """Bring one run to its end and say where it lies; with ``check`` only see whether it could be started."""
    import jax

    from experiments.runs.run import check as check_run

    check_runs(runs)
    cache_compiled(runs / "cache")
    folder = run_folder(runs, scale, name, experiment.seed, by_hand(name, scale, experiment))
    with reporting(work(experiment), quiet=jax.process_index() > 0) as reporter:
        if check:
            check_run(experiment, folder, runs / "cache", reporter.say, allow)
            reporter.say(f"ready to train in {folder}")
            return
        if agreed(lambda: read_result(folder) is not None):
            agreed(lambda: check_settings(experiment, folder))
            agreed(lambda: check_data(experiment, folder, runs / "cache", allow, reporter.say))
            reporter.say(f"finished before: {folder}")
            return
        code = one(name, experiment, folder, runs, reporter, allow)
        reporter.say(f"run: {folder}")
    if code:
        sys.exit(code)

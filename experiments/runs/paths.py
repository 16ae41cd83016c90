"""Where a run, its stages and its cache lie, and how stages are called.

A run's folder has ``settings.json``, whose run it is, and ``paths.json``, where its cache lies from there.
All else follows from these two: beside the cache lie the folders of the scales, each with the pre-trainings
that its runs share, and ``starts``, the checkpoints that runs start from. Only the standard library and
settings are imported here.
"""

import json
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from experiments.study.experiment import Experiment
from experiments.study.names import STARTS_FOLDER
from experiments.study.plugins import needed_study
from lm.config.base import DataError, SettingError, did_you_mean, from_json, to_json
from lm.files import json_with_checksum, parse_with_checksum, write

SETTINGS, PATHS, SCORES = "settings.json", "paths.json", "scores.json"  # in the folder of a run
STAGES = "phases"  # what scores.json calls the folders of stages, also in published results
# environment variable that names the cache of all runs that are opened, in place of the recorded one
CACHE = "LM_CACHE"
DEFAULT_CACHE = Path("runs") / "cache"
# files of a run and of its stages that reports and archives are made of: no checkpoints and no texts
RECORDS = ("settings.json", "scores.json", "metrics.jsonl", "origin.json", "run.json")

# names of stages, and of the folders of pre-training and counting
PRETRAINING = "pretraining"
START = "start"  # the start pre-training: a short one before it, which experiments share
PHASE = "phase-"  # prefix of the number of a phase of pre-training before the last, counted from 1
VECTORS = "vectors"  # before all of these
COUNTS = "counts"
BRANCH = "at-"  # prefix of the fraction of pre-training after which a fine-tuning starts, if below 1
COUNTS_FILE = "counts.npz"  # in the folder of a stage of counts
# the names of these stages; that of a task file, such as at-risk.toml, may begin like them
BRANCH_NAME = re.compile(rf"{BRANCH}[0-9.e-]+/")
PHASE_NAME = re.compile(rf"{PHASE}[0-9]+(/|$)")


# ---- names of stages


def member_name(name: str, member: int | None) -> str:
    """Return the name of the stage of an ensemble member, such as ``squad/member-2``.

    member: None if there is one model, whose stage keeps its ``name``.
    """
    return name if member is None else f"{name}/member-{member}"


def name_without(name: str, task: str) -> str:
    """Return the name of the pre-training on all downstream tasks but ``task``."""
    return f"{name}/without-{task}"


def phase_name(number: int) -> str:
    """Return the name of a phase of pre-training before the last one; the first has number 1."""
    return f"{PHASE}{number}"


def branch_name(task: str, fraction: float) -> str:
    """Return the name of the fine-tuning on ``task`` after this fraction of pre-training."""
    return task if fraction == 1 else f"{BRANCH}{fraction}/{task}"


def base_name(name: str) -> str:
    """Return the name of a stage without its endings ``/without-TASK`` and ``/member-NUMBER``.

    >>> base_name("at-0.5/squad/member-1")
    'at-0.5/squad'
    """
    parts = name.split("/")
    return "/".join(parts[:2] if is_earlier_branch(name) else parts[:1])


def is_earlier_branch(name: str) -> bool:
    """Return whether the stage of this name fine-tunes a checkpoint from before the end of pre-training."""
    return BRANCH_NAME.match(name) is not None


def is_earlier_phase(name: str) -> bool:
    """Return whether the stage of this name is a phase of pre-training before the last one."""
    return PHASE_NAME.match(name) is not None


def is_pretraining(name: str) -> bool:
    """Return whether the stage of this name pre-trains."""
    return base_name(name) in (START, PRETRAINING) or is_earlier_phase(name)


def is_compared(name: str) -> bool:
    """Return whether experiments are compared by the scores of the stage of this name.

    Compared are the last phase of pre-training, fine-tuning after all of pre-training, and count-based
    models; not skip-gram, the start pre-training, earlier phases or earlier branches.
    """
    if is_earlier_branch(name) or is_earlier_phase(name):
        return False
    return base_name(name) not in (START, VECTORS)


def model_of_run(names: Iterable[str]) -> str:
    """Return the name of the stage whose model is meant where a run is named alone.

    It is the first fine-tuning, or pre-training if nothing is fine-tuned. ``names`` are those of the stages
    to choose from, in the order of training. All commands and notebooks follow this rule, and print which
    model it is. Only ``--start`` has another: it goes on from pre-training, as fine-tuning does.
    """
    compared = [*filter(is_compared, names)]
    return next((name for name in compared if not is_pretraining(name)), compared[0])


def pretrained_of_run(names: Iterable[str]) -> str:
    """Return the stage that ``--start`` goes on from: pre-training, else the first fine-tuning."""
    return next(filter(is_compared, names))


def describe_model(
    folder: Path, name: str, names: Iterable[str], option: str = "--mixture", unfinished: str = ""
) -> str:
    """Return which model of the run in ``folder`` is used, and which others it has.

    option: that names another one on the command line; empty in Python.
    unfinished: after which step of its stage it is, such as "step 167 of 3,000"; empty after the last one.
    """
    others = ", ".join(other for other in names if other != name)
    behind = f"{option} {others}".lstrip()
    after = f"{unfinished} of {name}, which has not finished" if unfinished else name
    return f"{folder} after {after}" + (f" (its other models: {behind})" if others else "")


# ---- folders


def scale_folder(run: Path, cache: Path) -> Path:
    """Return the folder of a run's scale, beside the cache; of a run that lies elsewhere its own folder.

    A run that was copied out of its folder of runs knows its scale.
    """
    runs, folder = cache.parent.resolve(), run.resolve()  # the cache may be a link
    if runs in folder.parents:
        return runs / folder.relative_to(runs).parts[0]
    scale = _recorded_paths(run).get("scale")
    return runs / scale if scale else folder


def start_folder(name: str, cache: Path) -> Path:
    """Return the folder of the checkpoint of this name that runs start from."""
    return cache.parent / STARTS_FOLDER / name


def find_cache(run: Path) -> Path:
    """Return the cache of the run in ``run``: LM_CACHE, else the recorded one, else ``runs/cache``.

    It is recorded as a path from the run's folder, so that a folder of runs may be moved and copied as a
    whole.
    """
    if named := os.environ.get(CACHE):
        return Path(named)
    recorded = _recorded_paths(run).get("cache")
    return Path(os.path.normpath(run.resolve() / recorded)) if recorded else DEFAULT_CACHE


def cache_compiled(cache: Path) -> None:
    """Have jax cache compiled programs in ``cache/compiled``, or where JAX_COMPILATION_CACHE_DIR says.

    With JAX_ENABLE_COMPILATION_CACHE=false none is cached.
    """
    import jax

    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", str(cache.absolute() / "compiled"))
    if not os.environ.get("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"):
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


def _recorded_paths(run: Path) -> dict[str, str]:
    """Return what ``save_settings`` records beside settings; {} for none. SettingError if it is damaged."""
    path = run / PATHS
    if not path.exists():
        return {}
    recorded = parse_with_checksum(path.read_bytes(), path, f"name the cache by {CACHE}=FOLDER")
    return {name: value for name, value in recorded.items() if isinstance(value, str)}


def save_settings(run: Path, experiment: Experiment, cache: Path | None = None) -> None:
    """Write the settings of the run in ``run`` and, if given, where its cache is, each with a checksum."""
    write(run / SETTINGS, json_with_checksum(json.loads(to_json(experiment))))
    if cache is not None:
        folder, scale = run.resolve(), scale_folder(run, cache)
        beside_scales = cache.parent.resolve() / cache.name  # also where the cache is a link to another disk
        recorded = {"cache": os.path.relpath(beside_scales, folder), "scale": scale.name}
        if scale == folder:
            del recorded["scale"]
        write(run / PATHS, json_with_checksum(recorded))


def load_settings(run: Path) -> Experiment:
    """Return the settings of the run in ``run``; SettingError if it is no run."""
    path = run / SETTINGS
    if not path.exists():
        runs = sorted(str(p.parent) for p in Path().glob(f"runs/**/{SETTINGS}"))
        raise SettingError(f"{run} is no run: it has no {SETTINGS}{did_you_mean(str(run), runs)}")
    try:
        return from_json(Experiment, json.dumps(parse_with_checksum(path.read_bytes(), path)))
    except (SettingError, OSError) as error:
        study = needed_study([run, *_stage_folders(run)])
        if not study and not isinstance(error, (DataError, OSError)):  # no stage has recorded its modules yet
            study = "; if it needs a module of your own, name that with --study"
        raise SettingError(f"{path} cannot be read: {error}{study}") from error


def _stage_folders(run: Path) -> list[Path]:
    """Return the folders of a finished run's stages, which may lie outside of its own; [] if unknown."""
    path = run / SCORES
    with suppress(SettingError, OSError):
        folders = parse_with_checksum(path.read_bytes(), path).get(STAGES)
        scale = scale_folder(run, find_cache(run))
        named = map(str, folders.values() if isinstance(folders, dict) else ())
        return [scale / name for name in named if scale in Path(os.path.normpath(scale / name)).parents]
    return []

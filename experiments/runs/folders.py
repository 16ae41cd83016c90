"""Where the phases of a run lie. Runs that pre-train alike share one pre-training, whatever they do with
it.
"""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

from experiments.study.experiment import BASELINE, Experiment
from lm.files import seal, unseal, write
from lm.settings import SettingError, diff, from_json, nearest, to_json


def check_runs(runs: Path) -> None:
    """SettingError if nothing can be written to ``runs`` as to a folder."""
    if runs.parts[:1] == ("gs:",):
        raise SettingError(
            f"--runs gs://{'/'.join(runs.parts[1:])} should be a folder: mount the bucket, as lm-launch "
            "does on TPUs "
            "(gcsfuse --implicit-dirs --rename-dir-limit=1000000 BUCKET FOLDER)"
        )


def save_settings(folder: Path, experiment: Experiment) -> None:
    """Write the settings of the run in ``folder``, sealed."""
    write(folder / "settings.json", seal(json.loads(to_json(experiment))))


def load_settings(folder: Path) -> Experiment:
    """The settings of the run in ``folder``."""
    path = folder / "settings.json"
    if not path.exists():
        found = sorted(str(p.parent) for p in Path().glob("runs/**/settings.json"))
        raise SettingError(f"{folder} is no run: it has no settings.json{nearest(str(folder), found)}")
    try:
        return from_json(Experiment, json.dumps(unseal(path.read_bytes(), path)))
    except (SettingError, OSError) as error:
        raise SettingError(f"{path} cannot be read: {error}") from error


def cache_of(folder: Path) -> Path:
    """The cache beside a run's folder: that of the folder ``runs`` it lies in."""
    return next(
        (up / "cache" for up in folder.resolve().parents if (up / "cache").is_dir()), Path("runs") / "cache"
    )


def home_of(folder: Path, cache: Path) -> Path:
    """The folder of a run's scale, where what its runs share lies; elsewhere the run's own folder."""
    runs, folder = cache.parent.resolve(), folder.resolve()  # the cache may be a link
    return runs / folder.relative_to(runs).parts[0] if folder.is_relative_to(runs) else folder


def members(experiment: Experiment) -> list[tuple[str, Experiment, Experiment]]:
    """(suffix of its phases, its settings in pre-training, in fine-tuning) of each model that a run consists
    of.

    Members differ in their seeds. Those of the ensembles with seeds 0, 1, ... are all different, and the
    first of them begin like single runs, which they then share.
    """
    count = experiment.ensemble.members
    if count == 1:
        return [("", experiment, experiment)]
    single = replace(experiment, ensemble=BASELINE.ensemble)
    found = [replace(single, seed=experiment.seed * count + k) for k in range(count)]
    separate = experiment.ensemble.pretraining == "separate"
    return [(f"/member-{k}", each if separate else single, each) for k, each in enumerate(found)]


def phases(experiment: Experiment, folder: Path, home: Path) -> dict[str, Path]:
    """The folder of each phase of the run in ``folder``: pre-trainings by ``pretraining_name``, then
    fine-tunings.
    """
    tuning, found = experiment.tuning, {}
    vocabulary_of = tuning.mixtures if experiment.data.vocabulary_texts == "corpus+tasks" else ()
    for name, settings in pretrainings(experiment).items():
        found[name] = pretraining_folder(settings, vocabulary_of, folder, home)
    for name in (*tuning.mixtures, *tuning.heads) if experiment.finetuning.steps else ():
        for suffix, *_ in members(experiment):
            found[name + suffix] = folder / "finetuning" / (name + suffix)
    return found


def pretrainings(experiment: Experiment) -> dict[str, Experiment]:
    """The settings of each pre-training that the run starts from, by the name of its phase."""
    found, tuning = {}, experiment.tuning
    for suffix, settings, _ in members(experiment) if experiment.pretraining.steps else ():
        for mixture in (*tuning.mixtures, *tuning.heads) or ("",):
            needed = pretraining_of(settings, mixture)
            own = replace(
                needed,
                data=experiment.data,
                mesh=experiment.mesh,
                guard=experiment.guard,
                pretraining=experiment.pretraining,
                finetuning=experiment.finetuning,
            )
            found.setdefault(pretraining_name(experiment, mixture, suffix), own)
    return found


def pretraining_name(experiment: Experiment, mixture: str, suffix: str) -> str:
    """The phase that fine-tuning of a member on ``mixture`` starts from."""
    without = f"/without-{mixture}" if experiment.mixing.pretraining == "corpus+other-tasks" else ""
    return f"pretraining{without}{suffix if experiment.ensemble.pretraining == 'separate' else ''}"


def pretraining_folder(
    settings: Experiment, vocabulary_of: tuple[str, ...], folder: Path, home: Path
) -> Path:
    """Of the pre-training with these settings, and a vocabulary of these tasks: the run's own, or of its
    scale.
    """
    changed = diff(BASELINE, pretraining_of(settings, ""))  # so that a new setting changes no key
    about = {path: str(new) for path, (_, new) in changed.items()} | (
        {"texts": vocabulary_of} if vocabulary_of else {}
    )
    place = Path("pretraining") / hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]
    if (folder / "pretraining" / "checkpoints").is_dir():  # of an imported run
        return folder / "pretraining"
    # wherever the scale's folder was copied to
    return next((up / place for up in (folder, *folder.parents) if (up / place).is_dir()), home / place)


def pretraining_of(experiment: Experiment, mixture: str) -> Experiment:
    """The settings that pre-training depends on; all others are those of the baseline."""
    data, mixing, tuning = experiment.data, experiment.mixing, experiment.tuning
    kept = replace(
        BASELINE,
        objective=experiment.objective,
        model=experiment.model,
        pretraining=replace(experiment.pretraining, keep_hours=BASELINE.pretraining.keep_hours),
        data=replace(data, workers=0, held_out_lengths=(1,), corrupt_records=BASELINE.data.corrupt_records),
        generator_share=experiment.generator_share,
        seed=experiment.seed,
        guard=replace(BASELINE.guard, spikes=experiment.guard.spikes),
    )
    if mixing.pretraining == "corpus":
        return kept
    mixtures = tuning.mixtures
    if mixing.pretraining == "corpus+other-tasks":
        mixing = replace(mixing, pretraining="corpus+tasks")
        mixtures = tuple(name for name in mixtures if name != mixture)
    trained = replace(BASELINE.tuning, mixtures=mixtures, inputs_length=tuning.inputs_length)
    if experiment.finetuning.steps:
        return replace(kept, mixing=mixing, tuning=trained)
    scored = replace(trained, evaluation_examples=tuning.evaluation_examples)  # as it stands
    return replace(kept, mixing=mixing, tuning=scored, finetuning=replace(BASELINE.finetuning, steps=0))

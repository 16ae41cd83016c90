"""The stages of training that a run consists of, as values: its pre-trainings, then its fine-tunings.

A run of counts has one stage for each of its models instead, which takes one step: all text is counted.

Everything that trains, scores, plans or shows runs iterates over them. No other module makes or takes apart
the name of a stage. Runs that pre-train alike share one pre-training, whatever they do with it afterwards.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from experiments.study.experiment import BASELINE, Experiment, PhaseConfig
from experiments.study.paths import cache_of, home_of, start_folder
from experiments.study.plugins import needed_study
from lm.config.base import SettingError, changes, diff, from_json, nearest, to_json
from lm.data.tasks.names import task_name
from lm.files import json_with_checksum, matches_checksum, parse_with_checksum, write
from lm.train.runtime import manifest

PRETRAINING = "pretraining"  # what the stages and folders of pre-training are called, and what follows it
COUNTS = "counts"  # what the stage and folder of n-grams are called, and the folder of taggers
COUNTS_FILE = "counts.npz"  # in the folder of such a stage
START = "start"  # what the stage before it is called, which lies beside it
AT_ONCE = PhaseConfig(steps=1)  # the training of counts
GIVEN = PhaseConfig(steps=0)  # that of a checkpoint, here
VECTORS = "vectors"  # what the stage before both is called
BRANCH = "at-"  # before the share of pre-training after which a fine-tuning starts, if that is not all of it


@dataclass(frozen=True)
class Stage:
    """One stage of training: of one model, in a folder of its own."""

    group: str  # its name without the member: the stages of one group answer together
    member: int | None  # of the ensemble; None: the run has one model, or its members share this stage
    # text, head: fine-tuned to answer in words, or by a head; count: counts are its model; vectors: of word
    # pieces, by skip-gram; given: a checkpoint that others start from, which is no stage of the run itself
    kind: Literal["pretrain", "text", "head", "count", "vectors", "given"]
    # mixtures of tasks, in pre-training besides the corpus; for a head or a tagger the labelled task
    on: tuple[str, ...]
    settings: Experiment  # with the seed of the member
    folder: Path
    parent: "Stage | None"  # whose model it starts from; None: from random parameters
    parent_step: int | None = None  # after which it starts from there; None without a parent [steps]

    @property
    def name(self) -> str:
        """Such as ``pretraining``, ``pretraining/without-squad``, ``squad/member-1`` or ``at-0.5/squad``."""
        return self.group if self.member is None else f"{self.group}/member-{self.member}"

    @property
    def is_main(self) -> bool:
        """Whether it is what a run is compared by: neither vectors, a start nor a branch."""
        return is_main(self.group)

    @property
    def has_model(self) -> bool:
        """Whether a Transformer comes out of it."""
        return self.kind != "vectors"

    @property
    def is_start(self) -> bool:
        """Whether another pre-training continues from it, and nothing is measured of it."""
        return self.group == START

    @property
    def branch_steps(self) -> tuple[int, ...]:
        """Of a pre-training: after which fine-tuning starts from it, so that their checkpoints stay."""
        if self.kind != "pretrain":
            return ()
        return tuple(branch_step(self.settings, share) for share in self.settings.tuning.branches)

    @property
    def training(self) -> PhaseConfig:
        """Its length, batch size and optimiser; a step of vectors is a pass over the text."""
        if self.kind in ("count", "given"):
            return AT_ONCE if self.kind == "count" else GIVEN
        if self.kind == "vectors":
            return PhaseConfig(self.settings.vectors.epochs, save_every=1, keep_hours=0.0, log_every=1)
        return self.settings.pretraining if self.kind == "pretrain" else self.settings.finetuning

    @property
    def scored_on(self) -> tuple[str, ...]:
        """What its checkpoints are scored on: nothing in pre-training, unless no fine-tuning follows."""
        return () if self.kind == "pretrain" and self.settings.finetuning.steps else self.on

    @property
    def decisive(self) -> Experiment:
        """The settings that its numbers depend on; before fine-tuning all others are the baseline's."""
        if self.kind == "vectors":
            return _vectors_settings(self.settings)
        return _pretraining_settings(self.settings, "") if self.kind == "pretrain" else self.settings


def stages(experiment: Experiment, folder: Path = Path(), home: Path = Path()) -> tuple[Stage, ...]:
    """The stages of the run in ``folder``, in the order in which they are trained.

    The vectors and the start of each member's pre-training, if it has them; then one pre-training of each
    member of the ensemble, or one for each target that it leaves out; then for each target (a mixture, or a
    task with a head) and each of ``tuning.branches``, the whole first, one fine-tuning of each member.
    ``home`` is the folder of the run's scale, which holds what comes before fine-tuning, as runs share it.
    """
    if experiment.counts.model != "none":
        return _counted(experiment, folder)
    tuning, shared = experiment.tuning, experiment.ensemble.pretraining == "shared"
    targets, models = (*tuning.mixtures, *tuning.heads), _members(experiment)
    pretrains = experiment.pretraining.steps > 0
    parents: dict[tuple[int | None, str], Stage | None] = {}  # the pre-training of a member for a target
    for (member, settings), target in product(models, targets or ("",)):
        model = (None, replace(settings, seed=experiment.seed)) if shared else (member, settings)
        before = (
            _pretraining(*model, target, (folder, home)) if pretrains else _before(*model, (folder, home))
        )
        parents[member, target] = before
    tuned = []
    shares = tuning.branches[::-1] if pretrains else (1.0,)  # a task's files are first found in the whole's
    for target, share, (member, settings) in product(targets, shares, models):
        if experiment.finetuning.steps:
            kind: Literal["head", "text"] = "head" if target in tuning.heads else "text"
            group = task_name(target) if share == 1 else f"{BRANCH}{share}/{task_name(target)}"
            parent = parents[member, target]
            after = branch_step(experiment, share) if pretrains else parent.training.steps if parent else None
            stage = Stage(group, member, kind, (target,), settings, folder, parent, after)
            tuned.append(replace(stage, folder=folder / "finetuning" / stage.name))
    pretrained = [stage for stage in parents.values() if stage is not None]
    # Most targets have the same pre-training: each stage is there once.
    once = dict.fromkeys((*_ancestors(pretrained), *pretrained))
    return (*(stage for stage in once if stage.kind != "given"), *tuned)


def _ancestors(stages: list[Stage]) -> list[Stage]:
    """What these stages start from, and what that starts from; those come first that others start from."""
    parents = [stage.parent for stage in stages if stage.parent is not None]
    return [*_ancestors(parents), *parents] if parents else []


def _counted(experiment: Experiment, folder: Path) -> tuple[Stage, ...]:
    """The stage of an n-gram model, or of each tagger."""
    models: list[tuple[str, tuple[str, ...], Path]] = [(COUNTS, (), folder / COUNTS)]
    if experiment.counts.model == "tagger":
        models = [(name, (name,), folder / COUNTS / name) for name in experiment.tuning.heads]
    return tuple(Stage(name, None, "count", on, experiment, path, None) for name, on, path in models)


def stages_of(folder: Path) -> tuple[Stage, ...]:
    """The stages of the run in ``folder``, by the settings there; SettingError if it is not a run."""
    return stages(load_settings(folder), folder, home_of(folder, cache_of(folder)))


def saved_steps(folder: Path) -> tuple[int, ...]:
    """After which of its steps what the stage in a folder has learnt was saved whole, in order."""
    counted = (folder / COUNTS_FILE).exists() and matches_checksum(folder / COUNTS_FILE)
    return (AT_ONCE.steps,) if counted else tuple(manifest.steps(folder / "checkpoints"))


def branch_step(experiment: Experiment, share: float) -> int:
    """The step of pre-training that is nearest to a share of it; at least 1."""
    return max(round(share * experiment.pretraining.steps), 1)


def group_of(name: str) -> tuple[str, bool]:
    """The group of the stage called ``name``, and whether it pre-trains: for files with names alone."""
    parts = name.split("/")
    group = "/".join(parts[: 1 + name.startswith(BRANCH)])
    return group, group in (START, PRETRAINING)


def is_main(name: str) -> bool:
    """Whether a stage of this name is what a run is compared by: neither vectors, a start nor a branch."""
    return name.partition("/")[0] not in (START, VECTORS) and not name.startswith(BRANCH)


def model_of_run(names: Iterable[str]) -> str:
    """Return the name of the stage whose model is meant where a run is named alone: of its pre-training.

    A run pre-trains once and is fine-tuned any number of times, so that no fine-tuned model is the run's own.
    It is the first one where nothing is pre-trained. All commands, ``--start`` and notebooks follow this.
    """
    return next(filter(is_main, names))


def which_model(folder: Path, name: str, names: Iterable[str], option: str = "--mixture") -> str:
    """Return the words that tell which model of the run in ``folder`` is used, and which others it has."""
    others = ", ".join(other for other in names if other != name)
    return f"{folder} after {name}" + (f"; by {option} also: {others}" if others else "")


def _members(experiment: Experiment) -> list[tuple[int | None, Experiment]]:
    """(number, settings) of each model that the run consists of.

    Members differ in their seeds: member k of n has seed * n + k, so that no two members of ensembles with
    seeds 0, 1, ... are alike. Those n of seed 0 pre-train like single runs with seeds 0 to n - 1, and share
    their pre-training with them.
    """
    count = experiment.ensemble.members
    if count == 1:
        return [(None, experiment)]
    single = replace(experiment, ensemble=BASELINE.ensemble)
    return [(k, replace(single, seed=experiment.seed * count + k)) for k in range(count)]


def _pretraining(member: int | None, settings: Experiment, target: str, folders: tuple[Path, Path]) -> Stage:
    """The pre-training of a model that is then fine-tuned on ``target``; folders: of the run, its scale."""
    without = f"/without-{task_name(target)}" if settings.mixing.pretraining == "corpus+other-tasks" else ""
    decisive = _pretraining_settings(settings, target)
    names = ("data", "mesh", "guard", "pretraining", "finetuning")  # have settings that change no number
    kept = replace(decisive.tuning, branches=settings.tuning.branches)  # which decides of checkpoints alone
    complete = replace(decisive, tuning=kept, **{name: getattr(settings, name) for name in names})
    on = () if decisive.mixing.pretraining == "corpus" else decisive.tuning.mixtures
    texts = settings.tuning.mixtures if settings.data.vocabulary_texts == "corpus+tasks" else ()
    folder = _shared_folder(_pretraining_settings(complete, ""), texts, *folders)
    start = _start if _has_start(settings) else _before
    parent = start(member, settings, folders)
    step = parent.training.steps if parent else None
    return Stage(f"{PRETRAINING}{without}", member, "pretrain", on, complete, folder, parent, step)


def _start(member: int | None, settings: Experiment, folders: tuple[Path, Path]) -> Stage:
    """What comes before a pre-training: one on the corpus alone, as short as ``start.steps`` says.

    What rows differ in otherwise is left out of it, so that those of one model, data and seed share it.
    """
    first = replace(
        settings,
        objective=settings.start.objective,
        pretraining=replace(settings.pretraining, steps=settings.start.steps, steps_per_row=1),
        data=replace(settings.data, repeats=0, held_out_documents=0),
        mixing=BASELINE.mixing,
        tuning=replace(settings.tuning, branches=BASELINE.tuning.branches),
        start=BASELINE.start,
    )
    return replace(_pretraining(member, first, "", folders), group=START)


def _before(member: int | None, settings: Experiment, folders: tuple[Path, Path]) -> Stage | None:
    """What comes before all training on text in rows: a checkpoint, vectors, or nothing."""
    given = start_of(settings, *folders)
    if given is not None:
        return given if settings.start.weights == "trained" else None
    return _vectors(member, settings, folders)


def start_of(settings: Experiment, folder: Path, home: Path) -> Stage | None:
    """The checkpoint whose model a run in ``folder`` has; None: it has none's."""
    if not (name := settings.start.model):
        return None
    return Stage(name, None, "given", (), settings, start_folder(name, folder, home) / PRETRAINING, None)


def _vectors(member: int | None, settings: Experiment, folders: tuple[Path, Path]) -> Stage | None:
    """The vectors as which the embedding of a model starts, unless it starts at random."""
    if not settings.vectors.epochs:
        return None
    complete, data = _vectors_settings(settings), settings.data
    kept = {name: getattr(data, name) for name in FEEDING}
    complete = replace(
        complete, data=replace(complete.data, **kept), mesh=settings.mesh, guard=settings.guard
    )
    texts = settings.tuning.mixtures if data.vocabulary_texts == "corpus+tasks" else ()
    folder = _shared_folder(_vectors_settings(complete), texts, *folders)
    return Stage(VECTORS, member, "vectors", (), complete, folder, None)


def _vectors_settings(experiment: Experiment) -> Experiment:
    """The settings that vectors depend on: of the model only the size of its embedding."""
    paths = ("vocab_size", "d_model", "embedding.d_embed", "output.logits", "output.transform")
    kept = {path: attrgetter(path)(experiment.model) for path in paths}
    data = replace(experiment.data, repeats=0, inputs_length=BASELINE.data.inputs_length, **_FREE_DATA)
    return replace(
        BASELINE,
        model=changes(BASELINE.model, kept),
        data=data,
        vectors=replace(experiment.vectors, embedding=BASELINE.vectors.embedding),
        pretraining=replace(BASELINE.pretraining, steps=0),  # so that no pre-training has the same folder
        seed=experiment.seed,
    )


def _has_start(experiment: Experiment) -> bool:
    start = experiment.start
    return start.steps > 0 and not start.model and experiment.model.has_decoder


def _shared_folder(decisive: Experiment, texts: tuple[str, ...], folder: Path, home: Path) -> Path:
    """The folder of what depends on these settings and, in its vocabulary, on the tasks ``texts``."""
    if (folder / PRETRAINING / "checkpoints").is_dir():  # an imported run has its own
        return folder / PRETRAINING
    # A hash of the settings that differ from the baseline's: settings added later do not change it.
    changed = diff(BASELINE, decisive)
    contents: dict[str, object] = {path: str(new) for path, (_, new) in changed.items()}
    contents |= {"texts": texts} if texts else {}
    key = Path(PRETRAINING) / hashlib.sha256(json.dumps(contents).encode()).hexdigest()[:16]
    # The scale's folder may have been copied: look in every folder above the run before the expected one.
    return next((up / key for up in (folder, *folder.parents) if (up / key).is_dir()), home / key)


# settings of data that change no number of what is trained before fine-tuning
FEEDING = ("workers", "corrupt_records", "encoders", "cache_size")  # how it is read, whatever is made of it
_FREE_DATA: Mapping[str, Any] = {
    name: getattr(BASELINE.data, name) for name in (*FEEDING, "held_out_lengths")
}


def _pretraining_settings(experiment: Experiment, target: str) -> Experiment:
    """The settings that pre-training depends on, of a model that is then fine-tuned on ``target``."""
    data, mixing, tuning = experiment.data, experiment.mixing, experiment.tuning
    chosen: Any = {"model": experiment.start.model, "weights": experiment.start.weights}
    decisive = replace(
        BASELINE,
        objective=experiment.objective,
        model=experiment.model,
        vectors=experiment.vectors if experiment.vectors.epochs else BASELINE.vectors,
        start=experiment.start if _has_start(experiment) else replace(BASELINE.start, **chosen),
        pretraining=replace(experiment.pretraining, keep_hours=BASELINE.pretraining.keep_hours),
        data=replace(data, **_FREE_DATA),
        generator_share=experiment.generator_share,
        seed=experiment.seed,
        guard=replace(BASELINE.guard, spikes=experiment.guard.spikes),
    )
    if mixing.pretraining == "corpus":
        return decisive
    mixtures = tuning.mixtures
    if mixing.pretraining == "corpus+other-tasks":
        mixing = replace(mixing, pretraining="corpus+tasks")
        mixtures = tuple(name for name in mixtures if name != target)
    trained = replace(BASELINE.tuning, mixtures=mixtures, inputs_length=tuning.inputs_length)
    if experiment.finetuning.steps:
        return replace(decisive, mixing=mixing, tuning=trained)
    examples = {name: getattr(tuning, name) for name in ("evaluation_examples", "report_examples")}
    scored = replace(trained, **examples)  # as it stands
    return replace(decisive, mixing=mixing, tuning=scored, finetuning=replace(BASELINE.finetuning, steps=0))


def save_settings(folder: Path, experiment: Experiment) -> None:
    """Write the settings of the run in ``folder``, sealed."""
    write(folder / "settings.json", json_with_checksum(json.loads(to_json(experiment))))


def load_settings(folder: Path) -> Experiment:
    """The settings of the run in ``folder``."""
    path = folder / "settings.json"
    if not path.exists():
        runs = sorted(str(p.parent) for p in Path().glob("runs/**/settings.json"))
        raise SettingError(f"{folder} is no run: it has no settings.json{nearest(str(folder), runs)}")
    try:
        return from_json(Experiment, json.dumps(parse_with_checksum(path.read_bytes(), path)))
    except (SettingError, OSError) as error:
        raise SettingError(f"{path} cannot be read: {error}{needed_study(folder)}") from error

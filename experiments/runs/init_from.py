"""Imports the checkpoints that training starts from: published ones, those of the hub, and models of runs.

Each becomes a run in the folder ``starts`` beside the other runs, called a start. It is named by the digest
of its files, and imported only once. The teacher of a run (``distillation.teacher``) becomes such a run too.
Modules with jax are imported where they are needed: most commands need no checkpoint.
"""

import hashlib
import json
import re
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from experiments.runs import provenance
from experiments.runs.paths import (
    PRETRAINING,
    SETTINGS,
    describe_model,
    load_settings,
    pretrained_of_run,
    save_settings,
)
from experiments.runs.start_origin import HUB_NAME_FILE, TRAINING_FILE, copy_origin, hub_name
from experiments.runs.vocabulary import NO_FINGERPRINT, TOKENIZER_FOLDER, store_vocabulary, stored_vocabulary
from experiments.study.changes import Overrides
from experiments.study.experiment import Experiment, StartConfig
from experiments.study.names import STARTS_FOLDER
from experiments.study.overrides import CONVERTIBLE_MODEL_SETTINGS, NO_SETTINGS, start_changes
from experiments.study.paths import check_runs
from experiments.study.settings_diff import result_settings
from lm.config.base import SettingError, changes, did_you_mean, read_object
from lm.config.model import ModelConfig
from lm.files import atomic_folder, locked_if_possible, write
from lm.objectives.denoising import OBJECTIVES
from lm.special_tokens import special_ids
from lm.tokenizers.huggingface import (
    TOKENIZER_FILES,
    HFTokenizer,
    exported_boundary_ids,
    load_pretrained_tokenizer,
)
from lm.tokenizers.sentencepiece import TOKENIZER_CONFIG, TrainedTokenizer
from lm.tokenizers.tokenizer import Tokenizer
from lm.train.runtime.records import packages

if TYPE_CHECKING:
    from experiments.runs.kinds.network import NetworkStage

START_OPTION, TEACHER_OPTION = "--start", "--distillation.teacher"  # options that name a model
HUB = "hf:"  # before the name of a checkpoint of the Hugging Face hub
HUB_FILES = ("config.json", "*.safetensors", "*.safetensors.index.json", *TOKENIZER_FILES)
DIGITS = 16  # of a digest in the name of a start
CONFIG = "config.json"
HUB_CACHE = "models--"  # how the hub's cache calls the folder of a model: models--OWNER--NAME


def overrides_of_start(where: str, runs: Path, settings: Mapping[str, Any] = NO_SETTINGS) -> Overrides:
    """Import the checkpoint ``where`` as a run below ``runs``; return the overrides that start from it.

    These settings are the checkpoint's shape, vocabulary and special ids, with no steps of pre-training.

    where: a folder with config.json and safetensors, a run, RUN:STAGE, or hf:NAME. Nothing else is accepted,
    nor a checkpoint whose files do not fit each other (SettingError). If it is empty, {} is returned.
    settings: if they name another architecture than the checkpoint's, its weights are converted to that one
    (``lm.nn.adapt``), and the origin of each part of the model is printed on the standard error. If they name
    fewer layers, a line says which of the checkpoint's layers are used.
    """
    if not where:
        return {}
    run = _get_or_import(where, runs, START_OPTION)
    run = _with_fewer_layers(where, run, settings)
    requested = {
        path: settings[f"model.{path}"] for path in CONVERTIBLE_MODEL_SETTINGS if f"model.{path}" in settings
    }
    architecture = load_settings(run).model.architecture
    if requested.get("architecture", architecture) != architecture:
        with locked_if_possible(run.parent / "lock"):
            run = _get_or_adapt(where, run, requested, run.parent)
    return start_changes(_experiment_of_start(run))


def teacher_name(where: str, runs: Path) -> str:
    """Import the teacher ``where`` into ``starts`` below ``runs``, and return the name of its folder there.

    ``where`` is as in ``overrides_of_start``, or the name or folder of a run that is in ``starts`` already.
    """
    kept = runs / STARTS_FOLDER / Path(where).name
    if kept.is_dir() and (where == kept.name or Path(where).resolve() == kept.resolve()):
        return kept.name
    return _get_or_import(where, runs, TEACHER_OPTION).name


def _get_or_import(where: str, runs: Path, option: str) -> Path:
    """Return the run in ``starts`` below ``runs`` that has the model ``where``, imported if it is not there.

    ``option`` is the command-line option that named the model; error messages begin with it.
    """
    folder, stage = _resolve_source(where, option)
    digest_of_file = _digests_of_run(folder, stage, option) if stage else digests(folder)
    has_tokenizer = stage is not None or any(name in digest_of_file for name in TOKENIZER_FILES)
    if not has_tokenizer or NO_FINGERPRINT in digest_of_file.values():
        raise SettingError(
            f"{option} {where}: it has no tokenizer: put one of {', '.join(TOKENIZER_FILES)} beside it"
        )
    check_runs(runs)
    digest = hashlib.sha256(json.dumps(digest_of_file, sort_keys=True).encode()).hexdigest()[:DIGITS]
    starts = runs / STARTS_FOLDER
    starts.mkdir(parents=True, exist_ok=True)
    with locked_if_possible(starts / "lock"):
        run = next(starts.glob(f"*-{digest}"), None)
        if run is None:
            run = starts / f"{_kind(folder, stage)}-{digest}"
            if stage is None:
                import_published(folder, run, runs / "cache")
            else:
                _copy_stage(stage, run, digest_of_file, runs / "cache")
        name = _name_on_hub(where, folder)
        if name and not hub_name(run):
            write(run / HUB_NAME_FILE, f"{name}\n")
        if stage is not None and not (run / TRAINING_FILE).exists():
            from experiments.runs.model_card import training_lines

            write(run / TRAINING_FILE, "".join(f"{line}\n" for line in training_lines(folder, stage)))
    return run


def _name_on_hub(where: str, folder: Path) -> str | None:
    """Return what the hub calls the checkpoint in ``folder``: by ``where``, or by its place in the cache."""
    if where.startswith(HUB):
        return where.removeprefix(HUB)
    place = folder.resolve().parent
    if place.name != "snapshots" or not place.parent.name.startswith(HUB_CACHE):
        return None
    return place.parent.name.removeprefix(HUB_CACHE).replace("--", "/")


def _with_fewer_layers(where: str, run: Path, settings: Mapping[str, Any]) -> Path:
    """Return a copy of the start ``run`` with some of its layers if ``settings`` ask for fewer, else ``run``.

    The copy is made if it does not exist.
    """
    experiment = load_settings(run)
    model = experiment.model
    counts = {}
    for stack in ("encoder", "decoder"):
        path, has_stack = f"num_{stack}_layers", getattr(model, f"has_{stack}")
        if has_stack and 0 < settings.get(f"model.{path}", 0) < getattr(model, path):
            counts[path] = settings[f"model.{path}"]
    if not counts:
        return run
    from experiments.runs.stages import stages_of
    from experiments.runs.trained import networks
    from lm import sharding
    from lm.nn import adapt

    for path, count in counts.items():
        kept = ", ".join(map(str, adapt.spread_layers(getattr(model, path), count)))
        print(f"--start {where}: model.{path}={count}: layers {kept} of the checkpoint", file=sys.stderr)
    shape = "-".join(
        f"{count}-{path.removeprefix('num_').replace('_', '-')}" for path, count in counts.items()
    )
    made = run.parent / f"{run.name}-{shape}"
    with locked_if_possible(run.parent / "lock"):
        if made.exists():
            return made
        (stage, *_) = networks(stages_of(run))
        body = stage.restore_transformer(sharding.make_mesh(experiment.mesh))
        try:
            smaller, params = adapt.drop_layers(model, sharding.named(body), counts)
        except SettingError as error:
            raise SettingError(f"--start {where}: {error}") from error
        smaller_experiment = replace(experiment, model=smaller)
        vocabulary = stored_vocabulary(stage.folder, experiment)
        cache, data = run.parent.parent / "cache", {"start": run.name}
        save_run(made, smaller_experiment, vocabulary, _prefixed(smaller_experiment, params), data, cache)
        copy_origin(run, made)
    return made


def _get_or_adapt(where: str, run: Path, requested: Mapping[str, Any], starts: Path) -> Path:
    """Return a start with the weights of the start ``run`` and the settings ``requested``.

    It is made if it does not exist.
    """
    import jax

    from experiments.runs.stages import stages_of
    from experiments.runs.trained import networks
    from lm import sharding
    from lm.nn import adapt

    experiment = load_settings(run)
    config = experiment.model
    try:
        model = adapt.adapted_config(config, requested)
        for line in adapt.describe(config, model):
            print(f"--start {where}: {line}", file=sys.stderr)
    except SettingError as error:
        raise SettingError(f"--start {where}: {error}") from error
    text = json.dumps([run.name, sorted(requested.items())])
    digest = hashlib.sha256(text.encode()).hexdigest()[:DIGITS]
    kind, *layers = re.split(rf"-[0-9a-f]{{{DIGITS}}}", run.name, maxsplit=1)
    suffix = f"-as-{model.architecture}-{digest}"
    adapted = starts / f"{kind}{''.join(layers)}{suffix}"
    # The digest decides, since starts with fewer layers were named otherwise in earlier versions.
    if made := next(starts.glob(f"*{suffix}"), None):
        return made
    (stage, *_) = networks(stages_of(run))
    body = stage.restore_transformer(sharding.make_mesh(experiment.mesh))
    params = adapt.adapt(config, sharding.named(body), model, jax.random.key(0))
    cache, data = starts.parent / "cache", {"start": run.name}
    with tempfile.TemporaryDirectory() as scratch:
        vocabulary = _with_eos(stored_vocabulary(stage.folder, experiment), model, Path(scratch))
        save_run(adapted, replace(experiment, model=model), vocabulary, params, data, cache)
    copy_origin(run, adapted)
    return adapted


def _with_eos(vocabulary: Tokenizer, model: ModelConfig, scratch: Path) -> Tokenizer:
    """Return the tokenizer with [SEP] as EOS if a decoder needs one that it lacks (Rothe et al. 2020).

    Its files are then in the folder ``scratch``.
    """
    if not (model.has_decoder and vocabulary.eos is None and isinstance(vocabulary, HFTokenizer)):
        return vocabulary
    sep = next((token for token, number in vocabulary.vocab.items() if number == vocabulary.sep), None)
    if sep is None:
        raise SettingError(
            "a decoder needs a token that ends a text, and this tokenizer has neither EOS nor SEP"
        )
    for name, contents in vocabulary.files().items():
        (scratch / name).write_bytes(contents)
    config = json.loads(vocabulary.config) | {"eos_token": sep}
    (scratch / TOKENIZER_CONFIG).write_text(json.dumps(config))
    return load_pretrained_tokenizer(scratch, model.vocab_size)


def _experiment_of_start(run: Path) -> Experiment:
    """Return the settings of a start, with all special ids that training needs."""
    experiment = load_settings(run)
    vocabulary = stored_vocabulary(run / PRETRAINING, experiment)
    model = replace(experiment.model, special=special_ids(experiment.model, vocabulary))
    return replace(experiment, model=model, start=StartConfig(model=run.name))


def _resolve_source(where: str, option: str) -> "tuple[Path, NetworkStage | None]":
    """Return a folder in the published format and None, or a run and the stage whose model is meant."""
    if where.startswith(HUB):
        return _from_hub(where.removeprefix(HUB), option), None
    folder, name = Path(where), ""
    if not folder.exists():
        before, _, name = where.rpartition(":")
        folder = Path(before) if before and Path(before).is_dir() else folder
    if (folder / SETTINGS).exists():
        from experiments.runs.stages import stages_of
        from experiments.runs.trained import networks

        if load_settings(folder).counts.model != "none":
            raise SettingError(f"{option} {where}: its model is made of counts, and training needs a network")
        models = {stage.name: stage for stage in networks(stages_of(folder)) if stage.has_text_model}
        if not models:
            raise SettingError(f"{option} {where}: its settings ask for no training of a model of texts")
        if name not in ("", *models):
            raise SettingError(
                f"{option} {where}: {folder} has no stage {name!r}{did_you_mean(name, models)}"
            )
        stage = models[name or pretrained_of_run(models)]
        which = describe_model(folder, stage.name, models, "RUN:STAGE", stage.progress_if_unfinished)
        print(f"{option} {where}: {which}", file=sys.stderr)
        return folder, stage
    what = "does not exist"
    if (folder / CONFIG).exists():
        if not name:
            return folder, None
        what = f"is no run and has no stage {name!r}"
    elif folder.is_dir():
        what = "has neither config.json nor settings.json"
    raise SettingError(
        f"{option} {where}: {folder} {what}; it should be a folder with config.json, safetensors and "
        f"tokenizer, a run's folder, RUN:STAGE, or {HUB}NAME"
    )


def import_hub(what: str) -> ModuleType:
    """Return the package huggingface_hub. Raise SettingError if it is not installed.

    what: what needs the package, for the message.
    """
    try:
        import huggingface_hub
    except ImportError as error:
        raise SettingError(
            f"{what} needs the package huggingface_hub: pip install 'lm-study[hub]'"
        ) from error
    return huggingface_hub


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, at most 200 characters, or the name of its class."""
    return (str(error).strip().partition("\n")[0] or type(error).__name__)[:200]


def _from_hub(name: str, option: str) -> Path:
    """Return the folder of a checkpoint of the hub, downloaded unless it is in the hub's cache."""
    hub = import_hub(f"{option} {HUB}{name}")
    try:
        return Path(hub.snapshot_download(name, allow_patterns=list(HUB_FILES)))
    except Exception as error:  # errors of the network, the hub and bad names have no common class
        raise SettingError(
            f"{option} {HUB}{name} cannot be downloaded ({first_line(error)}); without a network name a "
            "folder that has config.json, safetensors and tokenizer"
        ) from error


def _kind(folder: Path, stage: "NetworkStage | None") -> str:
    """Return the kind of model, with which the name of its folder begins."""
    if stage is not None:
        return stage.settings.model.architecture
    kind = read_object(folder / CONFIG).get("model_type")
    return "".join(letter for letter in str(kind) if letter.isalnum() or letter in "-_")[:40]


def digests(folder: Path) -> dict[str, str]:
    """Return ``{name: sha256}`` of the files of a published model."""
    paths = [folder / name for name in (CONFIG, *TOKENIZER_FILES)]
    found = sorted((*(path for path in paths if path.exists()), *folder.glob("*.safetensors")))
    sums = {}
    for path in found:
        with path.open("rb") as file:
            sums[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return sums


def _digests_of_run(folder: Path, stage: "NetworkStage", option: str) -> dict[str, str]:
    """Return the digests of a stage's best checkpoint and of its vocabulary.

    They are {"checkpoint": DIGEST, "vocabulary": DIGEST}.
    """
    from lm.train.runtime import manifest

    saved = {step: each for step, each in manifest.manifests(stage.folder / "checkpoints").items() if each}
    if not saved:
        raise SettingError(f"{option} {folder}: {stage.folder} has no checkpoint yet; train the run first")
    step = manifest.best(saved, "score", "highest") or max(saved)
    arrays = json.dumps(saved[step]["files"], sort_keys=True)
    vocabulary = provenance.read(stage.folder)["vocabulary"]["fingerprint"]
    return {"checkpoint": hashlib.sha256(arrays.encode()).hexdigest(), "vocabulary": vocabulary}


# ---- a run of a checkpoint


def import_published(folder: Path, run: Path, cache: Path | None = None) -> Experiment:
    """Create ``run`` from a folder with config.json and safetensors, and return the run's settings.

    Raise SettingError for a checkpoint that cannot be used.
    """
    from lm import convert, sharding

    _check_links(folder)
    config, model = convert.load(folder)
    has_tokenizer = any((folder / name).exists() for name in TOKENIZER_FILES)
    # SettingError if it does not belong to the embedding
    vocabulary = load_pretrained_tokenizer(folder, config.vocab_size) if has_tokenizer else None
    # Embeddings are often padded to a round size; one that is half empty belongs to another tokenizer.
    if vocabulary and 2 * vocabulary.vocab_size < config.vocab_size:
        few = f"{vocabulary.vocab_size} tokens, the model's embedding {config.vocab_size} rows"
        raise SettingError(f"the tokenizer of {folder} has {few}: they do not belong together")
    experiment = experiment_for_model(config)
    if isinstance(vocabulary, TrainedTokenizer):  # exported by us
        experiment = changes(experiment, {"data.sentinels": vocabulary.num_sentinels})
    boundary_ids = exported_boundary_ids(folder)
    if boundary_ids is not None and not config.has_encoder:
        start, end = boundary_ids
        experiment = changes(experiment, {"model.special.start": start})
        if end is None:  # a language model, whose prompts end without a special token
            experiment = replace(experiment, objective=OBJECTIVES["causal-lm"])
    save_run(
        run, experiment, vocabulary, _prefixed(experiment, sharding.named(model)), digests(folder), cache
    )
    return experiment


def _prefixed(experiment: Experiment, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a Transformer with the names that pre-training gives them."""
    from experiments.runs.stages import stages
    from experiments.runs.trained import networks

    (stage, *_) = networks(stages(experiment))
    return {stage.transformer_prefix + name: array for name, array in params.items()}


def _copy_stage(stage: "NetworkStage", run: Path, digest_of_file: Mapping[str, str], cache: Path) -> None:
    """Create ``run`` from the model of another run's stage, without its fine-tuning head."""
    from lm import sharding
    from lm.nn.finetune import BODY

    settings, state = stage.settings, stage.restore_state(sharding.make_mesh(stage.settings.mesh))
    model = stage.step_spec().model
    vocabulary = stored_vocabulary(stage.folder, settings)
    kept = {name: getattr(settings.data, name) for name in ("vocabulary_size", "unknown", "sentinels")}
    source = "bytes" if settings.data.vocabulary == "bytes" else TOKENIZER_FOLDER
    experiment = experiment_for_model(model)
    experiment = replace(experiment, data=replace(experiment.data, vocabulary=source, **kept))
    params = state.eval_params
    if stage.has_head:
        params = {name.removeprefix(BODY): x for name, x in params.items() if name.startswith(BODY)}
    save_run(run, experiment, vocabulary, dict(params), digest_of_file, cache)


def save_run(
    run: Path,
    experiment: Experiment,
    vocabulary: Tokenizer | None,
    params: dict[str, Any],
    data: Mapping[str, str],
    cache: Path | None,
) -> None:
    """Write a run whose pre-training has these parameters and no step yet, whole or not at all."""
    import jax
    import numpy as np

    from lm import sharding
    from lm.config.training import CheckpointConfig
    from lm.train.runtime.checkpoints import Checkpoints
    from lm.train.step import StepSpec, build

    mesh = sharding.make_mesh(experiment.mesh)
    abstract = build(StepSpec(experiment.model, experiment.pretraining.optimizer), mesh).abstract
    # what an optimiser remembers before its first step is zeros
    state = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), abstract)
    average = None if state.average is None else params
    record = {
        "settings": result_settings(experiment),
        "code": provenance.code(),
        "packages": packages(),
        "data": dict(data),
        "vocabulary": {"fingerprint": vocabulary.fingerprint if vocabulary else NO_FINGERPRINT},
    }
    with atomic_folder(run) as draft:
        stage = draft / PRETRAINING
        (stage / TOKENIZER_FOLDER).mkdir(parents=True)
        if vocabulary:
            store_vocabulary(stage, vocabulary)
        with Checkpoints(str(stage / "checkpoints"), CheckpointConfig()) as checkpoints:
            checkpoints.save(replace(state, params=params, average=average))
        provenance.record(stage, record)
        save_settings(draft, experiment, cache)


def _check_links(folder: Path) -> None:
    """Raise SettingError if the config or a tokenizer file, which are copied, is a link out of the folder.

    Links of Hugging Face's cache, from ``snapshots/REVISION/NAME`` to ``blobs``, are allowed.
    """
    root = folder.resolve()
    homes = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    for path in (folder / name for name in (CONFIG, *TOKENIZER_FILES)):
        target = path.resolve()
        if path.is_symlink() and not any(target.is_relative_to(home) for home in homes):
            raise SettingError(
                f"{path} is a link to {target}, outside of the folder: copy that file if it is the model's"
            )


def experiment_for_model(config: ModelConfig) -> Experiment:
    """Return the settings of a run that holds a model trained elsewhere, with its tokenizer."""
    new = {"data.vocabulary": TOKENIZER_FOLDER, "data.corpus": "documentation", "tuning.mixtures": ()}
    return replace(changes(Experiment(), new), model=config)

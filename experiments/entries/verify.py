"""Verifies an archive: is it whole, does it keep the rules, and does a run of it come to the same again?

What can be seen without training is checked first. Then one seed, which the verifier draws, is trained again
from the archive's own file.
"""

import ast
import json
import tempfile
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from experiments.entries import rules
from experiments.entries.archive import (
    SOURCE,
    SUMMARY,
    Archive,
    SeedScore,
    check_rules,
    code,
    machine,
    seed_score,
)
from experiments.entries.entry import Entry, check_budget, described
from experiments.runs import provenance
from experiments.runs.paths import find_cache, pretrained_of_run
from experiments.runs.result import read_result
from experiments.study.settings_diff import flatten, setting_changes
from lm.config.base import SettingError, to_json
from lm.data.corpus.shards import iter_documents
from lm.data.corpus.spec import corpus_shards
from lm.data.documentation.pinned import SHINGLE, shingles
from lm.files import json_with_checksum, write

if TYPE_CHECKING:  # with jax, which takes a second
    from experiments.runs.trained import Trained

ROUNDING = 1e-3  # largest change of a logit that counts as rounding
ROWS = 8  # held-out rows by which a model is checked


def check_archive(archive: Archive, entry: Entry) -> None:
    """Raise SettingError for the first thing in an archive that breaks the rules.

    entry: what the archive's own file defines.
    """
    check_rules(archive)
    check_code(archive)
    if archive.summary["entry"] != described(entry):
        raise SettingError(f"{archive.path}: its {SUMMARY} does not say what its {SOURCE} says")
    check_seeds(archive, entry)
    for seed, score in archive.scores.items():
        recorded = recorded_score(archive, seed)
        if recorded != score:
            raise SettingError(
                f"{archive.path}: seed {seed} is given as {score.score:.4f} {archive.track.unit}, and its "
                f"records say {recorded.score:.4f}"
            )
        check_budget(entry.experiment(seed), score.flops, score.parameters)
    is_counted = entry.experiment(0).counts.model != "none"
    if not is_counted and len({score.score for score in archive.scores.values()}) == 1:
        raise SettingError(
            f"{archive.path}: all seeds have the same score, so that the network does not depend on its seed"
        )


def check_code(archive: Archive) -> None:
    """Raise SettingError if the entry was trained by other code than that of this checkout."""
    then, now = archive.summary["code"], code()
    changed = sorted(name for name in {*then, *now} if then.get(name) != now.get(name))
    if changed:
        commit, dirty, _ = archive.summary["commit"].partition("-dirty")
        mend = f"to verify it: git checkout {commit} && make install"
        if not commit:
            mend = "its commit is not recorded"
        elif dirty:
            mend = f"it is commit {commit} with changes that are not recorded"
        raise SettingError(
            f"{archive.path}: it was trained by another version, and {len(changed)} modules differ, such as "
            f"{changed[0]}; {mend}"
        )


def check_seeds(archive: Archive, entry: Entry) -> None:
    """Raise SettingError unless there is a run of each seed, with the settings that the file builds."""
    due, found = [*range(rules.RULES.seeds)], sorted(archive.scores)
    if found != due:
        raise SettingError(f"{archive.path}: it has the seeds {found}; an entry has {due}")
    for seed in due:
        name = f"seed-{seed}/settings.json"
        settings = archive.json(name)
        built = json.loads(to_json(entry.experiment(seed)))
        if changed := setting_changes(flatten(built), flatten(settings)):
            raise SettingError(
                f"{archive.path}: {name} is not what its {archive.summary['entry']['row']} and changes "
                f"build: {changed[0]}"
            )


def recorded_score(archive: Archive, seed: int) -> SeedScore:
    """Return what the records of a run say that it came to."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, f"seed-{seed}")
        folder.mkdir()
        for name in ("settings.json", "scores.json"):
            write(folder / name, json_with_checksum(archive.json(f"seed-{seed}/{name}")))
        return seed_score(folder, archive.track)


def check_brings_no_text(source: bytes, documents: Iterable[str]) -> None:
    """Raise SettingError if the strings of a file share SHINGLE words in a row with held-out documents."""
    constants = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    strings = [value for value in constants if isinstance(value, str)]
    strings += [value.decode("utf-8", errors="replace") for value in constants if isinstance(value, bytes)]
    strings.append(" ".join(strings))  # a text may come in pieces
    known, _ = shingles([" ".join(string.split()) for string in strings])
    held_out, _ = shingles([" ".join(document.split()) for document in documents])
    if np.isin(known, held_out).any():
        raise SettingError(
            f"a string of the entry's file has {SHINGLE} words in a row that a held-out document has too; an "
            "entry learns from the text of the rules alone"
        )


# ---- training again


def compare_again(archive: Archive, seed: int, again: SeedScore) -> str:
    """Return how a run that was trained again agrees; SettingError if it does not."""
    first = archive.scores[seed]
    if (again.flops, again.parameters) != (first.flops, first.parameters):
        raise SettingError(
            f"{archive.path}: seed {seed} is given with {first.flops:.3g} FLOP and {first.parameters:,} "
            f"parameters, and has {again.flops:.3g} and {again.parameters:,}"
        )
    difference, tolerance = again.score - first.score, archive.track.tolerance
    values = f"{first.score:.6f} {archive.track.unit} in the archive and {again.score:.6f} here"
    same = machine() == dict(archive.summary["machine"])
    if same and difference == 0:
        return f"seed {seed}: {values}, equal to the last bit on the same kind of machine"
    if not same and abs(difference) <= tolerance:
        return f"seed {seed}: {values}, within {tolerance} of another kind of machine"
    due = "be equal on the same kind of machine" if same else f"be within {tolerance} on another machine"
    raise SettingError(f"{archive.path}: seed {seed} has {values}; they should {due}")


def check_same_data(archive: Archive, seed: int, folder: Path) -> None:
    """Raise SettingError if the run in ``folder`` learnt from other data than the archive's."""
    result = read_result(folder)
    folders = {} if result is None else result.stage_folders()
    if not folders:
        raise SettingError(f"{folder} has no stage to compare the data of")
    for stage, place in folders.items():
        recorded = archive.json(f"seed-{seed}/stages/{stage}/{provenance.ORIGIN_FILE}")
        here = provenance.read(place)
        for part in ("vocabulary", "data"):
            if changed := setting_changes(recorded[part], here[part]):
                raise SettingError(f"{archive.path}: it learnt from another {part}: {changed[0]}")


Logits = Callable[[np.ndarray, np.ndarray], np.ndarray]  # of inputs [B,S] and targets [B,T], as [B,T,V]


def check_distribution(folder: Path) -> str:
    """Return a line about a run's model; SettingError if what it says of texts is no distribution.

    A decoder's prediction at a position may not depend on later tokens. No model may let a row depend on the
    rows beside it, which in masked diffusion show other masks of the same text. Then the softmax of the
    project's own code makes a distribution of it. Counts are one by their formula.
    """
    from experiments.runs.stages import stages_of  # these open trained models, which takes seconds
    from experiments.runs.trained import open_run

    stages = stages_of(folder)
    if any(stage.is_count_based for stage in stages):
        return "a distribution: counts are one by their formula"
    trained = open_run(folder, stages, pretrained_of_run(stage.name for stage in stages))
    data = trained.stage.settings.data
    documents = iter_documents(corpus_shards(data.corpus, "validation", find_cache(folder)))
    rows = [trained.vocabulary.encode(text)[: data.inputs_length] for text in islice(documents, 200)]
    rows = [row for row in rows if len(row) == data.inputs_length][:ROWS]
    if len(rows) < 2:
        raise SettingError(f"{folder}: too few held-out documents of {data.inputs_length} tokens to check it")
    logits, tokens = logits_of(trained), np.array(rows, np.int32)
    check_rows_alone(folder, logits, tokens)
    if not trained.config.has_decoder:
        return "a bound: no row sees the rows beside it"
    check_causality(folder, logits, tokens)
    return "a distribution: no position sees a later one, and no row the rows beside it"


def logits_of(trained: "Trained") -> Logits:
    """Return the function that computes a model's logits; one without an encoder has no inputs."""
    import jax

    from lm.batch import Batch, Side

    config = trained.config
    forward = jax.jit(lambda model, batch: model.logits(model.features(batch)))

    def logits(inputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
        read = {"decoder": targets} if config.has_decoder else {"encoder": targets}
        if config.has_encoder and config.has_decoder:
            read["encoder"] = inputs
        sides = {name: Side(tokens=tokens, segment_ids=np.ones_like(tokens)) for name, tokens in read.items()}
        batch = Batch(**sides)
        return np.asarray(forward(trained.model, trained.shard_batch(batch)))

    return logits


def check_causality(folder: Path, logits: Logits, tokens: np.ndarray) -> None:
    """Raise SettingError if logits at a position change when a later token of targets [B,T] does."""
    before = logits(tokens, tokens)
    for place in range(1, tokens.shape[1]):
        changed = tokens.copy()
        changed[:, place] = (tokens[:, place] + 1) % before.shape[-1]
        difference = np.abs(logits(tokens, changed)[:, :place] - before[:, :place]).max()
        if difference > ROUNDING:
            raise SettingError(
                f"{folder}: predictions before position {place} change by {difference:.2g} with the token "
                "there: the model sees what it predicts"
            )


def check_rows_alone(folder: Path, logits: Logits, tokens: np.ndarray) -> None:
    """Raise SettingError if the logits of the first row of [B,T] change when the other rows do."""
    others = tokens.copy()
    others[1:] = tokens[1:, ::-1]
    difference = np.abs(logits(others, others)[0] - logits(tokens, tokens)[0]).max()
    if difference > ROUNDING:
        raise SettingError(
            f"{folder}: predictions of a row change by {difference:.2g} with the rows beside it, which may "
            "show what it predicts"
        )


def summary_of(scores: Mapping[int, SeedScore]) -> str:
    """Return the seeds' scores in a line."""
    return ", ".join(f"{score.score:.4f}" for score in scores.values())

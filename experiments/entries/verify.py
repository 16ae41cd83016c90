"""Verifies an archive: is it whole, does it keep the rules, and does a run of it come to the same again?

What can be seen without training is checked first. Then one seed, which follows from the archive's bytes and
so is nobody's choice, is trained again from the archive's own file.
"""

import ast
import hashlib
import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from experiments.entries import rules
from experiments.entries.archive import Archive, SeedScore, check_rules, code, machine, seed_score
from experiments.entries.entry import Entry, check_budget
from experiments.runs import provenance
from experiments.runs.paths import find_cache
from experiments.runs.result import read_result
from experiments.study.settings_diff import flatten, setting_changes
from lm.config.base import SettingError, to_json
from lm.data.corpus.shards import iter_documents
from lm.data.corpus.spec import corpus_shards
from lm.data.documentation.pinned import SHINGLE, shingles
from lm.files import parse_with_checksum

TOLERANCE = (
    0.05  # between machines, whose rounding differs: three times what it was seen to change [bits/byte]
)
NORMALISED = 1e-3  # by which probabilities of all next tokens may differ from 1, and parts from the whole


def check_archive(archive: Archive, entry: Entry) -> None:
    """Raise SettingError for the first thing in an archive that breaks the rules.

    entry: what the archive's own file defines.
    """
    check_rules(archive)
    check_code(archive)
    check_seeds(archive, entry)
    for seed, score in archive.scores.items():
        recorded = recorded_score(archive, seed)
        if recorded != score:
            raise SettingError(
                f"{archive.path}: seed {seed} is given as {score.bits_per_byte:.4f} bits per byte, and its "
                f"records say {recorded.bits_per_byte:.4f}"
            )
        is_counted = entry.experiment(seed).counts.model != "none"
        check_budget(score.flops, score.parameters, is_counted)


def check_code(archive: Archive) -> None:
    """Raise SettingError if the entry was trained by other code than that of this checkout."""
    changed = setting_changes(archive.summary["code"], code())
    if changed:
        commit = archive.summary["commit"] or "one that is not recorded"
        raise SettingError(
            f"{archive.path}: it was trained by another version, commit {commit}; {len(changed)} modules "
            f"differ, such as {changed[0]}"
        )


def check_seeds(archive: Archive, entry: Entry) -> None:
    """Raise SettingError unless there is a run of each seed, with the settings that the file builds."""
    due, found = [*range(rules.RULES.seeds)], sorted(archive.scores)
    if found != due:
        raise SettingError(f"{archive.path}: it has the seeds {found}; an entry has {due}")
    for seed in due:
        name = f"seed-{seed}/settings.json"
        if name not in archive.files:
            raise SettingError(f"{archive.path}: {name} is missing")
        settings = parse_with_checksum(archive.files[name], f"{archive.path}: {name}")
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
            if (packed := f"seed-{seed}/{name}") not in archive.files:
                raise SettingError(f"{archive.path}: {packed} is missing")
            (folder / name).write_bytes(archive.files[packed])
        return seed_score(folder)


def check_brings_no_text(source: str, documents: Iterable[str]) -> None:
    """Raise SettingError if the strings of a file share SHINGLE words in a row with held-out documents."""
    strings = [
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    known, _ = shingles([" ".join(string.split()) for string in strings])
    held_out, _ = shingles([" ".join(document.split()) for document in documents])
    if np.isin(known, held_out).any():
        raise SettingError(
            f"a string of the entry's file has {SHINGLE} words in a row that a held-out document has too; an "
            "entry learns from the text of the rules alone"
        )


# ---- training again


def chosen_seed(archive: Archive) -> int:
    """Return the seed that is trained again."""
    return hashlib.sha256(archive.path.read_bytes()).digest()[0] % len(archive.scores)


def compare_again(archive: Archive, seed: int, again: SeedScore) -> str:
    """Return how a run that was trained again agrees; SettingError if it does not."""
    first = archive.scores[seed]
    difference = again.bits_per_byte - first.bits_per_byte
    values = f"{first.bits_per_byte:.6f} bits per byte in the archive and {again.bits_per_byte:.6f} here"
    same = machine() == dict(archive.summary["machine"])
    if same and difference == 0:
        return f"seed {seed}: {values}, equal to the last bit on the same kind of machine"
    if not same and abs(difference) <= TOLERANCE:
        return f"seed {seed}: {values}, within {TOLERANCE} of another kind of machine"
    due = "be equal on the same kind of machine" if same else f"be within {TOLERANCE} on another machine"
    raise SettingError(f"{archive.path}: seed {seed} has {values}; they should {due}")


def check_same_data(archive: Archive, seed: int, folder: Path) -> None:
    """Raise SettingError if the run in ``folder`` learnt from other data than the archive's."""
    result = read_result(folder)
    for stage, place in result.stage_folders().items() if result else ():
        name = f"seed-{seed}/stages/{stage}/{provenance.FILE}"
        if name not in archive.files:
            raise SettingError(f"{archive.path}: {name} is missing")
        recorded = parse_with_checksum(archive.files[name], f"{archive.path}: {name}")
        here = provenance.read(place)
        for part in ("vocabulary", "data"):
            if changed := setting_changes(recorded[part], here[part]):
                raise SettingError(f"{archive.path}: it learnt from another {part}: {changed[0]}")


def check_distribution(folder: Path) -> str:
    """Return a line about a run's decoder; SettingError if what it says of texts is no distribution.

    The probabilities of all next tokens should sum to 1, and the probability of a text should be that of its
    beginning times that of the rest after it: a model that looks ahead fails this. Counts and masked
    diffusion are computed by the project's own code alone, whatever an entry changes.
    """
    from experiments.runs.stages import stages_of  # these open trained models, with jax
    from experiments.runs.trained import open_run
    from lm.evaluate.loglikelihood import continuation_log_probs

    stages = stages_of(folder)
    if any(stage.is_count_based for stage in stages):
        return "counts: a distribution by their formula"
    trained = open_run(folder, stages)
    if not trained.config.has_decoder:
        return "masked diffusion: an upper bound by its formula"
    data = trained.stage.settings.data
    documents = iter_documents(corpus_shards(data.corpus, "validation", find_cache(folder)))
    ids = trained.vocabulary.encode(next(documents))[: data.inputs_length]
    half = len(ids) // 2
    begin, rest = ids[:half], ids[half:]
    pieces = range(trained.config.vocab_size)

    def log_probs(pairs):
        return continuation_log_probs(trained.model, pairs, trained.put)

    total = float(np.exp(log_probs([(begin, [piece]) for piece in pieces])).sum())
    if abs(total - 1) > NORMALISED:
        raise SettingError(f"{folder}: probabilities of the next token sum to {total:.4f} and not to 1")
    whole, first, second = log_probs([([], ids), ([], begin), (begin, rest)]).tolist()
    if abs(whole - first - second) > NORMALISED * abs(whole):
        raise SettingError(
            f"{folder}: a text has the log-probability {whole:.3f}, and its halves one after the other have "
            f"{first + second:.3f}: the model sees what it predicts"
        )
    return f"a distribution: next tokens sum to {total:.5f}, halves make up the whole"


def summary_of(scores: Mapping[int, SeedScore]) -> str:
    """Return the seeds' bits per byte in a line."""
    return ", ".join(f"{score.bits_per_byte:.4f}" for score in scores.values())

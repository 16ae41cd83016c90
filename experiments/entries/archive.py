"""The archive of an entry: its file, the records of its runs, and what they came to, sealed by checksums.

``entry.json`` holds the entry, the rules, the text's digest, the code, the machine, each run's score,
FLOP, parameters and seconds, and the SHA-256 of every other file; a checksum of itself ends it.
"""

import hashlib
import io
import lzma
import platform
import re
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from experiments.entries import rules
from experiments.entries.entry import Entry, described
from experiments.entries.tracks import TRACKS, Track
from experiments.runs import provenance
from experiments.runs.paths import RECORDS
from experiments.runs.result import read_result
from experiments.study.plugins import STUDY_OPTION
from lm.config.base import SettingError
from lm.files import json_with_checksum, parse_with_checksum, write

FORMAT = 2
SUMMARY, SOURCE = "entry.json", "entry.py"
SUFFIX = ".tar.xz"
SUMMARY_KEYS = frozenset("format date commit entry rules code machine seeds files".split())
PACKAGES = "jax jaxlib flax optax numpy sentencepiece".split()  # whose versions can change a last bit


@dataclass(frozen=True)
class SeedScore:
    """Holds the score of one seed's run and what it cost."""

    score: float  # in the unit of the entry's track
    half_width: float  # of the 95 % interval, where the score is the estimate of a bound; 0: it is exact
    flops: float  # of pre-training, by formula
    parameters: int  # of the network, or numbers that a counted model stores
    seconds: float  # of training, without compilation and evaluation


@dataclass(frozen=True)
class Archive:
    """Holds the contents of an archive whose checksums were checked."""

    path: Path
    summary: Mapping[str, Any]
    files: Mapping[str, bytes]  # without the summary

    @property
    def name(self) -> str:
        return self.path.name.removesuffix(SUFFIX)

    @property
    def track(self) -> Track:
        """Return the track of the entry; SettingError for one of another version."""
        name = self.summary["entry"].get("track")
        if name not in TRACKS:
            raise SettingError(f"{self.path} is of the track {name!r}; there are {', '.join(TRACKS)}")
        return TRACKS[name]

    @property
    def scores(self) -> dict[int, SeedScore]:
        """Return seed -> score; SettingError for an archive of another version."""
        try:
            return {int(seed): SeedScore(**score) for seed, score in self.summary["seeds"].items()}
        except (TypeError, ValueError) as error:
            raise SettingError(f"{self.path} has the scores of another version ({error})") from error

    def json(self, name: str) -> dict[str, Any]:
        """Return what a file with a checksum holds; SettingError if the archive lacks it."""
        if name not in self.files:
            raise SettingError(f"{self.path}: {name} is missing")
        return parse_with_checksum(self.files[name], f"{self.path}: {name}")


def seed_score(folder: Path, track: Track) -> SeedScore:
    """Return what the finished run in ``folder`` came to; SettingError if it has no score."""
    result = read_result(folder)
    if result is None:
        raise SettingError(f"{folder} has not finished; run the same command again")
    score, half_width = track.score(result, folder)
    return SeedScore(score, half_width, result.flops, result.parameters, result.seconds)


def machine() -> dict[str, str]:
    """Return what rounding depends on: the processor and the versions of packages."""
    versions = {name: metadata.version(name) for name in PACKAGES}
    return {"processor": _processor(), "system": platform.system(), "kind": platform.machine(), **versions}


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        found = re.search(r"^model name\s*: (.*)$", cpuinfo.read_text(errors="replace"), re.MULTILINE)
        if found:
            return found[1]
    return platform.processor() or platform.machine()


def code() -> dict[str, str]:
    """Return the digests of the project's modules that train and score, and of those of the table.

    The entry's own file is packed itself.
    """
    trained = provenance.code()
    ours = {name: digest for name, digest in trained.items() if not name.startswith(STUDY_OPTION)}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        ours[f"entries/{path.name}"] = provenance.parse_module(path.read_bytes()).digest
    return ours


# ---- writing and reading


def write_archive(
    path: Path, entry: Entry, source: Path, folders: Mapping[int, Path], date: str, commit: str
) -> dict[int, SeedScore]:
    """Pack an entry whose runs have finished; return the scores of its seeds.

    folders: seed -> folder of its run. date: when it was made, YYYY-MM-DD HH:MM in UTC.
    """
    track = TRACKS[entry.track]
    scores = {seed: seed_score(folder, track) for seed, folder in folders.items()}
    files = {SOURCE: source.read_bytes()}
    for seed, folder in folders.items():
        files |= {f"seed-{seed}/{name}": contents for name, contents in run_files(folder)}
    summary = {
        "format": FORMAT,
        "date": date,
        "commit": commit,
        "entry": described(entry),
        "rules": asdict(rules.RULES),
        "code": code(),
        "machine": machine(),
        "seeds": {str(seed): asdict(score) for seed, score in scores.items()},
        "files": {name: hashlib.sha256(contents).hexdigest() for name, contents in files.items()},
    }
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz", preset=9) as archive:
        contents = {SUMMARY: json_with_checksum(summary).encode()} | files
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, packed.getvalue())
    return scores


def run_files(folder: Path) -> Iterable[tuple[str, bytes]]:
    """Yield (path, contents) of the RECORDS of a run and of its stages, which may lie elsewhere."""
    result = read_result(folder)
    assert result is not None, f"{folder} has not finished"
    for name in RECORDS:
        if (folder / name).exists():
            yield name, (folder / name).read_bytes()
    for stage, place in result.stage_folders().items():
        for name in RECORDS:
            if (place / name).exists():
                yield f"stages/{stage}/{name}", (place / name).read_bytes()


def read_archive(path: Path) -> Archive:
    """Read an archive; SettingError if it is none, or if a file is not what it was when it was sealed."""
    files: dict[str, bytes] = {}
    try:
        with tarfile.open(path, "r:xz") as packed:
            for member in packed:
                stream = packed.extractfile(member) if member.isfile() else None
                if stream is not None:  # nothing is unpacked to the disk
                    files[member.name] = stream.read()
    except (OSError, tarfile.TarError, EOFError, lzma.LZMAError) as error:
        raise SettingError(f"{path} cannot be read as an archive of an entry ({error})") from error
    if SUMMARY not in files or SOURCE not in files:
        raise SettingError(f"{path} is no archive of an entry: it lacks {SUMMARY} or {SOURCE}")
    summary = parse_with_checksum(files.pop(SUMMARY), f"{path}: {SUMMARY}")
    if summary.get("format") != FORMAT:
        raise SettingError(
            f"{path} has the format {summary.get('format')}, and this version reads {FORMAT}: check out "
            f"commit {summary.get('commit') or '(not recorded)'}"
        )
    if missing := SUMMARY_KEYS - summary.keys():
        raise SettingError(f"{path}: {SUMMARY} lacks {', '.join(sorted(missing))}")
    sealed = summary["files"]
    for name in sorted({*sealed, *files}):
        if name not in files or name not in sealed:
            raise SettingError(f"{path}: {name} was {'removed' if name in sealed else 'added'} after sealing")
        if hashlib.sha256(files[name]).hexdigest() != sealed[name]:
            raise SettingError(f"{path}: {name} was changed after sealing")
    return Archive(path, summary, files)


def check_rules(archive: Archive) -> None:
    """Raise SettingError if an archive was made by other rules than today's."""
    found = archive.summary["rules"]
    for name, value in asdict(rules.RULES).items():
        if found.get(name) != value:
            raise SettingError(
                f"{archive.path}: by its rules {name} is {found.get(name)}, and here {value}: it is of "
                "another version; check out the commit that it names"
            )

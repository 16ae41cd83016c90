"""The built-in text: the same bytes on every machine, from pinned versions of packages.

Each package of ``packages.PACKAGES`` is read where it is installed, if it has the version and its extracted
text the digest of the list. Otherwise pip fetches its wheel, the same one on every machine, and it is read
from the zip.
"""

import hashlib
import importlib.metadata
import importlib.util
import itertools
import subprocess
import sys
import zipfile
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import as_completed
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lm.c4 import filters
from lm.config.base import SettingError
from lm.data.corpus.process_pool import process_pool
from lm.data.documentation.descriptions import DESCRIPTIONS, Read, Strings, ansible_documentation
from lm.data.documentation.docstrings import (
    NAME_OR_NUMBER,
    RULES,
    Document,
    clean_paragraphs,
    dedent,
    docstrings,
    is_module_path,
    split_of,
)
from lm.data.documentation.packages import PACKAGES, TEXT_DIGEST, Package

PROCESSES = 4  # of which some download while others extract
SHINGLE = 13  # words in a row that held-out paragraphs may not share with a training document
# The wheel for CPython 3.11 on Linux: the docstrings of other systems' wheels may differ.
MANYLINUX = "2_28 2_27 2_26 2_24 2_17 2_12 2_5".split()
WHEEL_OPTIONS = [
    "--no-deps",
    "--only-binary=:all:",
    *"--python-version 3.11 --implementation cp --abi cp311 --abi abi3 --abi none".split(),
    *(option for glibc in MANYLINUX for option in ("--platform", f"manylinux_{glibc}_x86_64")),
    *"--platform manylinux2014_x86_64 --platform manylinux2010_x86_64 --platform manylinux1_x86_64".split(),
    *"--platform any".split(),
]
OFFLINE = "documentation/installed"  # corpus that needs no network


class Docstring(NamedTuple):
    """Holds what is left of a docstring once C4's filters have cleaned it."""

    paragraphs: list[str]
    keys: list[tuple[bytes, ...]]  # of each paragraph's sentences
    begins: bool  # whether the first is also the docstring's own first


class PackageText(NamedTuple):
    """Holds what was extracted from a package, or in ``fault`` why it could not be read."""

    modules: list[tuple[str, list[Docstring]]]
    origin: str  # "installed" or "wheel"
    fault: str = ""


def pinned_documents(folder: Path, report: Callable[[str], object]) -> list[Document]:
    """Return the documents of the built-in text, fetching wheels that are missing into ``folder``.

    SettingError names the packages that can be neither read nor fetched.
    """
    texts = read_packages(PACKAGES, folder, report)
    documents = combine([texts[package.name] for package in PACKAGES])
    if (digest := text_digest(documents)) != TEXT_DIGEST:
        raise SettingError(
            f"the documentation's text has the digest {digest[:12]} and not {TEXT_DIGEST[:12]}: the code "
            "that extracts it was changed; restore it, or write the new digest to packages.py beside it"
        )
    return documents


def unfiltered_documents(folder: Path, report: Callable[[str], object]) -> list[Document]:
    """Return the docstrings of the packages, dedented and otherwise unchanged.

    Packages that are described in JSON files have no docstrings to return. SettingError names a package that
    can be neither read nor fetched.
    """
    documents = []
    for package in PACKAGES:
        if package.name not in DESCRIPTIONS:
            modules = matching_modules(package, folder)[0]
            report(f"{package.name} {package.version}")
            texts = ((name, "\n\n".join(filter(None, map(dedent, strings)))) for name, strings in modules)
            documents += [Document(name, text) for name, text in texts if text]
    return documents


def read_packages(
    packages: Sequence[Package], folder: Path, report: Callable[[str], object]
) -> dict[str, PackageText]:
    """Return ``{name: text}``; SettingError if one is missing."""
    texts: dict[str, PackageText] = {}
    folder.mkdir(parents=True, exist_ok=True)
    with process_pool(PROCESSES) as pool:
        # those described in JSON files are the largest, and begun last they would keep one process busy alone
        largest_first = sorted(packages, key=lambda package: package.name not in DESCRIPTIONS)
        jobs = {pool.submit(read_package, package, folder): package for package in largest_first}
        for job in as_completed(jobs):
            package = jobs[job]
            texts[package.name] = text = job.result()
            report(f"{len(texts)}/{len(jobs)} {package.name} {package.version}: {text.fault or text.origin}")
    if lacking := {
        package.name: texts[package.name].fault for package in packages if texts[package.name].fault
    }:
        raise SettingError(
            f"documentation: {', '.join(lacking)} cannot be read ({next(iter(lacking.values()))}), or take "
            f"--data.corpus {OFFLINE}, whose text and results differ between machines"
        )
    return texts


def read_package(package: Package, folder: Path) -> PackageText:
    """Return the clean text of a package, from where it is installed or from its wheel in ``folder``."""
    try:
        modules, origin = matching_modules(package, folder)
    except (OSError, SettingError) as error:
        return PackageText([], "", f"{error}")
    clean = cache(clean_docstring)  # clients of services say the same thing many times
    cleaned = [(name, [part for part in map(clean, strings) if part.paragraphs]) for name, strings in modules]
    return PackageText(cleaned, origin)


def clean_docstring(text: str) -> Docstring:
    """Return the clean paragraphs of a docstring, if any, with the keys of their sentences."""
    lines, first = clean_paragraphs(text)
    return Docstring(lines, [*map(sentence_keys, lines)], lines[:1] == [first])


def matching_modules(package: Package, folder: Path) -> tuple[list[Strings], str]:
    """Return the documentation of each module, and its origin, "installed" or "wheel".

    SettingError if the wheel cannot be fetched or is damaged.
    """
    modules = installed_modules(package)
    if modules is not None and modules_digest(modules) == package.digest:
        return modules, "installed"
    wheel = fetch_wheel(package, folder)
    try:
        modules = [*wheel_modules(package.name, wheel)]
    except (zipfile.BadZipFile, zlib.error) as error:
        raise SettingError(f"{wheel} is damaged ({error}): delete it, so that it is fetched again") from error
    if (digest := modules_digest(modules)) != package.digest:
        raise SettingError(
            f"{wheel} has text with the digest {digest[:12]}, and {package.name} {package.version} has "
            f"{package.digest[:12]}: delete it, so that it is fetched again"
        )
    return modules, "wheel"


def installed_modules(package: Package) -> list[Strings] | None:
    """Return the documentation in the installed distribution; None if it is absent or of another version."""
    try:
        distribution = importlib.metadata.distribution(package.name)
    except importlib.metadata.PackageNotFoundError:
        return None
    if distribution.version != package.version:
        return None
    paths = [file.as_posix() for file in distribution.files or ()]
    try:
        return [
            *modules_of(
                package.name, paths, lambda path: Path(str(distribution.locate_file(path))).read_bytes()
            )
        ]
    except (OSError, ValueError):  # files were removed or damaged
        return None


def wheel_modules(name: str, wheel: str | Path) -> Iterator[Strings]:
    """Yield (module name, strings) of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        yield from modules_of(name, archive.namelist(), archive.read)


def modules_of(name: str, paths: Sequence[str], read: Read) -> Iterator[Strings]:
    """Yield (module name, strings that document it) for the files of a distribution, sorted by path."""
    if name in DESCRIPTIONS:
        yield from DESCRIPTIONS[name](paths, read)
        return
    for path in sorted(set(paths)):
        if is_module_path(path):
            source = read(path).decode("utf-8", errors="replace").replace("\r\n", "\n")
            if strings := [*docstrings(source), *ansible_documentation(source)]:
                yield path.removesuffix(".py").removesuffix("/__init__").replace("/", "."), strings


def modules_digest(modules: Iterable[Strings]) -> str:
    """Return the SHA-256 of names and strings."""
    digest = hashlib.sha256()
    for name, strings in modules:
        digest.update("\0".join([name, *strings, ""]).encode("utf-8", errors="replace"))
    return digest.hexdigest()


def fetch_wheel(package: Package, folder: Path) -> Path:
    """Return the package's wheel in ``folder``, after fetching it with pip if it is missing.

    pip's configuration is the user's. SettingError with the last line of pip's error if it fails.
    """
    home = folder / f"{package.name}-{package.version}"
    if not (wheels := [*home.glob("*.whl")]):
        if not importlib.util.find_spec("pip"):
            raise SettingError("this environment has no pip: install it, as with 'uv pip install pip'")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        command += [*WHEEL_OPTIONS, "--dest", str(home), f"{package.name}=={package.version}"]
        ran = subprocess.run(command, capture_output=True, text=True)
        wheels = [*home.glob("*.whl")]
        if ran.returncode or not wheels:
            lines = ran.stderr.strip().splitlines() or ["pip failed"]
            raise SettingError(
                f"pip cannot fetch {package.name} {package.version} ({lines[-1]}): connect to a package index"
            )
    return wheels[0]


def combine(texts: Iterable[PackageText]) -> list[Document]:
    """Return the documents of all packages.

    A paragraph is left out if a sentence of it, of five words or more, occurs in an earlier paragraph, also
    if only names or numbers differ. A held-out paragraph is left out too if it shares SHINGLE words in a row
    with a training document. An empty line precedes a docstring; where its first paragraph was left out, the
    rest goes on from the docstring before.
    """
    seen: set[bytes] = set()
    documents: list[tuple[str, list[Docstring]]] = []
    for text in texts:
        for name, parts in text.modules:
            documents.append((name, [new for part in parts if (new := _unseen(part, seen)).paragraphs]))
    train = [parts for name, parts in documents if split_of(name) == "train"]
    held_out = [parts for name, parts in documents if split_of(name) != "train"]
    hashes, numbers = shingles(_lines(held_out))
    is_known = np.isin(hashes, shingles(_lines(train))[0])
    dropped = {*numbers[is_known].tolist()}
    number = 0  # of the next held-out paragraph
    combined = []
    for name, parts in documents:
        pieces = ""
        is_held_out = split_of(name) != "train"
        for part in parts:
            kept, begins = part.paragraphs, part.begins
            if is_held_out:
                is_kept = [place not in dropped for place in range(number, number + len(kept))]
                number += len(kept)
                kept = [*itertools.compress(kept, is_kept)]
                begins = begins and is_kept[0]
            if kept:
                pieces += ("\n\n" if begins else "\n") + "\n".join(kept)
        if filters.has_enough_sentences(pieces.split("\n"), RULES):
            combined.append(Document(name, pieces.strip()))
    return combined


def _unseen(part: Docstring, seen: set[bytes]) -> Docstring:
    """Return the paragraphs without a sentence in ``seen``, and add all their sentences to it."""
    paragraphs = []
    begins = False
    for place, (line, keys) in enumerate(zip(part.paragraphs, part.keys, strict=True)):
        if seen.isdisjoint(keys):
            paragraphs.append(line)
            begins |= part.begins and place == 0
        seen.update(keys)
    return Docstring(paragraphs, [], begins)


def sentence_keys(line: str) -> tuple[bytes, ...]:
    """Return a hash of each sentence of five words or more, the same if only names or numbers differ."""
    sentences = [s for s in filters.sentences(line) if s.count(" ") + 1 >= RULES.words_per_line]
    keys = [filters.duplicate_key(NAME_OR_NUMBER.sub("_", sentence)) for sentence in sentences]
    return tuple(hashlib.blake2b(key.encode(), digest_size=8).digest() for key in keys)


def _lines(documents: Iterable[list[Docstring]]) -> Iterator[str]:
    return (line for parts in documents for part in parts for line in part.paragraphs)


@cache
def _word_hash(word: str) -> int:
    """Return 64 bits of a word's SHA-256; Python's own hash differs between processes."""
    return int.from_bytes(hashlib.sha256(word.encode()).digest()[:8], "little")


def shingles(lines: Iterable[str], length: int = SHINGLE) -> tuple[np.ndarray, np.ndarray]:
    """Return a hash of each ``length`` words in a row within a line, uint64, and the line's index, int64.

    The hash is a polynomial of the words' hashes modulo 2**64.
    """
    word_hashes, lengths = array("Q"), array("q")
    for line in lines:
        words = line.lower().split()
        word_hashes.extend(map(_word_hash, words))
        lengths.append(len(words))
    codes = np.frombuffer(word_hashes, np.uint64)
    numbers = np.repeat(np.arange(len(lengths)), lengths)
    count = len(codes) - length + 1
    if count <= 0:
        return np.zeros(0, np.uint64), np.zeros(0, np.int64)
    hashes = np.zeros(count, np.uint64)
    for place in range(length):
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + codes[place : place + count]
    is_within = numbers[:count] == numbers[length - 1 :]
    return hashes[is_within], numbers[:count][is_within]


def text_digest(documents: Iterable[Document]) -> str:
    """Return the SHA-256 of names and texts of documents, in order."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(f"{document.name}\0{document.text}\0".encode())
    return digest.hexdigest()

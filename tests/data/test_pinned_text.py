"""The built-in text is the same on every machine, or it is refused."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from lm.config.base import SettingError
from lm.data.corpus.spec import corpus_shards
from lm.data.documentation import corpus, docstrings, packages, pinned
from lm.data.documentation.packages import PACKAGES, Package

SENTENCE = "This function returns the number of {} that were found in the {} of the {}."
SOURCE = '''"""{}"""


def f():
    """Return what the caller asked for, or nothing at all."""
'''


def wheel(folder, name="aword", version="1.0", text="One sentence stands here for a test of it."):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for module in ("b", "a"):
            archive.writestr(f"{name}/{module}.py", SOURCE.format(f"{text} It is of {module} alone."))
    return path


def listed(path, name="aword", version="1.0"):
    digest = pinned.modules_digest(pinned.wheel_modules(name, path))
    return Package(name, version, "science", digest, (name,))


def test_the_list_has_names_versions_and_digests_and_no_address():
    assert "://" not in Path(packages.__file__).read_text()
    assert not any("index" in option for option in pinned.WHEEL_OPTIONS)
    assert len({package.name for package in PACKAGES}) == len(PACKAGES)
    for package in PACKAGES:
        assert re.fullmatch(r"[a-z0-9-]+", package.name) and re.fullmatch(r"[0-9.]+", package.version)
        assert re.fullmatch("[0-9a-f]{64}", package.digest) and package.imports
    assert re.fullmatch("[0-9a-f]{64}", packages.TEXT_DIGEST)


def test_the_order_of_files_does_not_change_what_is_extracted(tmp_path):
    with zipfile.ZipFile(wheel(tmp_path)) as archive:
        names = archive.namelist()
        one, other = ([*pinned.modules_of("aword", paths, archive.read)] for paths in (names, names[::-1]))
    assert one == other and [name for name, _ in one] == ["aword.a", "aword.b"]


COMBINED = """
import sys
from lm.data.documentation import pinned
text = pinned.PackageText([("m", [pinned.Docstring(
    ["What is here was said by one. What is there was said by two. And then there are three of them."],
    [(b"1",)], True)])], "wheel")
print(pinned.text_digest(pinned.combine([text])))
"""


def test_the_seed_of_hashes_does_not_change_the_text():
    run = [
        subprocess.run(
            [sys.executable, "-c", COMBINED],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert run[0] == run[1] != ""


def test_a_wheel_with_another_digest_is_refused(tmp_path):
    package = listed(wheel(tmp_path / "right"))
    wheel(tmp_path / "aword-1.0", text="Another sentence stands here for a test of it.")
    with pytest.raises(SettingError, match="aword cannot be read .* delete it, so that it is fetched again"):
        pinned.read_packages([package], tmp_path, lambda line: None)


def test_a_damaged_wheel_is_named_with_the_mend(tmp_path):
    path = wheel(tmp_path / "aword-1.0")
    package = listed(path)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(SettingError, match="aword-1.0.* is damaged .* delete it, so that"):
        pinned.read_packages([package], tmp_path, lambda line: None)


def test_an_installed_package_is_read_unless_its_text_differs(tmp_path, monkeypatch):
    path = wheel(tmp_path / "aword-1.0")
    package, site = listed(path), tmp_path / "site"
    with zipfile.ZipFile(path) as archive:
        archive.extractall(site)
    info = site / "aword-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: aword\nVersion: 1.0\n")
    (info / "RECORD").write_text("aword/a.py,,\naword/b.py,,\n")
    monkeypatch.syspath_prepend(site)
    assert pinned.read_package(package, tmp_path).origin == "installed"
    (site / "aword" / "a.py").write_text(SOURCE.format("It was changed by hand after it was installed."))
    read = pinned.read_package(package, tmp_path)
    assert read.origin == "wheel" and not read.fault
    assert pinned.read_package(package._replace(version="2.0"), tmp_path / "none").fault


def test_without_network_the_missing_package_and_the_mend_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    package = Package("aword", "1.0", "science", "0" * 64, ("aword",))
    with pytest.raises(SettingError, match="pip cannot fetch aword .* --data.corpus documentation/installed"):
        pinned.read_packages([package], tmp_path, lambda line: None)


def test_held_out_paragraphs_share_no_thirteen_words_with_training(monkeypatch):
    shared = " ".join(f"word{place}" for place in range(20)) + "."
    own = ["This is one. It is short here. There is more.", "That was two. They are short too. All of it is."]
    parts = [pinned.Docstring([shared, text], [(), ()], True) for text in own]
    monkeypatch.setattr(docstrings.filters, "hash_fraction", lambda name, _: float(name))
    documents = pinned.combine([pinned.PackageText([("0.5", parts[:1]), ("0.9", parts[1:])], "wheel")])
    texts = dict(documents)
    assert shared not in texts.get("0.9", "") and own[1] in texts["0.9"]
    assert texts["0.5"] == f"{shared}\n{own[0]}"


def test_a_cache_with_changed_files_or_other_text_is_refused(tmp_path):
    corpus.prepare_sets(tmp_path, packages=corpus.STDLIB)
    with pytest.raises(SettingError, match="holds data sets of the installed packages"):
        corpus_shards("documentation", "train", tmp_path)
    assert corpus_shards("documentation/installed", "train", tmp_path)
    file = next((tmp_path / "tfds" / "documentation" / "corpus").rglob("*train*array_record*"))
    file.write_bytes(file.read_bytes() + b"0")
    with pytest.raises(SettingError, match=r"is not what was written there: delete"):
        corpus_shards("documentation/installed", "train", tmp_path)


@pytest.mark.slow
def test_the_whole_text_has_its_digest(tmp_path):
    documents = pinned.pinned_documents(tmp_path, print)
    assert sum(len(document.text) for document in documents) > 30e6

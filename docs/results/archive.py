"""Packs what reports read of finished runs, without checkpoints and texts, so that it can be published.

    python docs/results/archive.py runs docs/results/mini.tar.xz mini/pretraining mini/t5/4-objective

The first argument is the folder of runs, the second the archive, the others are folders of runs whose seeds
are packed. A row that shares another row's runs is a link to them, so that their folder is named too. Equal
runs give equal archives. Unpacked in a folder of runs, they are reported again, and a sweep of more rows or
seeds goes on beside them.
"""

import argparse
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from experiments.runs.paths import PATHS, RECORDS


def files(folder: Path) -> Iterator[Path]:
    """Yield the records of runs in a folder, and the scores of single examples that they are made of."""
    for path in sorted(folder.rglob("*")):
        if path.name in (*RECORDS, PATHS) or (path.suffix == ".npy" and path.parent.name == "report"):
            yield path


def check_shared_rows(runs: Path, folders: Iterable[str]) -> None:
    """Raise SystemExit if a row in ``folders`` is a link to another row's runs that are not among them."""
    packed = [(runs / name).resolve() for name in folders]
    for folder in packed:
        for path in sorted(folder.rglob("*")):
            target = path.resolve()
            if path.is_symlink() and not any(target.is_relative_to(other) for other in packed):
                name = target.relative_to(runs.resolve())
                raise SystemExit(f"{path} shares the runs of {name}, which would be left out; name it too")


def anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Return a member of an archive without the names, times and rights of the machine that made it."""
    member.uid = member.gid = member.mtime = 0
    member.mode = 0o644
    member.uname = member.gname = ""
    return member


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("archive", type=Path)
    parser.add_argument("folders", nargs="+")
    given = parser.parse_args()
    check_shared_rows(given.runs, given.folders)
    found: list[Path] = []
    for name in given.folders:  # before the archive is opened, which empties it
        of_folder = [*files(given.runs / name)]
        if not of_folder:
            raise SystemExit(f"{given.runs / name} has no runs; it should be a folder such as mini/t5")
        found += of_folder
    with tarfile.open(given.archive, "w:xz", preset=9) as archive:
        for path in dict.fromkeys(found):  # a folder may lie in another
            archive.add(path, path.relative_to(given.runs).as_posix(), filter=anonymous)


if __name__ == "__main__":
    main()

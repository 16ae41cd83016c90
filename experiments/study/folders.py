"""Where runs lie, and what lies beside them."""

from pathlib import Path

from lm.settings import SettingError

STARTS_FOLDER = "starts"  # the folder of what runs start from, in the folder of all runs
CACHED = ("compiled", "corrupt", "lock", "tfds", "tokens", "vocabulary")  # what a cache may hold


def check_runs(runs: Path) -> None:
    """SettingError if nothing can be written to ``runs`` as to a folder."""
    if runs.parts[:1] == ("gs:",):
        raise SettingError(
            f"--runs gs://{'/'.join(runs.parts[1:])} should be a folder: mount the bucket, as lm-launch does "
            "on TPUs (gcsfuse --implicit-dirs --rename-dir-limit=1000000 BUCKET FOLDER)"
        )


def cache_of(folder: Path) -> Path:
    """Return the cache of the folder of runs that a run lies in, or ``runs/cache`` if it lies in none.

    A folder above it that is only called so is passed over. Commands that read data from it print its path,
    since a copied run may lie in another folder of runs than it was trained in.
    """
    caches = (parent / "cache" for parent in folder.resolve().parents)
    return next(filter(_is_cache, caches), Path("runs") / "cache")


def _is_cache(folder: Path) -> bool:
    """Return whether a folder holds something that is kept for runs."""
    return any((folder / name).exists() for name in CACHED)


def home_of(folder: Path, cache: Path) -> Path:
    """The folder of a run's scale, where what its runs share lies; elsewhere the run's own folder."""
    runs, folder = cache.parent.resolve(), folder.resolve()  # the cache may be a link
    return runs / folder.relative_to(runs).parts[0] if folder.is_relative_to(runs) else folder


def start_folder(name: str, folder: Path, home: Path) -> Path:
    """That of the start of this name, of the run in ``folder`` at the scale of ``home``.

    The folder of all runs may have been copied: every folder above the run is searched first.
    """
    places = (up / STARTS_FOLDER / name for up in (folder, *folder.parents))
    return next(filter(Path.is_dir, places), home.parent / STARTS_FOLDER / name)

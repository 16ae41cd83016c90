"""``lm entry``: a model for the public table, trained, verified and compared (docs/table.md)."""

import hashlib
import os
import secrets
import shutil
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from experiments.cli.run_options import Options, RowRun, row_run
from experiments.cli.settings import Runs
from experiments.cli.train import job_count, train_unfinished
from experiments.console import CONSOLE, RUNS, print_line, show_sheet
from experiments.entries import rules
from experiments.entries.entry import Entry, check_budget, load_entry
from experiments.entries.tracks import TRACKS
from experiments.study.names import VERIFIED_FOLDER
from experiments.study.paths import check_runs
from lm.config.base import SettingError
from lm.files import atomic_folder, write
from lm.train.runtime.records import current_commit


def entry_run(
    file: Path, /, out: Path | None = None, runs: Runs = RUNS, jobs: int = 0, check: bool = False
) -> None:
    """Train the seeds of an entry within the budget, measure them, and write a sealed archive.

    The same command resumes. The file defines ENTRY; docs/table.md has the rules and an example.

        lm entry run my_entry.py --check
        lm entry run my_entry.py

    Args:
        file: Python file of the entry.
        out: Archive to write; by default the file's name with .tar.xz, beside the file.
        jobs: Seeds that are trained at once, each in a process with one thread; 0: one per core.
        check: Only check the file, its budget and the text, which is made if it is missing; train nothing.
    """
    from experiments.entries.archive import SUFFIX, seed_score, write_archive  # with jax
    from experiments.entries.verify import check_distribution, summary_of

    check_runs(runs)
    path = out or file.with_suffix(SUFFIX)
    if not path.name.endswith(SUFFIX):
        raise SettingError(f"--out {path} should end in {SUFFIX}, by which lm entry table finds archives")
    entry, options = load_entry(file), Options(rules.RULES.scale, runs)
    track = TRACKS[entry.track]
    if path.exists():
        raise SettingError(
            f"{path} is there already: --out NAME{SUFFIX} writes another archive; or delete it first"
        )
    wanted = runs_of(entry, range(rules.RULES.seeds), options)
    check_planned(wanted[0])
    prepare_text(wanted[0], options, file.read_bytes())
    if check:
        print_line(f"{file} keeps the rules that can be checked before training\nTry: lm entry run {file}")
        return
    if failed := train_unfinished(wanted, options, job_count(jobs, wanted), in_children=True):
        sys.exit(failed)
    for run in wanted:
        score = seed_score(run.folder, track)
        check_budget(run.experiment, score.flops, score.parameters)
    print_line(check_distribution(wanted[0].folder))
    date = f"{datetime.now(UTC):%Y-%m-%d %H:%M}"
    folders = {run.experiment.seed: run.folder for run in wanted}
    scores = write_archive(path, entry, file, folders, date, current_commit() or "")
    print_line(f"{track.unit}, seeds 0 to {rules.RULES.seeds - 1}: {summary_of(scores)}")
    print_line(f"archive: {path}\nTry: lm entry verify {path}")


def entry_verify(archive: Path, /, all_seeds: bool = False, runs: Runs = RUNS) -> None:
    """Check an archive of an entry, train a seed of it again, and say whether it is accepted.

    What can be seen without training is checked first. The seed is drawn here, so that nobody can know it
    before. The same command resumes. The exit code is 0 if the archive is accepted.

        lm entry verify my_entry.tar.xz

    Args:
        archive: Archive that lm entry run wrote.
        all_seeds: Train every seed again, as for a record that was made on another kind of machine.
    """
    from experiments.entries.archive import SOURCE, read_archive, seed_score  # with jax
    from experiments.entries.verify import check_archive, check_distribution, check_same_data, compare_again

    check_runs(runs)
    sealed = read_archive(archive)
    beside = archive.with_name(f"{sealed.name}.py")
    if beside.exists() and beside.read_bytes() != sealed.files[SOURCE]:
        raise SettingError(f"{beside} is not the file in {archive}: it should be the same, to be read")
    home = runs / VERIFIED_FOLDER / hashlib.sha256(archive.read_bytes()).hexdigest()[:12]
    home.mkdir(parents=True, exist_ok=True)
    if (runs / "cache").exists() and not (home / "cache").exists():  # the text is made once for all
        with atomic_folder(home / "cache") as draft:
            shutil.copytree(runs / "cache", draft, copy_function=link_or_copy, dirs_exist_ok=True)
    source = home / f"entry_{home.name}.py"
    source.write_bytes(sealed.files[SOURCE])
    entry = load_entry(source)
    check_archive(sealed, entry)
    seeds = [*sealed.scores] if all_seeds else [drawn_seed(home, len(sealed.scores))]
    print_line(f"the archive is whole and keeps the rules; training again: seed {', '.join(map(str, seeds))}")
    options = Options(rules.RULES.scale, home)
    wanted = runs_of(entry, seeds, options)
    check_planned(wanted[0])
    prepare_text(wanted[0], options, sealed.files[SOURCE])
    if failed := train_unfinished(wanted, options, job_count(0, wanted), in_children=True):
        sys.exit(failed)
    for run in wanted:
        check_same_data(sealed, run.experiment.seed, run.folder)
        score = seed_score(run.folder, sealed.track)
        check_budget(run.experiment, score.flops, score.parameters)
        print_line(compare_again(sealed, run.experiment.seed, score))
    print_line(check_distribution(wanted[0].folder))
    print_line(f"accepted: {entry.title}, by {entry.author}")


def drawn_seed(home: Path, count: int) -> int:
    """Return the seed that is trained again: drawn once, and kept in the folder of the verification."""
    drawn = home / "seed.txt"
    if not drawn.exists():
        write(drawn, str(secrets.randbelow(count)))
    return int(drawn.read_text())


def entry_table(folder: Path, /, out: Path | None = None) -> None:
    """Print the tables of the archives in a folder, the best entry first, and draw how the best score moved.

    There is a table for each track. Checksums and the version of the rules are checked. lm entry verify
    checks the rest.

        lm entry table entries

    Args:
        folder: Folder with archives of entries.
        out: Picture to write; by default records.png in the folder.
    """
    from experiments.entries.table import (
        compare_tracks,
        draw_records,
        origin_sheet,
        read_entries,
        table_sheet,
    )
    from experiments.figures.draw import check_format

    picture = out or folder / "records.png"
    check_format(picture)
    tracks = compare_tracks(read_entries(folder))
    for name, track in TRACKS.items():
        if name in tracks:
            show_sheet(f"{track.title}, {rules.RULES.seeds} seeds", table_sheet(tracks[name], track))
        else:
            print_line(f"{track.title}: no entry yet")
    CONSOLE.print(
        "±: half of the 95 % interval of the mean; p: of Welch's test that it is better than the last "
        "record; size: parameters of a network, or the numbers that a counted model stores",
        highlight=False,
    )
    show_sheet("Origin", origin_sheet([entry for each in tracks.values() for entry in each]))
    draw_records(tracks, picture)
    print_line(f"picture: {picture}")


def runs_of(entry: Entry, seeds: Iterable[int], options: Options) -> list[RowRun]:
    """Return the runs of an entry with these seeds."""
    return [row_run(entry.row, entry.experiment(seed), options) for seed in seeds]


def check_planned(run: RowRun) -> None:
    """Raise SettingError if a run would take more than the budget, before it is trained."""
    from experiments.cli.dry_run import step_cost  # with jax
    from experiments.runs.kinds.network import model_parameters
    from experiments.runs.stages import stages

    if run.experiment.counts.model != "none":  # how many numbers it stores is known after counting
        return
    flops = sum(step_cost(stage) * stage.num_steps for stage in stages(run.experiment))
    check_budget(run.experiment, flops, model_parameters(run.experiment.model))


def prepare_text(run: RowRun, options: Options, source: bytes) -> None:
    """Make the text of the rules if it is missing.

    Raise SettingError if there is another, or if the entry's file brings some of it.
    """
    from experiments.entries.verify import check_brings_no_text
    from lm.data.corpus.shards import iter_documents
    from lm.data.corpus.spec import corpus_shards
    from lm.data.documentation.corpus import prepare_sets, recorded_digest

    prepare_sets(options.cache, report=print_line)
    found, expected = recorded_digest(options.cache), rules.RULES.text
    if found != expected:
        raise SettingError(
            f"{options.cache} has the text {found[:12]}, and entries learn {expected[:12]}: choose other "
            "--runs"
        )
    held_out = corpus_shards(run.experiment.data.corpus, "validation", options.cache)
    check_brings_no_text(source, iter_documents(held_out))


def link_or_copy(source: str, target: str) -> None:
    """Link ``target`` to a file, or copy the file where the file system has no hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)

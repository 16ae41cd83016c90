"""``lm launch``: runs rows on Cloud TPU, on Slurm, or as several processes here, by the folder launch/."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from experiments.cli.settings import TEACHER, Allow, ConfigFile, Scale, Settings, Start, given_changes
from experiments.console import RUNS
from experiments.plan.slices import find_slice
from experiments.processes.progress import NO_TOOLS, Tools
from experiments.study.changes import Overrides
from experiments.study.experiment import Experiment
from experiments.study.overrides import command_line_overrides
from experiments.study.plugins import study_files
from experiments.study.registry import build, find_buildable
from experiments.study.scales import DEFAULT_SCALE
from experiments.study.words import setting_arguments
from launch import container, gce, gke, local, queued, resources, slices, slurm
from launch.accelerators import parse_slice
from launch.command import Job, LaunchError
from launch.options import Container, Machines
from lm.config.base import SettingError, did_you_mean
from lm.data.corpus.files import matching_files
from lm.data.corpus.readers import WINDOW_READERS
from lm.data.corpus.spec import check_corpus_name, corpus_parts
from lm.data.tasks.names import is_task_file
from lm.data.tasks.task_files import read_task_file
from lm.files import similar_file
from lm.tokenizers.tokenizer import TOKENIZER_ALGORITHMS


@dataclass(frozen=True)
class RunOptions:
    """Options of ``lm run`` that all launched runs have, and how many runs there are of each row."""

    # folder of the runs, which all processes see; gs://BUCKET/FOLDER in a cloud
    runs: str = str(RUNS)
    scale: Scale = DEFAULT_SCALE
    seeds: int = 1  # runs of each row, with seeds from 0
    config: ConfigFile = None
    start: Start = ""
    allow: Allow = ""
    tools: Annotated[Tools, tyro.conf.arg(name="")] = NO_TOOLS


RunArguments = Annotated[RunOptions, tyro.conf.arg(name="")]
ContainerArguments = Annotated[Container, tyro.conf.arg(name="")]
MachineArguments = Annotated[Machines, tyro.conf.arg(name="")]
DEFAULTS = RunOptions()


def _make_jobs(
    pattern: str,
    settings: dict[str, Any],
    run_options: RunOptions,
    accelerator: str = "",
    count: int = 1,
    devices: int = 0,
) -> list[Job]:
    """Return a run for each row that matches and each seed; SettingError for settings that none reads.

    With an ``accelerator`` the runs are in a cloud. SettingError is then also raised for files of this
    machine, and for a mesh or a batch that does not fit ``count`` slices of an accelerator named by its
    shape. Without one, it is raised for files missing in this folder, and for a mesh or a batch that does not
    fit the number of ``devices``, unless that is 0.
    """
    names = [row.name for row in find_buildable(pattern)]
    start, teacher, runs = run_options.start, settings.get(TEACHER, ""), Path(run_options.runs)
    if accelerator:
        if start and not start.startswith(("gs://", "hf:", "/")):
            raise SettingError(_absent_in_cloud(start))
        if teacher and not teacher.startswith("hf:"):
            raise SettingError(f"--{TEACHER} {teacher} is not there in a cloud: name it hf:NAME")
        runs = RUNS  # what is read here, such as a model of the hub, is kept here: buckets are no folders
    elsewhere = ("gs://", "/") if accelerator else ("gs://",)  # where a checkpoint cannot be read from here
    start_here = "" if start.startswith(elsewhere) else start
    changes = given_changes(names, run_options.scale, settings, run_options.config, start_here, runs)
    if run_options.seeds > 1 and "seed" in changes:
        raise SettingError("seed: with --seeds N the runs of a row have the seeds 0 to N - 1")
    _check_number("--seeds", run_options.seeds)
    if accelerator and run_options.tools.wandb:
        raise SettingError(
            "--wandb: the image of lm launch lacks wandb and a key to log in; leave the option out, or take "
            "`lm launch slurm` or `lm launch local`, whose runs have this environment"
        )
    experiments = [build(name, run_options.scale, _with_slices(changes, count)) for name in names]
    if accelerator:
        _check_in_cloud(experiments, accelerator, count)
    else:
        _check_here(experiments, devices)
    overrides = command_line_overrides(changes, settings)
    if accelerator and teacher:
        overrides |= {TEACHER: teacher}  # its copy is in the folder of runs of this machine
    options = ["--scale", run_options.scale, *setting_arguments(overrides)]
    for option in ("start", "allow"):
        if value := getattr(run_options, option):
            options += [f"--{option}", value]
    for option in ("profile", "wandb"):
        if value := getattr(run_options.tools, option):
            options += [f"--{option}", value]
    seeds = [["--seed", str(seed)] for seed in range(run_options.seeds)] if run_options.seeds > 1 else [[]]
    studies = tuple(map(str, study_files()))
    return [Job(name, run_options.runs, (*options, *seed), studies) for name in names for seed in seeds]


def _with_slices(changes: Overrides, count: int) -> Overrides:
    """Return the changes with the number of slices in the mesh, as ``container.lm_words`` sets it."""
    if count == 1 or "mesh.slice" in changes:
        return changes
    return changes | {"mesh.slice": count}


def _check_in_cloud(experiments: Sequence[Experiment], accelerator: str, count: int) -> None:
    """Raise SettingError for files of this machine, and for a mesh or a batch that does not fit the slices.

    A type of accelerator such as v5litepod-16 has no shape, and what fits it is not checked.
    """
    for experiment in experiments:
        if files := _relative_files(experiment):
            raise SettingError(_absent_in_cloud(files[0][1]))
    if ":" not in accelerator:
        return
    try:
        piece = parse_slice(accelerator)
    except LaunchError as error:
        raise SettingError(str(error)) from error
    from experiments.runs.checks import check_devices  # with jax

    devices = find_slice(str(piece), count, "--accelerator").devices
    for experiment in experiments:
        check_devices(experiment, devices)


def _check_here(experiments: Sequence[Experiment], devices: int) -> None:
    """Raise SettingError for files missing here, and for a mesh or a batch that does not fit the devices."""
    for experiment in experiments:
        for kind, path in _relative_files(experiment):
            if kind in WINDOW_READERS:
                matching_files(kind, path)
            elif kind == "task":
                read_task_file(Path(path))
            elif not Path(path).exists():
                raise SettingError(f"data.vocabulary={path!r} does not exist{similar_file(Path(path))}")
    if devices > 0:
        from experiments.runs.checks import check_devices  # with jax

        for experiment in experiments:
            check_devices(experiment, devices)


def _check_number(option: str, number: int) -> None:
    """Raise SettingError for an option that should count at least one."""
    if number < 1:
        raise SettingError(f"{option} {number} should be a whole number from 1")


def _relative_files(experiment: Experiment) -> list[tuple[str, str]]:
    """Return those of ``_files`` in the present folder; others may be in an image or on a mounted disk."""
    return [(kind, path) for kind, path in _files(experiment) if not path.startswith(("gs://", "/"))]


def _files(experiment: Experiment) -> Iterator[tuple[str, str]]:
    """Yield (kind, path) of the files that an experiment reads; SettingError for unknown corpora.

    kind: one of WINDOW_READERS for text, "vocabulary" or "task".
    """
    data = experiment.data
    corpora = [(part, "data.corpus") for part in corpus_parts(data.corpus)]
    kind, _, trained_on = data.vocabulary.partition(":")
    if trained_on and kind in TOKENIZER_ALGORITHMS:
        corpora += [(part, "the corpus of data.vocabulary") for part in corpus_parts(trained_on)]
    elif kind not in (*TOKENIZER_ALGORITHMS, "bytes") and not experiment.start.model:
        if kind.isalpha() and kind != "gs" and not Path(data.vocabulary).exists():
            known = did_you_mean(kind, (*TOKENIZER_ALGORITHMS, "bytes"))
            raise SettingError(f"data.vocabulary={data.vocabulary!r} is unknown{known}")
        yield "vocabulary", data.vocabulary
    for corpus, setting in corpora:
        check_corpus_name(corpus, setting)
        reader, _, path = corpus.partition(":")
        if reader in WINDOW_READERS:
            yield reader, path
    for name in filter(is_task_file, (*experiment.tuning.mixtures, *experiment.tuning.heads)):
        yield "task", name


def _absent_in_cloud(path: str) -> str:
    """Return the error for a relative path that a run in a cloud would read, and lacks there."""
    return (
        f"{path} is a file of this machine, which the machines of the cloud lack: copy it to a bucket, and "
        f"name it gs://BUCKET/{Path(path).name}"
    )


def _exit_with_code(launch: Callable[[], int]) -> None:
    """End the process with the exit code of ``launch`` unless it is 0; SettingError for a LaunchError."""
    try:
        code = launch()
    except LaunchError as error:
        raise SettingError(str(error)) from error
    if code:
        sys.exit(code)


def launch_gce(
    pattern: str,
    /,
    settings: Settings,
    options: ContainerArguments,
    machines: MachineArguments,
    run_options: RunArguments = DEFAULTS,
) -> None:
    """Run each row on its own slice of Compute Engine (v5p, v6e, TPU7x), and delete the slice at the end.

    A slice that is preempted is asked for again, and the run goes on from its last checkpoint.

        lm launch gce 't5/6-*' --scale base --accelerator v6e:4x4 \\
          --zones us-east5-a --provisioning spot --at-once 4 \\
          --image us-docker.pkg.dev/PROJECT/lm/lm:1 --runs gs://BUCKET/runs --dry-run

    Args:
        pattern: Shell-style pattern of rows or tables, such as 't5/6-*'.
    """
    jobs = _make_jobs(pattern, settings, run_options, options.accelerator)
    _exit_with_code(lambda: slices.run_slices(jobs, gce.API, options, machines))


def launch_queued(
    pattern: str,
    /,
    settings: Settings,
    options: ContainerArguments,
    machines: MachineArguments,
    run_options: RunArguments = DEFAULTS,
    slices_per_run: int = 1,
    runtime: str = "",
) -> None:
    """Run each row on its own slice by queued resources (v4 to v6e), and delete the slice at the end.

        lm launch queued t5/1-baseline/baseline --scale base \\
          --accelerator v5e:4x4 --zones us-west4-a \\
          --image us-docker.pkg.dev/PROJECT/lm/lm:1 --runs gs://BUCKET/runs --dry-run

    Args:
        pattern: Shell-style pattern of rows or tables, such as 't5/6-*'.
        slices_per_run: Slices of each run, joined by the data-centre network.
        runtime: Image of the TPU VMs, if not the accelerator's usual one.
    """
    _check_number("--slices-per-run", slices_per_run)
    jobs = _make_jobs(pattern, settings, run_options, options.accelerator, slices_per_run)
    _exit_with_code(lambda: slices.run_slices(jobs, queued.API, options, machines, slices_per_run, runtime))


def launch_gke(
    pattern: str,
    /,
    settings: Settings,
    options: ContainerArguments,
    cluster: Annotated[gke.Cluster, tyro.conf.arg(name="")],
    run_options: RunArguments = DEFAULTS,
) -> None:
    """Submit each row to GKE as a JobSet, by xpk, on one or more slices.

        lm launch gke t5/1-baseline/baseline --scale base \\
          --accelerator tpu7x:2x2x4 --cluster mine --slices 2 \\
          --image us-docker.pkg.dev/PROJECT/lm/lm:1 --runs gs://BUCKET/runs --dry-run

    Args:
        pattern: Shell-style pattern of rows or tables, such as 't5/6-*'.
    """
    _check_number("--slices", cluster.slices)
    jobs = _make_jobs(pattern, settings, run_options, options.accelerator, cluster.slices)
    _exit_with_code(lambda: gke.submit(jobs, options, cluster))


def launch_slurm(
    pattern: str,
    /,
    settings: Settings,
    job: Annotated[slurm.SlurmJob, tyro.conf.arg(name="")],
    run_options: RunArguments = DEFAULTS,
) -> None:
    """Submit the rows to Slurm as one job array, with a process for each GPU.

        lm launch slurm t5/1-baseline/baseline --scale base \\
          --nodes 2 --time 24:00:00 --dry-run

    Args:
        pattern: Shell-style pattern of rows or tables, such as 't5/6-*'.
    """
    jobs = _make_jobs(pattern, settings, run_options, devices=max(job.nodes, 0) * max(job.gpus_per_node, 1))
    _exit_with_code(lambda: slurm.submit(jobs, job))


def launch_local(
    pattern: str,
    /,
    settings: Settings,
    processes: Annotated[local.Processes, tyro.conf.arg(name="")],
    run_options: RunArguments = DEFAULTS,
) -> None:
    """Run the rows on this machine, one after another, each in several processes.

        lm launch local t5/1-baseline/baseline \\
          --processes 2 --devices-per-process 4 --dry-run

    Args:
        pattern: Shell-style pattern of rows or tables, such as 't5/6-*'.
    """
    devices = processes.processes * processes.devices_per_process
    jobs = _make_jobs(pattern, settings, run_options, devices=devices)
    _exit_with_code(lambda: local.run_here(jobs, processes))


def launch_image(
    tag: str,
    /,
    source: Path = Path(),
    extra: Literal["tpu", "gpu"] = "tpu",
    dry_run: bool = False,
) -> None:
    """Build the container image that the machines run, from the Containerfile, and push it.

        lm launch image us-docker.pkg.dev/PROJECT/lm/lm:1 --dry-run

    Args:
        tag: Name of the image, with its registry.
        source: The project's folder.
        extra: What the image is for.
        dry_run: Print every command and run none.
    """
    _exit_with_code(lambda: container.build(tag, source, extra, dry_run))


def launch_list(zone: str = "", project: str = "", dry_run: bool = False) -> None:
    """List the slices that lm launch has in the cloud now, and their age.

        lm launch list --dry-run

    Args:
        zone: Zone, such as us-west4-a; by default all.
        project: Project that pays; by default gcloud's.
        dry_run: Print every command and run none.
    """
    _exit_with_code(lambda: resources.list_all(zone, project, dry_run))


def launch_delete(
    names: tuple[str, ...] = (),
    /,
    all: bool = False,
    zone: str = "",
    project: str = "",
    dry_run: bool = False,
) -> None:
    """Delete slices, whatever they are doing.

        lm launch delete --all

    Args:
        names: Names of slices, as lm launch list shows them.
        all: All that lm launch list shows.
        zone: Zone, such as us-west4-a; by default all.
        project: Project that pays; by default gcloud's.
        dry_run: Print every command and delete nothing; gcloud is asked for the slices.
    """
    _exit_with_code(lambda: resources.delete(names, all, zone, project, dry_run))

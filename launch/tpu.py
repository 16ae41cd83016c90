"""``lm-launch tpu``: a slice for each row: requested, set up, watched, deleted, requested anew when lost.

``lm`` cannot start itself again when its machine is taken away. Hence this loop, of the states in ``policy``.
"""

import json
import os
import re
import signal
import subprocess
import tarfile
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import join

from launch import gcloud
from launch.accelerators import resolve
from launch.command import Job, LaunchError, label
from launch.policy import ABSENT, DONE, FAILED, Seen, SliceState, step
from launch.processes import Child, on_signals, say, show

PACKED = "lm-source.tgz"  # in the workers' home folders; unpacked into ~/lm
STUDIES = "studies"  # folder in it of the user's modules
_BUCKET = re.compile("gs://([^/]+)")
_END = "bash lm/launch/worker.sh clean 2> /dev/null"  # what an adopted slice may still run
_UNPACK = (
    f"{_END}; rm -rf lm/lm lm/experiments lm/launch lm/{STUDIES} && mkdir -p lm && tar -xzf {PACKED} -C lm"
)
# a dead connection ends
_ALIVE = ["--ssh-flag=-oServerAliveInterval=30", "--ssh-flag=-oServerAliveCountMax=4"]


@dataclass(frozen=True)
class RowSlice:
    """A row and the equal TPU slices of ``hosts`` that it runs on; ``packed`` is the source for them."""

    job: Job
    accelerator: str
    runtime: str
    hosts: int
    project: str
    packed: str
    options: Namespace

    def commands(self, action: str, attempt: str) -> list[list[str]]:
        """The gcloud commands of an action."""
        name, options = label(self.job), self.options
        at = gcloud.place(options.zone, self.project)
        workers = ["--worker=all", "--node=all", *at]
        kind = [f"--accelerator-type={self.accelerator}", f"--runtime-version={self.runtime}"]
        kind += [f"--labels={gcloud.LABEL}", *(["--spot"] if options.spot else [])]
        there = tuple(f"lm/{STUDIES}/{Path(file).name}" for file in self.job.studies)
        nodes, variables = [f"--node-id={name}"], list[str]()
        words = ["lm", *replace(self.job, studies=there).arguments()]
        if options.slices > 1:
            nodes = [f"--node-count={options.slices}", f"--node-prefix={name}"]
            if not any(word.split("=")[0] == "--mesh.slice" for word in words):
                words += ["--mesh.slice", str(options.slices)]
        if self.hosts * options.slices > 1:
            variables += ["LM_COORDINATOR=auto"]
        if options.data:
            variables += [f"TFDS_DATA_DIR={options.data}"]
        words = [*variables, *words]
        buckets = sorted({bucket for word in words for bucket in _BUCKET.findall(word)})
        start = ["bash", "lm/launch/worker.sh", "start", attempt, "env"]
        start += [_BUCKET.sub(r"gs/\1", word) for word in words]  # where setup mounts them
        setup = join(["bash", "lm/launch/worker.sh", "setup", *buckets])
        commands = {
            "look": [["describe", name, *at, "--format=json"]],
            "ask": [["create", name, *nodes, *kind, *at]],
            "set up": [
                ["scp", self.packed, f"{name}:{PACKED}", *workers],
                ["ssh", name, *workers, *_ALIVE, f"--command={_UNPACK} && {setup}"],
            ],
            "start": [["ssh", name, *workers, *_ALIVE, f"--command={join(start)}"]],
            "delete": [["delete", name, *at, "--force"]],  # with its nodes; answers when they are gone
        }
        return [[*gcloud.TPUS, "queued-resources", *command] for command in commands[action]]


def pack(source: Path, studies: Sequence[str], target: Path) -> None:
    """Write to ``target`` what git tracks or does not ignore in ``source``, as it is now, and ``studies``."""
    command = ["git", "-C", str(source), "ls-files", "-zco", "--exclude-standard"]
    names = set(subprocess.run(command, capture_output=True).stdout.decode().split("\0"))
    if missing := {"pyproject.toml", "constraints.txt", "launch/worker.sh"} - names:
        fault = f"should be a git checkout of the project; it has no {min(missing)}"
        raise LaunchError(f"--source {source} {fault}")
    with tarfile.open(target, "w:gz") as archive:
        for name in sorted(name for name in names if name and (source / name).exists()):
            archive.add(source / name, name)
        for file in studies:
            archive.add(file, f"{STUDIES}/{Path(file).name}")


def run_slices(jobs: Sequence[Job], options: Namespace) -> int:
    """Run each row to its end, so many at once; the first exit code that is not 0. A signal deletes all."""
    if not options.runs.startswith("gs://"):
        fault = "should be gs://BUCKET/FOLDER: a slice's disks are deleted with it"
        raise LaunchError(f"--runs {options.runs!r} {fault}")
    studies = [Path(file).name for file in jobs[0].studies]
    if len(set(studies)) < len(studies):
        raise LaunchError(f"--study: {', '.join(sorted(studies))} should differ in their names on a slice")
    accelerator, runtime, hosts = resolve(options.accelerator)
    project = options.project or "PROJECT" if options.dry_run else gcloud.paying(options.project)
    kind = (accelerator, options.runtime or runtime, hosts, project)
    if options.dry_run:
        commands = [gcloud.LOGGED_IN, gcloud.PROJECT, gcloud.types(options.zone, project)]
        for row in (RowSlice(job, *kind, PACKED, options) for job in jobs):
            for action in ("look", "ask", "set up", "start", "delete"):
                commands += row.commands(action, "ATTEMPT")
        for command in commands:
            show(command)
        return DONE
    gcloud.check_zone(accelerator, options.zone, project)
    stop = threading.Event()
    with tempfile.TemporaryDirectory(prefix="lm-launch-") as folder:
        packed = Path(folder, PACKED)
        pack(options.source, jobs[0].studies, packed)

        def delete_all(_: int) -> None:
            stop.set()
            say("launch", "deleting every slice; please wait")

        on_signals(delete_all)
        slices = [RowSlice(job, *kind, str(packed), options) for job in jobs]
        with ThreadPoolExecutor(options.at_once) as pool:
            ends = [pool.submit(run_to_its_end, row, stop) for row in slices]
            # A signal that comes just before an endless wait does not end it; this one is never long.
            while wait(ends, timeout=1.0).not_done:
                pass
    return next(filter(None, (end.result() for end in ends)), DONE)


def run_to_its_end(row: RowSlice, stop: threading.Event) -> int:
    """Follow the state machine of one row to its end; the exit code."""
    who, state, seen, attempts = label(row.job), SliceState(ours=row.options.adopt), Seen(), 0
    while state.action != "end":
        say(who, state.why)
        before, began, seen = seen.state, time.monotonic(), Seen()
        if state.action == "delete":
            time.sleep(state.after)
        if state.action == "delete" or not stop.wait(state.after):
            attempts += state.action == "start"
            say(who, "" if state.action == "look" else f"{state.action}: {row.job.name} on {row.accelerator}")
            try:
                seen = _act(row, state.action, f"{int(time.time())}-{attempts}", stop)
            except Exception as error:  # a fault of this program is no reason to leave a slice running
                seen = Seen(FAILED, message=repr(error))
            say(who, seen.state if seen.state != before else "")
        seen = replace(seen, seconds=time.monotonic() - began, stopped=stop.is_set())
        state = step(state, seen, row.options.restarts)
    say(who, f"{state.why or 'nothing is left of it'}; exit code {state.code}")
    say(who, f"to delete it: {join(row.commands('delete', '')[0])}" if state.ours else "")
    return state.code


def _act(row: RowSlice, action: str, attempt: str, stop: threading.Event) -> Seen:
    commands = row.commands(action, attempt)
    if action in ("set up", "start"):
        codes = (_stream(label(row.job), command, stop) for command in commands)
        return Seen(next(filter(None, codes), DONE))
    seen = gcloud.call(commands[0])
    if seen.code and "NOT_FOUND" in seen.message:
        return Seen(state=ABSENT)
    if action == "delete":
        say(label(row.job), seen.message)
    if action == "look" and not seen.code:
        state = json.loads(seen.message)["state"]
        fault = state.get("failedData", {}).get("error", {}).get("message", "")
        return Seen(state=state["state"], message=fault)
    return seen


def _stream(who: str, command: Sequence[str], stop: threading.Event) -> int:
    """Run a command that may take days and show its output; it is ended when ``stop`` is set."""
    child = Child(command, who, os.environ)
    while child.poll() is None and not stop.wait(0.2):
        pass
    child.send_group(signal.SIGTERM)
    return child.finish()

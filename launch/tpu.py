"""``lm-launch tpu``: a slice for each row; asked for, set up, watched, asked for again when lost, and
deleted.
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import join

from launch import gcloud
from launch.accelerators import resolve
from launch.command import Job, LaunchError, label
from launch.policy import ABSENT, DONE, FAILED, Seen, State, step
from launch.processes import Child, on_signals, say, show

PACKED = "lm-source.tgz"  # in the workers' home folders; unpacked into ~/lm
_BUCKET = re.compile("gs://([^/]+)")
_END = "bash lm/launch/worker.sh clean 2> /dev/null"  # what an adopted slice may still run
_UNPACK = f"{_END}; rm -rf lm/lm lm/experiments lm/launch && mkdir -p lm && tar -xzf {PACKED} -C lm"
# a dead connection ends
_ALIVE = ["--ssh-flag=-oServerAliveInterval=30", "--ssh-flag=-oServerAliveCountMax=4"]


@dataclass(frozen=True)
class Slice:
    """One row and the equal TPU slices that it runs on, each of ``hosts``; ``packed`` is the source that they
    get.
    """

    job: Job
    accelerator: str
    runtime: str
    hosts: int
    project: str
    packed: str
    asked: Namespace

    def commands(self, action: str, attempt: str) -> list[list[str]]:
        """The gcloud commands of an action."""
        name, asked, at = label(self.job), self.asked, gcloud.place(self.asked.zone, self.project)
        workers = ["--worker=all", "--node=all", *at]
        kind = [f"--accelerator-type={self.accelerator}", f"--runtime-version={self.runtime}"]
        kind += [f"--labels={gcloud.LABEL}", *(["--spot"] if asked.spot else [])]
        nodes = (
            [f"--node-count={asked.slices}", f"--node-prefix={name}"]
            if asked.slices > 1
            else [f"--node-id={name}"]
        )
        variables = ["LM_COORDINATOR=auto"] * (self.hosts * asked.slices > 1)
        variables += [f"TFDS_DATA_DIR={asked.data}"] * bool(asked.data)
        words = [*variables, "lm", *self.job.arguments()]
        if asked.slices > 1 and not any(word.split("=")[0] == "--mesh.slice" for word in words):
            words += ["--mesh.slice", str(asked.slices)]
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


def pack(source: Path, target: Path) -> None:
    """Write what git tracks or does not ignore in ``source``, as it is now, to the file ``target``."""
    listed = subprocess.run(
        ["git", "-C", source, "ls-files", "-zco", "--exclude-standard"], capture_output=True
    )
    names = set(listed.stdout.decode().split("\0"))
    missing = {"pyproject.toml", "constraints.txt", "launch/worker.sh"} - names
    if missing:
        raise LaunchError(
            f"--source {source} should be a git checkout of the project; it has no {min(missing)}"
        )
    with tarfile.open(target, "w:gz") as archive:
        for name in sorted(name for name in names if name and (source / name).exists()):
            archive.add(source / name, name)


def run(jobs: Sequence[Job], asked: Namespace) -> int:
    """Keep each row going to its end, so many at once; the first exit code that is not 0. A signal deletes
    all.
    """
    if not asked.runs.startswith("gs://"):
        raise LaunchError(
            f"--runs {asked.runs!r} should be gs://BUCKET/FOLDER: a slice's disks are deleted with it"
        )
    accelerator, runtime, hosts = resolve(asked.accelerator)
    project = asked.project or "PROJECT" if asked.dry_run else gcloud.paying(asked.project)
    kind = (accelerator, asked.runtime or runtime, hosts, project)
    if asked.dry_run:
        slices = [Slice(job, *kind, PACKED, asked) for job in jobs]
        steps = [
            one.commands(do, "ATTEMPT")
            for one in slices
            for do in ("look", "ask", "set up", "start", "delete")
        ]
        for command in sum(steps, [gcloud.LOGGED_IN, gcloud.PROJECT, gcloud.types(asked.zone, project)]):
            show(command)
        return DONE
    gcloud.check_zone(accelerator, asked.zone, project)
    stop = threading.Event()
    with tempfile.TemporaryDirectory(prefix="lm-launch-") as folder:
        packed = Path(folder, PACKED)
        pack(asked.source, packed)
        on_signals(lambda _: (stop.set(), say("launch", "deleting every slice; please wait")))
        with ThreadPoolExecutor(asked.at_once) as pool:
            slices = [Slice(job, *kind, str(packed), asked) for job in jobs]
            codes = list(pool.map(lambda one: keep_going(one, stop, asked.restarts, asked.adopt), slices))
    return next(filter(None, codes), DONE)


def keep_going(one: Slice, stop: threading.Event, restarts: int, adopt: bool) -> int:
    """Follow the state machine of one row to its end; the exit code."""
    who, state, seen, attempts = label(one.job), State(ours=adopt), Seen(), 0
    while state.action != "end":
        say(who, state.why)
        before, began, seen = seen.state, time.monotonic(), Seen()
        if not (time.sleep(state.after) if state.action == "delete" else stop.wait(state.after)):
            attempts += state.action == "start"
            say(who, "" if state.action == "look" else f"{state.action}: {one.job.name} on {one.accelerator}")
            try:
                seen = _act(one, state.action, f"{int(time.time())}-{attempts}", stop)
            except Exception as error:  # a fault of this program is no reason to leave a slice running
                seen = Seen(FAILED, message=repr(error))
            say(who, seen.state if seen.state != before else "")
        seen = replace(seen, seconds=time.monotonic() - began, stopped=stop.is_set())
        state = step(state, seen, restarts)
    say(who, f"{state.why or 'nothing is left of it'}; exit code {state.code}")
    say(who, f"to delete it: {join(one.commands('delete', '')[0])}" if state.ours else "")
    return state.code


def _act(one: Slice, action: str, attempt: str, stop: threading.Event) -> Seen:
    commands = one.commands(action, attempt)
    if action in ("set up", "start"):
        codes = (_stream(label(one.job), command, stop) for command in commands)
        return Seen(next(filter(None, codes), DONE))
    seen = gcloud.run(commands[0])
    if seen.code and "NOT_FOUND" in seen.message:
        return Seen(state=ABSENT)
    if action == "delete":
        say(label(one.job), seen.message)
    if action == "look" and not seen.code:
        state = json.loads(seen.message)["state"]
        return Seen(
            state=state["state"], message=state.get("failedData", {}).get("error", {}).get("message", "")
        )
    return seen


def _stream(who: str, command: Sequence[str], stop: threading.Event) -> int:
    """Run a command that may take days and show its output; it is ended when ``stop`` is set."""
    child = Child(command, who, os.environ)
    while child.poll() is None and not stop.wait(0.2):
        pass
    child.send_group(signal.SIGTERM)
    return child.finish()

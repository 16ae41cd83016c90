"""A slice for each run: asked for, set up, watched, deleted, asked for anew when it is lost.

``lm`` cannot start itself again when its machine is taken away. Hence this loop, of the states in ``policy``.
"""

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import join

from launch import container, gcloud, queued
from launch.accelerators import parse_slice
from launch.command import Job, LaunchError, closest, label
from launch.gcloud import Request, SliceApi
from launch.options import Container, Machines, check_machines
from launch.policy import ABSENT, DONE, FAILED, Limits, Outcome, SliceState, already_exists, root_cause, step
from launch.processes import Child, finish_all, on_signals, say, show

AFTER_FAILURE = 60.0  # seconds that the other hosts have, once the run has failed on one, to save and end


Command = list[str]
ParallelCommands = list[Command]  # of one step, run at once


@dataclass(frozen=True)
class JobSlice:
    """A run and the request for its slices."""

    job: Job
    request: Request
    api: SliceApi
    options: Container
    archive: str = container.ARCHIVE_NAME  # path of the archive of studies that is copied to every host

    @property
    def machines(self) -> Machines:
        return self.request.machines

    def commands(
        self, action: str, zone: str, attempt: str, ssh_targets: Sequence[str]
    ) -> list[ParallelCommands]:
        """Return the steps of an action, which follow one another; a step's commands run in parallel."""
        request, api = self.request, self.api
        if action == "describe":
            return [[api.describe(request, zone)]]
        if action == "create":
            return [[command] for command in api.create(request, zone)]
        if action == "delete":
            return [[command] for command in api.delete(request, zone)]
        if action == "set up":
            line = container.setup_command(self.job, self.options)
            copied = api.copy(request, zone, ssh_targets, self.archive, container.ARCHIVE_NAME)
            return [copied, api.run(request, zone, ssh_targets, line)]
        line = container.start_command(self.job, self.options, request.hosts, request.slices, attempt)
        return [api.run(request, zone, ssh_targets, line)]


def run_slices(
    jobs: Sequence[Job],
    api: SliceApi,
    options: Container,
    machines: Machines,
    slices: int = 1,
    runtime: str = "",
) -> int:
    """Run each job to its end, ``machines.at_once`` at a time; return the first exit code that is not 0.

    A signal deletes all slices.
    """
    check_machines(machines)
    for job in jobs:
        container.check_job(job, options)
    piece = parse_slice(options.accelerator)
    api.check_request(Request("", piece, options.project, machines, slices, runtime))
    project = gcloud.billed_project(options.project, machines.dry_run)
    requests = [Request(label(job), piece, project, machines, slices, runtime) for job in jobs]
    rows = [JobSlice(job, request, api, options) for job, request in zip(jobs, requests, strict=True)]
    if machines.dry_run:
        print_commands(rows)
        return DONE
    check_zones(requests[0], api)
    stop = threading.Event()
    with tempfile.TemporaryDirectory(prefix="lm-launch-") as folder:
        archive = Path(folder, container.ARCHIVE_NAME)
        container.pack(jobs[0].studies, archive)

        def delete_all(_: int) -> None:
            stop.set()
            say("launch", "deleting every slice; please wait")

        with on_signals(delete_all), ThreadPoolExecutor(machines.at_once) as pool:
            ends = [pool.submit(run_to_its_end, replace(row, archive=str(archive)), stop) for row in rows]
            # A signal that comes just before an endless wait does not end it; this one is never long.
            while wait(ends, timeout=1.0).not_done:
                pass
    return next(filter(None, (end.result() for end in ends)), DONE)


def print_commands(rows: Sequence[JobSlice]) -> None:
    """Print every command of runs that never fail, in the first zone.

    For each further zone, print only the commands that create the slice there.
    """
    show(gcloud.LIST_ACCOUNTS)
    show(gcloud.GET_PROJECT)
    for zone in rows[0].machines.zones:
        show(rows[0].api.list_offers(rows[0].request, zone))
    for row in rows:
        ssh_targets = [row.request.name if row.api is queued.API else "HOST"]
        for number, zone in enumerate(row.machines.zones):
            actions = ("create",) if number else ("describe", "create", "set up", "start", "delete")
            if number:
                before = row.machines.zones[number - 1]
                print(f"# if {before} has no room, create in {zone}, and go on as above:")
            for action in actions:
                if ssh_targets == ["HOST"] and action in ("set up", "start"):
                    print(f"# {action}, on each of {row.request.hosts} hosts at once:")
                for (command,) in row.commands(action, zone, "ATTEMPT", ssh_targets):
                    show(command)


def check_zones(request: Request, api: SliceApi) -> None:
    """Raise LaunchError unless each zone exists, may be used and offers the accelerator."""
    needed = api.offer_name(request)
    for zone in request.machines.zones:
        meaning = f"--zones {zone} cannot be used in project {request.project}"
        offered = gcloud.output_of(api.list_offers(request, zone), meaning).split()
        if needed not in offered:
            raise LaunchError(f"--zones {zone} does not offer {needed}{closest(needed, offered)}")


def run_to_its_end(row: JobSlice, stop: threading.Event, clock: Callable[[], float] = time.monotonic) -> int:
    """Follow the state machine of one job to its end; return the exit code."""
    machines = row.machines
    is_timed = bool(machines.max_run_time)
    limits = Limits(machines.restarts, len(machines.zones), machines.wait * 60, is_timed)
    who = row.request.name
    attempts = 0
    ssh_targets: tuple[str, ...] = ()
    state = SliceState(owned=machines.adopt)
    outcome = Outcome()
    while state.action != "end":
        say(who, state.why)
        previous_state = outcome.state
        started_at = clock()
        zone = machines.zones[state.zone]
        if state.action == "delete":
            time.sleep(state.delay)  # a signal does not shorten the pause: the slice has to be deleted
            is_skipped = False
        else:
            is_skipped = stop.wait(state.delay)
        if is_skipped:
            outcome = Outcome(skipped=True)
        else:
            if state.action == "start":
                attempts += 1
            if state.action != "describe":
                say(who, f"{state.action}: {row.job.name} on {row.request.slice} in {zone}")
            try:
                commands = row.commands(state.action, zone, f"{int(time.time())}-{attempts}", ssh_targets)
                outcome, ssh_targets = _act(row, state.action, commands, zone, ssh_targets, stop)
            except Exception as error:  # a fault of this program is no reason to leave a slice running
                outcome = Outcome(FAILED, message=repr(error))
            say(who, outcome.state if outcome.state != previous_state else "")
        outcome = replace(outcome, seconds=clock() - started_at, stopped=stop.is_set())
        state = step(state, outcome, limits)
    say(who, f"{state.why or 'nothing is left of it'}; exit code {state.code}")
    if state.owned:
        for (command,) in row.commands("delete", machines.zones[state.zone], "", ()):
            say(who, f"to delete it: {join(command)}")
    return state.code


def _act(
    row: JobSlice,
    action: str,
    commands: Sequence[ParallelCommands],
    zone: str,
    ssh_targets: tuple[str, ...],
    stop: threading.Event,
) -> tuple[Outcome, tuple[str, ...]]:
    """Do an action; return its outcome, and the names that ssh takes as they are known now."""
    if action in ("set up", "start"):
        codes = (_stream(row.request.name, each, stop) for each in commands)
        return Outcome(next(filter(None, codes), DONE)), ssh_targets
    if action == "describe":
        outcome = gcloud.call(commands[0][0])
        if outcome.code:
            return outcome, ssh_targets
        status = row.api.parse_status(row.request, outcome.message)
        return Outcome(state=status.state, message=status.message), status.ssh_targets or ssh_targets
    if action == "delete":
        return _delete(row.request.name, commands), ()
    for number, (command,) in enumerate(commands):
        outcome = gcloud.call(command)
        if outcome.code:
            last_already_exists = number == len(commands) - 1 and already_exists(outcome)
            if len(commands) > 1 and not last_already_exists:
                # delete the parts created so far, including leftovers of an earlier launch
                with suppress(OSError):
                    _delete(row.request.name, row.commands("delete", zone, "", ()))
            return replace(outcome, state=""), ()
    return outcome, ()


def _delete(who: str, commands: Sequence[ParallelCommands]) -> Outcome:
    """Delete all parts; what is not there counts as deleted."""
    failed = Outcome()
    for (command,) in commands:
        outcome = gcloud.call(command)
        if outcome.state != ABSENT:
            say(who, outcome.message)
            failed = outcome if outcome.code else failed
    return failed


def _stream(who: str, commands: ParallelCommands, stop: threading.Event) -> int:
    """Run the commands in parallel, possibly for days, and show their output.

    Return the exit code that explains how they ended. When ``stop`` is set, all of them are ended.
    """
    names = [who if len(commands) == 1 else f"{who} {host}" for host in range(len(commands))]
    children = [Child(command, name, os.environ) for command, name in zip(commands, names, strict=True)]
    return root_cause(finish_all(children, AFTER_FAILURE, stop, signal.SIGTERM))

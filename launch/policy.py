"""Decide what to do next with a run on a slice that may be lost: exit codes, and a state machine."""

from dataclasses import dataclass, replace
from math import inf

# The exit codes of `lm` (experiments/processes/exit_codes.py), of which this package imports nothing.
DONE, FAILED, BAD_SETTINGS, NOT_FINITE, RUN_PREEMPTED, INTERRUPTED = 0, 1, 2, 3, 42, 130
TERMINATED = 143  # a process that SIGTERM ended; the launcher sends it to all once one has ended
NOT_RETRYABLE = (BAD_SETTINGS, NOT_FINITE, INTERRUPTED)  # started again, the run would end in the same way

# States of a queued resource (Cloud TPU API v2, QueuedResourceState.State); PREEMPTED is a node's. The
# groups of Compute Engine are given the same states (gce.parse_status).
WAITING = ("CREATING", "ACCEPTED", "WAITING_FOR_RESOURCES", "PROVISIONING")
GONE = ("FAILED", "SUSPENDING", "SUSPENDED", "PREEMPTED")
ABSENT = "ABSENT"  # ours: there is none of this name
REFUSED = "REFUSED"  # ours: it is there, and will get no machines
REFUSALS = ("QUOTA", "PERMISSION_DENIED", "INVALID_ARGUMENT")  # asking again would be refused again

POLL_INTERVAL = 30.0  # between two descriptions of a slice [seconds]
MAX_FAILED_DELETIONS = 4  # in a row, after which the launcher gives up and tells the user
# An attempt that took this long before it failed counts as the first failure, not as one more in a row.
FAILURE_RESET_SECONDS = 1800.0


@dataclass(frozen=True)
class Outcome:
    """The result of an action: its exit code or, of "describe", the state (empty if it is not known)."""

    code: int = 0
    state: str = ""
    message: str = ""
    seconds: float = 0.0  # since the action was decided, the pause before it included
    stopped: bool = False  # the user wants to end
    skipped: bool = False  # the action was not done, because the user wanted to end before it began


@dataclass(frozen=True)
class Limits:
    """Holds how much is tolerated, and in how many zones a slice can be requested."""

    restarts: int = 3  # failures in a row
    zones: int = 1
    wait: float = inf  # for capacity in a zone, if there is another [seconds]
    is_timed: bool = False  # each slice is taken away after --max-run-time


@dataclass(frozen=True)
class SliceState:
    """The action to do, and what is known of one run's slice."""

    action: str = "describe"  # describe, create, set up, start, delete, end
    delay: float = 0.0  # before the action [seconds]
    why: str = ""
    zone: int = 0  # index of the zone where the slice is, or is asked for
    refused: frozenset[int] = frozenset()  # zones that will not give one
    waited: float = 0.0  # for capacity in this zone [seconds]
    owned: bool = False  # requested by this launch, or to be adopted: it has to be deleted in the end
    seen: bool = False  # since it was requested
    ready: bool = False  # its hosts are set up
    failures: int = 0  # in a row, of requests for the slice and of attempts to run on it
    losses: int = 0  # in a row, of slices that were lost before their hosts were set up
    undeleted: int = 0  # deletions in a row that failed
    code: int = 0  # how the last attempt ended
    after_deletion: str = "end"  # the action that follows
    next_zone: int = 0  # where to ask after the deletion

    def go(self, action: str, delay: float = 0.0, why: str = "", **known) -> "SliceState":
        """Return the state with another action, why it is done, and what is known by now."""
        return replace(self, action=action, delay=delay, why=why, **known)

    def create_anew(self, next_zone: int, why: str, **known) -> "SliceState":
        """Return the deletion of the slice, after which one is asked for in a zone."""
        return self.go("delete", why=why, after_deletion="create", next_zone=next_zone, **known)

    def give_up(self, code: int, why: str) -> "SliceState":
        """Return the end with an exit code, before which a slice of ours is deleted."""
        return self.go("delete" if self.owned else "end", why=why, code=code, after_deletion="end")


def pause(failures: int, first: float) -> float:
    """Return seconds to wait after failures in a row: ``first``, doubled each time, up to ten minutes."""
    return min(first * 2 ** (failures - 1), 600.0) if failures else 0.0


def root_cause(codes: list[int]) -> int:
    """Return the exit code, of several processes that ended together, that explains why they ended.

    It is that of a process that failed by itself, if there is one, not of those that were ended after it.
    """
    codes = [128 - code if code < 0 else code for code in codes]  # -15: killed by signal 15
    # 0: the run itself cannot go on; 1: any other failure, such as a crash; 2: interrupted by the user;
    # 3: preempted, or ended because another process had ended; 4: succeeded.
    rank = {NOT_FINITE: 0, BAD_SETTINGS: 0, INTERRUPTED: 2, RUN_PREEMPTED: 3, TERMINATED: 3, DONE: 4}
    return min(codes, key=lambda code: (rank.get(code, 1), code))


def step(state: SliceState, outcome: Outcome, limits: Limits) -> SliceState:
    """Return the next action, from the outcome of this one."""
    if state.action == "delete":
        return _deleted(state, outcome)
    if outcome.skipped:
        return state.give_up(INTERRUPTED, "interrupted")
    if state.action == "create" and not already_exists(outcome):
        state = replace(state, owned=True)  # even if the request failed: it may have arrived
    is_finished = state.action == "start" and outcome.code == DONE  # a later signal changes nothing
    if outcome.stopped and not is_finished:
        return state.give_up(INTERRUPTED, "interrupted")
    if state.action == "describe":
        return _described(state, outcome, limits)
    if outcome.code == DONE and state.action == "set up":
        return state.go("start", ready=True, code=DONE, losses=0)
    if outcome.code == DONE:
        following = {"create": "describe", "start": "delete"}[state.action]
        return state.go(following, code=DONE, after_deletion="end")
    if state.action == "start" and outcome.code in NOT_RETRYABLE:
        return state.give_up(
            outcome.code, f"the run ended with {outcome.code}; starting it again would not help"
        )
    failures = 1 if outcome.seconds >= FAILURE_RESET_SECONDS else state.failures + 1
    if state.action != "create":
        why = f"{state.action} ended with {outcome.code}"
        return state.go("describe", why=why, failures=failures, code=outcome.code)
    if failures > limits.restarts or _is_refusal(outcome.message):
        return _refused(state, outcome.message, limits)
    return state.go("describe", pause(failures, 10.0), outcome.message, failures=failures)


def already_exists(outcome: Outcome) -> bool:
    """Return whether a request failed since there is a slice of this name, perhaps of another launch."""
    return bool(outcome.code) and "ALREADY EXISTS" in outcome.message.upper().replace("_", " ")


def _is_refusal(message: str) -> bool:
    return any(word in message.upper() for word in REFUSALS)


def _refused(state: SliceState, why: str, limits: Limits) -> SliceState:
    """Go on in the next zone that has not refused; end if there is none, or if the slice here is not ours."""
    refused = state.refused | {state.zone}
    following = _next_zone(replace(state, refused=refused), limits)
    if following == state.zone or not state.owned:
        return state.give_up(BAD_SETTINGS, why)
    return state.create_anew(following, why, refused=refused, failures=0)


def _next_zone(state: SliceState, limits: Limits) -> int:
    """Return the next zone in order, after the last the first; the same if all others have refused."""
    order = [(state.zone + offset) % limits.zones for offset in range(1, limits.zones)]
    return next((zone for zone in order if zone not in state.refused), state.zone)


def _described(state: SliceState, outcome: Outcome, limits: Limits) -> SliceState:
    """Return what follows a description: wait, use the slice, ask for another one, or end."""
    if outcome.state in (ABSENT, "DELETING") and state.seen:
        if limits.is_timed and state.ready:
            why = "it was taken away, as at the end of --max-run-time"
            return state.create_anew(state.zone, why, failures=0)
        return state.give_up(FAILED, "it was deleted, and not by this launch")
    if outcome.state == ABSENT:
        return state.go("create")
    # not known just now, or still being deleted by an earlier launch
    if outcome.state not in (*WAITING, *GONE, REFUSED, "ACTIVE"):
        if not state.owned and _is_refusal(outcome.message):
            return state.give_up(BAD_SETTINGS, outcome.message)
        return state.go("describe", POLL_INTERVAL, outcome.message)
    if not state.owned:
        why = f"it is there already ({outcome.state}), another lm launch may watch it; --adopt takes it over"
        return state.go("end", why=why, code=BAD_SETTINGS)
    if outcome.state == REFUSED:
        return _refused(state, outcome.message, limits)
    lost = outcome.state in WAITING and state.ready  # a group that has lost hosts waits for others
    # A slice that is lost after its hosts were set up is requested again in its zone and counts as no
    # failure. One that is lost before counts as a loss, and the next zone is tried.
    if outcome.state in GONE or lost:
        losses = 0 if state.ready else state.losses + 1
        following = state.zone if state.ready else _next_zone(state, limits)
        why = f"{outcome.state} {outcome.message}".strip()
        if losses > limits.restarts:
            return state.give_up(FAILED, why)
        return state.create_anew(following, why, failures=0, losses=losses)
    # The request has succeeded, so its failures no longer count. Those of "set up" and "start" do: they have
    # left a code that is not 0.
    failures = state.failures if state.code != DONE else 0
    state = replace(state, seen=True, failures=failures)
    if outcome.state in WAITING:
        return _waiting(replace(state, waited=state.waited + outcome.seconds), outcome, limits)
    if state.failures > limits.restarts:
        return state.give_up(state.code, f"failed {state.failures} times in a row")
    return state.go("start" if state.ready else "set up", pause(state.failures, 10.0), waited=0.0)


def _waiting(state: SliceState, outcome: Outcome, limits: Limits) -> SliceState:
    """Return another look after POLL_INTERVAL or, after ``limits.wait``, a request in the next zone."""
    following = _next_zone(state, limits)
    if state.waited < limits.wait or following == state.zone:
        return state.go("describe", POLL_INTERVAL, outcome.message)
    why = f"no capacity in {state.waited / 60:.0f} minutes {outcome.message}".strip()
    return state.create_anew(following, why)


def _deleted(state: SliceState, outcome: Outcome) -> SliceState:
    """Return what follows a deletion: the action that was planned or, if it failed, the deletion again."""
    state = replace(state, undeleted=state.undeleted + 1 if outcome.code else 0)
    if 0 < state.undeleted < MAX_FAILED_DELETIONS:
        return state.go("delete", pause(state.undeleted, 5.0))
    if state.undeleted:
        return state.go("end", why="NOT DELETED, IT MAY STILL COST MONEY", code=FAILED)
    if outcome.stopped and state.after_deletion == "create":
        return state.go("end", why="interrupted", code=INTERRUPTED, owned=False)
    if state.after_deletion == "end":
        return state.go("end", owned=False)
    # The next request may find a slice of another launch under this name.
    zone = state.next_zone
    state = replace(state, owned=False, seen=False, ready=False, waited=0.0, zone=zone, code=DONE)
    return state.go("create", pause(max(state.failures, state.losses), 10.0))

"""Who is taken for lost or hung, on what evidence: silent hosts, stopped processes, workers that stand still.

Pure. Pieces of evidence add up, so that no long time-out is waited for: a host that says nothing while others wait for
it in a collective; a process that the system has stopped. A worker that lives and stands still is judged by a budget
for the phase that it is in, learned from how long it stayed there before. Members that all wait for each other are
asked who can reach whom.
"""

from __future__ import annotations

import math

from elastic_trainer.control import membership, quorum, reachability, stragglers
from elastic_trainer.control.effects import Effect, KillWorker, ProbeHosts, StartStore, Tell
from elastic_trainer.control.events import Beat, HostsProbed, TaskPhase, WorkerLost
from elastic_trainer.control.state import MEMBER, Limits, Phase, State
from elastic_trainer.control.watched import Host, Seen
from elastic_trainer.vocabulary import Stage, Worker, counted

SILENT_S = 0.9  # agents beat every 0.15 s; what a gap of 0.2 s in the network loses arrives some 0.6 s later
BROKEN_S = 0.6  # when a collective has failed besides
WAITING_S = 0.4  # in one collective, which a healthy group has through in less
UNHEARD_S = 2.0  # nobody waits for that host, but orders do not reach it either
MUTE_S = 1.0  # a worker tells five times a second where it is
STOPPED_S = 0.4  # a debugger or a snapshot of a machine stops a process for less
PROBE_S = 1.0  # everybody waits for everybody
ANSWER_S = 5.0  # two tries to connect
AGAIN_S = 10.0  # until those who could not reach each other try again: networks take about that long to be mended
LEARNED = 5  # stays in a phase; before that anything may take long: compilation, cold caches
FIRST_S = 300.0
TIMES = 8.0
RATE_S = 600.0  # each kill in so long doubles the budget: who judges wrongly is slower and slower to judge again
BUSY_TIMES, BUSY_S = 15.0, 30.0  # garbage collection, recompilation, a slow piece of the task's own code
# where nothing but computation goes on two seconds are long; elsewhere disks, networks and services are waited for
FLOOR_S = {
    TaskPhase.LOSS: 2.0,
    TaskPhase.APPLY: 2.0,
    TaskPhase.DATA: 30.0,
    TaskPhase.BETWEEN: 30.0,
    TaskPhase.EVALUATE: 30.0,
    TaskPhase.SAVE: 30.0,
}
IN_STEP = (TaskPhase.DATA, TaskPhase.LOSS, TaskPhase.REDUCE, TaskPhase.APPLY)
_FOR_OTHERS = (TaskPhase.REDUCE, TaskPhase.FORM, TaskPhase.STATE)
_LIVING = (Stage.STARTING, Stage.WARM, Stage.FAULTY, *MEMBER)


def heard(state: State, event: Beat, now: float) -> list[Effect]:
    """A node agent has told how it and its workers are; workers that were given up meanwhile are fenced."""
    before = state.hosts.get(event.node)
    state.hosts[event.node] = Host(event.host, event.address, now)
    effects: list[Effect] = []
    for pulse in event.pulses:
        each = membership.of(state, pulse.worker)
        if each is None or each.stage is Stage.GONE:
            if before is not None and before.is_given_up:
                effects.append(KillWorker(pulse.worker, "its host is back, and it was given up meanwhile"))
            continue
        seen = state.seen.get(pulse.worker.worker_id)
        if seen is None or seen.worker != pulse.worker:
            seen = state.seen[pulse.worker.worker_id] = Seen(pulse.worker, event.node, now)
        seen.is_busy = pulse.is_busy
        if not pulse.is_stopped:
            seen.stopped_since = None
        elif seen.stopped_since is None:
            seen.stopped_since = now
        seen.is_mute, seen.told_at = pulse.told_s >= MUTE_S, now - pulse.told_s
        if pulse.where is not None and pulse.where.phase is TaskPhase.LOSS:
            seen.loss = (pulse.where.stays, pulse.where.longest_s)
        if pulse.where is not None and (seen.where is None or pulse.where.mark != seen.where.mark):
            seen.where, seen.since = pulse.where, now
    return effects + stragglers.name(state)


def excuse(state: State, late_s: float) -> None:
    """The judge itself was held up for so many seconds: nobody else is to blame for that time."""
    for host in state.hosts.values():
        host.heard_at += late_s
    for seen in state.seen.values():
        seen.since += late_s
        if seen.stopped_since is not None:
            seen.stopped_since += late_s


def next_deadline(state: State, now: float) -> float | None:
    """When a host that says nothing more becomes suspicious, with evidence beside its silence or without."""
    used = {seen.node for seen in _living(state)}
    heard_at = [host.heard_at for node, host in state.hosts.items() if node in used]
    times = [at + bound for at in heard_at for bound in (BROKEN_S, SILENT_S, UNHEARD_S)]
    return min((time for time in times if time > now), default=None)


def suspect(state: State, limits: Limits, now: float) -> list[Effect] | None:
    """Give up who must be, or ask who can reach whom; None when nobody is suspicious."""
    for find in (_silent, _stopped, _standing):
        if found := find(state, limits, now):
            return found
    return _probe(state, now)


def probed(state: State, limits: Limits, event: HostsProbed, now: float) -> list[Effect]:
    """Of members that all wait for each other, the largest set goes on in which everybody reaches everybody.

    If it can be, one that has the state.
    """
    state.probe_at, state.retry_at = now + PROBE_S, now + AGAIN_S
    state.reached = sorted({*state.reached, *event.nodes})
    before = [(a, b) for a, b in state.apart if a not in event.nodes or b not in event.nodes]
    state.apart = sorted({*before, *event.unreachable})
    waiting = _all_wait(state, now)
    if waiting is None:
        pairs = _pairs(state, event.unreachable)
        return [Tell(f"{pairs} cannot reach each other: their workers are not taken together")] if pairs else []
    nodes: dict[str, list[int]] = {}
    for seen in waiting:
        nodes.setdefault(seen.node, []).append(seen.worker.worker_id)
    with_state = {quorum.node_of(state, each) for each in quorum.with_state(state, [seen.worker for seen in waiting])}
    chosen = reachability.largest(nodes, event.unreachable, with_state, limits.min_workers)
    if len(chosen) == len(nodes):
        if all(now - seen.since >= _patience_s(seen) for seen in waiting):
            # everybody reaches everybody: what was lost on the way does not come any more
            return membership.fault(state, limits, "all members wait for each other in a collective", now)
        return []
    why = f"{_pairs(state, event.unreachable)} cannot reach each other"
    lost = [seen.worker for seen in waiting if seen.node not in chosen]
    return _give_up(state, limits, lost, why, now)


def budget_s(seen: Seen, limits: Limits) -> float | None:
    """How long this worker may stand still where it is; None where other bounds hold.

    Standing still while the CPU is used is computation that takes long, and has more time.
    """
    where = seen.where
    if where is None:
        return None
    phase, (stays, longest_s) = where.phase, (where.stays, where.longest_s)
    if seen.is_mute and phase in IN_STEP:  # it may have gone on to where its interpreter is held
        phase, (stays, longest_s) = TaskPhase.LOSS, seen.loss
    if phase not in FLOOR_S:
        return None
    if stays < LEARNED:
        return FIRST_S
    base = limits.stall_s or max(FLOOR_S[phase], TIMES * longest_s)
    return max(BUSY_S, BUSY_TIMES * base) if seen.is_busy else base


def longest_busy_s(stall_s: float | None) -> float:
    """How long a worker that is well may be busy before it answers an order, or how much later than others it comes."""
    return max(FIRST_S, BUSY_TIMES * (stall_s or 0.0))


def fence_after_s(stall_s: float | None) -> float:
    """When a worker that does no step and hears of no controller has to take itself for given up.

    Not sooner than a controller needs to be back on a busy machine, however short the budget: all workers would end.
    """
    return 2 * max(stall_s or 0.0, BUSY_S)


# ---- evidence


def _silent(state: State, limits: Limits, now: float) -> list[Effect]:
    living = _living(state)
    nodes = sorted({seen.node for seen in living})
    was_deaf, state.is_deaf = state.is_deaf, all(now - state.hosts[node].heard_at >= BROKEN_S for node in nodes)
    if nodes and state.is_deaf:
        # nobody would be left to go on with, and it may be the controller that is cut off: Ray's verdict is waited for
        return [] if was_deaf else [Tell("no host is heard any more: the controller itself may be cut off")]
    if was_deaf:  # the first is heard again, and the others have their time for it
        _begin_anew(state, now)
    for node in nodes:
        host = state.hosts[node]
        silent_s = now - host.heard_at
        if silent_s < (BROKEN_S if state.phase is Phase.ABORTING else SILENT_S):
            continue
        lost = [seen.worker for seen in living if seen.node == node]
        evidence = _waited_for(state, node, now)
        if not evidence and silent_s < UNHEARD_S:
            continue
        host.is_given_up = True
        state.reached = []  # what has taken one host away may have parted others
        why = f"host {host.name} has said nothing for {silent_s:.1f} s{evidence or ' and takes no orders'}"
        effects = _give_up(state, limits, lost, why, now)
        if state.store is not None and state.store[0] == host.address:
            state.store = None
            effects.append(StartStore(f"the rendezvous store was on {host.name}"))
        return effects
    return []


def _begin_anew(state: State, now: float) -> None:
    for host in state.hosts.values():
        host.heard_at = now
    for seen in state.seen.values():
        seen.since, seen.stopped_since = now, None


def _waited_for(state: State, node: str, now: float) -> str:
    """What shows, beside its silence, that a node is away."""
    if state.phase in (Phase.WAITING, Phase.FORMING, Phase.ABORTING):
        return f" while the group is {state.phase.value}"
    others = [
        seen
        for seen in _living(state)
        if seen.node != node
        and seen.where is not None
        and seen.where.phase is TaskPhase.REDUCE
        and not seen.is_mute
        and _is_heard(state, seen, now)
        and now - seen.since >= WAITING_S
    ]
    if not others:
        return ""
    steps = max(seen.where.steps for seen in others if seen.where is not None)
    return f" while {counted(len(others), 'other')} waited for it in a collective of step {steps}"


def _stopped(state: State, limits: Limits, now: float) -> list[Effect]:
    for seen in _living(state):
        if seen.stopped_since is None or not _is_heard(state, seen, now):
            continue
        if now - seen.stopped_since >= STOPPED_S:
            why = f"its process is stopped, for {now - seen.stopped_since:.1f} s{_where(seen)}"
            return _give_up(state, limits, [seen.worker], why, now)
    return []


def _standing(state: State, limits: Limits, now: float) -> list[Effect]:
    if state.phase not in (Phase.RUNNING, Phase.PARKING, Phase.ABORTING, Phase.STOPPING):
        return []
    training = [s for s in _living(state) if membership.stage_of(state, s.worker) is Stage.TRAINING]
    last = min((seen.where.steps for seen in training if seen.where is not None), default=0)
    for seen in training:
        if seen.where is not None and seen.where.steps > last:
            continue  # where a device computes, the host of one that is a step ahead may wait for those behind
        budget = budget_s(seen, limits)
        if budget is None:
            continue
        if not _is_heard(state, seen, now):  # nothing is known of it, and that is another matter
            continue
        recent = [at for at in state.hung_at if now - at < RATE_S]
        budget *= 2 ** len(recent)
        # where a mute worker is now is not where it was: only the time since it told counts
        since = max(seen.since, seen.told_at) if seen.is_mute else seen.since
        if now - since < budget:
            continue
        state.hung_at = [*recent, now]
        how = "while it used the CPU" if seen.is_busy else "and slept"
        why = f"it stood still for {now - since:.1f} s{_where(seen)} {how}; {budget:.1f} s are its budget there"
        others = "; ".join(f"{each.worker}{_where(each)}" for each in _living(state))
        return [Tell(f"standing still: {others}"), *_give_up(state, limits, [seen.worker], why, now, is_hung=True)]
    return []


def _probe(state: State, now: float) -> list[Effect] | None:
    if now < state.probe_at:
        return None
    waiting, warm = _all_wait(state, now), quorum.ready_workers(state)
    if waiting is not None:
        nodes, why = tuple(sorted({seen.node for seen in waiting})), "all members wait for each other in a collective"
    elif nodes := quorum.untried(state, [*state.group, *warm] if state.phase is Phase.RUNNING else warm):
        why = "a host is new to the others"
    elif now >= state.retry_at and (nodes := _apart(state)):
        why = "not all could reach each other before"
    else:
        return None
    state.probe_at = now + ANSWER_S  # the answer is there sooner
    return [ProbeHosts(nodes, why)]


def _apart(state: State) -> tuple[str, ...]:
    """Nodes that could not reach each other, as long as workers live there."""
    used = {seen.node for seen in _living(state)}
    return tuple(sorted({node for pair in state.apart if set(pair) <= used for node in pair}))


def _pairs(state: State, unreachable: tuple[tuple[str, str], ...]) -> str:
    known = [(a, b) for a, b in unreachable if a in state.hosts and b in state.hosts]
    named = {node: f"{host.name} ({host.address})" for node, host in state.hosts.items()}
    return ", ".join(f"{named[a]} and {named[b]}" for a, b in known)


def _all_wait(state: State, now: float) -> list[Seen] | None:
    """The members, when each of them has waited for the others for long; on one host they cannot lose each other."""
    members = membership.members(state)
    seen = [each for each in _living(state) if each.worker in members]
    if state.phase not in (Phase.FORMING, Phase.RUNNING, Phase.PARKING, Phase.STOPPING) or len(seen) < len(members):
        return None
    for each in seen:
        if each.where is None or each.is_mute or each.where.phase not in _FOR_OTHERS or now - each.since < PROBE_S:
            return None
    return seen if len({each.node for each in seen}) > 1 else None


def _patience_s(seen: Seen) -> float:
    """How long an exchange with others may take that reach each other: large models and slow networks take long."""
    where = seen.where
    if where is None or where.phase is not TaskPhase.REDUCE:
        return math.inf  # forming has a bound of its own, and how long the state takes depends on its size
    return max(FLOOR_S[TaskPhase.APPLY], TIMES * where.longest_s) if where.stays >= LEARNED else FIRST_S


# ----


def _give_up(
    state: State, limits: Limits, workers: list[Worker], why: str, now: float, *, is_hung: bool = False
) -> list[Effect]:
    effects: list[Effect] = []
    for worker in workers:
        state.suspected += 1
        effects.extend(membership.lost(state, limits, WorkerLost(worker, why), now))
        effects.append(KillWorker(worker, "its process is ended, should it live", is_hung))
    return effects


def _living(state: State) -> list[Seen]:
    return [seen for _, seen in sorted(state.seen.items()) if membership.stage_of(state, seen.worker) in _LIVING]


def _is_heard(state: State, seen: Seen, now: float) -> bool:
    return now - state.hosts[seen.node].heard_at < SILENT_S


def _where(seen: Seen) -> str:
    if seen.where is None:
        return ""
    when = "after" if seen.is_mute else "in"  # the last that it told
    return f" {when} phase {seen.where.phase.value!r} of step {seen.where.steps}"

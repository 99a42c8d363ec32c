"""What must hold of the machine's state after every event, whatever came before.

Pure. A broken law is a defect of ours, never of a user or a cluster; hence assertions.
"""

from __future__ import annotations

from elastic_trainer.control import membership
from elastic_trainer.control.state import ENDED, IN_GENERATION, MEMBER, Limits, Phase, State
from elastic_trainer.vocabulary import Stage


def check(state: State, limits: Limits) -> None:
    """Raise `AssertionError` when a law is broken."""
    _check_group(state, limits)
    _check_bounds(state, limits)
    for worker_id, each in state.workers.items():
        assert each.worker.worker_id == worker_id
        assert each.stage not in MEMBER or each.worker in state.group, "a member outside the group"


def _check_group(state: State, limits: Limits) -> None:
    assert len(set(state.group)) == len(state.group), "a worker has two ranks"
    least, most = state.formed_with
    assert len(state.group) <= most, "more ranks than allowed"
    assert state.phase in IN_GENERATION or state.phase in ENDED or not state.group, "a group without a generation"
    if state.phase is Phase.RUNNING and not membership.all_done(state):  # then the last save is all that matters
        present = [each for each in state.workers.values() if each.worker in state.group]
        assert all(each.stage in (Stage.TRAINING, Stage.DONE) for each in present), "running with a member missing"
        assert len(present) == len(state.group) >= least, "running below the minimum"


def _check_bounds(state: State, limits: Limits) -> None:
    """Whatever is waited for has a bound."""
    unformed = [each for each in state.workers.values() if each.worker in state.group and not each.formed]
    missing = len(state.group) - sum(each.worker in state.group for each in state.workers.values())
    is_forming = state.phase is Phase.FORMING and (len(unformed) > 0 or missing > 0)
    assert (state.form_until is not None) == is_forming, "forming without a bound"
    is_leaving = state.phase in (Phase.PARKING, Phase.ABORTING, Phase.STOPPING)
    assert (state.leave_until is not None) == is_leaving, "leaving without a bound"
    if state.save is not None:
        holders = [w for w in state.save.copies if membership.stage_of(state, w) is not Stage.GONE]
        assert state.save.is_committing or state.save.until > 0, "a save without a bound"
        assert len(holders) <= len(state.save.ranks), "more copies than ranks"
    placed = sum(each.stage not in (Stage.GONE, Stage.PLACING) for each in state.workers.values())
    had_all = any(each.deaths for each in state.workers.values())
    if state.phase is Phase.WAITING and not state.has_begun and placed < limits.min_workers:
        assert state.place_until is not None or had_all, "placing without a bound"

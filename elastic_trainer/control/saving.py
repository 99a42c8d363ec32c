"""How a save goes: who has a copy, whose part is missing, when it stands and when it is given up.

A save begins with the first rank that reports its copy. Every rank of that generation either makes one too or left
before; when a rank that had a part to write is gone, those with copies divide the whole anew under the next attempt.
Pure functions over the state.
"""

from __future__ import annotations

from elastic_trainer.control import events as e
from elastic_trainer.control import membership
from elastic_trainer.control.effects import CommitSave, Effect, SettleSave, Tell, WritePieces
from elastic_trainer.control.state import Limits, Save, State
from elastic_trainer.vocabulary import SavedStep, Stage, Token, Worker

KEPT = 16  # saved steps that a resumption may try; far more than ever fail to verify


def began(state: State, limits: Limits, event: e.SaveBegan, now: float) -> list[Effect]:
    """A rank has its copy."""
    if membership.of(state, event.worker) is None:
        return []
    save = state.save
    is_older = save is not None and (event.token, event.steps) < (save.token, save.steps)
    ranks = list(state.group or state.last_group)
    if _is_settled(state, event.steps, event.token) or is_older or not ranks:
        # its copy came after all others were told: nobody else would free it
        return [SettleSave(event.steps, event.token, (event.worker,), "it was settled before")]
    effects: list[Effect] = []
    if save is None or (save.steps, save.token) != (event.steps, event.token):
        if save is not None and save.is_committing:  # its parts are written, so its copies are not needed any more
            effects = _settle(state, save, "a newer one began")
        elif save is not None:  # its copies are gone: a rank makes another only when the last one is settled
            effects = _give_up(state, "a newer one began")
        state.save = save = Save(event.steps, event.token, ranks, list(ranks), until=now + limits.save_s)
    if event.worker not in save.copies:
        save.copies.append(event.worker)
    return effects


def written(state: State, event: e.PiecesWritten) -> None:
    """A rank's part is in the store."""
    save = _present(state, event.token, event.steps)
    if save is not None and save.attempt == event.attempt and event.worker not in save.written:
        save.written.append(event.worker)


def failed(state: State, limits: Limits, event: e.PiecesFailed | e.SaveFailed) -> list[Effect]:
    """A part could not be written, or the whole could not be made to stand."""
    if isinstance(event, e.SaveFailed):
        _is_known(state, event.token, event.steps)
    save = _present(state, event.token, event.steps)
    if save is None or (isinstance(event, e.PiecesFailed) and event.attempt != save.attempt):
        return []
    save.failures += 1
    if save.failures >= (limits.tries if state.is_ending else 1):
        return _give_up(state, event.detail)
    return _write_again(state, save, event.detail)


def stands(state: State, event: e.StepSaved) -> list[Effect]:
    """A save is part of the run's history."""
    _is_known(state, event.token, event.saved.steps)
    others = [each for each in state.saved if each.path != event.saved.path]
    state.saved = [*others[-KEPT + 1 :], event.saved]
    save = _present(state, event.token, event.saved.steps)
    if save is None:
        return []
    return _settle(state, save, f"step {save.steps} saved")


def forget_beyond(state: State, steps: int) -> None:
    """The run has gone back to `steps`: what was saved beyond is no longer its history."""
    state.saved = [each for each in state.saved if each.steps <= steps]


def next_effects(state: State) -> list[Effect] | None:
    """What the save in flight calls for now."""
    save = state.save
    if save is None or save.is_committing:
        return None
    if any(_may_still_copy(state, save, worker) for worker in save.ranks):
        return None
    holders = _holders(state, save)
    lost = [worker for worker in save.writers if worker not in save.written and worker not in holders]
    if lost and not holders:
        return _give_up(state, f"{', '.join(map(str, lost))} left, and nobody else has a copy")
    if lost:
        return _write_again(state, save, f"{', '.join(map(str, lost))} left before its part was written")
    if len(save.written) == len(save.writers):
        save.is_committing = True
        state.unknown.append((save.token, save.steps))
        return [CommitSave(save.steps, save.token, save.attempt, f"every part of step {save.steps} is written")]
    return None


def time_passed(state: State, limits: Limits, now: float) -> list[Effect]:
    """Gives up a save that takes too long."""
    if state.save is None or now < state.save.until or (state.save.is_committing and not state.is_ending):
        return []  # whether it stands becomes known; until then nothing may be taken for lost
    return _give_up(state, f"it took longer than {limits.save_s:g} s")


def is_saved(state: State, steps: int) -> bool:
    """Whether the state after so many steps is part of the run's history."""
    return any(each.steps >= steps for each in state.saved)


def sources(state: State, best: int | None) -> tuple[SavedStep, ...]:
    """What a generation is restored from whose most advanced member has done `best` steps, the newest first."""
    return tuple(each for each in reversed(state.saved) if best is None or each.steps > best)


def _is_known(state: State, token: Token, steps: int) -> None:
    state.unknown = [each for each in state.unknown if each != (token, steps)]


def _present(state: State, token: Token, steps: int) -> Save | None:
    save = state.save
    return save if save is not None and (save.steps, save.token) == (steps, token) else None


def _is_settled(state: State, steps: int, token: Token) -> bool:
    return state.settled is not None and (token, steps) <= state.settled


def _may_still_copy(state: State, save: Save, worker: Worker) -> bool:
    if worker in save.copies or save.token != state.token:
        return False
    # who is done has copied what it will: its last save comes before it says so
    return membership.stage_of(state, worker) in (Stage.JOINING, Stage.TRAINING)


def _holders(state: State, save: Save) -> list[Worker]:
    return [worker for worker in save.copies if membership.stage_of(state, worker) is not Stage.GONE]


def _write_again(state: State, save: Save, why: str) -> list[Effect]:
    save.attempt += 1
    save.writers = sorted(_holders(state, save))
    save.written, save.is_committing = [], False
    if not save.writers:
        return _give_up(state, why)
    return [WritePieces(save.steps, save.token, save.attempt, tuple(save.writers), why)]


def _give_up(state: State, why: str) -> list[Effect]:
    save = state.save
    assert save is not None
    state.saves_failed += 1
    told: list[Effect] = [Tell(f"step {save.steps} could not be saved, training goes on: {why}")]
    return told + _settle(state, save, why)


def _settle(state: State, save: Save, reason: str) -> list[Effect]:
    state.save = None
    state.settled = (save.token, save.steps)
    return [SettleSave(save.steps, save.token, tuple(_holders(state, save)), reason)]

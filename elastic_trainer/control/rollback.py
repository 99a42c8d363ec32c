"""Steps in a row whose loss or gradient was not finite: the run goes back, once, and leaves them out on the way.

Pure functions over the state.
"""

from __future__ import annotations

from elastic_trainer.control import events as e
from elastic_trainer.control.effects import Effect, KillWorker
from elastic_trainer.control.membership import end, fault
from elastic_trainer.control.state import Limits, Phase, State
from elastic_trainer.vocabulary import NO_GENERATION, Rollback, RunStatus, SavedStep, Stage


def begin(state: State, limits: Limits, event: e.StepsSkipped, now: float) -> list[Effect]:
    """Go back to the newest saved step when it was enough of them."""
    is_due = limits.rollback_after is not None and len(event.steps) >= limits.rollback_after
    if not is_due or event.token != state.token or state.phase not in (Phase.RUNNING, Phase.PARKING):
        return []
    why = f"the loss or a gradient was not finite in steps {', '.join(map(str, event.steps))}"
    remedy = "The events of the run name their samples; look at these, at the learning rate and at the precision."
    # what was saved after the first of them stands where they have led
    good = [saved for saved in state.saved if saved.steps <= event.steps[0]]
    if not good:
        return end(state, RunStatus.FAILED, f"{why}, and nothing was saved to go back to. {remedy}")
    newest = good[-1]
    before = state.rollback
    if before is not None and before.path == newest.path:
        return end(
            state,
            RunStatus.FAILED,
            f"{why}, although the run had gone back to step {newest.steps} and left steps "
            f"{', '.join(map(str, before.skipped))} out. {remedy}",
        )
    skipped = {*event.steps, *(before.skipped if before else ())}
    state.rollback = Rollback(newest.path, newest.steps, NO_GENERATION, tuple(sorted(skipped)))
    state.rolls_back = True
    return fault(state, limits, f"{why}: back to step {newest.steps}, to leave them out on the way", now)


def sources(state: State) -> tuple[SavedStep, ...]:
    """What the run goes back to: the saved step that was chosen, else older ones; the newest first."""
    assert state.rollback is not None
    return tuple(saved for saved in reversed(state.saved) if saved.steps <= state.rollback.steps)


def void_state(state: State) -> list[Effect]:
    """Nothing that a worker holds counts any more, and what a task carries into its next attempt does not either."""
    effects: list[Effect] = []
    for each in state.workers.values():
        if each.holds is not None and each.stage in (Stage.FAULTY, Stage.STARTING):
            each.stage = Stage.STARTING  # until its death is reported
            effects.append(KillWorker(each.worker, "what it holds is from before the run went back"))
        each.holds = None
    return effects

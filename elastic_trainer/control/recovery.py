"""What a failure of the task or a death means: try again, back off, or end the run.

Pure. Only a user's exception that comes back without progress, or at first start on every rank, ends a run; deaths by
signal back off and never do, unless the system says that memory ran out.
"""

from __future__ import annotations

from elastic_trainer.control.events import TaskFailed
from elastic_trainer.control.state import Limits, State, Tries
from elastic_trainer.vocabulary import Stage

OUT_OF_MEMORY = ("memory", "OutOfMemory", "kernel")
RESTORE = ("restore", "NotRestored", "storage")


def record_try(state: State, signature: tuple[str, str, str], round_name: str) -> int:
    """Count one more round of a failure; returns the rounds since the run last made progress."""
    state.tries = [each for each in state.tries if each.done == state.done]
    for each in state.tries:
        if each.signature == signature:
            break
    else:
        each = Tries(signature, state.done)
        state.tries.append(each)
    if round_name not in each.rounds:
        each.rounds.append(round_name)
    return len(each.rounds)


def round_of(event: TaskFailed) -> str:
    """The same for all ranks that fail in one generation, or in the same attempt to build."""
    return f"generation {event.token}" if event.token else f"attempt {event.attempt} of {event.worker.incarnation}"


def failed_everywhere_at_first(state: State) -> bool:
    """Whether, before any step was done, every worker that has a process stopped at an exception of the task."""
    running = [each for each in state.workers.values() if each.stage not in (Stage.GONE, Stage.PLACING)]
    return state.done == 0 and len(running) > 0 and all(each.stage is Stage.FAULTY for each in running)


def delay_before_restart(deaths: int, limits: Limits) -> float:
    """Seconds to wait before a process that died `deaths` times in a row is started again."""
    return limits.backoff_s[min(deaths, len(limits.backoff_s) - 1)]


def delay_before_forming(failed_forms: int, limits: Limits) -> float:
    """Seconds to wait after formations that failed in a row with nobody lost."""
    return max(limits.coalesce_s, limits.backoff_s[min(failed_forms, len(limits.backoff_s) - 1)])

"""A worker's main thread: enter the user's task, tell the controller how it went, and enter it again when ordered."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from collections.abc import Callable

from elastic_trainer.control.effects import EndRun, RunTaskAgain
from elastic_trainer.control.events import Failure, TaskFailed, TaskPhase
from elastic_trainer.errors import ElasticTrainerError, TaskError
from elastic_trainer.training.device import check_gpu, is_lost
from elastic_trainer.training.held_state import CarriedState
from elastic_trainer.training.mailbox import Mailbox
from elastic_trainer.training.process_group import ProcessGroupBackend
from elastic_trainer.training.randomness import seed_everything, stream
from elastic_trainer.training.run import NEVER_S, Run, RunEnded
from elastic_trainer.training.saver import Saver
from elastic_trainer.training.settings import TrainSettings
from elastic_trainer.training.task import TrainFunction, TrainTask
from elastic_trainer.vocabulary import Worker

EXIT_DEVICE_LOST = 73
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LIBRARIES = (_OURS, sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"], "<frozen")


def work(
    load: Callable[[], TrainTask | TrainFunction],
    worker: Worker,
    settings: TrainSettings,
    mailbox: Mailbox,
    backend: ProcessGroupBackend,
) -> None:
    """Run the task until the run ends; a task that raises is entered again in this process when ordered."""
    mailbox.on_abort(backend.abort)
    saver = Saver(worker, settings, mailbox)
    carried: CarriedState | None = None
    attempt = 0
    while True:
        run = Run(worker, settings, mailbox, backend, saver=saver, attempt=attempt, carried=carried)
        carried = None  # the run has it, and lets go of it once it is restored
        try:
            with backend.device.scope():
                _enter(load, run)
            return
        except RunEnded:
            return
        except (Exception, SystemExit) as error:
            carried = _report(error, run)
        finally:
            run.close()
        if not _await_another_try(mailbox):
            return
        attempt += 1


def _enter(load: Callable[[], TrainTask | TrainFunction], run: Run) -> None:
    seed_everything(stream(run.settings.seed))  # what the task builds is the same in every process
    check_gpu(run.settings.gpus)
    task = load()
    if isinstance(task, TrainTask):
        task.train(run)
    else:
        task(run)
    if not run.has_ended:
        raise TaskError(
            "the training function returned before the run's last step. Go through all of run.steps(), without break."
        )


def _report(error: BaseException, run: Run) -> CarriedState | None:
    token = run.token if run.is_in_group else None
    failure = describe(error, run.position.phase)
    run.backend.abort()  # first: the peers are waiting in a collective
    frames, error.__traceback__ = error.__traceback__, None
    if frames is not None:
        traceback.clear_frames(frames)
    if is_lost(run.backend.device):
        token = run.token if run.is_in_group else None
        run.mailbox.report(TaskFailed(run.worker, run.attempt, token, run.steps_done, None, failure))
        _await_another_try(run.mailbox)  # so the controller knows the error
        # what this process can have of the device is over, and freeing it may not return
        print(f"worker {run.worker} ends, its device fails for good in this process", file=sys.stderr, flush=True)
        os._exit(EXIT_DEVICE_LOST)
    carried = run.carry()
    steps, holds = run.steps_done, carried.steps if carried else None
    run.close()
    run.mailbox.report(TaskFailed(run.worker, run.attempt, token, steps, holds, failure))
    return carried


def _await_another_try(mailbox: Mailbox) -> bool:
    while True:
        order = mailbox.take(NEVER_S)
        if isinstance(order, RunTaskAgain | EndRun):
            return isinstance(order, RunTaskAgain)


def describe(error: BaseException, phase: TaskPhase) -> Failure:
    """A user's exception as data; the traceback begins where the user's code does."""
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    innermost = (users or frames or [traceback.FrameSummary("?", 0, "?")])[-1]
    shown = frames[frames.index(users[0]) :] if users else frames[-1:]
    if isinstance(error, ElasticTrainerError):
        shown = users  # what follows is how we found out
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(shown)]
    lines += traceback.format_exception_only(error)
    text = "".join(lines).rstrip()
    if hint := _hint(error):
        text += f"\n{hint}"
    return Failure(phase, type(error).__name__, f"{innermost.filename}:{innermost.lineno}", text)


def _hint(error: BaseException) -> str | None:
    if isinstance(error, ValueError) and "more than 1 value per channel" in str(error):
        return (
            "A batch-norm met a micro-batch of a single row. Use a micro_batch of at least 2, and for the short last "
            "step of an epoch data.drop_last: true, or a number of rows that leaves no single one over."
        )
    return None

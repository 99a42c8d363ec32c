"""When a worker saves, and how it gets saved state back: between the run's loop and `checkpoint/`.

All ranks save after the same step: each says in the rider whether a save is due and whether its last copy is still
needed, and what the sums say is what all do.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from elastic_trainer.checkpoint import reader
from elastic_trainer.checkpoint.layout import Layout, TensorInfo
from elastic_trainer.checkpoint.manifest import Manifest
from elastic_trainer.checkpoint.writer import Writer
from elastic_trainer.control.effects import SaveGeneration, SettleSave, WritePieces
from elastic_trainer.control.events import TaskPhase
from elastic_trainer.errors import Damaged, StorageError
from elastic_trainer.storage.object_store import ObjectStore
from elastic_trainer.training.mailbox import Mailbox, SaveOrder
from elastic_trainer.training.rider import Rider
from elastic_trainer.training.settings import TrainSettings
from elastic_trainer.training.state import RegisteredState, assemble, describe
from elastic_trainer.vocabulary import SavedStep, Token, Worker

EXIT_IN_DOUBT = 72


def versions() -> dict[str, str]:
    """What a checkpoint was written by."""
    return {
        "elastic_trainer": importlib.metadata.version("elastic-trainer"),
        "torch": str(torch.__version__),  # of a class of its own, which would bring torch into every reader
        "python": platform.python_version(),
    }


@dataclass(frozen=True)
class Place:
    """Where in the run a save is made."""

    steps: int
    token: Token
    evaluated_at: int
    rank: int
    world_size: int


class Saver:
    """Saving and restoring of one worker process; it outlives the attempts at the task."""

    def __init__(self, worker: Worker, settings: TrainSettings, mailbox: Mailbox) -> None:
        self._settings = settings
        self._worker = worker
        self._position = mailbox.position
        self._writer = Writer(worker, settings.open_store, mailbox.report, versions())
        self._is_latched = False
        self._is_agreed = False
        self._since = time.monotonic()
        self._was_late = False
        mailbox.on_save(self._obey)

    # ---- saving

    @property
    def is_busy(self) -> bool:
        """Whether the copy of the last save is still needed."""
        return self._writer.is_busy

    def is_due(self, steps: int) -> bool:
        """Whether this rank finds that the state after `steps` steps should be saved; stays so until it is."""
        settings = self._settings
        if steps < settings.steps:  # at the end there is a save anyway
            every_s = settings.save_every_s
            by_time = every_s is not None and time.monotonic() - self._since >= every_s
            self._is_latched = self._is_latched or settings.save_is_due(steps) or by_time
        return self._is_latched

    def agree(self, total: Rider) -> bool:
        """Take what all ranks said; returns True when a due save had to wait, once for each."""
        self._is_agreed = total.save > 0 and total.busy == 0
        waits = total.save > 0 and total.busy > 0 and not self._was_late
        self._was_late = total.save > 0 and total.busy > 0
        return waits

    def forget_agreement(self) -> None:
        """What a generation agreed on and did not come to is due still, and the next one agrees on it anew."""
        self._is_agreed = False

    @property
    def is_agreed(self) -> bool:
        """Whether the ranks agreed to save after this step."""
        return self._is_agreed

    def save(self, state: RegisteredState, place: Place) -> None:
        """Copy and begin to write."""
        self._begin(state, place)

    def save_last(self, state: RegisteredState, place: Place, check: Callable[[], None]) -> None:
        """Save a state behind which none follows, after the save in flight; `check` may raise to give it up."""
        deadline = time.monotonic() + self._settings.save_s
        self._position.enter(TaskPhase.UPLOAD)
        while self._writer.is_busy and time.monotonic() < deadline:
            self._writer.await_idle(0.05)
            check()
        if not self._writer.is_busy:
            self._begin(state, place)

    def _begin(self, state: RegisteredState, place: Place) -> None:
        self._position.enter(TaskPhase.SAVE)
        described = describe(state.collect())
        layout = Layout(
            tuple(
                TensorInfo(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
                for name, tensor in zip(described.names, described.tensors, strict=True)
            )
        )
        self._is_latched = self._is_agreed = False
        self._since = time.monotonic()
        self._writer.begin(
            place.steps,
            place.token,
            place.evaluated_at,
            layout,
            described.tensors,
            described.description,
            part=place.rank,
            parts=place.world_size,
        )

    def _obey(self, order: SaveOrder) -> None:
        match order:
            case SaveGeneration():
                self._is_latched = True
            case WritePieces() if self._worker in order.writers:
                part = order.writers.index(self._worker)
                self._writer.write_again(order.steps, order.token, order.attempt, part, len(order.writers))
            case SettleSave():
                self._writer.settle(order.steps, order.token)
            case _:
                pass

    # ---- restoring

    def restore(
        self, sources: tuple[SavedStep, ...], state: RegisteredState, check: Callable[[], None]
    ) -> tuple[Manifest | None, list[str]]:
        """Put the first of `sources` that verifies into the state.

        Returns:
            Its manifest, None when there is none; and what is wrong with those before it.
        """
        problems = []
        for source in sources:
            try:
                store = self._settings.open_store()
                manifest = restore_from(store, source, state, check)
            except reader.MemoryInDoubt as error:
                print(f"worker {self._worker} ends, its memory is in doubt: {error}", file=sys.stderr, flush=True)
                os._exit(EXIT_IN_DOUBT)  # an ordinary loss of a process is better than a model that changes by itself
            except Damaged as error:
                problems.append(f"step {source.steps}: {error}")
                continue
            except StorageError as error:
                # a store that does not answer now has lost nothing: an older step would throw this one away
                return None, [*problems, f"step {source.steps}: {error}"]
            return manifest, problems
        return None, problems


def restore_from(store: ObjectStore, source: SavedStep, state: RegisteredState, check: Callable[[], None]) -> Manifest:
    """Read a saved step straight into the registered tensors, and into new ones where there are none yet.

    Raises:
        StorageError: It does not verify; the state may then be half overwritten.
        TaskError: It does not fit what is registered.
    """
    manifest = reader.load_manifest(store, source)
    present = describe(state.collect())
    known = dict(zip(present.names, present.tensors, strict=True))
    targets = [_target(info, known.get(info.name)) for info in manifest.layout.tensors]
    reader.restore(store, manifest, targets, check)
    state.restore(assemble(manifest.state, targets))
    return manifest


def _target(info: TensorInfo, present: torch.Tensor | None) -> torch.Tensor:
    dtype: Any = getattr(torch, info.dtype)
    fits = (
        present is not None
        and present.dtype == dtype
        and tuple(present.shape) == info.shape
        and present.is_contiguous()
        and present.device.type == "cpu"
    )
    return present if present is not None and fits else torch.empty(info.shape, dtype=dtype)

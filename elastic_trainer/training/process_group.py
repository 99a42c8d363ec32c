"""What a generation needs of a process-group backend: form, reduce, abort from any thread, destroy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from elastic_trainer.training.device import Device
from elastic_trainer.vocabulary import Token


class Pending(Protocol):
    """A collective that was launched."""

    def wait(self) -> None:
        """Until whatever is computed next finds its result; where the device runs behind the host, it may be garbage.

        Raises:
            CollectiveFailed: The group was aborted meanwhile.
            RuntimeError: The backend's own error.
        """

    def wait_on_host(self) -> None:
        """Until its result has arrived and can be read here.

        Raises:
            CollectiveFailed: The group was aborted meanwhile.
            RuntimeError: The backend's own error.
        """

    def is_completed(self) -> bool:
        """Whether nothing will read or write its tensors any more."""


class ProcessGroupBackend(Protocol):
    """The group of one worker process; at most one stands at a time, as torch's default group.

    Attributes:
        device: On which its collectives run. Tensors that lie elsewhere may be given all the same, where what comes
            back is waited for on the host.
        is_broken: Whether the group was aborted since it was formed.
    """

    device: Device
    is_broken: bool

    def form(
        self,
        token: Token,
        rank: int,
        world_size: int,
        store: tuple[str, int],
        is_superseded: Callable[[], bool],
    ) -> None:
        """Form the group of a generation within the backend's bound.

        Args:
            token: Names the generation; every member passes the same.
            rank: Of the calling process.
            world_size: Ranks of the generation.
            store: Host and port of the rendezvous store.
            is_superseded: Asked while waiting for peers; True gives the formation up.

        Raises:
            CollectiveFailed: Not formed in time, superseded, or a peer is gone. Nothing is left of the attempt.
        """

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        """Sum `tensor` over all ranks, in place."""

    def broadcast(self, tensor: torch.Tensor, source: int) -> Pending:
        """Give every rank the `tensor` of rank `source`."""

    def all_gather(self, tensors: list[torch.Tensor], tensor: torch.Tensor) -> Pending:
        """Give every rank the `tensor` of each, by rank."""

    def abort(self) -> None:
        """Make every pending and later collective of the group fail at once. Callable from any thread, repeatable."""

    def destroy(self) -> None:
        """Free what the group holds; afterwards the next one can be formed. Main thread only."""

    def is_collective_error(self, error: BaseException) -> bool:
        """Whether `error` came from a collective of this backend and not from the user's own code."""

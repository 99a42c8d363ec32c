"""Whether a step is complete, decided on the device: for devices that run behind the host.

After an abort what is queued on a device goes on, with garbage in the place of what did not arrive. So behind the last
collective of a step goes one more element, on the same communicator. Every rank sends the same number, another one in
each step, so that the sum is what it must be only where every rank came so far and everything before it arrived: half a
sum, or what is left of an earlier step in some buffer, is something else. The update of the step depends on it, and so
does the count of done steps that lies on the device.
"""

from __future__ import annotations

import torch

from elastic_trainer.errors import CollectiveFailed
from elastic_trainer.training.process_group import Pending, ProcessGroupBackend


class Gate:
    """The verdicts of one generation.

    Args:
        backend: Of the group.
        world_size: Its ranks.
        steps: Done steps at the generation's start.

    Attributes:
        count: float64, shape (1,): done steps, as the device knows them.
        is_open: Whether steps are judged on the device.
    """

    def __init__(self, backend: ProcessGroupBackend, world_size: int, steps: int) -> None:
        self._backend = backend
        self._world_size = world_size
        device = backend.device.torch_device
        self._arrived = torch.zeros(1, dtype=torch.float64, device=device)
        self.count = torch.tensor([steps], dtype=torch.float64, device=device)
        self.is_open = True
        self._work: Pending | None = None
        self._expected = 0.0

    def close(self) -> None:
        """Decide on the host from now on: the task changes state behind the update, where no verdict reaches it."""
        self.is_open = False

    def launch(self, step: int) -> None:
        """Send the element, behind all other collectives of the step.

        A rank on which the step before is not complete has computed with other weights than it should have, which only
        its device knows: what it sends makes the step incomplete everywhere.
        """
        number = float(step + 1)  # exact, and so are its multiples
        self._expected = self._world_size * number
        self._arrived.fill_(number)
        self._arrived.masked_fill_(self.count != float(step), float("nan"))
        self._work = self._backend.all_reduce(self._arrived)

    def verdict(self) -> torch.Tensor:
        """Bool, shape (1,), for what comes after on the device: everything has arrived."""
        assert self._work is not None
        self._work.wait()
        self._work = None
        return self._arrived == self._expected

    def confirm(self) -> None:
        """Wait on the host until everything has arrived.

        Raises:
            CollectiveFailed: It has not.
        """
        assert self._work is not None
        self._work.wait_on_host()
        self._work = None
        if float(self._arrived) != self._expected:
            raise CollectiveFailed("a collective ended without having arrived: a peer has given up")

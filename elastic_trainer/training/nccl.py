"""NCCL behind `ProcessGroupBackend`, which is RCCL's name too: collectives that the host does not wait for.

What differs from gloo, by NCCL's and torch's documentation: a collective is put on the device and `wait()` only orders
what comes after it there; a peer that is gone makes it hang, without an error; an abort lets it end as if it had
succeeded, with garbage; and a group with work in flight can be aborted, not destroyed. So the host never waits inside
a call: it looks at events, and up from them at the flag that an abort sets before anything can have become garbage.
What the device does with garbage meanwhile is `gate.py`'s.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence

import torch
import torch._dynamo
import torch.distributed as dist
from torch.distributed.distributed_c10d import _abort_process_group

from elastic_trainer.errors import CollectiveFailed
from elastic_trainer.training.device import Device, Fetched
from elastic_trainer.training.rendezvous import Rendezvous
from elastic_trainer.vocabulary import Token

POLL_S = 0.0002  # between two looks at an event: small beside any step, and no core is kept busy


def prepare_environment(interface: str | None) -> None:
    """Set what NCCL and torch read once, when the first group is formed."""
    if interface is not None:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    # what ends a process because a collective takes long is not wanted: who is gone is known otherwise, and sooner
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    os.environ["TORCH_NCCL_ENABLE_MONITORING"] = "0"
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "0"


class NcclPending:
    """A collective on NCCL.

    Args:
        work: torch's.
        staged: (tensor of the caller, where it lies on the device) of those that lie elsewhere and get a result.
        tensors: On the device; an operation that is left behind may still write to them.
        backend: Its own.
    """

    def __init__(
        self,
        work: dist.Work,
        staged: Sequence[tuple[torch.Tensor, torch.Tensor]],
        tensors: Sequence[torch.Tensor],
        backend: NcclBackend,
    ) -> None:
        self._work = work
        self._staged = staged
        self._tensors = tensors
        self._backend = backend

    def wait(self) -> None:
        """See `Pending.wait`."""
        assert not self._staged, "a tensor on the host is waited for on the host"
        self._work.wait()

    def wait_on_host(self) -> None:
        """See `Pending.wait_on_host`."""
        self._work.wait()
        copies = [self._backend.device.fetch(there) for _, there in self._staged]
        self._backend.await_device(copies or [self._backend.device.fetch(self._tensors[0].reshape(-1)[:1])])
        for (here, _), copy in zip(self._staged, copies, strict=True):
            here.copy_(copy.value())

    def is_completed(self) -> bool:
        """See `Pending.is_completed`."""
        return self._work.is_completed()


class NcclBackend:
    """One worker's NCCL groups, one after the other.

    Args:
        run_name: Separates the runs that might share a store.
        form_s: Bound of a formation.
        collective_s: Bound of a wait of the host for the device; faults are told by orders long before.
        device: This process's own.
        name: Of the backend in torch.
    """

    def __init__(
        self, run_name: str, form_s: float, collective_s: float, device: Device, *, name: str = "nccl"
    ) -> None:
        self.device: Device = device
        self.is_broken = False
        self._rendezvous = Rendezvous(run_name, form_s)
        self._collective_s = collective_s
        self._name = name

    def form(
        self,
        token: Token,
        rank: int,
        world_size: int,
        store: tuple[str, int],
        is_superseded: Callable[[], bool],
    ) -> None:
        """See `ProcessGroupBackend.form`.

        A peer that dies while the communicator is made leaves this process in a call that nothing ends: it is then
        ended from outside, as a worker that does not leave in time, and replaced.
        """
        self.is_broken = False
        on_gpu = self.device.torch_device.type == "cuda"
        try:
            arrival = self._rendezvous.arrive(token, rank, world_size, store, is_superseded)
            dist.init_process_group(
                self._name,
                store=arrival.store,
                rank=rank,
                world_size=world_size,
                timeout=arrival.left,
                device_id=self.device.torch_device if on_gpu else None,  # made now, not by the first collective
            )
        except (RuntimeError, CollectiveFailed) as error:
            self.abort()
            self.destroy()
            if not is_superseded():
                self._rendezvous.forget_store()
            raise CollectiveFailed(f"generation {token} could not be formed: {error}") from None

    def all_reduce(self, tensor: torch.Tensor) -> NcclPending:
        """See `ProcessGroupBackend.all_reduce`."""
        there = self._there(tensor)
        return self._launched(dist.all_reduce(there, async_op=True), [(tensor, there)])

    def broadcast(self, tensor: torch.Tensor, source: int) -> NcclPending:
        """See `ProcessGroupBackend.broadcast`."""
        there = self._there(tensor)
        return self._launched(dist.broadcast(there, source, async_op=True), [(tensor, there)])

    def all_gather(self, tensors: list[torch.Tensor], tensor: torch.Tensor) -> NcclPending:
        """See `ProcessGroupBackend.all_gather`."""
        pairs = [(each, self._there(each)) for each in tensors]
        work = dist.all_gather([there for _, there in pairs], self._there(tensor), async_op=True)
        return self._launched(work, pairs)

    def await_device(self, copies: Sequence[Fetched]) -> None:
        """Until all of these have come from the device.

        Raises:
            CollectiveFailed: The group was aborted: they may be garbage.
            RuntimeError: The device is lost.
        """
        deadline = time.monotonic() + self._collective_s
        while not all(copy.is_there() for copy in copies):
            self._raise_if_broken()
            if time.monotonic() > deadline:
                raise CollectiveFailed(f"the device did not come to it within {self._collective_s:g} s")
            time.sleep(POLL_S)
        self._raise_if_broken()  # set before an abort begins: what came without it is whole

    def abort(self) -> None:
        """See `ProcessGroupBackend.abort`."""
        self.is_broken = True
        group = dist.group.WORLD
        if group is not None:
            # in a thread of its own: it does not return where the communicator is still being made
            threading.Thread(target=_abort, args=(group,), name="abort", daemon=True).start()

    def destroy(self) -> None:
        """See `ProcessGroupBackend.destroy`."""
        if not dist.is_initialized():
            return
        if self.is_broken:
            _abort_process_group()
        else:
            dist.destroy_process_group()

    def is_collective_error(self, error: BaseException) -> bool:
        """See `ProcessGroupBackend.is_collective_error`."""
        # of an aborted group every call raises; a device that is lost has an error of its own type
        return isinstance(error, dist.DistError) or (self.is_broken and type(error) is RuntimeError)

    def _raise_if_broken(self) -> None:
        if self.is_broken:
            raise CollectiveFailed("the group was aborted")

    def _there(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device.torch_device)

    def _launched(self, work: dist.Work | None, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> NcclPending:
        assert work is not None
        staged = [(here, there) for here, there in pairs if here is not there]
        return NcclPending(work, staged, [there for _, there in pairs], self)


def _abort(group: dist.ProcessGroup) -> None:
    try:
        group.abort()
    except RuntimeError:
        return  # it is gone already

"""Where a worker computes, and how its batches get there: out of pinned memory, while it computes the one before.

torch calls AMD's GPUs cuda too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Protocol

import torch

from elastic_trainer.errors import TaskError
from elastic_trainer.training.batches import Batch


class Fetched(Protocol):
    """A tensor on its way from the device to the host."""

    def is_there(self) -> bool:
        """Whether the device has come to it.

        Raises:
            RuntimeError: The device is lost.
        """

    def value(self) -> torch.Tensor:
        """On the CPU; once it is there."""


class Device(Protocol):
    """What computes, maybe some steps behind the host that gives it its work.

    Attributes:
        torch_device: Its name for torch.
        ahead: How many steps the host may give out before it has seen the first of them done.
    """

    torch_device: torch.device
    ahead: int

    def scope(self) -> contextlib.AbstractContextManager[object]:
        """In which a thread's operations run on it."""

    def fetch(self, tensor: torch.Tensor) -> Fetched:
        """A copy of what `tensor` will be when the device has come so far; stops neither of them."""

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """A small tensor of the host on the device; does not wait for what that has to do before."""

    def synchronize(self) -> None:
        """Until the device has done all that it was given.

        Raises:
            RuntimeError: It is lost.
        """


class _AtOnce:
    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def is_there(self) -> bool:
        return True

    def value(self) -> torch.Tensor:
        return self._tensor


class Host:
    """The CPU, which is never behind."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self.ahead = 0

    def scope(self) -> contextlib.AbstractContextManager[object]:
        """See `Device.scope`."""
        return contextlib.nullcontext()

    def fetch(self, tensor: torch.Tensor) -> Fetched:
        """See `Device.fetch`."""
        return _AtOnce(tensor)

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Device.upload`."""
        return tensor

    def synchronize(self) -> None:
        """See `Device.synchronize`."""


class _OnItsWay:
    def __init__(self, tensor: torch.Tensor) -> None:
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def is_there(self) -> bool:
        return bool(self._event.query())

    def value(self) -> torch.Tensor:
        return self._host


class Gpu:
    """A GPU, by CUDA or ROCm."""

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self.ahead = 2  # one step is computed, the next one lies ready, and the host makes the third

    def scope(self) -> contextlib.AbstractContextManager[object]:
        """See `Device.scope`."""
        return torch.cuda.device(self.torch_device)

    def fetch(self, tensor: torch.Tensor) -> Fetched:
        """See `Device.fetch`."""
        return _OnItsWay(tensor)

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Device.upload`."""
        return tensor.pin_memory().to(self.torch_device, non_blocking=True)

    def synchronize(self) -> None:
        """See `Device.synchronize`."""
        torch.cuda.synchronize(self.torch_device)


def is_lost(device: Device) -> bool:
    """Whether the device fails for good in this process, as after a fault in a kernel; its groups are aborted."""
    try:
        device.synchronize()
    except RuntimeError:
        return True
    return False


def check_gpu(gpus: float) -> None:
    """A worker to which Ray gave a GPU must see it.

    Raises:
        TaskError: torch sees none.
    """
    if gpus and not torch.cuda.is_available():
        raise TaskError(
            f"scaling.resources_per_worker has GPU: {gpus:g}, and torch {torch.__version__} sees no GPU in the worker. "
            "Install a build of torch for this GPU on all nodes, or leave GPU out."
        )


class BatchCopies:
    """Copies batches to a device without stopping host or device; on the CPU there is nothing to copy.

    A batch is copied on a stream of its own as soon as the host asks for it. The host is ahead of the device, so the
    copy goes on beside the backward of the micro-batch before; what computes on the batch waits for it on the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def pinned(self, batch: Batch) -> Batch:
        """The batch in memory from which it can be copied asynchronously."""
        return batch if self._stream is None else _mapped(batch, lambda t: t.pin_memory() if t.is_cpu else t)

    def on_device(self, batch: Batch) -> Batch:
        """A pinned batch on the device, for the present stream."""
        if self._stream is None:
            return batch
        present = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            copied = _mapped(batch, lambda tensor: tensor.to(self._device, non_blocking=True))
        present.wait_stream(self._stream)
        for value in copied.values():
            if isinstance(value, torch.Tensor):
                value.record_stream(present)  # its memory was taken on the other stream
        return copied


def _mapped(batch: Batch, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
    mapped = Batch({name: change(value) if isinstance(value, torch.Tensor) else value for name, value in batch.items()})
    mapped.rows, mapped.sample_ids = batch.rows, batch.sample_ids
    return mapped

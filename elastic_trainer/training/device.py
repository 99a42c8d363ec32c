"""Where a worker computes, and how its batches get there: out of pinned memory, while it computes the one before.

torch calls AMD's GPUs cuda too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from elastic_trainer.errors import TaskError
from elastic_trainer.training.batches import Batch


def device_of(gpus: float) -> torch.device:
    """The device of a worker to which Ray gave so many GPUs; Ray shows a process only its own, so it is the first.

    Raises:
        TaskError: Ray gave a GPU and torch sees none.
    """
    if not gpus:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise TaskError(
            f"scaling.resources_per_worker has GPU: {gpus:g}, and torch {torch.__version__} sees no GPU in the worker. "
            "Install a build of torch for this GPU on all nodes, or leave GPU out."
        )
    return torch.device("cuda", 0)


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

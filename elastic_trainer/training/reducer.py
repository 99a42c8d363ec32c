"""Bucketed gradient reduction for data parallelism: un-normalised sums, overlapped with the last backward.

torch's DDP is the reference that it equals (tests/training/test_reducer.py). It differs in what elasticity needs: the
group belongs to the backend, which is asked at each launch, so it can be replaced under the same hooks and buffers;
uneven numbers of micro-batches are exact, since sums are reduced; and a rank without rows takes part with zeros.

Each bucket is one flat tensor whose tail holds, for each parameter, whether it got a gradient: a parameter that is
unused on every rank keeps `grad = None`, since optimizers treat zero and None differently. A step begins without
gradients; they are copied into the buckets before its last backward, which adds to them there and tells by hooks when a
bucket is full. The backwards before it run without hooks, each of which would cost a call into Python.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch.utils.hooks import RemovableHandle

from elastic_trainer.errors import TaskError
from elastic_trainer.training.process_group import Pending, ProcessGroupBackend

MB = 1 << 20
BUCKET_BYTES = 25 * MB  # as torch's DDP
REPLACED = (
    "a parameter's .grad was replaced within a step. Do not call optimizer.zero_grad() or set .grad after the first "
    "backward of a step: it began without gradients."
)
FIRST_BUCKET_BYTES = MB  # a small first bucket starts the overlap early, as in torch's DDP


class _Bucket:
    """Consecutive parameters of one dtype and device: flat is [gradients ..., used flags ...]."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self.parameters = parameters
        self.size = sum(p.numel() for p in parameters)
        self.used = [False] * len(parameters)
        self.left = 0
        self.version = -1
        self.work: Pending | None = None
        self.renew()

    def renew(self) -> None:
        """Take a new buffer: an operation of an aborted group may still write into the old one."""
        first = self.parameters[0]
        self.flat = torch.zeros(self.size + len(self.parameters), dtype=first.dtype, device=first.device)
        self.views = []
        offset = 0
        for p in self.parameters:
            self.views.append(self.flat[offset : offset + p.numel()].view_as(p))
            offset += p.numel()

    @property
    def gradients(self) -> torch.Tensor:
        return self.flat[: self.size]

    @property
    def flags(self) -> torch.Tensor:
        return self.flat[self.size :]

    def zero(self) -> None:
        self.used = [False] * len(self.parameters)
        self.work = None
        for p in self.parameters:
            p.grad = None

    def take(self, index: int) -> None:
        """Let what this parameter has got of gradients lie in the bucket."""
        p, view = self.parameters[index], self.views[index]
        if p.grad is None or p.grad is view:
            return
        self.used[index] = True
        gradient = p.grad.detach()
        if gradient.layout is torch.strided:
            view.copy_(gradient)
        else:
            view.zero_().add_(gradient)
        p.grad = view

    def take_all(self) -> None:
        """The same for every parameter."""
        for index in range(len(self.parameters)):
            self.take(index)

    def fill(self) -> None:
        """Parameters without a gradient here take part with zeros: other ranks may have one."""
        for p, view, is_used in zip(self.parameters, self.views, self.used, strict=True):
            if not is_used:
                view.zero_()
                p.grad = view
        if all(self.used):
            self.flags.fill_(1.0)  # a tenth of what making a tensor of a list takes
        else:
            self.flags.copy_(torch.tensor(self.used, dtype=self.flat.dtype), non_blocking=True)

    def check_arrived(self) -> None:
        """Nobody may have touched the gradients while they were on their way."""
        if self.flat._version != self.version:
            raise TaskError(
                "a gradient arrived after its bucket was sent: backward ran twice on the step's last micro-batch. "
                "Pass run.steps(overlap=False)."
            )
        if any(p.grad is not view for p, view in zip(self.parameters, self.views, strict=True)):
            raise TaskError(REPLACED)


class Reducer:
    """Reduces the gradients of some parameters, one step after the other.

    A step: `zero()`, any number of backwards, each between `check_kept()` and `keep()`, `arm()` before the last of them
    if it shall overlap, `launch()`, `wait()`, `scale_and_clip()`; then the optimizer may step.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], backend: ProcessGroupBackend) -> None:
        self._backend = backend
        self._parameters = trained(parameters)
        self._buckets = [_Bucket(group) for group in _grouped(self._parameters)]
        self._next = 0
        self._hooks = [
            (p, self._hook(bucket, index)) for bucket in self._buckets for index, p in enumerate(bucket.parameters)
        ]
        self._registered: list[RemovableHandle] = []
        self.has_updated = False  # an optimizer has stepped by gradients of all of these parameters
        self.is_precise = all(p.dtype in (torch.float32, torch.float64) for p in self._parameters)
        self.zero()

    def fits(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether these are still the parameters that the optimizer trains: some may have been frozen or added."""
        now = trained(parameters_of(optimizer))
        return len(now) == len(self._parameters) and all(a is b for a, b in zip(now, self._parameters, strict=True))

    def zero(self) -> None:
        """Begin a step."""
        self.release()
        self._next = 0
        self._kept: torch.nn.Parameter | None = None
        for bucket in self._buckets:
            bucket.zero()

    def keep(self) -> None:
        """After a backward: what it left is to be added to."""
        if self._kept is None:  # one parameter stands for all: what takes gradients away takes every one
            self._kept = next((p for p in self._parameters if p.grad is not None), None)

    def check_kept(self) -> None:
        """Before a backward: the gradients of those before it are still there.

        Raises:
            TaskError: They were taken away.
        """
        if self._kept is not None and self._kept.grad is None:
            raise TaskError(REPLACED)

    def arm(self) -> None:
        """The next backward is the step's last: buckets are launched as it fills them."""
        for bucket in self._buckets:
            bucket.take_all()
            bucket.left = len(bucket.parameters)
        # not register_multi_grad_hook: it fires before the last gradient is accumulated
        self._registered = [p.register_post_accumulate_grad_hook(hook) for p, hook in self._hooks]

    def launch(self) -> None:
        """Launch the buckets that the last backward has not, in order."""
        self.release()
        self.check_kept()
        for bucket in self._buckets[self._next :]:
            bucket.take_all()
        self._advance(everything=True)

    def wait(self) -> None:
        """Until every bucket has arrived.

        Raises:
            RuntimeError: A collective failed.
            TaskError: A gradient came after its bucket was launched, or was replaced.
        """
        for bucket in self._buckets:
            assert bucket.work is not None
            bucket.work.wait()
            bucket.work = None
            bucket.check_arrived()

    def abandon(self) -> None:
        """Give the step up after a failed collective."""
        for bucket in self._buckets:
            if bucket.work is not None and not bucket.work.is_completed():
                bucket.renew()
        self.zero()

    def release(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._registered:
            handle.remove()
        self._registered = []

    @torch.no_grad()
    def scale_and_clip(self, scale: float, clip_norm: float | None) -> bool:
        """Turn the sums into means by `scale`, bound their common norm, and take unused parameters' gradients away.

        Returns:
            Whether all gradients are finite; the same on every rank, since all have the same sums.
        """
        coefficient = self._coefficient(scale, clip_norm)
        total = 0.0
        for bucket in self._buckets:
            # looked at while the cache has it; where one is not finite the sum is not
            total += float(bucket.gradients.mul_(coefficient).sum())
            if all(bucket.used):
                continue
            for p, is_used in zip(bucket.parameters, (bucket.flags > 0).tolist(), strict=True):
                if not is_used:
                    p.grad = None
        return math.isfinite(total)

    @torch.no_grad()
    def scale_and_clip_there(self, scale: torch.Tensor, clip_norm: float | None) -> torch.Tensor:
        """`scale_and_clip` without waiting for the device, where all parameters are used here.

        Args:
            scale: float64, shape ().
            clip_norm: Bound of the norm of all gradients, None for none.

        Returns:
            Bool, shape (1,): whether all gradients are finite.
        """
        coefficient = self._coefficient(scale, clip_norm)
        sums = [bucket.gradients.mul_(coefficient).sum().to(torch.float64) for bucket in self._buckets]
        return torch.isfinite(torch.stack(sums).sum()).reshape(1)

    @property
    def uses_everything(self) -> bool:
        """Whether every parameter got a gradient here in this step."""
        return all(all(bucket.used) for bucket in self._buckets)

    def _coefficient(self, scale: torch.Tensor | float, clip_norm: float | None) -> torch.Tensor | float:
        if clip_norm is None or not self._buckets:
            return scale
        norms = torch.stack([torch.linalg.vector_norm(bucket.gradients) for bucket in self._buckets])
        if isinstance(scale, torch.Tensor):
            scale = scale.to(norms.dtype)  # as a number would be taken: to the same bit
        norm = torch.linalg.vector_norm(norms) * scale
        return scale * torch.clamp(clip_norm / (norm + 1e-6), max=1.0)

    def _hook(self, bucket: _Bucket, index: int) -> Callable[[torch.Tensor], None]:
        def on_accumulated(_: torch.Tensor) -> None:
            bucket.take(index)
            bucket.left -= 1
            if bucket.left == 0:
                self._advance(everything=False)

        return on_accumulated

    def _advance(self, *, everything: bool) -> None:
        while self._next < len(self._buckets):  # in the same order on every rank
            bucket = self._buckets[self._next]
            if bucket.left > 0 and not everything:
                return
            self._next += 1
            bucket.fill()
            bucket.work = self._backend.all_reduce(bucket.flat)
            bucket.version = bucket.flat._version


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """All parameters of an optimizer, in its order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def check_parameters(optimizers: Iterable[torch.optim.Optimizer], device: torch.device) -> None:
    """See that every parameter lies where this worker computes, and belongs to one optimizer.

    Raises:
        TaskError: It does not.
    """
    seen: set[int] = set()
    for optimizer in optimizers:
        for p in parameters_of(optimizer):
            if p.device != device:
                raise TaskError(
                    f"an optimizer has a parameter on {p.device}, and this worker computes on {device}. Move the model "
                    "there before its optimizer is made: model.to(run.device)."
                )
        ids = {id(p) for p in parameters_of(optimizer)}
        if ids & seen:
            raise TaskError("two optimizers share a parameter. Give each parameter to one optimizer.")
        seen |= ids


def trained(parameters: Iterable[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """Those that get gradients."""
    return [parameter for parameter in parameters if parameter.requires_grad]


def _grouped(parameters: list[torch.nn.Parameter]) -> Iterable[list[torch.nn.Parameter]]:
    """In the reverse order of registration, which is about the order in which backward finishes them."""
    group: list[torch.nn.Parameter] = []
    size, limit = 0, FIRST_BUCKET_BYTES
    for p in reversed(parameters):
        nbytes = p.numel() * p.element_size()
        if group and (size + nbytes > limit or (p.dtype, p.device) != (group[0].dtype, group[0].device)):
            yield group
            group, size, limit = [], 0, BUCKET_BYTES
        group.append(p)
        size += nbytes
    if group:
        yield group

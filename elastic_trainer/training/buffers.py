"""Module buffers (batch-norm statistics and the like) that do not depend on the world size.

Every logical rank starts a step from the same values. The next value of a floating buffer is the mean over the
logical ranks that had rows, of integers the one of logical rank 0. Changes are reduced, not values: a constant stays
exactly what it is. Only buffers that some rank changed are reduced; ranks agree on them when one is first seen.

To look whether a value changed is to wait for it. On a device that runs behind the host the buffers that would be
looked at count as changed wherever a micro-batch went through.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch.nn.modules.batchnorm import _NormBase

from elastic_trainer.training.process_group import ProcessGroupBackend

COMPARED_BYTES = 1 << 20  # comparing a buffer of this size costs some 0.1 ms; larger ones are tables and masks


class _Buffer:
    """One buffer by its place in the module, since user code may bind a new tensor to the name."""

    def __init__(self, module: torch.nn.Module, name: str, *, look: bool) -> None:
        self._module = module
        self._name = name
        self.start = self.value.detach().clone()
        self._change: torch.Tensor | None = None  # made when needed: most buffers are constants
        self.is_floating = self.start.is_floating_point() or self.start.is_complex()
        # a difference of whole numbers is exact in float64 where the numbers are not
        self.is_whole = self.start.dtype in (torch.int8, torch.int16, torch.int32, torch.int64)
        small = self.start.numel() * self.start.element_size() <= COMPARED_BYTES
        self.is_compared = small or isinstance(module, _NormBase)
        self._look = look
        self._seen = (id(self.value), self.value._version)

    @property
    def change(self) -> torch.Tensor:
        """Sum of the changes by this rank's logical ranks: float64, the shaped as it (complex: two parts)."""
        if self._change is None:
            self._change = torch.zeros_like(_real(self.start), dtype=torch.float64)
        return self._change

    def forget_change(self) -> None:
        self._change = None

    @property
    def value(self) -> torch.Tensor:
        value = self._module._buffers[self._name]
        assert value is not None
        return value

    def is_touched(self) -> bool:
        if self._seen != (id(self.value), self.value._version):
            return True
        # batch-norm's kernel, and whoever writes through `.data`, leaves the version as it is
        return self.is_compared and not (self._look and torch.equal(self.value, self.start))

    def add_change(self) -> None:
        # equal elements count as unchanged: the difference of two infinities is not a number
        now, start = _real(self.value.detach()), _real(self.start)
        difference = (
            (now - start).to(torch.float64) if self.is_whole else now.to(torch.float64) - start.to(torch.float64)
        )
        self.change.add_(torch.where(now == start, torch.zeros_like(difference), difference))

    def after(self, change: torch.Tensor) -> torch.Tensor:
        if self.start.is_complex():
            return self.start + torch.view_as_complex(change).to(self.start.dtype)
        if self.is_floating or self.is_whole:
            return self.start + change.to(self.start.dtype)
        return (self.start.to(torch.float64) + change).to(self.start.dtype)

    def reset(self) -> None:
        self.write(self.start)

    def write(self, value: torch.Tensor) -> None:
        with torch.no_grad():
            self.value.copy_(value)
        self._seen = (id(self.value), self.value._version)


class LogicalBuffers:
    """The buffers of all registered modules over a step's logical ranks.

    A step: `begin()`, for each logical rank with rows `enter(...)`, then `reduce()`; `commit()` when the
    whole step has arrived.
    """

    def __init__(self, modules: Iterable[torch.nn.Module], backend: ProcessGroupBackend) -> None:
        self._backend = backend
        look = backend.device.ahead == 0
        self._buffers = [_Buffer(module, name, look=look) for module, name in _places(modules)]
        self._reduced: set[int] = set()
        self._is_agreed = False
        self._changed: set[int] = set()
        self._rank: int | None = None
        self._visits = 0
        self._pending: list[tuple[_Buffer, torch.Tensor]] = []
        self._is_open = False  # between the beginning of a step and its end

    def forget_agreement(self) -> None:
        """Begin a generation: its ranks may not have seen the same buffers change."""
        self._reduced = set()
        self._is_agreed = False

    def begin(self) -> None:
        """Take the present values as what every logical rank starts from."""
        self._is_open = True
        self._changed, self._visits, self._rank, self._pending = set(), 0, None, []
        for buffer in self._buffers:
            if buffer.is_touched():
                buffer.start = buffer.value.detach().clone()
                buffer.reset()
            buffer.forget_change()

    def enter(self, logical_rank: int) -> None:
        """The next micro-batch belongs to this logical rank."""
        if logical_rank != self._rank:
            self.leave()
            self._rank = logical_rank
            self._visits += 1

    def leave(self) -> None:
        """Keep what the present logical rank changed and go back to the start values."""
        if self._rank is None:
            return
        for index, buffer in enumerate(self._buffers):
            if buffer.is_touched():
                if buffer.is_floating or self._rank == 0:
                    buffer.add_change()
                self._changed.add(index)
                buffer.reset()
        self._rank = None

    def end(self) -> None:
        """The step is done: what the buffers hold now is theirs, whoever wrote it."""
        self._is_open = False

    def restore(self) -> None:
        """A step is given up: what forward changed goes back."""
        if not self._is_open:
            return  # the values are a whole step's, or have just been restored
        self._is_open = False
        for buffer in self._buffers:
            if buffer.is_touched():
                buffer.reset()
        self._rank, self._pending = None, []

    @property
    def are_agreed(self) -> bool:
        """Whether no rank can change one in this generation any more that is not reduced; alike on all ranks."""
        return self._is_agreed and all(buffer.is_compared for buffer in self._buffers)

    @property
    def unagreed(self) -> int:
        """How many buffers changed on this rank that the ranks have not agreed to reduce."""
        return len(self._changed_now() - self._reduced)

    def agree(self) -> None:
        """Unite the changed buffers over all ranks; every rank calls it when the rider counted an unagreed one."""
        bitmap = torch.zeros(len(self._buffers), dtype=torch.int64)
        for index in self._changed_now():
            bitmap[index] = 1
        self._backend.all_reduce(bitmap).wait_on_host()
        self._reduced |= set(torch.nonzero(bitmap).flatten().tolist())

    def reduce(self) -> None:
        """Work out the step's next values; all ranks call it with the same agreed buffers.

        Raises:
            RuntimeError: A collective failed.
        """
        self.leave()
        self._is_agreed = True
        if not self._reduced:
            return
        chosen = [self._buffers[index] for index in sorted(self._reduced)]
        # flat: (all elements of the changes, then one: the visits of logical ranks with rows)
        visits_here = torch.full((1,), float(self._visits), dtype=torch.float64, device=chosen[0].start.device)
        flat = torch.cat([b.change.reshape(-1) for b in chosen] + [visits_here])
        self._backend.all_reduce(flat).wait()
        visits, offset = flat[-1], 0
        for buffer in chosen:
            change = flat[offset : offset + buffer.change.numel()].view_as(buffer.change)
            offset += buffer.change.numel()
            self._pending.append((buffer, buffer.after(change / visits if buffer.is_floating else change)))

    def commit(self, where: torch.Tensor | None = None) -> None:
        """Write the values that `reduce` worked out; with `where` (bool, shape ()) only where that is true."""
        for buffer, value in self._pending:
            buffer.start = value if where is None else torch.where(where, value, buffer.start)
            buffer.write(buffer.start)
        self._pending = []

    def _changed_now(self) -> set[int]:
        if self._rank is None:
            return self._changed
        return self._changed | {index for index, buffer in enumerate(self._buffers) if buffer.is_touched()}


def _places(roots: Iterable[torch.nn.Module]) -> Iterator[tuple[torch.nn.Module, str]]:
    """Each buffer once, however many registered parts and names lead to it."""
    seen: set[int] = set()
    for root in roots:
        for module in root.modules():
            for name, value in module._buffers.items():
                if value is not None and id(value) not in seen:
                    seen.add(id(value))
                    yield module, name


def _real(values: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(values) if values.is_complex() else values

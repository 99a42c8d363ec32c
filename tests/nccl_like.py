"""A device and a process group on the CPU that behave as a GPU and NCCL do where it matters to recovery.

Operations inside `NcclLikeDevice.scope()` are put on a queue and run behind the host, in order. A collective is put on
its communicator's queue: `wait()` only orders what comes after it. A peer that is dead or stopped makes it hang without
an error; after an abort it "succeeds" with garbage and the queues go on; destroying a group with work in flight does
not return; an abort of a communicator under construction does not either; a fault of the device stays for the process.

It has not been compared with a real NCCL. The transport is gloo, whose sockets the abort shuts down.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    BroadcastOptions,
    ProcessGroupGloo,
    ReduceOp,
    Work,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack

from elastic_trainer.training import gloo
from elastic_trainer.training.device import Fetched
from elastic_trainer.training.gate import Gate
from elastic_trainer.training.nccl import NcclBackend
from elastic_trainer.training.rider import Rider
from elastic_trainer.training.saver import Saver
from elastic_trainer.training.settings import TrainSettings
from elastic_trainer.vocabulary import Worker

FOR_EVER = timedelta(days=1)


@dataclass(frozen=True)
class Faults:
    """What goes wrong in a process, beside what is done to it.

    Attributes:
        garbage: What an aborted collective leaves: `partial` (what gloo left), `nan` or `zero`.
        dies_at: (verdict, seconds): the process kills itself so long after its own so many-th verdict has arrived.
        stale: The so many-th verdict ends here with what the one before it left, as if a peer had given up.
        misses: The so many-th verdict arrives everywhere else, and here never until an abort.
        misses_when: A folder; a file there named by a process makes its next verdict such a one.
        hangs_in_init: The so many-th communicator of the process is never ready.
        device_fails_at: The so many-th verdict makes the device fail for good.
    """

    garbage: str = "partial"
    dies_at: tuple[int, float] | None = None
    misses: int | None = None
    misses_when: str | None = None
    stale: int | None = None
    hangs_in_init: int | None = None
    device_fails_at: int | None = None


class _Queue:
    """A stream: a thread that runs what it is given, in order."""

    every: list[_Queue] = []  # noqa: RUF012  # of the process, as a device's streams are

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[tuple[Callable[[], object], bool]] = queue.SimpleQueue()
        _Queue.every.append(self)
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def put(self, task: Callable[[], object], *, always: bool = False) -> None:
        """`always`: even when the device has failed."""
        if not always:
            _check()
        self._tasks.put((task, always))

    def mark(self) -> threading.Event:
        """Set when the queue has come so far."""
        event = threading.Event()
        self.put(event.set, always=True)
        return event

    def _run(self) -> None:
        while True:
            task, always = self._tasks.get()
            if always or _Failure.text is None:
                try:
                    task()
                except BaseException as error:
                    _Failure.text = f"CUDA error: unspecified launch failure (imitated): {error!r}"
            del task


class _Failure:
    text: str | None = None


def _check() -> None:
    if _Failure.text is not None:
        raise RuntimeError(_Failure.text)


class _Default:
    queue: _Queue | None = None


def _compute() -> _Queue:
    if _Default.queue is None:
        _Default.queue = _Queue("device")
    return _Default.queue


_KEY = torch._C.DispatchKey
_AUTOGRAD = torch._C.DispatchKeySet(_KEY.ADInplaceOrView)
for _each in (_KEY.AutogradCPU, _KEY.AutogradOther, _KEY.AutogradFunctionality):
    _AUTOGRAD = _AUTOGRAD | torch._C.DispatchKeySet(_each)


def _kernel(work: Callable[[], object]) -> Callable[[], None]:
    """`work` below autograd: what runs late records nothing and counts no version."""

    def run() -> None:
        with torch._C._ExcludeDispatchKeyGuard(_AUTOGRAD):
            work()

    return run


_ATEN = torch.ops.aten
# these need the data, or change what the host knows of a tensor
_NEED_DATA = {
    _ATEN._local_scalar_dense.default,
    _ATEN.equal.default,
    _ATEN.is_nonzero.default,
    _ATEN.nonzero.default,
    _ATEN.masked_select.default,
    _ATEN.resize_.default,
    _ATEN.set_.source_Tensor,
    _ATEN.set_.source_Storage,
    _ATEN.set_.source_Storage_storage_offset,
}
# these take of a tensor its shape alone
_MAKE = {
    _ATEN.empty_like,
    _ATEN.zeros_like,
    _ATEN.ones_like,
    _ATEN.full_like,
    _ATEN.new_empty,
    _ATEN.new_empty_strided,
    _ATEN.new_zeros,
    _ATEN.new_ones,
    _ATEN.new_full,
}
_Shape = tuple[torch.Size, tuple[int, ...], torch.dtype]


class _Behind(TorchDispatchMode):
    """Puts every operation of the thread on the queue; only reads of values wait for it.

    `.numpy()` and raw pointers do not come through here: they read what lies there.
    """

    _shapes: dict[Any, tuple[bool, list[Any]]] = {}  # noqa: RUF012  # by operation and inputs, of the process

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        _check()
        flat, spec = pytree.tree_flatten((args, kwargs))
        tensors = [each for each in flat if isinstance(each, torch.Tensor)]
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        needs_nothing = func.is_view or func.overloadpacket in _MAKE or not tensors
        if needs_nothing or any(each.device.type != "cpu" for each in tensors):
            return func(*args, **kwargs)
        schema = func._schema
        if is_random and schema.is_mutable:
            return func(*args, **kwargs)  # into fresh memory, by the generator's state of now
        if is_random or func in _NEED_DATA or func.namespace != "aten":
            _compute().mark().wait()
            _check()
            return func(*args, **kwargs)
        # a kernel has addresses: what is bound to a tensor later, by `.data = ` say, is not its own
        bound = pytree.tree_unflatten([e.detach() if isinstance(e, torch.Tensor) else e for e in flat], spec)
        if schema.is_mutable and all(each.alias_info is not None for each in schema.returns):
            _compute().put(_kernel(lambda: func(*bound[0], **bound[1])))
            named = dict(zip([each.name for each in schema.arguments], args, strict=False)) | kwargs
            written = [named[a.name] for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
            results = written[: len(schema.returns)]
            return None if not results else results[0] if len(results) == 1 else tuple(results)
        return self._later(func, bound, flat, spec)

    def _later(self, func: Any, bound: Any, flat: list[Any], spec: Any) -> Any:
        key = (func, spec, tuple(_signature(each) for each in flat))
        if key not in self._shapes:
            self._shapes[key] = _shapes(func, flat, spec)
        are_many, shapes = self._shapes[key]
        outputs = [torch.empty_strided(s[0], s[1], dtype=s[2]) if isinstance(s, tuple) else s for s in shapes]

        def run() -> None:
            found = func(*bound[0], **bound[1])
            for output, each in zip(outputs, found if are_many else [found], strict=True):
                # evaluating batch-norm gives nothing where the shapes say otherwise
                if isinstance(output, torch.Tensor) and each.numel() == output.numel():
                    output.copy_(each)

        _compute().put(_kernel(run))
        return tuple(outputs) if are_many else outputs[0]


def _signature(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (value.size(), value.stride(), value.dtype)
    return (type(value), value)


def _shapes(func: Any, flat: list[Any], spec: Any) -> tuple[bool, list[Any]]:
    """Of the outputs, by torch's meta device."""
    made: dict[int, torch.Tensor] = {}

    def there(value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("meta")
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in made:
            made[id(value)] = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
        return made[id(value)]

    args, kwargs = pytree.tree_unflatten([there(each) for each in flat], spec)
    with torch._C._DisableTorchDispatch():
        found = func(*args, **kwargs)
    are_many = isinstance(found, tuple | list)
    return are_many, [
        (each.size(), each.stride(), each.dtype) if isinstance(each, torch.Tensor) else each
        for each in (found if are_many else [found])
    ]


def _everything_arrived(gate: Gate) -> torch.Tensor:
    assert gate._work is not None
    gate._work.wait()
    return torch.ones(1, dtype=torch.bool)


def _is_behind() -> bool:
    return any(isinstance(mode, _Behind) for mode in _get_current_dispatch_mode_stack())


class _Copy:
    def __init__(self, tensor: torch.Tensor) -> None:
        with _disable_current_modes():
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype)
        _compute().put(_kernel(lambda: self._host.copy_(tensor)))
        self._event = _compute().mark()

    def is_there(self) -> bool:
        _check()
        return self._event.is_set()

    def value(self) -> torch.Tensor:
        return self._host


class NcclLikeDevice:
    """See the module."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self.ahead = 2

    def scope(self) -> contextlib.AbstractContextManager[object]:
        return _Behind()

    def fetch(self, tensor: torch.Tensor) -> Fetched:
        return _Copy(tensor)

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def synchronize(self) -> None:
        """All of the device, every communicator's queue too: returns only once all of them are aborted or through."""
        for each in list(_Queue.every):
            each.mark().wait()
        _check()


class _Collective(Work):
    def __init__(self, outputs: Sequence[torch.Tensor], event: threading.Event) -> None:
        super().__init__()
        self._outputs = outputs
        self._event = event

    def wait(self, timeout: Any = None) -> bool:
        _compute().put(self._event.wait, always=True)
        return True

    def is_completed(self) -> bool:
        return self._event.is_set()


class NcclLikeGroup(dist.ProcessGroup):
    """A communicator."""

    faults = Faults()  # of the process
    made = 0  # by the process
    verdicts = 0  # launched by the process

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._is_aborted = threading.Event()
        self._queue = _Queue("communicator")
        self._sockets: dict[int, str] = {}
        self._gloo: ProcessGroupGloo | None = None
        self._make(store)

    def _make(self, store: dist.Store) -> None:
        """No bound of its own, and no way to give it up."""
        NcclLikeGroup.made += 1
        while NcclLikeGroup.made == self.faults.hangs_in_init:
            time.sleep(60.0)
        before = gloo._sockets()
        self._gloo = ProcessGroupGloo(store, self._rank, self._size, timeout=FOR_EVER)
        self._sockets = {fd: link for fd, link in gloo._sockets().items() if before.get(fd) != link}

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def getBackendName(self) -> str:  # noqa: N802
        return "nccl_like"

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    group_name = property(getGroupName)

    def _collective(self, outputs: Sequence[torch.Tensor], start: Callable[[Any], Any], number: int = 0) -> _Collective:
        _check()
        if self._is_aborted.is_set():
            raise RuntimeError(f"NCCL communicator was aborted on rank {self._rank}.")

        def run() -> None:
            faults = self.faults
            if number and faults.device_fails_at == number:
                raise RuntimeError(f"at verdict {number}")
            try:
                if self._is_aborted.is_set():
                    raise RuntimeError("aborted")
                before = [output.clone() for output in outputs] if number else []
                start(self._gloo).wait()
                if number and faults.stale == number:
                    for output, each in zip(outputs, before, strict=True):
                        output.copy_((each - 1) * self._size)
                if number and (faults.misses == number or _is_told(faults.misses_when)):
                    raise RuntimeError("it arrived, but not here")
            except RuntimeError:
                self._is_aborted.wait()  # no error: it hangs, until an abort
                for output in outputs:
                    _spoil(output, faults.garbage)
            if number and faults.dies_at is not None and faults.dies_at[0] == number:
                time.sleep(faults.dies_at[1])
                os.kill(os.getpid(), signal.SIGKILL)

        ready = _compute().mark()
        self._queue.put(ready.wait, always=True)
        self._queue.put(_kernel(run))
        return _Collective(outputs, self._queue.mark())

    def abort(self) -> None:
        self._is_aborted.set()
        for fd, link in self._sockets.items():
            with gloo._held(fd, link) as each:
                # gloo ends the process when its listener is shut down
                if each is not None and not gloo._listens(each):
                    gloo._shut_down(each)
        self._sockets = {}

    def shutdown(self) -> None:
        """Does not return while work is in flight."""
        self._queue.mark().wait()
        self._gloo = None

    def allreduce(self, tensors: Any, options: Any = None) -> Work:
        tensors = list(tensors) if isinstance(tensors, list | tuple) else [tensors]
        chosen = AllreduceOptions()
        chosen.reduceOp = ReduceOp.SUM
        number = 0
        if tensors[0].numel() == 1 and tensors[0].dtype == torch.float64:
            NcclLikeGroup.verdicts += 1
            number = NcclLikeGroup.verdicts
        return self._collective(tensors, lambda group: group.allreduce(tensors, chosen), number)

    def broadcast(self, tensors: Any, options: Any = None) -> Work:
        chosen = BroadcastOptions()
        chosen.rootRank, chosen.rootTensor = options.rootRank, options.rootTensor
        outputs = [] if options.rootRank == self._rank else list(tensors)
        return self._collective(outputs, lambda group: group.broadcast(list(tensors), chosen))

    def allgather(self, outputs: Any, inputs: Any, options: Any = None) -> Work:
        flat = [each for some in outputs for each in some]
        return self._collective(flat, lambda group: group.allgather(outputs, inputs, AllgatherOptions()))


def _is_told(folder: str | None) -> bool:
    if folder is None:
        return False
    try:
        os.unlink(f"{folder}/{os.getpid()}")
    except FileNotFoundError:
        return False
    return True


def _spoil(tensor: torch.Tensor, garbage: str) -> None:
    if garbage == "nan" and tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif garbage == "zero":
        tensor.zero_()


dist.Backend.register_backend(
    "nccl_like", lambda store, rank, size, timeout: NcclLikeGroup(store, rank, size), devices=["cpu"]
)


@dataclass(frozen=True)
class NcclLike:
    """Makes the backend that workers with a GPU have, on this device and group; for `Harness`.

    Attributes:
        faults: By (worker id, incarnation).
        gated: Whether the verdict decides; without it every step counts as complete.
    """

    faults: dict[tuple[int, int], Faults] = field(default_factory=dict)
    default: Faults = Faults()
    gated: bool = True

    def __call__(self, worker: Worker, settings: TrainSettings) -> NcclBackend:
        # shapes are worked out by these; imported in the middle they would hold the queue up
        import torch._decomp
        import torch._meta_registrations
        import torch._refs

        NcclLikeGroup.faults = self.faults.get((worker.worker_id, worker.incarnation), self.default)
        begin = Saver._begin

        def begin_now(saver: Saver, *arguments: Any) -> None:
            # a copy from a GPU to the host waits for it; the queue would let the host go on
            with _disable_current_modes():
                begin(saver, *arguments)

        Saver._begin = begin_now  # type: ignore[method-assign]
        if not self.gated:
            Gate.verdict = _everything_arrived  # type: ignore[method-assign]
            Rider.check_steps = lambda *_: None  # type: ignore[method-assign]
        listed = torch.Tensor.tolist

        def listed_when_there(tensor: torch.Tensor) -> Any:
            if _is_behind():
                _compute().mark().wait()
                _check()
            return listed(tensor)

        torch.Tensor.tolist = listed_when_there  # type: ignore[method-assign]
        return NcclBackend("test", settings.form_s, settings.collective_s, NcclLikeDevice(), name="nccl_like")

"""Everything that a task registered, as named tensors and JSON: to send to a newcomer, to keep, to put back.

Optimizer state is keyed by parameter name, so that it means the same in every process. Nothing is pickled: tensors
travel as bytes beside a JSON description.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch

from elastic_trainer.errors import TaskError
from elastic_trainer.training.process_group import ProcessGroupBackend
from elastic_trainer.vocabulary import JSON

CHUNK_BYTES = 64 << 20  # large enough for full speed, small beside any host's memory


class Stateful(Protocol):
    """What can be registered."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors and JSON, nested in dicts, lists and tuples."""

    def load_state_dict(self, state: dict[str, Any], /) -> Any:
        """Takes what `state_dict` gave."""


class RegisteredState:
    """The parts of a task's state by the names under which they were registered."""

    def __init__(self, parts: Mapping[str, Stateful]) -> None:
        for name, part in parts.items():
            if not hasattr(part, "state_dict") or not hasattr(part, "load_state_dict"):
                raise TaskError(
                    f"run.register({name}=...) got a {type(part).__name__}, which has no state_dict() and "
                    "load_state_dict(). Register models, optimizers, schedulers and objects with these two methods."
                )
        self.parts = dict(parts)

    def modules(self) -> list[torch.nn.Module]:
        """The registered models."""
        return [part for part in self.parts.values() if isinstance(part, torch.nn.Module)]

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The registered optimizers."""
        return [part for part in self.parts.values() if isinstance(part, torch.optim.Optimizer)]

    def collect(self) -> dict[str, Any]:
        """State of all parts by name, sharing memory with them."""
        return {name: self._collect(part) for name, part in self.parts.items()}

    @property
    def lies_on_device(self) -> bool:
        """Whether all that a step changes are tensors of models and optimizers, but for what `host_part` has."""
        known = torch.nn.Module | torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler
        trained = {id(p) for each in self.optimizers() for group in each.param_groups for p in group["params"]}
        # a model that no optimizer trains is an average, say, which the task updates by itself
        are_trained = all(any(id(p) in trained for p in module.parameters()) for module in self.modules())
        return are_trained and all(isinstance(part, known) for part in self.parts.values())

    def host_part(self) -> dict[str, Any]:
        """What a step changes on the host, in memory of its own: schedules, and the optimizers' options."""
        found: dict[str, Any] = {}
        for name, part in self.parts.items():
            if isinstance(part, torch.optim.Optimizer):
                found[name] = [{k: copied(v) for k, v in g.items() if k != "params"} for g in part.param_groups]
            elif not isinstance(part, torch.nn.Module):
                found[name] = copied(part.state_dict())
        return found

    def restore_host_part(self, kept: dict[str, Any]) -> None:
        """Put it back."""
        for name, values in kept.items():
            part = self.parts[name]
            if isinstance(part, torch.optim.Optimizer):
                for group, options in zip(part.param_groups, values, strict=True):
                    group.update(options)
            else:
                part.load_state_dict(values)

    def versions(self) -> int:
        """Grows with each operation on the models' tensors, whether or not the device has come to it."""
        tensors = (t for module in self.modules() for t in (*module.parameters(), *module.buffers()))
        return sum(tensor._version for tensor in tensors)

    def restore(self, state: dict[str, Any]) -> None:
        """Put state into the parts.

        Raises:
            TaskError: The parts' names are not those of the state.
        """
        if set(state) != set(self.parts):
            raise TaskError(
                f"registered are {', '.join(sorted(self.parts))}, the run's state has {', '.join(sorted(state))}. "
                "Every process must register the same names."
            )
        for name, part in self.parts.items():
            try:
                self._load(part, state[name])
            except (RuntimeError, KeyError, ValueError, AttributeError) as error:
                raise TaskError(
                    f"the run's state of {name!r} does not fit what the task builds now: {error}. Build the same model "
                    "and optimizer as before, or start under another name."
                ) from None

    def _load(self, part: Stateful, state: dict[str, Any]) -> None:
        if isinstance(part, torch.optim.Optimizer):
            _load_optimizer(part, state, self._names())
        elif isinstance(part, torch.nn.Module):
            part.load_state_dict(state["state"])
            with torch.no_grad():
                for buffer, value in state["other_buffers"].items():
                    part.get_buffer(buffer).copy_(value)
        else:
            part.load_state_dict(state)

    def _collect(self, part: Stateful) -> dict[str, Any]:
        if isinstance(part, torch.optim.Optimizer):
            return _named(part, self._names())
        if isinstance(part, torch.nn.Module):
            saved = part.state_dict()
            # those that a checkpoint leaves out may have changed all the same
            return {"state": saved, "other_buffers": {n: b for n, b in part.named_buffers() if n not in saved}}
        return part.state_dict()

    def _names(self) -> dict[torch.nn.Parameter, str]:
        return {
            parameter: f"{part_name}.{name}"
            for part_name, part in self.parts.items()
            if isinstance(part, torch.nn.Module)
            for name, parameter in part.named_parameters()
        }


def copied(state: Any) -> Any:
    """The same state in memory of its own."""
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    if isinstance(state, Mapping):
        return {key: copied(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(copied(value) for value in state)
    return state


@dataclass(frozen=True)
class Described:
    """State as a description in JSON and the tensors in it, in its order, named by their path."""

    description: JSON
    names: list[str]
    tensors: list[torch.Tensor]


def describe(state: dict[str, Any]) -> Described:
    """Take state apart; the tensors share its memory.

    Raises:
        TaskError: It holds something else than tensors and JSON.
    """
    named: list[tuple[str, torch.Tensor]] = []
    description = _describe(state, named, "")
    return Described(description, [name for name, _ in named], [tensor for _, tensor in named])


def assemble(description: JSON, tensors: list[torch.Tensor]) -> dict[str, Any]:
    """Undoes `describe`."""
    return cast(dict[str, Any], _rebuild(description, list(tensors)))


def share(state: dict[str, Any] | None, source: int, backend: ProcessGroupBackend) -> dict[str, Any]:
    """Give every rank the state of rank `source`; all ranks call it, the others with None.

    By broadcast and not point to point: gloo's point-to-point waits cannot be given up.

    Raises:
        RuntimeError, CollectiveFailed: A peer is gone.
    """
    described = None if state is None else describe(state)
    description = b"" if described is None else json.dumps(described.description).encode()
    size = torch.tensor([len(description)], dtype=torch.int64)
    backend.broadcast(size, source).wait_on_host()
    message = torch.empty(int(size), dtype=torch.uint8)
    if described is not None:
        message.copy_(torch.frombuffer(bytearray(description), dtype=torch.uint8))
    backend.broadcast(message, source).wait_on_host()
    if state is not None and described is not None:
        for chunk in _chunks(described.tensors):
            backend.broadcast(chunk, source).wait_on_host()
        return state
    return _receive(json.loads(message.numpy().tobytes()), source, backend)


def _receive(description: JSON, source: int, backend: ProcessGroupBackend) -> dict[str, Any]:
    layouts = [(t["dtype"], t["shape"]) for t in _tensor_descriptions(description)]
    empty = [torch.empty(shape, dtype=getattr(torch, dtype)) for dtype, shape in layouts]
    tensors: list[torch.Tensor] = []
    for group in _groups(empty):
        chunk = torch.empty(sum(_padded(t) for t in group), dtype=torch.uint8)
        if chunk.numel():
            backend.broadcast(chunk, source).wait_on_host()
        offset = 0
        for tensor in group:
            nbytes = tensor.numel() * tensor.element_size()
            tensors.append(chunk[offset : offset + nbytes].view(tensor.dtype).view(tensor.shape))
            offset += _padded(tensor)
    return assemble(description, tensors)


def _named(optimizer: torch.optim.Optimizer, names: dict[torch.nn.Parameter, str]) -> dict[str, Any]:
    groups, state = [], {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise TaskError(
                    "an optimizer has a parameter that belongs to no registered model. Register the model too: "
                    "run.register(model=model, optimizer=optimizer)."
                )
            if parameter in optimizer.state:
                state[names[parameter]] = dict(optimizer.state[parameter])
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        groups.append({**options, "params": [names[parameter] for parameter in group["params"]]})
    found: dict[str, Any] = {"param_groups": groups, "state": state}
    if shared := {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}:
        found["shared"] = shared  # of no parameter by itself
    return found


def _load_optimizer(
    optimizer: torch.optim.Optimizer, named: dict[str, Any], names: dict[torch.nn.Parameter, str]
) -> None:
    optimizer.load_state_dict(_unnamed(optimizer, named, names))
    optimizer.state.update(copied(named.get("shared", {})))
    # load_state_dict casts state to its parameter's dtype; what was kept in another one stays what it was
    for parameter, name in names.items():
        for key, value in named["state"].get(name, {}).items():
            present = optimizer.state[parameter][key]
            if isinstance(value, torch.Tensor) and present.dtype != value.dtype:
                optimizer.state[parameter][key] = copied(value).to(present.device)


def _unnamed(
    optimizer: torch.optim.Optimizer, named: dict[str, Any], names: dict[torch.nn.Parameter, str]
) -> dict[str, Any]:
    found = optimizer.state_dict()
    index = {
        names[parameter]: number
        for group, numbered in zip(optimizer.param_groups, found["param_groups"], strict=True)
        for parameter, number in zip(group["params"], numbered["params"], strict=True)
    }
    groups = [
        {**options, "params": [index[name] for name in options["params"]]} for options in copied(named["param_groups"])
    ]
    return {"param_groups": groups, "state": {index[name]: copied(value) for name, value in named["state"].items()}}


def _describe(value: Any, tensors: list[tuple[str, torch.Tensor]], path: str) -> JSON:
    """JSON of nested state; tensors are appended to `tensors` and stand for themselves by dtype and shape.

    A dict becomes pairs, because JSON knows only text as keys, and a tuple is told from a list.
    """
    if isinstance(value, torch.Tensor):
        tensors.append((path.removeprefix("."), value.detach()))
        return {"tensor": {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}}
    if isinstance(value, Mapping):
        pairs: list[JSON] = [
            [_describe(key, tensors, path), _describe(each, tensors, f"{path}.{key}")] for key, each in value.items()
        ]
        return {"dict": pairs}
    if isinstance(value, list | tuple):
        items: list[JSON] = [_describe(each, tensors, f"{path}[{i}]") for i, each in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": items}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TaskError(
        f"state{path} is a {type(value).__name__}; state_dict() may hold tensors, numbers, text, None, dicts, lists "
        "and tuples. Turn it into one of these."
    )


def _rebuild(described: JSON, tensors: list[torch.Tensor]) -> Any:
    """Undoes `_describe`; takes tensors from the front of `tensors` in the same order."""
    if not isinstance(described, dict):
        return described
    kind, content = next(iter(described.items()))
    if kind == "tensor":
        return tensors.pop(0)
    assert isinstance(content, list)
    if kind == "dict":
        pairs = cast(list[list[JSON]], content)
        return {_rebuild(key, tensors): _rebuild(value, tensors) for key, value in pairs}
    items = [_rebuild(item, tensors) for item in content]
    return tuple(items) if kind == "tuple" else items


def _tensor_descriptions(described: JSON) -> Iterator[dict[str, Any]]:
    if isinstance(described, dict):
        kind, content = next(iter(described.items()))
        if kind == "tensor":
            yield cast(dict[str, Any], content)
        else:
            yield from _tensor_descriptions(content)
    elif isinstance(described, list):
        for each in described:
            yield from _tensor_descriptions(each)


def _padded(tensor: torch.Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // 16) * 16  # 16 bytes: the largest element, complex128


def _groups(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    group: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if group and size + _padded(tensor) > CHUNK_BYTES:
            yield group
            group, size = [], 0
        group.append(tensor)
        size += _padded(tensor)
    if group:
        yield group


def _chunks(tensors: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """uint8 messages of about `CHUNK_BYTES`, each tensor's bytes padded to `_padded`."""
    for group in _groups(tensors):
        chunk = torch.zeros(sum(_padded(tensor) for tensor in group), dtype=torch.uint8)
        offset = 0
        for tensor in group:
            raw = tensor.contiguous().reshape(-1).view(torch.uint8)
            chunk[offset : offset + raw.numel()] = raw
            offset += _padded(tensor)
        if chunk.numel():
            yield chunk

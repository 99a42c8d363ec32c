"""What a run that exists may still change: the stored configuration, and what was asked for now, become one.

A field that is not set now keeps the stored value. A different value is taken where it is free, and refused with both
values where the run's results depend on it. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from elastic_trainer.config import JobConfig
from elastic_trainer.data.dataset import DatasetIndex
from elastic_trainer.data.order import ORDER_VERSION
from elastic_trainer.errors import ConfigError

FIXED = (
    "task",
    "task_args",
    "global_batch",
    "micro_batch",
    "logical_ranks",
    "precision",
    "clip_norm",
    "seed",
    "data.drop_last",
    "start_from",
)
ALLOWABLE = ("task", "task_args")  # by --allow-change: the arithmetic of data and batches never


def merge(
    stored: Mapping[str, Any], given: JobConfig, allow_change: Sequence[str] = ()
) -> tuple[JobConfig, dict[str, list[Any]]]:
    """The configuration with which a run goes on, and what is different in it: field to old and new value.

    Args:
        stored: As the run's log has it.
        given: Of this submission.
        allow_change: Fields of the task that may differ.

    Raises:
        ConfigError: A fixed field differs; the message has both values.
    """
    for field in allow_change:
        if field.split(".")[0] not in ALLOWABLE:
            raise ConfigError(
                f"--allow-change {field}: only the task and its arguments can be allowed to change "
                f"({', '.join(ALLOWABLE)} or task_args.NAME)."
            )
    values = _without_resolved(stored)
    changed: dict[str, list[Any]] = {}
    explicit = dict(_explicit(given))
    if {"steps", "epochs"} & set(explicit):  # one stands for the other
        explicit = {"steps": given.steps, "epochs": given.epochs, **explicit}
    for field, new in explicit.items():
        old = _get(values, field)
        if old == new:
            continue
        _refuse_fixed(given.name, field, old, new, allow_change)
        changed[field] = [old, new]
        _set(values, field, new)
    values["data"]["storage_options"] = given.data.storage_options
    options = given.storage_options
    return JobConfig(**{**values, "name": given.name, "storage": given.storage, "storage_options": options}), changed


def check_data(stored: Mapping[str, Any], train: DatasetIndex, path: str) -> None:
    """The data must be the same rows in the same order.

    Raises:
        ConfigError: It is not, or its order is worked out otherwise by this version.
    """
    resolved = stored["resolved"]
    if resolved["train_digest"] != train.digest:
        raise ConfigError(
            f"data.train = {path!r} holds other rows than the run was started with (digest {train.digest}, the run has "
            f"{resolved['train_digest']}). Give the dataset that it was started with, or start under another name."
        )
    if resolved["order_version"] != ORDER_VERSION:
        raise ConfigError(
            f"the run was started with version {resolved['order_version']} of the data order, this is version "
            f"{ORDER_VERSION}. Go on with the release that it was started with, or start under another name."
        )


def _refuse_fixed(name: str, field: str, old: Any, new: Any, allow_change: Sequence[str]) -> None:
    fixed = next((each for each in FIXED if field == each or field.startswith(f"{each}.")), None)
    if fixed is None or any(field == each or field.startswith(f"{each}.") for each in allow_change):
        return
    remedy = "Leave it as it was, or start under another name"
    if fixed in ALLOWABLE:
        remedy += f", or say --allow-change {field}"
    raise ConfigError(
        f"{field} = {new!r} differs from the {old!r} with which run {name!r} was started, and its results depend on "
        f"it. {remedy}."
    )


def _explicit(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every field that was set, by its path; the arguments of a task each by themselves."""
    for name in sorted(section.model_fields_set):
        value, path = getattr(section, name), prefix + name
        if path in ("name", "storage", "storage_options", "data.storage_options"):
            continue  # they say which run it is, and how to get there
        if isinstance(value, BaseModel):
            yield from _explicit(value, f"{path}.")
        elif path == "task_args":
            yield from ((f"{path}.{key}", each) for key, each in value.items())
        else:
            yield path, value


def _without_resolved(stored: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: dict(value) if isinstance(value, Mapping) else value for key, value in stored.items() if key != "resolved"
    }


def _get(values: Mapping[str, Any], path: str) -> Any:
    place: Any = values
    for part in path.split("."):
        place = place.get(part) if isinstance(place, Mapping) else None
    return place


def _set(values: dict[str, Any], path: str, new: Any) -> None:
    *parents, last = path.split(".")
    for part in parents:
        values = values.setdefault(part, {})
    values[last] = new

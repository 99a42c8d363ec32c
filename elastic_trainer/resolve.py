"""Fills in what a job leaves open, from the data and the cluster; refuses what contradicts them.

Pure: the data's index and the cluster's size come in as values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from elastic_trainer.config import JobConfig
from elastic_trainer.control import suspicion
from elastic_trainer.control.state import Limits
from elastic_trainer.data.batch_plan import (
    BatchPlan,
    choose_logical_ranks,
    choose_micro_batch,
    choose_window,
)
from elastic_trainer.data.dataset import DatasetIndex
from elastic_trainer.data.order import ORDER_VERSION, SampleOrder
from elastic_trainer.data.routing import Routing
from elastic_trainer.errors import ConfigError
from elastic_trainer.training.settings import TrainSettings


@dataclass(frozen=True)
class ResolvedJob:
    """A job with every number fixed."""

    config: JobConfig
    settings: TrainSettings
    limits: Limits
    train_digest: str
    evaluation_digest: str | None
    changed: dict[str, Any]  # fields of a resumed run that differ from what was stored: old and new value

    def to_dict(self) -> dict[str, Any]:
        """What is stored with the run as `config.yaml`: the configuration and what was worked out from the data."""
        order = self.settings.plan.order
        return {
            **self.config.model_dump(mode="json"),
            "resolved": {
                "steps": self.settings.steps,
                "samples": order.samples,
                "row_group": order.row_group,
                "window": order.window,
                "order_version": ORDER_VERSION,
                "train_digest": self.train_digest,
                "evaluation_digest": self.evaluation_digest,
            },
        }


def resolve(
    config: JobConfig,
    train: DatasetIndex,
    evaluation: DatasetIndex | None,
    *,
    fits: int,
    fixed_shapes: bool,
    has_router: bool = False,
    stored: dict[str, Any] | None = None,
    changed: dict[str, Any] | None = None,
) -> ResolvedJob:
    """The job for this data on a cluster that holds `fits` workers.

    Args:
        config: Of the job; of a resumed run what `resume.merge` made of it.
        train: Index of the training data.
        evaluation: Index of the evaluation data.
        fits: Workers that the cluster can hold.
        fixed_shapes: Whether the task asks for them.
        has_router: Whether Ray Data makes the samples.
        stored: What the run was started with, when it is resumed: its window of the data order is kept.
        changed: What `resume.merge` found changed.

    Raises:
        ConfigError: The data and the job contradict each other.
    """
    most = config.scaling.max_workers or max(config.scaling.min_workers, fits - config.scaling.spares, 1)
    most = max([most, *(workers for _, workers in config.scaling.schedule)])
    batch = config.global_batch
    if config.scaling.max_workers is None:
        most = min(most, config.logical_ranks or batch // (config.micro_batch or 1))
    micro = config.micro_batch or _micro_for(batch, config.logical_ranks, most)
    ranks = config.logical_ranks or choose_logical_ranks(batch, micro, most)
    if config.data.drop_last and train.rows < batch:
        raise ConfigError(
            f"data.drop_last = true leaves no step: {config.data.train} has {train.rows} rows, fewer than "
            f"global_batch = {batch}. Set data.drop_last: false or a smaller global_batch."
        )
    if stored is not None:
        window = int(stored["resolved"]["window"])
    else:
        window = choose_window(train.row_group, batch // ranks, batch, train.row_bytes, config.data.window_bytes)
    order = SampleOrder(train.rows, train.row_group, batch, ranks, window, config.seed, config.data.drop_last)
    steps = config.steps or (config.epochs or 0) * order.steps_per_epoch
    settings = TrainSettings(
        run_name=config.name,
        plan=BatchPlan(order, micro, fixed_shapes),
        train_data=config.data.train,
        evaluation_data=config.data.evaluation,
        data_options=data_options(config),
        routing=Routing(config.data.cpus, 2 * config.data.window_bytes, train.row_bytes) if has_router else None,
        precision=config.precision,
        steps=steps,
        seed=config.seed,
        clip_norm=config.clip_norm,
        evaluate_every=config.evaluate_every,
        form_s=config.timeouts.form_s,
        collective_s=suspicion.longest_busy_s(config.timeouts.stall_s),
        run_url=f"{config.storage.rstrip('/')}/{config.name}",
        storage_options=config.storage_options,
        storage_s=config.timeouts.storage_s,
        save_every=config.checkpoint.every_steps,
        save_every_s=None if config.checkpoint.every_minutes is None else 60 * config.checkpoint.every_minutes,
        save_s=config.timeouts.save_s,
        gpus=config.scaling.resources_per_worker.get("GPU", 0),
    )
    limits = Limits(
        min_workers=config.scaling.min_workers,
        max_workers=most,
        spares=config.scaling.spares,
        place_s=max(config.scaling.wait_s, PLACE_S) if fits >= config.scaling.min_workers else config.scaling.wait_s,
        form_s=2 * config.timeouts.form_s,  # who is well gives up by itself before that
        leave_s=suspicion.longest_busy_s(config.timeouts.stall_s),
        save_s=config.timeouts.save_s,
        rollback_after=config.rollback_after,
        stall_s=config.timeouts.stall_s,
        logical_ranks=ranks,
        rebalances=config.scaling.stragglers == "relieve",
        schedule=tuple(sorted((step, min(workers, most)) for step, workers in config.scaling.schedule)),
    )
    scaling = config.scaling.model_copy(update={"max_workers": most})
    filled = config.model_copy(update={"micro_batch": micro, "logical_ranks": ranks, "scaling": scaling})
    digest = evaluation.digest if evaluation else None
    return ResolvedJob(filled, settings, limits, train.digest, digest, changed or {})


def data_options(config: JobConfig) -> dict[str, Any]:
    """For the client of the data's store."""
    return config.storage_options if config.data.storage_options is None else config.data.storage_options


PLACE_S = 30.0  # the resources are there; this is what a busy Ray may take to hand them out


def order_of(stored: dict[str, Any]) -> SampleOrder:
    """The data order of a run from its stored `config.yaml`."""
    resolved = stored["resolved"]
    return SampleOrder(
        samples=resolved["samples"],
        row_group=resolved["row_group"],
        global_batch=stored["global_batch"],
        logical_ranks=stored["logical_ranks"],
        window=resolved["window"],
        seed=stored["seed"],
        drop_last=stored["data"]["drop_last"],
    )


def _micro_for(batch: int, ranks: int | None, most: int) -> int:
    return batch // ranks if ranks is not None else choose_micro_batch(batch, most)

"""Elastic training of PyTorch models on Ray: a run that loses workers goes on, and no sample is lost or trained twice.

The names here are the public ones; everything else may change.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic_trainer.cluster.local import LocalCluster
    from elastic_trainer.config import CheckpointConfig, DataConfig, JobConfig, ScalingConfig, TimeoutsConfig
    from elastic_trainer.data.preparation.job import prepare
    from elastic_trainer.errors import (
        ClusterError,
        ConfigError,
        DataError,
        ElasticTrainerError,
        ResourcesError,
        RunFailed,
        StorageError,
        TaskError,
    )
    from elastic_trainer.following import Result, attach
    from elastic_trainer.trainer import ElasticTrainer
    from elastic_trainer.training.batches import Batch
    from elastic_trainer.training.run import Run
    from elastic_trainer.training.step import Step
    from elastic_trainer.training.task import TrainTask

__all__ = [
    "Batch",
    "CheckpointConfig",
    "ClusterError",
    "ConfigError",
    "DataConfig",
    "DataError",
    "ElasticTrainer",
    "ElasticTrainerError",
    "JobConfig",
    "LocalCluster",
    "ResourcesError",
    "Result",
    "Run",
    "RunFailed",
    "ScalingConfig",
    "Step",
    "StorageError",
    "TaskError",
    "TimeoutsConfig",
    "TrainTask",
    "attach",
    "prepare",
]

_HOME = {
    "Batch": "elastic_trainer.training.batches",
    "CheckpointConfig": "elastic_trainer.config",
    "ClusterError": "elastic_trainer.errors",
    "ConfigError": "elastic_trainer.errors",
    "DataConfig": "elastic_trainer.config",
    "DataError": "elastic_trainer.errors",
    "ElasticTrainer": "elastic_trainer.trainer",
    "ElasticTrainerError": "elastic_trainer.errors",
    "JobConfig": "elastic_trainer.config",
    "LocalCluster": "elastic_trainer.cluster.local",
    "ResourcesError": "elastic_trainer.errors",
    "Result": "elastic_trainer.following",
    "Run": "elastic_trainer.training.run",
    "RunFailed": "elastic_trainer.errors",
    "ScalingConfig": "elastic_trainer.config",
    "Step": "elastic_trainer.training.step",
    "StorageError": "elastic_trainer.errors",
    "TaskError": "elastic_trainer.errors",
    "TimeoutsConfig": "elastic_trainer.config",
    "TrainTask": "elastic_trainer.training.task",
    "attach": "elastic_trainer.following",
    "prepare": "elastic_trainer.data.preparation.job",
}


def __getattr__(name: str) -> Any:
    # torch and Ray take seconds to import, and the run's small actors need neither all of them nor the user's API
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)

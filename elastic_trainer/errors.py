"""What can go wrong, by whose fault it is and so what the caller can do.

ElasticTrainerError
├── ConfigError        the job's configuration: change the named field
├── DataError          a dataset folder or a source file: mend or prepare it again
├── TaskError          the user's task: cannot be imported, raised, or broke the loop's rules
├── ResourcesError     the cluster cannot hold what was asked: ask for less or give it more
├── StorageError       the store of runs: cannot be reached, refuses, or holds something damaged
│   └── Damaged        a file of it is not what was written: the message names it
├── Fenced             another controller has taken the run over: this one must stop
├── ClusterError       Ray did not start, or a part of ours in it died: see its logs
└── RunFailed          the run ended for a reason that the summary tells

StepAborted and CollectiveFailed are no failures of anybody: the loop swallows them and repeats the step.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ElasticTrainerError(Exception):
    """Any error that this package raises on purpose."""


class ConfigError(ElasticTrainerError):
    """A field of the configuration cannot be used as it is."""


class DataError(ElasticTrainerError):
    """A dataset folder, a data file or a source cannot be read as it is."""


class TaskError(ElasticTrainerError):
    """The user's task cannot be loaded, or breaks a rule of the training loop."""


class ResourcesError(ElasticTrainerError):
    """The cluster does not have the resources that the workers ask for."""


class StorageError(ElasticTrainerError):
    """The store of runs cannot be reached, refuses a call, does not answer, or holds something damaged."""


class Damaged(StorageError):
    """A file in the store is missing, cut short, or not what was written."""


class Fenced(ElasticTrainerError):
    """Another controller has taken the run over; whoever meets this writes and orders nothing any more."""


class ClusterError(ElasticTrainerError):
    """The Ray cluster, or an actor of the run in it, is not there."""


class RunFailed(ElasticTrainerError):
    """The run ended without finishing; the message is the reason."""


class CollectiveFailed(ElasticTrainerError):
    """A collective of the current generation did not complete on this rank; the group is aborted already."""


class StepAborted(ElasticTrainerError):
    """The current step was given up because the generation changes; it will be repeated."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint `" Did you mean 'x'?"` for the known name nearest to `name`, or nothing."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""

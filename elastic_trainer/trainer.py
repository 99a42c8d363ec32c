"""The one place that joins configuration, control, Ray and training: from a job to its result."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import ray
import yaml
from ray import cloudpickle
from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from elastic_trainer.cluster import placement
from elastic_trainer.cluster.controller import ControllerSpec, make_controller
from elastic_trainer.cluster.local import LocalCluster
from elastic_trainer.config import JobConfig
from elastic_trainer.data.dataset import DatasetIndex, read_index
from elastic_trainer.errors import ClusterError, ConfigError, ResourcesError, RunFailed, TaskError
from elastic_trainer.observability.progress import ProgressView
from elastic_trainer.observability.standing import Standing
from elastic_trainer.resolve import ResolvedJob, resolve
from elastic_trainer.storage.run_folder import RunFolder
from elastic_trainer.training.task import NamedTask, TrainFunction, TrainTask
from elastic_trainer.vocabulary import RunStatus

WATCH_S = 30.0  # one answer of the controller, which takes a quarter of a second
OnStanding = Callable[[Standing], None]


@dataclass(frozen=True)
class Result:
    """How a run ended; `summary` is the content of its `summary.json`."""

    status: RunStatus
    summary: dict[str, Any]

    @property
    def path(self) -> str:
        """Of `summary.json`."""
        return str(self.summary["path"])


class ElasticTrainer:
    """Trains a task on the workers of a Ray cluster and goes on when some of them are lost.

    Args:
        task: A `TrainTask`, or a function of the loop API that takes a `Run`. None: the one that `config.task` names.
        config: The job.
        cluster: A local cluster to use, running or not; by default the run starts one of its own with one node.
        on_standing: Called with each look at the run, several times a second.
    """

    def __init__(
        self,
        task: TrainTask | TrainFunction | None,
        config: JobConfig,
        *,
        cluster: LocalCluster | None = None,
        on_standing: OnStanding | None = None,
    ) -> None:
        if task is None and config.task is None:
            raise ConfigError("task is missing. Set task: module:Class, or pass a task to ElasticTrainer.")
        if task is not None and config.task is not None:
            raise ConfigError(f"task = {config.task!r} is set, and a task was passed too. Give one of them.")
        self._config = config
        self._task = task
        self._cluster = cluster
        self._on_standing = on_standing

    def fit(self) -> Result:
        """Train until the last step; returns when the run has ended and nothing of it is left running.

        The first SIGINT or SIGTERM stops the run at the next step boundary, a second one at once.

        Raises:
            ConfigError, DataError, TaskError, RunFolderError, ResourcesError: Before anything was started.
            RunFailed: The run ended without finishing; the message is the reason.
            ClusterError: Ray did not start, or the controller's process died.
        """
        with _StopSignals() as signals:
            load, fixed_shapes = self._loader()
            task = _pickled(load)
            train, evaluation = self._indexes()
            resolve(self._config, train, evaluation, fits=1, fixed_shapes=fixed_shapes)
            RunFolder.refuse_taken(self._config.storage, self._config.name)
            with self._running_cluster():
                signals.renew()
                fits = placement.workers_that_fit(self._config.scaling.resources_per_worker)
                capacity = self._check_resources(fits)
                job = resolve(self._config, train, evaluation, fits=fits, fixed_shapes=fixed_shapes)
                folder = RunFolder.create(self._config.storage, self._config.name)
                try:
                    folder.write_new("config.yaml", yaml.safe_dump(job.to_dict(), sort_keys=False).encode())
                    controller = make_controller(self._spec(job, folder, task, capacity))
                except BaseException:
                    folder.discard()
                    raise
                return self._follow(controller, job, signals, fits=fits, capacity=capacity)

    def _loader(self) -> tuple[Callable[[], TrainTask | TrainFunction], bool]:
        """What makes the task in a worker; made once here too, so that its mistakes show before anything starts."""
        if self._task is not None:
            task = self._task
            return (lambda: task), isinstance(task, TrainTask) and task.fixed_shapes
        assert self._config.task is not None
        named = NamedTask(self._config.task, dict(self._config.task_args))
        with _importable(os.getcwd()):
            made = named.load()
        return named.load, isinstance(made, TrainTask) and made.fixed_shapes

    def _indexes(self) -> tuple[DatasetIndex, DatasetIndex | None]:
        evaluation = self._config.data.evaluation
        return read_index(self._config.data.train), None if evaluation is None else read_index(evaluation)

    @contextlib.contextmanager
    def _running_cluster(self) -> Iterator[LocalCluster]:
        if self._cluster is not None and self._cluster.is_running:
            yield self._cluster
            return
        with self._cluster or LocalCluster() as cluster:
            yield cluster

    def _check_resources(self, fits: int) -> str:
        scaling = self._config.scaling
        capacity = (
            f"asked were {scaling.min_workers} workers or more with {placement.describe(scaling.resources_per_worker)} "
            f"each; the cluster has {placement.describe_cluster()}, where {fits} fit"
        )
        if fits < scaling.min_workers and scaling.wait_s == 0:
            raise ResourcesError(
                f"not enough resources: {capacity}. Lower scaling.min_workers or scaling.resources_per_worker, or set "
                "scaling.wait_s to wait for more."
            )
        return capacity

    def _spec(self, job: ResolvedJob, folder: RunFolder, task: bytes, capacity: str) -> ControllerSpec:
        return ControllerSpec(
            run_name=job.config.name,
            run_path=str(folder.path),
            run_mark=f"{job.config.name}-{secrets.token_hex(8)}",
            limits=job.limits,
            settings=_with_absolute_paths(job),
            resources=dict(job.config.scaling.resources_per_worker),
            task=task,
            import_paths=(os.getcwd(), *(path for path in sys.path if path)),
            capacity=capacity,
        )

    def _follow(
        self, controller: ActorHandle, job: ResolvedJob, signals: _StopSignals, *, fits: int, capacity: str
    ) -> Result:
        signals.take_over(lambda by, at_once: controller.stop.remote(by, at_once))
        cursor = 0
        try:
            with ProgressView(job.config.name) as view:
                view.say(_opening(job))
                if job.limits.max_workers > fits:
                    view.say(capacity)
                while True:
                    standing: Standing = ray.get(controller.watch.remote(cursor), timeout=WATCH_S)
                    cursor = standing.cursor
                    view.show(standing)
                    if self._on_standing is not None:
                        self._on_standing(standing)
                    if standing.has_ended:
                        break
            summary = ray.get(controller.summary.remote(), timeout=WATCH_S)
        except RayActorError:
            raise ClusterError(
                f"the controller of run {job.config.name!r} died (its process was killed or crashed), so the run "
                "cannot go on; its node agents end the workers. Start it anew under another name."
            ) from None
        finally:
            # whatever ends the watching ends the run: agents and store follow the controller
            with contextlib.suppress(Exception):
                ray.kill(controller)
        if summary["status"] == RunStatus.FAILED:
            raise RunFailed(f"run {job.config.name!r} failed: {summary['reason']}\nSummary: {summary['path']}")
        return Result(RunStatus(summary["status"]), summary)


class _StopSignals:
    """SIGINT and SIGTERM while `fit()` runs: before there is a controller they interrupt, afterwards they ask it."""

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Any] = {}
        self._stop: Callable[[str, bool], object] | None = None
        self._count = 0

    def __enter__(self) -> _StopSignals:
        self._before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
        self.renew()
        return self

    def renew(self) -> None:
        """Take the signals again: connecting to Ray gives SIGTERM a handler that aborts the process."""
        if threading.current_thread() is threading.main_thread():
            for each in self._before:
                signal.signal(each, self._on_signal)

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            for each, handler in self._before.items():
                signal.signal(each, handler)

    def take_over(self, stop: Callable[[str, bool], object]) -> None:
        """From now on signals go to `stop(by, at_once)`."""
        self._stop = stop

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self._stop is None:
            raise KeyboardInterrupt
        self._count += 1
        name = signal.Signals(signum).name
        if self._count > 2:
            raise KeyboardInterrupt
        # a signal handler may interrupt anything of Ray's, so the call goes from a thread
        threading.Thread(target=self._stop, args=(name, self._count > 1), daemon=True).start()


def _pickled(load: Callable[[], Any]) -> bytes:
    try:
        return bytes(cloudpickle.dumps(load))
    except Exception as error:
        raise TaskError(
            f"the task cannot be sent to workers: {type(error).__name__}: {error}. Keep files, locks, connections and "
            "the like out of its attributes; make them in build_model() or in the training function."
        ) from None


@contextlib.contextmanager
def _importable(path: str) -> Iterator[None]:
    """The folder in which a command was started comes first when its task is imported, as in the workers."""
    if path in sys.path or "" in sys.path:
        yield
        return
    sys.path.insert(0, path)
    try:
        yield
    finally:
        sys.path.remove(path)


def _with_absolute_paths(job: ResolvedJob) -> Any:
    import dataclasses

    evaluation = job.settings.evaluation_data
    return dataclasses.replace(
        job.settings,
        train_data=os.path.abspath(job.settings.train_data),
        evaluation_data=None if evaluation is None else os.path.abspath(evaluation),
    )


def _opening(job: ResolvedJob) -> str:
    config, order = job.config, job.settings.plan.order
    accumulate = order.per_rank // job.settings.plan.micro_batch
    return (
        f"run {config.name}: {job.settings.steps} steps of {order.global_batch} samples "
        f"({order.logical_ranks} logical ranks x {accumulate} x micro-batch {job.settings.plan.micro_batch}), "
        f"{order.samples} samples in {order.steps_per_epoch} steps an epoch, "
        f"{job.limits.min_workers} to {job.limits.max_workers} workers"
    )

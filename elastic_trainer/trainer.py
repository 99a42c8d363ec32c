"""The one place that joins configuration, control, Ray and training: from a job to its result."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ray
from ray import cloudpickle
from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from elastic_trainer.checkpoint.history import History, fold
from elastic_trainer.checkpoint.retention import Retention
from elastic_trainer.cluster import placement
from elastic_trainer.cluster.chronicle import SUMMARY
from elastic_trainer.cluster.controller import ControllerSpec
from elastic_trainer.cluster.local import IN_RAY_JOB, LocalCluster, join_cluster
from elastic_trainer.cluster.named_controller import find_controller, make_controller
from elastic_trainer.cluster.units import UnitSpec
from elastic_trainer.config import START_FROM, JobConfig, ScalingConfig
from elastic_trainer.control.suspicion import fence_after_s
from elastic_trainer.data.choice import choose_engine
from elastic_trainer.data.dataset import DatasetIndex, read_index
from elastic_trainer.errors import (
    ClusterError,
    ConfigError,
    ResourcesError,
    StorageError,
    TaskError,
)
from elastic_trainer.following import BEGIN_S, OnStanding, Result, follow, reach, stop
from elastic_trainer.observability.progress import ProgressView
from elastic_trainer.reports.pictures import can_draw, draw
from elastic_trainer.reports.record import read_record
from elastic_trainer.resolve import ResolvedJob, data_options, resolve
from elastic_trainer.resume import check_data, merge
from elastic_trainer.signals import StopSignals
from elastic_trainer.storage.log import RunLog
from elastic_trainer.storage.object_store import ObjectStore
from elastic_trainer.storage.probe import probe
from elastic_trainer.training.saver import versions
from elastic_trainer.training.settings import TrainSettings
from elastic_trainer.training.task import NamedTask, TaskFacts, TrainFunction, TrainTask, code_digest, importable
from elastic_trainer.vocabulary import RunStatus, SavedStep

GONE_S = 15.0  # for the controller of a run that has ended to leave its name


class ElasticTrainer:
    """Trains a task on the workers of a Ray cluster and goes on when some of them, or all, are lost.

    Args:
        task: A `TrainTask`, or a function of the loop API that takes a `Run`. None: the one that `config.task` names.
        config: The job. A run of that name that exists is resumed.
        cluster: A local cluster to use, running or not.
        address: Of a cluster to join, `auto` for the one on this machine. Without both: the cluster that this process
            is connected to, or `RAY_ADDRESS` names, else one of the run's own with one node.
        allow_change: Fields of the task (`task`, `task_args`, `task_args.NAME`) that may differ from the run's.
        on_standing: Called with each look at the run, several times a second.
    """

    def __init__(
        self,
        task: TrainTask | TrainFunction | None,
        config: JobConfig,
        *,
        cluster: LocalCluster | None = None,
        address: str | None = None,
        allow_change: Sequence[str] = (),
        on_standing: OnStanding | None = None,
    ) -> None:
        if task is None and config.task is None:
            raise ConfigError("task is missing. Set task: module:Class, or pass a task to ElasticTrainer.")
        if task is not None and config.task is not None:
            raise ConfigError(f"task = {config.task!r} is set, and a task was passed too. Give one of them.")
        self._config = config
        self._task = task
        self._cluster = cluster
        self._address = address
        self._allow_change = allow_change
        self._on_standing = on_standing

    def fit(self) -> Result:
        """Train until the last step; returns when the run has ended.

        On a cluster that the run started for itself nothing is left running then, whatever ended this call. On one that
        it joined the run goes on when this process dies: call it again to attach. The first SIGINT or SIGTERM stops the
        run after the step that is under way, saved; a second one at once.

        Raises:
            ConfigError, DataError, TaskError, StorageError, ResourcesError: Before anything was started.
            RunFailed: The run ended without finishing; the message is the reason.
            ClusterError: Ray did not start, or the run's controller did not come back.
        """
        with StopSignals() as signals:
            load, facts = self._loader()
            task = _pickled(load)
            self._resolved(History(), fits=None, facts=facts)  # mistakes that need no storage come first
            _check_kept(self._config.storage)
            store = ObjectStore(
                _absolute(self._config.storage), self._config.storage_options, timeout_s=self._config.timeouts.storage_s
            )
            probe(store)
            history = fold(RunLog(store.within(self._config.name)).read())
            job = self._resolved(history, fits=None, facts=facts)
            if history.ended == RunStatus.FINISHED and history.newest and history.newest.steps >= job.settings.steps:
                return self._finished(store.within(self._config.name), history)
            with self._connected():
                signals.renew()
                view = ProgressView(self._config.name)
                with view:
                    running = self._living()
                    name = self._config.name
                    signals.take_over(lambda by, at_once: stop(name, by, at_once))
                    if running is None:
                        running = self._start(history, store, task, facts, view)
                    else:
                        view.say(f"run {self._config.name} is going on: attached to it")
                        self._compare(reach(self._config.name)[1], view)
                    try:
                        return follow(name, running, view, self._on_standing, signals.ask_again)
                    finally:
                        self._draw(store.within(name), view)

    # ---- what is to be trained

    def _loader(self) -> tuple[Callable[[], TrainTask | TrainFunction], TaskFacts]:
        """What makes the task in a worker; made once here too, so that its mistakes show before anything starts."""
        if self._task is not None:
            task = self._task
            return (lambda: task), TaskFacts.of(task)
        assert self._config.task is not None
        named = NamedTask(self._config.task, dict(self._config.task_args))
        with importable(os.getcwd()):
            made = named.load()
        return named.load, TaskFacts.of(made)

    def _resolved(
        self, history: History, *, fits: int | None, facts: TaskFacts, has_router: bool = False
    ) -> ResolvedJob:
        config, changed = self._merged(history)
        facts.check(config.data.evaluation)
        train, evaluation = _indexes(config)
        if history.config is not None:
            check_data(history.config, train, config.data.train)
        return resolve(
            config,
            train,
            evaluation,
            fits=fits or 1,
            fixed_shapes=facts.fixed_shapes,
            has_router=has_router,
            stored=history.config,
            changed=changed,
        )

    def _merged(self, history: History) -> tuple[JobConfig, dict[str, Any]]:
        if history.config is None:
            return self._config, {}
        return merge(history.config, self._config, self._allow_change)

    def _finished(self, store: ObjectStore, history: History) -> Result:
        assert history.newest is not None
        print(
            f"run {self._config.name} has finished already, with {history.newest.steps} steps. To train on, raise "
            "steps (or epochs); to begin anew, choose another name."
        )
        try:
            summary = json.loads(store.read(SUMMARY))
        except FileNotFoundError:  # the controller was killed between the last two things that it writes
            summary = {"status": RunStatus.FINISHED.value, "path": ""}
        return Result(RunStatus.FINISHED, summary)

    def _draw(self, store: ObjectStore, view: ProgressView) -> None:
        if not can_draw():
            return
        try:
            pictures = draw(read_record(store, self._config.name), store)
        except ConfigError:
            return  # nothing was trained
        except Exception as error:  # whatever it is, the run is what matters
            view.say(f"the pictures could not be drawn: {error}")
        else:
            view.say(f"pictures: {', '.join(pictures)}")

    # ---- where

    @contextlib.contextmanager
    def _connected(self) -> Iterator[None]:
        cluster = self._cluster
        if cluster is not None and cluster.is_running:
            yield
        elif cluster is None and (self._address or os.environ.get("RAY_ADDRESS") or ray.is_initialized()):
            with join_cluster(self._address, sends_code=True):
                yield
        else:
            with cluster or LocalCluster():
                yield

    def _capacity(self, scaling: ScalingConfig, fits: int) -> str:
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

    # ---- starting and attaching

    def _living(self) -> ActorHandle | None:
        """The run's controller, if it has one in this cluster that has not ended."""
        deadline = time.monotonic() + GONE_S
        while (controller := find_controller(self._config.name)) is not None:
            try:
                found = ray.get(controller.describe.remote(), timeout=BEGIN_S)
                if not found["has_ended"] and not found["problem"]:
                    return controller
                controller.leave.remote()
            except RayActorError:
                pass  # it is leaving, or being restarted
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"the controller of run {self._config.name!r} neither works nor leaves. Look at it with `ray list "
                    "actors`, end it there, and run the job again."
                )
            time.sleep(0.1)
        return None

    def _start(
        self, history: History, store: ObjectStore, task: bytes, facts: TaskFacts, view: ProgressView
    ) -> ActorHandle:
        config = self._merged(history)[0]
        beside = placement.workers_that_fit(config.scaling.resources_per_worker, beside_cpus=config.data.cpus)
        has_router, data = choose_engine(
            config.data.engine,
            cpus=config.data.cpus,
            preprocesses=facts.preprocesses,
            workers=(config.scaling.max_workers or max(1, config.scaling.min_workers)) + config.scaling.spares,
            workers_beside=beside,
        )
        fits = beside if has_router else placement.workers_that_fit(config.scaling.resources_per_worker)
        capacity = self._capacity(config.scaling, fits)
        job = self._resolved(history, fits=fits, facts=facts, has_router=has_router)
        mark = f"{job.config.name}-{secrets.token_hex(8)}"
        start_from = _start_from(job.config, store, history)
        make_controller(self._spec(job, start_from, task, capacity, mark, history.term))
        controller, found = reach(self._config.name)
        if found["problem"]:
            controller.leave.remote()
            raise StorageError(found["problem"])
        view.say(_opening(job, history))
        view.say(data)
        for field, (old, new) in sorted(job.changed.items()):
            kept = "; what the saved optimizer holds, such as its learning rate, goes on as it was saved"
            view.say(f"{field} is {new} now, it was {old}" + (kept if field.startswith("task_args") else ""))
        if found["owner"] != mark:
            view.say("another submission of the run was first: attached to it")
            self._compare(found, view)
        elif job.limits.max_workers > fits:
            view.say(capacity)
        return controller

    def _compare(self, found: dict[str, Any], view: ProgressView) -> None:
        """A run that is going on is joined as it is: fixed fields must agree, what else differs is told."""
        mine = f"{_absolute(self._config.storage).rstrip('/')}/{self._config.name}"
        if found["folder"] != mine:
            raise ConfigError(
                f"another run of the name {self._config.name!r} is going on in this cluster, kept in "
                f"{found['folder']} and not in {mine}. Choose another name, or set storage to attach to it."
            )
        _, changed = merge(found["config"], self._config, self._allow_change)
        train, _ = _indexes(self._config)
        check_data(found["config"], train, self._config.data.train)
        for field, (old, new) in sorted(changed.items()):
            view.say(f"{field} = {new} is not taken: the run goes on with {old}. Stop it and run it again to change it")
        if found["code"] != self._code():
            view.say("the task's code differs from what the run was started with, which goes on")

    def _code(self) -> str:
        with importable(os.getcwd()):
            return code_digest(self._config.task if self._task is None else self._task)

    def _spec(
        self,
        job: ResolvedJob,
        start_from: tuple[str, SavedStep] | None,
        task: bytes,
        capacity: str,
        mark: str,
        after_term: int,
    ) -> ControllerSpec:
        config = job.config
        unit = UnitSpec(
            run_name=config.name,
            run_mark=mark,
            settings=dataclasses.replace(_with_absolute_paths(job.settings), start_from=start_from),
            resources=dict(config.scaling.resources_per_worker),
            task=task,
            import_paths=(os.getcwd(), *(path for path in sys.path if path)),
            versions=versions(),
            fence_after_s=fence_after_s(config.timeouts.stall_s),
            orphan_s=config.timeouts.orphan_s,
        )
        kept = config.checkpoint
        retention = Retention(kept.keep_last, kept.keep_every, kept.keep_best)
        return ControllerSpec(
            unit, job.limits, retention, job.to_dict(), job.changed, self._code(), after_term, capacity
        )


def _indexes(config: JobConfig) -> tuple[DatasetIndex, DatasetIndex | None]:
    evaluation = config.data.evaluation
    options = data_options(config)
    return read_index(config.data.train, options), None if evaluation is None else read_index(evaluation, options)


def _start_from(config: JobConfig, store: ObjectStore, history: History) -> tuple[str, SavedStep] | None:
    if config.start_from is None or history.newest is not None:
        return None
    found = START_FROM.fullmatch(config.start_from)
    assert found is not None, "the configuration is checked"
    other = store.within(found[1])
    saved = fold(RunLog(other).read()).saved
    wanted = [each for each in saved if found[2] is None or each.steps == int(found[2])]
    if not wanted:
        raise ConfigError(
            f"start_from = {config.start_from!r}: run {found[1]!r} in {store.url} has saved "
            f"{', '.join(str(each.steps) for each in saved) or 'nothing'}. Name one of these steps."
        )
    return other.url, wanted[-1]


def _pickled(load: Callable[[], Any]) -> bytes:
    try:
        return bytes(cloudpickle.dumps(load))
    except Exception as error:
        raise TaskError(
            f"the task cannot be sent to workers: {type(error).__name__}: {error}. Keep files, locks, connections and "
            "the like out of its attributes; make them in build_model() or in the training function."
        ) from None


def _check_kept(storage: str) -> None:
    if IN_RAY_JOB in os.environ and "://" not in storage and not os.path.isabs(os.path.expanduser(storage)):
        raise ConfigError(
            f"storage = {storage!r} is relative, and a Ray job runs in a copy of the working directory that Ray takes "
            "away. Give a folder that stays, such as --set storage=/shared/runs, or s3://…"
        )


def _absolute(path: str) -> str:
    return path if "://" in path else os.path.abspath(os.path.expanduser(path))


def _with_absolute_paths(settings: TrainSettings) -> TrainSettings:
    evaluation = settings.evaluation_data
    return dataclasses.replace(
        settings,
        train_data=_absolute(settings.train_data),
        evaluation_data=None if evaluation is None else _absolute(evaluation),
        run_url=_absolute(settings.run_url),
    )


def _opening(job: ResolvedJob, history: History) -> str:
    config, order = job.config, job.settings.plan.order
    accumulate = order.per_rank // job.settings.plan.micro_batch
    resumed = f"resumes after step {history.newest.steps}, " if history.newest is not None else ""
    return (
        f"run {config.name}: {resumed}{job.settings.steps} steps of {order.global_batch} samples "
        f"({order.logical_ranks} logical ranks x {accumulate} x micro-batch {job.settings.plan.micro_batch}), "
        f"{order.samples} samples in {order.steps_per_epoch} steps an epoch, "
        f"{job.limits.min_workers} to {job.limits.max_workers} workers, kept in {job.settings.run_url}"
    )

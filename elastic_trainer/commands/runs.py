"""Runs that exist: list, show, stop, ask how they stand, read their logs."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import time
from typing import TYPE_CHECKING, Any

import yaml

from elastic_trainer.checkpoint.history import History, fold
from elastic_trainer.commands.place import run_of, storage_of, when
from elastic_trainer.errors import ConfigError, StorageError
from elastic_trainer.observability.journal import read_stream
from elastic_trainer.storage.log import RunLog
from elastic_trainer.storage.object_store import ObjectStore
from elastic_trainer.vocabulary import Worker

if TYPE_CHECKING:
    from ray.actor import ActorHandle

FOLLOW_S = 0.5  # between looks at a log that is being followed
SCALED_WITHIN_S = 60.0  # an entry of the log, with a busy storage's repetitions
STOPPED_WITHIN_S = 1200.0  # a step and a save, each with its own bound


def list_runs(options: argparse.Namespace) -> int:
    """One line a run."""
    store = storage_of(options)
    living = _living(options)
    rows = [("NAME", "STATUS", "SAVED STEPS", "TERMS", "LAST CHANGE")]
    for name in store.folders(""):
        try:
            history = fold(RunLog(store.within(name)).read())
        except StorageError as error:
            rows.append((name, "damaged", "-", "-", str(error).splitlines()[0]))
            continue
        if history.config is None:
            continue  # not a run
        saved = f"{history.newest.steps if history.newest else 0} of {history.config['resolved']['steps']}"
        rows.append((name, _status(history, name, living), saved, str(history.term), when(history.at)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    return 0


def show_run(options: argparse.Namespace) -> int:
    """What is known of a run."""
    store, history = run_of(options)
    facts: dict[str, Any] = {
        "name": options.name,
        "folder": store.url,
        "status": _status(history, options.name, _living(options)),
        "reason": history.reason or None,
        "began": when(history.began_at),
        "last change": when(history.at),
        "terms": history.term,
        "saved steps": [each.steps for each in history.saved],
        "configuration": history.config,
    }
    print(yaml.safe_dump(facts, sort_keys=False).rstrip())
    return 0


def scale_run(options: argparse.Namespace) -> int:
    """Have a run go on with other numbers of workers."""
    least, colon, most = options.workers.partition(":")
    if not least.isdigit() or (colon and not most.isdigit()):
        raise ConfigError(f"{options.workers!r} is no number of workers. Write LEAST:MOST, such as 2:6, or one number.")
    import ray

    from elastic_trainer.cluster.local import join_cluster

    with join_cluster(options.address):
        asked = _controller(options.name).scale.remote(int(least), int(most or least), "elastic-trainer scale")
        if wrong := ray.get(asked, timeout=SCALED_WITHIN_S):
            raise ConfigError(wrong)
    print(f"run {options.name} goes on with {least} to {most or least} workers")
    return 0


def stop_run(options: argparse.Namespace) -> int:
    """Ask a run to end, and wait until it has."""
    import ray

    from elastic_trainer.cluster.local import join_cluster

    with join_cluster(options.address):
        controller = _controller(options.name)
        controller.stop.remote("elastic-trainer runs stop", options.at_once)
        print(f"run {options.name} stops after the step that is under way" + (", at once" if options.at_once else ""))
        summary = ray.get(controller.summary.remote(), timeout=STOPPED_WITHIN_S)
        controller.leave.remote()
    print(f"{summary['status']}: {summary['reason']}")
    return 0


def status(options: argparse.Namespace) -> int:
    """One look at a run: from its controller when it is going on, else from its log."""
    import ray

    from elastic_trainer.cluster.local import join_cluster
    from elastic_trainer.cluster.named_controller import find_controller
    from elastic_trainer.observability.progress import line_of

    if options.address or os.environ.get("RAY_ADDRESS"):
        with join_cluster(options.address):
            controller = find_controller(options.name)
            if controller is not None:
                print(line_of(ray.get(controller.watch.remote(1 << 60), timeout=30)))
                return 0
    _, history = run_of(options)
    newest = history.newest.steps if history.newest else "nothing"
    print(
        f"{_status(history, options.name, None)}: {history.reason or 'no controller here'}; newest saved step: {newest}"
    )
    return 0


def logs(options: argparse.Namespace) -> int:
    """What happened in a run, or what one of its workers has printed."""
    if options.worker is None:
        return _story(options)
    worker = _worker(options.worker)
    if options.address or os.environ.get("RAY_ADDRESS"):
        from elastic_trainer.cluster.local import join_cluster

        with join_cluster(options.address), contextlib.suppress(KeyboardInterrupt):
            if _print_living(options, worker):
                return 0
    store, _ = run_of(options)
    names = [name for name in store.names("logs") if name.startswith(f"logs/{worker}.")]
    for name in names:
        print(store.read(name).decode(errors="replace").rstrip())
    if not names:
        print(f"{worker} has left no log; there are logs of {_workers_with_logs(store)}")
    return 0 if names else 1


def _story(options: argparse.Namespace) -> int:
    store, _ = run_of(options)
    shown: set[str] = set()
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            fresh = [name for name in store.names("events") if name not in shown]
            for line in read_stream(fresh, store.read):
                if line["reason"]:
                    print(f"{when(line['at'])}  {_in_words(line['event'])}: {line['reason']}", flush=True)
            shown |= set(fresh)
            if not options.follow or fold(RunLog(store).read()).ended:
                return 0
            time.sleep(FOLLOW_S)
    return 0


def _in_words(event: str) -> str:
    """FormGeneration: form generation."""
    return re.sub(r"\B([A-Z])", r" \1", event).lower()


def _print_living(options: argparse.Namespace, worker: Worker) -> bool:
    """Print what a living worker printed; False when no node of the cluster has it."""
    import ray

    from elastic_trainer.cluster.units import actor_names
    from elastic_trainer.vocabulary import NAMESPACE

    agents = [
        ray.get_actor(name, namespace=NAMESPACE) for name in actor_names(options.name) if name.startswith("agent:")
    ]
    since: dict[str, int] = {}
    has_printed = False
    while True:
        found = [text for text in ray.get([agent.log.remote(worker, since) for agent in agents]) if text]
        for streams in found:
            has_printed = True
            for stream, text in streams.items():
                since[stream] = since.get(stream, 0) + len(text.encode())
                print(text, end="", flush=True)
        if not options.follow or not found:
            return has_printed
        time.sleep(FOLLOW_S)


def _controller(name: str) -> ActorHandle:
    from elastic_trainer.cluster.named_controller import find_controller

    controller = find_controller(name)
    if controller is None:
        raise ConfigError(f"run {name!r} is not going on in this cluster.")
    return controller


def _living(options: argparse.Namespace) -> set[str] | None:
    """The runs that go on in the cluster that was named; None when none was."""
    if not (options.address or os.environ.get("RAY_ADDRESS")):
        return None
    import ray

    from elastic_trainer.cluster.local import join_cluster
    from elastic_trainer.vocabulary import NAMESPACE

    with join_cluster(options.address):
        found = ray.util.list_named_actors(all_namespaces=True)
    names = [each["name"] for each in found if each["namespace"] == NAMESPACE]
    return {name.partition(":")[2] for name in names if name.startswith("controller:")}


def _status(history: History, name: str, living: set[str] | None) -> str:
    if history.ended:
        return history.ended
    if living is None:
        return "not ended"  # going on somewhere, or interrupted: without a cluster nobody can tell
    return "running" if name in living else "interrupted"


def _worker(text: str) -> Worker:
    worker_id, _, incarnation = text.removeprefix("w").partition(".")
    try:
        return Worker(int(worker_id), int(incarnation or 0))
    except ValueError:
        raise ConfigError(f"--worker {text}: not of the form w0.1 (worker 0, its second process).") from None


def _workers_with_logs(store: ObjectStore) -> str:
    names = {".".join(name.removeprefix("logs/").split(".")[:2]) for name in store.names("logs")}
    return ", ".join(sorted(names)) or "nobody"

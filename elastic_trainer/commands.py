"""What the command line does with runs that exist: list, show, stop, watch, read their logs, check what they saved."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import time
from typing import TYPE_CHECKING, Any

import yaml

from elastic_trainer.checkpoint.history import History, fold, resumptions
from elastic_trainer.checkpoint.manifest import summary_of
from elastic_trainer.data.ledger import audit, surviving
from elastic_trainer.errors import ConfigError, StorageError
from elastic_trainer.observability.journal import read_stream
from elastic_trainer.resolve import order_of
from elastic_trainer.storage.log import RunLog
from elastic_trainer.storage.object_store import ObjectStore
from elastic_trainer.vocabulary import SavedStep, Worker

if TYPE_CHECKING:
    from ray.actor import ActorHandle

FOLLOW_S = 0.5  # between looks at a log that is being followed
STOPPED_WITHIN_S = 1200.0  # a step and a save, each with its own bound


def add_storage_options(parser: argparse.ArgumentParser) -> None:
    """Where the runs are."""
    parser.add_argument("--storage", default="./runs", help="what holds the run folders (default ./runs)")
    parser.add_argument(
        "--storage-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="storage_options",
        help="for the storage's client, e.g. endpoint_url=http://host:9000",
    )


def add_address_option(parser: argparse.ArgumentParser) -> None:
    """Which cluster."""
    parser.add_argument("--address", help="of a Ray cluster, or auto; by default what RAY_ADDRESS says")


# ---- runs


def list_runs(options: argparse.Namespace) -> int:
    """One line a run."""
    store = _storage(options)
    living = _living(options)
    rows = [("NAME", "STATUS", "STEPS", "SAVED", "TERMS", "LAST CHANGE")]
    for name in store.folders(""):
        try:
            history = fold(RunLog(store.within(name)).read())
        except StorageError as error:
            rows.append((name, "damaged", "-", "-", "-", str(error).splitlines()[0]))
            continue
        if history.config is None:
            continue  # not a run
        steps = str(history.config["resolved"]["steps"])
        saved = str(history.newest.steps) if history.newest else "-"
        rows.append((name, _status(history, name, living), steps, saved, str(history.term), _when(history.at)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    return 0


def show_run(options: argparse.Namespace) -> int:
    """What is known of a run."""
    store, history = _run(options)
    facts: dict[str, Any] = {
        "name": options.name,
        "folder": store.url,
        "status": _status(history, options.name, _living(options)),
        "reason": history.reason or None,
        "began": _when(history.began_at),
        "last change": _when(history.at),
        "terms": history.term,
        "saved steps": [each.steps for each in history.saved],
        "configuration": history.config,
    }
    print(yaml.safe_dump(facts, sort_keys=False).rstrip())
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

    from elastic_trainer.cluster.controller import find_controller
    from elastic_trainer.cluster.local import join_cluster
    from elastic_trainer.observability.progress import line_of

    if options.address or os.environ.get("RAY_ADDRESS"):
        with join_cluster(options.address):
            controller = find_controller(options.name)
            if controller is not None:
                print(line_of(ray.get(controller.watch.remote(1 << 60), timeout=30)))
                return 0
    _, history = _run(options)
    newest = history.newest.steps if history.newest else "nothing"
    print(
        f"{_status(history, options.name, None)}: {history.reason or 'no controller here'}; newest saved step: {newest}"
    )
    return 0


# ---- what was saved


def list_checkpoints(options: argparse.Namespace) -> int:
    """One line a saved step."""
    _, history = _run(options)
    for each in history.saved:
        values = ", ".join(f"{name} {value:.4f}" for name, value in history.values.get(each.path, {}).items())
        print(f"step {each.steps}  {each.path}" + (f"  {values}" if values else ""))
    if not history.saved:
        print("nothing was saved")
    return 0


def show_checkpoint(options: argparse.Namespace) -> int:
    """What is in a saved step."""
    from elastic_trainer.checkpoint.reader import load_manifest

    store, history = _run(options)
    manifest = load_manifest(store, _saved(history, options))
    print(yaml.safe_dump(summary_of(manifest), sort_keys=False).rstrip())
    for tensor in manifest.layout.tensors:
        print(f"  {tensor.name}  {tensor.dtype}{list(tensor.shape)}")
    return 0


def verify_checkpoints(options: argparse.Namespace) -> int:
    """Read saved steps wholly and compare every digest."""
    from elastic_trainer.checkpoint.reader import verify

    store, history = _run(options)
    chosen = history.saved if options.step is None else [_saved(history, options)]
    bad = 0
    for each in chosen:
        try:
            manifest = verify(store, each)
            print(f"step {each.steps}: whole, {manifest.size_bytes} bytes in {len(manifest.files)} files")
        except StorageError as error:
            print(f"step {each.steps}: {error}")
            bad += 1
    if not chosen:
        print("nothing was saved")
    return 1 if bad else 0


# ---- logs and ledger


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
    store, _ = _run(options)
    names = [name for name in store.names("logs") if name.startswith(f"logs/{worker}.")]
    for name in names:
        print(store.read(name).decode(errors="replace").rstrip())
    if not names:
        print(f"{worker} has left no log; there are logs of {_workers_with_logs(store)}")
    return 0 if names else 1


def _story(options: argparse.Namespace) -> int:
    store, _ = _run(options)
    shown: set[str] = set()
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            fresh = [name for name in store.names("events") if name not in shown]
            for line in read_stream(fresh, store.read):
                if line["reason"]:
                    print(f"{_when(line['at'])}  {line['event']}: {line['reason']}", flush=True)
            shown |= set(fresh)
            if not options.follow or fold(RunLog(store).read()).ended:
                return 0
            time.sleep(FOLLOW_S)
    return 0


def _print_living(options: argparse.Namespace, worker: Worker) -> bool:
    """Print what a living worker printed; False when no node of the cluster has it."""
    import ray

    from elastic_trainer.cluster.local import NAMESPACE
    from elastic_trainer.cluster.units import actor_names

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


def audit_ledger(options: argparse.Namespace) -> int:
    """Hold a run's ledger against the data order."""
    is_folder = os.path.isdir(os.path.join(options.run, "log"))
    if is_folder:
        store = ObjectStore(options.run)
    else:
        options.name = options.run
        store, _ = _run(options)
    entries = RunLog(store).read_all()
    history = fold(entries)
    if history.config is None:
        raise ConfigError(f"{store.url}: no such run (its log is empty). Name a run of --storage, or its folder.")
    _check_segments(store, [segment for entry in entries for segment in entry.values.get("ledger", [])])
    returns = [(each.token, each.steps) for each in resumptions(entries)]
    lines = surviving(read_stream(store.names("ledger"), store.read), returns)
    found = audit(order_of(history.config), lines)
    if found.bad_steps():
        print(f"{found.steps} steps; the ledger contradicts the data order at steps {found.bad_steps()[:20]}")
        return 1
    facts = found.summary()
    print(
        f"{found.steps} steps: samples: {facts['samples_trained']} trained, {facts['samples_missing']} missing, "
        f"{facts['samples_repeated']} repeated; {facts['steps_redone']} steps redone"
    )
    return 0


def _check_segments(store: ObjectStore, segments: list[list[str]]) -> None:
    from elastic_trainer.checkpoint.manifest import sha256_of

    for name, sha256 in segments:
        try:
            content = store.read(name)
        except FileNotFoundError:
            raise StorageError(f"{store.url}/{name}: is missing, and the run's log names it.") from None
        if sha256_of(content) != sha256:
            raise StorageError(f"{store.url}/{name}: is not what the run's log names (its sha256 differs).")


# ----


def _storage(options: argparse.Namespace) -> ObjectStore:
    found = {}
    for option in options.storage_options:
        key, separator, value = option.partition("=")
        if not separator:
            raise ConfigError(f"--storage-option {option}: not of the form key=value.")
        found[key] = value
    return ObjectStore(options.storage, found)


def _run(options: argparse.Namespace) -> tuple[ObjectStore, History]:
    store = _storage(options).within(options.name)
    history = fold(RunLog(store).read())
    if history.config is None:
        raise ConfigError(f"{store.url}: no such run. `elastic-trainer runs ls --storage …` shows what there is.")
    return store, history


def _saved(history: History, options: argparse.Namespace) -> SavedStep:
    chosen = [each for each in history.saved if options.step is None or each.steps == options.step]
    if not chosen:
        known = ", ".join(str(each.steps) for each in history.saved) or "nothing"
        raise ConfigError(f"step {options.step} of run {options.name!r} is not saved; saved is {known}.")
    return chosen[-1]


def _controller(name: str) -> ActorHandle:
    from elastic_trainer.cluster.controller import find_controller

    controller = find_controller(name)
    if controller is None:
        raise ConfigError(f"run {name!r} is not going on in this cluster.")
    return controller


def _living(options: argparse.Namespace) -> set[str] | None:
    """The runs that go on in the cluster that was named; None when none was."""
    if not (options.address or os.environ.get("RAY_ADDRESS")):
        return None
    import ray

    from elastic_trainer.cluster.local import NAMESPACE, join_cluster

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


def _when(at: float) -> str:
    return datetime.datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M:%S")

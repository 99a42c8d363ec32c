"""The command `elastic-trainer`: run a job, prepare data, and look after runs that exist."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from elastic_trainer.commands import checkpoints, data, place, reports, runs
from elastic_trainer.config import JobConfig
from elastic_trainer.data.preparation.damage import POLICIES
from elastic_trainer.data.preparation.sources import FORMATS
from elastic_trainer.errors import ConfigError, ElasticTrainerError
from elastic_trainer.vocabulary import RunStatus, counted

if TYPE_CHECKING:
    from elastic_trainer.following import Result

EXIT_FAILED = 1
EXIT_REFUSED = 2  # nothing was started
EXIT_STOPPED = 130  # as a shell reports a command that Ctrl-C ended


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit with its status: 0 done, 1 failed, 2 refused before anything started, 130 stopped."""
    options = _parser().parse_args(arguments)
    try:
        status = options.command(options)
    except ConfigError as error:
        _say(f"{type(error).__name__}: {error}")
        status = EXIT_REFUSED
    except ElasticTrainerError as error:
        _say(f"{type(error).__name__}: {error}")
        status = EXIT_FAILED
    except BrokenPipeError:  # whoever read our output, such as `head`, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    except KeyboardInterrupt as interrupt:
        _say(str(interrupt) or "stopped before the run began")
        status = EXIT_STOPPED
    except Exception as error:
        if not type(error).__module__.startswith("ray."):
            raise
        _say(f"ClusterError: Ray says: {(str(error).strip() or type(error).__name__).splitlines()[-1]}")
        status = EXIT_FAILED
    sys.exit(status)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="elastic-trainer", description="Elastic training of PyTorch models on Ray.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="run a job file, or resume it by its name")
    run.add_argument("job", help="YAML file of the job")
    run.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", dest="overrides", help="e.g. scaling.max_workers=4"
    )
    run.add_argument(
        "--allow-change",
        action="append",
        default=[],
        metavar="FIELD",
        help="let a resumed run differ in task, task_args or task_args.NAME",
    )
    place.add_address_option(run)
    run.set_defaults(command=_run)

    _add_prepare(commands.add_parser("prepare", help="make a dataset folder of raw files, fully shuffled"))
    _add_data(commands.add_parser("data", help="look at data").add_subparsers(required=True, metavar="COMMAND"))
    _add_runs(commands.add_parser("runs", help="runs that exist").add_subparsers(required=True, metavar="COMMAND"))
    _add_checkpoints(
        commands.add_parser("checkpoints", help="what runs have saved").add_subparsers(required=True, metavar="COMMAND")
    )
    look = _about_a_run(commands, "status", "how a run stands", runs.status)
    place.add_address_option(look)
    watch = commands.add_parser("attach", help="watch a run that is going on until it ends")
    watch.add_argument("name", help="of the run")
    place.add_address_option(watch)
    watch.set_defaults(command=_attach)
    scale = commands.add_parser("scale", help="let a run go on with other numbers of workers")
    scale.add_argument("name", help="of the run")
    scale.add_argument("workers", metavar="LEAST:MOST", help="such as 2:6, or one number for both")
    place.add_address_option(scale)
    scale.set_defaults(command=runs.scale_run)
    log = _about_a_run(commands, "logs", "what happened in a run, or what a worker printed", runs.logs)
    place.add_address_option(log)
    log.add_argument("--worker", help="such as w0.0: the output of that worker")
    log.add_argument("--follow", action="store_true", help="go on until the run, or the worker, has ended")

    _about_a_run(commands, "explain", "why each generation of a run happened, and what it cost", reports.explain)
    _about_a_run(commands, "report", "draw a run's loss and who trained when, into its folder", reports.report)

    config = commands.add_parser("config", help="about job files").add_subparsers(required=True, metavar="COMMAND")
    schema = config.add_parser("schema", help="print the JSON schema of a job file")
    schema.set_defaults(command=_schema)
    return parser


def _about_a_run(commands: Any, name: str, text: str, act: Callable[..., int]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text)
    parser.add_argument("name", help="of the run")
    place.add_storage_options(parser)
    parser.set_defaults(command=act)
    return parser


def _add_prepare(make: argparse.ArgumentParser) -> None:
    make.add_argument("source", help="file, folder, pattern or URL of Parquet, JSONL, CSV, text, images or .npz")
    make.add_argument("--out", required=True, help="folder to make, a path or URL")
    make.add_argument("--format", choices=FORMATS, help="of the files; by default told by their names")
    make.add_argument("--include", action="append", default=[], metavar="PATTERN", help="of file names, e.g. '*.py'")
    make.add_argument("--exclude", action="append", default=[], metavar="PATTERN", help="of paths, e.g. 'build/*'")
    make.add_argument("--task", help="module:Class of a TrainTask whose transform(columns) the rows go through")
    make.add_argument("--task-arg", action="append", default=[], metavar="NAME=VALUE", dest="task_args", help="of it")
    make.add_argument(
        "--split", action="append", default=[], metavar="NAME=SHARE", help="e.g. validation=0.1; the rest is train"
    )
    make.add_argument("--on-error", choices=POLICIES, default="fail", help="what to do with damaged rows")
    make.add_argument("--block", type=int, default=256, help="tokens of a block of text (default 256)")
    make.add_argument("--image-size", metavar="HxW", help="decode images to this size; default: keep the files' bytes")
    make.add_argument("--seed", type=int, default=0, help="of the shuffle (default 0)")
    make.add_argument(
        "--source-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="source_options",
        help="for its client",
    )
    place.add_client_options(make)
    place.add_address_option(make)
    make.set_defaults(command=data.prepare_folder)


def _add_data(commands: Any) -> None:
    audited = commands.add_parser("audit", help="hold a run's ledger against the data order")
    audited.add_argument("run", help="name of the run, or its folder")
    place.add_storage_options(audited)
    audited.set_defaults(command=data.audit_ledger)
    for name, text, act in (
        ("show", "what a dataset folder holds", data.show),
        ("verify", "read it wholly and compare every digest", data.verify),
        ("sample", "print some rows", data.sample),
    ):
        parser = commands.add_parser(name, help=text)
        parser.add_argument("folder", help="dataset folder, a path or URL")
        place.add_client_options(parser)
        parser.set_defaults(command=act)
    parser.add_argument("--count", type=int, default=3, help="how many rows (default 3)")


def _add_runs(commands: Any) -> None:
    listed = commands.add_parser("ls", help="list them")
    place.add_storage_options(listed)
    place.add_address_option(listed)
    listed.set_defaults(command=runs.list_runs)
    place.add_address_option(_about_a_run(commands, "show", "what is known of one", runs.show_run))
    stop = commands.add_parser("stop", help="end one after its present step, saved")
    stop.add_argument("name", help="of the run")
    stop.add_argument("--at-once", action="store_true", help="do not wait for the step and the save")
    place.add_address_option(stop)
    stop.set_defaults(command=runs.stop_run)


def _add_checkpoints(commands: Any) -> None:
    _about_a_run(commands, "ls", "list the saved steps of a run", checkpoints.list_checkpoints)
    for name, text, act in (
        ("show", "what is in a saved step (default the newest)", checkpoints.show_checkpoint),
        ("verify", "read saved steps wholly (default all) and compare every digest", checkpoints.verify_checkpoints),
    ):
        _about_a_run(commands, name, text, act).add_argument("--step", type=int, help="number of done steps")


def _attach(options: argparse.Namespace) -> int:
    from elastic_trainer.following import attach

    try:
        return _report(attach(options.name, address=options.address))
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"no longer watched; run {options.name} goes on") from None


def _run(options: argparse.Namespace) -> int:
    config = JobConfig.from_yaml(options.job, options.overrides)
    print(f"run {config.name}: loading PyTorch and Ray", flush=True)
    from elastic_trainer.trainer import ElasticTrainer  # torch and Ray take seconds, and a wrong file is told at once

    return _report(ElasticTrainer(None, config, address=options.address, allow_change=options.allow_change).fit())


def _report(result: Result) -> int:
    for line in describe(result.summary):
        print(line)
    return EXIT_STOPPED if result.status is RunStatus.STOPPED else 0


def describe(summary: dict[str, Any]) -> list[str]:
    """What a run has come to, in a few lines; the path of its summary last."""
    if not summary["path"]:
        return [f"{summary['status']}; its summary was not written"]
    trained, missing, repeated = (summary[f"samples_{what}"] for what in ("trained", "missing", "repeated"))
    lines = [
        f"{summary['status']}: {summary['reason']}",
        f"{counted(summary['steps'], 'step')} in {summary['wall_s']:.1f} s, "
        f"final loss {_number(summary['final_loss'])}",
    ]
    if summary["evaluation"]:
        lines.append("evaluation: " + ", ".join(f"{name} {value:.4f}" for name, value in summary["evaluation"].items()))
    lines += [
        f"generation {g['generation']}: {counted(g['world_size'], 'worker')} from step {g['resume_step']}: "
        f"{g['reason']}"
        for g in summary["generations"]
    ]
    if summary["recovery_s"]:
        shown = ", ".join(f"{seconds:.3f} s" for seconds in summary["recovery_s"])
        lines.append(f"recovery, from the last step before a fault to the next one: {shown}")
    if missing is None:
        lines.append(f"samples: the ledger contradicts the data order at steps {summary['bad_steps'][:10]}")
    else:
        left_out = f", {summary['samples_skipped']} skipped" if summary["samples_skipped"] else ""
        lines.append(f"samples: {trained} trained, {missing} missing, {repeated} repeated{left_out}")
    return [*lines, str(summary["path"])]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _schema(options: argparse.Namespace) -> int:
    print(json.dumps(JobConfig.model_json_schema(), indent=2))
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr)

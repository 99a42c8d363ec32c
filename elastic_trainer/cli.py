"""The command `elastic-trainer`: run a job, prepare data, audit a run, print the configuration's schema."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import yaml

from elastic_trainer.config import JobConfig
from elastic_trainer.data.ledger import audit
from elastic_trainer.data.prepare import prepare
from elastic_trainer.errors import ConfigError, ElasticTrainerError
from elastic_trainer.observability.journal import read_stream
from elastic_trainer.resolve import order_of
from elastic_trainer.storage.run_folder import RunFolder
from elastic_trainer.vocabulary import RunStatus

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
    except KeyboardInterrupt:
        _say("stopped before the run began")
        status = EXIT_STOPPED
    sys.exit(status)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="elastic-trainer", description="Elastic training of PyTorch models on Ray.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="run a job file")
    run.add_argument("job", help="YAML file of the job")
    run.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", dest="overrides", help="e.g. scaling.max_workers=4"
    )
    run.set_defaults(command=_run)

    make = commands.add_parser("prepare", help="make a dataset folder of a numpy archive")
    make.add_argument("source", help=".npz file; its arrays become columns")
    make.add_argument("--out", required=True, help="folder to make")
    make.add_argument("--seed", type=int, default=0, help="of the shuffle (default 0)")
    make.set_defaults(command=_prepare)

    data = commands.add_parser("data", help="look at data").add_subparsers(required=True, metavar="COMMAND")
    audited = data.add_parser("audit", help="hold a run's ledger against the data order")
    audited.add_argument("run", help="name of the run, or its folder")
    audited.add_argument("--storage", default="./runs", help="where the run folders are (default ./runs)")
    audited.set_defaults(command=_audit)

    config = commands.add_parser("config", help="about job files").add_subparsers(required=True, metavar="COMMAND")
    schema = config.add_parser("schema", help="print the JSON schema of a job file")
    schema.set_defaults(command=_schema)
    return parser


def _run(options: argparse.Namespace) -> int:
    config = JobConfig.from_yaml(options.job, options.overrides)
    from elastic_trainer.trainer import ElasticTrainer  # torch and Ray take seconds, and a wrong file is told at once

    result = ElasticTrainer(None, config).fit()
    for line in describe(result.summary):
        print(line)
    return EXIT_STOPPED if result.status is RunStatus.STOPPED else 0


def describe(summary: dict[str, Any]) -> list[str]:
    """What a run has come to, in a few lines; the path of its summary last."""
    trained, missing, repeated = (summary[f"samples_{what}"] for what in ("trained", "missing", "repeated"))
    lines = [
        f"{summary['status']}: {summary['reason']}",
        f"{summary['steps']} steps in {summary['wall_s']:.1f} s, final loss {_number(summary['final_loss'])}",
    ]
    if summary["evaluation"]:
        lines.append("evaluation: " + ", ".join(f"{name} {value:.4f}" for name, value in summary["evaluation"].items()))
    lines += [
        f"generation {g['generation']}: {g['world_size']} workers from step {g['resume_step']}: {g['reason']}"
        for g in summary["generations"]
    ]
    if summary["recovery_s"]:
        shown = ", ".join(f"{seconds:.3f} s" for seconds in summary["recovery_s"])
        lines.append(f"recovery, from the last step before a fault to the next one: {shown}")
    if missing is None:
        lines.append(f"samples: the ledger contradicts the data order at steps {summary['bad_steps'][:10]}")
    else:
        lines.append(f"samples: {trained} trained, {missing} missing, {repeated} repeated")
    return [*lines, str(summary["path"])]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _prepare(options: argparse.Namespace) -> int:
    index = prepare(options.source, options.out, seed=options.seed)
    columns = ", ".join(f"{column.name} {column.dtype}{list(column.shape)}" for column in index.columns)
    print(f"{options.out}: {index.rows} rows in {len(index.files)} files, row groups of {index.row_group}; {columns}")
    return 0


def _audit(options: argparse.Namespace) -> int:
    is_folder = os.path.isdir(options.run)
    folder = RunFolder(options.run if is_folder else os.path.join(options.storage, options.run))
    try:
        stored = yaml.safe_load(folder.read("config.yaml"))
    except FileNotFoundError:
        raise ConfigError(
            f"{folder.path}: no such run (it has no config.yaml). Name a run of --storage, or its folder."
        ) from None
    found = audit(order_of(stored), read_stream(folder.names("ledger"), folder.read))
    if found.bad_steps():
        print(f"{found.steps} steps; the ledger contradicts the data order at steps {found.bad_steps()[:20]}")
        return EXIT_FAILED
    facts = found.summary()
    print(
        f"{found.steps} steps: samples: {facts['samples_trained']} trained, {facts['samples_missing']} missing, "
        f"{facts['samples_repeated']} repeated; {facts['steps_redone']} steps redone"
    )
    return 0


def _schema(options: argparse.Namespace) -> int:
    print(json.dumps(JobConfig.model_json_schema(), indent=2))
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr)

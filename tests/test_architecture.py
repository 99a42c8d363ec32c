"""The structure says what it is: tests mirror modules, public names are listed, README's tree is the disk's."""

from __future__ import annotations

import importlib
import re
import subprocess
from pathlib import Path

import pytest

import elastic_trainer

ROOT = Path(__file__).parent.parent
MODULES = sorted(
    str(path.relative_to(ROOT / "elastic_trainer"))
    for path in (ROOT / "elastic_trainer").rglob("*.py")
    if path.name != "__init__.py"
)
TESTED_ELSEWHERE = {
    "__main__.py": "cluster/test_endings.py",  # every run there starts it
    "control/events.py": "control/test_machine.py",  # declarations without behaviour of their own
    "control/effects.py": "control/test_machine.py",
    "cluster/messages.py": "cluster/test_controller.py",
    "observability/lines.py": "cluster/test_outbox.py",
    "observability/standing.py": "observability/test_progress.py",
    "training/process_group.py": "training/test_gloo.py",  # an interface
    "training/settings.py": "training/test_run.py",
    "training/boundary.py": "training/test_nccl.py",  # where ranks decide two steps later
    "control/rules.py": "control/test_machine.py",  # the machine's rules and what they share
    "control/membership.py": "control/test_machine.py",
    "control/watched.py": "control/test_suspicion.py",
    "cluster/named_controller.py": "cluster/test_controller.py",
    "cluster/places.py": "cluster/test_hosts.py",  # hosts are lost and announced to go there
    "storage/client.py": "storage/test_object_store.py",  # each client runs every test of the store
    "storage/clients.py": "storage/test_object_store.py",
    "storage/local_client.py": "storage/test_object_store.py",
    "storage/fsspec_client.py": "storage/test_object_store.py",
    "storage/s3_client.py": "storage/test_object_store.py",
    "signals.py": "cluster/test_endings.py",
    "following.py": "cluster/test_takeover.py",
    "cluster/records.py": "cluster/test_takeover.py",
    "cluster/units.py": "cluster/test_takeover.py",
    "cluster/logs.py": "test_commands.py",
    "cluster/chronicle.py": "cluster/test_controller.py",  # actors and what only whole runs show
    "cluster/cluster_process.py": "cluster/test_endings.py",
    "cluster/worker.py": "cluster/test_endings.py",
    "commands/place.py": "test_commands.py",
    "commands/runs.py": "test_commands.py",
    "commands/checkpoints.py": "test_commands.py",
    "commands/data.py": "test_commands.py",
    "commands/reports.py": "reports/test_story.py",
    "data/engine.py": "data/test_direct.py",  # of which both engines are made
    "data/routed.py": "data/test_router.py",
    "data/routing.py": "data/test_router.py",
    "data/ray_context.py": "data/test_router.py",
    "data/preparation/columns.py": "data/preparation/test_formats.py",
    "data/preparation/damage.py": "data/preparation/test_formats.py",
    "data/preparation/readers.py": "data/preparation/test_formats.py",
    "data/preparation/shuffle.py": "data/preparation/test_formats.py",
    "data/preparation/sources.py": "data/preparation/test_formats.py",
    "data/preparation/tokens.py": "data/preparation/test_formats.py",
    "reports/record.py": "reports/test_story.py",
}


@pytest.mark.parametrize("module", MODULES)
def test_each_module_has_its_test_file(module: str) -> None:
    path = Path(module)
    test = TESTED_ELSEWHERE.get(module, str(path.parent / f"test_{path.name}"))

    assert (ROOT / "tests" / test).exists(), f"{module} has no {test}"


def test_no_exception_is_stale() -> None:
    assert set(TESTED_ELSEWHERE) <= set(MODULES)


def test_public_names_are_exactly_those_listed() -> None:
    assert sorted(elastic_trainer._HOME) == sorted(elastic_trainer.__all__)
    for name in elastic_trainer.__all__:
        home = importlib.import_module(elastic_trainer._HOME[name])
        assert getattr(elastic_trainer, name) is getattr(home, name)
    with pytest.raises(AttributeError):
        elastic_trainer.something_else  # noqa: B018


def tracked() -> set[str]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    return {line for line in listed.stdout.splitlines() if (ROOT / line).exists()}


def test_the_top_level_is_the_agreed_one() -> None:
    folders = {path.split("/")[0] for path in tracked() if "/" in path}

    assert folders <= {"elastic_trainer", "jobs", "cluster_configs", "tests", "notebooks", ".ci"}


def test_the_tree_in_the_readme_is_the_disks() -> None:
    text = (ROOT / "README.md").read_text()
    block = re.search(r"```\nelastic_trainer/\n(.*?)```", text, re.S)
    assert block is not None, "README has no file tree"
    folders: dict[int, str] = {0: ""}  # by depth
    named = set()
    for line in block.group(1).splitlines():
        found = re.match(r"( *)(\S+)", line)
        if not found:
            continue
        depth, name = len(found.group(1)) // 2, found.group(2)
        if name.endswith("/"):
            folders[depth] = folders[depth - 1] + name
        elif name.endswith(".py"):
            named.add(folders[depth - 1] + name)

    assert named == set(MODULES)

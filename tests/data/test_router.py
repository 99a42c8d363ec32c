"""The Ray Data engine and the direct one serve the same bytes, whatever happens to routers, nodes and world sizes."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray

from elastic_trainer.cluster.local import LocalCluster
from elastic_trainer.data.order import SampleOrder
from elastic_trainer.data.router import router_name
from elastic_trainer.data.routing import Routing, smaller_group
from elastic_trainer.vocabulary import NAMESPACE
from tests.conftest import make_dataset
from tests.data.routed import ROWS, Chancy, Idle, Raising, Routed, Shifting, Sized
from tests.rotation import rotating


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_dataset(tmp_path_factory.mktemp("routed") / "train", ROWS)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(cpus_per_node=2) as running:
        yield running


@pytest.fixture
def routed(request: pytest.FixtureRequest, cluster: LocalCluster, folder: str) -> Iterator[Callable[..., Routed]]:
    made: list[Routed] = []

    def make(task: Any, **options: Any) -> Routed:
        made.append(Routed(re.sub(r"\W", "", request.node.name)[:40], folder, task, **options))
        return made[-1]

    yield make
    for each in made:
        each.end()


@pytest.mark.parametrize("task", rotating([Shifting(), Sized()], 1))
def test_both_engines_serve_the_same_bytes_while_the_world_changes(task: Any, routed: Callable[..., Routed]) -> None:
    """2 -> 1 -> 3 workers on one running execution, over the border of an epoch, and back to an earlier step."""
    each = routed(task)
    two, one = [range(6), range(6, 12)], [range(12)]
    three = [range(4), range(4, 8), range(8, 12)]
    border = each.order.steps_per_epoch

    for steps, ranges in (
        (range(border - 60, border - 30), two),
        (range(border - 30, border + 10), one),
        (range(border + 10, border + 40), three),
        (range(50, 70), two),
    ):
        assert each.serve(steps, ranges) == each.expected(steps), (steps, len(ranges))


def test_ray_data_really_serves(routed: Callable[..., Routed]) -> None:
    """What the worker does not make itself comes from the router, in time when the machine has time for it."""
    routed(Shifting(), window=12).serve_until_routed(100, [range(12)], share=0.5)


def test_a_router_that_is_killed_comes_back(routed: Callable[..., Routed]) -> None:
    each = routed(Shifting())
    steps = range(150)

    def kill(step: int) -> None:
        if step == 60:
            router = ray.get_actor(router_name(each.name), namespace=NAMESPACE)
            os.kill(ray.get(router.pid.remote()), signal.SIGKILL)

    assert each.serve(steps, [range(6), range(6, 12)], kill) == each.expected(steps)


def test_a_row_on_which_preprocess_raises_is_told_with_the_users_error(routed: Callable[..., Routed]) -> None:
    each = routed(Raising())
    with pytest.raises(ValueError, match="row 77 is bad") as raised:
        each.serve(range(each.order.steps_per_epoch), [range(12)])
    assert "routed.py" in str(raised.traceback[-1].path)


def test_chance_in_preprocess_is_noticed(routed: Callable[..., Routed]) -> None:
    each = routed(Chancy())
    each.serve(range(6), [range(12)])
    assert any("two different rows of one sample" in note for note in each.notes)


def test_without_a_cpu_nothing_hangs(routed: Callable[..., Routed]) -> None:
    """Ray Data would wait for ever without a word."""
    blockers = [ray.remote(Idle).options(num_cpus=1).remote() for _ in range(2)]
    ray.get([blocker.ping.remote() for blocker in blockers])
    try:
        each = routed(Shifting())
        assert each.serve(range(30), [range(12)]) == each.expected(range(30))
    finally:
        for blocker in blockers:
            ray.kill(blocker)


def test_a_group_fits_into_windows_whatever_the_sizes() -> None:
    for ranks in (1, 2, 6, 12, 64):
        for row_bytes in (1.0, 1e3, 1e5, 1e7):
            order = SampleOrder(10_000, 100, 24 * ranks, ranks, 5, 0)
            group = Routing(1, 1 << 20, row_bytes).group_of(order, 1 << 20)
            assert ranks % group == 0
            for size in (1, 1 << 17, 1 << 20, 1 << 30):
                smaller = smaller_group(group, size, 1 << 20)
                assert group % smaller == 0
                assert size * smaller / group <= 2 * (1 << 17) or smaller == 1

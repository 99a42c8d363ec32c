from __future__ import annotations

from typing import Any

import pytest

from elastic_trainer.cluster import placement

NODES = [
    {"Alive": True, "Resources": {"CPU": 4.0, "GPU": 1.0, "memory": 1e9, "node:10.0.0.1": 1.0}},
    {"Alive": True, "Resources": {"CPU": 0.3}},
    {"Alive": False, "Resources": {"CPU": 64.0}},
]


@pytest.fixture(autouse=True)
def nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement.ray, "nodes", lambda: NODES)


@pytest.mark.parametrize(
    ("need", "fits"),
    [({"CPU": 1}, 4), ({"CPU": 0.1}, 43), ({"CPU": 1, "GPU": 1}, 1), ({"TPU": 1}, 0), ({"CPU": 5}, 0)],
)
def test_workers_are_counted_by_the_scarcest_resource_of_each_living_node(need: Any, fits: int) -> None:
    assert placement.workers_that_fit(need) == fits


def test_the_cluster_is_told_in_words() -> None:
    assert placement.describe_cluster() == "2 nodes with {CPU: 4, GPU: 1}, {CPU: 0.3}"

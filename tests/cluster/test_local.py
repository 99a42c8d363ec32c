from __future__ import annotations

import os
from pathlib import Path

import pytest
import ray

from elastic_trainer import ClusterError, LocalCluster
from elastic_trainer.cluster.local import join_cluster


def test_a_cluster_comes_up_with_its_nodes_and_leaves_the_environment_as_it_was() -> None:
    before = dict(os.environ)

    with LocalCluster(nodes=2, cpus_per_node=1) as cluster:
        assert sum(node["Alive"] for node in ray.nodes()) == 2
        assert ray.cluster_resources()["CPU"] == 2
        folder = cluster.temp_folder
        with pytest.raises(ClusterError, match="connected to a Ray cluster already"):
            LocalCluster().start()
        assert cluster.is_running

    assert not ray.is_initialized()
    assert not Path(folder).exists()
    assert {k: v for k, v in os.environ.items() if k.startswith("RAY_")} == {
        k: v for k, v in before.items() if k.startswith("RAY_")
    }


def test_a_cluster_has_at_least_one_node() -> None:
    with pytest.raises(ValueError, match="at least one node"):
        LocalCluster(nodes=0)


def test_an_address_at_which_nobody_answers_is_told_at_once() -> None:
    with (
        pytest.raises(ClusterError, match=r"nobody answers .* address 127\.0\.0\.1:9 .*refused"),
        join_cluster("127.0.0.1:9"),
    ):
        pass

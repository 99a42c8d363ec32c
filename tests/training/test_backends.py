from __future__ import annotations

import os

import pytest
import torch

from elastic_trainer.training.backends import backend_for
from elastic_trainer.training.gloo import GlooBackend
from elastic_trainer.training.nccl import NcclBackend, prepare_environment
from tests.harness import settings_for


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TORCH_NCCL_ASYNC_ERROR_HANDLING"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_without_a_gpu_it_is_gloo_on_the_interface_that_ray_uses(dataset: str) -> None:
    assert isinstance(backend_for(settings_for(dataset, steps=1), "127.0.0.1"), GlooBackend)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"


def test_a_setting_of_the_users_comes_first(dataset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    backend_for(settings_for(dataset, steps=1), "127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU that torch can use")
def test_with_a_gpu_it_is_nccl(dataset: str) -> None:
    backend = backend_for(settings_for(dataset, steps=1, gpus=1), "127.0.0.1")
    assert isinstance(backend, NcclBackend)
    assert backend.device.torch_device == torch.device("cuda", 0)


def test_nothing_that_ends_processes_because_of_time_stays_switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    monkeypatch.setenv("TORCH_NCCL_ENABLE_MONITORING", "1")
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    prepare_environment("lo")
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert os.environ["TORCH_NCCL_ENABLE_MONITORING"] == "0"
    assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "0"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "lo"

"""Which process-group backend a worker takes: NCCL where it has a GPU, else gloo."""

from __future__ import annotations

import os

import torch

from elastic_trainer.training.device import Gpu
from elastic_trainer.training.gloo import GlooBackend
from elastic_trainer.training.nccl import NcclBackend, prepare_environment
from elastic_trainer.training.process_group import ProcessGroupBackend
from elastic_trainer.training.rendezvous import interface_of
from elastic_trainer.training.settings import TrainSettings


def backend_for(settings: TrainSettings, address: str) -> ProcessGroupBackend:
    """The backend of this process, which talks to its peers over the interface of `address`, by which Ray knows it.

    A setting of the user's own, GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME, comes before that. Ray shows a process only
    the GPU that is its own, so that is the first.
    """
    interface = interface_of(address)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if settings.gpus and torch.cuda.is_available():
        prepare_environment(interface)
        device = Gpu(torch.device("cuda", 0))
        return NcclBackend(settings.run_name, settings.form_s, settings.collective_s, device)
    return GlooBackend(settings.run_name, settings.form_s, settings.collective_s)

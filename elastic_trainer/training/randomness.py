"""Random streams that belong to a place in the run, not to a process: only the seed has to be kept."""

from __future__ import annotations

import random

import numpy as np
import torch

from elastic_trainer.data.order import key

_DRAWS = 8  # separates these streams from other keys


def seed_everything(*parts: int) -> None:
    """Seed torch, numpy and `random` by whole numbers such as (seed, step, logical rank, micro-batch)."""
    value = key(_DRAWS, *parts)
    # torch.manual_seed would format a stack trace for each kind of device that is absent: 15 % of a small step
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(value)
    np.random.seed(value & 0xFFFFFFFF)
    random.seed(value)

"""Random streams that belong to a place in the run, not to a process: only the seed has to be kept."""

from __future__ import annotations

import random

import numpy as np
import torch

from elastic_trainer.data.order import key

_DRAWS = 8  # separates these streams from other keys


def stream(*parts: int) -> int:
    """What names the random stream of a place in the run, such as (seed, step, logical rank, micro-batch)."""
    return key(_DRAWS, *parts)


def seed_everything(value: int) -> None:
    """Let torch, numpy and `random` draw from this stream."""
    # torch.manual_seed would format a stack trace for each kind of device that is absent: 15 % of a small step
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(value)
    np.random.seed(value & 0xFFFFFFFF)
    random.seed(value)

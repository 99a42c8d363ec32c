from __future__ import annotations

import random

import numpy as np
import torch

from elastic_trainer.training.randomness import seed_everything, stream


def drawn(*parts: int) -> tuple[float, float, float]:
    seed_everything(stream(*parts))
    return float(torch.rand(1)), float(np.random.rand()), random.random()


def test_a_place_in_the_run_has_its_own_stream() -> None:
    places = [(7, step, rank, micro) for step in range(5) for rank in range(5) for micro in range(2)]

    assert drawn(7, 1, 2, 0) == drawn(7, 1, 2, 0)
    assert len({drawn(*place) for place in places}) == len(places)

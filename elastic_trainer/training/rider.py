"""The small vector that rides with every step's gradients: what all ranks must agree on, in one reduction.

float64, shape (11,), summed over ranks. Whole numbers are exact in it: the digest goes as two 32-bit limbs, whose sums
over 4,096 ranks stay below 2**44.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from elastic_trainer.errors import TaskError

LIMB = 1 << 32
WEIGHT, LOSS_SUM = 0, 1  # where they lie


@dataclass(frozen=True, slots=True)
class Rider:
    """One rank's part, or the sum over all."""

    weight: float
    loss_sum: float
    steps: int
    samples: int
    digest: int
    park: int
    stop: int
    changed_buffers: int
    save: int  # ranks that find a save due
    busy: int  # ranks whose copy of the last save is still needed

    def to_tensor(self) -> torch.Tensor:
        """float64, shape (11,)."""
        low, high = self.digest % LIMB, self.digest // LIMB
        values = [self.weight, self.loss_sum, self.steps, self.samples, low, high]
        # not torch.tensor, which takes 0.1 ms when the caches are cold
        return torch.from_numpy(
            np.array([*values, self.park, self.stop, self.changed_buffers, self.save, self.busy], dtype=np.float64)
        )

    @classmethod
    def from_tensor(cls, summed: torch.Tensor) -> Rider:
        """The sum over all ranks, of a tensor on the CPU that was reduced."""
        weight, loss_sum, *counts = summed.numpy().tolist()
        steps, samples, low, high, *flags = map(int, counts)
        return cls(weight, loss_sum, steps, samples, (low + high * LIMB) % (1 << 64), *flags)

    def check_steps(self, step: int, world_size: int) -> None:
        """Every rank must have been in the same step; a sum that says otherwise means that state is wrong."""
        if self.steps != step * world_size:
            raise AssertionError(f"ranks reduced different steps together: sum {self.steps}, expected {step}")

    def scale(self, step: int) -> float:
        """1 / weight of the step."""
        if not self.weight > 0:
            raise TaskError(
                f"the weights of step {step} sum to {self.weight:g}; they must be positive. "
                "Return (sum, weight) with a weight above 0 for some micro-batch of every step."
            )
        return 1.0 / self.weight

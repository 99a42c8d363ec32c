"""Precision of forward and backward: fp32 as the task computes, or bf16 under autocast.

Weights, gradients, their reduction, clipping and the optimizer keep the parameters' own precision. bf16 has the range
of fp32, so losses need no scaling.
"""

from __future__ import annotations

import torch


def autocast(precision: str, device: torch.device) -> torch.autocast:
    """A context in which operations on `device` run in `precision`: `fp32` or `bf16`."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16")

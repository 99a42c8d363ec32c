"""Precision of forward and backward: fp32 as the task computes, or bf16 under autocast.

Weights, gradients, their reduction, clipping and the optimizer keep the parameters' own precision. bf16 has the range
of fp32, so losses need no scaling.
"""

from __future__ import annotations

import contextlib

import torch

Context = contextlib.AbstractContextManager[object]
_AS_IT_IS = contextlib.nullcontext()


def forward(precision: str, device: torch.device) -> Context:
    """In which operations on `device` run in `precision`: `fp32` or `bf16`."""
    return torch.autocast(device.type, dtype=torch.bfloat16) if precision == "bf16" else _AS_IT_IS


def backward(precision: str, device: torch.device) -> Context:
    """Inside `forward`: what backward computes has the precision of forward already."""
    return torch.autocast(device.type, enabled=False) if precision == "bf16" else _AS_IT_IS

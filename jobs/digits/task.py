"""Handwritten digits (8 x 8 grey values): a small convolutional network with batch-norm and dropout."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from elastic_trainer import Batch, TrainTask


class Digits(TrainTask):
    """Classifies the digits 0 to 9.

    Args:
        width: Channels of the first convolution; the second has twice as many.
        learning_rate: Of AdamW.
    """

    def __init__(self, width: int = 32, learning_rate: float = 2e-3) -> None:
        self.width = width
        self.learning_rate = learning_rate

    def build_model(self) -> nn.Module:
        """Two convolutions and a linear layer; input (rows, 8, 8), output (rows, 10)."""
        width = self.width
        return nn.Sequential(
            nn.Unflatten(1, (1, 8)),  # (rows, 8, 8) -> (rows, 1, 8, 8)
            nn.Conv2d(1, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.25),
            nn.Linear(2 * width * 16, 10),
        )

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW with one learning rate for all."""
        return torch.optim.AdamW(model.parameters(), lr=self.learning_rate)

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Mean cross-entropy."""
        return functional.cross_entropy(model(batch["image"]), batch["digit"])

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, tuple[torch.Tensor, int]]:
        """Share of right answers, and the mean cross-entropy."""
        output = model(batch["image"])
        right = (output.argmax(1) == batch["digit"]).sum()
        loss = functional.cross_entropy(output, batch["digit"], reduction="sum")
        return {"accuracy": (right, batch.rows), "loss": (loss, batch.rows)}

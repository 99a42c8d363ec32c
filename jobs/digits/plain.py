"""The same network trained by a plain single-process PyTorch loop, to compare with.

python -m jobs.digits.plain [STEPS]
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

from elastic_trainer.data.reader import DatasetReader
from jobs.digits.task import Digits

BATCH = 96


def tensors(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Images (rows, 8, 8) and digits (rows,) of a dataset folder."""
    reader = DatasetReader(folder)
    rows = reader.rows(np.arange(reader.index.rows))
    return torch.from_numpy(rows["image"]), torch.from_numpy(rows["digit"])


def train_plainly(folder: Path, steps: int) -> float:
    """Train and return the accuracy on the held-out images."""
    torch.manual_seed(0)
    task = Digits()
    model = task.build_model()
    optimizer = task.build_optimizer(model)
    images, digits = tensors(folder / "train")
    done = 0
    while done < steps:
        for chosen in torch.randperm(len(images)).split(BATCH):
            if done == steps:
                break
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images[chosen]), digits[chosen]).backward()
            optimizer.step()
            done += 1
    model.eval()
    images, digits = tensors(folder / "test")
    with torch.no_grad():
        return float((model(images).argmax(1) == digits).float().mean())


if __name__ == "__main__":
    accuracy = train_plainly(Path("data/digits"), int(sys.argv[1]) if len(sys.argv) > 1 else 180)
    print(f"test accuracy of the plain run: {accuracy:.4f}")

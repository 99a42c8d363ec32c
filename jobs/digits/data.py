"""Prepares scikit-learn's handwritten digits as dataset folders: data/digits/train and data/digits/test.

python jobs/digits/data.py [FOLDER]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

from elastic_trainer import prepare

TEST_EVERY = 5  # each fifth image is held out


def prepare_digits(folder: Path) -> None:
    """Make the dataset folders under `folder`, unless they are there."""
    digits = load_digits()
    images, labels = (digits.images / 16).astype(np.float32), digits.target.astype(np.int64)
    is_test = np.arange(len(labels)) % TEST_EVERY == 0
    with tempfile.TemporaryDirectory() as temporary:
        for name, chosen in (("train", ~is_test), ("test", is_test)):
            if (folder / name / "index.json").exists():
                continue
            source = Path(temporary) / f"{name}.npz"
            np.savez(source, image=images[chosen], digit=labels[chosen])
            index = prepare(source, folder / name)
            print(f"{folder / name}: {index.rows} images")


if __name__ == "__main__":
    prepare_digits(Path(sys.argv[1] if len(sys.argv) > 1 else "data/digits"))

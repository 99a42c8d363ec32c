"""Will a flight arrive more than a quarter of an hour late? A table with numbers and categories, joined from three.

While the data is prepared, `transform` drops flights that never arrived, joins weather and planes, and turns times into
places on a circle. In training, `preprocess` hides some of a row's values, so that the model does not lean on any.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from elastic_trainer import Batch, TrainTask

LATE_MINUTES = 15
WEATHER = ("temp", "humid", "wind_speed", "precip", "visib")
CATEGORIES = 512  # places of the table of carriers, airports and planes' makers; each name has one by its letters
HIDDEN = 0.05  # of the numbers, in training
Columns = dict[str, NDArray[Any]]


class Flights(TrainTask):
    """A feed-forward network over 17 numbers and 4 categories.

    Args:
        tables: Folder of weather.csv and planes.csv; needed only while the data is prepared.
        width: Of the hidden layers.
        learning_rate: Of AdamW.
    """

    def __init__(self, tables: str | None = None, width: int = 128, learning_rate: float = 1e-3) -> None:
        self.tables = tables
        self.width = width
        self.learning_rate = learning_rate
        self._weather: dict[tuple[str, ...], list[float]] | None = None
        self._planes: dict[str, tuple[float, float, str]] = {}

    # ---- while the data is prepared

    def transform(self, columns: Columns) -> Columns:
        """Raw flights to rows: `numbers` float32 (17,), `names` int16 (4,), `late` float32."""
        arrived = ~np.isnan(columns["arr_delay"].astype(np.float64))
        raw = {name: values[arrived] for name, values in columns.items()}
        minutes = raw["sched_dep_time"] // 100 * 60 + raw["sched_dep_time"] % 100
        weekday = _weekday(raw["year"], raw["month"], raw["day"])
        weather, planes = self._joined(raw)
        numbers = np.column_stack(
            [
                *_circle(minutes, 24 * 60),
                *_circle(raw["month"], 12),
                *_circle(weekday, 7),
                (weekday >= 5).astype(np.float64),
                np.log1p(raw["distance"].astype(np.float64)),
                raw["day"] / 31,
                *weather,
                *planes[:2],
                np.log1p(_elapsed(raw)),
            ]
        )
        names = np.column_stack([*(_place(raw[name]) for name in ("carrier", "origin", "dest")), planes[2]])
        return {
            "numbers": np.nan_to_num(numbers, nan=0.0).astype(np.float32),
            "names": names.astype(np.int16),
            "late": (raw["arr_delay"] > LATE_MINUTES).astype(np.float32),
        }

    def _joined(self, raw: Columns) -> tuple[list[NDArray[Any]], list[NDArray[Any]]]:
        if self._weather is None:
            self._read_tables()
        assert self._weather is not None
        hours = zip(raw["origin"], raw["month"], raw["day"], raw["hour"], strict=True)
        missing = [np.nan] * len(WEATHER)
        weather = np.array([self._weather.get(tuple(map(str, each)), missing) for each in hours]).reshape(
            -1, len(WEATHER)
        )
        planes = [self._planes.get(tail, (np.nan, np.nan, "")) for tail in raw["tailnum"]]
        age = np.array([2013 - year for year, _, _ in planes]) / 50
        seats = np.array([seats for _, seats, _ in planes]) / 400
        return list((weather / (100, 100, 50, 1, 10)).T), [age, seats, _place([maker for _, _, maker in planes])]

    def _read_tables(self) -> None:
        assert self.tables is not None, "Flights(tables=...) is needed to prepare the data"
        with open(Path(self.tables) / "weather.csv") as file:
            self._weather = {
                (row["origin"], row["month"], row["day"], row["hour"]): [_number(row[name]) for name in WEATHER]
                for row in csv.DictReader(file)
            }
        with open(Path(self.tables) / "planes.csv") as file:
            self._planes = {
                row["tailnum"]: (_number(row["year"]), _number(row["seats"]), row["manufacturer"])
                for row in csv.DictReader(file)
            }

    # ---- in training

    def preprocess(self, row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """Hides some numbers; each epoch others."""
        shown = rng.random(row["numbers"].shape) >= HIDDEN
        return {**row, "numbers": row["numbers"] * shown}

    def build_model(self) -> nn.Module:
        """Embeddings of the names beside the numbers, two hidden layers, one score."""
        return Network(self.width)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW with one learning rate for all."""
        return torch.optim.AdamW(model.parameters(), lr=self.learning_rate)

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Mean binary cross-entropy."""
        return functional.binary_cross_entropy_with_logits(model(batch["numbers"], batch["names"]), batch["late"])

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, tuple[torch.Tensor, int]]:
        """Share of right answers, and the mean cross-entropy."""
        scores, late = model(batch["numbers"], batch["names"]), batch["late"]
        right = ((scores > 0) == (late > 0.5)).sum()
        loss = functional.binary_cross_entropy_with_logits(scores, late, reduction="sum")
        return {"accuracy": (right, batch.rows), "loss": (loss, batch.rows)}


class Network(nn.Module):
    """Input `numbers` (rows, 17) and `names` (rows, 4), output (rows,) scores."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.names = nn.Embedding(CATEGORIES, 8)
        self.layers = nn.Sequential(
            nn.Linear(17 + 4 * 8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
        )

    def forward(self, numbers: torch.Tensor, names: torch.Tensor) -> torch.Tensor:
        """One score a row."""
        scores: torch.Tensor = self.layers(torch.cat([numbers, self.names(names.long()).flatten(1)], 1)).squeeze(1)
        return scores


def _circle(values: NDArray[Any], period: int) -> tuple[NDArray[Any], NDArray[Any]]:
    angle = 2 * np.pi * values / period
    return np.sin(angle), np.cos(angle)


def _weekday(year: NDArray[Any], month: NDArray[Any], day: NDArray[Any]) -> NDArray[np.int64]:
    """Days after Monday."""
    months = (year.astype(np.int64) - 1970) * 12 + month.astype(np.int64) - 1
    days = months.astype("datetime64[M]").astype("datetime64[D]").astype(np.int64) + day.astype(np.int64) - 1
    return (days + 3) % 7  # the epoch began on a Thursday


def _elapsed(raw: Columns) -> NDArray[np.float64]:
    """Scheduled minutes between departure and arrival by the clocks of both airports."""
    leave, arrive = (raw[name] // 100 * 60 + raw[name] % 100 for name in ("sched_dep_time", "sched_arr_time"))
    return np.asarray((arrive - leave) % (24 * 60), dtype=np.float64)


def _place(names: Any) -> NDArray[np.int64]:
    """A place in the table of names, the same in every process."""
    return np.array([sum(ord(c) * 31**i for i, c in enumerate(str(name)[:8])) % CATEGORIES for name in names])


def _number(text: str) -> float:
    return float("nan") if text == "NA" else float(text)

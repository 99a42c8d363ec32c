"""How a benchmark says what it found: ratios on the screen, figures and checks in a file, failure as exit status."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


def machine() -> dict[str, Any]:
    """Where it ran."""
    with open("/proc/meminfo") as file:
        total_kib = int(file.readline().split()[1])
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(total_kib / (1 << 20), 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.cuda.is_available(),
    }


def median(values: Sequence[float]) -> float:
    """Of raw figures."""
    return statistics.median(values)


def p95(values: Sequence[float]) -> float:
    """The value that 95 % do not exceed, of so few the largest."""
    return sorted(values)[min(len(values) - 1, int(0.95 * len(values)))]


@dataclass
class Report:
    """Raw figures and checks of one run."""

    raw: dict[str, Any] = field(default_factory=dict)
    checks: list[dict[str, Any]] = field(default_factory=list)

    def check(self, name: str, value: float, goal: str, met: bool) -> None:
        """A figure that has a goal."""
        self.checks.append({"name": name, "value": value, "goal": goal, "met": met})
        print(f"{'met    ' if met else 'NOT MET'}  {name}: {value:.3g} (goal {goal})")

    def table(self, title: str, rows: Mapping[str, Sequence[float]], unit: str = "s") -> None:
        """Median and p95 of each row."""
        self.raw[title] = {name: list(values) for name, values in rows.items()}
        print(f"\n{title}")
        for name, values in rows.items():
            print(f"  {name:44s} median {median(values):8.4f} {unit}   p95 {p95(values):8.4f} {unit}   n={len(values)}")

    def end(self, path: str | None, *, is_right: bool) -> None:
        """Write the file and exit: 0 unless an answer was wrong."""
        if path:
            with open(path, "w") as file:
                json.dump({"machine": machine(), "checks": self.checks, "raw": self.raw}, file, indent=2)
        sys.exit(0 if is_right else 1)

"""Which saved steps are needless, once a newer one was read back.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastic_trainer.vocabulary import SavedStep


@dataclass(frozen=True)
class Retention:
    """The last `keep_last`, every saved step that divides by `keep_every`, and the best by an evaluated value.

    `keep_best` is a value's name, with a minus before it when less is better.
    """

    keep_last: int
    keep_every: int | None = None
    keep_best: str | None = None


def needless(
    saved: Sequence[SavedStep], values: Mapping[str, Mapping[str, float]], policy: Retention
) -> list[SavedStep]:
    """Those that may go, oldest first; never the newest.

    Args:
        saved: Oldest first; the newest was read back.
        values: What was evaluated, by the path of the saved step.
        policy: What to keep.
    """
    kept = {each.path for each in saved[-max(1, policy.keep_last) :]}
    if policy.keep_every is not None:
        kept |= {each.path for each in saved if each.steps % policy.keep_every == 0}
    if (best := _best(saved, values, policy)) is not None:
        kept.add(best.path)
    return [each for each in saved if each.path not in kept]


def _best(saved: Sequence[SavedStep], values: Mapping[str, Mapping[str, float]], policy: Retention) -> SavedStep | None:
    if policy.keep_best is None:
        return None
    name = policy.keep_best.removeprefix("-")
    sign = -1.0 if policy.keep_best.startswith("-") else 1.0
    rated = [(sign * values[each.path][name], each) for each in saved if name in values.get(each.path, {})]
    return max(rated, key=lambda pair: pair[0])[1] if rated else None

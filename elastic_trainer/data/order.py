"""Which samples each logical rank reads at a step: arithmetic in constant time, for any world size.

An epoch's row groups lie end to end in a keyed order; full steps are dealt to logical ranks in spans of a window,
the rows of the short last step directly. Nothing here depends on past or present world sizes, so a resize changes who
reads a sample, never whether it is read.

Permutations are pinned here and not taken from a library's generator, whose stream may change between versions.

Source: DESIGN of this project; splitmix64 (Steele, Lea, Flood 2014); cycle-walking (Black, Rogaway 2002).
Pure: no I/O, no clock. Laws: tests/data/test_order.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Words = NDArray[np.uint64]
MASK = (1 << 64) - 1
ORDER_VERSION = 1  # of the arithmetic below: a run keeps the one that it began with
SORTED_UP_TO = 1 << 20  # above this a sort would cost time and memory that grow with the data; Feistel costs neither


class _Use(IntEnum):
    """Separates the keys of the different permutations."""

    ROW_GROUPS = 1
    SHIFT = 2
    SPAN = 3
    SHORT_STEP = 4


@dataclass(frozen=True)
class SampleOrder:
    """The order of all samples of all epochs.

    Args:
        samples: N, rows of the dataset.
        row_group: R, rows of a row group; only the last one may be shorter.
        global_batch: B, samples of a full step.
        logical_ranks: L, a divisor of B.
        window: K, consecutive steps whose samples a logical rank reads together.
        seed: Of the order.
        drop_last: Leave out the samples that do not fill a last step.
    """

    samples: int
    row_group: int
    global_batch: int
    logical_ranks: int
    window: int
    seed: int
    drop_last: bool = False

    def __post_init__(self) -> None:
        if self.global_batch % self.logical_ranks:
            raise ValueError(f"{self.logical_ranks} logical ranks do not divide a batch of {self.global_batch}")
        if self.steps_per_epoch == 0:
            raise ValueError(f"{self.samples} samples hold no full step of {self.global_batch}")

    @property
    def per_rank(self) -> int:
        """Samples of one logical rank in a full step."""
        return self.global_batch // self.logical_ranks

    @property
    def full_steps(self) -> int:
        """Full steps of an epoch."""
        return self.samples // self.global_batch

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch, the short one included unless it is dropped."""
        return self.full_steps if self.drop_last else -(-self.samples // self.global_batch)

    @property
    def windows_per_epoch(self) -> int:
        """Windows of an epoch; the short step is one of its own, the last."""
        return -(-self.full_steps // self.window) + (self.steps_per_epoch - self.full_steps)

    def samples_in(self, step: int) -> int:
        """Samples that the whole group trains at `step`."""
        t = step % self.steps_per_epoch
        return self.global_batch if t < self.full_steps else self.samples - self.full_steps * self.global_batch

    def window_of(self, step: int) -> tuple[int, int, int]:
        """`(epoch, window in the epoch, step in the window)` of a step."""
        epoch, t = divmod(step, self.steps_per_epoch)
        if t == self.full_steps:
            return epoch, self.windows_per_epoch - 1, 0
        return epoch, t // self.window, t % self.window

    def span(self, epoch: int, window: int, logical_rank: int) -> Ids:
        """Ids of all samples that `logical_rank` trains in a window, in the order of training.

        Returns:
            int64, shape (n,); step `j` of the window has `[j*b : (j+1)*b]`, where b is `per_rank`. In the window of the
            short step n is at most b and may be 0.
        """
        self._check_rank(logical_rank)
        return _span(self, epoch, window, logical_rank)

    def _span(self, epoch: int, window: int, logical_rank: int) -> Ids:
        b, first = self.per_rank, window * self.window * self.global_batch
        if window < -(-self.full_steps // self.window):
            steps = min(self.window, self.full_steps - window * self.window)
            low, count, use = first + logical_rank * steps * b, steps * b, _Use.SPAN
        else:
            rest = self.samples - self.full_steps * self.global_batch
            low = min(logical_rank * b, rest)
            count, use = min((logical_rank + 1) * b, rest) - low, _Use.SHORT_STEP
            low += self.full_steps * self.global_batch
        places = permutation(count, key(use, self.seed, epoch, window, logical_rank))
        return self._ids_at(epoch, low + places)

    def ids(self, step: int, logical_rank: int) -> Ids:
        """Ids of the samples that `logical_rank` trains at `step`: int64, shape (n,), n at most `per_rank`."""
        epoch, window, j = self.window_of(step)
        return self.span(epoch, window, logical_rank)[j * self.per_rank : (j + 1) * self.per_rank]

    def _check_rank(self, logical_rank: int) -> None:
        if not 0 <= logical_rank < self.logical_ranks:
            raise ValueError(f"logical rank {logical_rank} is not below {self.logical_ranks}")

    def _ids_at(self, epoch: int, offsets: Ids) -> Ids:
        layout = _layout(self.samples, self.row_group, self.seed, epoch)
        return layout.ids_at(offsets)


@lru_cache(maxsize=1024)  # each step of a window asks again; two windows of any usual range fit
def _span(order: SampleOrder, epoch: int, window: int, logical_rank: int) -> Ids:
    return order._span(epoch, window, logical_rank)


@dataclass(frozen=True)
class _Layout:
    """An epoch's row groups end to end, rotated by a keyed shift."""

    samples: int
    row_group: int
    group_key: int
    shift: int

    @property
    def groups(self) -> int:
        return -(-self.samples // self.row_group)

    @cached_property
    def short_slot(self) -> int:
        """The slot in which the last, short row group lies."""
        return inverse_at(self.groups - 1, self.groups, self.group_key)

    def ids_at(self, offsets: Ids) -> Ids:
        offsets = (offsets + self.shift) % self.samples
        short_rows = self.samples - (self.groups - 1) * self.row_group
        before = self.short_slot * self.row_group
        behind = offsets >= before + short_rows  # offsets after the short group continue as if it had been full
        moved = np.where(behind, offsets + (self.row_group - short_rows), offsets)
        slots, rows = np.divmod(moved, self.row_group)
        return permute(slots, self.groups, self.group_key) * self.row_group + rows


@lru_cache(maxsize=4)  # a prefetcher works across the border of two epochs
def _layout(samples: int, row_group: int, seed: int, epoch: int) -> _Layout:
    shift = mix(key(_Use.SHIFT, seed, epoch)) % samples
    return _Layout(samples, row_group, key(_Use.ROW_GROUPS, seed, epoch), shift)


def mix(value: int) -> int:
    """splitmix64's output function of a 64-bit state."""
    z = (value + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def mix_array(values: Words) -> Words:
    """`mix` of each element: uint64, any shape."""
    z = values + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(z ^ (z >> np.uint64(31)), dtype=np.uint64)


def key(*parts: int) -> int:
    """One 64-bit key of several whole numbers; their order matters."""
    folded = 0
    for part in parts:
        folded = mix(folded ^ (part & MASK))
    return folded


def permutation(n: int, permutation_key: int) -> Ids:
    """A keyed permutation of `range(n)`: int64, shape (n,)."""
    return permute(np.arange(n, dtype=np.int64), n, permutation_key)


def permute(places: Ids, n: int, permutation_key: int) -> Ids:
    """Where a keyed permutation of `range(n)` sends each of `places`: int64, the shape of `places`."""
    if n <= SORTED_UP_TO:
        return _sorted_permutation(n, permutation_key)[places]
    return _walk(places, n, permutation_key, _feistel)


def inverse_at(image: int, n: int, permutation_key: int) -> int:
    """The place that the keyed permutation of `range(n)` sends to `image`."""
    if n <= SORTED_UP_TO:
        return int(np.flatnonzero(_sorted_permutation(n, permutation_key) == image)[0])
    return int(_walk(np.array([image], dtype=np.int64), n, permutation_key, _feistel_back)[0])


@lru_cache(maxsize=8)
def _sorted_permutation(n: int, permutation_key: int) -> Ids:
    drawn = mix_array(np.uint64(permutation_key) ^ np.arange(n, dtype=np.uint64))
    return np.argsort(drawn, kind="stable").astype(np.int64)


FEISTEL_ROUNDS = 6


def _half_bits(n: int) -> int:
    return ((n - 1).bit_length() + 1) // 2


def _walk(places: Ids, n: int, permutation_key: int, step: Callable[[Words, int, int], Words]) -> Ids:
    # Feistel permutes a power of four that holds n; a value outside range(n) is sent on until it falls inside
    half = _half_bits(n)
    values = step(places.astype(np.uint64), half, permutation_key)
    while (outside := values >= n).any():
        values[outside] = step(values[outside], half, permutation_key)
    return values.astype(np.int64)


def _round(right: Words, number: int, half: int, permutation_key: int) -> Words:
    return mix_array(right ^ np.uint64(key(permutation_key, number))) & np.uint64((1 << half) - 1)


def _feistel(values: Words, half: int, permutation_key: int) -> Words:
    left, right = values >> np.uint64(half), values & np.uint64((1 << half) - 1)
    for number in range(FEISTEL_ROUNDS):
        left, right = right, left ^ _round(right, number, half, permutation_key)
    return (left << np.uint64(half)) | right


def _feistel_back(values: Words, half: int, permutation_key: int) -> Words:
    left, right = values >> np.uint64(half), values & np.uint64((1 << half) - 1)
    for number in reversed(range(FEISTEL_ROUNDS)):
        left, right = right ^ _round(left, number, half, permutation_key), left
    return (left << np.uint64(half)) | right

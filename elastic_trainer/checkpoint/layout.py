"""Where each tensor's bytes lie in a checkpoint, and who writes which of them.

All tensors lie back to back in one imagined run of bytes, each on a boundary of 64. It is cut at row boundaries into as
many parts of about equal size as there are writers; a part is a file, so a writer sends one slice of its copy as it is.

Pure: no I/O, no torch.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

ALIGNMENT = 64  # bytes: of every vector load, and a multiple of every element's size
ELEMENT_BYTES = {
    **dict.fromkeys(("bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32", "complex32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}


@dataclass(frozen=True)
class TensorInfo:
    """A tensor by its path in the registered state."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Elements of the first dimension; a scalar is one row."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape[1:]) * ELEMENT_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.rows * self.row_bytes


@dataclass(frozen=True)
class Piece:
    """A contiguous run of a tensor's rows in a file."""

    tensor: int
    first_row: int
    rows: int
    offset: int
    length: int


@dataclass(frozen=True)
class Part:
    """What one writer writes: bytes `start` to `stop` of the layout, and the pieces in them, by offset in the file."""

    start: int
    stop: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Layout:
    """The tensors in order; equal on every rank, since every rank registers the same."""

    tensors: tuple[TensorInfo, ...]

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each tensor begins, and at the end the size of the whole."""
        found, end = [], 0
        for tensor in self.tensors:
            found.append(end)
            end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        return (*found, end)

    @property
    def size_bytes(self) -> int:
        """Of the whole, padding included."""
        return self.offsets[-1]

    def parts(self, writers: int) -> list[Part]:
        """The parts of `writers` writers, in order; together every row of every tensor once."""
        cuts = [0, *(self._cut_near(self.size_bytes * i // writers) for i in range(1, writers)), self.size_bytes]
        return [Part(low, high, self._pieces(low, high)) for low, high in itertools.pairwise(cuts)]

    def _cut_near(self, place: int) -> int:
        """The first row boundary at or behind `place`, the end of a tensor's padding counting as one."""
        for tensor, low, high in zip(self.tensors, self.offsets, self.offsets[1:], strict=False):
            if low <= place < high:
                row = -(-(place - low) // tensor.row_bytes) if tensor.row_bytes else tensor.rows
                return high if row >= tensor.rows else low + row * tensor.row_bytes
        return self.size_bytes

    def _pieces(self, low: int, high: int) -> tuple[Piece, ...]:
        found = []
        for index, tensor in enumerate(self.tensors):
            start, end = self.offsets[index], self.offsets[index] + tensor.nbytes
            first, last = max(low, start), min(high, end)
            if first < last:
                row, rows = (first - start) // tensor.row_bytes, (last - first) // tensor.row_bytes
                found.append(Piece(index, row, rows, first - low, last - first))
        return tuple(found)

    def to_json(self) -> list[Any]:
        """As JSON."""
        return [[tensor.name, tensor.dtype, list(tensor.shape)] for tensor in self.tensors]

    @classmethod
    def from_json(cls, found: list[Any]) -> Layout:
        """The layout that `to_json` gave; ValueError, TypeError or KeyError when it is not one."""
        tensors = tuple(TensorInfo(str(name), str(dtype), tuple(map(int, shape))) for name, dtype, shape in found)
        for tensor in tensors:
            if tensor.dtype not in ELEMENT_BYTES or min(tensor.shape, default=0) < 0:
                raise ValueError(f"tensor {tensor.name!r} has dtype {tensor.dtype} and shape {tensor.shape}")
        return cls(tensors)

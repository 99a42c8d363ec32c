"""The layout: every row of every tensor lies in exactly one part, whatever the shapes and the number of writers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.checkpoint.layout import ALIGNMENT, ELEMENT_BYTES, Layout, TensorInfo

SHAPES = st.lists(st.integers(0, 40), max_size=3).map(tuple)
LAYOUTS = st.lists(st.tuples(SHAPES, st.sampled_from(sorted(ELEMENT_BYTES))), max_size=8).map(
    lambda found: Layout(tuple(TensorInfo(f"t{i}", dtype, shape) for i, (shape, dtype) in enumerate(found)))
)


@given(LAYOUTS, st.integers(1, 9))
def test_parts_hold_every_row_once_and_in_place(layout: Layout, writers: int) -> None:
    parts = layout.parts(writers)

    assert len(parts) == writers
    assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
    assert parts[-1].stop == layout.size_bytes
    rows: dict[int, list[int]] = {i: [] for i in range(len(layout.tensors))}
    for part in parts:
        for piece in part.pieces:
            tensor = layout.tensors[piece.tensor]
            rows[piece.tensor] += range(piece.first_row, piece.first_row + piece.rows)
            assert piece.length == piece.rows * tensor.row_bytes
            assert part.start + piece.offset == layout.offsets[piece.tensor] + piece.first_row * tensor.row_bytes
            assert piece.offset + piece.length <= part.stop - part.start
    for index, tensor in enumerate(layout.tensors):
        assert rows[index] == (list(range(tensor.rows)) if tensor.nbytes else [])


@given(LAYOUTS)
def test_tensors_are_aligned_and_go_through_json(layout: Layout) -> None:
    assert all(offset % ALIGNMENT == 0 for offset in layout.offsets)
    assert Layout.from_json(layout.to_json()) == layout


def test_bytes_are_dealt_evenly() -> None:
    layout = Layout((TensorInfo("a", "float32", (1000, 10)), TensorInfo("b", "float32", (7, 1000))))

    sizes = [part.stop - part.start for part in layout.parts(4)]

    assert max(sizes) - min(sizes) <= 2 * 4000  # a row of b, on either side


@pytest.mark.parametrize("found", [[["a", "object", [3]]], [["a", "float32", [-1]]], [["a", "float32"]], [3]])
def test_what_is_no_layout_is_refused(found: list[object]) -> None:
    with pytest.raises((ValueError, TypeError)):
        Layout.from_json(found)

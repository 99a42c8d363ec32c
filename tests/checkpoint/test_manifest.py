"""A manifest goes through bytes, and one that makes no sense is refused even when its digest fits."""

from __future__ import annotations

import json
from typing import Any

import pytest

from elastic_trainer.checkpoint.layout import Layout, TensorInfo
from elastic_trainer.checkpoint.manifest import (
    CHUNK_BYTES,
    NAME,
    Manifest,
    PieceFile,
    folder_of,
    parse_folder,
    sha256_of,
)
from elastic_trainer.errors import Damaged
from elastic_trainer.vocabulary import Token

LAYOUT = Layout((TensorInfo("a", "float32", (3_000_000,)), TensorInfo("b", "int64", (5, 2))))


def manifest() -> Manifest:
    parts = LAYOUT.parts(2)
    files = tuple(
        PieceFile(f"r{i}.bin", part.stop - part.start, ("d",) * (-(-(part.stop - part.start) // CHUNK_BYTES)))
        for i, part in enumerate(parts)
    )
    return Manifest(7, Token(2, 3), 1, 5, LAYOUT, files, {"dict": []}, {"torch": "x"})


def test_a_manifest_goes_through_bytes() -> None:
    content = manifest().to_bytes()

    assert Manifest.from_bytes(f"{manifest().folder}/{NAME}", content, sha256_of(content)) == manifest()


def test_chunks_deal_every_byte_of_every_tensor_once() -> None:
    seen: dict[int, list[tuple[int, int]]] = {0: [], 1: []}
    for chunk in manifest().chunks():
        assert chunk.length <= CHUNK_BYTES
        for copy in chunk.copies:
            seen[copy.tensor].append((copy.at, copy.at + copy.stop - copy.start))

    for index, tensor in enumerate(LAYOUT.tensors):
        ends = [0, *(high for _, high in sorted(seen[index]))]
        assert [low for low, _ in sorted(seen[index])] == ends[:-1]
        assert ends[-1] == tensor.nbytes


@pytest.mark.parametrize(
    "change",
    [
        {"format": 99},
        {"steps": 8},
        {"token": [1]},
        {"tensors": [["a", "object", [3]]]},
        {"files": [["../../etc/passwd", 3, []]]},
        {"files": [["r0.bin", 3, []], ["r1.bin", 3, []]]},
        {"files": []},
        {"files": "x"},
    ],
)
def test_nonsense_is_refused(change: dict[str, Any]) -> None:
    content = json.dumps({**json.loads(manifest().to_bytes()), **change}).encode()

    with pytest.raises(Damaged, match=NAME):
        Manifest.from_bytes(f"{manifest().folder}/{NAME}", content, sha256_of(content))


def test_folders_are_named_and_parsed() -> None:
    assert parse_folder(folder_of(12, Token(3, 4), 5) + "/r0.bin") == (12, Token(3, 4), 5)
    assert parse_folder("steps/something") is None

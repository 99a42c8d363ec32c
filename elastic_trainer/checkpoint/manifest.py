"""The manifest of a checkpoint: its step, its tensors, its files with a digest for each chunk of 8 MiB.

    steps/<steps>.<term>-<generation>.<attempt>/r<i>.bin        the bytes of part i of the layout
                                               /MANIFEST.json   written after them

Only the log makes a checkpoint exist: it names the manifest with its sha256, so neither can be exchanged.
Pure: no I/O.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from elastic_trainer.checkpoint.layout import Layout, Part
from elastic_trainer.errors import Damaged
from elastic_trainer.vocabulary import JSON, Token

FORMAT = 1
CHUNK_BYTES = 8 << 20  # so large that digests and requests are cheap, so small that few bytes are read in vain
NAME = "MANIFEST.json"
FOLDER = "steps"
_FOLDER = re.compile(r"steps/(\d{12})\.(\d+)-(\d+)\.(\d+)")
_FILE = re.compile(r"r\d+\.bin")


def folder_of(steps: int, token: Token, attempt: int) -> str:
    """The folder of one attempt to save a step."""
    return f"{FOLDER}/{steps:012d}.{token}.{attempt}"


def parse_folder(name: str) -> tuple[int, Token, int] | None:
    """Steps, token and attempt of a folder's name, or of a file's in it; None for something else."""
    found = _FOLDER.match(name)
    if found is None:
        return None
    steps, term, generation, attempt = map(int, found.groups())
    return steps, Token(term, generation), attempt


@dataclass(frozen=True)
class PieceFile:
    """A file of a checkpoint and the xxh3-128 of each chunk of it."""

    name: str
    size_bytes: int
    digests: tuple[str, ...]


@dataclass(frozen=True)
class Copy:
    """Bytes `start` to `stop` of a chunk are those of a tensor from byte `at` on."""

    tensor: int
    at: int
    start: int
    stop: int


@dataclass(frozen=True)
class ChunkRead:
    """A chunk to be read, checked and dealt out to tensors."""

    file: str
    offset: int
    length: int
    digest: str
    copies: tuple[Copy, ...]


@dataclass(frozen=True)
class Manifest:
    """One checkpoint. `state` describes everything that is no tensor, `versions` what wrote it."""

    steps: int
    token: Token
    attempt: int
    evaluated_at: int
    layout: Layout
    files: tuple[PieceFile, ...]
    state: JSON
    versions: dict[str, str]

    @property
    def folder(self) -> str:
        """Where it lies in the run."""
        return folder_of(self.steps, self.token, self.attempt)

    @property
    def size_bytes(self) -> int:
        """Of all files."""
        return sum(file.size_bytes for file in self.files)

    @cached_property
    def parts(self) -> list[Part]:
        """The part of the layout that each file holds."""
        return self.layout.parts(len(self.files))

    def chunks(self) -> Iterator[ChunkRead]:
        """Every chunk with what it holds, in the order of the files."""
        for file, part in zip(self.files, self.parts, strict=True):
            for number, digest in enumerate(file.digests):
                low = number * CHUNK_BYTES
                high = min(low + CHUNK_BYTES, file.size_bytes)
                copies = []
                for piece in part.pieces:
                    first, last = max(low, piece.offset), min(high, piece.offset + piece.length)
                    if first < last:
                        row_bytes = self.layout.tensors[piece.tensor].row_bytes
                        at = piece.first_row * row_bytes + first - piece.offset
                        copies.append(Copy(piece.tensor, at, first - low, last - low))
                yield ChunkRead(f"{self.folder}/{file.name}", low, high - low, digest, tuple(copies))

    def to_bytes(self) -> bytes:
        """The content of the file."""
        content = {
            "format": FORMAT,
            "steps": self.steps,
            "token": list(self.token),
            "attempt": self.attempt,
            "evaluated_at": self.evaluated_at,
            "tensors": self.layout.to_json(),
            "files": [[file.name, file.size_bytes, list(file.digests)] for file in self.files],
            "state": self.state,
            "versions": self.versions,
        }
        return json.dumps(content, sort_keys=True).encode() + b"\n"

    @classmethod
    def from_bytes(cls, name: str, content: bytes, sha256: str) -> Manifest:
        """The manifest in a file whose digest the log knows.

        Raises:
            Damaged: It is not what was written, or makes no sense.
        """
        if hashlib.sha256(content).hexdigest() != sha256:
            raise Damaged(f"{name}: is not the manifest that the log names (its sha256 differs)")
        try:
            found = json.loads(content)
            if found["format"] != FORMAT:
                raise Damaged(f"{name}: has format {found['format']}, this version reads {FORMAT}")
            manifest = cls(
                steps=int(found["steps"]),
                token=Token(*map(int, found["token"])),
                attempt=int(found["attempt"]),
                evaluated_at=int(found["evaluated_at"]),
                layout=Layout.from_json(found["tensors"]),
                files=tuple(PieceFile(str(n), int(s), tuple(map(str, d))) for n, s, d in found["files"]),
                state=found["state"],
                versions=dict(found["versions"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise Damaged(f"{name}: makes no sense ({type(error).__name__}: {error})") from None
        manifest._check(name)
        return manifest

    def _check(self, name: str) -> None:
        if f"{self.folder}/{NAME}" != name:
            raise Damaged(f"{name}: belongs to {self.folder}")
        if not self.files:
            raise Damaged(f"{name}: names no file")
        for file, part in zip(self.files, self.parts, strict=True):
            chunks = -(-file.size_bytes // CHUNK_BYTES)
            if _FILE.fullmatch(file.name) is None or part.stop - part.start != file.size_bytes:
                raise Damaged(f"{name}: file {file.name!r} of {file.size_bytes} bytes does not fit the tensors")
            if len(file.digests) != chunks:
                raise Damaged(f"{name}: file {file.name!r} has {len(file.digests)} digests for {chunks} chunks")


def sha256_of(content: bytes) -> str:
    """What the log says of a manifest."""
    return hashlib.sha256(content).hexdigest()


def summary_of(manifest: Manifest) -> dict[str, Any]:
    """The facts that people ask for."""
    return {
        "steps": manifest.steps,
        "token": str(manifest.token),
        "size_bytes": manifest.size_bytes,
        "files": len(manifest.files),
        "tensors": len(manifest.layout.tensors),
        "versions": manifest.versions,
    }

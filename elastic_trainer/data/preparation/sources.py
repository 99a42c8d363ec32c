"""What raw files there are, of which format, and in what parts they are read.

Parts depend on the files alone, never on how many processes there are, so that the outcome does not either.
"""

from __future__ import annotations

import fnmatch
import gzip
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash
from fsspec.core import url_to_fs

from elastic_trainer.data.order import MASK, key
from elastic_trainer.errors import DataError

EXTENSIONS = {
    ".npz": "npz",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "text",
    ".png": "images",
    ".jpg": "images",
    ".jpeg": "images",
    ".bmp": "images",
    ".gif": "images",
    ".webp": "images",
}
FORMATS = ("npz", "parquet", "jsonl", "csv", "text", "images")
PART_BYTES = 16 << 20  # small files are read together up to so many bytes: enough to outweigh the start of a task
_SPLIT = 7  # separates the keys of splits from others


@dataclass(frozen=True)
class SourceFile:
    """A raw file; `name` is its path below the source, which names its rows whatever the source's own place is."""

    name: str
    path: str
    size_bytes: int
    changed: str


@dataclass(frozen=True)
class Part:
    """What one task reads: files of one format, all of one split when whole files are split."""

    number: int
    files: tuple[SourceFile, ...]
    split: str | None = None


@dataclass(frozen=True)
class Source:
    """The raw files of a preparation."""

    url: str
    format: str
    files: tuple[SourceFile, ...]

    @property
    def size_bytes(self) -> int:
        """Of all files."""
        return sum(file.size_bytes for file in self.files)


def find(
    url: str, options: Mapping[str, Any], *, file_format: str | None, include: Sequence[str], exclude: Sequence[str]
) -> Source:
    """The files of a source: one file, a folder, or a pattern.

    Args:
        url: A path or URL; may hold `*`.
        options: For fsspec's client of it.
        file_format: One of FORMATS; None to tell it by the files' names.
        include: Patterns of file names, such as `*.py`; none: all.
        exclude: Patterns of paths below the source, such as `site-packages/*`.

    Raises:
        DataError: Nothing there, or the format cannot be told.
    """
    if file_format is not None and file_format not in FORMATS:
        raise DataError(f"format {file_format!r} is not known. Use one of {', '.join(FORMATS)}.")
    try:
        fs, path = url_to_fs(url, **options)
        listed = fs.glob(path, detail=True) if "*" in url else fs.find(path, detail=True)
    except (OSError, ValueError, ImportError) as error:
        raise DataError(f"{url}: cannot be listed: {error}.") from None
    root = fs._parent(path) if "*" in url or path in listed else path
    files = []
    for each in sorted(listed):
        name = os.path.relpath(each, root) if "://" not in each else each
        if listed[each].get("type") == "directory" or _is_hidden(name):
            continue
        if include and not any(fnmatch.fnmatch(os.path.basename(name), pattern) for pattern in include):
            continue
        if any(fnmatch.fnmatch(name, pattern) for pattern in exclude):
            continue
        changed = listed[each].get("ETag") or listed[each].get("mtime") or listed[each].get("LastModified") or ""
        files.append(SourceFile(name, each, int(listed[each]["size"]), str(changed)))
    if not files:
        wanted = f" that match {', '.join(include)}" if include else ""
        raise DataError(f"{url}: no such file, or a folder without files{wanted}. Give a file, a folder or a pattern.")
    return _of_one_format(url, files, file_format)


def _is_hidden(name: str) -> bool:
    return any(part.startswith((".", "_")) for part in name.split("/") if part not in ("..", "."))


def _of_one_format(url: str, files: list[SourceFile], file_format: str | None) -> Source:
    if file_format is not None:
        if file_format == "images":
            files = [file for file in files if format_of(file.name) == "images"]
        if not files:
            raise DataError(f"{url}: there are no image files ({', '.join(_extensions('images'))}).")
        return Source(url, file_format, tuple(files))
    found = Counter(format_of(file.name) or "?" for file in files)
    if len(found) > 1 or "?" in found:
        unknown = sorted({os.path.splitext(file.name)[1] or file.name for file in files if not format_of(file.name)})
        what = ", ".join(f"{count} of {name}" for name, count in sorted(found.items()) if name != "?")
        raise DataError(
            f"{url}: its format cannot be told by the files' names: "
            + "; ".join(filter(None, [what, f"unknown: {', '.join(unknown[:5])}" if unknown else ""]))
            + f". Say --format {'|'.join(FORMATS)}, or choose files with --include '*.csv'."
        )
    return Source(url, next(iter(found)), tuple(files))


def format_of(name: str) -> str | None:
    """The format that a file's name tells."""
    stem, extension = os.path.splitext(name.lower())
    if extension == ".gz":
        extension = os.path.splitext(stem)[1]
    return EXTENSIONS.get(extension)


def _extensions(file_format: str) -> list[str]:
    return [extension for extension, each in EXTENSIONS.items() if each == file_format]


def parts_of(source: Source, splits: Mapping[str, float], seed: int) -> tuple[Part, ...]:
    """The parts, in order. Files of text and images go to splits as wholes, so that no document is in two of them."""
    by_split: dict[str | None, list[SourceFile]] = {None: list(source.files)}
    if source.format in ("text", "images") and splits:
        chosen = splits_of_files([file.name for file in source.files], splits, seed)
        by_split = {}
        for file in source.files:
            by_split.setdefault(chosen[file.name], []).append(file)
    parts: list[Part] = []
    for split, files in by_split.items():
        together: list[SourceFile] = []
        for file in files:
            together.append(file)
            if sum(each.size_bytes for each in together) >= PART_BYTES:
                parts.append(Part(len(parts), tuple(together), split))
                together = []
        if together:
            parts.append(Part(len(parts), tuple(together), split))
    return tuple(parts)


def splits_of_files(names: Sequence[str], splits: Mapping[str, float], seed: int) -> dict[str, str]:
    """The split of each whole file, by a hash of its name; where there are files enough, no split is left without one.

    Raises:
        DataError: There are fewer files than splits.
    """
    wanted = ("train", *splits)
    if len(names) < len(wanted):
        raise DataError(
            f"{len(names)} files cannot be divided into {', '.join(wanted)}: text and images are split by whole files, "
            "so that no document is in two splits. Give more files, or a source for each split."
        )
    drawn = {name: key(_SPLIT, seed, xxhash.xxh3_64_intdigest(name.encode())) / MASK for name in names}
    chosen = {name: split_at(drawn[name], splits) for name in names}
    counts = Counter(chosen.values())
    for split in wanted:
        if not counts[split]:
            name = min((each for each in names if counts[chosen[each]] > 1), key=lambda each: drawn[each])
            counts.subtract([chosen[name]])
            chosen[name] = split
            counts[split] = 1
    return chosen


def split_at(drawn: float, splits: Mapping[str, float]) -> str:
    """The split of a number drawn evenly from [0, 1]; what the splits leave is `train`."""
    low = 0.0
    for name, share in splits.items():
        low += share
        if drawn < low:
            return name
    return "train"


def open_file(file: SourceFile, url: str, options: Mapping[str, Any]) -> Any:
    """A readable binary file, inflated when its name ends in .gz."""
    fs, _ = url_to_fs(url, **options)
    opened = fs.open(file.path, "rb")
    if file.name.endswith(".gz"):
        return gzip.open(opened)
    return opened

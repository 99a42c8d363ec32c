"""Raw files to batches of rows, one reader a format. A row is named by its file and its number in it."""

from __future__ import annotations

import csv
import io
import json
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from elastic_trainer.data.dataset import Columns
from elastic_trainer.data.preparation.damage import Damage
from elastic_trainer.data.preparation.sources import Part, SourceFile
from elastic_trainer.data.preparation.tokens import blocks_of, encode
from elastic_trainer.errors import DataError

RawColumns = dict[str, pa.Array | NDArray[Any]]
BATCH_ROWS = 1024  # rows that a transform gets at once; fixed, because what it makes of them may depend on it
BATCH_IMAGES = 64  # decoded ones are large
NULL_WORDS = ["", "NA", "N/A", "NaN", "nan", "null", "NULL"]


@dataclass(frozen=True)
class RowBatch:
    """Rows as columns by name; each row has the name of its file and its number in that."""

    columns: RawColumns
    files: list[str]
    rows: list[int]

    def at(self, places: list[int]) -> RowBatch:
        """Some of the rows."""
        chosen = np.array(places, dtype=np.int64)
        columns: RawColumns = {
            name: values.take(pa.array(chosen)) if isinstance(values, pa.Array) else values[chosen]
            for name, values in self.columns.items()
        }
        return RowBatch(columns, [self.files[place] for place in places], [self.rows[place] for place in places])

    def without(self, bad: Mapping[int, str], damage: Damage, raw: Sequence[str] | None = None) -> RowBatch:
        """The rows but for those with a problem, which are told; `raw` has what the rows were made of."""
        if not bad:
            return self
        for place in sorted(bad):
            shown = {name: _shown(values[place]) for name, values in self.columns.items()}
            content = json.dumps(shown, default=repr) if raw is None else raw[place]
            damage.found(self.files[place], self.rows[place], bad[place], content)
        return self.at([place for place in range(len(self.rows)) if place not in bad])


@dataclass(frozen=True)
class ReadOptions:
    """What some formats need: tokens of a text's block, and the size (height, width) to which images are brought."""

    block: int = 256
    image_size: tuple[int, int] | None = None
    labels: tuple[str, ...] = ()


Open = Callable[[SourceFile], Any]
Reader = Callable[[Part, Open, Damage, ReadOptions], Iterator[RowBatch]]


def read(part: Part, file_format: str, opened: Open, damage: Damage, options: ReadOptions) -> Iterator[RowBatch]:
    """The rows of a part, in order, at most BATCH_ROWS at once.

    Raises:
        DataError: A file cannot be read, or a row is damaged and the policy is to fail.
    """
    return READERS[file_format](part, opened, damage, options)


def _parquet(part: Part, opened: Open, damage: Damage, options: ReadOptions) -> Iterator[RowBatch]:
    for file in part.files:
        first = 0
        try:
            with opened(file) as raw, pq.ParquetFile(raw) as parquet:
                for batch in parquet.iter_batches(BATCH_ROWS, use_threads=False):
                    yield _numbered(file, dict(zip(batch.schema.names, batch.columns, strict=True)), first, len(batch))
                    first += len(batch)
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(file, "Parquet", error) from None


def _jsonl(part: Part, opened: Open, damage: Damage, options: ReadOptions) -> Iterator[RowBatch]:
    for file in part.files:
        fields: list[str] = []  # those of the file's first row: the others must have the same
        with opened(file) as raw:
            objects: list[dict[str, Any]] = []
            rows: list[int] = []
            for number, line in enumerate(raw):
                if not line.strip():
                    continue
                try:
                    found = json.loads(line)
                except ValueError as error:
                    damage.found(file.name, number, f"is not JSON ({error})", _text(line))
                    continue
                if not isinstance(found, dict):
                    damage.found(file.name, number, f"is a {type(found).__name__}, not an object", _text(line))
                    continue
                objects.append(found)
                rows.append(number)
                if len(objects) == BATCH_ROWS:
                    yield _of_objects(file, objects, rows, fields, damage)
                    objects, rows = [], []
            if objects:
                yield _of_objects(file, objects, rows, fields, damage)


def _of_objects(
    file: SourceFile, objects: list[dict[str, Any]], rows: list[int], fields: list[str], damage: Damage
) -> RowBatch:
    fields += () if fields else objects[0]
    columns: RawColumns = {}
    bad: dict[int, str] = {}
    for place, each in enumerate(objects):
        if more := sorted(set(each) - set(fields)):
            bad[place] = f"has {', '.join(more)}, which the file's first row lacks"
    for name in fields:
        values = [each.get(name) for each in objects]
        try:
            columns[name] = pa.array(values)
        except (pa.ArrowException, OverflowError):
            kind = _commonest_kind(values)
            for place, value in enumerate(values):
                if value is not None and _kind(value) != kind:
                    bad[place] = f"{name} = {value!r} is not a {kind}, as the others are"
            columns[name] = pa.array([None if place in bad else value for place, value in enumerate(values)])
    raw = [json.dumps(each) for each in objects] if bad else None
    return RowBatch(columns, [file.name] * len(rows), rows).without(bad, damage, raw)


def _commonest_kind(values: list[Any]) -> str:
    kinds = [_kind(value) for value in values if value is not None]
    return max(sorted(set(kinds)), key=kinds.count)


def _kind(value: Any) -> str:
    return "number" if type(value) in (int, float) else type(value).__name__


def _csv(part: Part, opened: Open, damage: Damage, options: ReadOptions) -> Iterator[RowBatch]:
    for file in part.files:
        delimiter = "\t" if ".tsv" in file.name.lower() else ","
        with opened(file) as raw:
            text = io.TextIOWrapper(raw, encoding="utf-8", errors="replace", newline="")
            lines = csv.reader(text, delimiter=delimiter)
            names = next(lines, None)
            if not names or len(set(names)) < len(names):
                raise DataError(f"{file.name}: its first line must name the columns, each once; it is {names}.")
            types: dict[str, pa.DataType] = {}
            values: list[list[str]] = []
            rows: list[int] = []
            for number, line in enumerate(lines):
                if not line:
                    continue
                if len(line) != len(names):
                    problem = f"has {len(line)} fields, the first line names {len(names)}"
                    damage.found(file.name, number, problem, delimiter.join(line))
                    continue
                values.append(line)
                rows.append(number)
                if len(values) == BATCH_ROWS:
                    yield _of_words(file, names, values, rows, types, damage)
                    values, rows = [], []
            if values:
                yield _of_words(file, names, values, rows, types, damage)


def _of_words(
    file: SourceFile,
    names: list[str],
    values: list[list[str]],
    rows: list[int],
    types: dict[str, pa.DataType],
    damage: Damage,
) -> RowBatch:
    columns: RawColumns = {}
    bad: dict[int, str] = {}
    for place, name in enumerate(names):
        words = pa.array([line[place] for line in values], pa.string())
        words = pc.if_else(pc.is_in(words, pa.array(NULL_WORDS)), None, words)
        columns[name] = _typed(name, words, types, bad)
    raw = [",".join(line) for line in values] if bad else None
    return RowBatch(columns, [file.name] * len(rows), rows).without(bad, damage, raw)


def _typed(name: str, words: pa.Array, types: dict[str, pa.DataType], bad: dict[int, str]) -> pa.Array:
    """A column of a table's words as numbers where all are numbers; what was a number so far stays one."""
    known = types.get(name)
    candidates = (pa.int64(), pa.float64()) if known is None or known != pa.string() else ()
    for candidate in candidates:
        if known == pa.float64() and candidate == pa.int64():
            continue
        try:
            cast = words.cast(candidate)
        except pa.ArrowInvalid:
            continue
        if words.null_count < len(words):  # of nothing but missing values nothing can be told
            types[name] = candidate
        return cast
    if known is None:
        numbers = sum(_is_number(word) for word in words.to_pylist() if word is not None)
        if numbers * 2 < len(words) - words.null_count:
            types[name] = pa.string()
    if types.get(name) == pa.string():
        return words
    for at, word in enumerate(words.to_pylist()):
        if word is not None and not _is_number(word):
            bad[at] = f"{name} = {word!r} is not a number, as the others in this column are"
    mended = pa.array([None if at in bad else word for at, word in enumerate(words.to_pylist())], pa.string())
    return mended.cast(pa.float64())


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _text_blocks(part: Part, opened: Open, damage: Damage, options: ReadOptions) -> Iterator[RowBatch]:
    """Documents end to end, in blocks; those of a part share blocks, and are named by its first file."""
    documents = []
    for file in part.files:
        with opened(file) as raw:
            if content := raw.read():
                documents.append(encode(content))
    if not documents:
        return
    blocks = blocks_of(np.concatenate(documents), options.block)
    for low in range(0, len(blocks), BATCH_ROWS):
        taken = blocks[low : low + BATCH_ROWS]
        yield _numbered(part.files[0], {"tokens": taken}, low, len(taken))


def _images(part: Part, opened: Open, damage: Damage, options: ReadOptions) -> Iterator[RowBatch]:
    """An image a row, labelled by its folder; each file is row 0 of its own."""
    from PIL import Image, UnidentifiedImageError

    numbers = {label: number for number, label in enumerate(options.labels)}
    images: list[Any] = []
    names: list[str] = []
    for file in part.files:
        with opened(file) as raw:
            content = raw.read()
        try:
            with Image.open(io.BytesIO(content)) as image:
                if options.image_size is None:
                    image.verify()
                    images.append(content)
                else:
                    height, width = options.image_size
                    images.append(np.asarray(image.convert("RGB").resize((width, height)), dtype=np.uint8))
        except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
            said = "" if isinstance(error, UnidentifiedImageError) else f" ({error})"
            damage.found(file.name, 0, f"is not an image that can be read{said}", f"{len(content)} bytes")
            continue
        names.append(file.name)
        if len(images) == BATCH_IMAGES:
            yield _of_images(images, names, numbers)
            images, names = [], []
    if images:
        yield _of_images(images, names, numbers)


def _of_images(images: list[Any], names: list[str], numbers: Mapping[str, int]) -> RowBatch:
    values: NDArray[Any] = np.stack(images) if isinstance(images[0], np.ndarray) else np.array(images, dtype=object)
    columns: RawColumns = {"image": values}
    if numbers:
        columns["label"] = np.array([numbers[label_of(name)] for name in names], dtype=np.int64)
    return RowBatch(columns, names, [0] * len(names))


def label_of(name: str) -> str:
    """The folder of an image."""
    return name.rpartition("/")[0].rpartition("/")[2]


def _npz(part: Part, opened: Open, damage: Damage, options: ReadOptions) -> Iterator[RowBatch]:
    for file in part.files:
        arrays = _arrays(file, opened)
        rows = len(next(iter(arrays.values())))
        for low in range(0, rows, BATCH_ROWS):
            taken = {name: values[low : low + BATCH_ROWS] for name, values in arrays.items()}
            yield _numbered(file, dict(taken), low, len(next(iter(taken.values()))))


def _arrays(file: SourceFile, opened: Open) -> Columns:
    try:
        with opened(file) as raw, np.load(raw, allow_pickle=False) as archive:
            arrays: Columns = {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, AttributeError) as error:
        raise DataError(
            f"{file.path}: cannot be read as a numpy archive ({error}). "
            "Write it with numpy.savez(path, name=array, ...), numbers or text, no objects."
        ) from None
    if not arrays:
        raise DataError(f"{file.path}: holds no array. Write it with numpy.savez(path, name=array, ...).")
    for name, values in arrays.items():
        if values.ndim == 0:
            raise DataError(f"{file.path}: array {name!r} is a single value; a column needs one element a row.")
    lengths = {name: len(values) for name, values in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"{file.path}: its arrays have different numbers of rows: {lengths}. They must be equal.")
    return arrays


def _numbered(file: SourceFile, columns: Mapping[str, Any], first: int, count: int) -> RowBatch:
    return RowBatch(dict(columns), [file.name] * count, list(range(first, first + count)))


def _shown(value: Any) -> Any:
    return value.as_py() if isinstance(value, pa.Scalar) else value.tolist() if isinstance(value, np.ndarray) else value


def _unreadable(file: SourceFile, file_format: str, error: BaseException) -> DataError:
    said = str(error).splitlines()[0] if str(error) else type(error).__name__
    return DataError(f"{file.path}: cannot be read as {file_format} ({said}). Restore the file, or leave it out.")


def _text(line: bytes) -> str:
    return line.decode("utf-8", errors="replace").rstrip("\n")


READERS: dict[str, Reader] = {
    "npz": _npz,
    "parquet": _parquet,
    "jsonl": _jsonl,
    "csv": _csv,
    "text": _text_blocks,
    "images": _images,
}

"""The prepared file: one Arrow IPC record batch whose buffers are filled in place, then renamed into view.

A reader maps one batch and has every column as one run of memory, without a copy; a batch per chunk would
break that. But one batch of a file larger than memory cannot be built in memory either. So the batch is
first laid out over zeros that no page of memory backs, and then each chunk is written at its place.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

METADATA_KEY = b"foxray"


def schema(num_features: int) -> pa.Schema:
    """Return the columns of a prepared file."""
    return pa.schema(
        [
            pa.field(
                "features", pa.list_(pa.field("item", pa.float32(), nullable=False), num_features), False
            ),
            pa.field("timestamp", pa.timestamp("ns", "UTC"), False),
            pa.field("close", pa.float64(), False),
            pa.field("target_raw", pa.float64(), False),
            pa.field("target", pa.float32(), False),
            pa.field("naive", pa.float32(), False),
            pa.field("symbol", pa.int64(), False),
            pa.field("segment", pa.int64(), False),
            pa.field("part", pa.uint8(), False),
        ]
    )


class CacheWriter:
    """Writes a prepared file beside its place; leaving the block well renames it, otherwise removes it."""

    def __init__(self, path: Path, *, rows: int, num_features: int, metadata: Mapping[str, Any]) -> None:
        self.path = path
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        described = schema(num_features).with_metadata({METADATA_KEY: json.dumps(metadata).encode()})
        try:
            self._offsets = _lay_out(self._temporary, described, rows)
            self._file = self._temporary.open("r+b", buffering=0)
        except BaseException:
            self._temporary.unlink(missing_ok=True)
            raise
        self._row_bytes = {
            field.name: field.type.bit_width // 8 if not _is_list(field) else 4 * num_features
            for field in described
        }

    def write(self, name: str, row: int, values: npt.NDArray[np.generic]) -> None:
        """Write the values of a column from row `row` on; the type must be the column's."""
        data = np.ascontiguousarray(values).data.cast("B")
        place = self._offsets[name] + row * self._row_bytes[name]
        while data:
            done = os.pwrite(self._file.fileno(), data, place)
            place, data = place + done, data[done:]

    def __enter__(self) -> CacheWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                os.fsync(self._file.fileno())
                self._temporary.replace(self.path)
        finally:
            self._file.close()
            self._temporary.unlink(missing_ok=True)


def _is_list(field: pa.Field) -> bool:
    return bool(pa.types.is_fixed_size_list(field.type))


def _lay_out(path: Path, described: pa.Schema, rows: int) -> dict[str, int]:
    """Write a file of zeros with the right frame; return where each column's values begin."""
    longest = max(field.type.list_size * 4 if _is_list(field) else 8 for field in described) * rows
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    zeros = pa.py_buffer(mmap.mmap(-1, max(longest, 1), flags=flags, prot=mmap.PROT_READ))
    arrays = []
    for field in described:
        if _is_list(field):
            items = pa.Array.from_buffers(
                pa.float32(), rows * field.type.list_size, [None, zeros], null_count=0
            )
            arrays.append(pa.Array.from_buffers(field.type, rows, [None], null_count=0, children=[items]))
        else:
            arrays.append(pa.Array.from_buffers(field.type, rows, [None, zeros], null_count=0))
    options = pa.ipc.IpcWriteOptions(allow_64bit=True)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, described, options=options) as writer:
        writer.write_batch(pa.record_batch(arrays, schema=described))
    with pa.memory_map(str(path), "r") as mapped:
        start = mapped.read_buffer(1).address
        mapped.seek(0)
        batch = pa.ipc.open_file(mapped).get_batch(0)
        return {name: column_values(batch, name).buffers()[1].address - start for name in batch.schema.names}


def column_values(batch: pa.RecordBatch, name: str) -> pa.Array:
    """Return a column as one flat array; the features come row after row."""
    column = batch.column(name)
    return column.values if pa.types.is_fixed_size_list(column.type) else column


def read_batch(path: Path) -> tuple[pa.RecordBatch, dict[str, Any]]:
    """Map a prepared file; return its batch and its metadata. Raises ArrowInvalid, OSError or KeyError."""
    with pa.memory_map(str(path), "r") as mapped:
        reader = pa.ipc.open_file(mapped)
        metadata = json.loads((reader.schema.metadata or {})[METADATA_KEY])
        return reader.get_batch(0), metadata

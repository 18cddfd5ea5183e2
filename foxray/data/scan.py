"""One pass over a Parquet file: times, symbols, and the numeric columns as float64 rows.

Row groups stream through; only a few numbers per row (time, symbol, whether it is usable) stay in memory.
The values go to an unnamed temporary file, from which any rows can be gathered: so a file larger than
memory can still be sorted by symbol and time, and a killed process leaves nothing behind.

Shapes: N rows of the file, R usable rows in order of symbol and time, C numeric columns.
"""

from __future__ import annotations

import datetime as dt
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyarrow.types as pt

from foxray.data.columns import Columns, first_line, is_text
from foxray.errors import UserError

BATCH_BYTES = 16 << 20
"""Values read at a time, as float64."""

SMALLEST_EPOCH_NS = 10**16
"""Integers below this (April 1970 in ns) are seconds, milliseconds or microseconds given for nanoseconds."""

Ints = npt.NDArray[np.int64]
Array = npt.NDArray[np.float64]


class RowStore:
    """Rows of float64 in an unnamed temporary file: appended in the file's order, gathered in any."""

    def __init__(self, names: tuple[str, ...], folder: Path) -> None:
        self.names = names
        self._file: IO[bytes] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - lives as long as the store

    def append(self, values_NC: Array) -> None:
        """Add rows."""
        self._file.write(np.ascontiguousarray(values_NC).data)

    def gather(self, rows_R: Ints) -> Array:
        """Return the given rows as [R, C]."""
        if not len(self.names):
            return np.empty((len(rows_R), 0))
        self._file.flush()
        # Mapped anew each time: pages of earlier chunks then leave the resident set.
        table_NC = np.memmap(self._file, dtype=np.float64, mode="r").reshape(-1, len(self.names))
        return np.asarray(table_NC[rows_R])

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()


@dataclass(frozen=True, kw_only=True)
class Scan:
    """The usable rows of a file in order of symbol and time."""

    store: RowStore
    """Numeric values, in the file's own order."""

    order_R: Ints
    """Row of the store for each usable row."""

    timestamps_R: Ints
    """Time in ns since 1970, UTC."""

    symbol_R: Ints
    """Number of the symbol, an index into `symbols`."""

    symbols: tuple[str, ...]
    """Symbols in alphabetic order; empty without a symbol column."""

    notes: tuple[str, ...]
    """What was dropped, sorted or counted."""


def scan(path: Path, file: pq.ParquetFile, columns: Columns, folder: Path) -> Scan:
    """Read every row once. Raises `UserError` for values that cannot be used at all."""
    total = file.metadata.num_rows
    if total == 0:
        raise UserError(f"{path}: the file has no rows. Give a file with bars.")
    store = RowStore(columns.numeric, folder)
    try:
        return _scan_into(store, path, file, columns, total)
    except BaseException:
        store.close()
        raise


def _scan_into(store: RowStore, path: Path, file: pq.ParquetFile, columns: Columns, total: int) -> Scan:
    times_N = np.empty(total, dtype=np.int64)
    symbol_N = np.zeros(total, dtype=np.int32)
    usable_N = np.ones(total, dtype=bool)
    codes: dict[str, int] = {}
    broken = dict.fromkeys(columns.numeric, 0)
    unpriced = undated = at = 0
    read = [columns.timestamp, *([columns.symbol] if columns.symbol else []), *columns.numeric]
    for batch in _batches(path, file, list(dict.fromkeys(read))):
        rows = slice(at, at + batch.num_rows)
        at += batch.num_rows
        times_N[rows], dated_N = read_times(path, columns.timestamp, batch.column(columns.timestamp))
        undated += int((~dated_N).sum())
        if columns.symbol:
            symbol_N[rows] = _read_symbols(path, columns.symbol, batch.column(columns.symbol), codes)
        values_NC = np.empty((batch.num_rows, len(columns.numeric)))
        finite_N = dated_N
        priced_N = np.ones(batch.num_rows, dtype=bool)
        for place, name in enumerate(columns.numeric):
            values_NC[:, place] = value_N = _read_numbers(path, name, batch.column(name))
            good_N = np.isfinite(value_N)
            broken[name] += int((~good_N).sum())
            finite_N = finite_N & good_N
            if name in columns.prices:
                priced_N &= ~(value_N <= 0)
        unpriced += int((finite_N & ~priced_N).sum())
        usable_N[rows] = finite_N & priced_N
        store.append(values_NC)
    empty = [repr(name) for name, count in broken.items() if count == total]
    if empty:
        raise UserError(
            f"{path}: {'column' if len(empty) == 1 else 'columns'} {', '.join(empty)} hold no number in "
            f"any of the {total:,} rows (all NaN, empty or infinite). Drop them from the file or fill them."
        )
    notes = _drop_notes(path, broken, undated, unpriced, usable_N)
    names = sorted(codes)
    rank = np.array([names.index(name) for name in codes] or [0], dtype=np.int64)
    order_R, order_notes = _order(times_N, rank[symbol_N], usable_N)
    return Scan(
        store=store,
        order_R=order_R,
        timestamps_R=times_N[order_R],
        symbol_R=rank[symbol_N[order_R]],
        symbols=tuple(names),
        notes=(*notes, *order_notes),
    )


def _batches(path: Path, file: pq.ParquetFile, names: list[str]) -> Iterator[pa.RecordBatch]:
    try:
        yield from file.iter_batches(batch_size=max(BATCH_BYTES // (8 * len(names)), 1024), columns=names)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: a damaged Parquet file ({first_line(error)}). Write it again.") from error


def _drop_notes(
    path: Path, broken: dict[str, int], undated: int, unpriced: int, usable_N: npt.NDArray[np.bool_]
) -> list[str]:
    total, dropped = len(usable_N), int((~usable_N).sum())
    if not dropped:
        return []
    reasons = [f"{name} {count:,}" for name, count in broken.items() if count]
    reasons += [f"without a time {undated:,}"] if undated else []
    reasons += [f"with a price of 0 or less {unpriced:,}"] if unpriced else []
    text = (
        f"dropped {dropped:,} of {total:,} rows with NaN, infinite or impossible values "
        f"({', '.join(reasons)})"
    )
    if dropped == total:
        raise UserError(f"{path}: no usable row is left: {text}. Repair those columns.")
    return [text]


def _order(times_N: Ints, symbol_N: Ints, usable_N: npt.NDArray[np.bool_]) -> tuple[Ints, list[str]]:
    """Return the usable rows by symbol and time, the last of equal ones, and what was done."""
    notes = []
    order_R = np.flatnonzero(usable_N)
    order_R = order_R[np.argsort(symbol_N[order_R], kind="stable")]
    same_R = np.diff(symbol_N[order_R]) == 0
    backwards = int((same_R & (np.diff(times_N[order_R]) < 0)).sum())
    if backwards:
        notes.append(f"sorted by time: {backwards:,} rows came before the row above them")
        order_R = order_R[np.lexsort((times_N[order_R], symbol_N[order_R]))]
    again_R = (np.diff(symbol_N[order_R]) == 0) & (np.diff(times_N[order_R]) == 0)
    if again_R.any():
        notes.append(
            f"dropped {int(again_R.sum()):,} rows with a duplicate timestamp, keeping the last of each"
        )
        order_R = order_R[np.append(~again_R, True)]
    return order_R, notes


def read_times(path: Path, name: str, column: pa.Array) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Return ns since 1970 (UTC; times without a zone are taken as UTC) and which rows have a time."""
    dated_N = column.is_valid().to_numpy(zero_copy_only=False)
    kind = column.type
    if is_text(kind):
        column = _parse_texts(path, name, column)
    elif pt.is_integer(kind):
        column = column.cast(pa.int64())
        values = pc.min_max(pc.abs(column)).as_py()["max"]
        if values is not None and values < SMALLEST_EPOCH_NS:
            first = next(value.as_py() for value in column if value.is_valid)
            raise UserError(
                f"{path}: column {name!r} holds {first}, which is not a time in ns since 1970. "
                "Multiply seconds by 1,000,000,000 (milliseconds by 1,000,000), or store a timestamp type."
            )
    elif not (pt.is_timestamp(kind) or pt.is_date(kind)):
        raise UserError(
            f"{path}: column {name!r} is of type {kind}. "
            "Store a timestamp, an ISO 8601 string or integer ns since 1970."
        )
    if not pt.is_integer(column.type):
        try:
            zone = getattr(column.type, "tz", None)
            column = column.cast(pa.timestamp("ns", zone)).cast(pa.int64())
        except pa.ArrowInvalid as error:
            raise UserError(
                f"{path}: column {name!r} holds a time outside of the years 1678 to 2261 "
                f"({first_line(error)}). Drop or repair that row."
            ) from error
    return column.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64), dated_N


def _parse_texts(path: Path, name: str, column: pa.Array) -> pa.Array:
    texts = column.cast(pa.string())
    for kind in (pa.timestamp("ns", "UTC"), pa.timestamp("ns")):
        try:
            return texts.cast(kind)
        except pa.ArrowInvalid:
            continue
    # Arrow does not say which one: look for it, and accept what Python's own parser can read.
    parsed: list[int | None] = []
    epoch = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
    for text in texts.to_pylist():
        if text is None:
            parsed.append(None)
            continue
        try:
            moment = dt.datetime.fromisoformat(text.strip())
        except ValueError as error:
            raise UserError(
                f"{path}: column {name!r} holds {text[:40]!r}, which is not an ISO 8601 time. "
                "Write times like 2024-01-31T15:30:00Z."
            ) from error
        moment = moment if moment.tzinfo else moment.replace(tzinfo=dt.UTC)
        parsed.append((moment - epoch) // dt.timedelta(microseconds=1) * 1000)
    return pa.array(parsed, type=pa.int64())


def _read_symbols(path: Path, name: str, column: pa.Array, codes: dict[str, int]) -> npt.NDArray[np.int32]:
    if column.null_count:
        raise UserError(
            f"{path}: column {name!r} is empty in {column.null_count:,} rows. Name the symbol of each."
        )
    encoded = column.cast(pa.string()).dictionary_encode()
    places = [codes.setdefault(text, len(codes)) for text in encoded.dictionary.to_pylist()]
    numbers_N: npt.NDArray[np.int32] = np.array(places, dtype=np.int32)[encoded.indices.to_numpy()]
    return numbers_N


def _read_numbers(path: Path, name: str, column: pa.Array) -> Array:
    try:
        numbers = column.cast(pa.float64(), safe=False)
    except pa.ArrowException as error:
        raise UserError(
            f"{path}: column {name!r} cannot be read as numbers ({first_line(error)})."
        ) from error
    return np.asarray(numbers.to_numpy(zero_copy_only=False), dtype=np.float64)

"""Bars for the tests of `foxray.data`: synthetic ones, and real ones where the shared file is there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from foxray.data.frame import Bars, session_blocks
from foxray.data.synth import synth

SHARED = Path(__file__).parents[2] / "shared" / "data"
REAL_BARS = SHARED / "6E_FUT_2024-01_1m.parquet"
MINUTE_NS = 60 * 10**9

needs_real_bars = pytest.mark.skipif(not REAL_BARS.exists(), reason="the shared real bars are not there")


def table_of(rows: int = 2000, seed: int = 0, symbols: tuple[str, ...] = ()) -> pa.Table:
    """Return synthetic bars as a table."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return pq.read_table(synth(Path(folder) / "bars.parquet", rows=rows, seed=seed, symbols=symbols))


def bars_of(table: pa.Table, *, volume: bool = True, gap_minutes: float = 30.0) -> Bars:
    """Return a table of one symbol as `Bars`."""
    times_R = table["timestamp"].cast(pa.timestamp("ns", "UTC")).cast(pa.int64()).to_numpy()
    column = {name: table[name].to_numpy().astype(np.float64) for name in ("open", "high", "low", "close")}
    return Bars(
        **{f"{name}_R": values for name, values in column.items()},
        volume_R=table["volume"].to_numpy().astype(np.float64) if volume else None,
        timestamps_R=times_R,
        session_R=session_blocks(times_R, gap_minutes),
    )


def real_or_synthetic(rows: int | None = None) -> pa.Table:
    """Return the real bars where they are, otherwise as many synthetic ones."""
    table = pq.read_table(REAL_BARS) if REAL_BARS.exists() else table_of(rows or 30_000)
    return table.slice(0, rows)


def write(path: Path, table: pa.Table | dict[str, object]) -> Path:
    """Write a table, or a mapping of columns, as Parquet."""
    pq.write_table(table if isinstance(table, pa.Table) else pa.table(table), path)
    return path


def minutes(count: int, start: int = 1_704_150_000) -> np.ndarray:
    """Return `count` minutes in a row as ns since 1970."""
    return (start + 60 * np.arange(count, dtype=np.int64)) * 10**9

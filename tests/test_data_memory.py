"""A file larger than the memory it is given is prepared all the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_bars import minutes

from foxray.data.prepared import PreparedData
from foxray.data.synth import synth

PREPARE = """
import resource, sys
from pathlib import Path
import pyarrow as pa
from foxray.data.prepare import prepare
from foxray.data.settings import DataSettings
pa.set_cpu_count(1); pa.set_io_thread_count(1)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
settings = DataSettings(num_features=None, target=sys.argv[2] or None)
data = prepare(sys.argv[1], settings, Path(sys.argv[3]), chunk_rows=16384)
print(data.path)
print(peak() - before)
"""


def run(file: Path, target: str, cache: Path) -> tuple[PreparedData, int]:
    arguments = [sys.executable, "-c", PREPARE, str(file), target, str(cache)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=300)
    path, grown_bytes = done.stdout.split("\n")[-3:-1]
    return PreparedData.open(path), int(grown_bytes)


@pytest.mark.slow
def test_derived_features_of_a_long_file_in_bounded_memory(tmp_path: Path) -> None:
    data, grown_bytes = run(synth(tmp_path / "bars.parquet", rows=300_000), "", tmp_path / "cache")
    table_bytes = data.num_rows * data.num_features * 4
    assert table_bytes > 250 << 20
    assert grown_bytes < 200 << 20, f"grew by {grown_bytes >> 20} MiB for a table of {table_bytes >> 20} MiB"


@pytest.mark.slow
def test_own_columns_of_a_wide_file_in_bounded_memory(tmp_path: Path) -> None:
    rows, group, rng = 250_000, 10_000, np.random.default_rng(0)
    times = minutes(rows)
    names = [f"c{place}" for place in range(225)]
    schema = pa.schema([("timestamp", pa.int64()), *((name, pa.float32()) for name in names)])
    with pq.ParquetWriter(tmp_path / "wide.parquet", schema) as writer:
        for begin in range(0, rows, group):
            values = [rng.standard_normal(group, dtype=np.float32) for _ in names]
            writer.write_table(pa.table([times[begin : begin + group], *values], schema=schema))
    data, grown_bytes = run(tmp_path / "wide.parquet", "c0", tmp_path / "cache")
    in_memory_bytes = rows * 225 * 8
    assert data.features_RF.shape == (rows, 225)
    assert grown_bytes < 0.65 * in_memory_bytes, f"grew by {grown_bytes >> 20} of {in_memory_bytes >> 20} MiB"

"""The data path in numbers: preparing, opening, windows per second, and Parquet against DBN.

    python benchmarks/bench_data.py [--seconds 2] [--rows 30000]

Prints a small table; `run()` returns the same numbers. Windows are 60 rows of 225 float32 in batches of 256.
The comparison of formats reads the bars of a batch from a file, as a training loop without a prepared file
would do at every batch: DBN has no index, so its file is decoded as a whole each time.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from foxray.data.prepare import prepare
from foxray.data.prepared import PreparedData
from foxray.data.settings import DataSettings
from foxray.data.synth import synth
from foxray.data.windows import WindowGather

BATCH = 256
STRETCHES = 25
SETTINGS = DataSettings()


class WindowDataset(Dataset[Tensor]):
    """The usual way: one window at a time, sliced and collated."""

    def __init__(self, data: PreparedData) -> None:
        self.table_RF, self.ends_N = data.features_RF, data.train_windows_N

    def __len__(self) -> int:
        return len(self.ends_N)

    def __getitem__(self, index: int) -> Tensor:
        end = int(self.ends_N[index])
        return self.table_RF[end - SETTINGS.seq_len + 1 : end + 1]


def rate(step: Callable[[], object], per_call: int, seconds: float) -> float:
    """Return units per second over one stretch."""
    calls, start = 0, time.perf_counter()
    while (passed := time.perf_counter() - start) < seconds:
        step()
        calls += 1
    return calls * per_call / passed


def best_rates(steps: dict[str, tuple[int, Callable[[], object]]], seconds: float) -> dict[str, float]:
    """Return each step's windows per second: the best of many short stretches, taken in turns.

    A machine is seldom quiet for long; in turns, all have the same chance of a quiet moment. Each step
    comes with its number of threads.
    """
    best = dict.fromkeys(steps, 0.0)
    for _ in range(STRETCHES):
        for name, (threads, step) in steps.items():
            torch.set_num_threads(threads)
            step()
            best[name] = max(best[name], rate(step, BATCH, seconds / STRETCHES))
    return best


def gather_step(data: PreparedData) -> Callable[[], object]:
    """Return the strided gather of the next batch, in random order."""
    gather = WindowGather(data.features_RF, SETTINGS.seq_len)
    ends_N = data.train_windows_N[torch.randperm(len(data.train_windows_N))]
    batches = itertools.cycle(ends_N.split(BATCH)[:-1])
    return lambda: gather(next(batches))


def loader_step(data: PreparedData, workers: int) -> Callable[[], object]:
    """Return the next batch of a `DataLoader` over the same table."""
    loader = DataLoader(
        WindowDataset(data), batch_size=BATCH, shuffle=True, drop_last=True, num_workers=workers
    )
    batches = (batch_BTF for _ in itertools.count() for batch_BTF in loader)
    return lambda: next(batches)


def dbn_bytes(table: pa.Table) -> bytes:
    """Return one-minute bars encoded as DBN, as Databento delivers them."""
    import databento_dbn as dbn

    times = table["timestamp"].cast(pa.int64()).to_pylist()
    prices = [
        (table[name].to_numpy() * 1e9).round().astype(np.int64).tolist()
        for name in ("open", "high", "low", "close")
    ]
    metadata = dbn.Metadata(
        dataset="GLBX.MDP3", start=times[0], stype_in=dbn.SType.RAW_SYMBOL, stype_out=dbn.SType.INSTRUMENT_ID,
        schema=dbn.Schema.OHLCV_1M, symbols=["6E"], partial=[], not_found=[], mappings=[],
    )  # fmt: skip
    parts = [metadata.encode()]
    for when, o, h, lo, c, volume in zip(times, *prices, table["volume"].to_pylist(), strict=True):
        message = dbn.OHLCVMsg(
            rtype=33, publisher_id=1, instrument_id=1, ts_event=when,
            open=o, high=h, low=lo, close=c, volume=volume,
        )  # fmt: skip
        parts.append(bytes(message))
    return b"".join(parts)


def format_seconds(bars: Path, folder: Path, seconds: float) -> dict[str, float]:
    """Return seconds to have the rows of one batch in memory, from Parquet and from DBN."""
    import databento
    import zstandard

    table = pq.read_table(bars).slice(0, 30_000)
    parquet, dbn = folder / "rows.parquet", folder / "rows.dbn.zst"
    pq.write_table(table, parquet, row_group_size=1024)
    dbn.write_bytes(zstandard.compress(dbn_bytes(table)))
    file = pq.ParquetFile(parquet)
    at = 0

    def from_parquet() -> None:
        nonlocal at
        at = (at + 1) % file.num_row_groups
        file.read_row_group(at, columns=["open", "high", "low", "close", "volume"])

    def from_dbn() -> None:
        databento.DBNStore.from_file(dbn).to_ndarray()

    return {
        "parquet_batch_seconds": 1 / max(rate(from_parquet, 1, seconds / 10) for _ in range(10)),
        "dbn_batch_seconds": 1 / max(rate(from_dbn, 1, seconds / 10) for _ in range(10)),
    }


def run(seconds: float = 2.0, rows: int = 30_000) -> dict[str, Any]:
    """Return all numbers under their names."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bars = synth(folder / "bars.parquet", rows=rows)
        start = time.perf_counter()
        data = prepare(bars, SETTINGS, folder / "cache", log=lambda text: None)
        prepare_seconds = time.perf_counter() - start
        data.path.read_bytes()
        numbers: dict[str, Any] = {
            "rows": data.num_rows,
            "features": data.num_features,
            "prepare_seconds": prepare_seconds,
            "open_seconds": 1 / rate(lambda: PreparedData.open(data.path).features_RF, 1, seconds / 2),
            **best_rates(
                {
                    "gather_2_threads_windows_per_second": (2, gather_step(data)),
                    "gather_1_thread_windows_per_second": (1, gather_step(data)),
                    "loader_0_windows_per_second": (2, loader_step(data, 0)),
                },
                seconds,
            ),
            "loader_2_windows_per_second": rate(loader_step(data, 2), BATCH, seconds),
            **format_seconds(bars, folder, seconds),
        }
    numbers["gather_windows_per_second"] = max(
        numbers["gather_1_thread_windows_per_second"], numbers["gather_2_threads_windows_per_second"]
    )
    numbers["gather_to_loader_ratio"] = (
        numbers["gather_windows_per_second"] / numbers["loader_0_windows_per_second"]
    )
    numbers["dbn_to_parquet_ratio"] = numbers["dbn_batch_seconds"] / numbers["parquet_batch_seconds"]
    for text, shown in ROWS:
        print(f"{text.format(**numbers):<46} {shown(numbers):>14}")
    return numbers


ROWS: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
    ("prepare {rows:,} bars to {features} features", lambda n: f"{n['prepare_seconds']:.2f} s"),
    ("open what is prepared", lambda n: f"{n['open_seconds'] * 1e3:.2f} ms"),
    ("windows, gathered by 2 threads", lambda n: f"{n['gather_2_threads_windows_per_second']:,.0f} /s"),
    ("windows, gathered by 1 thread", lambda n: f"{n['gather_1_thread_windows_per_second']:,.0f} /s"),
    ("windows, DataLoader without workers", lambda n: f"{n['loader_0_windows_per_second']:,.0f} /s"),
    ("windows, DataLoader with 2 workers", lambda n: f"{n['loader_2_windows_per_second']:,.0f} /s"),
    ("gather against DataLoader without workers", lambda n: f"{n['gather_to_loader_ratio']:.1f} x"),
    ("bars of a batch from Parquet", lambda n: f"{n['parquet_batch_seconds'] * 1e3:.2f} ms"),
    ("bars of a batch from DBN", lambda n: f"{n['dbn_batch_seconds'] * 1e3:.2f} ms"),
    ("DBN against Parquet", lambda n: f"{n['dbn_to_parquet_ratio']:.1f} x"),
)


def main() -> None:
    """Measure with options of one's own."""
    parser = argparse.ArgumentParser(description="Benchmark the data path.")
    parser.add_argument("--seconds", type=float, default=2.0, help="time for each measurement")
    parser.add_argument("--rows", type=int, default=30_000, help="synthetic bars to prepare")
    chosen = parser.parse_args()
    run(chosen.seconds, chosen.rows)


if __name__ == "__main__":
    main()

"""Synthetic bars look like futures: sessions, gaps, ticks, clusters; and equal seeds give equal files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from data_bars import table_of

from foxray.data.synth import TICK, synth
from foxray.errors import UserError


def test_equal_arguments_give_equal_files(tmp_path: Path) -> None:
    one, two = synth(tmp_path / "a.parquet", days=5, seed=7), synth(tmp_path / "b.parquet", days=5, seed=7)
    assert one.read_bytes() == two.read_bytes()
    assert not pq.read_table(synth(tmp_path / "c.parquet", days=5, seed=8)).equals(pq.read_table(one))


def test_bars_are_consistent_on_a_tick_grid() -> None:
    bars = table_of(20_000).to_pydict()
    o, h, lo, c = (np.array(bars[name]) for name in ("open", "high", "low", "close"))
    assert (h >= np.maximum(o, c)).all() and (lo <= np.minimum(o, c)).all() and (lo > 0).all()
    for price in (o, h, lo, c):
        np.testing.assert_allclose(price / TICK, np.rint(price / TICK), atol=1e-6)
    volume = np.array(bars["volume"])
    assert volume.dtype == np.int64 and (volume >= 1).all()


def test_sessions_have_breaks_weekends_and_missing_minutes() -> None:
    seconds = table_of(20_000)["timestamp"].cast("int64").to_numpy() // 10**9
    steps = np.diff(seconds) // 60
    assert (steps > 0).all()
    assert 0.002 < (steps == 2).mean() < 0.05, "single minutes are missing"
    assert (steps == 61).sum() >= 8, "an hour's break a day"
    assert ((steps > 2900) & (steps < 2960)).sum() == 2, "weekends"
    hour, weekday = seconds // 3600 % 24, (seconds // 86_400 + 3) % 7
    assert not (hour == 22).any() and not (weekday == 5).any()


def test_volatility_clusters_and_returns_do_not() -> None:
    table = table_of(40_000)
    r = np.diff(np.log(table["close"].to_numpy()))
    assert 5e-5 < r.std() < 4e-4
    assert abs(np.corrcoef(r[1:], r[:-1])[0, 1]) < 0.05
    assert np.corrcoef(np.abs(r[1:]), np.abs(r[:-1]))[0, 1] > 0.1
    hour = table["timestamp"].cast("int64").to_numpy()[1:] // (3600 * 10**9) % 24
    assert np.abs(r[hour == 14]).mean() > 2 * np.abs(r[hour == 4]).mean(), "the clock matters"
    volume = np.log(table["volume"].to_numpy()[1:])
    assert np.corrcoef(volume, np.abs(r))[0, 1] > 0.2


def test_symbols_move_together_in_part() -> None:
    table = table_of(3000, symbols=("ES", "NQ"))
    assert table["symbol"].value_counts().to_pylist() == [
        {"values": "ES", "counts": 3000}, {"values": "NQ", "counts": 3000},
    ]  # fmt: skip
    closes = [
        dict(zip(part["timestamp"].to_pylist(), part["close"].to_pylist(), strict=True))
        for part in (table.filter(np.array(table["symbol"].to_pylist()) == name) for name in ("ES", "NQ"))
    ]
    both = sorted(set(closes[0]) & set(closes[1]))
    r = [np.diff(np.log([close[time] for time in both])) for close in closes]
    assert 0.2 < np.corrcoef(*r)[0, 1] < 0.8


@pytest.mark.parametrize(("freq", "seconds"), [("30s", 30), ("5min", 300), ("1h", 3600)])
def test_other_frequencies(tmp_path: Path, freq: str, seconds: int) -> None:
    table = pq.read_table(synth(tmp_path / "x.parquet", rows=500, freq=freq))
    steps = np.diff(table["timestamp"].cast("int64").to_numpy()) // 10**9
    assert len(table) == 500 and np.median(steps) == seconds


@pytest.mark.parametrize(
    "arguments",
    [
        {"rows": 0},
        {"days": -1},
        {"rows": 5, "days": 5},
        {"freq": "1d"},
        {"freq": "often"},
        {"symbols": ("A", "A")},
    ],
)
def test_arguments_out_of_range(tmp_path: Path, arguments: dict[str, object]) -> None:
    with pytest.raises(UserError):
        synth(tmp_path / "x.parquet", **arguments)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        synth(tmp_path / "file" / "x.parquet", rows=10)

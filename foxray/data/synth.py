"""Synthetic futures bars with what real ones have: sessions, breaks, missing minutes, seasons, clusters.

Returns cannot be forecast, volatility can: it follows the clock (openings of Tokyo, London and New York)
and two slow random states, as stochastic volatility models have it. So a model that learns to widen and
narrow its quantiles beats a fixed forecast, and one that claims to know the direction is wrong. Prices sit
on a tick grid, volumes are whole and follow volatility. Equal arguments give equal files.

Shapes: R bars of one symbol in order of time.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import talib

from foxray.data.replacing import replacing
from foxray.errors import UserError

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

START = "2024-01-01"
FIRST_PRICE = 1.1
TICK = 0.00005
MINUTE_VOLATILITY = 1.1e-4
MEAN_LOG_VOLUME = 4.3
FREQUENCY_UNITS = {"s": 1, "min": 60, "h": 3600}
BREAK_HOUR = 22
"""UTC hour without trade on every day; from this hour on Friday until Sunday's next there is none."""


def synth(
    dst: Path | str,
    *,
    rows: int | None = None,
    days: float | None = None,
    seed: int = 0,
    symbols: Sequence[str] = (),
    freq: str = "1min",
) -> Path:
    """Write synthetic bars to the Parquet file `dst` and return its path.

    `rows` bars per symbol, or `days` calendar days (30 when neither is given) from 2024-01-01 on. `symbols`
    adds a symbol column; they share half of their movement. `freq` is like 1min, 30s or 1h.
    Raises `UserError` for arguments out of range.
    """
    path = Path(dst)
    step_seconds = _step_seconds(freq)
    times_R = _trading_times(rows, days, step_seconds)
    names = tuple(symbols)
    if len(set(names)) < len(names):
        raise UserError(f"--symbols names {names} repeat one. Give each once.")
    rng = np.random.default_rng(seed)
    shared_R = rng.standard_normal(len(times_R))
    tables = [
        _bars(times_R, step_seconds, shared_R, rng, name, price)
        for price, name in enumerate(names or (None,))
    ]
    table = pa.concat_tables([table.slice(0, rows) for table in tables])
    if len(names) > 1:
        table = table.sort_by([("timestamp", "ascending"), ("symbol", "ascending")])
    with replacing(path) as temporary:
        pq.write_table(table, temporary)
    return path


def _step_seconds(freq: str) -> int:
    match = re.fullmatch(r"(\d+)\s*(s|min|h)", freq.strip())
    seconds = int(match[1]) * FREQUENCY_UNITS[match[2]] if match else 0
    if not 1 <= seconds <= 6 * 3600:
        raise UserError(
            f"--freq is {freq!r}; allowed is a whole number of s, min or h from 1s to 6h, like 1min."
        )
    return seconds


def _trading_times(rows: int | None, days: float | None, step_seconds: int) -> Ints:
    """Return the possible bar times in seconds since 1970: more than `rows`, since some will be missing."""
    if rows is not None and days is not None:
        raise UserError("--rows and --days are both given. Give one of them.")
    if rows is not None:
        if not 1 <= rows <= 50_000_000:
            raise UserError(f"--rows is {rows}; allowed is 1 to 50,000,000.")
        # 115 of a week's 168 hours trade; a tenth more for missing bars, three days for a weekend.
        days = rows * step_seconds / 86_400 * 168 / 115 * 1.1 + 3
    days = 30.0 if days is None else days
    if not 0 < days <= 36_500:
        raise UserError(f"--days is {days:g}; allowed is above 0 and up to 36,500.")
    start = int(np.datetime64(START, "s").astype(np.int64))
    times_R = np.arange(start, start + int(days * 86_400), step_seconds, dtype=np.int64)
    hour_R = times_R // 3600 % 24
    weekday_R = (times_R // 86_400 + 3) % 7
    closed_R = hour_R == BREAK_HOUR
    closed_R |= (weekday_R == 4) & (hour_R > BREAK_HOUR)
    closed_R |= weekday_R == 5
    closed_R |= (weekday_R == 6) & (hour_R <= BREAK_HOUR)
    open_R: Ints = times_R[~closed_R]
    return open_R


def _season(times_R: Ints) -> Array:
    """Return the usual log volatility of the time of day: 0 on average, highest when New York opens."""
    hour_R = times_R % 86_400 / 3600
    bumps = ((0.5, 0.5, 1.0), (8.0, 0.9, 1.6), (13.6, 1.2, 1.5), (19.0, 0.4, 1.0))
    season_R = np.full(len(times_R), -0.6)
    for centre, height, width in bumps:
        apart_R = np.abs(hour_R - centre)
        season_R += height * np.exp(-0.5 * (np.minimum(apart_R, 24 - apart_R) / width) ** 2)
    return season_R


def _slow(rng: np.random.Generator, rows: int, span: int) -> Array:
    """Return a first-order autoregression of unit variance that forgets over about `span / 2` bars."""
    spin_up = min(5 * span, 200_000)
    noise_R = rng.standard_normal(rows + spin_up + span)
    weight = 2.0 / (span + 1)
    faded_R: Array = talib.EMA(noise_R, timeperiod=span)
    unit = float(np.sqrt((2 - weight) / weight))
    return faded_R[-rows:] * unit


def _bars(
    times_R: Ints,
    step_seconds: int,
    shared_R: Array,
    rng: np.random.Generator,
    symbol: str | None,
    number: int,
) -> pa.Table:
    rows = len(times_R)
    per_hour = max(3600 // step_seconds, 2)
    state_R = 0.35 * _slow(rng, rows, per_hour) + 0.35 * _slow(rng, rows, 24 * per_hour)
    level_R = _season(times_R) + state_R
    sigma_R = MINUTE_VOLATILITY * np.sqrt(step_seconds / 60) * np.exp(level_R)
    # Student's t with 5 degrees of freedom, brought to unit variance: fat tails beyond the clusters.
    own_R = rng.standard_t(5, rows) * np.sqrt(3 / 5)
    move_R = sigma_R * (np.sqrt(0.5) * shared_R + np.sqrt(0.5) * own_R if symbol else own_R)
    pause_R = np.diff(times_R, prepend=times_R[:1]) > step_seconds
    gap_R = np.where(pause_R, 6.0, 0.15) * sigma_R * rng.standard_normal(rows)
    close_R = np.cumsum(move_R + gap_R)
    open_R = close_R - move_R
    high_R, low_R = _extremes(open_R, close_R, sigma_R, rng)
    volume_R = np.exp(MEAN_LOG_VOLUME + 1.3 * level_R + 0.5 * rng.standard_normal(rows))
    volume_R *= step_seconds / 60
    traded_R = rng.random(rows) < 1 - np.exp(-volume_R / 4)
    first_price = FIRST_PRICE * (1 + 0.37 * number)
    columns: dict[str, pa.Array] = {
        "timestamp": pa.array(times_R[traded_R] * 10**9, type=pa.timestamp("ns", "UTC"))
    }
    for name, log_R in (("open", open_R), ("high", high_R), ("low", low_R), ("close", close_R)):
        ticks_R = np.maximum(np.rint(first_price * np.exp(log_R[traded_R]) / TICK), 1)
        columns[name] = pa.array(np.round(ticks_R * TICK, 5))
    columns["volume"] = pa.array(np.maximum(np.rint(volume_R[traded_R]), 1).astype(np.int64))
    table = pa.table(columns)
    if symbol is not None:
        table = table.append_column("symbol", pa.array([symbol] * len(table)))
    return table


def _extremes(open_R: Array, close_R: Array, sigma_R: Array, rng: np.random.Generator) -> tuple[Array, Array]:
    """Return highs and lows as a Brownian bridge from open to close has them (each by its exact law)."""
    middle_R, moved_R = (open_R + close_R) / 2, close_R - open_R
    reach_R = [
        np.sqrt(moved_R**2 - 2 * sigma_R**2 * np.log1p(-rng.random(len(open_R)))) / 2 for _ in range(2)
    ]
    return middle_R + reach_R[0], middle_R - reach_R[1]

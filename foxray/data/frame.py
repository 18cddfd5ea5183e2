"""Bars of one symbol and the series that many features share, each computed once.

Prices enter as logarithms, so every level becomes a difference of logarithms: a ratio, free of the price's
unit. Only the past is read, and memory is finite (windows, the running session) or fades exponentially
(moving averages), so a chunk that starts `OVERLAP_ROWS` earlier agrees with the whole file.

Shapes: every array is [R], R rows of one symbol in order of time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import talib

from foxray.data import rolling
from foxray.data.rolling import Array, Ints

OVERLAP_ROWS = 4096
"""Rows a chunk reads before its own: the slowest average (span 240) has then faded to 1e-15."""

DAY_NS = 86_400 * 10**9
SQUARE_BITS = 50
WEIGHT_BITS = 20
RETURN_FLOOR = 1e-7
"""Less than any tick: keeps ratios of flat stretches finite."""

MAX_RETURN = 0.25
"""Returns of one bar are cut here (as logarithms), inside what the integer grids can hold."""


@dataclass(frozen=True, kw_only=True)
class Bars:
    """OHLC bars of one symbol, in order of time, without missing values, prices above 0."""

    open_R: Array
    """Price of the first trade."""

    high_R: Array
    """Highest price."""

    low_R: Array
    """Lowest price."""

    close_R: Array
    """Price of the last trade."""

    volume_R: Array | None
    """Traded volume, or None where the file has none."""

    timestamps_R: Ints
    """Start of each bar in ns since 1970, UTC."""

    session_R: Ints
    """Number of the session of each bar, as by `session_blocks`."""

    def __len__(self) -> int:
        return len(self.close_R)

    def __getitem__(self, rows: slice) -> Bars:
        volume_R = None if self.volume_R is None else self.volume_R[rows]
        return Bars(
            open_R=self.open_R[rows],
            high_R=self.high_R[rows],
            low_R=self.low_R[rows],
            close_R=self.close_R[rows],
            volume_R=volume_R,
            timestamps_R=self.timestamps_R[rows],
            session_R=self.session_R[rows],
        )


def segment_numbers(timestamps_R: Ints, gap_minutes: float) -> Ints:
    """Return a number per row that grows by one after each pause longer than `gap_minutes`."""
    if not len(timestamps_R):
        return np.zeros(0, dtype=np.int64)
    pauses_R = np.diff(timestamps_R, prepend=timestamps_R[:1]) > int(gap_minutes * 60e9)
    return np.cumsum(pauses_R).astype(np.int64)


def session_blocks(timestamps_R: Ints, gap_minutes: float) -> Ints:
    """Return a session number per row: as the segments, but cut every 24 hours from a segment's start.

    Without the cut a market that never closes would have one endless session, and nothing computed from
    its start could be computed from a chunk.
    """
    segment_R = segment_numbers(timestamps_R, gap_minutes)
    start_R = timestamps_R[first_rows(segment_R)]
    day_R = (timestamps_R - start_R) // DAY_NS
    changes_R = (np.diff(segment_R, prepend=segment_R[:1]) != 0) | (np.diff(day_R, prepend=day_R[:1]) != 0)
    return np.cumsum(changes_R).astype(np.int64)


def first_rows(group_R: Ints) -> Ints:
    """Return for each row the first row of its group; groups are runs of equal numbers."""
    row_R = np.arange(len(group_R), dtype=np.int64)
    starts_R = np.diff(group_R, prepend=group_R[:1]) != 0
    return np.maximum.accumulate(np.where(starts_R, row_R, 0)).astype(np.int64)


def indicator(name: str, *inputs: Array, timeperiod: int | None = None) -> Array:
    """Return the one output of TA-Lib's function `name`; NaN where there are too few rows for it."""
    return _talib(name, inputs, timeperiod, 1)[0]


def indicator_pair(name: str, *inputs: Array, timeperiod: int) -> tuple[Array, Array]:
    """Return the two outputs of TA-Lib's function `name`, as `indicator` does."""
    first_R, second_R = _talib(name, inputs, timeperiod, 2)
    return first_R, second_R


def _talib(name: str, inputs: tuple[Array, ...], timeperiod: int | None, outputs: int) -> tuple[Array, ...]:
    # TA-Lib raises on a series without any value; for us that is a look-back longer than the data.
    if any(np.isnan(x_R).all() for x_R in inputs):
        return (np.full(len(inputs[0]), np.nan),) * outputs
    settings = {} if timeperiod is None else {"timeperiod": timeperiod}
    values = getattr(talib, name)(*inputs, **settings)
    return values if outputs > 1 else (values,)


class Frame:
    """The shared series of one stretch of bars. Rows inside a look-back are NaN."""

    def __init__(self, bars: Bars) -> None:
        self.bars = bars
        self._kept: dict[tuple[object, ...], Array] = {}

    def keep(self, key: tuple[object, ...], make: Callable[[], Array]) -> Array:
        """Return the series kept under `key`, made at the first call."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    # Prices -----------------------------------------------------------------------------------------

    @cached_property
    def lo(self) -> Array:
        """Log open."""
        return np.log(self.bars.open_R)

    @cached_property
    def lc(self) -> Array:
        """Log close."""
        return np.log(self.bars.close_R)

    @cached_property
    def top(self) -> Array:
        """Highest of the four prices: the high of a bar that contradicts itself is not believed."""
        b = self.bars
        return np.maximum(np.maximum(b.open_R, b.close_R), np.maximum(b.high_R, b.low_R))

    @cached_property
    def bottom(self) -> Array:
        """Lowest of the four prices."""
        b = self.bars
        return np.minimum(np.minimum(b.open_R, b.close_R), np.minimum(b.high_R, b.low_R))

    @cached_property
    def lh(self) -> Array:
        """Log high."""
        return np.log(self.top)

    @cached_property
    def ll(self) -> Array:
        """Log low."""
        return np.log(self.bottom)

    @cached_property
    def r(self) -> Array:
        """Log return of one bar, cut at `MAX_RETURN`."""
        return np.clip(self.ret(1), -MAX_RETURN, MAX_RETURN)

    def ret(self, bars: int) -> Array:
        """Log return over `bars` bars."""
        return self.keep(("ret", bars), lambda: self.lc - rolling.lag(self.lc, bars))

    @cached_property
    def span(self) -> Array:
        """Log of high over low."""
        return self.lh - self.ll

    @cached_property
    def place(self) -> Array:
        """Where the bar closed in its range: -1 at the low, 1 at the high, 0 where there is no range."""
        wide_R = self.span > RETURN_FLOOR
        return np.where(wide_R, (2 * self.lc - self.lh - self.ll) / np.where(wide_R, self.span, 1.0), 0.0)

    @cached_property
    def true_range(self) -> Array:
        """Wilder's true range of log prices."""
        before_R = rolling.lag(self.lc, 1)
        return np.maximum(self.lh, before_R) - np.minimum(self.ll, before_R)

    @cached_property
    def sign(self) -> Array:
        """Sign of the one-bar return."""
        return np.sign(self.r)

    # Rolling ----------------------------------------------------------------------------------------

    def rms(self, window: int) -> Array:
        """Root mean square of one-bar returns, at least `RETURN_FLOOR`."""
        return self.keep(("rms", window), lambda: self.root_mean(self.r**2, window))

    def root_mean(self, square_R: Array, window: int) -> Array:
        """Root of the mean of squares (below 1), at least `RETURN_FLOOR`."""
        mean_R = rolling.mean(np.minimum(square_R, 1.0), window, SQUARE_BITS)
        return np.maximum(np.sqrt(np.maximum(mean_R, 0.0)), RETURN_FLOOR)

    @cached_property
    def z(self) -> Array:
        """One-bar return in units of its own moving volatility (span 30), cut at 8."""
        scale_R = np.maximum(np.sqrt(self.ema(self.r**2, 30)), RETURN_FLOOR)
        return np.clip(self.r / rolling.lag(scale_R, 1), -8.0, 8.0)

    def ema(self, x_R: Array, span: int) -> Array:
        """Exponential moving average (TA-Lib's, seeded with a plain one)."""
        return indicator("EMA", x_R, timeperiod=span)

    def price_mean(self, window: int) -> Array:
        """Mean of log close."""
        return self.keep(("mean", window), lambda: rolling.mean(self.lc, window))

    def price_std(self, window: int) -> Array:
        """Standard deviation of log close, at least `RETURN_FLOOR`."""
        return self.keep(
            ("std", window),
            lambda: np.maximum(rolling.deviation(self.lc, window, rolling.PRICE_BITS), RETURN_FLOOR),
        )

    def highest(self, window: int) -> Array:
        """Highest log high."""
        return self.keep(("max", window), lambda: indicator("MAX", self.lh, timeperiod=window))

    def lowest(self, window: int) -> Array:
        """Lowest log low."""
        return self.keep(("min", window), lambda: indicator("MIN", self.ll, timeperiod=window))

    def slope(self, window: int) -> Array:
        """Slope per bar of the line through log close."""
        return self.keep(("slope", window), lambda: rolling.slope(self.lc, window, rolling.PRICE_BITS))

    # Volume -----------------------------------------------------------------------------------------

    @cached_property
    def volume(self) -> Array:
        """Volume; only features that need it ask."""
        if self.bars.volume_R is None:
            raise ValueError("these bars have no volume")
        return np.maximum(self.bars.volume_R, 0.0)

    @cached_property
    def lv(self) -> Array:
        """Log of 1 + volume."""
        return np.log1p(self.volume)

    @cached_property
    def weight(self) -> Array:
        """Volume over its moving average (span 60), cut at 64: a weight free of the contract's size."""
        base_R = self.ema(self.volume, 60)
        return np.clip(self.volume / np.maximum(base_R, 1e-9), 0.0, 64.0)

    def weighted(self, x_R: Array, window: int) -> Array:
        """Mean of `x_R` weighted by volume; 0 where nothing was traded."""
        top_R = rolling.mean(self.weight * x_R, window, 44)
        base_R = self.keep(("weight", window), lambda: rolling.mean(self.weight, window, 44))
        return top_R / np.maximum(base_R, 1e-9)

    # Session ----------------------------------------------------------------------------------------

    @cached_property
    def opening(self) -> npt.NDArray[np.int64]:
        """Row of the session's first bar."""
        return first_rows(self.bars.session_R)

    def session_extreme(self, x_R: Array, sign: int) -> Array:
        """Highest (sign 1) or lowest (sign -1) value since the session's first bar."""
        # Each session is lifted above the one before, so that one running maximum serves them all.
        lift_R = (self.bars.session_R - self.bars.session_R[:1]) << 42
        running_R = np.maximum.accumulate(rolling.fixed(sign * x_R, 36) + lift_R) - lift_R
        extreme_R: Array = running_R * (sign / float(1 << 36))
        return extreme_R

    def session_mean(self, x_R: Array, bits: int = rolling.MEAN_BITS) -> Array:
        """Mean since the session's first bar."""
        total_R = np.cumsum(rolling.fixed(x_R, bits))
        before_R = np.concatenate((np.zeros(1, dtype=np.int64), total_R))[self.opening]
        return (total_R - before_R) / (self.session_rows * float(1 << bits))

    @cached_property
    def session_rows(self) -> Array:
        """Bars since the session's first, counting both."""
        return (np.arange(len(self.bars)) - self.opening + 1).astype(np.float64)

    @cached_property
    def session_minutes(self) -> Array:
        """Minutes since the session's first bar."""
        opened_R = self.bars.timestamps_R[self.opening]
        return (self.bars.timestamps_R - opened_R) / 60e9

    # Calendar ---------------------------------------------------------------------------------------

    def cycle(self, minutes: float, harmonic: int, phase: str, offset_minutes: float = 0.0) -> Array:
        """Sine or cosine of the place in a cycle of `minutes` minutes that begins at 1970 plus an offset."""
        period_ns = int(minutes * 60e9)
        place_R = (self.bars.timestamps_R + int(offset_minutes * 60e9)) % period_ns / period_ns
        angle_R = 2 * np.pi * harmonic * place_R
        return np.sin(angle_R) if phase == "sin" else np.cos(angle_R)

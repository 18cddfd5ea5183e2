"""The derived features: what each is called, what it says, and how it follows from a `Frame`.

Each group is a generator of `Feature`s; `foxray.data.features` puts them into one order. A feature returns
[R] float64, NaN inside its look-back and finite after it, reads no row after its own, and is a ratio, a
share, a score or an angle: no price or volume level, whatever the instrument.

Sources: Wilder (1978) for RSI, ATR and the directional movement; Parkinson (1980), Garman and Klass (1980)
and Rogers and Satchell (1991) for range-based volatility; Barndorff-Nielsen and Shephard (2004) for bipower
variation; Lo and MacKinlay (1988) for the variance ratio; Kaufman (1995) for the efficiency ratio;
Amihud (2002) and Kyle (1985) for the price of liquidity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from foxray.data import rolling
from foxray.data.frame import RETURN_FLOOR, Frame, indicator
from foxray.data.rolling import Array


@dataclass(frozen=True, kw_only=True)
class Feature:
    """One derived column."""

    name: str
    """Column name; a number in it is a window in bars unless said otherwise."""

    about: str
    """What it says, in one line."""

    compute: Callable[[Frame], Array]
    """From a frame to [R] float64."""

    needs_volume: bool = False
    """Whether the bars must have a volume."""


def _feature(name: str, about: str, compute: Callable[[Frame], Array]) -> Feature:
    return Feature(name=name, about=about, compute=compute)


def returns() -> Iterator[Feature]:
    """Returns over several horizons, plain and in units of their volatility."""
    for k in (1, 2, 3, 5, 10, 15, 20, 30, 45, 60, 90, 120, 180, 240):
        yield _feature(f"return_{k}", f"log return over {k} bars", lambda f, k=k: f.ret(k))
    for k in (1, 2, 3, 4, 5, 10, 15, 30, 60, 120, 240):
        yield _feature(
            f"score_return_{k}",
            f"log return over {k} bars over its volatility, root mean square of 60 bars",
            lambda f, k=k: np.clip(f.ret(k) / (f.rms(60) * np.sqrt(k)), -20, 20),
        )
    yield _feature("open_gap", "log of open over the close before", lambda f: f.lo - rolling.lag(f.lc, 1))
    for k in (5, 20):
        yield _feature(
            f"open_gap_mean_{k}",
            f"mean open gap of {k} bars",
            lambda f, k=k: rolling.mean(f.lo - rolling.lag(f.lc, 1), k),
        )


def bar_shape() -> Iterator[Feature]:
    """Shape of single bars and its averages."""
    yield _feature("range", "log of high over low", lambda f: f.span)
    yield _feature("body", "log of close over open", lambda f: f.lc - f.lo)
    yield _feature("upper_wick", "log of high over the body's top", lambda f: f.lh - np.maximum(f.lo, f.lc))
    yield _feature("lower_wick", "log of the body's bottom over low", lambda f: np.minimum(f.lo, f.lc) - f.ll)
    yield _feature(
        "close_place", "close in the bar's range, -1 at the low to 1 at the high", lambda f: f.place
    )
    yield _feature("body_share", "size of the body over the range", _body_share)
    for k in (5, 10, 20, 60, 120):
        yield _feature(
            f"close_place_{k}",
            f"mean place of the close in the bar's range, {k} bars",
            lambda f, k=k: rolling.mean(f.place, k),
        )
    for k in (10, 30, 60):
        yield _feature(
            f"body_share_{k}",
            f"mean share of the body, {k} bars",
            lambda f, k=k: rolling.mean(_body_share(f), k),
        )
    for k in (10, 20, 60):
        yield _feature(
            f"wick_balance_{k}",
            f"sum of upper less lower wicks over the sum of ranges, {k} bars",
            lambda f, k=k: (
                rolling.mean(f.lh + f.ll - np.maximum(f.lo, f.lc) - np.minimum(f.lo, f.lc), k)
                / np.maximum(rolling.mean(f.span, k), RETURN_FLOOR)
            ),
        )
    yield _feature(
        "range_change",
        "log of the range over its mean of 20 bars",
        lambda f: np.log((f.span + 1e-5) / (rolling.mean(f.span, 20) + 1e-5)),
    )
    for name in ("BOP",):
        yield _feature(
            "balance_power",
            "TA-Lib BOP, exponential mean of 14 bars",
            lambda f, name=name: f.ema(_balance(f), 14),
        )


def _body_share(f: Frame) -> Array:
    return np.abs(f.lc - f.lo) / np.maximum(f.span, RETURN_FLOOR)


def _balance(f: Frame) -> Array:
    out_R: Array = indicator("BOP", f.bars.open_R, f.top, f.bottom, f.bars.close_R)
    return out_R


def volatility() -> Iterator[Feature]:
    """How much prices move, on several estimators, horizons and their ratios."""
    for k in (5, 10, 20, 30, 60, 120, 240):
        yield _feature(
            f"log_volatility_{k}",
            f"log of the root mean square of returns, {k} bars",
            lambda f, k=k: np.log(f.rms(k)),
        )
    for k in (10, 30, 60, 120, 240):
        yield _feature(
            f"log_parkinson_{k}",
            f"log of Parkinson's volatility from ranges, {k} bars",
            lambda f, k=k: np.log(f.root_mean(f.span**2 / (4 * np.log(2.0)), k)),
        )
    for k in (5, 20, 60):
        yield _feature(
            f"log_rogers_satchell_{k}",
            f"log of Rogers and Satchell's volatility, {k} bars",
            lambda f, k=k: np.log(f.root_mean(_rogers_satchell(f), k)),
        )
    for k in (7, 14, 28, 60):
        yield _feature(
            f"log_atr_{k}",
            f"log of Wilder's average true range of log prices, {k} bars",
            lambda f, k=k: np.log(np.maximum(indicator("ATR", f.lh, f.ll, f.lc, timeperiod=k), RETURN_FLOOR)),
        )
    for short, long in ((5, 20), (10, 60), (20, 120), (60, 240), (5, 120)):
        yield _feature(
            f"volatility_ratio_{short}_{long}",
            f"log of the volatility of {short} bars over that of {long}",
            lambda f, short=short, long=long: np.log(f.rms(short) / f.rms(long)),
        )
    for k in (10, 20, 60, 120):
        yield _feature(
            f"upside_share_{k}",
            f"share of the squared returns of {k} bars that rose, less a half",
            lambda f, k=k: f.root_mean(np.maximum(f.r, 0) ** 2, k) ** 2 / f.rms(k) ** 2 - 0.5,
        )
    for k in (30, 60, 120):
        yield _feature(
            f"jump_share_{k}",
            f"1 less bipower variation over the squared returns of {k} bars",
            lambda f, k=k: (
                1 - np.pi / 2 * f.root_mean(np.abs(f.r * rolling.lag(f.r, 1)), k) ** 2 / f.rms(k) ** 2
            ),
        )
    for k in (20, 60, 240):
        yield _feature(
            f"largest_return_{k}",
            f"log of the largest absolute return of {k} bars over their root mean square",
            lambda f, k=k: np.log(
                np.maximum(indicator("MAX", np.abs(f.r), timeperiod=k), RETURN_FLOOR) / f.rms(k)
            ),
        )
    for k in (20, 60, 120):
        yield _feature(
            f"range_to_return_{k}",
            f"log of the mean range over the mean absolute return, {k} bars",
            lambda f, k=k: np.log(
                (rolling.mean(f.span, k) + RETURN_FLOOR) / (rolling.mean(np.abs(f.r), k) + RETURN_FLOOR)
            ),
        )
    for k in (60, 120):
        yield _feature(
            f"volatility_of_volatility_{k}",
            f"deviation of the log volatility of 10 bars over {k} bars",
            lambda f, k=k: rolling.deviation(np.log(f.rms(10)), k, rolling.LEVEL_BITS),
        )
    for k in (10, 30, 60, 120):
        yield _feature(
            f"volatility_trend_{k}",
            f"slope of the log volatility of 10 bars over {k} bars",
            lambda f, k=k: rolling.slope(np.log(f.rms(10)), k, rolling.LEVEL_BITS + 10),
        )


def _rogers_satchell(f: Frame) -> Array:
    up_R = (f.lh - f.lc) * (f.lh - f.lo)
    down_R = (f.ll - f.lc) * (f.ll - f.lo)
    return up_R + down_R


def distribution() -> Iterator[Feature]:
    """Shape and memory of the returns."""
    for k in (30, 60, 120, 240):
        yield _feature(
            f"third_moment_{k}",
            f"mean cube of scored returns, {k} bars",
            lambda f, k=k: rolling.mean(f.z**3, k),
        )
    for k in (30, 60, 120, 240):
        yield _feature(
            f"fourth_moment_{k}",
            f"log of the mean fourth power of scored returns, {k} bars",
            lambda f, k=k: np.log(rolling.mean(f.z**4, k) + 0.1),
        )
    for rows, k in ((1, 20), (1, 60), (1, 120), (1, 240), (2, 60), (2, 120), (3, 120), (5, 120)):
        yield _feature(
            f"autocorrelation_{rows}_{k}",
            f"correlation of returns with those {rows} bars before, {k} bars",
            lambda f, rows=rows, k=k: rolling.correlation(
                f.r, rolling.lag(f.r, rows), k, rolling.RETURN_BITS, rolling.RETURN_BITS
            ),
        )
    for k in (60, 120):
        yield _feature(
            f"absolute_autocorrelation_{k}",
            f"correlation of absolute returns with the bar before, {k} bars",
            lambda f, k=k: rolling.correlation(
                np.abs(f.r), np.abs(rolling.lag(f.r, 1)), k, rolling.RETURN_BITS, rolling.RETURN_BITS
            ),
        )
    for rows, k in ((5, 60), (10, 120), (30, 240)):
        yield _feature(
            f"variance_ratio_{rows}_{k}",
            f"log of the variance ratio of {rows}-bar to one-bar returns, {k} bars",
            lambda f, rows=rows, k=k: np.log(f.root_mean(f.ret(rows) ** 2 / rows, k) / f.rms(k)),
        )
    for k in (10, 20, 60, 120):
        yield _feature(
            f"rising_share_{k}",
            f"rising less falling bars of {k}, as a share",
            lambda f, k=k: rolling.mean(f.sign, k),
        )
    for k in (10, 30, 120):
        yield _feature(
            f"still_share_{k}",
            f"share of {k} bars that closed where the one before did",
            lambda f, k=k: rolling.mean(np.where(np.isnan(f.r), np.nan, f.r == 0.0), k),
        )
    for k in (5, 10, 20, 60, 120, 240):
        yield _feature(
            f"efficiency_{k}",
            f"return over {k} bars over the sum of absolute returns (Kaufman, signed)",
            lambda f, k=k: f.ret(k) / np.maximum(k * rolling.mean(np.abs(f.r), k), RETURN_FLOOR),
        )
    for k in (20, 60, 240):
        yield _feature(
            f"return_rank_{k}",
            f"rank of the return among {k} bars, -1 to 1",
            lambda f, k=k: rolling.rank(f.r, k),
        )
        yield _feature(
            f"range_rank_{k}",
            f"rank of the range among {k} bars, -1 to 1",
            lambda f, k=k: rolling.rank(f.span, k),
        )


def trend() -> Iterator[Feature]:
    """Where the price stands against its own past."""
    for k in (5, 10, 20, 60, 120, 240):
        yield _feature(
            f"above_mean_{k}",
            f"log of close over its mean of {k} bars",
            lambda f, k=k: f.lc - f.price_mean(k),
        )
    for k in (8, 30, 100, 240):
        yield _feature(
            f"above_ema_{k}", f"log of close over its EMA of span {k}", lambda f, k=k: f.lc - f.ema(f.lc, k)
        )
    for k in (10, 20, 60, 120, 240):
        yield _feature(
            f"mean_score_{k}",
            f"log of close over its mean in standard deviations, {k} bars (Bollinger)",
            lambda f, k=k: (f.lc - f.price_mean(k)) / f.price_std(k),
        )
    for k in (20, 60, 240):
        yield _feature(
            f"band_width_{k}",
            f"log of the standard deviation of log close over the volatility of {k} bars",
            lambda f, k=k: np.log(f.price_std(k) / (f.rms(k) * np.sqrt(k))),
        )
    for k in (10, 20, 60, 120, 240):
        yield _feature(
            f"channel_place_{k}",
            f"close between the lowest low and highest high of {k} bars, -1 to 1 (Donchian)",
            lambda f, k=k: (
                (2 * f.lc - f.highest(k) - f.lowest(k)) / np.maximum(f.highest(k) - f.lowest(k), RETURN_FLOOR)
            ),
        )
    for k in (10, 30, 120, 240):
        yield _feature(
            f"below_high_{k}",
            f"log of close over the highest high, {k} bars",
            lambda f, k=k: f.lc - f.highest(k),
        )
        yield _feature(
            f"above_low_{k}", f"log of close over the lowest low, {k} bars", lambda f, k=k: f.lc - f.lowest(k)
        )
    for k in (10, 20, 60, 120, 240):
        yield _feature(
            f"slope_score_{k}",
            f"slope of the line through log close over the volatility, {k} bars",
            lambda f, k=k: f.slope(k) / f.rms(k),
        )
    for k in (20, 60, 120, 240):
        yield _feature(
            f"line_fit_{k}",
            f"R squared of the line through log close, {k} bars",
            lambda f, k=k: rolling.fit_quality(f.slope(k), rolling.variance(f.lc, k, rolling.PRICE_BITS), k),
        )
    for k in (20, 60, 240):
        yield _feature(
            f"above_line_{k}",
            f"log of close over the end of the line through {k} bars, in standard deviations",
            lambda f, k=k: (f.lc - f.price_mean(k) - f.slope(k) * (k - 1) / 2) / f.price_std(k),
        )
    for short, long in ((5, 20), (10, 60), (20, 60), (60, 240)):
        yield _feature(
            f"mean_cross_{short}_{long}",
            f"mean of {short} bars less mean of {long} bars of log close, in units of volatility",
            lambda f, short=short, long=long: (
                (f.price_mean(short) - f.price_mean(long)) / (f.rms(long) * np.sqrt(long))
            ),
        )
    for k in (10, 60):
        yield _feature(
            f"acceleration_{k}",
            f"return over {k} bars less the one before it, in units of volatility",
            lambda f, k=k: (
                (2 * rolling.lag(f.lc, k) - f.lc - rolling.lag(f.lc, 2 * k)) / (-f.rms(60) * np.sqrt(k))
            ),
        )


def talib_averages() -> Iterator[Feature]:
    """TA-Lib's other averages of log close, against log close."""
    for name, k in (("DEMA", 20), ("TEMA", 20), ("TRIMA", 40), ("KAMA", 20), ("T3", 10), ("WMA", 45)):
        yield _feature(
            f"above_{name.lower()}_{k}",
            f"log of close over TA-Lib {name} of {k} bars",
            lambda f, name=name, k=k: f.lc - indicator(name, f.lc, timeperiod=k),
        )
    for fast, slow, smooth in ((12, 26, 9), (30, 65, 20)):
        yield _feature(
            f"macd_{fast}_{slow}",
            f"MACD of log close, spans {fast} and {slow}",
            lambda f, fast=fast, slow=slow: f.ema(f.lc, fast) - f.ema(f.lc, slow),
        )
        yield _feature(
            f"macd_histogram_{fast}_{slow}",
            f"MACD of log close less its EMA of span {smooth}",
            lambda f, fast=fast, slow=slow, smooth=smooth: _histogram(f, fast, slow, smooth),
        )
    for k in (8, 20, 50):
        yield _feature(
            f"trix_{k}",
            f"change of the triple EMA of log close, span {k}",
            lambda f, k=k: (
                f.ema(f.ema(f.ema(f.lc, k), k), k) - rolling.lag(f.ema(f.ema(f.ema(f.lc, k), k), k), 1)
            ),
        )
    for k in (14, 60):
        yield _feature(
            f"above_midprice_{k}",
            f"middle of the range of {k} bars less that of {2 * k}, log prices (TA-Lib MIDPRICE)",
            lambda f, k=k: (
                indicator("MIDPRICE", f.lh, f.ll, timeperiod=k)
                - indicator("MIDPRICE", f.lh, f.ll, timeperiod=2 * k)
            ),
        )


def _histogram(f: Frame, fast: int, slow: int, smooth: int) -> Array:
    macd_R = f.ema(f.lc, fast) - f.ema(f.lc, slow)
    return macd_R - f.ema(macd_R, smooth)


def oscillators() -> Iterator[Feature]:
    """TA-Lib's oscillators, brought to a scale around 0 to 1."""
    for k in (7, 14, 28, 60):
        yield _feature(f"rsi_{k}", f"Wilder's RSI, {k} bars, 0 to 1", lambda f, k=k: _rsi(f, k))
    for k in (14, 40):
        yield _feature(
            f"stochastic_rsi_{k}", f"RSI of 14 bars in its range of {k} bars", lambda f, k=k: _place_rsi(f, k)
        )
    for k in (5, 14, 40):
        yield _feature(
            f"stochastic_{k}",
            f"place in the range of {k} bars, mean of 3",
            lambda f, k=k: rolling.mean(
                (f.lc - f.lowest(k)) / np.maximum(f.highest(k) - f.lowest(k), RETURN_FLOOR), 3
            ),
        )
    for k in (14, 30, 60):
        yield _feature(
            f"adx_{k}", f"Wilder's ADX, {k} bars, 0 to 1", lambda f, k=k: _directional(f, "ADX", k)
        )
    for k in (14, 30):
        yield _feature(f"dx_{k}", f"Wilder's DX, {k} bars, 0 to 1", lambda f, k=k: _directional(f, "DX", k))
    for k in (7, 14, 30, 60):
        yield _feature(
            f"plus_di_{k}", f"Wilder's +DI, {k} bars, 0 to 1", lambda f, k=k: _directional(f, "PLUS_DI", k)
        )
        yield _feature(
            f"minus_di_{k}", f"Wilder's -DI, {k} bars, 0 to 1", lambda f, k=k: _directional(f, "MINUS_DI", k)
        )
    for k in (14, 25, 60, 120):
        for place, name in enumerate(("down", "up")):
            yield _feature(
                f"aroon_{name}_{k}",
                f"TA-Lib AROON {name}, {k} bars, 0 to 1",
                lambda f, k=k, place=place: indicator("AROON", f.lh, f.ll, timeperiod=k)[place] / 100,
            )
    for k in (14, 40):
        yield _feature(
            f"cci_{k}",
            f"typical price against its mean in mean deviations, {k} bars (CCI)",
            lambda f, k=k: _channel_index(f, k),
        )


def _rsi(f: Frame, k: int) -> Array:
    out_R: Array = indicator("RSI", f.lc, timeperiod=k) / 100
    return out_R


def _place_rsi(f: Frame, k: int) -> Array:
    rsi_R = _rsi(f, 14)
    low_R, high_R = indicator("MIN", rsi_R, timeperiod=k), indicator("MAX", rsi_R, timeperiod=k)
    out_R: Array = (rsi_R - low_R) / np.maximum(high_R - low_R, 1e-3)
    return out_R


def _directional(f: Frame, name: str, k: int) -> Array:
    out_R: Array = indicator(name, f.lh, f.ll, f.lc, timeperiod=k) / 100
    return out_R


def _channel_index(f: Frame, k: int) -> Array:
    typical_R = (f.lh + f.ll + f.lc) / 3
    apart_R = np.abs(typical_R - rolling.mean(typical_R, k))
    return (typical_R - rolling.mean(typical_R, k)) / np.maximum(rolling.mean(apart_R, k), RETURN_FLOOR)

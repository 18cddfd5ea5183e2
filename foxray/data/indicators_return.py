"""Derived features of returns, bars, volatility and distribution.

Sources: Wilder (1978) for the average true range; Parkinson (1980) and Rogers and Satchell (1991) for
range-based volatility; Barndorff-Nielsen and Shephard (2004) for bipower variation; Lo and MacKinlay (1988)
for the variance ratio; Kaufman (1995) for the efficiency ratio.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from foxray.data import rolling
from foxray.data.feature import Feature, each, each_pair, one
from foxray.data.frame import RETURN_FLOOR, Frame, indicator
from foxray.data.rolling import LEVEL_BITS, RETURN_BITS, Array


def returns() -> Iterator[Feature]:
    """Returns over several horizons, plain and in units of their volatility."""
    windows = (1, 2, 5, 10, 15, 20, 30, 45, 60, 120, 240)
    yield from each("return", "log return over {0} bars", windows, lambda f, k: f.ret(k))
    yield from each(
        "score_return",
        "log return over {0} bars in units of the volatility of 60 bars",
        (1, 2, 3, 5, 10, 15, 30, 60, 120, 240),
        lambda f, k: np.clip(f.ret(k) / (f.rms(60) * np.sqrt(k)), -20, 20),
    )
    yield one("open_gap", "log of open over the close before", _open_gap)
    yield from each(
        "open_gap_mean", "mean open gap of {0} bars", (20,), lambda f, k: rolling.mean(_open_gap(f), k)
    )


def _open_gap(f: Frame) -> Array:
    return f.lo - rolling.lag(f.lc, 1)


def bar_shape() -> Iterator[Feature]:
    """Shape of single bars and its averages."""
    yield one("range", "log of high over low", lambda f: f.span)
    yield one("upper_wick", "log of high over the body's top", lambda f: f.lh - np.maximum(f.lo, f.lc))
    yield one("lower_wick", "log of the body's bottom over low", lambda f: np.minimum(f.lo, f.lc) - f.ll)
    yield one("close_place", "close in the bar's range, -1 at the low to 1 at the high", lambda f: f.place)
    yield one("body_share", "size of the body over the range", _body_share)
    yield from each(
        "close_place",
        "mean place of the close in the bar's range, {0} bars",
        (5, 10, 20, 60, 120),
        lambda f, k: rolling.mean(f.place, k),
    )
    yield from each(
        "body_share",
        "mean share of the body, {0} bars",
        (10, 30, 60),
        lambda f, k: rolling.mean(_body_share(f), k),
    )
    yield from each(
        "wick_balance",
        "upper less lower wicks over ranges, sums of {0} bars",
        (10, 20, 60),
        lambda f, k: rolling.mean(_wick_balance(f), k) / np.maximum(rolling.mean(f.span, k), RETURN_FLOOR),
    )
    yield one(
        "range_change",
        "log of the range over its mean of 20 bars",
        lambda f: np.log((f.span + 1e-5) / (rolling.mean(f.span, 20) + 1e-5)),
    )
    yield one("balance_power", "TA-Lib BOP, EMA of span 14", lambda f: f.ema(_balance(f), 14))


def _body_share(f: Frame) -> Array:
    return np.abs(f.lc - f.lo) / np.maximum(f.span, RETURN_FLOOR)


def _wick_balance(f: Frame) -> Array:
    return f.lh + f.ll - np.maximum(f.lo, f.lc) - np.minimum(f.lo, f.lc)


def _balance(f: Frame) -> Array:
    return indicator("BOP", f.bars.open_R, f.top, f.bottom, f.bars.close_R)


def volatility() -> Iterator[Feature]:
    """How much prices move, on several estimators, horizons and their ratios."""
    yield from each(
        "log_volatility",
        "log of the root mean square of returns, {0} bars",
        (5, 10, 20, 60, 240),
        lambda f, k: np.log(f.rms(k)),
    )
    yield from each(
        "log_parkinson",
        "log of Parkinson's volatility from ranges, {0} bars",
        (30, 120),
        lambda f, k: np.log(f.root_mean(f.span**2 / (4 * np.log(2.0)), k)),
    )
    yield from each(
        "log_rogers_satchell",
        "log of Rogers and Satchell's volatility, {0} bars",
        (5, 20),
        lambda f, k: np.log(f.root_mean(_rogers_satchell(f), k)),
    )
    yield from each("log_atr", "log of TA-Lib ATR of log prices, {0} bars", (14,), _log_atr)
    yield from each_pair(
        "volatility_ratio",
        "log of the volatility of {0} bars over that of {1}",
        ((5, 20), (5, 120), (10, 60), (20, 120), (60, 240)),
        lambda f, short, long: np.log(f.rms(short) / f.rms(long)),
    )
    yield from each(
        "volatility_trend",
        "slope of the log volatility of 10 bars over {0} bars",
        (60,),
        lambda f, k: rolling.slope(np.log(f.rms(10)), k, LEVEL_BITS + 10),
    )
    yield from each(
        "volatility_of_volatility",
        "deviation of the log volatility of 10 bars over {0} bars",
        (60,),
        lambda f, k: rolling.deviation(np.log(f.rms(10)), k, LEVEL_BITS),
    )
    yield from each(
        "upside_share",
        "share of the squared returns of {0} bars that rose, less a half",
        (10, 20, 60, 120),
        lambda f, k: f.root_mean(np.maximum(f.r, 0) ** 2, k) ** 2 / f.rms(k) ** 2 - 0.5,
    )
    yield from each(
        "jump_share", "1 less bipower variation over squared returns, {0} bars", (30, 60, 120), _jump_share
    )
    yield from each(
        "largest_return",
        "log of the largest absolute return of {0} bars over their root mean square",
        (20, 60, 240),
        _largest_return,
    )
    yield from each(
        "range_to_return",
        "log of the mean range over the mean absolute return, {0} bars",
        (20, 60, 120),
        _range_to_return,
    )


def _rogers_satchell(f: Frame) -> Array:
    return (f.lh - f.lc) * (f.lh - f.lo) + (f.ll - f.lc) * (f.ll - f.lo)


def _log_atr(f: Frame, k: int) -> Array:
    return np.log(np.maximum(indicator("ATR", f.lh, f.ll, f.lc, timeperiod=k), RETURN_FLOOR))


def _jump_share(f: Frame, k: int) -> Array:
    pairs_R = np.abs(f.r * rolling.lag(f.r, 1))
    return 1 - np.pi / 2 * f.root_mean(pairs_R, k) ** 2 / f.rms(k) ** 2


def _largest_return(f: Frame, k: int) -> Array:
    largest_R = indicator("MAX", np.abs(f.r), timeperiod=k)
    return np.log(np.maximum(largest_R, RETURN_FLOOR) / f.rms(k))


def _range_to_return(f: Frame, k: int) -> Array:
    moved_R = rolling.mean(np.abs(f.r), k) + RETURN_FLOOR
    return np.log((rolling.mean(f.span, k) + RETURN_FLOOR) / moved_R)


def distribution() -> Iterator[Feature]:
    """Shape and memory of the returns."""
    yield from each(
        "third_moment",
        "mean cube of scored returns, {0} bars",
        (30, 60, 120, 240),
        lambda f, k: rolling.mean(f.z**3, k),
    )
    yield from each(
        "fourth_moment",
        "log of the mean fourth power of scored returns, {0} bars",
        (30, 60, 120, 240),
        lambda f, k: np.log(rolling.mean(f.z**4, k) + 0.1),
    )
    yield from each_pair(
        "autocorrelation",
        "correlation of returns with those {0} bars before, {1} bars",
        ((1, 20), (1, 60), (1, 120), (1, 240), (2, 60), (2, 120), (3, 120), (5, 120)),
        lambda f, rows, k: rolling.correlation(f.r, rolling.lag(f.r, rows), k, RETURN_BITS, RETURN_BITS),
    )
    yield from each(
        "absolute_autocorrelation",
        "correlation of absolute returns with the bar before, {0} bars",
        (60, 120),
        _absolute_autocorrelation,
    )
    yield from each_pair(
        "variance_ratio",
        "log of the variance ratio of {0}-bar to one-bar returns, {1} bars",
        ((5, 60), (10, 120), (30, 240)),
        lambda f, rows, k: np.log(f.root_mean(f.ret(rows) ** 2 / rows, k) / f.rms(k)),
    )
    yield from each(
        "rising_share",
        "rising less falling bars of {0}, as a share",
        (10, 20),
        lambda f, k: rolling.mean(f.sign, k),
    )
    yield from each(
        "still_share",
        "share of {0} bars that closed where the one before did",
        (30,),
        lambda f, k: 1 - rolling.mean(np.abs(f.sign), k),
    )
    yield from each(
        "efficiency",
        "return over {0} bars over the sum of absolute returns (Kaufman, signed)",
        (20,),
        lambda f, k: f.ret(k) / np.maximum(k * rolling.mean(np.abs(f.r), k), RETURN_FLOOR),
    )
    yield from each(
        "return_rank", "rank of the return among {0} bars, -1 to 1", (60,), lambda f, k: rolling.rank(f.r, k)
    )
    yield from each(
        "range_rank", "rank of the range among {0} bars, -1 to 1", (60,), lambda f, k: rolling.rank(f.span, k)
    )


def _absolute_autocorrelation(f: Frame, k: int) -> Array:
    size_R = np.abs(f.r)
    return rolling.correlation(size_R, rolling.lag(size_R, 1), k, RETURN_BITS, RETURN_BITS)

"""Derived features of trend: where the price stands against its own past, and TA-Lib's oscillators.

Sources: Wilder (1978) for RSI and the directional movement; Bollinger, Donchian, Appel (MACD), Hutson
(TRIX), Chande (Aroon) as TA-Lib defines them, on the logarithms of prices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from foxray.data import rolling
from foxray.data.feature import Feature, each, one
from foxray.data.frame import RETURN_FLOOR, Frame, indicator, indicator_pair
from foxray.data.rolling import PRICE_BITS, Array


def trend() -> Iterator[Feature]:
    """Where the price stands against its own past."""
    yield from each(
        "above_mean",
        "log of close over its mean of {0} bars",
        (5, 10, 20, 60, 120, 240),
        lambda f, k: f.lc - f.price_mean(k),
    )
    yield from each(
        "mean_score",
        "log of close over its mean in standard deviations, {0} bars (Bollinger)",
        (10, 60, 120, 240),
        lambda f, k: (f.lc - f.price_mean(k)) / f.price_std(k),
    )
    yield from each(
        "band_width",
        "log of the standard deviation of log close over the volatility of {0} bars",
        (20, 60, 240),
        lambda f, k: np.log(f.price_std(k) / (f.rms(k) * np.sqrt(k))),
    )
    yield from each(
        "channel_place",
        "close between the lowest low and highest high of {0} bars, -1 to 1 (Donchian)",
        (20,),
        lambda f, k: (
            (2 * f.lc - f.highest(k) - f.lowest(k)) / np.maximum(f.highest(k) - f.lowest(k), RETURN_FLOOR)
        ),
    )
    windows = (10, 30, 120, 240)
    yield from each(
        "below_high",
        "log of close over the highest high, {0} bars",
        windows,
        lambda f, k: f.lc - f.highest(k),
    )
    yield from each(
        "above_low", "log of close over the lowest low, {0} bars", windows, lambda f, k: f.lc - f.lowest(k)
    )
    yield from each(
        "slope_score",
        "slope of the line through log close over the volatility, {0} bars",
        (10, 20, 60, 120, 240),
        lambda f, k: f.slope(k) / f.rms(k),
    )
    yield from each("line_fit", "R squared of the line through log close, {0} bars", (60,), _line_fit)
    yield from each(
        "above_line",
        "log of close over the end of the line through {0} bars, in standard deviations",
        (60,),
        lambda f, k: (f.lc - f.price_mean(k) - f.slope(k) * (k - 1) / 2) / f.price_std(k),
    )


def _line_fit(f: Frame, k: int) -> Array:
    return rolling.fit_quality(f.slope(k), rolling.variance(f.lc, k, PRICE_BITS), k)


def averages() -> Iterator[Feature]:
    """TA-Lib's other averages of log close."""
    for name in ("DEMA", "TEMA", "KAMA"):
        yield from each(
            f"above_{name.lower()}",
            f"log of close over TA-Lib {name} of {{0}} bars",
            (20,),
            _above(name),
        )
    yield one("macd_12_26", "EMA of log close, span 12 less span 26 (MACD)", lambda f: _macd(f, 12, 26))
    yield one("macd_histogram_12_26", "MACD less its EMA of span 9", lambda f: _histogram(f, 12, 26, 9))
    yield one(
        "macd_histogram_30_65", "slow MACD less its EMA of span 20", lambda f: _histogram(f, 30, 65, 20)
    )
    yield from each("trix", "change of the triple EMA of log close, span {0}", (20, 50), _trix)
    yield from each(
        "above_midprice",
        "middle of the range of {0} bars less that of twice as many (TA-Lib MIDPRICE of log prices)",
        (14, 60),
        lambda f, k: _midprice(f, k) - _midprice(f, 2 * k),
    )


def _above(name: str) -> Callable[[Frame, int], Array]:
    return lambda f, k: f.lc - indicator(name, f.lc, timeperiod=k)


def _macd(f: Frame, fast: int, slow: int) -> Array:
    return f.ema(f.lc, fast) - f.ema(f.lc, slow)


def _histogram(f: Frame, fast: int, slow: int, smooth: int) -> Array:
    macd_R = _macd(f, fast, slow)
    return macd_R - f.ema(macd_R, smooth)


def _trix(f: Frame, k: int) -> Array:
    thrice_R = f.ema(f.ema(f.ema(f.lc, k), k), k)
    return thrice_R - rolling.lag(thrice_R, 1)


def _midprice(f: Frame, k: int) -> Array:
    return indicator("MIDPRICE", f.lh, f.ll, timeperiod=k)


def oscillators() -> Iterator[Feature]:
    """TA-Lib's oscillators, brought to 0 to 1."""
    yield from each("rsi", "TA-Lib RSI of log close, {0} bars, 0 to 1", (14, 60), _rsi)
    yield from each("stochastic_rsi", "RSI of 14 bars in its range of {0} bars", (14, 40), _place_rsi)
    yield from each(
        "stochastic",
        "place in the range of {0} bars, mean of 3",
        (5, 14, 40),
        lambda f, k: rolling.mean(
            (f.lc - f.lowest(k)) / np.maximum(f.highest(k) - f.lowest(k), RETURN_FLOOR), 3
        ),
    )
    for name, windows in (("ADX", (14, 30)), ("DX", (14, 30)), ("PLUS_DI", (14, 30)), ("MINUS_DI", (14, 30))):
        yield from each(
            name.lower(),
            f"TA-Lib {name} of log prices, {{0}} bars, 0 to 1",
            windows,
            _directional(name),
        )
    yield from each(
        "aroon_down", "TA-Lib AROON down, {0} bars, 0 to 1", (14, 25), lambda f, k: _aroon(f, k)[0]
    )
    yield from each("aroon_up", "TA-Lib AROON up, {0} bars, 0 to 1", (14, 25), lambda f, k: _aroon(f, k)[1])


def _rsi(f: Frame, k: int) -> Array:
    return indicator("RSI", f.lc, timeperiod=k) / 100


def _place_rsi(f: Frame, k: int) -> Array:
    rsi_R = _rsi(f, 14)
    low_R, high_R = indicator("MIN", rsi_R, timeperiod=k), indicator("MAX", rsi_R, timeperiod=k)
    return (rsi_R - low_R) / np.maximum(high_R - low_R, 1e-3)


def _directional(name: str) -> Callable[[Frame, int], Array]:
    return lambda f, k: indicator(name, f.lh, f.ll, f.lc, timeperiod=k) / 100


def _aroon(f: Frame, k: int) -> tuple[Array, Array]:
    down_R, up_R = indicator_pair("AROON", f.lh, f.ll, timeperiod=k)
    return down_R / 100, up_R / 100

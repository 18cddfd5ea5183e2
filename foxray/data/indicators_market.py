"""Derived features that read volume, the running session and the calendar.

A session is what lies between two pauses longer than `--session-gap`, cut every 24 hours; its end is in the
future and is never read. Sources: Granville (on-balance volume), Chaikin (money flow), Quong and Soudack
(MFI), Amihud (2002) and Kyle (1985) for the price of liquidity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from foxray.data import rolling
from foxray.data.feature import Feature, each, each_pair, one
from foxray.data.frame import RETURN_FLOOR, Frame, indicator
from foxray.data.rolling import LEVEL_BITS, RETURN_BITS, Array

DAY_MINUTES = 1440.0
WEEK_MINUTES = 7 * DAY_MINUTES
MONDAY_OFFSET_MINUTES = 3 * DAY_MINUTES
"""1970 began on a Thursday: three days on, weeks begin on Monday."""


def volume() -> Iterator[Feature]:
    """How much was traded, when, and on which side."""
    for group in (_volume_level(), _volume_side(), _volume_session()):
        for feature in group:
            yield replace(feature, needs_volume=True)


def _volume_level() -> Iterator[Feature]:
    yield from each(
        "volume_above_mean",
        "log volume less its mean of {0} bars",
        (5, 60, 240),
        lambda f, k: f.lv - rolling.mean(f.lv, k),
    )
    yield from each(
        "volume_score",
        "log volume in standard deviations from its mean of {0} bars",
        (20,),
        lambda f, k: (
            (f.lv - rolling.mean(f.lv, k)) / np.maximum(rolling.deviation(f.lv, k, LEVEL_BITS), 0.05)
        ),
    )
    yield from each_pair(
        "volume_cross",
        "mean log volume of {0} bars less that of {1}",
        ((5, 60), (20, 120), (60, 240)),
        lambda f, short, long: rolling.mean(f.lv, short) - rolling.mean(f.lv, long),
    )
    yield from each(
        "volume_spread",
        "standard deviation of log volume, {0} bars",
        (20, 60, 120),
        lambda f, k: rolling.deviation(f.lv, k, LEVEL_BITS),
    )
    yield from each("volume_peak", "largest log volume less the mean one, {0} bars", (20, 60), _volume_peak)
    yield from each(
        "volume_trend",
        "slope of log volume, {0} bars",
        (10, 30, 60, 120),
        lambda f, k: rolling.slope(f.lv, k, LEVEL_BITS + 10),
    )
    yield from each(
        "volume_autocorrelation",
        "correlation of log volume with the bar before, {0} bars",
        (30, 120),
        lambda f, k: rolling.correlation(f.lv, rolling.lag(f.lv, 1), k, LEVEL_BITS, LEVEL_BITS),
    )
    yield from each(
        "volume_rank",
        "rank of the volume among {0} bars, -1 to 1",
        (120,),
        lambda f, k: rolling.rank(f.lv, k),
    )


def _volume_peak(f: Frame, k: int) -> Array:
    return indicator("MAX", f.lv, timeperiod=k) - rolling.mean(f.lv, k)


def _volume_side() -> Iterator[Feature]:
    yield from each(
        "signed_volume",
        "volume of rising less falling bars over all volume, {0} bars (on-balance volume)",
        (5, 10, 20, 60, 120),
        lambda f, k: f.weighted(f.sign, k),
    )
    yield from each(
        "money_flow",
        "place of the close in the bar's range weighted by volume, {0} bars (Chaikin)",
        (10, 20, 60, 120),
        lambda f, k: f.weighted(f.place, k),
    )
    yield from each(
        "above_vwap",
        "log of close over the volume-weighted mean price of {0} bars",
        (30,),
        lambda f, k: f.lc - f.weighted((f.lh + f.ll + f.lc) / 3, k),
    )
    yield one("force", "EMA of return times relative volume, span 13, over volatility", _force)
    yield from each("money_flow_index", "TA-Lib MFI, {0} bars, 0 to 1", (14,), _money_flow_index)
    yield from each(
        "volume_return_correlation",
        "correlation of log volume and return, {0} bars",
        (60,),
        lambda f, k: rolling.correlation(f.lv, f.r, k, LEVEL_BITS, RETURN_BITS),
    )
    yield from each(
        "volume_range_correlation",
        "correlation of log volume and range, {0} bars",
        (60,),
        lambda f, k: rolling.correlation(f.lv, f.span, k, LEVEL_BITS, RETURN_BITS),
    )
    yield from each(
        "illiquidity",
        "log of the mean absolute return less mean log volume, {0} bars against 240 (Amihud)",
        (20,),
        lambda f, k: _illiquidity(f, k) - _illiquidity(f, 240),
    )
    yield from each(
        "price_impact",
        "regression of scored return on signed relative volume, {0} bars (Kyle)",
        (60,),
        _impact,
    )


def _force(f: Frame) -> Array:
    return f.ema(f.weight * f.r, 13) / f.rms(60)


def _money_flow_index(f: Frame, k: int) -> Array:
    return indicator("MFI", f.top, f.bottom, f.bars.close_R, f.volume, timeperiod=k) / 100


def _illiquidity(f: Frame, k: int) -> Array:
    return np.log(rolling.mean(np.abs(f.r), k) + RETURN_FLOOR) - rolling.mean(f.lv, k)


def _impact(f: Frame, k: int) -> Array:
    flow_R = f.sign * f.weight
    return rolling.mean(flow_R * f.z, k) / np.maximum(rolling.mean(flow_R**2, k), 0.01)


def _volume_session() -> Iterator[Feature]:
    yield one(
        "session_above_vwap", "log of close over the session's volume-weighted mean price", _session_vwap
    )
    yield one(
        "session_volume",
        "log volume less the session's mean log volume so far",
        lambda f: f.lv - f.session_mean(f.lv),
    )


def _session_vwap(f: Frame) -> Array:
    opened_R = f.lo[f.opening]
    weight_R = np.minimum(f.volume, 2.0**20)
    top_R = f.session_mean(weight_R * ((f.lh + f.ll + f.lc) / 3 - opened_R), 24)
    return f.lc - opened_R - top_R / np.maximum(f.session_mean(weight_R, 24), 1e-6)


def session() -> Iterator[Feature]:
    """The running session: how old it is and what it did so far."""
    yield one(
        "session_age",
        "minutes since the session began, over a day",
        lambda f: f.session_minutes / DAY_MINUTES,
    )
    yield one(
        "session_age_log", "log of 1 + minutes since the session began", lambda f: np.log1p(f.session_minutes)
    )
    yield one(
        "session_return", "log of close over the session's first open", lambda f: f.lc - f.lo[f.opening]
    )
    yield one("session_return_score", "the same over the session's volatility so far", _session_score)
    yield one("session_place", "close in the session's range so far, -1 to 1", _session_place)
    yield one(
        "session_below_high",
        "log of close over the session's high",
        lambda f: f.lc - f.session_extreme(f.lh, 1),
    )
    yield one(
        "session_above_low",
        "log of close over the session's low",
        lambda f: f.lc - f.session_extreme(f.ll, -1),
    )
    yield one("session_range", "log of the session's range so far, over volatility", _session_range)
    yield one(
        "session_volatility",
        "log of the session's root mean square of returns",
        lambda f: np.log(_session_rms(f)),
    )
    yield one(
        "session_density",
        "log of the session's bars per minute so far",
        lambda f: np.log(f.session_rows / (f.session_minutes + 1)),
    )
    yield one("session_opening_gap", "log of the session's first open over the close before", _opening_gap)
    yield one("pause", "log of minutes since the bar before, cut at a week", _pause)
    yield from each(
        "pause_mean",
        "mean pause of {0} bars, each cut at 10 minutes",
        (30, 120),
        lambda f, k: rolling.mean(np.minimum(_pause_minutes(f), 10.0), k),
    )


def _session_rms(f: Frame) -> Array:
    mean_R = f.session_mean(np.minimum(np.nan_to_num(f.r) ** 2, 1.0), 44)
    return np.maximum(np.sqrt(np.maximum(mean_R, 0.0)), RETURN_FLOOR)


def _session_score(f: Frame) -> Array:
    moved_R = f.lc - f.lo[f.opening]
    return np.clip(moved_R / (_session_rms(f) * np.sqrt(f.session_rows)), -20, 20)


def _session_place(f: Frame) -> Array:
    high_R, low_R = f.session_extreme(f.lh, 1), f.session_extreme(f.ll, -1)
    return (2 * f.lc - high_R - low_R) / np.maximum(high_R - low_R, 1e-6)


def _session_range(f: Frame) -> Array:
    wide_R = f.session_extreme(f.lh, 1) - f.session_extreme(f.ll, -1)
    return np.log((wide_R + 1e-6) / (_session_rms(f) * np.sqrt(f.session_rows) + 1e-6))


def _opening_gap(f: Frame) -> Array:
    before_R = np.concatenate((f.lo[:1], f.lc[:-1]))
    return (f.lo - before_R)[f.opening]


def _pause_minutes(f: Frame) -> Array:
    minutes_R = f.bars.timestamps_R / 60e9
    return minutes_R - rolling.lag(minutes_R, 1)


def _pause(f: Frame) -> Array:
    return np.log(np.clip(_pause_minutes(f), 1e-3, WEEK_MINUTES))


def calendar() -> Iterator[Feature]:
    """Angles of the clock (UTC); the date itself is left out, because a date never comes again."""
    cycles: tuple[tuple[str, str, float, float, tuple[int, ...]], ...] = (
        ("day", "the day", DAY_MINUTES, 0.0, (1, 2, 3, 4)),
        ("week", "the week", WEEK_MINUTES, MONDAY_OFFSET_MINUTES, (1, 2, 3)),
        ("hour", "the hour", 60.0, 0.0, (1, 2)),
    )
    for name, text, minutes, offset, harmonics in cycles:
        for phase, wave in (("sin", "sine"), ("cos", "cosine")):
            yield from each(
                f"{name}_{phase}",
                f"{wave} of the place in {text} (UTC), {{0}} times around",
                harmonics,
                _angle(minutes, phase, offset),
            )


def _angle(minutes: float, phase: str, offset_minutes: float) -> Callable[[Frame, int], Array]:
    return lambda f, harmonic: f.cycle(minutes, harmonic, phase, offset_minutes)

"""The derived features that read volume, the running session and the calendar, and TA-Lib's candle patterns.

Same rules as `foxray.data.indicators`. A session is what lies between two pauses longer than
`--session-gap`, cut every 24 hours; its end is in the future and is never read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from foxray.data import rolling
from foxray.data.frame import RETURN_FLOOR, Frame, indicator
from foxray.data.indicators import Feature, _feature
from foxray.data.rolling import LEVEL_BITS, RETURN_BITS, Array

DAY_MINUTES = 1440.0
WEEK_MINUTES = 7 * DAY_MINUTES
MONDAY_OFFSET_MINUTES = 3 * DAY_MINUTES
"""1970 began on a Thursday: three days on, weeks begin on Monday."""


def volume() -> Iterator[Feature]:
    """How much was traded, when, and on which side."""
    for feature in _volume_level():
        yield replace(feature, needs_volume=True)
    for feature in _volume_side():
        yield replace(feature, needs_volume=True)


def _volume_level() -> Iterator[Feature]:
    for k in (5, 20, 60, 240):
        yield _feature(
            f"volume_above_mean_{k}",
            f"log volume less its mean of {k} bars",
            lambda f, k=k: f.lv - rolling.mean(f.lv, k),
        )
    for k in (20, 60, 240):
        yield _feature(
            f"volume_score_{k}",
            f"log volume in standard deviations from its mean of {k} bars",
            lambda f, k=k: (
                (f.lv - rolling.mean(f.lv, k)) / np.maximum(rolling.deviation(f.lv, k, LEVEL_BITS), 0.05)
            ),
        )
    for short, long in ((5, 60), (20, 120), (60, 240)):
        yield _feature(
            f"volume_cross_{short}_{long}",
            f"mean log volume of {short} bars less that of {long}",
            lambda f, short=short, long=long: rolling.mean(f.lv, short) - rolling.mean(f.lv, long),
        )
    for k in (20, 60, 120):
        yield _feature(
            f"volume_spread_{k}",
            f"standard deviation of log volume, {k} bars",
            lambda f, k=k: rolling.deviation(f.lv, k, LEVEL_BITS),
        )
    for k in (20, 60):
        yield _feature(
            f"volume_peak_{k}",
            f"log of the largest volume over the mean one, {k} bars",
            lambda f, k=k: np.log(
                (indicator("MAX", f.volume, timeperiod=k) + 1) / (rolling.mean(f.volume, k, 16) + 1)
            ),
        )
    for k in (10, 30, 60, 120):
        yield _feature(
            f"volume_trend_{k}",
            f"slope of log volume, {k} bars",
            lambda f, k=k: rolling.slope(f.lv, k, LEVEL_BITS + 10),
        )
    for k in (30, 120):
        yield _feature(
            f"volume_autocorrelation_{k}",
            f"correlation of log volume with the bar before, {k} bars",
            lambda f, k=k: rolling.correlation(f.lv, rolling.lag(f.lv, 1), k, LEVEL_BITS, LEVEL_BITS),
        )
    for k in (20, 120):
        yield _feature(
            f"volume_rank_{k}",
            f"rank of the volume among {k} bars, -1 to 1",
            lambda f, k=k: rolling.rank(f.lv, k),
        )


def _volume_side() -> Iterator[Feature]:
    for k in (5, 10, 20, 60, 120):
        yield _feature(
            f"signed_volume_{k}",
            f"volume of rising less falling bars over all volume, {k} bars (on-balance volume)",
            lambda f, k=k: f.weighted(f.sign, k),
        )
    for k in (10, 20, 60, 120):
        yield _feature(
            f"money_flow_{k}",
            f"place of the close in the bar's range weighted by volume, {k} bars (Chaikin)",
            lambda f, k=k: f.weighted(f.place, k),
        )
    for k in (10, 30, 60, 120):
        yield _feature(
            f"above_vwap_{k}",
            f"log of close over the volume-weighted mean price of {k} bars",
            lambda f, k=k: f.lc - f.weighted((f.lh + f.ll + f.lc) / 3, k),
        )
    yield _feature("force", "EMA of return times relative volume, span 13, over volatility", _force)
    for k in (14, 40):
        yield _feature(
            f"money_flow_index_{k}", f"TA-Lib MFI of {k} bars, 0 to 1", lambda f, k=k: _money_flow_index(f, k)
        )
    for k in (20, 60, 120):
        yield _feature(
            f"volume_return_correlation_{k}",
            f"correlation of log volume and return, {k} bars",
            lambda f, k=k: rolling.correlation(f.lv, f.r, k, LEVEL_BITS, RETURN_BITS),
        )
        yield _feature(
            f"volume_range_correlation_{k}",
            f"correlation of log volume and range, {k} bars",
            lambda f, k=k: rolling.correlation(f.lv, f.span, k, LEVEL_BITS, RETURN_BITS),
        )
    for k in (5, 20, 60):
        yield _feature(
            f"illiquidity_{k}",
            f"log of the mean absolute return less mean log volume, against 240 bars, {k} bars (Amihud)",
            lambda f, k=k: _illiquidity(f, k) - _illiquidity(f, 240),
        )
    for k in (60, 120):
        yield _feature(
            f"price_impact_{k}",
            f"regression of scored return on signed relative volume, {k} bars (Kyle)",
            lambda f, k=k: _impact(f, k),
        )
    yield _feature(
        "range_per_volume", "log of range less log volume, against 60 bars", lambda f: _range_per_volume(f)
    )


def _force(f: Frame) -> Array:
    return f.ema(f.weight * f.r, 13) / f.rms(60)


def _money_flow_index(f: Frame, k: int) -> Array:
    out_R: Array = indicator("MFI", f.top, f.bottom, f.bars.close_R, f.volume, timeperiod=k) / 100
    return out_R


def _illiquidity(f: Frame, k: int) -> Array:
    return np.log(rolling.mean(np.abs(f.r), k) + RETURN_FLOOR) - rolling.mean(f.lv, k)


def _impact(f: Frame, k: int) -> Array:
    flow_R = f.sign * f.weight
    return rolling.mean(flow_R * f.z, k) / np.maximum(rolling.mean(flow_R**2, k), 0.01)


def _range_per_volume(f: Frame) -> Array:
    cost_R = np.log(f.span + 1e-5) - f.lv
    return cost_R - rolling.mean(cost_R, 60)


def session() -> Iterator[Feature]:
    """The running session: how old it is and what it did so far."""
    yield _feature(
        "session_age",
        "minutes since the session began, over a day",
        lambda f: f.session_minutes / DAY_MINUTES,
    )
    yield _feature(
        "session_age_log", "log of 1 + minutes since the session began", lambda f: np.log1p(f.session_minutes)
    )
    yield _feature(
        "session_return", "log of close over the session's first open", lambda f: f.lc - f.lo[f.opening]
    )
    yield _feature("session_return_score", "the same over the session's volatility so far", _session_score)
    yield _feature("session_place", "close in the session's range so far, -1 to 1", _session_place)
    yield _feature(
        "session_below_high",
        "log of close over the session's high",
        lambda f: f.lc - f.session_extreme(f.lh, 1),
    )
    yield _feature(
        "session_above_low",
        "log of close over the session's low",
        lambda f: f.lc - f.session_extreme(f.ll, -1),
    )
    yield _feature("session_range", "log of the session's range so far, over volatility", _session_range)
    yield _feature(
        "session_volatility",
        "log of the session's root mean square of returns",
        lambda f: np.log(_session_rms(f)),
    )
    yield _feature(
        "session_density",
        "bars of the session per minute, in logs",
        lambda f: np.log(f.session_rows / (f.session_minutes + 1)),
    )
    yield _feature(
        "session_opening_gap", "log of the session's first open over the close before", _opening_gap
    )
    yield _feature("session_before", "log of close over the last close of the session before", _since_before)
    yield _feature("pause", "log of minutes since the bar before, cut at a week", _pause)
    for k in (30, 120):
        yield _feature(
            f"pause_mean_{k}", f"mean pause of {k} bars, cut at 10 minutes", lambda f, k=k: _pauses(f, k)
        )
    yield Feature(
        name="session_above_vwap",
        about="log of close over the session's volume-weighted mean price",
        compute=_session_vwap,
        needs_volume=True,
    )
    yield Feature(
        name="session_volume",
        about="log volume less the session's mean log volume so far",
        compute=lambda f: f.lv - f.session_mean(f.lv),
        needs_volume=True,
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


def _since_before(f: Frame) -> Array:
    before_R = np.concatenate((f.lo[:1], f.lc[:-1]))
    return f.lc - before_R[f.opening]


def _pause_minutes(f: Frame) -> Array:
    times_R = f.bars.timestamps_R
    return np.concatenate((np.full(min(1, len(times_R)), np.nan), np.diff(times_R) / 60e9))


def _pause(f: Frame) -> Array:
    return np.log(np.clip(_pause_minutes(f), 1e-3, WEEK_MINUTES))


def _pauses(f: Frame, k: int) -> Array:
    return rolling.mean(np.minimum(_pause_minutes(f), 10.0), k)


def _session_vwap(f: Frame) -> Array:
    typical_R = (f.lh + f.ll + f.lc) / 3 - f.lo[f.opening]
    weight_R = np.minimum(f.volume, 2.0**20)
    top_R = f.session_mean(weight_R * typical_R, 24)
    return f.lc - f.lo[f.opening] - top_R / np.maximum(f.session_mean(weight_R, 24), 1e-6)


def calendar() -> Iterator[Feature]:
    """Angles of the clock and the calendar (UTC)."""
    cycles: tuple[tuple[str, str, float, float, tuple[int, ...]], ...] = (
        ("day", "the day", DAY_MINUTES, 0.0, (1, 2, 3, 4)),
        ("week", "the week", WEEK_MINUTES, MONDAY_OFFSET_MINUTES, (1, 2, 3)),
        ("hour", "the hour", 60.0, 0.0, (1, 2)),
    )
    for name, text, minutes, offset, harmonics in cycles:
        for harmonic in harmonics:
            for phase in ("sin", "cos"):
                yield _feature(
                    f"{name}_{phase}_{harmonic}",
                    f"{'sine' if phase == 'sin' else 'cosine'} of {text}, harmonic {harmonic}",
                    lambda f, m=minutes, h=harmonic, p=phase, o=offset: f.cycle(m, h, p, o),
                )
    for phase in ("sin", "cos"):
        yield _feature(f"month_{phase}", f"day of the month, {phase}", lambda f, p=phase: _month(f, p))


def _month(f: Frame, phase: str) -> Array:
    days_R = f.bars.timestamps_R.astype("datetime64[ns]").astype("datetime64[D]")
    first_R = days_R.astype("datetime64[M]").astype("datetime64[D]")
    angle_R = 2 * np.pi * (days_R - first_R).astype(np.int64) / 31.0
    return np.sin(angle_R) if phase == "sin" else np.cos(angle_R)


PATTERNS = (
    "CDLENGULFING",
    "CDLDOJI",
    "CDLHARAMI",
    "CDLLONGLINE",
    "CDLSHORTLINE",
    "CDLSPINNINGTOP",
    "CDLHIGHWAVE",
    "CDLBELTHOLD",
    "CDLCLOSINGMARUBOZU",
    "CDLMARUBOZU",
    "CDLHAMMER",
    "CDLSHOOTINGSTAR",
    "CDLMATCHINGLOW",
    "CDLHIKKAKE",
    "CDL3OUTSIDE",
    "CDLRICKSHAWMAN",
)


def patterns() -> Iterator[Feature]:
    """TA-Lib's candle patterns, as means of 10 bars: single bars are too rare to scale."""
    for name in PATTERNS:
        short = name.removeprefix("CDL").lower()
        yield _feature(
            f"candle_{short}",
            f"TA-Lib {name}, -1 to 1, mean of 10 bars",
            lambda f, name=name: _candle(f, name),
        )


def _candle(f: Frame, name: str) -> Array:
    # On a binary grid TA-Lib's running sums are exact, and ties between bars stay ties in every chunk.
    grid: Callable[[Array], Array] = lambda x_R: np.rint(x_R * 2.0**32) / 2.0**32  # noqa: E731
    prices = (grid(x_R) for x_R in (f.bars.open_R, f.top, f.bottom, f.bars.close_R))
    marks_R = indicator(name, *prices) / 100.0
    marks_R[:_PATTERN_LOOKBACK] = np.nan
    return rolling.mean(marks_R, 10)


_PATTERN_LOOKBACK = 20

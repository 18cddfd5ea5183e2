"""The derived features in their fixed order: the most telling first, then the groups in turn.

`--num-features N` takes the first N of this order, so a small N still has a little of everything. Within
the order no feature was taken that correlated above 0.93 with one before it on a month of one-minute
Euro FX futures (a few of the head aside, all below 0.99). The order is part of every model trained under
it.

Shapes: R rows of one symbol in order of time, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from foxray.data import indicators_market, indicators_return, indicators_trend
from foxray.data.feature import Feature
from foxray.data.frame import Bars, Frame, session_blocks
from foxray.data.rolling import leading_nans
from foxray.data.scaling import CLIP_SIGMAS

ORDER_TEXT = """
return_1 range volume_above_mean_60 log_volatility_20 close_place session_age day_sin_1 day_cos_1 return_5
return_15 return_60 above_mean_20 mean_score_60 volatility_ratio_5_20 log_volatility_60 log_volatility_240
log_parkinson_30 log_atr_14 rsi_14 macd_12_26 channel_place_20 efficiency_20 signed_volume_20 above_vwap_30
money_flow_20 volume_cross_5_60 session_return session_place session_volatility session_age_log week_sin_1
week_cos_1 pause hour_sin_1 hour_cos_1 upper_wick lower_wick open_gap score_return_1 adx_14 plus_di_14
minus_di_14 slope_score_60 line_fit_60 autocorrelation_1_60 variance_ratio_5_60 upside_share_60
volume_score_20 illiquidity_20 return_rank_60 range_rank_60 session_above_vwap session_volume return_240
return_30 above_mean_60 above_mean_240 log_volatility_5 volatility_ratio_20_120 volatility_ratio_60_240
log_volatility_10 log_parkinson_120 volume_above_mean_5 volume_above_mean_240 return_2 above_mean_5
above_mean_10 session_return_score rsi_60 stochastic_rsi_14 third_moment_30 third_moment_60 body_share
above_dema_20 day_sin_2 log_rogers_satchell_5 log_rogers_satchell_20 volume_cross_20_120 volume_cross_60_240
return_10 above_mean_120 mean_score_10 session_below_high stochastic_rsi_40 third_moment_120
third_moment_240 close_place_5 above_tema_20 day_cos_2 volatility_ratio_10_60 volume_spread_20
volume_spread_60 return_20 mean_score_120 mean_score_240 session_above_low stochastic_5 fourth_moment_30
fourth_moment_60 close_place_10 above_kama_20 day_sin_3 volatility_ratio_5_120 volume_spread_120
volume_peak_20 return_45 band_width_20 band_width_60 session_range stochastic_14 fourth_moment_120
fourth_moment_240 close_place_20 macd_histogram_12_26 day_cos_3 upside_share_10 volume_peak_60
volume_trend_10 return_120 band_width_240 below_high_10 session_density stochastic_40 autocorrelation_1_20
autocorrelation_1_120 close_place_60 macd_histogram_30_65 day_sin_4 upside_share_20 volume_trend_30
volume_trend_60 score_return_2 above_low_10 session_opening_gap adx_30 autocorrelation_1_240 close_place_120
trix_20 day_cos_4 upside_share_120 volume_trend_120 volume_autocorrelation_30 score_return_3 below_high_30
pause_mean_30 still_share_30 autocorrelation_2_60 body_share_10 trix_50 week_sin_2 jump_share_30
volume_autocorrelation_120 volume_rank_120 above_line_60 above_low_30 pause_mean_120 dx_14
autocorrelation_2_120 body_share_30 above_midprice_14 week_cos_2 jump_share_60 signed_volume_5
score_return_5 below_high_120 dx_30 autocorrelation_3_120 body_share_60 above_midprice_60 week_sin_3
jump_share_120 signed_volume_10 score_return_10 above_low_120 plus_di_30 autocorrelation_5_120
wick_balance_10 week_cos_3 largest_return_20 signed_volume_60 score_return_15 below_high_240 minus_di_30
absolute_autocorrelation_60 wick_balance_20 hour_sin_2 largest_return_60 signed_volume_120 score_return_30
above_low_240 aroon_down_14 absolute_autocorrelation_120 wick_balance_60 hour_cos_2 largest_return_240
money_flow_10 score_return_60 slope_score_10 aroon_up_14 variance_ratio_10_120 range_change
volume_return_correlation_60 range_to_return_20 money_flow_60 score_return_120 slope_score_20 aroon_down_25
variance_ratio_30_240 balance_power volume_range_correlation_60 range_to_return_60 money_flow_120
score_return_240 slope_score_120 aroon_up_25 rising_share_10 range_to_return_120 force volatility_trend_60
slope_score_240 price_impact_60 rising_share_20 volatility_of_volatility_60 money_flow_index_14
open_gap_mean_20
"""
ORDER = tuple(ORDER_TEXT.split())
"""Names of the derived features in their order."""


@cache
def features_by_name() -> dict[str, Feature]:
    """Return every derived feature under its name, in the documented order."""
    groups = (
        indicators_return.returns,
        indicators_return.bar_shape,
        indicators_return.volatility,
        indicators_return.distribution,
        indicators_trend.trend,
        indicators_trend.averages,
        indicators_trend.oscillators,
        indicators_market.volume,
        indicators_market.session,
        indicators_market.calendar,
    )
    known = {feature.name: feature for group in groups for feature in group()}
    return {name: known[name] for name in ORDER}


def derived_names(*, has_volume: bool) -> tuple[str, ...]:
    """Return the names of the features that bars with or without a volume have, in order."""
    return tuple(
        name for name, feature in features_by_name().items() if has_volume or not feature.needs_volume
    )


def compute_features(bars: Bars, names: Sequence[str]) -> npt.NDArray[np.float64]:
    """Return the named features of one symbol's bars as [R, F] float64, NaN inside each look-back."""
    frame = Frame(bars)
    out_RF = np.empty((len(bars), len(names)))
    known = features_by_name()
    with np.errstate(invalid="ignore"):
        for place, name in enumerate(names):
            out_RF[:, place] = known[name].compute(frame)
    return out_RF


@cache
def lookback_rows(names: tuple[str, ...]) -> int:
    """Return how many rows at a symbol's start lack at least one of the named features."""
    rows = 600
    wave_R = 1.0 + 0.01 * np.sin(np.arange(rows) * 0.7) + 0.001 * np.cos(np.arange(rows) * 2.3)
    times_R = np.arange(rows, dtype=np.int64) * 60 * 10**9
    bars = Bars(
        open_R=wave_R,
        high_R=wave_R * 1.001,
        low_R=wave_R * 0.999,
        close_R=wave_R * 1.0002,
        volume_R=100.0 * wave_R,
        timestamps_R=times_R,
        session_R=session_blocks(times_R, 30.0),
    )
    values_RF = compute_features(bars, names)
    return max((leading_nans(values_RF[:, place]) for place in range(len(names))), default=0)


def describe_features() -> str:
    """Return the page `docs/features.md`: every derived feature in order, with what it says."""
    without = derived_names(has_volume=False)
    lines = [
        "# Derived features",
        "",
        "<!-- Written by `python -m foxray.data.features > docs/features.md`; a test keeps it so. -->",
        "",
        f"From open, high, low, close and volume foxray derives {len(ORDER)} features. Without a volume the",
        f"{len(without)} that are not marked remain, in the same order. `--num-features N` takes the first N",
        "of the file's own numeric columns followed by these.",
        "",
        "Prices enter as logarithms, so every level is a ratio. A number in a name counts bars. No feature",
        "reads a later row: the features of the first rows alone are the first rows of the whole's. Memory",
        "is a window, the running session or an exponential average, so a file can be prepared in chunks.",
        f"All are there after the first {lookback_rows(ORDER)} rows of a symbol, where windows begin.",
        "",
        f"Scaling is to mean 0 and deviation 1 over the training part, cut at {CLIP_SIGMAS:g} deviations.",
        "*Volatility* is the root mean square of one-bar log returns; a *scored* return is divided by the",
        "moving volatility before it. A session lies between two pauses longer than `--session-gap` and is",
        "cut every 24 hours.",
        "",
        "| # | name | what it says | needs volume |",
        "|---|---|---|---|",
    ]
    for number, feature in enumerate(features_by_name().values(), start=1):
        mark = "yes" if feature.needs_volume else ""
        lines.append(f"| {number} | `{feature.name}` | {feature.about} | {mark} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(describe_features(), end="")

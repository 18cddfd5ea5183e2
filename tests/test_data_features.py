"""The derived features: how many, in which order, free of the future, of levels and of copies."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from data_bars import bars_of, minutes, needs_real_bars, real_or_synthetic, table_of

from foxray.data import indicators_market, indicators_return, indicators_trend
from foxray.data.features import (
    ORDER,
    compute_features,
    derived_names,
    describe_features,
    features_by_name,
    lookback_rows,
)
from foxray.data.frame import OVERLAP_ROWS, Bars, session_blocks

LOOKBACK = lookback_rows(ORDER)


@pytest.fixture(scope="module")
def bars() -> Bars:
    return bars_of(real_or_synthetic())


@pytest.fixture(scope="module")
def values_RF(bars: Bars) -> np.ndarray:
    return compute_features(bars, ORDER)


def test_there_are_225_with_volume_and_the_order_names_each_once() -> None:
    assert len(ORDER) == len(set(ORDER)) == 225
    groups = (indicators_return, indicators_trend, indicators_market)
    names = (
        "returns", "bar_shape", "volatility", "distribution", "trend", "averages", "oscillators",
        "volume", "session", "calendar",
    )  # fmt: skip
    made = [
        feature.name
        for module in groups
        for name in names
        if hasattr(module, name)
        for feature in getattr(module, name)()
    ]
    assert sorted(made) == sorted(ORDER)


def test_prefix_invariance_of_every_feature(bars: Bars, values_RF: np.ndarray) -> None:
    first_RF = compute_features(bars[:3000], ORDER)
    for place, name in enumerate(ORDER):
        np.testing.assert_array_equal(first_RF[:, place], values_RF[:3000, place], err_msg=name)


def test_finite_after_the_look_back(values_RF: np.ndarray) -> None:
    assert np.isfinite(values_RF[LOOKBACK:]).all()
    assert np.isnan(values_RF[:LOOKBACK]).any(axis=1).all()


@needs_real_bars
def test_no_two_are_correlated_above_0_999_on_real_bars(values_RF: np.ndarray) -> None:
    correlation_FF = np.abs(np.corrcoef(values_RF[LOOKBACK:].T))
    np.fill_diagonal(correlation_FF, 0.0)
    assert np.isfinite(correlation_FF).all(), "a feature is constant"
    worst = np.unravel_index(correlation_FF.argmax(), correlation_FF.shape)
    assert correlation_FF.max() < 0.999, [ORDER[place] for place in worst]


def test_a_chunk_after_its_overlap_agrees_with_the_whole(bars: Bars, values_RF: np.ndarray) -> None:
    deviation_F = values_RF[LOOKBACK:].std(axis=0)
    # From one row before a session's start, as chunks are read.
    opening = int(np.flatnonzero(np.diff(bars.session_R))[3])
    part_RF = compute_features(bars[opening : opening + 9000], ORDER)[OVERLAP_ROWS:]
    apart_F = np.abs(part_RF - values_RF[opening + OVERLAP_ROWS : opening + 9000]).max(axis=0) / deviation_F
    assert apart_F.max() < 1e-8, ORDER[int(apart_F.argmax())]


def test_no_price_level_is_left(bars: Bars) -> None:
    scale = 4096.0  # A power of two: the scaled prices are exact, only their logarithms move.
    part = bars[:2000]
    prices = {f"{name}_R": getattr(part, f"{name}_R") * scale for name in ("open", "high", "low", "close")}
    there_RF = compute_features(dataclasses.replace(part, **prices), ORDER)[LOOKBACK:]
    here_RF = compute_features(part, ORDER)[LOOKBACK:]
    apart_F = np.abs(there_RF - here_RF).max(axis=0) / np.maximum(here_RF.std(axis=0), 1e-9)
    assert apart_F.max() < 0.02, ORDER[int(apart_F.argmax())]


def test_without_volume_the_unmarked_remain_in_order(bars: Bars) -> None:
    names = derived_names(has_volume=False)
    assert len(names) == 188
    assert list(names) == [name for name in ORDER if not features_by_name()[name].needs_volume]
    without = dataclasses.replace(bars[:1000], volume_R=None)
    np.testing.assert_array_equal(compute_features(without, names), compute_features(bars[:1000], names))


def flat(rows: int, volume: float) -> Bars:
    price_R = np.full(rows, 1.1)
    return Bars(
        open_R=price_R,
        high_R=price_R,
        low_R=price_R,
        close_R=price_R,
        volume_R=np.full(rows, volume),
        timestamps_R=minutes(rows),
        session_R=session_blocks(minutes(rows), 30),
    )


@pytest.mark.parametrize("volume", [0.0, 1.0, 1e12])
def test_flat_bars_give_finite_features(volume: float) -> None:
    assert np.isfinite(compute_features(flat(1500, volume), ORDER)[LOOKBACK:]).all()


def test_wild_bars_give_finite_features() -> None:
    rng = np.random.default_rng(0)
    table = table_of(1500)
    bars = bars_of(table)
    jump_R = np.exp(rng.choice([0.0, 3.0, -3.0], 1500, p=[0.98, 0.01, 0.01]))
    wild = dataclasses.replace(
        bars,
        close_R=bars.close_R * jump_R,
        high_R=bars.low_R,  # contradicts itself: the high is below the open
        volume_R=np.where(rng.random(1500) < 0.3, 0.0, bars.volume_R * 1e9),
    )
    assert np.isfinite(compute_features(wild, ORDER)[LOOKBACK:]).all()


def test_flat_stretches_agree_between_chunk_and_whole() -> None:
    bars = bars_of(table_of(14_000))
    still_R = (np.arange(14_000) // 700) % 3 == 0
    prices = {
        f"{name}_R": np.where(still_R, 1.1, getattr(bars, f"{name}_R"))
        for name in ("open", "high", "low", "close")
    }
    held = dataclasses.replace(bars, **prices, volume_R=np.where(still_R, 0.0, bars.volume_R))
    whole_RF = compute_features(held, ORDER)
    opening = int(np.flatnonzero(np.diff(held.session_R))[1])
    part_RF = compute_features(held[opening:], ORDER)[OVERLAP_ROWS:]
    apart_F = np.abs(part_RF - whole_RF[opening + OVERLAP_ROWS :]).max(axis=0)
    apart_F /= np.maximum(whole_RF[LOOKBACK:].std(axis=0), 1e-9)
    assert apart_F.max() < 1e-7, ORDER[int(apart_F.argmax())]


def test_fewer_rows_than_the_look_back_give_nan_not_an_error() -> None:
    bars = bars_of(table_of(300))
    for rows in (1, 2, 40, 269):
        assert np.isnan(compute_features(bars[:rows], ORDER)).any(axis=1).all()


def test_a_market_that_never_closes_has_sessions_of_a_day() -> None:
    blocks_R = session_blocks(minutes(4000), 30)
    assert blocks_R[0] == 0 and blocks_R[1439] == 0 and blocks_R[1440] == 1 and blocks_R[3999] == 2


def test_the_page_of_features_is_up_to_date() -> None:
    page = Path(__file__).parents[1] / "docs" / "features.md"
    assert page.read_text() == describe_features()

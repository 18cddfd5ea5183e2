"""Rolling statistics equal the plain definition, and do not depend on where a series begins."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foxray.data import rolling

RETURNS = np.random.default_rng(1).standard_t(3, 500) * 1e-4
PRICES = np.cumsum(RETURNS) + np.log(1.1)


def plain(x_R: np.ndarray, window: int, function: object) -> np.ndarray:
    out_R = np.full(len(x_R), np.nan)
    for row in range(window - 1, len(x_R)):
        out_R[row] = function(x_R[row - window + 1 : row + 1])  # type: ignore[operator]
    return out_R


@pytest.mark.parametrize("window", [2, 7, 60, 240])
def test_equal_to_the_plain_definition(window: int) -> None:
    def slope(x: np.ndarray) -> float:
        return float(np.polyfit(np.arange(len(x)), x, 1)[0])

    np.testing.assert_allclose(rolling.mean(PRICES, window), plain(PRICES, window, np.mean), atol=1e-10)
    np.testing.assert_allclose(
        rolling.deviation(RETURNS, window, rolling.RETURN_BITS), plain(RETURNS, window, np.std), atol=2e-8
    )
    np.testing.assert_allclose(
        rolling.slope(PRICES, window, rolling.PRICE_BITS), plain(PRICES, window, slope), atol=1e-7
    )


def test_correlation_equals_numpy() -> None:
    other_R = RETURNS * 0.5 + np.random.default_rng(2).standard_normal(500) * 1e-4
    ours_R = rolling.correlation(RETURNS, other_R, 60, rolling.RETURN_BITS, rolling.RETURN_BITS)
    theirs = [np.corrcoef(RETURNS[i - 59 : i + 1], other_R[i - 59 : i + 1])[0, 1] for i in range(59, 500)]
    np.testing.assert_allclose(ours_R[59:], theirs, atol=1e-3)
    assert np.isnan(ours_R[:59]).all()


@settings(deadline=None)
@given(start=st.integers(0, 300), window=st.sampled_from([5, 30, 120]))
def test_the_same_bits_wherever_a_series_begins(start: int, window: int) -> None:
    for of in (
        lambda x: rolling.mean(x, window),
        lambda x: rolling.variance(x, window, rolling.PRICE_BITS),
        lambda x: rolling.slope(x, window, rolling.PRICE_BITS),
        lambda x: rolling.rank(x, window),
    ):
        whole_R, part_R = of(PRICES), of(PRICES[start:])
        np.testing.assert_array_equal(part_R[window - 1 :], whole_R[start + window - 1 :])


def test_overflow_of_the_running_sum_does_no_harm() -> None:
    rows = 100_000
    large_R = np.full(rows, 5e5) + np.arange(rows) % 2
    # The cumulative sum of 1e5 such values on a grid of 2**-36 is 370 times what 64 bits hold.
    np.testing.assert_allclose(rolling.mean(large_R, 100)[99:], 500_000.5, rtol=1e-12)


def test_nan_at_the_start_only_lengthens_the_look_back() -> None:
    x_R = np.concatenate((np.full(10, np.nan), RETURNS))
    out_R = rolling.mean(x_R, 20)
    assert rolling.leading_nans(out_R) == 29
    np.testing.assert_array_equal(out_R[29:], rolling.mean(RETURNS, 20)[19:])


def test_flat_series_give_zero_not_noise() -> None:
    flat_R = np.full(300, 0.1 + 0.2)
    assert (rolling.variance(flat_R, 60, rolling.PRICE_BITS)[59:] == 0).all()
    assert (rolling.slope(flat_R, 60, rolling.PRICE_BITS)[59:] == 0).all()
    assert (rolling.correlation(flat_R, PRICES[:300], 60, 24, 24)[59:] == 0).all()

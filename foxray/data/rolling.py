"""Rolling statistics that give the same bits wherever a series begins.

The usual running sums carry the rounding of every earlier row along: the same window then differs with the
row a chunk started at, and on a flat stretch that difference is all there is. Here values are first put on
a fixed binary grid and summed as 64-bit integers. Integer sums are exact, and because they wrap around
modulo 2**64 the difference of two cumulative sums is the window's sum even after the cumulative one has
overflowed. Means, variances, covariances and regression slopes follow from such sums alone, in O(rows)
whatever the window. The first rows, up to the look-back, are NaN.

Shapes: every array is [R], R rows in order of time.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MEAN_BITS = 36
"""Grid of means: steps of 2**-36, for values up to 2**19 in windows of up to 256 rows."""

RETURN_BITS = 26
"""Grid of variances of returns: steps of 1.5e-8, for deviations up to 0.27 in windows of 240 rows."""

PRICE_BITS = 24
"""Grid of variances of log prices: steps of 6e-8, for deviations up to 1.06 in windows of 240 rows."""

LEVEL_BITS = 20
"""Grid of variances of log volumes and scores: steps of 1e-6, for deviations up to 17."""


def leading_nans(x_R: Array) -> int:
    """Return how many rows at the start are NaN: the look-back already spent on `x_R`."""
    missing_R = np.isnan(x_R)
    return len(x_R) if missing_R.all() else int(np.argmin(missing_R))


def fixed(x_R: Array, bits: int) -> Ints:
    """Return `x_R` in steps of 2**-bits; NaN becomes 0."""
    with np.errstate(invalid="ignore"):
        return np.rint(np.nan_to_num(x_R, nan=0.0) * float(1 << bits)).astype(np.int64)


def window_sum(x_R: Ints, window: int) -> Ints:
    """Return the sum of the last `window` rows, modulo 2**64; the first rows sum what there is."""
    total_R = np.cumsum(x_R)
    out_R = total_R.copy()
    out_R[window:] -= total_R[:-window]
    return out_R


def _blank(out_R: Array, lead: int) -> Array:
    out_R[:lead] = np.nan
    return out_R


def mean(x_R: Array, window: int, bits: int = MEAN_BITS) -> Array:
    """Return the mean of the last `window` rows."""
    sum_R = window_sum(fixed(x_R, bits), window).astype(np.float64)
    return _blank(sum_R / (window * float(1 << bits)), leading_nans(x_R) + window - 1)


def _scatter(x_R: Ints, y_R: Ints, window: int) -> Ints:
    """Return window**2 times the covariance, in the grid's squared steps."""
    return window * window_sum(x_R * y_R, window) - window_sum(x_R, window) * window_sum(y_R, window)


def variance(x_R: Array, window: int, bits: int) -> Array:
    """Return the variance (divisor `window`) of the last `window` rows."""
    x_fixed_R = fixed(x_R, bits)
    scatter_R = _scatter(x_fixed_R, x_fixed_R, window).view(np.uint64).astype(np.float64)
    return _blank(scatter_R / (window * float(1 << bits)) ** 2, leading_nans(x_R) + window - 1)


def deviation(x_R: Array, window: int, bits: int) -> Array:
    """Return the standard deviation (divisor `window`) of the last `window` rows."""
    return np.sqrt(variance(x_R, window, bits))


def correlation(x_R: Array, y_R: Array, window: int, bits_x: int, bits_y: int) -> Array:
    """Return Pearson's correlation over the last `window` rows; 0 where either series stands still."""
    x_fixed_R, y_fixed_R = fixed(x_R, bits_x), fixed(y_R, bits_y)
    both_R = _scatter(x_fixed_R, y_fixed_R, window).astype(np.float64)
    scale_R = np.ones_like(both_R)
    for own_R in (x_fixed_R, y_fixed_R):
        scale_R *= np.sqrt(_scatter(own_R, own_R, window).view(np.uint64).astype(np.float64))
    out_R = np.where(scale_R > 0, both_R / np.maximum(scale_R, 1.0), 0.0)
    return _blank(out_R, max(leading_nans(x_R), leading_nans(y_R)) + window - 1)


def slope(x_R: Array, window: int, bits: int) -> Array:
    """Return the slope per row of the least-squares line through the last `window` rows."""
    x_fixed_R = fixed(x_R, bits)
    row_R = np.arange(len(x_R), dtype=np.int64)
    # Twice the sum of (place in the window - middle) * x, in integers: places run from 0 to window - 1.
    sum_R = window_sum(x_fixed_R, window)
    moment_R = window_sum(row_R * x_fixed_R, window) - (row_R - (window - 1)) * sum_R
    twice_R = (2 * moment_R - (window - 1) * sum_R).astype(np.float64)
    places = window * (window * window - 1) / 12.0
    return _blank(twice_R / (2.0 * places * float(1 << bits)), leading_nans(x_R) + window - 1)


def fit_quality(slope_R: Array, variance_R: Array, window: int) -> Array:
    """Return R squared of the least-squares line, from its slope and the variance of the series."""
    explained_R = slope_R**2 * (window * window - 1) / 12.0
    out_R = np.where(variance_R > 0, explained_R / np.where(variance_R > 0, variance_R, 1.0), 0.0)
    out_R[np.isnan(slope_R)] = np.nan
    return out_R


def rank(x_R: Array, window: int) -> Array:
    """Return where the last row ranks among the last `window` rows: -1 lowest, 0 middle, 1 highest."""
    out_R = np.full(len(x_R), np.nan)
    if len(x_R) < window:
        return out_R
    rows_RW = sliding_window_view(x_R, window)
    last_R1 = rows_RW[:, -1:]
    below_R = (rows_RW < last_R1).sum(axis=1) - (rows_RW > last_R1).sum(axis=1)
    out_R[window - 1 :] = below_R / (window - 1)
    return _blank(out_R, leading_nans(x_R) + window - 1)


def lag(x_R: Array, rows: int) -> Array:
    """Return the value `rows` rows ago."""
    out_R = np.full(len(x_R), np.nan)
    out_R[rows:] = x_R[: max(len(x_R) - rows, 0)]
    return out_R

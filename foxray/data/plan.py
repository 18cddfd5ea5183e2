"""Which rows end a window, and which part each window belongs to: decided from times alone.

A window of T rows ends at the time of its decision; its target lies `horizon` rows later. Both stay within
one stretch of one symbol without a pause, clear of the features' look-back. A training window's target is
before the split, a validation window's first row is not: nothing, label included, is on both sides.

Shapes: R usable rows in order of symbol and time.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from foxray.data.frame import first_rows, segment_numbers, session_blocks
from foxray.data.settings import DataSettings
from foxray.errors import UserError

Ints = npt.NDArray[np.int64]

WHOLE, TRAIN, VALID = 1, 2, 4
"""Marks of a row: it ends a whole window; one of the training part; one of the validation part."""


@dataclass(frozen=True, kw_only=True)
class RowPlan:
    """What the times and symbols of the rows say about windows."""

    segment_R: Ints
    """Number of the stretch without a pause, over all symbols."""

    session_R: Ints
    """Number of the session, for the features; starts again with each symbol."""

    symbol_starts: tuple[int, ...]
    """First row of each symbol, and the number of rows at the end."""

    split_ns: int
    """The split: training is before, validation from here on."""

    target_row_R: Ints
    """Row of the target, or -1 where there is none."""

    part_R: npt.NDArray[np.uint8]
    """Marks of each row."""

    fit_R: npt.NDArray[np.bool_]
    """Rows on which the features' scaling is fitted: before the split and past the look-back."""


def plan_rows(timestamps_R: Ints, symbol_R: Ints, settings: DataSettings, lookback: int) -> RowPlan:
    """Return the plan for rows in order of symbol and time."""
    rows = len(timestamps_R)
    starts = (0, *(np.flatnonzero(np.diff(symbol_R)) + 1).tolist(), rows)
    session_R = np.empty(rows, dtype=np.int64)
    segment_R = np.empty(rows, dtype=np.int64)
    first_R = np.empty(rows, dtype=np.int64)
    segments = 0
    for begin, end in pairwise(starts):
        times_R = timestamps_R[begin:end]
        session_R[begin:end] = session_blocks(times_R, settings.session_gap_minutes)
        segment_R[begin:end] = segment_numbers(times_R, settings.session_gap_minutes) + segments
        segments = int(segment_R[end - 1]) + 1
        first_R[begin:end] = begin
    row_R = np.arange(rows, dtype=np.int64)
    begins_R = row_R - (settings.seq_len - 1)
    whole_R = (begins_R >= first_rows(segment_R)) & (begins_R >= first_R + lookback)
    ahead_R = np.minimum(row_R + settings.horizon, rows - 1)
    has_target_R = (row_R + settings.horizon < rows) & (segment_R[ahead_R] == segment_R)
    split_ns = _split_ns(timestamps_R, settings.train_fraction)
    train_R = whole_R & has_target_R & (timestamps_R[ahead_R] < split_ns)
    valid_R = whole_R & has_target_R & (timestamps_R[np.maximum(begins_R, 0)] >= split_ns)
    return RowPlan(
        segment_R=segment_R,
        session_R=session_R,
        symbol_starts=starts,
        split_ns=split_ns,
        target_row_R=np.where(has_target_R, ahead_R, -1),
        part_R=(whole_R * WHOLE + train_R * TRAIN + valid_R * VALID).astype(np.uint8),
        fit_R=(row_R >= first_R + lookback) & (timestamps_R < split_ns),
    )


def _split_ns(timestamps_R: Ints, train_fraction: float) -> int:
    """Return the time before which `train_fraction` of all rows lie, one time for all symbols."""
    place = int(len(timestamps_R) * train_fraction)
    if place >= len(timestamps_R):
        return int(timestamps_R.max()) + 1
    return int(np.partition(timestamps_R, place)[place])


def check_parts(
    path: Path, plan: RowPlan, settings: DataSettings, lookback: int, *, predicting: bool
) -> None:
    """Raise `UserError` where a part that is needed has no window."""
    rows = len(plan.part_R)
    longest = int(np.bincount(plan.segment_R).max())
    need = settings.seq_len + (0 if predicting else settings.horizon)
    said = (
        f"{path}: too few rows: {rows:,} usable rows hold no {{part}} of {settings.seq_len} rows"
        f"{'' if predicting else f' and a target {settings.horizon} later'}. One needs {need} rows without "
        f"a pause above {settings.session_gap_minutes:g} minutes after {lookback} rows of look-back (longest "
        f"stretch: {longest:,} rows). Give more bars, or lower --seq-len{{more}}."
    )
    gap_hint = ", or raise --session-gap" if longest < need + lookback and longest < rows else ""
    if not (plan.part_R & WHOLE).any():
        raise UserError(said.format(part="window", more=gap_hint))
    if predicting:
        return
    if not (plan.part_R & TRAIN).any():
        more = f"{gap_hint} or raise --train-fraction (now {settings.train_fraction:g})"
        raise UserError(said.format(part="training window", more=more))
    if settings.train_fraction < 1 and not (plan.part_R & VALID).any():
        more = f"{gap_hint} or lower --train-fraction (now {settings.train_fraction:g})"
        raise UserError(said.format(part="validation window", more=more))

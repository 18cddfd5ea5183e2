"""A prepared file, mapped into memory: what a worker opens in a millisecond and reads without a copy.

Every tensor here is a view of the same read-only pages, shared by all workers of a machine; writing to one
is a fault (copy first). Only the path is pickled.

Shapes: R rows in order of symbol and time, F features, N windows, Q quantiles, B windows of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.utils.dlpack
from torch import Tensor

from foxray.data.cachefile import column_values, read_batch
from foxray.data.plan import TRAIN, VALID, WHOLE
from foxray.data.scaling import Scaling
from foxray.data.settings import DataSettings

DAY_NS = 86_400 * 10**9


class PreparedData:
    """Scaled features, targets and windows of one file. Made by `foxray.data.prepare.prepare`."""

    def __init__(self, path: Path, batch: pa.RecordBatch, metadata: dict[str, Any]) -> None:
        self.path = path
        self.key: str = metadata["key"]
        self.settings = DataSettings.from_dict(metadata["settings"])
        self.scaling = Scaling.from_dict(metadata["scaling"])
        self.symbols: list[str] = metadata["symbols"]
        self.notes: list[str] = metadata["notes"]
        self.split_ns: int = metadata["split_ns"]
        self.lookback_rows: int = metadata["lookback_rows"]
        self._batch = batch
        self._quantiles: dict[tuple[float, ...], Tensor] = {}

    @classmethod
    def open(cls, path: Path | str) -> PreparedData:
        """Map a prepared file. Raises ArrowInvalid, OSError or KeyError for one that is none."""
        batch, metadata = read_batch(Path(path))
        return cls(Path(path), batch, metadata)

    def __reduce__(self) -> tuple[Any, ...]:
        return (PreparedData.open, (self.path,))

    def _view(self, name: str) -> Tensor:
        values = column_values(self._batch, name)
        if pa.types.is_timestamp(values.type):
            values = values.view(pa.int64())
        view: Tensor = torch.utils.dlpack.from_dlpack(values)
        return view

    @property
    def feature_names(self) -> list[str]:
        """Names of the features, in the order of the columns."""
        return list(self.scaling.feature_names)

    @property
    def num_rows(self) -> int:
        """Rows after dropping, sorting and de-duplicating."""
        return int(self._batch.num_rows)

    @property
    def num_features(self) -> int:
        """Features in a row."""
        return len(self.scaling.feature_names)

    @cached_property
    def features_RF(self) -> Tensor:
        """Scaled features, float32 [R, F]; rows of the look-back are 0 and in no window."""
        return self._view("features").view(self.num_rows, self.num_features)

    @cached_property
    def target_R(self) -> Tensor:
        """Scaled target of the window that ends at each row, float32 [R]; NaN where there is none."""
        return self._view("target")

    @cached_property
    def target_raw_R(self) -> Tensor:
        """Target in its own unit, float64 [R]; NaN where there is none."""
        return self._view("target_raw")

    @cached_property
    def close_R(self) -> Tensor:
        """Close, float64 [R]; NaN where the target is another column."""
        return self._view("close")

    @cached_property
    def naive_R(self) -> Tensor:
        """Scaled forecast "as the last value", float32 [R]: a return of 0, or the target column now."""
        return self._view("naive")

    @cached_property
    def symbol_R(self) -> Tensor:
        """Id of each row's symbol, int64 [R]: an index into `symbols`, 0 without a symbol column."""
        return self._view("symbol")

    @cached_property
    def segment_R(self) -> Tensor:
        """Number of the stretch without a pause, int64 [R]."""
        return self._view("segment")

    @cached_property
    def timestamps_R(self) -> Tensor:
        """Time of each row in ns since 1970, UTC, int64 [R]."""
        return self._view("timestamp")

    def _windows(self, mark: int) -> Tensor:
        ends_N = ((self._view("part") & mark) > 0).nonzero().flatten()
        return ends_N[:: self.settings.window_stride].contiguous()

    @cached_property
    def train_windows_N(self) -> Tensor:
        """Last rows of the training windows, int64 [N]; window and target lie before the split."""
        return self._windows(TRAIN)

    @cached_property
    def valid_windows_N(self) -> Tensor:
        """Last rows of the validation windows, int64 [N]; all of each lies at or after the split."""
        return self._windows(VALID)

    @cached_property
    def all_windows_N(self) -> Tensor:
        """Last rows of every whole window, int64 [N], with or without a target: what a prediction covers."""
        return ((self._view("part") & WHOLE) > 0).nonzero().flatten()

    @property
    def duration_days(self) -> float:
        """Days from the first bar to the last."""
        times_R = self.timestamps_R
        return float(times_R.max() - times_R.min()) / DAY_NS

    def target_quantiles(self, quantiles: Sequence[float]) -> Tensor:
        """Return the empirical quantiles of the training targets, float32 [Q], scaled."""
        key = tuple(quantiles)
        if key not in self._quantiles:
            chosen = self.target_R[(self._view("part") & TRAIN) > 0]
            values = np.quantile(chosen.double().numpy(), key)
            self._quantiles[key] = torch.as_tensor(values, dtype=torch.float32)
        return self._quantiles[key].clone()

    def naive_forecast(self, quantiles: Sequence[float], last_rows_B: Tensor | None = None) -> Tensor:
        """Return the forecast to beat, scaled: the last value for the median, training quantiles otherwise.

        With `last_rows_B` one row per window, [B, Q]; without, [Q], which only the default target has: its
        last value is a return of 0 everywhere. Raises ValueError for another target without rows.
        """
        forecast_Q = self.target_quantiles(quantiles)
        median_Q = torch.tensor([abs(quantile - 0.5) < 1e-9 for quantile in quantiles])
        if last_rows_B is None:
            if self.settings.target is not None:
                raise ValueError("the naive forecast of a target column differs by window: give last_rows_B")
            return torch.where(median_Q, self.naive_R[0], forecast_Q)
        last_B1 = self.naive_R[last_rows_B.cpu()].unsqueeze(1)
        return torch.where(median_Q, last_B1, forecast_Q)

    def unscale_target(self, scaled: Tensor) -> Tensor:
        """Return targets or forecasts in their own unit (float64, same shape)."""
        return scaled.double() * self.scaling.target_std + self.scaling.target_mean

"""The numbers that scale features and target, fitted on the training part and carried with the run.

A model is only meaningful with the scaling it was trained under, so this record travels in checkpoints and
is handed back to `prepare` when new bars are to be predicted. It also names the features in their order and
the symbols in the order of their ids: both are part of what the model learned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CLIP_SIGMAS = 10.0
"""Scaled features are cut at this many standard deviations, so that one wild bar cannot blow up a step."""

MIN_STD = 1e-12
"""A feature that moves less than this is constant; it scales to 0 instead of to noise."""


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Mean and standard deviation of each feature and of the target, over the training part."""

    feature_names: tuple[str, ...]
    """Features in the order of the columns."""

    feature_mean: tuple[float, ...]
    """Mean of each feature."""

    feature_std: tuple[float, ...]
    """Standard deviation of each feature; 1 where it is constant."""

    target_mean: float
    """Mean of the target over the training windows, in the target's own unit."""

    target_std: float
    """Standard deviation of the target over the training windows; 1 where it is constant."""

    symbols: tuple[str, ...] = ()
    """Symbols in the order of their ids; empty where the data has no symbol column."""

    def __post_init__(self) -> None:
        lengths = {len(self.feature_names), len(self.feature_mean), len(self.feature_std)}
        if len(lengths) != 1:
            raise ValueError(f"names, means and deviations differ in length: {sorted(lengths)}")

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; floats survive the way there and back unchanged."""
        return {
            "feature_names": list(self.feature_names),
            "feature_mean": list(self.feature_mean),
            "feature_std": list(self.feature_std),
            "target_mean": self.target_mean,
            "target_std": self.target_std,
            "symbols": list(self.symbols),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Scaling:
        """Return the scaling written by `to_dict`."""
        return cls(
            feature_names=tuple(values["feature_names"]),
            feature_mean=tuple(float(value) for value in values["feature_mean"]),
            feature_std=tuple(float(value) for value in values["feature_std"]),
            target_mean=float(values["target_mean"]),
            target_std=float(values["target_std"]),
            symbols=tuple(values["symbols"]),
        )

"""What turns a Parquet file into training data: one frozen record, part of the cache's key.

Everything that changes a prepared row or window stands here and nothing else does, so that two runs with
equal settings on equal bytes share one cache. No torch: the command line builds this before it loads any.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from foxray.errors import UserError

MAX_SEQ_LEN = 100_000


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """How rows become features, targets and windows. Raises `UserError` for a value out of range."""

    seq_len: int = 60
    """Rows in one window; the last one is the time of the decision."""

    horizon: int = 1
    """Bars between the window's last row and its target."""

    num_features: int | None = None
    """The first N features of the documented order; None takes all there are (225 from OHLCV)."""

    target: str | None = None
    """Column to forecast `horizon` bars ahead; None is the log return of `close` over `horizon` bars."""

    train_fraction: float = 0.8
    """Share of the rows, in order of time, before the split; 1 leaves no validation part."""

    session_gap_minutes: float = 30.0
    """A pause longer than this ends a session; windows never cross it."""

    window_stride: int = 1
    """Take every Nth window."""

    def __post_init__(self) -> None:
        _check("seq_len", self.seq_len, 1 <= self.seq_len <= MAX_SEQ_LEN, f"from 1 to {MAX_SEQ_LEN:,}")
        _check("horizon", self.horizon, self.horizon >= 1, "1 bar or more")
        if self.num_features is not None:
            _check("num_features", self.num_features, self.num_features >= 1, "1 or more")
        _check("train_fraction", self.train_fraction, 0 < self.train_fraction <= 1, "above 0 and up to 1")
        gap = self.session_gap_minutes
        _check("session_gap", gap, 0 < gap < 1e9, "a number of minutes above 0")
        _check("window_stride", self.window_stride, self.window_stride >= 1, "1 or more")

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DataSettings:
        """Return the settings written by `to_dict`; names this version does not know are left out."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})


def _check(name: str, value: object, allowed: bool, range_text: str) -> None:
    if not allowed:
        flag = "--" + name.replace("_", "-")
        raise UserError(f"{flag} is {value}; allowed is {range_text}. Choose a value in that range.")

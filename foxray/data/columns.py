"""Which column of a Parquet file plays which part, decided from its schema before a row is read.

Names of the time, the symbol and OHLCV are recognised in any letter case; every other numeric column is the
user's own and is used as it is. What cannot be used is refused here by name, so that a mistake costs a
second and not an epoch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pt

from foxray.data.features import derived_names
from foxray.data.settings import DataSettings
from foxray.errors import UserError

MAGIC = b"PAR1"
TIMESTAMP = "timestamp"
OTHER_TIMESTAMPS = ("ts_event", "datetime", "date", "time", "ts", "__index_level_0__")
OHLC = ("open", "high", "low", "close")


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The parts that the columns of one file play; names are the file's own."""

    timestamp: str
    """Time of each bar."""

    symbol: str | None
    """Instrument of each bar, or None."""

    ohlc: tuple[str, ...]
    """Open, high, low and close where features are derived from them; empty otherwise."""

    volume: str | None
    """Volume, where derived features read it."""

    close: str | None
    """Close, for the default target."""

    target: str | None
    """Column to forecast; None for the log return of close, or where a prediction has no target."""

    own: tuple[str, ...]
    """The user's own columns among the features."""

    features: tuple[str, ...]
    """Chosen features in order: the user's own first, then derived ones."""

    notes: tuple[str, ...] = ()
    """What the user should hear about the choice."""

    @property
    def derived(self) -> tuple[str, ...]:
        """The chosen features that are derived from OHLCV."""
        return self.features[len(self.own) :]

    @property
    def prices(self) -> tuple[str, ...]:
        """Columns that must be above 0, because their logarithm is taken."""
        close = () if self.close is None else (self.close,)
        return tuple(dict.fromkeys((*(self.ohlc if self.derived else ()), *close)))

    @property
    def numeric(self) -> tuple[str, ...]:
        """Every numeric column that is read, each once."""
        more = [name for name in (self.volume, self.target) if name is not None]
        return tuple(dict.fromkeys((*self.prices, *more, *self.own)))


def open_parquet(path: Path) -> pq.ParquetFile:
    """Open a Parquet file, or raise `UserError` with what is wrong with it."""
    if not path.exists():
        raise UserError(f"{path}: no such file. Check the path given to --parquet-file.")
    if not path.is_file():
        raise UserError(f"{path}: a directory, not a Parquet file. Name one .parquet file.")
    try:
        with path.open("rb") as stream:
            head = stream.read(4)
            stream.seek(-min(4, path.stat().st_size), 2)
            tail = stream.read(4)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}). Check its permissions.") from error
    if head != MAGIC:
        raise UserError(
            f"{path}: not a Parquet file (it starts with {head!r} instead of {MAGIC!r}). "
            f"Turn CSV or DBN into Parquet with `foxray convert {path.name} OUT.parquet`."
        )
    if tail != MAGIC:
        raise UserError(
            f"{path}: a truncated Parquet file ({path.stat().st_size:,} bytes, the closing {MAGIC!r} is "
            "missing). Copy or write it again."
        )
    try:
        # Without pre-buffering: it would hold the whole file while batches are read.
        return pq.ParquetFile(path, pre_buffer=False)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: a damaged Parquet file ({first_line(error)}). Write it again.") from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text: users get one line."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def choose_columns(
    path: Path, schema: pa.Schema, settings: DataSettings, wanted: tuple[str, ...] | None = None
) -> Columns:
    """Return the parts the file's columns play, or raise `UserError`.

    `wanted` are the features of a run to predict with: exactly those, in their order.
    """
    timestamp, notes = find_timestamp(path, schema)
    lower = _by_lower_name(path, schema)
    symbol = lower.get("symbol")
    numeric = _numeric_columns(path, schema, skip={timestamp, symbol})
    market = {key: lower[key] for key in (*OHLC, "volume") if lower.get(key) in numeric}
    complete = all(key in market for key in OHLC)
    used_by_derived = set(market.values()) if complete else set()
    own = tuple(name for name in numeric if name not in used_by_derived)
    derived = derived_names(has_volume="volume" in market) if complete else ()
    if not complete and market:
        absent = ", ".join(key for key in OHLC if key not in market)
        notes.append(f"no {absent} column: no features are derived, the numeric columns are used as they are")
    target = _find_target(path, settings, numeric, market, predicting=wanted is not None)
    clash = sorted(set(own) & set(derived))
    if clash:
        raise UserError(
            f"{path}: column {clash[0]!r} has the name of a derived feature. "
            f"Rename it, for example to 'my_{clash[0]}'."
        )
    features = _choose_features(path, settings, own, derived, wanted, complete=complete)
    chosen_own = tuple(name for name in features if name in own)
    if features != (*chosen_own, *(name for name in features if name not in own)):
        raise UserError(f"{path}: the run's features come in another order than this file gives them.")
    some_derived = len(chosen_own) < len(features)
    return Columns(
        timestamp=timestamp,
        symbol=symbol,
        ohlc=tuple(market[key] for key in OHLC) if some_derived else (),
        volume=market.get("volume") if some_derived else None,
        close=market.get("close") if settings.target is None else None,
        target=target,
        own=chosen_own,
        features=features,
        notes=tuple(notes),
    )


def _by_lower_name(path: Path, schema: pa.Schema) -> dict[str, str]:
    names: dict[str, str] = {}
    for name in schema.names:
        key = name.lower()
        if key in names and key in (*OHLC, "volume", "symbol", TIMESTAMP):
            raise UserError(
                f"{path}: columns {names[key]!r} and {name!r} differ only in letter case. Drop one of them."
            )
        names.setdefault(key, name)
    return names


def find_timestamp(path: Path, schema: pa.Schema) -> tuple[str, list[str]]:
    """Return the name of the column that holds the time, and what to say about it, or raise `UserError`."""
    lower = {name.lower(): name for name in schema.names}
    if TIMESTAMP in lower:
        return lower[TIMESTAMP], []
    others = [lower[name] for name in OTHER_TIMESTAMPS if name in lower]
    others = [name for name in others if _may_be_time(schema.field(name).type)]
    if len(others) == 1:
        return others[0], [f"no {TIMESTAMP!r} column: {others[0]!r} is taken as the time"]
    if others:
        named = ", ".join(repr(name) for name in others)
        raise UserError(
            f"{path}: no column {TIMESTAMP!r}, and {named} could each be it. Rename the right one."
        )
    have = ", ".join(schema.names[:12]) or "none"
    raise UserError(
        f"{path}: no column {TIMESTAMP!r} (columns: {have}). Rename the column that holds the time."
    )


def _may_be_time(kind: pa.DataType) -> bool:
    return bool(pt.is_temporal(kind) or pt.is_integer(kind) or is_text(kind))


def is_text(kind: pa.DataType) -> bool:
    """Tell whether a column holds strings, plain or dictionary-encoded."""
    if pt.is_dictionary(kind):
        return is_text(kind.value_type)
    return bool(pt.is_string(kind) or pt.is_large_string(kind) or pt.is_string_view(kind))


def _is_numeric(kind: pa.DataType) -> bool:
    checks: tuple[Callable[[pa.DataType], bool], ...] = (
        pt.is_integer,
        pt.is_floating,
        pt.is_boolean,
        pt.is_decimal,
    )
    return any(check(kind) for check in checks)


def _numeric_columns(path: Path, schema: pa.Schema, skip: set[str | None]) -> tuple[str, ...]:
    numeric: list[str] = []
    for field in schema:
        if field.name in skip or pt.is_temporal(field.type):
            continue
        if field.name in numeric:
            raise UserError(f"{path}: two columns are named {field.name!r}. Rename one of them.")
        if not _is_numeric(field.type) and not pt.is_null(field.type):
            what = "strings" if is_text(field.type) else f"values of type {field.type}"
            raise UserError(
                f"{path}: column {field.name!r} holds {what}{_example(path, field.name)}; features are "
                "numbers. Drop the column or turn it into numbers."
            )
        numeric.append(field.name)
    if not numeric:
        have = ", ".join(schema.names[:12])
        raise UserError(
            f"{path}: no numeric column (columns: {have}). Add open, high, low, close, or features."
        )
    return tuple(numeric)


def _example(path: Path, name: str) -> str:
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=1024, columns=[name]):
            for value in batch.column(0):
                if value.is_valid:
                    return f" (the first is {str(value.as_py())[:40]!r})"
    return ""


def _find_target(
    path: Path, settings: DataSettings, numeric: tuple[str, ...], market: dict[str, str], *, predicting: bool
) -> str | None:
    if settings.target is None:
        if "close" not in market and not predicting:
            have = ", ".join(numeric[:12])
            raise UserError(
                f"{path}: no column 'close' for the default target, its log return (numeric columns: "
                f"{have}). Name another with --target COLUMN."
            )
        return None
    matches = [name for name in numeric if name == settings.target]
    matches = matches or [name for name in numeric if name.lower() == settings.target.lower()]
    if matches:
        return matches[0]
    if predicting:
        return None
    have = ", ".join(numeric[:12])
    raise UserError(f"{path}: no numeric column {settings.target!r} for --target. Choose one of: {have}.")


def _choose_features(
    path: Path,
    settings: DataSettings,
    own: tuple[str, ...],
    derived: tuple[str, ...],
    wanted: tuple[str, ...] | None,
    *,
    complete: bool,
) -> tuple[str, ...]:
    available = (*own, *derived)
    if wanted is not None:
        missing = [name for name in wanted if name not in available]
        if missing:
            need = (
                "with open, high, low, close and volume as in training"
                if complete
                else "with the same columns"
            )
            raise UserError(
                f"{path}: {len(missing)} of the run's {len(wanted)} features are missing, the first is "
                f"{missing[0]!r}. Give a file {need}."
            )
        return wanted
    count = settings.num_features
    if count is None:
        return available
    if count > len(available):
        source = f"{len(own)} of its own columns and {len(derived)} derived"
        hint = " A 'volume' column would bring more." if complete and len(derived) < 200 else ""
        raise UserError(
            f"{path}: --num-features is {count}, but there are {len(available)} features ({source}). "
            f"Choose up to {len(available)}.{hint}"
        )
    return available[:count]

"""Parquet in, prepared file out: read, check, derive, fit the scaling, scale, write, rename.

Two passes over chunks: the first fits mean and deviation on the training part, the second writes scaled
rows. A chunk reads `OVERLAP_ROWS` more before its own rows, so that averages have settled where it begins;
data of one chunk is computed once and kept for the second pass. The file is named after a hash of the bytes
read, the settings and the version of the features, so a second call with the same opens what is there.

Shapes: R usable rows in order of symbol and time, F features, C rows of a chunk.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import talib

from foxray.data.cachefile import CacheWriter
from foxray.data.columns import Columns, choose_columns, open_parquet
from foxray.data.features import compute_features, lookback_rows
from foxray.data.frame import OVERLAP_ROWS, Bars, first_rows
from foxray.data.plan import TRAIN, RowPlan, check_parts, plan_rows
from foxray.data.prepared import PreparedData
from foxray.data.scaling import CLIP_SIGMAS, MIN_STD, Scaling
from foxray.data.scan import Scan, scan
from foxray.data.settings import DataSettings
from foxray.errors import UserError

CHUNK_ROWS = 65_536
"""Rows derived at a time: about 120 MB of float64 features at 225."""

Array = npt.NDArray[np.float64]


def prepare(
    parquet_file: Path | str,
    settings: DataSettings,
    cache_dir: Path | str,
    *,
    log: Callable[[str], None] = print,
    chunk_rows: int | None = None,
    scaling: Scaling | None = None,
) -> PreparedData:
    """Return the prepared form of a Parquet file, written to `cache_dir` unless it is there already.

    `scaling` is that of a run to predict with: its features in its order, nothing is fitted. `log` hears of
    dropped, sorted and missing things. `chunk_rows` bounds memory; the result does not depend on it.
    Raises `UserError` for a file, column or setting that cannot be used; nothing half-written stays.
    """
    path = Path(parquet_file)
    folder = Path(cache_dir)
    with open_parquet(path) as file:
        wanted = None if scaling is None else scaling.feature_names
        columns = choose_columns(path, file.schema_arrow, settings, wanted)
        key = _key(path, settings, scaling)
        target_path = folder / f"{path.stem}-{key[:16]}.arrow"
        kept = _open_kept(target_path, key, log)
        if kept is not None:
            return kept
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with_scan = scan(path, file, columns, folder)
        except OSError as error:
            raise _unwritable(folder, error) from error
    try:
        job = _Job(
            path=path,
            key=key,
            settings=settings,
            columns=columns,
            scan=with_scan,
            lookback=lookback_rows(columns.derived),
            chunk_rows=chunk_rows or CHUNK_ROWS,
            log=log,
        )
        job.run(target_path, scaling)
    except OSError as error:
        raise _unwritable(folder, error) from error
    finally:
        with_scan.store.close()
    return PreparedData.open(target_path)


def _key(path: Path, settings: DataSettings, scaling: Scaling | None) -> str:
    """Return the hash of everything that the prepared file depends on."""
    with path.open("rb") as stream:
        content = hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=20)).hexdigest()
    parts = {
        "content": content,
        "settings": settings.to_dict(),
        "scaling": None if scaling is None else scaling.to_dict(),
        "code": _code_version(),
    }
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=20).hexdigest()


@cache
def _code_version() -> str:
    """Return a hash of the code that decides what a prepared file holds, so that no stale one is opened."""
    digest = hashlib.blake2b(talib.__version__.encode(), digest_size=20)
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()


def _open_kept(path: Path, key: str, log: Callable[[str], None]) -> PreparedData | None:
    if not path.exists():
        return None
    try:
        kept = PreparedData.open(path)
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        log(f"{path}: the prepared file cannot be read ({type(error).__name__}); it is made anew")
        return None
    if kept.key != key:
        return None
    for note in kept.notes:
        log(note)
    return kept


def _unwritable(folder: Path, error: OSError) -> UserError:
    return UserError(
        f"{error.filename or folder}: prepared data cannot be written ({error.strerror or error}). "
        "Choose a writable --storage with free space."
    )


@dataclass(frozen=True, kw_only=True)
class _Chunk:
    """Unscaled features of rows `begin` to `end` and whether the rows before are warm."""

    begin: int
    end: int
    values_CF: Array


@dataclass(kw_only=True)
class _Job:
    """One file on its way; the methods stand in the order they run."""

    path: Path
    key: str
    settings: DataSettings
    columns: Columns
    scan: Scan
    lookback: int
    chunk_rows: int
    log: Callable[[str], None]

    def run(self, target_path: Path, scaling: Scaling | None) -> None:
        """Do it all."""
        notes = [*self.columns.notes, *self.scan.notes]
        for note in notes:
            self.log(note)
        predicting = scaling is not None
        symbols, symbol_R = _symbol_ids(self.path, self.scan, scaling)
        plan = plan_rows(self.scan.timestamps_R, self.scan.symbol_R, self.settings, self.lookback)
        check_parts(self.path, plan, self.settings, self.lookback, predicting=predicting)
        level_R = self._target_level()
        raw_R = self._raw_target(level_R, plan)
        chunks: list[_Chunk] | None = None
        if len(plan.part_R) <= self.chunk_rows:
            chunks = list(self._chunks(plan))
        if scaling is None:
            scaling = self._fit(plan, raw_R, symbols, iter(chunks) if chunks else self._chunks(plan))
        metadata = {
            "key": self.key,
            "settings": self.settings.to_dict(),
            "scaling": scaling.to_dict(),
            "symbols": list(symbols),
            "notes": notes,
            "split_ns": plan.split_ns,
            "lookback_rows": self.lookback,
            "target_is_return": self.settings.target is None,
        }
        rows, count = len(plan.part_R), len(self.columns.features)
        with CacheWriter(target_path, rows=rows, num_features=count, metadata=metadata) as writer:
            self._write_rows(writer, plan, level_R, raw_R, symbol_R, scaling)
            for chunk in chunks if chunks is not None else self._chunks(plan):
                writer.write("features", chunk.begin, scale_features(chunk.values_CF, scaling))

    def _target_level(self) -> Array:
        """Return the column the target is made of, [R]: close, or the target column; NaN where absent."""
        name = self.columns.target if self.settings.target is not None else self.columns.close
        order_R = self.scan.order_R
        level_R = np.full(len(order_R), np.nan)
        if name is None:
            return level_R
        place = self.columns.numeric.index(name)
        for begin in range(0, len(order_R), self.chunk_rows):
            rows = slice(begin, begin + self.chunk_rows)
            level_R[rows] = self.scan.store.gather(order_R[rows])[:, place]
        return level_R

    def _raw_target(self, level_R: Array, plan: RowPlan) -> Array:
        """Return the target of the window that ends at each row, in its own unit; NaN where none."""
        ahead_R = np.maximum(plan.target_row_R, 0)
        raw_R = level_R[ahead_R]
        if self.settings.target is None:
            raw_R = np.log(raw_R / level_R)
        return np.where(plan.target_row_R >= 0, raw_R, np.nan)

    def _chunks(self, plan: RowPlan) -> Iterator[_Chunk]:
        """Yield the features of all rows in order, a chunk of one symbol at a time."""
        opening_R = first_rows(plan.session_R)
        derived = bool(self.columns.derived)
        for first, last in zip(plan.symbol_starts[:-1], plan.symbol_starts[1:], strict=True):
            for begin in range(first, last, self.chunk_rows):
                end = min(begin + self.chunk_rows, last)
                # The running session is read from one row before its start: the close before it is a feature.
                warm = max(first, min(begin - OVERLAP_ROWS, int(opening_R[begin]) - 1)) if derived else begin
                values_CF = self._derive(slice(warm, end), plan)[begin - warm :]
                yield _Chunk(begin=begin, end=end, values_CF=values_CF)

    def _derive(self, rows: slice, plan: RowPlan) -> Array:
        """Return the features of one stretch of one symbol."""
        columns = self.columns
        values = self.scan.store.gather(self.scan.order_R[rows])
        place = {name: position for position, name in enumerate(columns.numeric)}
        if columns.own == columns.numeric:
            return values
        own_CF = values[:, [place[name] for name in columns.own]]
        if not columns.derived:
            return own_CF
        column = {
            name: np.ascontiguousarray(values[:, place[name]])
            for name in (*columns.ohlc, columns.volume)
            if name
        }
        open_C, high_C, low_C, close_C = (column[name] for name in columns.ohlc)
        bars = Bars(
            open_R=open_C,
            high_R=high_C,
            low_R=low_C,
            close_R=close_C,
            volume_R=column[columns.volume] if columns.volume else None,
            timestamps_R=self.scan.timestamps_R[rows],
            session_R=plan.session_R[rows],
        )
        return np.concatenate((own_CF, compute_features(bars, columns.derived)), axis=1)

    def _fit(
        self, plan: RowPlan, raw_R: Array, symbols: tuple[str, ...], chunks: Iterator[_Chunk]
    ) -> Scaling:
        """Return mean and deviation over the training part."""
        count, mean_F, square_F = (
            0,
            np.zeros(len(self.columns.features)),
            np.zeros(len(self.columns.features)),
        )
        for chunk in chunks:
            part_CF = chunk.values_CF[plan.fit_R[chunk.begin : chunk.end]]
            if not len(part_CF):
                continue
            # Chan, Golub and LeVeque (1979): chunks merge without the cancellation of plain sums.
            part_mean_F = part_CF.mean(axis=0)
            apart_F = part_mean_F - mean_F
            total = count + len(part_CF)
            part_CF -= part_mean_F
            square_F += np.einsum("cf,cf->f", part_CF, part_CF) + apart_F**2 * count * len(part_CF) / total
            mean_F = mean_F + apart_F * len(part_CF) / total
            count = total
        std_F = np.sqrt(square_F / max(count, 1))
        target_N = raw_R[(plan.part_R & TRAIN) > 0]
        target_std = float(target_N.std())
        return Scaling(
            feature_names=self.columns.features,
            feature_mean=tuple(mean_F.tolist()),
            feature_std=tuple(
                np.where(std_F > MIN_STD * np.maximum(1.0, np.abs(mean_F)), std_F, 1.0).tolist()
            ),
            target_mean=float(target_N.mean()),
            target_std=target_std if target_std > 0 else 1.0,
            symbols=symbols,
        )

    def _write_rows(
        self,
        writer: CacheWriter,
        plan: RowPlan,
        level_R: Array,
        raw_R: Array,
        symbol_R: npt.NDArray[np.int64],
        scaling: Scaling,
    ) -> None:
        """Write every column but the features."""
        last_R = np.zeros_like(level_R) if self.settings.target is None else level_R
        writer.write("timestamp", 0, self.scan.timestamps_R)
        writer.write("close", 0, level_R if self.settings.target is None else np.full_like(level_R, np.nan))
        writer.write("target_raw", 0, raw_R)
        writer.write("target", 0, ((raw_R - scaling.target_mean) / scaling.target_std).astype(np.float32))
        writer.write("naive", 0, ((last_R - scaling.target_mean) / scaling.target_std).astype(np.float32))
        writer.write("symbol", 0, symbol_R)
        writer.write("segment", 0, plan.segment_R)
        writer.write("part", 0, plan.part_R)


def scale_features(values_CF: Array, scaling: Scaling) -> npt.NDArray[np.float32]:
    """Return features in standard deviations from their mean, cut at `CLIP_SIGMAS`; look-back rows as 0."""
    scaled_CF: Array = values_CF - np.array(scaling.feature_mean)
    scaled_CF /= np.array(scaling.feature_std)
    np.nan_to_num(scaled_CF, copy=False, nan=0.0)
    np.clip(scaled_CF, -CLIP_SIGMAS, CLIP_SIGMAS, out=scaled_CF)
    return scaled_CF.astype(np.float32)


def _symbol_ids(
    path: Path, scanned: Scan, scaling: Scaling | None
) -> tuple[tuple[str, ...], npt.NDArray[np.int64]]:
    """Return the symbols in the order of their ids, and each row's id: a run's own ids when predicting."""
    if scaling is not None and len(scaling.symbols) > 1 and not scanned.symbols:
        have = ", ".join(scaling.symbols[:12])
        raise UserError(
            f"{path}: has no column 'symbol', and the run was trained on several (it knows: {have}). "
            "Add the column, so that it is known whose bars these are."
        )
    if scaling is None or not scaling.symbols or not scanned.symbols:
        return scanned.symbols, scanned.symbol_R
    unknown = [name for name in scanned.symbols if name not in scaling.symbols]
    if unknown and len(scaling.symbols) > 1:
        have = ", ".join(scaling.symbols[:12])
        raise UserError(
            f"{path}: column 'symbol' holds {unknown[0]!r}, which the run never saw (it knows: {have}). "
            "Drop those rows, or train on data that has them."
        )
    symbols = (*scaling.symbols, *unknown)
    ids = np.array([symbols.index(name) for name in scanned.symbols], dtype=np.int64)
    return symbols, ids[scanned.symbol_R]

"""DBN and CSV files to the Parquet that `prepare` reads, streamed in bounded memory.

DBN is Databento's binary format; its prices are integers of 1e-9. Bars (the OHLCV schemas) are taken as
they are, trades become one-minute bars. CSV may be gzipped; the columns that play a part are renamed to
`timestamp`, `symbol`, `open`, `high`, `low`, `close` and `volume`, the rest is kept.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from foxray.data.columns import OHLC, TIMESTAMP, find_timestamp, first_line, is_text
from foxray.data.replacing import replacing
from foxray.errors import UserError

PRICES_PER_UNIT = 1e9
NO_PRICE = np.iinfo(np.int64).max
MINUTE_NS = 60 * 10**9
RECORDS_PER_BLOCK = 500_000
CSV_BLOCK_BYTES = 16 << 20
BAR_SCHEMA = pa.schema(
    [
        (TIMESTAMP, pa.timestamp("ns", "UTC")),
        ("symbol", pa.string()),
        *((name, pa.float64()) for name in OHLC),
        ("volume", pa.int64()),
    ]
)

Bars = dict[str, npt.NDArray[Any]]
"""Bars as arrays: timestamp (ns), instrument, open, high, low, close, volume."""


def convert(src: Path | str, dst: Path | str, *, log: Callable[[str], None] = print) -> Path:
    """Write the DBN (.dbn, .dbn.zst) or CSV (.csv, .csv.gz) file `src` as Parquet to `dst`; return its path.

    Raises `UserError` for a file that is neither, is damaged, or lacks a time; `dst` then stays as it was.
    """
    source, target = Path(src), Path(dst)
    if not source.exists():
        raise UserError(f"{source}: no such file. Check the path.")
    if not source.is_file():
        raise UserError(f"{source}: a directory. Name one .csv, .csv.gz, .dbn or .dbn.zst file.")
    name = source.name.lower()
    if name.endswith((".dbn", ".dbn.zst")):
        tables = _dbn_tables(source)
    elif name.endswith((".csv", ".csv.gz")):
        tables = _csv_tables(source)
    else:
        raise UserError(f"{source}: cannot be converted; allowed are .csv, .csv.gz, .dbn and .dbn.zst files.")
    with replacing(target) as temporary:
        rows = _write(tables, temporary)
        if not rows:
            raise UserError(f"{source}: no rows. Give a file with bars or trades.")
    log(f"{target}: {rows:,} rows")
    return target


def _write(tables: Iterable[pa.Table], path: Path) -> int:
    writer: pq.ParquetWriter | None = None
    rows = 0
    try:
        for table in tables:
            writer = writer or pq.ParquetWriter(path, table.schema)
            writer.write_table(table)
            rows += table.num_rows
    finally:
        if writer is not None:
            writer.close()
    return rows


# DBN ------------------------------------------------------------------------------------------------


def _dbn_tables(path: Path) -> Iterator[pa.Table]:
    try:
        import databento
        from databento.common.symbology import InstrumentMap
    except ImportError as error:
        raise UserError(f"{path}: DBN needs one more package. Run: pip install 'foxray[dbn]'") from error
    try:
        store = databento.DBNStore.from_file(path)
        schema = str(store.schema)
        names = InstrumentMap()
        names.insert_metadata(store.metadata)
        blocks = store.to_ndarray(count=RECORDS_PER_BLOCK) if _is_bars(schema) or schema == "trades" else None
    except Exception as error:
        raise _damaged(path, error) from error
    if blocks is None:
        raise UserError(f"{path}: DBN of schema {schema!r}; allowed are ohlcv-1s, -1m, -1h, -1d and trades.")
    if schema == "trades":
        # A minute may lie across two blocks: the bars of all blocks are merged once more.
        parts = [_merge(_trade_bars(block)) for block in _decoded(path, blocks)]
        if parts:
            whole = _merge({key: np.concatenate([part[key] for part in parts]) for key in parts[0]})
            yield _bar_table(whole, names)
        return
    for block in _decoded(path, blocks):
        yield _bar_table(_ohlcv_bars(block), names)


def _is_bars(schema: str) -> bool:
    return schema.startswith("ohlcv-")


def _damaged(path: Path, error: BaseException) -> UserError:
    return UserError(f"{path}: not a whole DBN file ({first_line(error)}). Download it again.")


def _decoded(path: Path, blocks: Iterator[Any]) -> Iterator[Any]:
    while True:
        try:
            block = next(blocks)
        except StopIteration:
            return
        except Exception as error:
            raise _damaged(path, error) from error
        if len(block):
            yield block


def _ohlcv_bars(block: Any) -> Bars:
    whole = block[np.logical_and.reduce([block[name] != NO_PRICE for name in OHLC])]
    bars: Bars = {name: whole[name] / PRICES_PER_UNIT for name in OHLC}
    return bars | {
        TIMESTAMP: whole["ts_event"].astype(np.int64),
        "instrument": whole["instrument_id"],
        "volume": whole["volume"].astype(np.int64),
    }


def _trade_bars(block: Any) -> Bars:
    """Return each trade as a bar of its own, at the start of its minute."""
    trades = block[(block["action"] == b"T") & (block["price"] != NO_PRICE)]
    price = trades["price"] / PRICES_PER_UNIT
    times = trades["ts_event"].astype(np.int64)
    bars: Bars = dict.fromkeys(OHLC, price)
    return bars | {
        TIMESTAMP: times - times % MINUTE_NS,
        "instrument": trades["instrument_id"],
        "volume": trades["size"].astype(np.int64),
    }


def _merge(bars: Bars) -> Bars:
    """Return one bar for each instrument and time, from bars in the order they happened."""
    order = np.lexsort((bars[TIMESTAMP], bars["instrument"]))
    ordered = {key: values[order] for key, values in bars.items()}
    if not len(order):
        return ordered
    changes = (np.diff(ordered["instrument"]) != 0) | (np.diff(ordered[TIMESTAMP]) != 0)
    starts = np.flatnonzero(np.append(True, changes))
    ends = np.append(starts[1:], len(order)) - 1
    return {
        TIMESTAMP: ordered[TIMESTAMP][starts],
        "instrument": ordered["instrument"][starts],
        "open": ordered["open"][starts],
        "high": np.maximum.reduceat(ordered["high"], starts),
        "low": np.minimum.reduceat(ordered["low"], starts),
        "close": ordered["close"][ends],
        "volume": np.add.reduceat(ordered["volume"], starts),
    }


def _bar_table(bars: Bars, names: Any) -> pa.Table:
    days = bars[TIMESTAMP] // (86_400 * 10**9)
    pairs, place = np.unique(
        np.stack((bars["instrument"].astype(np.int64), days)), axis=1, return_inverse=True
    )
    known = []
    for instrument, day in pairs.T.tolist():
        date = dt.date(1970, 1, 1) + dt.timedelta(days=day)
        known.append(names.resolve(instrument, date) or str(instrument))
    symbols = np.array(known, dtype=object)[place.reshape(-1)]
    columns = [
        pa.array(bars[TIMESTAMP]).cast(BAR_SCHEMA.field(TIMESTAMP).type),
        pa.array(symbols, pa.string()),
    ]
    columns += [pa.array(bars[name]) for name in (*OHLC, "volume")]
    return pa.table(columns, schema=BAR_SCHEMA)


# CSV ------------------------------------------------------------------------------------------------


def _csv_tables(path: Path) -> Iterator[pa.Table]:
    try:
        # The first block tells text and times from numbers; all numbers are then read as float64, because
        # a column of whole numbers may have a fraction, or nothing at all, further on.
        with _open_csv(path, None) as reader:
            first = reader.schema
        time_name, _ = find_timestamp(path, first)
        types = {
            field.name: pa.float64()
            for field in first
            if field.name != time_name and (pa.types.is_integer(field.type) or pa.types.is_null(field.type))
        }
        named = {name: name.lower() for name in first.names if name.lower() in (*OHLC, "volume", "symbol")}
        named[time_name] = TIMESTAMP
        named = {old: new for old, new in named.items() if new == old or new not in first.names}
        texts = {
            field.name: pa.string()
            for field in first
            if is_text(field.type) or field.name.lower() == "symbol"
        }
        with _open_csv(path, types | texts) as reader:
            for batch in reader:
                table = pa.Table.from_batches([batch])
                yield table.rename_columns([named.get(name, name) for name in table.schema.names])
    except (pa.ArrowException, OSError, EOFError) as error:
        raise UserError(
            f"{path}: not a readable CSV file ({first_line(error)}). Repair that line."
        ) from error


def _open_csv(path: Path, types: dict[str, pa.DataType] | None) -> pyarrow.csv.CSVStreamingReader:
    compression = "gzip" if path.name.lower().endswith(".gz") else None
    return pyarrow.csv.open_csv(
        pa.input_stream(str(path), compression=compression),
        read_options=pyarrow.csv.ReadOptions(block_size=CSV_BLOCK_BYTES),
        convert_options=pyarrow.csv.ConvertOptions(column_types=types, strings_can_be_null=True),
    )

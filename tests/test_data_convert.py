"""DBN and CSV become Parquet that `prepare` reads, whole or not at all."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from data_bars import SHARED, table_of

from foxray.data import convert as module
from foxray.data.convert import convert
from foxray.data.prepare import prepare
from foxray.data.settings import DataSettings
from foxray.errors import UserError

needs_dbn = pytest.mark.skipif(not (SHARED / "glbx.trades.dbn.zst").exists(), reason="no shared DBN files")


def quiet(text: str) -> None:
    """Hear nothing."""


def refusal(src: Path, dst: Path) -> str:
    with pytest.raises(UserError) as caught:
        convert(src, dst, log=quiet)
    assert str(src) in str(caught.value) and "\n" not in str(caught.value)
    assert not list(dst.parent.glob(f"*{dst.name}*")), "nothing half-written"
    return str(caught.value)


@pytest.mark.parametrize("packed", [False, True])
def test_csv_there_and_back(tmp_path: Path, packed: bool) -> None:
    table = table_of(1200)
    plain = tmp_path / "bars.csv"
    pa.csv.write_csv(table, plain)
    src = plain
    if packed:
        src = tmp_path / "bars.csv.gz"
        src.write_bytes(gzip.compress(plain.read_bytes()))
    out = convert(src, tmp_path / "out.parquet", log=quiet)
    read = pq.read_table(out)
    assert read.column_names == table.column_names
    for name in ("open", "high", "low", "close", "volume"):
        np.testing.assert_array_equal(read[name].to_numpy(), table[name].to_numpy())
    data = prepare(out, DataSettings(seq_len=10), tmp_path, log=quiet)
    assert data.timestamps_R.tolist() == table["timestamp"].cast(pa.int64()).to_pylist()


def test_csv_columns_that_play_a_part_are_renamed(tmp_path: Path) -> None:
    src = tmp_path / "x.csv"
    src.write_text("Datetime,Open,Close,Extra,Symbol\n2024-01-02T00:00:00Z,1,2,5,007\n")
    table = pq.read_table(convert(src, tmp_path / "x.parquet", log=quiet))
    assert table.column_names == ["timestamp", "open", "close", "Extra", "symbol"]
    assert table["symbol"].to_pylist() == ["007"]


def test_csv_whole_numbers_that_turn_into_fractions_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CSV_BLOCK_BYTES", 4096)
    lines = ["timestamp,a"] + [f"{1_704_000_000_000_000_000 + i},{i}" for i in range(2000)]
    lines += [f"{1_704_000_000_000_009_000 + i},{i}.5" for i in range(2000)]
    src = tmp_path / "x.csv"
    src.write_text("\n".join(lines))
    table = pq.read_table(convert(src, tmp_path / "x.parquet", log=quiet))
    assert len(table) == 4000 and table["a"].to_pylist()[-1] == 1999.5


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("x.csv", b"", "not a readable CSV"),
        ("x.csv", b"timestamp,a\n1,2,3\n", "not a readable CSV"),
        ("x.csv", b"when,a\n1,2\n", "no column 'timestamp'"),
        ("x.csv", b"timestamp,a\n", "no rows"),
        ("x.csv.gz", b"timestamp,a\n1,2\n", "not a readable CSV"),
        ("x.dbn", b"", "not a whole DBN"),
        ("x.dbn.zst", b"\x28\xb5\x2f\xfd garbage", "not a whole DBN"),
        ("x.xlsx", b"PK", "allowed are .csv"),
    ],
)
def test_files_that_cannot_be_converted(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    src = tmp_path / name
    src.write_bytes(content)
    assert said in refusal(src, tmp_path / "out.parquet")


def test_a_torn_gzip_file(tmp_path: Path) -> None:
    src = tmp_path / "x.csv.gz"
    rng = np.random.default_rng(0)
    text = "timestamp,a\n" + "\n".join(f"{i},{v}" for i, v in enumerate(rng.random(5000)))
    src.write_bytes(gzip.compress(text.encode())[:-2000])
    assert "not a readable CSV" in refusal(src, tmp_path / "out.parquet")


def test_missing_and_directory(tmp_path: Path) -> None:
    assert "no such file" in refusal(tmp_path / "none.csv", tmp_path / "out.parquet")
    (tmp_path / "folder.csv").mkdir()
    assert "a directory" in refusal(tmp_path / "folder.csv", tmp_path / "out.parquet")


def test_what_was_there_stays_when_a_conversion_fails(tmp_path: Path) -> None:
    src, dst = tmp_path / "x.csv", tmp_path / "out.parquet"
    src.write_bytes(b"timestamp,a\n1,2,3\n")
    dst.write_bytes(b"before")
    with pytest.raises(UserError):
        convert(src, dst, log=quiet)
    assert dst.read_bytes() == b"before"


@needs_dbn
@pytest.mark.parametrize(
    ("schema", "step_seconds"), [("ohlcv-1s", None), ("ohlcv-1m", 60), ("ohlcv-1h", 3600)]
)
def test_dbn_bars(tmp_path: Path, schema: str, step_seconds: int | None) -> None:
    table = pq.read_table(convert(SHARED / f"glbx.{schema}.dbn.zst", tmp_path / "out.parquet", log=quiet))
    assert table.schema.equals(module.BAR_SCHEMA)
    assert set(table["symbol"].to_pylist()) == {"ESH1"} and len(table) == 4
    assert table["open"][0].as_py() == 3702.75
    times = table["timestamp"].cast(pa.int64()).to_numpy()
    assert times[0] == 1_609_113_600 * 10**9
    if step_seconds is not None:
        assert (np.diff(times) == step_seconds * 10**9).all()


@needs_dbn
@pytest.mark.parametrize("block", [1, 3, 500_000])
def test_dbn_trades_become_minutes_whatever_the_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(module, "RECORDS_PER_BLOCK", block)
    table = pq.read_table(convert(SHARED / "glbx.trades.dbn.zst", tmp_path / "out.parquet", log=quiet))
    row = {name: values[0] for name, values in table.to_pydict().items()}
    assert len(table) == 1 and row["symbol"] == "ESH1" and row["timestamp"].second == 0
    assert (row["open"], row["high"], row["low"], row["close"], row["volume"]) == (
        3702.75,
        3702.75,
        3702.5,
        3702.75,
        4,
    )


def test_trades_are_merged_in_order() -> None:
    def trades(times: list[int], prices: list[float], sizes: list[int]) -> module.Bars:
        price = np.array(prices)
        at = np.array(times, dtype=np.int64) * 10**9
        return dict.fromkeys(("open", "high", "low", "close"), price) | {
            "timestamp": at - at % module.MINUTE_NS,
            "instrument": np.full(len(times), 5),
            "volume": np.array(sizes),
        }

    merged = module._merge(trades([0, 59, 60, 61], [10.0, 12.0, 9.0, 8.0], [1, 2, 3, 4]))
    assert merged["timestamp"].tolist() == [0, 60 * 10**9]
    assert merged["open"].tolist() == [10, 9] and merged["close"].tolist() == [12, 8]
    assert merged["high"].tolist() == [12, 9] and merged["low"].tolist() == [10, 8]
    assert merged["volume"].tolist() == [3, 7]


def test_without_the_extra_the_command_to_install_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "databento", None)
    src = tmp_path / "x.dbn"
    src.write_bytes(b"DBN")
    assert "pip install 'foxray[dbn]'" in refusal(src, tmp_path / "out.parquet")

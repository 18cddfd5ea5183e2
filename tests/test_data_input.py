"""Input that cannot be used is refused in one line that names it; what can be mended is mended and said."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from data_bars import minutes, table_of, write

from foxray.data.prepare import prepare
from foxray.data.prepared import PreparedData
from foxray.data.settings import DataSettings
from foxray.errors import UserError

CHOSEN = DataSettings(seq_len=4, num_features=None, target="a")
ROWS = 100


def columns(**changes: object) -> dict[str, object]:
    rng = np.random.default_rng(0)
    made = {"timestamp": minutes(ROWS), "a": rng.random(ROWS), "b": rng.random(ROWS)} | changes
    return {name: values for name, values in made.items() if values is not None}


def heard(path: Path, settings: DataSettings = CHOSEN) -> tuple[PreparedData, str]:
    lines: list[str] = []
    data = prepare(path, settings, path.parent / "cache", log=lines.append)
    assert data.notes == lines
    return data, "\n".join(lines)


def refusal(path: Path, settings: DataSettings = CHOSEN) -> str:
    cache = path.parent / "cache"
    with pytest.raises(UserError) as caught:
        prepare(path, settings, cache, log=lambda text: None)
    text = str(caught.value)
    assert str(path) in text, "the file is named"
    assert "\n" not in text, "one line"
    assert text.endswith("."), "with a next step"
    assert not cache.exists() or not list(cache.iterdir()), "nothing half-written"
    return text


# Files ----------------------------------------------------------------------------------------------


def test_missing_file(tmp_path: Path) -> None:
    assert "no such file" in refusal(tmp_path / "none.parquet")


def test_directory(tmp_path: Path) -> None:
    (tmp_path / "folder.parquet").mkdir()
    assert "a directory" in refusal(tmp_path / "folder.parquet")


@pytest.mark.parametrize("content", [b"", b"P", b"timestamp,open\n2024-01-01,1\n"])
def test_not_parquet(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bars.csv"
    path.write_bytes(content)
    text = refusal(path)
    assert "not a Parquet file" in text and "foxray convert bars.csv" in text


@pytest.mark.parametrize("share", [0.1, 0.5, 0.999])
def test_truncated_parquet(tmp_path: Path, share: float) -> None:
    path = write(tmp_path / "bars.parquet", columns())
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    assert "truncated" in refusal(path)


def test_damaged_parquet(tmp_path: Path) -> None:
    path = write(tmp_path / "bars.parquet", columns())
    content = bytearray(path.read_bytes())
    footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    content[footer : footer + 32] = bytes(32)
    path.write_bytes(content)
    assert "damaged" in refusal(path)


def test_damaged_pages(tmp_path: Path) -> None:
    path = write(tmp_path / "bars.parquet", columns())
    content = bytearray(path.read_bytes())
    content[4:400] = b"\xff" * 396
    path.write_bytes(content)
    assert "damaged" in refusal(path)


def test_no_rows(tmp_path: Path) -> None:
    assert "no rows" in refusal(write(tmp_path / "x.parquet", pa.table(columns()).slice(0, 0)))


def test_cache_folder_that_cannot_be_written(tmp_path: Path) -> None:
    path = write(tmp_path / "bars.parquet", columns())
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be written .* Choose a writable"):
        prepare(path, CHOSEN, tmp_path / "file" / "cache", log=print)


# Columns --------------------------------------------------------------------------------------------


def test_no_timestamp(tmp_path: Path) -> None:
    text = refusal(write(tmp_path / "x.parquet", columns(timestamp=None)))
    assert "no column 'timestamp'" in text and "a, b" in text


def test_a_single_other_time_is_taken_and_said(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", columns(timestamp=None, ts_event=minutes(ROWS)))
    assert "'ts_event' is taken as the time" in heard(path)[1]


def test_two_other_times_are_ambiguous(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", columns(timestamp=None, date=minutes(ROWS), time=minutes(ROWS)))
    text = refusal(path)
    assert "'date'" in text and "'time'" in text and "Rename" in text


def test_no_numeric_column(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", {"timestamp": minutes(ROWS), "symbol": ["A"] * ROWS})
    assert "no numeric column" in refusal(path)


@pytest.mark.parametrize("encoded", [False, True])
def test_a_column_of_strings(tmp_path: Path, encoded: bool) -> None:
    words = pa.array([None, "up", "down"] + ["up"] * (ROWS - 3))
    path = write(tmp_path / "x.parquet", columns(mood=words.dictionary_encode() if encoded else words))
    text = refusal(path)
    assert "column 'mood' holds strings (the first is 'up')" in text


def test_a_column_of_lists(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", columns(book=pa.array([[1.0]] * ROWS)))
    assert "column 'book' holds values of type list" in refusal(path)


def test_all_nan_columns_are_named(tmp_path: Path) -> None:
    nothing = np.full(ROWS, np.nan)
    path = write(tmp_path / "x.parquet", columns(void=nothing, empty=pa.nulls(ROWS), b=nothing))
    text = refusal(path)
    assert "columns 'b', 'void', 'empty' hold no number" in text


def test_target_that_is_missing(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", columns())
    text = refusal(path, DataSettings(target="c", num_features=None))
    assert "'c'" in text and "a, b" in text
    assert "--target" in refusal(path, DataSettings(num_features=None))


def test_more_features_than_there_are(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", columns())
    assert "--num-features is 3, but there are 2" in refusal(path, DataSettings(target="a", num_features=3))
    bars = table_of(600)
    text = refusal(write(tmp_path / "y.parquet", bars), DataSettings(num_features=226))
    assert "--num-features is 226, but there are 225" in text
    text = refusal(write(tmp_path / "z.parquet", bars.drop_columns("volume")), DataSettings(num_features=225))
    assert "there are 188" in text and "'volume'" in text


def test_own_column_named_like_a_derived_one(tmp_path: Path) -> None:
    table = table_of(600).append_column("rsi_14", pa.array(np.zeros(600)))
    assert "'rsi_14'" in refusal(write(tmp_path / "x.parquet", table), DataSettings())


def test_without_all_prices_nothing_is_derived_and_that_is_said(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", columns(close=1 + np.random.default_rng(1).random(ROWS)))
    data, said = heard(path, DataSettings(seq_len=4, num_features=None))
    assert data.feature_names == ["a", "b", "close"] and "no open, high, low column" in said


def test_capital_letters_in_the_names_of_bars(tmp_path: Path) -> None:
    bars = table_of(600).rename_columns(["Timestamp", "Open", "High", "Low", "Close", "Volume"])
    data, said = heard(write(tmp_path / "x.parquet", bars), DataSettings(seq_len=10))
    assert data.num_features == 225 and said == ""


# Values ---------------------------------------------------------------------------------------------


def test_rows_with_nan_and_infinities_are_dropped_and_counted(tmp_path: Path) -> None:
    a_R, b_R = np.random.default_rng(0).random((2, ROWS))
    a_R[3], a_R[4], b_R[4], b_R[9] = np.nan, np.inf, -np.inf, np.nan
    data, said = heard(write(tmp_path / "x.parquet", columns(a=a_R, b=b_R)))
    assert data.num_rows == ROWS - 3
    assert "dropped 3 of 100 rows" in said and "a 2, b 2" in said
    assert torch.isfinite(data.features_RF).all()


def test_one_nan_does_not_poison_the_averages_after_it(tmp_path: Path) -> None:
    bars = table_of(1000)
    close = bars["close"].to_numpy().copy()
    close[500] = np.nan
    with_nan = bars.set_column(bars.schema.get_field_index("close"), "close", pa.array(close))
    without = pa.concat_tables([bars.slice(0, 500), bars.slice(501)])
    chosen = DataSettings(seq_len=10)
    data, _ = heard(write(tmp_path / "x.parquet", with_nan), chosen)
    clean, _ = heard(write(tmp_path / "y.parquet", without), chosen)
    assert torch.equal(data.features_RF, clean.features_RF)


def test_a_column_that_is_not_used_may_be_nan(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", columns(b=np.where(np.arange(ROWS) < 50, np.nan, 1.0)))
    data, said = heard(path, DataSettings(seq_len=4, num_features=1, target="a"))
    assert data.num_rows == ROWS and said == ""


def test_prices_of_zero_or_less_are_dropped_and_said(tmp_path: Path) -> None:
    bars = table_of(700)
    low = bars["low"].to_numpy().copy()
    low[[5, 6]] = 0.0, -37.63
    path = write(tmp_path / "x.parquet", bars.set_column(3, "low", pa.array(low)))
    data, said = heard(path, DataSettings(seq_len=10))
    assert data.num_rows == 698 and "with a price of 0 or less 2" in said


def test_nothing_usable_is_left(tmp_path: Path) -> None:
    even_R = np.arange(ROWS) % 2 == 0
    path = write(
        tmp_path / "x.parquet", columns(a=np.where(even_R, np.nan, 1), b=np.where(even_R, 1, np.nan))
    )
    assert "no usable row is left" in refusal(path)


def test_unsorted_and_duplicate_times_are_mended_and_said(tmp_path: Path) -> None:
    plain = columns()
    times, a_R = np.asarray(plain["timestamp"]), np.asarray(plain["a"])
    # The row at time 50 comes a second time, at the end, with another value: the last one counts.
    order = np.concatenate((np.arange(40, ROWS), np.arange(40), [50]))
    mixed = {name: np.asarray(values)[order] for name, values in plain.items()}
    mixed["a"] = np.append(a_R[order[:-1]], 0.5)
    data, said = heard(write(tmp_path / "x.parquet", mixed))
    assert "sorted by time: 1 rows" in said or "sorted by time: 2 rows" in said
    assert "dropped 1 rows with a duplicate timestamp" in said
    assert data.timestamps_R.tolist() == times.tolist()
    expected, _ = heard(write(tmp_path / "y.parquet", columns(a=np.where(np.arange(ROWS) == 50, 0.5, a_R))))
    assert torch.equal(data.features_RF, expected.features_RF)


def test_symbols_that_take_turns_are_neither_unsorted_nor_duplicate(tmp_path: Path) -> None:
    _, said = heard(write(tmp_path / "x.parquet", table_of(400, symbols=("A", "B"))), DataSettings(seq_len=5))
    assert said == ""


def test_too_few_rows_say_how_many_are_needed(tmp_path: Path) -> None:
    text = refusal(write(tmp_path / "x.parquet", table_of(200)), DataSettings())
    assert "200 usable rows" in text and "61 rows" in text and "270 rows of look-back" in text
    assert "too few rows" in refusal(write(tmp_path / "y.parquet", pa.table(columns()).slice(0, 4)))


def test_daily_bars_are_told_about_the_session_gap(tmp_path: Path) -> None:
    days = minutes(1)[0] + np.arange(ROWS, dtype=np.int64) * 86_400 * 10**9
    path = write(tmp_path / "x.parquet", columns(timestamp=days))
    assert "raise --session-gap" in refusal(path)
    data, _ = heard(path, DataSettings(seq_len=4, num_features=None, target="a", session_gap_minutes=5000))
    assert len(data.all_windows_N) == ROWS - 3


def test_no_validation_window_is_said(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", columns())
    text = refusal(path, DataSettings(seq_len=30, num_features=None, target="a"))
    assert "validation window" in text and "--train-fraction" in text
    whole = DataSettings(seq_len=30, num_features=None, target="a", train_fraction=1.0)
    assert len(heard(path, whole)[0].valid_windows_N) == 0


# Times ----------------------------------------------------------------------------------------------

MOMENTS = [dt.datetime(2024, 1, 2, 3, 4, tzinfo=dt.UTC) + dt.timedelta(minutes=i) for i in range(ROWS)]
FIRST_NS = int(MOMENTS[0].timestamp()) * 10**9

FORMS: dict[str, Callable[[], pa.Array]] = {
    "seconds": lambda: pa.array(MOMENTS, pa.timestamp("s", "UTC")),
    "milliseconds in New York": lambda: pa.array(MOMENTS, pa.timestamp("ms", "America/New_York")),
    "microseconds without a zone": lambda: pa.array(
        [m.replace(tzinfo=None) for m in MOMENTS], pa.timestamp("us")
    ),
    "nanoseconds": lambda: pa.array(MOMENTS, pa.timestamp("ns", "UTC")),
    "ISO strings": lambda: pa.array([m.isoformat() for m in MOMENTS]),
    "ISO strings with Z": lambda: pa.array([m.strftime("%Y-%m-%dT%H:%M:%S.%fZ") for m in MOMENTS]),
    "ISO strings without a zone": lambda: pa.array([m.strftime("%Y-%m-%d %H:%M:%S") for m in MOMENTS]),
    "ISO strings of both kinds": lambda: pa.array(
        [m.isoformat() if m.minute % 2 else m.strftime("%Y-%m-%d %H:%M:%S") for m in MOMENTS]
    ),
    "encoded strings": lambda: pa.array([m.isoformat() for m in MOMENTS]).dictionary_encode(),
    "epoch nanoseconds": lambda: pa.array([int(m.timestamp()) * 10**9 for m in MOMENTS]),
    "unsigned epoch nanoseconds": lambda: pa.array(
        [int(m.timestamp()) * 10**9 for m in MOMENTS], pa.uint64()
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_time(tmp_path: Path, form: str) -> None:
    data, said = heard(write(tmp_path / "x.parquet", columns(timestamp=FORMS[form]())))
    assert data.timestamps_R[0] == FIRST_NS and data.timestamps_R[-1] == FIRST_NS + (ROWS - 1) * 60 * 10**9
    assert said == ""


@pytest.mark.parametrize("unit", [1, 10**3, 10**6])
def test_epochs_that_are_not_nanoseconds(tmp_path: Path, unit: int) -> None:
    path = write(tmp_path / "x.parquet", columns(timestamp=minutes(ROWS) // (10**9 // unit)))
    assert "not a time in ns since 1970" in refusal(path)


def test_a_text_that_is_no_time(tmp_path: Path) -> None:
    texts = [m.isoformat() for m in MOMENTS]
    texts[7] = "yesterday"
    text = refusal(write(tmp_path / "x.parquet", columns(timestamp=texts)))
    assert "column 'timestamp' holds 'yesterday'" in text


def test_a_time_of_another_type(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", columns(timestamp=np.arange(ROWS) * 1.5))
    assert "is of type double" in refusal(path)


def test_rows_without_a_time_are_dropped_and_said(tmp_path: Path) -> None:
    times = pa.array([None, *MOMENTS[1:]], pa.timestamp("us", "UTC"))
    data, said = heard(write(tmp_path / "x.parquet", columns(timestamp=times)))
    assert data.num_rows == ROWS - 1 and "without a time 1" in said


def test_rows_without_a_symbol(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", columns(symbol=[None] + ["A"] * (ROWS - 1)))
    assert "column 'symbol' is empty in 1 rows" in refusal(path)


def test_other_numeric_types(tmp_path: Path) -> None:
    path = write(
        tmp_path / "x.parquet",
        columns(
            small=np.arange(ROWS, dtype=np.int8),
            half=np.arange(ROWS, dtype=np.float16),
            exact=pa.array([Decimal(i) / 4 for i in range(ROWS)], pa.decimal128(10, 2)),
        ),
    )
    data, _ = heard(path)
    assert data.feature_names == ["a", "b", "small", "half", "exact"]
    assert torch.isfinite(data.features_RF).all()
    assert pq.read_schema(path).names[-1] == "exact"

"""Windows: each equals a plain slice, none crosses a pause, a symbol, the split or the look-back.

Legend: R rows, B windows of a batch, T rows of a window, F features.
"""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foxray.data.plan import TRAIN, VALID, WHOLE, plan_rows
from foxray.data.settings import DataSettings
from foxray.data.windows import WindowGather
from foxray.errors import UserError

MINUTE_NS = 60 * 10**9


@settings(deadline=None)
@given(
    rows=st.integers(5, 60), seq_len=st.integers(1, 5), features=st.integers(1, 7), seed=st.integers(0, 99)
)
def test_gathered_windows_equal_plain_slices(rows: int, seq_len: int, features: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    table_RF = torch.randn(rows, features, generator=generator)
    last_B = torch.randint(seq_len - 1, rows, (11,), generator=generator)
    gather = WindowGather(table_RF, seq_len)
    expected_BTF = torch.stack([table_RF[row - seq_len + 1 : row + 1] for row in last_B.tolist()])
    assert torch.equal(gather(last_B), expected_BTF)
    out_BTF = torch.empty(11, seq_len, features)
    assert gather(last_B, out=out_BTF) is out_BTF
    assert torch.equal(out_BTF, expected_BTF)


def test_the_view_takes_no_memory_and_sees_the_table() -> None:
    table_RF = torch.zeros(100, 3)
    gather = WindowGather(table_RF, 10)
    table_RF[50] = 7.0
    assert gather(torch.tensor([50]))[0, -1].tolist() == [7.0, 7.0, 7.0]


def test_a_row_without_a_whole_window_is_refused() -> None:
    gather = WindowGather(torch.zeros(100, 3), 10)
    for row in (8, 100):
        with pytest.raises((IndexError, RuntimeError)):
            gather(torch.tensor([row]))
    with pytest.raises(ValueError, match="hold no window"):
        WindowGather(torch.zeros(9, 3), 10)
    with pytest.raises(ValueError, match="contiguous"):
        WindowGather(torch.zeros(3, 100).T, 10)


@st.composite
def rows_of_symbols(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Return times and symbols: some symbols, each with pauses of 1 to 90 minutes."""
    times, symbols = [], []
    for symbol in range(draw(st.integers(1, 3))):
        steps = draw(st.lists(st.sampled_from([1, 1, 1, 2, 29, 30, 31, 90]), min_size=1, max_size=40))
        times.append(draw(st.integers(0, 50)) + np.cumsum(steps))
        symbols.append(np.full(len(steps), symbol))
    return np.concatenate(times).astype(np.int64) * MINUTE_NS, np.concatenate(symbols).astype(np.int64)


@settings(max_examples=200, deadline=None)
@given(
    data=rows_of_symbols(),
    seq_len=st.integers(1, 6),
    horizon=st.integers(1, 3),
    fraction=st.sampled_from([0.3, 0.5, 0.8, 1.0]),
    lookback=st.integers(0, 5),
)
def test_windows_never_cross_anything(
    data: tuple[np.ndarray, np.ndarray], seq_len: int, horizon: int, fraction: float, lookback: int
) -> None:
    times_R, symbol_R = data
    chosen = DataSettings(seq_len=seq_len, horizon=horizon, train_fraction=fraction)
    plan = plan_rows(times_R, symbol_R, chosen, lookback)
    for row in range(len(times_R)):
        # The plain definition, one row at a time.
        span = range(row - seq_len + 1, row + 1)
        first_of_symbol = int(np.flatnonzero(symbol_R == symbol_R[row])[0])
        whole = span.start >= first_of_symbol + lookback and unbroken(times_R, symbol_R, span.start, row)
        ahead = row + horizon
        target = ahead < len(times_R) and unbroken(times_R, symbol_R, row, ahead)
        train = whole and target and times_R[ahead] < plan.split_ns
        valid = whole and target and times_R[span.start] >= plan.split_ns
        assert plan.part_R[row] == whole * WHOLE + train * TRAIN + valid * VALID
        assert plan.target_row_R[row] == (ahead if target else -1)
    assert not plan.fit_R[times_R >= plan.split_ns].any()


def unbroken(times_R: np.ndarray, symbol_R: np.ndarray, first: int, last: int) -> bool:
    if first < 0 or (symbol_R[first : last + 1] != symbol_R[last]).any():
        return False
    return bool((np.diff(times_R[first : last + 1]) <= 30 * MINUTE_NS).all())


def test_the_split_is_one_time_for_all_symbols() -> None:
    times_R = np.concatenate((np.arange(100), np.arange(50, 150))) * MINUTE_NS
    symbol_R = np.repeat([0, 1], 100)
    plan = plan_rows(times_R, symbol_R, DataSettings(seq_len=3, train_fraction=0.5), 0)
    train_R, valid_R = (plan.part_R & TRAIN) > 0, (plan.part_R & VALID) > 0
    assert times_R[train_R].max() < plan.split_ns <= times_R[valid_R].min() - 2 * MINUTE_NS
    assert (times_R < plan.split_ns).sum() == pytest.approx(100, abs=2)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seq_len", 0), ("horizon", 0), ("num_features", 0), ("train_fraction", 0.0), ("train_fraction", 1.1),
        ("session_gap_minutes", 0.0), ("session_gap_minutes", float("nan")), ("window_stride", 0),
    ],
)  # fmt: skip
def test_settings_out_of_range_name_their_flag(name: str, value: float) -> None:
    flag = "--" + name.removesuffix("_minutes").replace("_", "-")
    with pytest.raises(UserError, match=flag):
        DataSettings(**{name: value})


def test_settings_survive_json() -> None:
    chosen = DataSettings(seq_len=5, target="x", num_features=None)
    assert DataSettings.from_dict({**chosen.to_dict(), "unknown": 1}) == chosen


def test_settings_load_without_torch() -> None:
    program = "import sys, foxray.data.settings; sys.exit('torch' in sys.modules or 'pyarrow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0

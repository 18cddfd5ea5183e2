"""A prepared file: what stands in it, that it is mapped and kept, and that chunks do not show."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from data_bars import bars_of, minutes, real_or_synthetic, table_of, write

from foxray.data.features import ORDER, compute_features, derived_names, lookback_rows
from foxray.data.prepare import prepare
from foxray.data.prepared import PreparedData
from foxray.data.scaling import CLIP_SIGMAS, Scaling
from foxray.data.settings import DataSettings
from foxray.data.windows import WindowGather
from foxray.errors import UserError

SMALL = DataSettings(seq_len=10, num_features=20)


def quiet(text: str) -> None:
    """Hear nothing."""


@pytest.fixture(scope="module")
def bars_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("bars") / "bars.parquet", real_or_synthetic(12_000))


def own_columns(rows: int = 400, **more: np.ndarray) -> dict[str, object]:
    rng = np.random.default_rng(0)
    return {"timestamp": minutes(rows), "a": rng.standard_normal(rows), "b": rng.random(rows) * 1e6, **more}


def test_features_are_scaled_on_the_training_part_only(bars_file: Path, tmp_path: Path) -> None:
    table = real_or_synthetic(12_000)
    data = prepare(bars_file, DataSettings(), tmp_path, log=quiet)
    plain_RF = compute_features(bars_of(table), ORDER)
    lookback = lookback_rows(ORDER)
    fit_R = data.timestamps_R.numpy() < data.split_ns
    fit_R[:lookback] = False
    mean_F, std_F = plain_RF[fit_R].mean(axis=0), plain_RF[fit_R].std(axis=0)
    expected_RF = np.clip((plain_RF - mean_F) / std_F, -CLIP_SIGMAS, CLIP_SIGMAS)
    np.testing.assert_allclose(data.features_RF.numpy()[lookback:], expected_RF[lookback:], atol=2e-6)
    assert data.feature_names == list(ORDER)
    assert (data.features_RF[:lookback][np.isnan(plain_RF[:lookback])] == 0).all()

    # Changing what comes after the split changes nothing before it.
    cut = int((data.timestamps_R < data.split_ns).sum())
    changed = table.to_pydict()
    changed["close"] = [v * (1.0 if i < cut else 1.001) for i, v in enumerate(changed["close"])]
    other = prepare(write(tmp_path / "changed.parquet", changed), DataSettings(), tmp_path, log=quiet)
    assert torch.equal(other.features_RF[:cut], data.features_RF[:cut])
    assert other.scaling == data.scaling


def test_the_target_is_the_log_return_over_the_horizon(bars_file: Path, tmp_path: Path) -> None:
    data = prepare(bars_file, DataSettings(seq_len=10, horizon=5, num_features=3), tmp_path, log=quiet)
    close_R = real_or_synthetic(12_000)["close"].to_numpy()
    rows_N = torch.cat((data.train_windows_N, data.valid_windows_N)).numpy()
    expected_N = np.log(close_R[rows_N + 5] / close_R[rows_N])
    np.testing.assert_allclose(data.target_raw_R[rows_N], expected_N, rtol=1e-12)
    np.testing.assert_allclose(data.unscale_target(data.target_R[rows_N]), expected_N, atol=1e-9)
    train_N = data.target_R[data.train_windows_N]
    assert abs(float(train_N.mean())) < 1e-4 and abs(float(train_N.std()) - 1) < 1e-3
    assert not torch.isnan(train_N).any()


def test_it_is_mapped_without_a_copy_and_pickled_as_a_path(bars_file: Path, tmp_path: Path) -> None:
    data = prepare(bars_file, SMALL, tmp_path, log=quiet)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = PreparedData.open(data.path)
        table_RF = again.features_RF
    assert table_RF.is_contiguous() and table_RF.dtype == torch.float32
    mapped = Path("/proc/self/maps").read_text()
    spans = [line.split()[0].split("-") for line in mapped.splitlines() if line.endswith(str(data.path))]
    for view in (table_RF, again.target_R, again.symbol_R, again.timestamps_R):
        assert any(int(begin, 16) <= view.data_ptr() < int(end, 16) for begin, end in spans)
    assert len(pickle.dumps(again)) < 500
    assert torch.equal(pickle.loads(pickle.dumps(again)).features_RF, table_RF)


def test_a_second_call_opens_what_is_there(bars_file: Path, tmp_path: Path) -> None:
    first = prepare(bars_file, SMALL, tmp_path, log=quiet)
    stamp = first.path.stat().st_mtime_ns
    (tmp_path / "elsewhere").mkdir()
    copy = write(tmp_path / "elsewhere" / bars_file.name, real_or_synthetic(12_000))
    assert prepare(copy, SMALL, tmp_path, log=quiet).path == first.path
    assert first.path.stat().st_mtime_ns == stamp
    assert prepare(bars_file, DataSettings(seq_len=11, num_features=20), tmp_path, log=quiet).key != first.key
    content = write(tmp_path / bars_file.name, real_or_synthetic(11_999))
    assert prepare(content, SMALL, tmp_path, log=quiet).key != first.key
    assert not list(tmp_path.glob(".*"))


def test_a_broken_prepared_file_is_made_anew(bars_file: Path, tmp_path: Path) -> None:
    first = prepare(bars_file, SMALL, tmp_path, log=quiet)
    expected_RF = first.features_RF.clone()
    first.path.unlink()
    first.path.write_bytes(b"ARROW1\0\0 torn")
    heard: list[str] = []
    again = prepare(bars_file, SMALL, tmp_path, log=heard.append)
    assert torch.equal(again.features_RF, expected_RF)
    assert any("made anew" in text for text in heard)


@pytest.mark.parametrize("chunk_rows", [1000, 4321])
def test_chunks_agree_with_the_whole(bars_file: Path, tmp_path: Path, chunk_rows: int) -> None:
    whole = prepare(bars_file, DataSettings(), tmp_path / "whole", log=quiet)
    parts = prepare(bars_file, DataSettings(), tmp_path / "parts", log=quiet, chunk_rows=chunk_rows)
    assert torch.allclose(parts.features_RF, whole.features_RF, rtol=0, atol=1e-6)
    assert torch.equal(parts.target_R.nan_to_num(), whole.target_R.nan_to_num())
    assert torch.equal(parts.train_windows_N, whole.train_windows_N)


def test_chunks_agree_where_the_market_never_closes(tmp_path: Path) -> None:
    rows = 9000
    bars = table_of(rows).set_column(0, "timestamp", pa.array(minutes(rows)))
    file = write(tmp_path / "bars.parquet", bars)
    whole = prepare(file, DataSettings(), tmp_path / "whole", log=quiet)
    parts = prepare(file, DataSettings(), tmp_path / "parts", log=quiet, chunk_rows=2500)
    assert torch.allclose(parts.features_RF, whole.features_RF, rtol=0, atol=1e-6)


def test_symbols_are_apart(tmp_path: Path) -> None:
    both = table_of(1500, symbols=("B", "A"))
    chosen = DataSettings(seq_len=10)
    data = prepare(write(tmp_path / "both.parquet", both), chosen, tmp_path, log=quiet, chunk_rows=700)
    assert data.symbols == ["A", "B"]
    assert data.symbol_R.tolist() == [0] * 1500 + [1] * 1500
    for number, symbol in enumerate(data.symbols):
        alone = both.filter(pa.compute.equal(both["symbol"], symbol)).drop_columns("symbol")
        plain_RF = compute_features(bars_of(alone), ORDER)
        scaled_RF = (plain_RF - np.array(data.scaling.feature_mean)) / np.array(data.scaling.feature_std)
        own_R = (data.symbol_R == number).numpy()
        np.testing.assert_allclose(
            data.features_RF.numpy()[own_R][270:], np.clip(scaled_RF, -10, 10)[270:], atol=2e-5
        )
    ends_N = torch.cat((data.train_windows_N, data.valid_windows_N))
    assert torch.equal(data.symbol_R[ends_N], data.symbol_R[ends_N - 9])


def test_own_columns_are_used_as_they_are_with_a_target(tmp_path: Path) -> None:
    columns = own_columns(flag=np.arange(400) % 2 == 0)
    chosen = DataSettings(seq_len=4, horizon=2, num_features=None, target="b")
    data = prepare(write(tmp_path / "own.parquet", columns), chosen, tmp_path, log=quiet)
    assert data.feature_names == ["a", "b", "flag"]
    row = int(data.train_windows_N[7])
    b_R = np.asarray(columns["b"])
    assert float(data.unscale_target(data.target_R[row])) == pytest.approx(b_R[row + 2], rel=1e-6)
    window_TF = WindowGather(data.features_RF, 4)(torch.tensor([row]))[0]
    own_TF = window_TF.double() * torch.tensor(data.scaling.feature_std) + torch.tensor(
        data.scaling.feature_mean
    )
    np.testing.assert_allclose(own_TF[:, 0], np.asarray(columns["a"])[row - 3 : row + 1], atol=1e-6)
    with pytest.raises(ValueError, match="last_rows_B"):
        data.naive_forecast([0.5])
    forecast_BQ = data.naive_forecast([0.1, 0.5, 0.9], torch.tensor([row, row + 1]))
    assert float(data.unscale_target(forecast_BQ[0, 1])) == pytest.approx(b_R[row], rel=1e-6)
    assert forecast_BQ[0, 0] == forecast_BQ[1, 0]


def test_own_columns_come_before_derived_ones(tmp_path: Path) -> None:
    table = table_of(1000)
    table = table.append_column("mood", pa.array(np.random.default_rng(0).random(1000)))
    chosen = DataSettings(seq_len=10, num_features=225)
    data = prepare(write(tmp_path / "mood.parquet", table), chosen, tmp_path, log=quiet)
    assert data.feature_names == ["mood", *ORDER[:224]]
    everything = DataSettings(seq_len=10)
    assert prepare(tmp_path / "mood.parquet", everything, tmp_path, log=quiet).num_features == 226


def test_volume_may_be_missing(tmp_path: Path) -> None:
    bars = write(tmp_path / "bars.parquet", table_of(1000).drop_columns("volume"))
    data = prepare(bars, DataSettings(seq_len=10), tmp_path, log=quiet)
    assert data.feature_names == list(derived_names(has_volume=False))


def test_225_columns_of_ones_own(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    columns = {"timestamp": minutes(400), **{f"c{i}": rng.standard_normal(400) for i in range(225)}}
    data = prepare(write(tmp_path / "wide.parquet", columns), DataSettings(target="c0"), tmp_path, log=quiet)
    assert data.features_RF.shape == (400, 225)
    assert len(data.train_windows_N) == 260


def test_a_constant_column_scales_to_zero(tmp_path: Path) -> None:
    columns = own_columns(still=np.full(400, 0.1))
    chosen = DataSettings(seq_len=4, num_features=None, target="a")
    data = prepare(write(tmp_path / "still.parquet", columns), chosen, tmp_path, log=quiet)
    assert float(data.features_RF[:, 2].abs().max()) < 1e-6


def test_the_naive_forecast(bars_file: Path, tmp_path: Path) -> None:
    data = prepare(bars_file, SMALL, tmp_path, log=quiet)
    low, middle, high = data.unscale_target(data.naive_forecast([0.1, 0.5, 0.9])).tolist()
    raw_N = data.target_raw_R[data.train_windows_N].numpy()
    assert middle == pytest.approx(0.0, abs=1e-9)
    assert (low, high) == pytest.approx(tuple(np.quantile(raw_N, [0.1, 0.9])), rel=1e-5)


def test_window_stride_takes_every_nth(bars_file: Path, tmp_path: Path) -> None:
    every = prepare(bars_file, SMALL, tmp_path, log=quiet)
    third = prepare(
        bars_file, DataSettings(seq_len=10, num_features=20, window_stride=3), tmp_path, log=quiet
    )
    assert torch.equal(third.train_windows_N, every.train_windows_N[::3])
    assert torch.equal(third.valid_windows_N, every.valid_windows_N[::3])


def test_new_bars_take_the_scaling_of_the_run(bars_file: Path, tmp_path: Path) -> None:
    run = prepare(bars_file, SMALL, tmp_path, log=quiet)
    scaling = Scaling.from_dict(run.scaling.to_dict())
    assert scaling == run.scaling
    new_file = write(tmp_path / "new.parquet", real_or_synthetic(12_000).slice(0, 700))
    new = prepare(new_file, SMALL, tmp_path, log=quiet, scaling=scaling)
    assert new.scaling == run.scaling
    assert torch.equal(new.features_RF, run.features_RF[:700])
    # The last row has no target yet, and is what a prediction is for.
    assert int(new.all_windows_N[-1]) == 699
    assert torch.isnan(new.target_R[699])
    assert not list(tmp_path.glob(".*"))


def test_new_bars_keep_the_ids_of_the_runs_symbols(tmp_path: Path) -> None:
    run = prepare(
        write(tmp_path / "r.parquet", table_of(900, symbols=("A", "B"))), SMALL, tmp_path, log=quiet
    )
    new = write(tmp_path / "n.parquet", table_of(900, symbols=("B",)))
    data = prepare(new, SMALL, tmp_path, log=quiet, scaling=run.scaling)
    assert set(data.symbol_R.tolist()) == {1}
    stranger = write(tmp_path / "s.parquet", table_of(900, symbols=("C",)))
    with pytest.raises(UserError, match=r"s\.parquet: column 'symbol' holds 'C'"):
        prepare(stranger, SMALL, tmp_path, log=quiet, scaling=run.scaling)


def test_new_bars_need_the_features_of_the_run_but_no_target(tmp_path: Path) -> None:
    chosen = DataSettings(seq_len=4, target="t", num_features=2)
    run_file = write(tmp_path / "run.parquet", own_columns(t=np.random.default_rng(5).random(400)))
    run = prepare(run_file, chosen, tmp_path, log=quiet)
    assert run.feature_names == ["a", "b"]
    data = prepare(
        write(tmp_path / "new.parquet", own_columns(more=np.zeros(400))),
        chosen,
        tmp_path,
        log=quiet,
        scaling=run.scaling,
    )
    assert data.feature_names == ["a", "b"] and torch.isnan(data.target_R).all()
    assert len(data.all_windows_N) == 397
    only_a = {name: values for name, values in own_columns().items() if name != "b"}
    with pytest.raises(UserError, match=r"1 of the run's 2 features are missing, the first is 'b'"):
        prepare(write(tmp_path / "less.parquet", only_a), chosen, tmp_path, log=quiet, scaling=run.scaling)


def test_duration_is_the_span_of_the_bars(tmp_path: Path) -> None:
    chosen = DataSettings(seq_len=4, num_features=None, target="a")
    data = prepare(write(tmp_path / "d.parquet", own_columns(1441)), chosen, tmp_path, log=quiet)
    assert data.duration_days == pytest.approx(1.0)
    assert data.num_rows == 1441


def test_bars_without_a_symbol_are_refused_by_the_scaling_of_several(tmp_path: Path) -> None:
    from foxray.data.synth import synth

    settings = DataSettings(seq_len=16, num_features=8)
    several = prepare(
        synth(tmp_path / "several.parquet", days=3, symbols=["ES", "NQ"]),
        settings,
        tmp_path,
        log=lambda line: None,
    )
    plain = synth(tmp_path / "plain.parquet", days=3)
    with pytest.raises(UserError, match=r"plain\.parquet: has no column 'symbol'.*ES, NQ"):
        prepare(plain, settings, tmp_path, log=lambda line: None, scaling=several.scaling)

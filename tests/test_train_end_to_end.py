"""`foxray train` on a real Ray cluster, running out of memory for real."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Cli = Callable[..., "subprocess.CompletedProcess[str]"]

pytestmark = pytest.mark.slow

SMALL = [
    "--device",
    "cpu",
    "--num-features",
    24,
    "--seq-len",
    16,
    "--hidden-dim",
    8,
    "--num-heads",
    2,
    "--window-stride",
    2,
]


def show(cli: Cli, run: str) -> dict[str, Any]:
    done = cli("show", run, "--json")
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("workers", [1, 2])
def test_out_of_memory_is_recovered_recorded_and_ends_well(
    foxray_cli: Cli, synthetic_bars: Path, workers: int
) -> None:
    done = foxray_cli(
        "train", "--parquet-file", synthetic_bars, *SMALL,
        "--batch-size", 256, "--workers", workers, "--emulate-gpu", "12MiB", "--run-id", "r", "--max-oom-retries", 6,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Training OOM detected (attempt 1/6), reducing batch_size: 256 → 128" in done.stdout
    assert "🏋️  Training Phase: " in done.stdout
    assert "📊 Total Time: " in done.stdout
    summary = show(foxray_cli, "r")
    (execution,) = summary["executions"]
    assert execution["outcome"] == "success"
    assert execution["oom_retries"] >= 1
    assert execution["final_batch_size"] <= 128
    (training,) = [phase for phase in execution["phases"] if phase["phase"] == "training"]
    assert len(training["peak_bytes"]) == workers
    assert all(0 < peak <= 12 * 2**20 for peak in training["peak_bytes"].values())
    assert foxray_cli("runs").stdout.count("success") >= 1


def test_memory_exhausted_ends_with_status_3_and_the_workarounds(
    foxray_cli: Cli, synthetic_bars: Path
) -> None:
    done = foxray_cli(
        "train", "--parquet-file", synthetic_bars, *SMALL,
        "--batch-size", 64, "--min-batch-size", 32, "--emulate-gpu", "1500KiB", "--run-id", "r",
    )  # fmt: skip
    assert done.returncode == 3, done.stdout + done.stderr
    assert "Training OOM: batch_size=32 (minimum=32) is too large for available GPU memory." in done.stderr
    assert "Workarounds" in done.stderr
    assert "Traceback" not in done.stderr
    assert show(foxray_cli, "r")["executions"][0]["outcome"] == "oom"


def test_without_recovery_the_first_oom_ends_the_run(foxray_cli: Cli, synthetic_bars: Path) -> None:
    done = foxray_cli(
        "train", "--parquet-file", synthetic_bars, *SMALL,
        "--batch-size", 256, "--emulate-gpu", "12MiB", "--no-oom-recovery", "--run-id", "r",
    )  # fmt: skip
    assert done.returncode == 3, done.stdout + done.stderr
    assert show(foxray_cli, "r")["executions"][0]["oom_retries"] == 0


def test_resume_after_a_killed_driver_continues_and_predict_reads_the_run(
    foxray_cli: Cli, synthetic_bars: Path, ray_cluster: str, tmp_path: Path
) -> None:
    arguments = [
        "train", "--parquet-file", synthetic_bars, *SMALL, "--batch-size", 32, "--epochs", 3,
        "--checkpoint-every", 5, "--run-id", "r",
    ]  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "foxray", *map(str, arguments)],
        cwd=tmp_path,
        env=os.environ | {"RAY_ADDRESS": ray_cluster},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    folder = tmp_path / "foxray-runs" / "runs" / "r" / "checkpoints"
    deadline = time.monotonic() + 120
    while not list(folder.glob("*.json")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = show(foxray_cli, "r")
    done = foxray_cli("train", "--resume", "r")
    assert done.returncode == 0, done.stdout + done.stderr
    after = show(foxray_cli, "r")
    assert len(after["executions"]) == 2
    assert after["executions"][1]["outcome"] == "success"
    assert len(before["executions"]) == 1
    output = tmp_path / "out" / "forecast.parquet"
    predicted = foxray_cli("predict", "r", "--parquet-file", synthetic_bars, "--output", output)
    assert predicted.returncode == 0, predicted.stdout + predicted.stderr
    import pyarrow.parquet as pq

    table = pq.read_table(output)
    assert {"timestamp", "p10", "p50", "p90"} <= set(table.column_names)
    assert table.num_rows > 1000


def test_ctrl_c_ends_cleanly_as_cancelled(
    foxray_cli: Cli, synthetic_bars: Path, ray_cluster: str, tmp_path: Path
) -> None:
    arguments = [
        "train",
        "--parquet-file",
        synthetic_bars,
        *SMALL,
        "--batch-size",
        16,
        "--epochs",
        50,
        "--run-id",
        "r",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "foxray", *map(str, arguments)],
        cwd=tmp_path,
        env=os.environ | {"RAY_ADDRESS": ray_cluster},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "Training Phase: Running" in line:
            break
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    summary = show(foxray_cli, "r")
    assert summary["executions"][0]["outcome"] == "cancelled"
    assert list((tmp_path / "foxray-runs" / "runs" / "r" / "checkpoints").glob("*.pt"))


def test_json_log_lines_are_json(foxray_cli: Cli, synthetic_bars: Path) -> None:
    done = foxray_cli(
        "train",
        "--parquet-file",
        synthetic_bars,
        *SMALL,
        "--batch-size",
        128,
        "--log-format",
        "json",
        "--run-id",
        "r",
    )
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert all({"time", "level", "message"} <= record.keys() for record in records[:-1])

"""`foxray train` on a real Ray cluster, running out of memory for real."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

Cli = Callable[..., "subprocess.CompletedProcess[str]"]
Start = Callable[[str], "subprocess.Popen[str]"]

pytestmark = pytest.mark.slow

SMALL = "--device cpu --num-features 24 --seq-len 16 --hidden-dim 8 --num-heads 2 --window-stride 2".split()


@pytest.fixture
def started(
    ray_cluster: str, synthetic_bars: Path, tmp_path: Path
) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Starts `foxray train ...` as run `r` and lets it go on; it is ended with the test."""
    processes = []

    def start(options: str) -> "subprocess.Popen[str]":
        arguments = [
            "train",
            "--parquet-file",
            str(synthetic_bars),
            *SMALL,
            "--run-id",
            "r",
            *options.split(),
        ]
        process = subprocess.Popen(
            [sys.executable, "-m", "foxray", *arguments],
            cwd=tmp_path,
            env=os.environ | {"RAY_ADDRESS": ray_cluster},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def wait_for(folder: Path, pattern: str, process: "subprocess.Popen[str]") -> Path:
    """The first file of a pattern in a folder, as soon as there is one."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        for found in folder.glob(pattern):
            return found
        time.sleep(0.1)
    raise AssertionError(f"no {pattern} in {folder}; the run ended with {process.poll()}")


def show(cli: Cli, run: str) -> dict[str, Any]:
    done = cli("show", run, "--json")
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("workers", [1, 2])
def test_out_of_memory_is_recovered_recorded_and_ends_well(
    foxray_cli: Cli, synthetic_bars: Path, workers: int
) -> None:
    options = f"--batch-size 256 --workers {workers} --emulate-gpu 12MiB --run-id r --max-oom-retries 6"
    done = foxray_cli("train", "--parquet-file", synthetic_bars, *SMALL, *options.split())
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
    foxray_cli: Cli, started: Start, synthetic_bars: Path, tmp_path: Path
) -> None:
    process = started("--batch-size 32 --epochs 3 --checkpoint-every 5")
    wait_for(tmp_path / "foxray-runs/runs/r/checkpoints", "*.json", process)
    process.kill()
    process.wait()
    assert len(show(foxray_cli, "r")["executions"]) == 1
    done = foxray_cli("train", "--resume", "r")
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = show(foxray_cli, "r")["executions"]
    assert first["outcome"] == "lost" and second["outcome"] == "success"
    assert second["attempts"][0]["step"] >= 5
    output = tmp_path / "out" / "forecast.parquet"
    predicted = foxray_cli("predict", "r", "--parquet-file", synthetic_bars, "--output", output)
    assert predicted.returncode == 0, predicted.stdout + predicted.stderr
    table = pq.read_table(output)
    assert table.column_names == ["timestamp", "p10", "p50", "p90"]
    assert table.num_rows > 1000
    assert pc.sum(pc.less(table["p10"], table["p90"])).as_py() > 0.95 * table.num_rows


def test_a_killed_worker_goes_on_from_the_last_committed_state_with_half_the_batch(
    foxray_cli: Cli, started: Start, tmp_path: Path
) -> None:
    process = started("--batch-size 32 --epochs 4 --checkpoint-every 5 --workers 2")
    run = tmp_path / "foxray-runs/runs/r"
    wait_for(run / "checkpoints", "*.json", process)
    worker = json.loads(next((run / "events").glob("*worker_started*")).read_text())
    os.kill(worker["pid"], signal.SIGKILL)
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, output + errors
    (execution,) = show(foxray_cli, "r")["executions"]
    assert execution["outcome"] == "success"
    assert [d["action"] for d in execution["decisions"]] == ["fresh_workers"]
    (incident,) = execution["incidents"]
    assert incident["incident_kind"] == "host" and incident["fresh_reason"] == "process killed"
    restarted = [a for a in execution["attempts"] if a["phase"] == "training" and a["batch_size"] == 16]
    assert len(restarted) == 2 and all(a["step"] >= 5 for a in restarted)


def test_ctrl_c_ends_cleanly_as_cancelled(foxray_cli: Cli, started: Start, tmp_path: Path) -> None:
    process = started("--batch-size 16 --epochs 50")
    assert process.stdout is not None
    for line in process.stdout:
        if "Training Phase: Running" in line:
            break
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    (execution,) = show(foxray_cli, "r")["executions"]
    assert execution["outcome"] == "cancelled"
    assert list((tmp_path / "foxray-runs/runs/r/checkpoints").glob("*.pt"))


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
    assert all({"time", "level", "message"} <= record.keys() for record in records)
    assert records[-1]["run"]["outcome"] == "success"

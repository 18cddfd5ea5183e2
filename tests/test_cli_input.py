"""Wrong input: one clear line that names what is wrong, exit status 2, nothing written."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from foxray.cli import _run

Write = Callable[[Path], None]

COLUMNS = {
    "timestamp": pa.array([i * 60_000_000_000 for i in range(600)], pa.timestamp("ns", tz="UTC")),
    "open": pa.array([1.0 + i % 7 for i in range(600)]),
    "high": pa.array([2.0 + i % 7 for i in range(600)]),
    "low": pa.array([0.5 + i % 7 for i in range(600)]),
    "close": pa.array([1.5 + i % 5 for i in range(600)]),
    "volume": pa.array([10.0 + i for i in range(600)]),
}


@pytest.fixture
def here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """Runs `foxray ARGS...` in this process, for what ends before Ray starts: torch is imported once."""
    monkeypatch.chdir(tmp_path)

    def run_here(*arguments: Any) -> "subprocess.CompletedProcess[str]":
        words = [str(argument) for argument in arguments]
        status = _run(words)
        captured = capfd.readouterr()
        return subprocess.CompletedProcess(words, status, captured.out, captured.err)

    return run_here


def run(tmp_path: Path, *arguments: Any, **env: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "foxray", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
        env=os.environ | env,
    )


def table(path: Path, **changes: Any) -> None:
    pq.write_table(pa.table({k: v for k, v in (COLUMNS | changes).items() if v is not None}), path)


def truncated(path: Path) -> None:
    table(path)
    path.write_bytes(path.read_bytes()[:-200])


FILES: dict[str, tuple[Write, list[str]]] = {
    "missing": (lambda path: None, ["bars.parquet", "no such file"]),
    "a folder": (lambda path: path.mkdir(), ["bars.parquet"]),
    "not Parquet": (
        lambda path: path.write_text("a,b\n1,2\n") and None,
        ["bars.parquet", "not a Parquet file"],
    ),
    "truncated": (truncated, ["bars.parquet"]),
    "no numeric column": (
        lambda path: pq.write_table(pa.table({"timestamp": COLUMNS["timestamp"]}), path),
        ["bars.parquet", "numeric"],
    ),
    "a column of strings": (
        lambda path: table(path, volume=pa.array(["a"] * 600)),
        ["bars.parquet", "volume", "'a'"],
    ),
    "no timestamp": (lambda path: table(path, timestamp=None), ["bars.parquet", "timestamp"]),
    "an all-NaN column": (
        lambda path: table(path, volume=pa.array([float("nan")] * 600)),
        ["bars.parquet", "volume", "NaN"],
    ),
    "too few rows": (
        lambda path: pq.write_table(pa.table({k: v[:50] for k, v in COLUMNS.items()}), path),
        ["bars.parquet", "50"],
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_a_bad_file_is_named_with_the_next_step(tmp_path: Path, here: Any, case: str) -> None:
    write, words = FILES[case]
    write(tmp_path / "bars.parquet")
    done = here("train", "--parquet-file", "bars.parquet", "--seq-len", 16)
    assert done.returncode == 2, done.stdout + done.stderr
    errors = [line for line in done.stderr.splitlines() if line]
    assert len(errors) == 1, done.stderr
    for word in words:
        assert word in errors[0]
    assert not list(tmp_path.glob("foxray-runs/runs/*"))
    assert not list(tmp_path.glob("foxray-runs/prepared/*"))


FLAGS: dict[str, tuple[list[Any], list[str]]] = {
    "batch size 0": (["--batch-size", 0], ["--batch-size", "0"]),
    "negative batch size": (["--batch-size", -3], ["--batch-size", "-3"]),
    "batch size above the dataset": (["--batch-size", 100_000], ["--batch-size 100000", "training windows"]),
    "too many features": (["--num-features", 9999], ["9999"]),
    "unknown target": (["--target", "bid"], ["bid"]),
    "unknown card": (["--emulate-gpu", "RTX 3049"], ["RTX 3049", "3050"]),
    "bad size": (["--emulate-gpu", "12 parsecs"], ["12 parsecs"]),
    "retries out of range": (["--max-oom-retries", 11], ["--max-oom-retries", "11", "10"]),
    "storage not writable": (["--storage", "/proc/nowhere"], ["/proc/nowhere"]),
    "resume with a preset": (["--resume", "r", "--preset", "manual"], ["--preset manual", "--resume"]),
    "unknown run": (["--resume", "nope"], ["nope", "foxray-runs"]),
    "unknown preset": (["--preset", "fast"], ["fast", "conservative"]),
    "unknown option in the file": (["--config", "train.yaml"], ["epoch", "train.yaml"]),
    "not a number": (["--epochs", "many"], ["--epochs", "many"]),
}


@pytest.mark.parametrize("case", FLAGS)
def test_a_bad_flag_is_named_with_what_is_allowed(tmp_path: Path, here: Any, case: str) -> None:
    arguments, words = FLAGS[case]
    table(tmp_path / "bars.parquet")
    (tmp_path / "train.yaml").write_text("epoch: 3\n")
    done = here("train", "--parquet-file", "bars.parquet", "--seq-len", 16, *arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr
    assert not list(tmp_path.glob("foxray-runs/runs/*"))


def test_a_wrong_flag_is_said_without_importing_torch_or_ray(tmp_path: Path) -> None:
    code = (
        "import sys; from foxray.cli import _run; status = _run(sys.argv[1:]); "
        "print(status, sorted({'torch', 'ray'} & sys.modules.keys()))"
    )
    for flags in (
        ["--batch-size", "0"],
        ["--emulate-gpu", "RTX 3049"],
        ["--preset", "fast"],
        ["--resume", "no"],
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, "train", "--parquet-file", "x.parquet", *flags],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            timeout=60,
        )
        assert done.stdout.strip() == "2 []", (flags, done.stdout, done.stderr)


@pytest.mark.slow
def test_what_the_cluster_does_not_have_is_said_with_what_it_has(tmp_path: Path, ray_cluster: str) -> None:
    table(tmp_path / "bars.parquet")
    options = "train --parquet-file bars.parquet --seq-len 16 --device cpu --workers 99"
    many = run(tmp_path, *options.split(), RAY_ADDRESS=ray_cluster)
    assert many.returncode == 2, many.stderr
    assert "--workers 99" in many.stderr and "4 CPUs" in many.stderr
    assert not list(tmp_path.glob("foxray-runs/runs/*"))


@pytest.mark.slow
def test_cuda_without_a_gpu_is_said(tmp_path: Path) -> None:
    """On a cluster of its own, since the shared one declares GPUs."""
    table(tmp_path / "bars.parquet")
    options = "train --parquet-file bars.parquet --seq-len 16 --device cuda"
    done = run(tmp_path, *options.split(), RAY_ADDRESS="")
    assert done.returncode == 2, done.stderr
    assert "--device cuda" in done.stderr and "no GPU" in done.stderr


def test_help_names_the_flags_of_the_guide(tmp_path: Path) -> None:
    done = run(tmp_path, "train", "--help", COLUMNS="200")
    for flag in (
        "--parquet-file", "--epochs", "--batch-size", "--num-features", "--verbose", "--min-batch-size",
        "--max-oom-retries",
    ):  # fmt: skip
        assert flag in done.stdout

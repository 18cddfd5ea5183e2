"""Whatever is killed, and whenever: the run goes on, and ends as if nothing had happened."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from foxray.ledger.store import Ledger
from foxray.ledger.summary import RunSummary, summarize_run
from foxray.training.checkpoint import Checkpoints, Restored

pytestmark = pytest.mark.slow

OPTIONS = (
    "--device cpu --num-features 16 --seq-len 16 --hidden-dim 8 --num-heads 2 --window-stride 4 "
    "--batch-size 32 --epochs 3 --checkpoint-every 4 --run-id r"
).split()
TOLERANCE = 1e-5

Start = Callable[[Path, list[str]], "subprocess.Popen[bytes]"]


@pytest.fixture(scope="module")
def start(ray_cluster: str, synthetic_bars: Path) -> Start:
    def start_in(folder: Path, arguments: list[str]) -> "subprocess.Popen[bytes]":
        folder.mkdir(exist_ok=True)
        return subprocess.Popen(
            [sys.executable, "-m", "foxray", "train", "--storage", ".", *arguments],
            cwd=folder,
            env=os.environ | {"RAY_ADDRESS": ray_cluster},
            stdout=subprocess.DEVNULL,
            stderr=(folder / "errors.txt").open("ab"),
        )

    return start_in


@pytest.fixture(scope="module")
def undisturbed(start: Start, synthetic_bars: Path, tmp_path_factory: pytest.TempPathFactory) -> Restored:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert start(folder, ["--parquet-file", str(synthetic_bars), *OPTIONS]).wait(timeout=300) == 0
    return latest(folder)


def latest(folder: Path) -> Restored:
    restored = Checkpoints(f"{folder}/runs/r/checkpoints").load_latest()
    assert restored is not None
    return restored


def summary(folder: Path) -> RunSummary:
    found = summarize_run(Ledger(folder).run("r"))
    assert found is not None
    return found


def newest_process(title: str) -> int:
    """Process id of the newest process with that title, as Ray sets it."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "cmdline").read_bytes().startswith(title.encode()):
                found.append(
                    (int((entry / "stat").read_text().rsplit(")", 1)[1].split()[19]), int(entry.name))
                )
        except OSError:  # it ended meanwhile
            continue
    return max(found)[1]


def victim_of(what: str, folder: Path, driver: "subprocess.Popen[bytes]") -> int:
    if what == "driver":
        return driver.pid
    if what == "coordinator":
        return newest_process("ray::Coordinator")
    started = sorted((folder / "runs/r/events").glob("*worker_started*"))
    return int(json.loads(started[-1].read_text())["pid"])


def kill_at(moment: random.Random, what: str, folder: Path, driver: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 180
    while not list((folder / "runs/r/events").glob("*attempt_started*")):
        assert driver.poll() is None and time.monotonic() < deadline, (folder / "errors.txt").read_text()
        time.sleep(0.05)
    time.sleep(moment.uniform(0.0, 3.0))
    try:
        os.kill(victim_of(what, folder, driver), signal.SIGKILL)
    except ProcessLookupError:
        assert driver.wait(timeout=60) == 0, "only a run that has ended may have lost the victim by itself"


def check(start: Start, bars: Path, folder: Path, undisturbed: Restored, what: str, seed: int) -> None:
    # Two workers of 16 make the same steps as one of 32.
    workers = ["--workers", "2", "--batch-size", "16"] if what == "worker" else []
    process = start(folder, ["--parquet-file", str(bars), *OPTIONS, *workers])
    kill_at(random.Random(seed), what, folder, process)
    status = process.wait(timeout=300)
    if what == "worker":
        assert status == 0, (folder / "errors.txt").read_text()
    else:
        assert start(folder, ["--resume", "r"]).wait(timeout=300) == 0, (folder / "errors.txt").read_text()
    ended = latest(folder)
    run = summary(folder)
    assert run.outcome == "success"
    events = Ledger(folder).run("r").events()
    assert len({event.event_id for event in events}) == len(events)
    assert run.oom_retries == len([d for d in run.decisions if d.granted]) <= 1
    assert ended.state.step == undisturbed.state.step
    for name, tensor in undisturbed.model.items():
        assert (ended.model[name] - tensor).abs().max() <= TOLERANCE, name


@pytest.mark.parametrize("what", ["driver", "coordinator", "worker"])
def test_a_run_that_lost_a_process_ends_like_the_undisturbed_one(
    start: Start, synthetic_bars: Path, undisturbed: Restored, tmp_path: Path, what: str
) -> None:
    check(start, synthetic_bars, tmp_path / "run", undisturbed, what, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("what", ["driver", "coordinator", "worker"])
def test_thirty_kills_at_random_moments(
    start: Start, synthetic_bars: Path, undisturbed: Restored, tmp_path: Path, what: str
) -> None:
    for seed in range(30):
        check(start, synthetic_bars, tmp_path / str(seed), undisturbed, what, seed)


def test_a_full_disk_keeps_the_last_good_checkpoint(tmp_path: Path) -> None:
    """A file system of its own, too small for a second checkpoint."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a tmpfs needs root")
    try:
        from foxray.training.checkpoint import CommittedState

        checkpoints = Checkpoints(str(disk / "checkpoints"))
        tensors = {"w": torch.ones(150_000)}
        checkpoints.save(CommittedState(step=1), tensors, {})
        with pytest.raises(OSError, match="No space left"):
            checkpoints.save(CommittedState(step=2), tensors, {})
        restored = checkpoints.load_latest()
        assert restored is not None and restored.state.step == 1
        assert not list(disk.glob("**/*.tmp"))
    finally:
        subprocess.run(["umount", disk], check=True)

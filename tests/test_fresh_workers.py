"""Each reason for fresh workers, forced in a real worker group: the run goes on from the last committed
state with half the batch, and ends well."""

import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foxray.ledger.store import Ledger
from foxray.ledger.summary import RunSummary, summarize_run
from foxray.training.config import load_config

pytestmark = pytest.mark.slow

BATCH_SIZE = 32
FAULT_AT_CALL = 13


def _hold_memory(loss: Callable[..., Any], *arguments: Any) -> Any:
    import torch

    _hold_memory.held = torch.zeros(1 << 20)  # type: ignore[attr-defined] - 4 MiB that nobody gives back
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def _lose_context(loss: Callable[..., Any], *arguments: Any) -> Any:
    import torch

    lost = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    lost.error_code = 700
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.") from lost


def _kill_this_process(loss: Callable[..., Any], *arguments: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def _run_out_in_the_all_reduce(loss: Callable[..., Any], *arguments: Any) -> Any:
    import torch
    import torch.distributed as dist

    real = dist.all_reduce

    def once(*_: Any, **__: Any) -> None:
        dist.all_reduce = real
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    dist.all_reduce = once
    return loss(*arguments)


def _break_the_collective(loss: Callable[..., Any], *arguments: Any) -> Any:
    """The other rank waits in the all-reduce of this step and sees the connection close."""
    import torch.distributed as dist

    dist.destroy_process_group()
    raise RuntimeError("[../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4711")


def _faulty_worker(loop_config: dict[str, Any], *, fault: Any, flag: str) -> Any:
    """Runs the real worker; once in the run, on rank 0, `fault` takes the place of a loss."""
    import ray.train

    from foxray.driver.worker import run_worker
    from foxray.workloads.tft import TftWorkload

    if ray.train.get_context().get_world_rank() == 0 and not Path(flag).exists():
        real, calls = TftWorkload.loss_sum, 0

        def loss_sum(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls != FAULT_AT_CALL or Path(flag).exists():
                return real(*arguments)
            Path(flag).touch()
            return fault(real, *arguments)

        TftWorkload.loss_sum = loss_sum  # type: ignore[method-assign]
    return run_worker(loop_config)


@pytest.fixture
def run(ray_cluster: str, synthetic_bars: Path, tmp_path: Path) -> Callable[[Any, int], RunSummary]:
    def run_with(fault: Any, workers: int) -> RunSummary:
        from foxray.driver.run import run_training

        config = load_config(
            {
                "parquet_file": synthetic_bars,
                "num_features": 24,
                "seq_len": 16,
                "hidden_dim": 8,
                "num_heads": 2,
                "window_stride": 4,
                "batch_size": BATCH_SIZE,
                "workers": workers,
                "emulate_gpu": "64MiB",
                "checkpoint_every": 5,
                "storage": str(tmp_path),
            }
        )
        worker = functools.partial(_faulty_worker, fault=fault, flag=str(tmp_path / "fault-happened"))
        run_training(config, run_id="r", on_view=lambda view: None, worker=worker)
        summary = summarize_run(Ledger(tmp_path).run("r"))
        assert summary is not None
        return summary

    return run_with


@pytest.mark.parametrize(
    ("fault", "workers", "reason", "resumed_at_step"),
    [
        # The process is whole, so it writes the state of its last committed step: nothing is redone.
        (_hold_memory, 1, "not back at baseline", FAULT_AT_CALL - 1),
        # The context or the process is gone: the last checkpoint it is.
        (_lose_context, 1, "CUDA context lost", 10),
        (_kill_this_process, 2, "process killed", 10),
        (_run_out_in_the_all_reduce, 2, "broken collective", FAULT_AT_CALL - 1),
    ],
)
def test_fresh_workers_go_on_from_the_committed_state(
    run: Callable[[Any, int], RunSummary], fault: Any, workers: int, reason: str, resumed_at_step: int
) -> None:
    summary = run(fault, workers)
    assert summary.outcome == "success"
    assert [d.action for d in summary.decisions] == ["fresh_workers"]
    assert [d.batch_size for d in summary.decisions] == [BATCH_SIZE // 2]
    (incident,) = summary.incidents
    assert reason in (incident.fresh_reason or "")
    restarted = [a for a in summary.attempts if a.phase == "training" and a.batch_size == BATCH_SIZE // 2]
    assert len(restarted) == workers
    assert {a.step for a in restarted} == {resumed_at_step}
    assert summary.oom_retries == 1
    assert len(summary.recovery_seconds) == 1


def test_a_broken_collective_counts_as_lost_workers_not_as_memory(
    run: Callable[[Any, int], RunSummary],
) -> None:
    summary = run(_break_the_collective, 2)
    assert summary.outcome == "success"
    assert summary.decisions == [] and summary.oom_retries == 0
    (lost,) = summary.executions[0].workers_lost
    assert lost.restart and "collective" in lost.reason
    assert {a.step for a in summary.attempts if a.phase == "training"} == {0, 10}

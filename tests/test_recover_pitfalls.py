"""Where retrying after out-of-memory has gone wrong in other tools, one test for each kind of bug report."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tft_rig import TinyWorkload, tiny_trainer, weights
from torch import Tensor, nn

from foxray.driver.coordinator import Coordinator
from foxray.driver.resume import find_resume
from foxray.errors import MemoryExhausted
from foxray.ledger import events as ev
from foxray.ledger.store import Ledger
from foxray.memory.budget import Budget, current_budget, memory_budget
from foxray.oom import Incident, OomPolicy
from foxray.training.config import TrainConfig
from foxray.training.loop import Trainer
from foxray.training.schedule import learning_rate_at

ROOM = 1 << 30


def fail_in(trainer: Trainer, budget: Budget, *, steps: tuple[int, ...], allocation: int = 40) -> None:
    """Run out of memory once in each of these optimizer steps (counted from 0), when the run comes there."""
    if 0 in steps:
        budget.fail_at(allocation)
    trainer._on_commit = lambda _: budget.fail_at(allocation) if trainer.state.step in steps else None


@pytest.fixture
def built(tmp_path: Path) -> Any:
    """Builds a trainer inside of a roomy budget, runs it, and gives back what there is to look at."""

    def run(workload: TinyWorkload, *, steps: tuple[int, ...], **settings: Any) -> Any:
        with memory_budget(ROOM) as budget:
            trainer, authority = tiny_trainer(tmp_path, workload, **settings)
            trainer._build()
            trainer._build = lambda: None  # type: ignore[method-assign]
            fail_in(trainer, budget, steps=steps)
            metrics = trainer.train()
            budget.fail_at(None)
        return trainer, authority, metrics

    return run


def sizes(workload: TinyWorkload) -> list[int]:
    return [len(piece) for piece in workload.pieces]


def test_a_retry_splits_the_whole_batch_not_one_that_is_split_already(built: Any) -> None:
    workload = TinyWorkload()
    built(workload, steps=(0, 1))
    assert sizes(workload) == [64, 32, 32, 32, 16, 16, 16, 16]
    assert workload.pieces[1] + workload.pieces[2] == workload.pieces[0]


def test_later_batches_have_the_new_size_too(built: Any) -> None:
    workload = TinyWorkload()
    built(workload, steps=(0,), epochs=3)
    assert set(sizes(workload)[1:]) == {32}


def test_no_limit_set_on_the_way_stays(built: Any, tmp_path: Path) -> None:
    """Neither on how long the run is, nor on memory, also where recovery gave up."""
    trainer, _, _ = built(TinyWorkload(), steps=(0, 3), epochs=3)
    assert (trainer.state.step, trainer.state.epoch) == (6, 3)
    with memory_budget(ROOM) as budget:
        trainer, _ = tiny_trainer(tmp_path / "other", TinyWorkload(), max_retries=0)
        fail_in(trainer, budget, steps=(1,))
        with pytest.raises(MemoryExhausted):
            trainer.train()
        assert budget.limit_bytes == ROOM
    assert current_budget() is None


def test_the_step_counter_goes_on(built: Any) -> None:
    trainer, authority, _ = built(TinyWorkload(), steps=(1, 3), epochs=2)
    assert [epoch["step"] for epoch in authority.epochs] == [2, 4]
    assert [Path(path).name for path in authority.checkpoints] == [
        "step-00000002-e0001.pt",
        "step-00000004-e0002.pt",
    ]
    counters = {float(state["step"]) for state in trainer._optimizer.optimizer.state.values()}
    assert counters == {4.0}


def test_fresh_workers_and_a_resumed_run_do_not_start_at_the_size_that_failed(tmp_path: Path) -> None:
    config = TrainConfig(parquet_file=Path("bars.parquet"), batch_size=64)
    run = Ledger(str(tmp_path)).create("r1")
    created = ev.RunCreated(
        run_id="r1", execution=1, model="tft", config=config.to_plain(), foxray_version="0"
    )
    run.append(created)
    coordinator = Coordinator(
        storage=str(tmp_path),
        run_id="r1",
        execution=1,
        workers=1,
        policy=OomPolicy(),
        on_cpu=True,
        batch_sizes={"training": 64, "validation": 64},
    )
    incident = Incident(
        kind="device",
        exception_type="torch.OutOfMemoryError",
        message="CUDA out of memory.",
        phase="training",
        rank=0,
        batch_size=64,
        fresh_reason="process killed",
    )
    coordinator.decide(incident, incident_id="a", step=3)
    by_phase, _ = coordinator.next_launch()
    assert by_phase == {"training": 32, "validation": 64}
    assert find_resume(run, config).batch_sizes == {"training": 32, "validation": 64}


def test_a_retry_wraps_nothing_and_hooks_nothing(built: Any) -> None:
    workload = TinyWorkload(dropout=0.1)
    trainer, _, _ = built(workload, steps=(0, 1))
    names = list(dict(workload.build_model().named_parameters()))
    assert list(dict(trainer.model.named_parameters())) == names
    for module in trainer.model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks and not module._backward_hooks
    optimized = [p for group in trainer._optimizer.optimizer.param_groups for p in group["params"]]
    assert [id(p) for p in optimized] == [id(p) for p in trainer.model.parameters()]
    assert torch.overrides._get_current_function_mode_stack() == []


def test_running_out_in_validation_leaves_the_training_batch_alone(built: Any) -> None:
    workload = TinyWorkload()
    trainer, authority, _ = built(
        workload, steps=(2,), epochs=2, validation_batch_size=24
    )  # after the last step of the first epoch
    assert [(a.phase, a.batch_size) for a in authority.attempts] == [("validation", 24)]
    assert set(sizes(workload)) == {64}
    assert trainer._validation.recovery.batch_size == 12


@pytest.mark.parametrize("allocation", [1, 10, 40, 90, 120])
def test_validation_counts_every_sample_once(tmp_path: Path, allocation: int) -> None:
    found = []
    for failing in (False, True):
        workload = TinyWorkload(dtype=torch.float64)
        with memory_budget(ROOM) as budget:
            trainer, authority = tiny_trainer(tmp_path / str(failing), workload, validation_batch_size=8)
            fail_in(trainer, budget, steps=(2,) if failing else (), allocation=allocation)
            found.append(trainer.train())
            budget.fail_at(None)
        assert len(authority.attempts) == failing
    plain, disturbed = found
    assert plain["samples"] == disturbed["samples"] == 1.0
    assert abs(plain["validation_loss"] - disturbed["validation_loss"]) < 1e-12


@pytest.mark.timeout(60)
@pytest.mark.parametrize("batch_size", [1, 2, 64])
def test_when_nothing_fits_it_ends(tmp_path: Path, batch_size: int) -> None:
    workload = TinyWorkload()
    with memory_budget(ROOM) as budget:
        trainer, authority = tiny_trainer(tmp_path, workload, batch_size=batch_size, min_batch_size=1)
        trainer._build()
        trainer._build = lambda: None  # type: ignore[method-assign]
        budget.set_limit(budget.live_bytes + 1024)
        with pytest.raises(MemoryExhausted, match=r"batch_size=1 \(minimum=1\)"):
            trainer.train()
        budget.release_limit()
    assert min(sizes(workload)) == 1
    assert len(authority.attempts) == batch_size.bit_length()


@pytest.mark.slow
def test_the_traceback_holds_no_memory(tmp_path: Path) -> None:
    """When the authority is asked, what the failed try had allocated is free, wherever it failed."""
    held: list[int] = []
    workload = TinyWorkload()
    with memory_budget(ROOM) as budget:
        trainer, authority = tiny_trainer(tmp_path, workload, max_retries=10, min_batch_size=1)
        trainer._build()
        decide = authority.decide

        def look(incident: Incident, **known: Any) -> Any:
            assert trainer._training.baseline_bytes is not None
            held.append(budget.live_bytes - trainer._training.baseline_bytes)
            return decide(incident, **known)

        authority.decide = look  # type: ignore[method-assign]
        samples = torch.arange(64)
        trainer._step(samples, trainer._loss_sum)
        before = budget.allocation_count
        budget.reset_peak()
        trainer._step(samples, trainer._loss_sum)
        allocations = budget.allocation_count - before
        needed = budget.peak_bytes - budget.live_bytes
        for k in range(1, allocations + 1):
            trainer._training.batch_size = 64
            authority.attempts.clear()
            budget.fail_at(k)
            trainer._step(samples, trainer._loss_sum)
        budget.fail_at(None)
    assert len(held) == allocations > 200
    assert needed > 300_000
    assert max(held) < 8192


def test_the_learning_rate_does_not_move_in_a_failed_try(tmp_path: Path) -> None:
    rates: list[float] = []

    class Watched(TinyWorkload):
        def loss_sum(self, model: nn.Module, positions_B: Tensor) -> Tensor:
            (group,) = trainer._optimizer.optimizer.param_groups
            rates.append(group["lr"])
            return super().loss_sum(model, positions_B)

    with memory_budget(ROOM) as budget:
        trainer, authority = tiny_trainer(tmp_path, Watched(), epochs=2, lr_schedule="cosine")
        fail_in(trainer, budget, steps=(1, 3))
        trainer.train()
        budget.fail_at(None)
    assert len(authority.attempts) == 2
    first, second, third, fourth = (
        learning_rate_at(step / 4, base=1e-3, schedule="cosine") for step in range(4)
    )
    assert rates == [first, *[second] * 3, *[third] * 2, *[fourth] * 5]


def test_a_run_with_all_of_this_ends_like_one_without(tmp_path: Path) -> None:
    ends = []
    for failing in (False, True):
        workload = TinyWorkload(dtype=torch.float64, dropout=0.1)
        with memory_budget(ROOM) as budget:
            trainer, _ = tiny_trainer(tmp_path / str(failing), workload, epochs=3, lr_schedule="cosine")
            fail_in(trainer, budget, steps=(1, 2, 4) if failing else ())
            trainer.train()
            budget.fail_at(None)
        ends.append(weights(trainer))
    for name in ends[0]:
        assert (ends[0][name] - ends[1][name]).abs().max() < 1e-9

"""A run that went 64 -> 32 -> 16 through out-of-memory ends like one that never ran out.

Three runs are compared: undisturbed at 64; with real memory failures of the emulated budget; and the
control, which is told to use the same sizes at the same steps without a failure. The failures add nothing at
all: that run equals the control bit for bit. What is left against the undisturbed run is the order of
summation, which float64 shows to be rounding; `deterministic` removes even that.
"""

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from gloo_pair import GlooPair
from tft_rig import TinyWorkload, tiny_trainer, weights
from torch import Tensor

from foxray.memory.budget import Budget, memory_budget

pytestmark = pytest.mark.slow

ROOM = 1 << 30
BATCH = 64
EPOCHS, STEPS = 20, 200
SHRINK_AT = {95: 32, 155: 16}
"""Optimizer step before which memory becomes too small for all above this batch size."""


@pytest.fixture(scope="module")
def pair() -> Iterator[GlooPair]:
    pair = GlooPair()
    yield pair
    pair.close()


@dataclass
class Run:
    start: dict[str, Tensor]
    end: dict[str, Tensor]
    losses: list[float]
    sizes: list[int]
    """Batch sizes that failed."""


def peak_of(size: int, dtype: torch.dtype, budget: Budget) -> int:
    """Device memory that a micro-batch of `size` samples needs."""
    workload = TinyWorkload(dtype=dtype)
    workload.place(torch.device("cpu"))
    model = workload.build_model()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(2):
        gc.collect()
        budget.reset_peak()
        before = budget.live_bytes
        workload.loss_sum(model, torch.arange(size)).backward()
    return budget.peak_bytes - before


def train(
    folder: Path | str, *, mode: str, dtype: torch.dtype, rank: int = 0, world_size: int = 1, **config: object
) -> Run:
    """`mode`: "undisturbed", "oom" or "control"."""
    torch.set_num_threads(1)
    workload = TinyWorkload(dtype=dtype, num_train=STEPS // EPOCHS * BATCH, num_valid=2)
    batch = BATCH // world_size
    with memory_budget(ROOM) as budget:
        # A limit that 3/4 of a size's needs above that size fits that size and nothing larger.
        needs = {size: peak_of(size, dtype, budget) for size in (8, 16, 32, 64)}
        step = 0
        losses: list[float] = []

        def on_commit(samples: Tensor) -> None:
            nonlocal step
            step += 1
            losses.append(trainer.state.loss_sum)
            before_step(step)

        def before_step(number: int) -> None:
            if number not in SHRINK_AT or mode == "undisturbed":
                return
            size = SHRINK_AT[number] // world_size
            if mode == "control":
                trainer._training.batch_size = size
            elif config.get("deterministic"):
                budget.fail_at(25)  # blocks are small: nothing is too large for long
            else:
                gc.collect()
                budget.set_limit(budget.live_bytes + (needs[size] + needs[2 * size]) // 2)

        trainer, authority = tiny_trainer(
            folder,
            workload,
            rank=rank,
            batch_size=batch,
            effective_batch=BATCH,
            validation_batch_size=2,
            epochs=EPOCHS,
            checkpoint_every=10_000,
            min_batch_size=16 // world_size,
            on_commit=on_commit,
            **config,
        )
        trainer._build()
        start = weights(trainer)
        trainer._build = lambda: None  # type: ignore[method-assign]
        trainer.train()
        budget.release_limit()
        assert trainer.state.step == step == STEPS
        sizes = [attempt.batch_size for attempt in authority.attempts]
        return Run(start=start, end=weights(trainer), losses=losses, sizes=sizes)


def job(rank: int, folder: str, mode: str, dtype: torch.dtype, config: dict[str, object]) -> Run:
    return train(folder, mode=mode, dtype=dtype, rank=rank, world_size=2, **config)


def runs(
    pair: GlooPair,
    folder: Path,
    world_size: int,
    modes: tuple[str, ...],
    dtype: torch.dtype,
    **config: object,
) -> list[Run]:
    if world_size == 1:
        return [train(folder / mode, mode=mode, dtype=dtype, **config) for mode in modes]
    found = []
    for mode in modes:
        answers = pair.run(job, str(folder / mode), mode, dtype, config, timeout_seconds=240)
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        first, second = answers
        assert all(torch.equal(first.end[name], second.end[name]) for name in first.end)
        assert first.sizes == second.sizes
        found.append(first)
    return found


def differences(one: Run, other: Run) -> dict[str, float]:
    return {name: float((one.end[name] - other.end[name]).abs().max()) for name in one.end}


def assert_all_moved(run: Run, distance: float) -> None:
    for name, tensor in run.end.items():
        assert (tensor - run.start[name]).abs().max() >= distance, name


@pytest.mark.parametrize("world_size", [1, 2])
def test_float64_ends_like_a_run_without_oom(pair: GlooPair, tmp_path: Path, world_size: int) -> None:
    undisturbed, oom, control = runs(
        pair, tmp_path, world_size, ("undisturbed", "oom", "control"), torch.float64
    )
    assert undisturbed.sizes == control.sizes == []
    assert oom.sizes == [64 // world_size, 32 // world_size]
    assert_all_moved(undisturbed, 100 * 1e-9)
    assert max(differences(oom, undisturbed).values()) < 1e-9
    assert all(torch.equal(oom.end[name], control.end[name]) for name in oom.end)
    assert oom.losses == control.losses


@pytest.mark.parametrize("world_size", [1, 2])
def test_float32_differs_by_the_order_of_summation_alone(
    pair: GlooPair, tmp_path: Path, world_size: int
) -> None:
    undisturbed, oom, control = runs(
        pair, tmp_path, world_size, ("undisturbed", "oom", "control"), torch.float32
    )
    assert oom.sizes == [64 // world_size, 32 // world_size]
    assert_all_moved(undisturbed, 100 * 1e-5)
    assert all(torch.equal(oom.end[name], control.end[name]) for name in oom.end)
    by_control = differences(control, undisturbed)
    for name, difference in differences(oom, undisturbed).items():
        assert difference <= max(1e-5, by_control[name]), name
    for loss, plain, same_split in zip(oom.losses, undisturbed.losses, control.losses, strict=True):
        assert abs(loss - plain) <= max(1e-5 * abs(plain), abs(same_split - plain))


@pytest.mark.parametrize("world_size", [1, 2])
def test_deterministic_is_the_same_bit_for_bit(pair: GlooPair, tmp_path: Path, world_size: int) -> None:
    undisturbed, oom = runs(
        pair, tmp_path, world_size, ("undisturbed", "oom"), torch.float32, deterministic=True
    )
    assert oom.sizes == [64 // world_size, 32 // world_size]
    assert_all_moved(undisturbed, 100 * 1e-5)
    assert all(torch.equal(oom.end[name], undisturbed.end[name]) for name in oom.end)
    assert oom.losses == undisturbed.losses

"""Recovery in place: how long it takes, and that the losses do not show it.

A TFT is trained at batch 64 on an emulated GPU that first holds 64 samples, then 32, then 16. Measured is
the time from the raise of each error to the begin of the next try, and what has to be computed again. Beside
it: starting the training function anew at half the batch, the way of `find_executable_batch_size` of
Accelerate (with Accelerate's own code where it is installed), and `classify`.

With matplotlib, the losses with and without out-of-memory are drawn into docs/images.
"""

import gc
import importlib.util
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.world import World, build_trainer
from foxray.memory.budget import Budget, memory_budget
from foxray.oom import classify
from foxray.training.sampler import epoch_order

PICTURE = Path(__file__).resolve().parent.parent / "docs/images/loss-with-and-without-oom.png"
ROOM = 1 << 33
BATCH, STEPS_OF_EPOCH = 64, 10
SHRINK_AT = {STEPS_OF_EPOCH * 2 + 5: 32, STEPS_OF_EPOCH * 5 + 2: 16}
"""Optimizer step from which on memory is too small for all above this batch size."""

SHRINKS_BY = max(SHRINK_AT) // STEPS_OF_EPOCH + 1
"""Epochs after which memory has shrunk twice."""


def run(epochs: int = 8, repeats: int = 5) -> dict[str, Any]:
    """Seconds of recovery in place, of a restart, of `classify`; largest difference of the losses."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    plain, _, _ = _train(epochs, disturbed=False)
    losses, recovery_seconds, oom_steps = _train(epochs, disturbed=True)
    for _ in range(repeats - 1):
        recovery_seconds += _train(SHRINKS_BY, disturbed=True)[1]
    figures: dict[str, Any] = {
        "recovery_in_place_seconds": statistics.median(recovery_seconds),
        "recovery_in_place_worst_seconds": max(recovery_seconds),
        "largest_relative_loss_difference": max(
            abs(a - b) / abs(b) for a, b in zip(losses, plain, strict=True)
        ),
        "classify_seconds": _classify_seconds(),
        "find_executable_batch_size_seconds": _restart_seconds(),
    }
    torch.set_num_threads(threads)
    print(f"{len(recovery_seconds)} recoveries in place, raise to next try:")
    median_ms, worst_ms = figures["recovery_in_place_seconds"] * 1e3, max(recovery_seconds) * 1e3
    print(f"  median {median_ms:.2f} ms, worst {worst_ms:.2f} ms")
    print(f"classify: {figures['classify_seconds'] * 1e6:.0f} us")
    restart = figures["find_executable_batch_size_seconds"]
    if restart is None:
        print("find_executable_batch_size: accelerate is not installed, left out")
    else:
        print(f"find_executable_batch_size, raise to the same step again: {restart * 1e3:.0f} ms")
    print(f"losses of {len(plain)} steps differ by {figures['largest_relative_loss_difference']:.1e} at most")
    _draw(plain, losses, oom_steps)
    return figures


def _train(epochs: int, *, disturbed: bool) -> tuple[list[float], list[float], list[int]]:
    """Loss of every step, seconds of every recovery, steps in which memory ran out."""
    world = World(num_train=BATCH * STEPS_OF_EPOCH, dropout=0.1)
    losses: list[float] = []
    oom_steps: list[int] = []
    with memory_budget(ROOM) as budget:
        needs = {size: _needed_bytes(world, size, budget) for size in (16, 32, 64)}

        def on_commit(samples: Tensor) -> None:
            total, count = trainer.state.loss_sum, trainer.state.loss_samples
            losses.append((total - before[0]) / (count - before[1]))
            before[:] = (0.0, 0) if count == world.num_train else (total, count)
            size = SHRINK_AT.get(len(losses)) if disturbed else None
            if size is not None:
                oom_steps.append(len(losses))
                gc.collect()
                budget.set_limit(budget.live_bytes + (needs[size] + needs[2 * size]) // 2)

        before: list[float] = [0.0, 0]
        trainer, authority = build_trainer(
            world, batch_size=BATCH, effective_batch=BATCH, on_commit=on_commit
        )
        for _ in range(epochs):
            trainer._epoch()
        budget.release_limit()
    return losses, authority.recovery_seconds, oom_steps


def _needed_bytes(world: World, size: int, budget: Budget) -> int:
    world.place(torch.device("cpu"))
    model = world.build_model()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    gc.collect()
    before = budget.live_bytes
    budget.reset_peak()
    world.loss_sum(model, torch.arange(size)).backward()  # type: ignore[no-untyped-call]
    return budget.peak_bytes - before


def _classify_seconds(repeats: int = 2000) -> float:
    """Of a genuine error, raised with the text that CUDA gives."""
    error: BaseException | None = None
    with memory_budget(1 << 20):
        try:
            nn.Linear(1024, 1024)
        except torch.OutOfMemoryError as raised:
            error = raised
    assert error is not None
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        assert classify(error) is not None
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def _restart_seconds() -> float | None:
    """Accelerate's retry: the function starts anew, so the steps done are done again."""
    if importlib.util.find_spec("accelerate") is None:
        return None
    from accelerate.utils import find_executable_batch_size

    world = World(num_train=BATCH * STEPS_OF_EPOCH, dropout=0.1)
    shrink_at = min(SHRINK_AT)
    times: dict[str, float] = {}
    with memory_budget(ROOM) as budget:
        needs = {size: _needed_bytes(world, size, budget) for size in (32, 64)}

        @find_executable_batch_size(starting_batch_size=BATCH)  # type: ignore[untyped-decorator]
        def train(batch_size: int) -> None:
            model = world.build_model()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
            for step in range(shrink_at + 1):
                if step == shrink_at and batch_size == BATCH:
                    budget.set_limit(budget.live_bytes + (needs[32] + needs[64]) // 2)
                    times["raised"] = time.perf_counter()
                order = epoch_order(world.num_train, seed=0, epoch=step // STEPS_OF_EPOCH)
                first = step % STEPS_OF_EPOCH * BATCH
                optimizer.zero_grad()
                for piece in order[first : first + BATCH].split(batch_size):
                    world.loss_sum(model, piece).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            times["caught up"] = time.perf_counter()

        train()
        budget.release_limit()
    return times["caught up"] - times["raised"]


def _draw(plain: list[float], losses: list[float], oom_steps: list[int]) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        print("matplotlib is not installed: no picture (`make bench` installs it)")
        return
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    axes.plot(plain, color="tab:blue", linewidth=4, alpha=0.35, label="never out of memory, batch 64")
    axes.plot(losses, color="black", linewidth=1, linestyle="--", label="out of memory: 64 → 32 → 16")
    for step in oom_steps:
        axes.axvline(step, color="tab:red", linewidth=1)
    axes.set(xlabel="optimizer step", ylabel="training loss of the step", title="Loss with and without OOM")
    axes.legend()
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURE, dpi=120)
    plt.close(figure)
    print(f"picture: {PICTURE}")


if __name__ == "__main__":
    run()

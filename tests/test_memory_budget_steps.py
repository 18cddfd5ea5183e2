"""Training steps that run out of memory, at every allocation and at random budgets, leave nothing behind."""

from __future__ import annotations

import contextlib
import gc
import random
import threading
import traceback

import pytest
import torch
from memory_modes import both_modes, mib, needs_allocator, quiet  # noqa: F401
from torch import nn

from foxray.memory.budget import Mode, memory_budget
from foxray.memory.catalogue import MIB

pytestmark = pytest.mark.usefixtures("quiet")


class _Trainer:
    """A small network with attention, and a step that says how far it came."""

    def __init__(self, batch: int, width: int) -> None:
        torch.manual_seed(0)
        self.inputs = nn.Linear(16, width)
        self.hidden = nn.Linear(width, width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.model = nn.ModuleList([self.inputs, self.hidden, self.attention])
        self.x_BTF = torch.randn(batch, 12, 16)
        self.scalar = torch.zeros((), requires_grad=True)
        self.phase = "before"
        self.new_optimizer()

    def new_optimizer(self) -> None:
        self.optimizer = torch.optim.Adam(self.model.parameters(), foreach=True)

    def step(self) -> None:
        self.phase = "forward"
        h_BTH = torch.tanh(self.hidden(torch.relu(self.inputs(self.x_BTF))))
        loss = self.attention(h_BTH, h_BTH, h_BTH)[0].square().mean()
        self.phase = "backward"
        loss.backward()
        self.phase = "optimizer"
        self.optimizer.step()
        self.phase = "done"

    def step_or_out_of_memory(self) -> str:
        """The phase that ran out of memory, or "done". Leaves `except` before anything is measured."""
        with contextlib.suppress(torch.OutOfMemoryError):
            self.step()
        return self.phase

    def reset(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.new_optimizer()
        # A backward that failed leaves its tasks, and the graph with them, in the engine's queue for the
        # calling thread, until the next backward.
        self.scalar.clone().backward()
        self.scalar.grad = None


@both_modes
def test_an_error_at_every_single_allocation_of_a_step_returns_to_the_baseline(mode: Mode) -> None:
    with memory_budget(64 * MIB, mode=mode) as budget:
        trainer = _Trainer(batch=4, width=8)
        trainer.step()
        trainer.reset()
        gc.collect()  # what torch imports in the first step of a process keeps the first optimizer
        baseline = budget.live_bytes
        before = budget.allocation_count
        trainer.step()
        allocations = budget.allocation_count - before
        trainer.reset()
        assert budget.live_bytes == baseline
        seen = set()
        for k in range(1, allocations + 1):
            budget.fail_at(k)
            seen.add(trainer.step_or_out_of_memory())
            budget.fail_at(None)
            trainer.reset()
            assert budget.live_bytes == baseline, f"allocation {k}, {trainer.phase}"
        assert seen == {"forward", "backward", "optimizer"}
        trainer.step()


@both_modes
@pytest.mark.parametrize(
    ("batch", "width", "phases"), [(96, 16, {"forward", "backward"}), (1, 160, {"optimizer"})]
)
def test_random_budgets_return_to_the_baseline(mode: Mode, batch: int, width: int, phases: set[str]) -> None:
    with memory_budget(256 * MIB, mode=mode) as budget:
        trainer = _Trainer(batch, width)
        trainer.step()
        trainer.reset()
        gc.collect()  # what torch imports in the first step of a process keeps the first optimizer
        baseline = budget.live_bytes
        budget.reset_peak()
        trainer.step()
        peak = budget.peak_bytes
        trainer.reset()
        draw = random.Random(7)
        seen = set()
        for _ in range(25):
            budget.set_limit(draw.randrange(baseline, peak))
            seen.add(trainer.step_or_out_of_memory())
            trainer.reset()
            assert budget.live_bytes == baseline
        assert phases <= seen and "done" not in seen
        budget.set_limit(peak)
        trainer.step()


@both_modes
def test_a_held_exception_is_seen_as_a_leak_until_its_frames_are_cleared(mode: Mode) -> None:
    def forward() -> torch.Tensor:
        activations = mib(52).zero_()
        return activations + mib(52)

    with memory_budget(100 * MIB, mode=mode) as budget:
        baseline = budget.live_bytes
        try:
            forward()
        except torch.OutOfMemoryError as error:
            held = error
        gc.collect()
        assert budget.live_bytes - baseline >= 52 * MIB
        traceback.clear_frames(held.__traceback__)
        assert budget.live_bytes == baseline


@needs_allocator
def test_backward_in_another_thread_raises_there() -> None:
    with memory_budget(16 * MIB, mode="allocator") as budget:
        x = torch.ones(MIB, requires_grad=True)
        loss = (x * 2).exp().sum()
        raised: list[BaseException] = []

        def backward() -> None:
            try:
                loss.backward()
            except torch.OutOfMemoryError as error:
                raised.append(error.with_traceback(None))

        live = budget.live_bytes
        budget.set_limit(live + MIB)
        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()
        assert len(raised) == 1
        assert budget.live_bytes <= live

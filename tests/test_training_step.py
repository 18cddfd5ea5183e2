"""The transactional step: exact whatever runs out of memory, and wherever."""

import gc
from itertools import chain

import pytest
import torch
from step_rig import SAMPLES, Rig

from foxray.errors import MemoryExhausted
from foxray.memory.budget import memory_budget
from foxray.training.authority import Rescheduled
from foxray.training.sampler import epoch_order, rank_share

ROOM = 1 << 30


def undisturbed(*, epochs: int = 1) -> torch.Tensor:
    rig = Rig()
    for epoch in range(epochs):
        rig.epoch(epoch)
    return rig.weights()


def test_an_oom_at_any_allocation_of_a_step_changes_nothing() -> None:
    expected = undisturbed()
    with memory_budget(ROOM) as budget:
        counter = Rig()
        before = budget.allocation_count
        counter.one_step(epoch_order(SAMPLES, seed=0, epoch=0)[:32])
        allocations = budget.allocation_count - before
        assert allocations > 20
        for k in range(1, allocations + 1):
            rig = Rig()
            budget.fail_at(k)
            rig.epoch()  # a failure in its first step, with more steps to come
            budget.fail_at(None)
            assert len(rig.authority.attempts) == 1, f"allocation {k} did not fail"
            assert (rig.weights() - expected).abs().max() < 1e-12, f"allocation {k}"
            assert sorted(chain.from_iterable(rig.seen)) == list(range(SAMPLES))


def test_a_step_shrinks_until_it_fits_and_ends_like_one_that_always_fitted() -> None:
    expected = undisturbed(epochs=70)
    assert (expected - Rig().weights()).abs().min() > 0
    with memory_budget(ROOM) as budget:
        rig = Rig(width=64)
        gc.collect()
        budget.reset_peak()
        rig.loss_sum(torch.arange(32)).backward()
        rig.model.zero_grad(set_to_none=False)
        needed = budget.peak_bytes - budget.live_bytes
        budget.set_limit(budget.live_bytes + needed // 3)
        for epoch in range(70):
            rig.epoch(epoch)
        budget.release_limit()
    sizes = [attempt.batch_size for attempt in rig.authority.attempts]
    assert sizes[:2] == [32, 16]
    assert rig.recovery.batch_size < 16
    assert (rig.weights() - expected).abs().max() < 1e-9


def test_giving_up_changes_nothing() -> None:
    with memory_budget(ROOM) as budget:
        rig = Rig(max_retries=2)
        before = rig.weights()
        budget.set_limit(budget.live_bytes + 4096)
        with pytest.raises(MemoryExhausted, match="after 2 retries"):
            rig.one_step(torch.arange(32))
        budget.release_limit()
        assert torch.equal(rig.weights(), before)
        assert all(state["step"] == 0 for state in rig.optimizer.optimizer.state.values())


def test_memory_that_does_not_come_back_asks_for_fresh_workers() -> None:
    held = []
    with memory_budget(ROOM) as budget:
        rig = Rig()

        def leaky(piece: torch.Tensor) -> torch.Tensor:
            held.append(torch.zeros(1 << 20))
            budget.fail_at(1)
            return rig.loss_sum(piece)

        with pytest.raises(Rescheduled):
            rig.step(torch.arange(32), leaky)
        (attempt,) = rig.authority.attempts
        assert attempt.incident is not None
        assert "not back at baseline" in (attempt.incident.fresh_reason or "")


def test_a_plain_bug_is_not_retried() -> None:
    rig = Rig()

    def broken(piece: torch.Tensor) -> torch.Tensor:
        raise ValueError("unknown feature column 'room_temperature_zoom'")

    with pytest.raises(ValueError, match="zoom"):
        rig.step(torch.arange(32), broken)
    assert rig.authority.attempts == []


def test_gradient_clipping_looks_at_the_whole_step() -> None:
    """Split or not, the norm that is clipped is that of the mean over all samples."""
    whole, split = Rig(batch_size=32), Rig(batch_size=4)
    for rig in (whole, split):
        rig.y_N = rig.y_N * 1e4  # far above the norm limit of 1
        rig.epoch()
    assert (whole.weights() - split.weights()).abs().max() < 1e-12


@pytest.mark.parametrize("samples", [1, 7, 32])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_shares_of_the_ranks_are_the_step(samples: int, world_size: int) -> None:
    ids = torch.arange(samples) * 3
    shares = [rank_share(ids, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert torch.equal(torch.cat(shares), ids)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_an_epoch_is_a_permutation_and_epochs_differ() -> None:
    first, second = (epoch_order(100, seed=1, epoch=e) for e in (0, 1))
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(100))
    assert not torch.equal(first, second)
    assert torch.equal(first, epoch_order(100, seed=1, epoch=0))

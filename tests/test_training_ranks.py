"""The step on two ranks over gloo: out-of-memory on one or both changes nothing, and nobody hangs."""

import random
from collections.abc import Iterator
from itertools import chain
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from gloo_pair import GlooPair, Stuck
from step_rig import SAMPLES, Rig

from foxray.errors import MemoryExhausted
from foxray.memory.budget import memory_budget
from foxray.training.authority import Rescheduled
from foxray.training.sampler import epoch_order

pytestmark = pytest.mark.slow

ROOM = 1 << 30
EFFECTIVE = 32


@pytest.fixture(scope="module")
def pair() -> Iterator[GlooPair]:
    pair = GlooPair()
    yield pair
    pair.close()


def undisturbed() -> torch.Tensor:
    rig = Rig()
    rig.epoch(effective_batch=EFFECTIVE)
    return rig.weights()


# -- jobs, run on each rank ------------------------------------------------------------------------


def fail_everywhere(rank: int, failing: tuple[int, ...]) -> tuple[int, float, int]:
    """Fail every allocation of a step in turn on the ranks named; allocations, worst error, retries."""
    first = epoch_order(SAMPLES, seed=0, epoch=0)[:EFFECTIVE]
    expected = undisturbed()
    worst, retries = 0.0, 0
    with memory_budget(ROOM) as budget:
        counter = Rig(rank=rank, world_size=2)
        before = budget.allocation_count
        counter.one_step(first)
        mine = torch.tensor([budget.allocation_count - before])
        dist.all_reduce(mine, op=dist.ReduceOp.MAX)
        allocations = int(mine)
        for k in range(1, allocations + 1):
            rig = Rig(rank=rank, world_size=2)
            if rank in failing:
                budget.fail_at(k)
            rig.epoch(effective_batch=EFFECTIVE)
            budget.fail_at(None)
            retries += len(rig.authority.attempts)
            worst = max(worst, float((rig.weights() - expected).abs().max()))
    return allocations, worst, retries


def count_collectives(rank: int) -> list[int]:
    """Collectives of each step of an epoch in which the rank runs out of memory every time."""
    calls: list[int] = []
    functions = ("all_reduce", "all_gather", "broadcast", "barrier", "reduce", "all_to_all")
    with memory_budget(ROOM) as budget:
        rig = Rig(rank=rank, world_size=2, max_retries=10, batch_size=64)
        for samples in epoch_order(SAMPLES, seed=0, epoch=0).split(EFFECTIVE):
            with mock.patch.multiple(dist, **{f: mock.Mock(wraps=getattr(dist, f)) for f in functions}):
                budget.fail_at(7)
                rig.one_step(samples)
                calls.append(sum(getattr(dist, f).call_count for f in functions))
            assert rig.authority.attempts
    return calls


def fail_in_the_all_reduce(rank: int, when: str) -> tuple[str, str, float]:
    """Rank 1 runs out of memory inside the collective itself, before or after the data have gone."""
    real = dist.all_reduce

    def broken(*args: Any, **kwargs: Any) -> None:
        if when == "after":
            real(*args, **kwargs)
        budget.fail_at(1)
        torch.empty(1)

    with memory_budget(ROOM) as budget:
        rig = Rig(rank=rank, world_size=2)
        before = rig.weights()
        patch = mock.patch.object(dist, "all_reduce", broken if rank == 1 else real)
        try:
            with patch:
                rig.one_step(torch.arange(EFFECTIVE))
        except Rescheduled as error:
            return "rescheduled", str(error), float((rig.weights() - before).abs().max())
        except RuntimeError as error:
            return "connection lost", str(error), 0.0
        return "done", "", 0.0


def give_up_on_one(rank: int, kind: str) -> str:
    held = []
    with memory_budget(ROOM) as budget:
        rig = Rig(rank=rank, world_size=2, max_retries=0 if kind == "exhausted" else 5)

        def loss_sum(piece: torch.Tensor) -> torch.Tensor:
            if rank == 1:
                if kind == "leak":
                    held.append(torch.zeros(1 << 20))
                budget.fail_at(1)
            return rig.loss_sum(piece)

        before = rig.weights()
        try:
            rig.step(torch.arange(16), loss_sum)
        except (Rescheduled, MemoryExhausted) as error:
            assert torch.equal(rig.weights(), before)
            return type(error).__name__
        return "done"


def play(rank: int, seed: int) -> tuple[str, list[list[int]], torch.Tensor]:
    """An epoch in which both ranks run out of memory at random places, perhaps until nothing is left."""
    dice = random.Random(seed * 2 + rank)
    rig = Rig(rank=rank, world_size=2, batch_size=16, max_retries=dice.choice([0, 1, 3, 10, 10, 10, 10]))
    outcome = "done"
    with memory_budget(ROOM) as budget:
        try:
            for samples in epoch_order(SAMPLES, seed=0, epoch=0).split(EFFECTIVE):
                if dice.random() < 0.6:
                    budget.fail_at(dice.randint(1, 60))
                if dice.random() < 0.2:  # really too little, until the batch is small
                    budget.set_limit(budget.live_bytes + dice.choice([4, 40, 60, 90]) * 1024)
                rig.one_step(samples)
                budget.fail_at(None)
                budget.set_limit(ROOM)
        except (MemoryExhausted, Rescheduled) as error:
            outcome = type(error).__name__
        except RuntimeError as error:  # the peer left between its all-reduce and its next one
            outcome = f"connection lost: {error}"
    return outcome, rig.seen, rig.weights()


# -- tests -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", [(0,), (1,), (0, 1)])
def test_an_oom_at_any_allocation_on_one_rank_or_both_changes_nothing(
    pair: GlooPair, failing: tuple[int, ...]
) -> None:
    answers = pair.run(fail_everywhere, failing, timeout_seconds=120)
    for rank, (allocations, worst, retries) in enumerate(answers):
        assert allocations > 20
        assert worst < 1e-12
        assert retries >= (allocations - 1 if rank in failing else 0)


def test_a_step_has_one_collective_however_often_memory_runs_out(pair: GlooPair) -> None:
    assert pair.run(count_collectives) == [[1, 1, 1], [1, 1, 1]]


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_oom_in_the_all_reduce_asks_for_fresh_workers(pair: GlooPair, when: str) -> None:
    """Whether the peer got its part is not known, so the all-reduce is not repeated."""
    healthy, failed = pair.run(fail_in_the_all_reduce, when)
    assert failed[0] == "rescheduled"
    assert "broken collective" in failed[1]
    assert failed[2] == 0.0, "the parameters moved"
    assert healthy[0] == ("done" if when == "after" else "connection lost")


@pytest.mark.parametrize(("kind", "own"), [("exhausted", "MemoryExhausted"), ("leak", "Rescheduled")])
def test_a_rank_that_cannot_go_on_takes_the_others_along(pair: GlooPair, kind: str, own: str) -> None:
    assert pair.run(give_up_on_one, kind) == ["Rescheduled", own]


@pytest.mark.parametrize("seeds", [range(20), pytest.param(range(100, 300), marks=pytest.mark.soak)])
def test_no_schedule_of_ooms_makes_a_rank_wait_for_ever(pair: GlooPair, seeds: range) -> None:
    expected = undisturbed()
    done = 0
    for seed in seeds:
        answers = pair.run(play, seed, timeout_seconds=30)
        for outcome, seen, weights in answers:
            if isinstance(outcome, Exception):
                raise outcome
            if outcome == "done":
                done += 1
                assert sorted(chain.from_iterable(seen)) == list(range(SAMPLES))
                assert (weights - expected).abs().max() < 1e-12
        if {"done"} < {outcome for outcome, _, _ in answers}:
            # Their ways part only after the last all-reduce, in the optimizer's step.
            assert sorted(len(seen) for _, seen, _ in answers) == [2, 3]
    assert done > len(seeds) // 2


def test_the_watchdog_finds_a_stuck_rank(pair: GlooPair) -> None:
    with pytest.raises(Stuck, match=r"ranks \[0, 1\] are stuck"):
        pair.run(wait_for_each_other, timeout_seconds=2)


def wait_for_each_other(rank: int) -> None:
    dist.recv(torch.zeros(1), src=1 - rank)

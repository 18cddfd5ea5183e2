"""In every epoch the samples of the committed updates are a permutation of the training set.

The witness is the gradient itself: the model has one parameter for each sample, and the loss of a sample is
that parameter, so that the update's gradient counts how often each sample is in it. What the sampler says
is compared with that.
"""

import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from gloo_pair import GlooPair
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tft_rig import tiny_trainer
from torch import Tensor, nn

from foxray.memory.budget import host_memory, memory_budget

ROOM = 1 << 30
NUM_TRAIN, NUM_VALID, EPOCHS, EFFECTIVE = 37, 11, 2, 16


class OnePerSample(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight_N = nn.Parameter(torch.zeros(NUM_TRAIN, dtype=torch.float64))


@dataclass
class CountingWorkload:
    """Its gradient is a histogram of the samples. Validation counts the samples it has seen."""

    name: str = "tft"
    num_train: int = NUM_TRAIN
    num_valid: int = NUM_VALID
    validation_sums: tuple[str, ...] = ("validation_loss", "position")
    dropout: float = 0.0
    pieces: list[int] = field(default_factory=list)

    def build_model(self) -> nn.Module:
        return OnePerSample()

    def place(self, device: torch.device) -> None:
        pass

    def loss_sum(self, model: Any, positions_B: Tensor) -> Tensor:
        self.pieces.append(len(positions_B))
        picked_B: Tensor = model.weight_N[positions_B]
        return (picked_B.clone() * 1.0).sum()

    def evaluate(self, model: Any, positions_B: Tensor) -> Tensor:
        return torch.stack([torch.ones(len(positions_B)).sum(), positions_B.sum().float()]).double()

    def use_gradient_checkpointing(self, model: nn.Module) -> None:
        pass

    def spec(self) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class Disturbance:
    """Before which optimizer step of the run, and at which of the allocations from there, memory runs out;
    `times` in a row (each retry again)."""

    step: int
    allocation: int
    times: int


def samples_in(gradient_N: Any) -> list[int]:
    """Each sample as often as the update holds it; clipping has scaled them all alike."""
    smallest = float(gradient_N[gradient_N > 0].min())
    counts_N = (gradient_N / smallest).round().long()
    found: list[int] = torch.repeat_interleave(torch.arange(NUM_TRAIN), counts_N).tolist()
    return found


def run_epochs(rank: int, world_size: int, plan: list[Disturbance]) -> tuple[list[list[int]], Any, int]:
    """Committed samples by epoch as the gradient tells, metrics, and how often memory ran out."""
    by_step = {one.step: one for one in plan}
    epochs: list[list[int]] = [[]]
    with memory_budget(ROOM) as budget, tempfile.TemporaryDirectory() as folder:
        workload = CountingWorkload()

        def arm(number: int) -> None:
            if number in by_step:
                budget.fail_at(by_step[number].allocation)

        def on_commit(samples: Tensor) -> None:
            with host_memory():
                found = samples_in(trainer.model.weight_N.grad)
            assert found == sorted(samples.tolist()), "the update was made of other samples than said"
            if len(epochs[-1]) == NUM_TRAIN:
                epochs.append([])
            epochs[-1] += found
            arm(trainer.state.step)

        trainer, authority = tiny_trainer(
            folder,
            workload,
            rank=rank,
            batch_size=EFFECTIVE // world_size,
            effective_batch=EFFECTIVE,
            validation_batch_size=4,
            min_batch_size=1,
            epochs=EPOCHS,
            on_commit=on_commit,
        )
        decide, failed = authority.decide, dict[int, int]()

        def decide_and_arm(incident: Any, **known: Any) -> Any:
            one = by_step.get(trainer.state.step)
            failed[trainer.state.step] = failed.get(trainer.state.step, 0) + 1
            if one is not None and failed[trainer.state.step] < one.times:
                budget.fail_at(one.allocation)
            return decide(incident, **known)

        authority.decide = decide_and_arm  # type: ignore[method-assign]
        trainer._build()
        trainer._build = lambda: None  # type: ignore[method-assign]
        arm(0)
        metrics = trainer.train()
        return epochs, metrics, len(authority.attempts)


def assert_permutations(epochs: list[list[int]], metrics: dict[str, float]) -> None:
    assert len(epochs) == EPOCHS
    for epoch in epochs:
        assert sorted(epoch) == list(range(NUM_TRAIN))
    assert metrics["validation_loss"] == 1.0, "validation samples lost or counted twice"
    assert metrics["position"] == sum(range(NUM_VALID)) / NUM_VALID


STEPS = EPOCHS * -(-NUM_TRAIN // EFFECTIVE)
# Allocations 1 to 40 from a step's begin reach from its first gather over the optimizer into the next step;
# after the last step of an epoch (a short batch of 5) they reach into validation.
disturbances = st.builds(
    Disturbance,
    step=st.integers(0, STEPS - 1),
    allocation=st.integers(1, 40),
    times=st.integers(1, 2),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(disturbances, min_size=1, max_size=2, unique_by=lambda one: one.step))
def test_no_sample_is_lost_or_seen_twice(plan: list[Disturbance]) -> None:
    epochs, metrics, ooms = run_epochs(0, 1, plan)
    assert_permutations(epochs, metrics)
    assert ooms >= 1 or min(one.step for one in plan) >= STEPS - 2


@pytest.mark.parametrize("step", range(STEPS))
def test_every_allocation_of_every_step_and_of_validation(step: int) -> None:
    """Middle of an epoch, last short batch, inside the optimizer, validation: one place after the other."""
    for allocation in range(1, 26):
        epochs, metrics, ooms = run_epochs(0, 1, [Disturbance(step, allocation, 1)])
        assert_permutations(epochs, metrics)
        assert ooms == 1 or (step == STEPS - 1 and allocation > 20)  # the run has ended before


@pytest.fixture(scope="module")
def pair() -> Iterator[GlooPair]:
    pair = GlooPair()
    yield pair
    pair.close()


def job(rank: int, plans: list[list[Disturbance]]) -> Any:
    return run_epochs(rank, 2, plans[rank])


@pytest.mark.slow
@pytest.mark.parametrize("where", ["one", "both"])
def test_two_ranks(pair: GlooPair, where: str) -> None:
    dice = random.Random(where)
    for _ in range(15):
        plans: list[list[Disturbance]] = [[], []]
        for rank in (0, 1) if where == "both" else (dice.randrange(2),):
            plans[rank] = [Disturbance(dice.randrange(STEPS), dice.randint(1, 30), dice.randint(1, 2))]
        for answer in pair.run(job, plans, timeout_seconds=60):
            if isinstance(answer, Exception):
                raise answer
            epochs, metrics, _ = answer
            assert_permutations(epochs, metrics)

"""`foxray.recover`: in-place recovery in a plain PyTorch loop, with any optimizer and with a scaler."""

import copy
import gc
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_pair import GlooPair
from torch import Tensor, nn

import foxray
from foxray.errors import FoxrayError, MemoryExhausted, UserError
from foxray.memory.budget import memory_budget

ROOM = 1 << 30
PATIENT = foxray.OomPolicy(max_retries=10, min_batch_size=1)
EXAMPLE = Path(__file__).parent.parent / "examples/recover_plain_pytorch.py"

Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "AdamW fused amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True, amsgrad=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "Adam loop": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=False),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, foreach=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=1e-2),
}


def make_model(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).to(dtype)


def make_batches(
    count: int, size: int = 32, dtype: torch.dtype = torch.float64
) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(count * size, 8, generator=generator, dtype=dtype)
    return list(zip(x.split(size), x.sum(1).sin().split(size), strict=True))


def mean_loss(model: nn.Module) -> Callable[[Any], Tensor]:
    return lambda batch: nn.functional.mse_loss(model(batch[0]).squeeze(1), batch[1])


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def plain_loop(make: Make, batches: list[tuple[Tensor, Tensor]], max_norm: float | None = None) -> Tensor:
    model = make_model()
    optimizer = make(model.parameters())
    for batch in batches:
        optimizer.zero_grad(set_to_none=False)
        mean_loss(model)(batch).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    return flat(model)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_oom_at_any_allocation_of_a_step_ends_like_a_plain_loop(name: str) -> None:
    batches = make_batches(4)
    expected = plain_loop(OPTIMIZERS[name], batches)
    with memory_budget(ROOM) as budget:

        def run(step_to_disturb: int, k: int | None) -> tuple[Tensor, int, int]:
            model = make_model()
            step = foxray.recover(OPTIMIZERS[name](model.parameters()))
            allocations = 0
            for number, batch in enumerate(batches):
                before = budget.allocation_count
                budget.fail_at(k if number == step_to_disturb else None)
                step(batch, mean_loss(model))
                if number == step_to_disturb:
                    allocations = budget.allocation_count - before
            budget.fail_at(None)
            return flat(model), len(step.incidents), allocations

        for disturbed in (0, 2):
            _, _, allocations = run(disturbed, None)
            for k in range(1, allocations + 1):
                found, incidents, _ = run(disturbed, k)
                assert incidents == 1, f"allocation {k} of step {disturbed} did not fail"
                assert (found - expected).abs().max() < 1e-12, f"allocation {k} of step {disturbed}"


def test_a_real_shortage_shrinks_the_batch_and_changes_nothing() -> None:
    batches = make_batches(20, size=64)
    make = OPTIMIZERS["AdamW fused"]
    with memory_budget(ROOM) as budget:
        expected = plain_loop(make, batches, max_norm=0.1)
        model = make_model()
        step = foxray.recover(make(model.parameters()), max_grad_norm=0.1)
        step(batches[0], mean_loss(model))
        gc.collect()
        budget.reset_peak()
        mean_loss(model)(tuple(part[:16] for part in batches[1])).backward()
        room = budget.peak_bytes - budget.live_bytes
        budget.set_limit(budget.live_bytes + room * 3 // 2)
        results = [step(batch, mean_loss(model)) for batch in batches[1:]]
        budget.release_limit()
        assert step.batch_size == 16
        assert [incident.batch_size for incident in step.incidents] == [64, 32]
        assert len(step.recovery_seconds) == 2
        assert all(result.samples == 64 for result in results)
        assert (flat(model) - expected).abs().max() < 1e-10


@pytest.mark.parametrize("name", ["AdamW fused", "SGD momentum"])
def test_giving_up_leaves_parameters_and_optimizer_as_they_were(name: str) -> None:
    batches = make_batches(3)
    model = make_model()
    optimizer = OPTIMIZERS[name](model.parameters())
    with memory_budget(ROOM) as budget:
        step = foxray.recover(optimizer, policy=foxray.OomPolicy(max_retries=1, min_batch_size=1))
        step(batches[0], mean_loss(model))
        before, state = flat(model), copy.deepcopy(optimizer.state_dict()["state"])
        budget.set_limit(budget.live_bytes + 2048)
        with pytest.raises(MemoryExhausted, match="after 1 retries"):
            step(batches[1], mean_loss(model))
        budget.release_limit()
        assert torch.equal(flat(model), before)
        for index, values in optimizer.state_dict()["state"].items():
            for key, value in values.items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(state[index][key]))


def test_held_memory_is_said_to_need_a_new_process() -> None:
    held = []
    model = make_model()
    (batch,) = make_batches(1)
    with memory_budget(ROOM) as budget:
        step = foxray.recover(OPTIMIZERS["AdamW fused"](model.parameters()))

        def leaky(piece: Any) -> Tensor:
            held.append(torch.zeros(1 << 20))
            budget.fail_at(1)
            return mean_loss(model)(piece)

        with pytest.raises(FoxrayError, match=r"not back at baseline.*start a new process"):
            step(batch, leaky)


class TestGradientScaler:
    def loop(self, *, fail_at: int | None, recovering: bool) -> tuple[Tensor, list[float], dict[str, Any]]:
        """Six steps, of which the third overflows in float16's stead: its loss is huge."""
        model = make_model(torch.float32)
        optimizer = OPTIMIZERS["AdamW fused"](model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        step = (
            foxray.recover(optimizer, scaler=scaler, max_grad_norm=0.5, policy=PATIENT)
            if recovering
            else None
        )
        scales = []
        with memory_budget(ROOM) as budget:
            for number, batch in enumerate(make_batches(6, dtype=torch.float32)):
                factor = 1e37 if number == 2 else 1.0

                def loss(piece: Any, factor: float = factor) -> Tensor:
                    with torch.autocast("cpu", torch.bfloat16):
                        prediction = model(piece[0]).squeeze(1)
                    return nn.functional.mse_loss(prediction.float(), piece[1]) * factor

                budget.fail_at(fail_at if 1 <= number <= 4 else None)
                if step is not None:
                    result = step(batch, loss)
                    assert result.skipped == (number == 2)
                else:
                    optimizer.zero_grad()
                    scaler.scale(loss(batch)).backward()
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                    scaler.step(optimizer)
                    scaler.update()
                budget.fail_at(None)
                scales.append(scaler.get_scale())
        return flat(model), scales, scaler.state_dict()

    def test_moves_like_in_a_plain_loop_with_and_without_oom(self) -> None:
        expected, scales, state = self.loop(fail_at=None, recovering=False)
        assert scales[2] == scales[1] / 2
        for fail_at in (None, 1, 5, 9, 13, 17, 21, 25):
            found, found_scales, found_state = self.loop(fail_at=fail_at, recovering=True)
            assert found_scales == scales
            assert found_state == state
            tolerance = 1e-6 if fail_at is None else 2e-3  # bfloat16 sums in another order
            assert (found - expected).abs().max() < tolerance, fail_at


def test_half_precision_parameters_are_summed_in_float32() -> None:
    batches = [(x.bfloat16(), y.bfloat16()) for x, y in make_batches(3, size=300)]
    weights = []
    for batch_size in (300, 1):
        model = make_model(torch.bfloat16)
        step = foxray.recover(torch.optim.SGD(model.parameters(), lr=0.1), batch_size=batch_size)
        for batch in batches:
            assert step(batch, mean_loss(model)).samples == 300
        weights.append(flat(model).float())
    assert (weights[0] - weights[1]).abs().max() < 0.02


def test_zero_grad_between_steps_does_not_detach_the_gradients() -> None:
    batches = make_batches(3)
    model = make_model()
    optimizer = OPTIMIZERS["AdamW fused"](model.parameters())
    step = foxray.recover(optimizer)
    for batch in batches:
        optimizer.zero_grad()
        step(batch, mean_loss(model))
    assert (flat(model) - plain_loop(OPTIMIZERS["AdamW fused"], batches)).abs().max() < 1e-12


def test_schedulers_follow_the_step_not_the_tries() -> None:
    model = make_model()
    optimizer = OPTIMIZERS["SGD momentum"](model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    step = foxray.recover(optimizer, policy=PATIENT)
    with memory_budget(ROOM) as budget:
        for batch in make_batches(3):
            budget.fail_at(5)
            step(batch, mean_loss(model))
            scheduler.step()
    assert len(step.incidents) == 3
    assert optimizer.param_groups[0]["lr"] == 1e-2 * 0.5**3


def test_dropout_with_a_seed_does_not_see_the_split() -> None:
    weights = []
    for batch_size in (32, 8):
        model = nn.Sequential(*make_model(), nn.Dropout(0.0))
        model.insert(2, nn.Dropout(0.4))
        step = foxray.recover(
            OPTIMIZERS["AdamW fused"](model.parameters()), batch_size=batch_size, dropout_seed=1
        )
        for batch in make_batches(3):
            step(batch, mean_loss(model))
        weights.append(flat(model))
    assert (weights[0] - weights[1]).abs().max() < 1e-12
    assert (weights[0] - plain_loop(OPTIMIZERS["AdamW fused"], make_batches(3))).abs().max() > 1e-6


def test_batches_may_be_tensors_dicts_or_nested() -> None:
    model = make_model()
    x, y = make_batches(1)[0]
    step = foxray.recover(OPTIMIZERS["AdamW fused"](model.parameters()), batch_size=5, reduction="sum")
    seen: list[int] = []

    def loss(piece: Any) -> Tensor:
        seen.append(len(piece["x"]))
        return (model(piece["x"]).squeeze(1) - piece["more"][0]).pow(2).sum()

    result = step({"x": x, "more": [y], "name": "train"}, loss)
    assert seen == [5, 5, 5, 5, 5, 5, 2]
    assert result.samples == 32
    with pytest.raises(UserError, match="same number of samples"):
        step({"x": x, "y": y[1:]}, loss)
    with pytest.raises(UserError, match="empty"):
        step({"x": x[:0], "y": y[:0]}, loss)


def test_wrong_arguments_are_named() -> None:
    model = make_model()
    with pytest.raises(UserError, match="reduction is 'max'"):
        foxray.recover(OPTIMIZERS["ASGD"](model.parameters()), reduction="max")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="batch_size is 0"):
        foxray.recover(OPTIMIZERS["ASGD"](model.parameters()), batch_size=0)
    mixed = [*make_model(torch.float32).parameters(), *model.parameters()]
    with pytest.raises(UserError, match=r"found torch.float32 on cpu, torch.float64 on cpu"):
        foxray.recover(torch.optim.SGD(mixed, lr=0.1))


def test_the_example_is_short_and_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 25
    torch.manual_seed(0)
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert "samples 512, computed 256 at a time" in capsys.readouterr().out


def two_ranks(rank: int) -> Tensor:
    model = make_model()
    step = foxray.recover(OPTIMIZERS["AdamW foreach"](model.parameters()), policy=PATIENT)
    with memory_budget(ROOM) as budget:
        for number, (x, y) in enumerate(make_batches(5)):
            if rank == 1 and 0 < number < 4:
                budget.fail_at(10 * number)
            step((x.tensor_split([20])[rank], y.tensor_split([20])[rank]), mean_loss(model))
            budget.fail_at(None)
    assert len(step.incidents) == (3 if rank else 0)
    return flat(model)


@pytest.mark.slow
def test_two_ranks_with_unequal_batches_take_the_step_of_their_union() -> None:
    pair = GlooPair()
    first, second = pair.run(two_ranks)
    pair.close()
    for answer in (first, second):
        if isinstance(answer, Exception):
            raise answer
    assert torch.equal(first, second)
    assert (first - plain_loop(OPTIMIZERS["AdamW foreach"], make_batches(5))).abs().max() < 1e-12

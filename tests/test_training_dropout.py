"""Dropout of a sample does not depend on the micro-batch it is computed in, nor on retries or ranks."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tft_rig import TinyWorkload, tiny_trainer, weights
from torch import Tensor, nn

from foxray.memory.budget import memory_budget
from foxray.training.dropout import BLOCK, RowDropout

CPU = torch.device("cpu")


def dropped(x: Tensor, cuts: list[int], *, per_sample: int = 1, seed: int = 1, calls: int = 2) -> Tensor:
    """Dropout of the same samples, computed in the pieces between `cuts`."""
    mode = RowDropout(CPU)
    samples = len(x) // per_sample
    parts = []
    for first, end in zip([0, *cuts], [*cuts, samples], strict=True):
        with mode.rows(seed=(seed, 7), first=first, count=end - first):
            piece = x[first * per_sample : end * per_sample]
            for _ in range(calls):
                piece = F.dropout(piece, 0.3)
            parts.append(piece)
    return torch.cat(parts)


@settings(max_examples=60, deadline=None)
@given(
    samples=st.integers(2, 40),
    cuts=st.sets(st.integers(1, 39)),
    per_sample=st.sampled_from([1, 3]),
)
def test_a_sample_keeps_its_mask_in_every_split(samples: int, cuts: set[int], per_sample: int) -> None:
    x = torch.randn(samples * per_sample, 5)
    split = sorted(cut for cut in cuts if cut < samples)
    assert torch.equal(dropped(x, split, per_sample=per_sample), dropped(x, [], per_sample=per_sample))


def test_the_mask_does_not_depend_on_the_layout() -> None:
    mode = RowDropout(CPU)
    masks = []
    x_NC = torch.ones(21, 6)
    for x in (x_NC, x_NC.t().contiguous().t(), torch.ones(21, 12)[:, ::2]):
        with mode.rows(seed=(1,), first=2, count=21):
            masks.append(F.dropout(x, 0.5))
    assert masks[1].stride() == (1, 21)
    assert all(torch.equal(mask, masks[0]) for mask in masks)


def test_seeds_steps_calls_and_blocks_have_masks_of_their_own() -> None:
    x = torch.ones(4 * BLOCK, 64)
    once = dropped(x, [], calls=1)
    assert not torch.equal(once, dropped(x, [], calls=1, seed=2))
    blocks = once.split(BLOCK)
    assert all(not torch.equal(blocks[0], block) for block in blocks[1:])
    twice = dropped(x, [], calls=2)
    assert ((twice == 0) & (once != 0)).any()


def test_the_share_that_is_dropped_and_the_scale_are_right() -> None:
    out = dropped(torch.ones(512, 512), [100], calls=1)
    assert abs(float((out == 0).float().mean()) - 0.3) < 0.005
    assert set(out.unique().tolist()) == {0.0, float(torch.tensor(1.0) / 0.7)}


def test_modules_evaluation_and_other_shapes() -> None:
    mode = RowDropout(CPU)
    layer, x = nn.Dropout(0.5), torch.ones(6, 4)
    with mode.rows(seed=(0,), first=0, count=6):
        assert (layer(x) == 0).any()
        assert torch.equal(layer.eval()(x), x)
        shared = F.dropout(torch.ones(7, 3), 0.5)  # no batch in dimension 0
    with mode.rows(seed=(0,), first=6, count=6):
        layer.train()(x)
        assert torch.equal(F.dropout(torch.ones(7, 3), 0.5), shared)
    assert torch.equal(F.dropout(x, 1.0), torch.zeros(6, 4))


def test_gradient_checkpointing_computes_with_the_same_mask() -> None:
    mode = RowDropout(CPU)
    gradients = []
    for recompute in (False, True):
        x = torch.ones(16, 32, requires_grad=True)

        def block(x: Tensor) -> Tensor:
            return F.dropout(x * 2, 0.5).pow(2)

        with mode.rows(seed=(3,), first=0, count=16):
            hidden = (
                torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) if recompute else block(x)
            )
            F.dropout(hidden, 0.5).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def test_a_tft_forward_is_the_same_in_every_split() -> None:
    workload = TinyWorkload(dropout=0.2, dtype=torch.float64)
    workload.place(CPU)
    torch.manual_seed(0)
    model = workload.build_model()
    mode = RowDropout(CPU)
    outputs = []
    for size in (64, 32, 16, 8, 5):
        parts = []
        for piece in torch.arange(64).split(size):
            with mode.rows(seed=(1, 1), first=int(piece[0]), count=len(piece)):
                parts.append(model(workload.x_NTF[piece]))
        outputs.append(torch.cat(parts))
    assert all((output - outputs[0]).abs().max() < 1e-13 for output in outputs)
    with torch.no_grad():
        assert (model(workload.x_NTF[:64]) - outputs[0]).abs().max() > 1e-3  # there is dropout


def test_a_run_with_dropout_ends_the_same_with_and_without_oom(tmp_path: Path) -> None:
    ends = []
    with memory_budget(1 << 30) as budget:
        for failing in (False, True):
            workload = TinyWorkload(dropout=0.2, dtype=torch.float64, num_train=160)
            trainer, authority = tiny_trainer(
                tmp_path / str(failing),
                workload,
                epochs=2,
                on_commit=lambda samples: budget.fail_at(100) if failing else None,  # noqa: B023
            )
            trainer.train()
            budget.fail_at(None)
            assert len(authority.attempts) == (6 if failing else 0)
            ends.append(weights(trainer))
    plain, with_ooms = ends
    for name in plain:
        assert (plain[name] - with_ooms[name]).abs().max() < 1e-9, name


@pytest.mark.parametrize("count", [3, 8, 20])
def test_dropout_allocates_little_beyond_torchs_own(count: int) -> None:
    with memory_budget(1 << 30) as budget:
        x = torch.ones(count * 16, 256)
        peaks = []
        for mode in (None, RowDropout(CPU)):
            budget.reset_peak()
            before = budget.live_bytes
            if mode is None:
                F.dropout(x, 0.5)
            else:
                with mode.rows(seed=(0,), first=0, count=count):
                    F.dropout(x, 0.5)
            peaks.append(budget.peak_bytes - before)
    assert peaks[1] <= peaks[0] + 16 * 256 * 4 * BLOCK + 2048

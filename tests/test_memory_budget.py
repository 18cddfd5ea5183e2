"""The emulated budget: genuine errors, exact counts, and nothing left behind; in both of its modes."""

from __future__ import annotations

import random
import threading

import pytest
import torch
from memory_modes import both_modes, mib, needs_allocator, quiet  # noqa: F401
from torch import nn
from torch.utils.data import DataLoader, Dataset

from foxray.errors import UserError
from foxray.memory.budget import (
    NO_LIMIT,
    Mode,
    current_budget,
    host_memory,
    install_budget,
    memory_budget,
    uninstall_budget,
)
from foxray.memory.catalogue import MIB
from foxray.memory.device import device_memory

CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("quiet")


# --- the error ---------------------------------------------------------------------------------------------


@both_modes
def test_what_does_not_fit_raises_the_genuine_error_with_cudas_words(mode: Mode) -> None:
    with memory_budget(100 * MIB, mode=mode, gpu_index=3) as budget:
        held = mib(30)
        with pytest.raises(torch.OutOfMemoryError) as raised:
            mib(96)
    assert len(raised.value.args) == 1
    assert raised.value.args[0].startswith(
        "CUDA out of memory. Tried to allocate 96.00 MiB. GPU 3 has a total capacity of 100.00 MiB of which "
        "70.00 MiB is free. Of the allocated memory 30.00 MiB is allocated by PyTorch, "
    )
    assert held.numel() == 30 * MIB and budget.mode == mode


@needs_allocator
def test_a_request_above_an_exabyte_is_refused_in_cudas_words() -> None:
    with (
        memory_budget(MIB, mode="allocator") as budget,
        pytest.raises(
            torch.OutOfMemoryError, match=r"^CUDA out of memory\. Tried to allocate more than 1EB memory\.$"
        ),
    ):
        torch.empty(2**60 + 1, dtype=torch.uint8)
    assert budget.live_bytes == 0


@needs_allocator
def test_a_host_that_has_no_memory_left_is_not_the_emulated_device_and_uncharges() -> None:
    with memory_budget(NO_LIMIT, mode="allocator") as budget:
        with pytest.raises(RuntimeError, match="allocate memory") as raised:
            torch.empty(2**59, dtype=torch.uint8)
        assert not isinstance(raised.value, torch.OutOfMemoryError)
        assert budget.live_bytes == 0


# --- counting ----------------------------------------------------------------------------------------------


@both_modes
def test_live_peak_free_and_count_follow_the_tensors_in_512_byte_blocks(mode: Mode) -> None:
    with memory_budget(10 * MIB, mode=mode) as budget:
        small = torch.zeros(1)
        assert (budget.live_bytes, budget.allocation_count) == (512, 1)
        large = torch.zeros(MIB // 4)
        view = large[10:20]
        large.neg_()
        torch.zeros(0)
        assert (budget.live_bytes, budget.allocation_count) == (MIB + 512, 2)
        del large
        assert budget.live_bytes == MIB + 512, "a view keeps its storage"
        del view
        assert (budget.live_bytes, budget.peak_bytes) == (512, MIB + 512)
        assert budget.free_bytes == 10 * MIB - 512
        budget.reset_peak()
        assert budget.peak_bytes == 512
        small.resize_(MIB // 4)
        assert budget.live_bytes == MIB


@both_modes
def test_the_limit_itself_fits_and_one_block_more_does_not(mode: Mode) -> None:
    with memory_budget(MIB, mode=mode) as budget:
        held = mib(1)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(1)
        assert budget.live_bytes == held.numel()


@both_modes
def test_exactly_the_chosen_allocation_fails_and_only_once(mode: Mode) -> None:
    with memory_budget(10 * MIB, mode=mode) as budget:
        for k in (1, 2, 5):
            budget.fail_at(k)
            held = [torch.empty(8) for _ in range(k - 1)]
            with pytest.raises(
                torch.OutOfMemoryError, match=r"^CUDA out of memory\. Tried to allocate 512 bytes"
            ):
                torch.empty(8)
            held.append(torch.empty(8))
            assert len(held) == k
        budget.fail_at(1)
        budget.fail_at(None)
        torch.empty(8)
        with pytest.raises(ValueError, match="counted from 1"):
            budget.fail_at(0)


@both_modes
def test_host_memory_is_not_charged_and_nests(mode: Mode) -> None:
    with memory_budget(MIB, mode=mode) as budget:
        with host_memory():
            with host_memory():
                table = torch.ones(MIB)
            more = torch.ones(MIB)
        assert budget.live_bytes == 0
        window = table[5:10]  # a view of host memory stays host memory
        assert budget.live_bytes == 0
        batch = window.clone()
        assert budget.live_bytes == 512
        with pytest.raises(torch.OutOfMemoryError):
            more.clone()
        assert batch.sum() == 5
    with host_memory():
        torch.ones(1)


@both_modes
def test_host_memory_is_this_threads_alone(mode: Mode) -> None:
    with memory_budget(4 * MIB, mode=mode) as budget:
        entered, leave = threading.Event(), threading.Event()

        def elsewhere() -> None:
            with host_memory():
                entered.set()
                leave.wait(10)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        entered.wait(10)
        held = mib(1)
        assert budget.live_bytes == held.numel()
        leave.set()
        thread.join()


@both_modes
def test_the_limit_can_be_moved_and_released(mode: Mode) -> None:
    with memory_budget(MIB, mode=mode, label="RTX 3050 Ti") as budget:
        assert budget.limited and device_memory(CPU).label == "RTX 3050 Ti"
        budget.set_limit(2 * MIB)
        held = mib(1.5)
        budget.set_limit(MIB)
        assert (budget.limit_bytes, budget.free_bytes) == (MIB, 0)
        budget.release_limit()
        more = mib(8)
        assert budget.limit_bytes == NO_LIMIT and not budget.limited
        assert budget.live_bytes == held.numel() + more.numel()
        assert device_memory(CPU).label == "cpu"


@needs_allocator
def test_two_threads_share_one_budget_and_never_overdraw_it() -> None:
    with memory_budget(8 * MIB, mode="allocator") as budget:
        failures = []

        def churn(seed: int) -> None:
            draw = random.Random(seed)
            held: list[torch.Tensor] = []
            for _ in range(2000):
                try:
                    held.append(torch.empty(draw.randrange(1, MIB)))
                except torch.OutOfMemoryError:
                    failures.append(seed)
                    held.clear()

        threads = [threading.Thread(target=churn, args=(seed,)) for seed in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert set(failures) == {1, 2}
        assert budget.peak_bytes <= 8 * MIB
        assert budget.live_bytes == 0


# --- blocks that outlive a budget, or are older than it -----------------------------------------------------


@both_modes
def test_blocks_give_their_bytes_back_to_the_budget_they_came_from(mode: Mode) -> None:
    before = mib(3)
    with memory_budget(8 * MIB, mode=mode) as first:
        inside = mib(2)
        del before
        assert first.live_bytes == 2 * MIB
    assert first.live_bytes == 2 * MIB
    with memory_budget(8 * MIB, mode=mode) as second:
        other = mib(1)
        del inside
        assert (first.live_bytes, second.live_bytes) == (0, 1 * MIB)
    del other
    assert second.live_bytes == 0


@needs_allocator
def test_raw_blocks_of_onednn_cross_the_borders_of_a_budget() -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("torch without oneDNN")
    values = torch.randn(64, 64)
    before = values.to_mkldnn()
    with memory_budget(8 * MIB, mode="allocator") as budget:
        inside = values.to_mkldnn()
        assert budget.live_bytes >= values.nbytes
        assert torch.equal(before.to_dense(), values)
        del before
    assert torch.equal(inside.to_dense(), values)
    del inside
    assert budget.live_bytes == 0


@both_modes
def test_dispatch_mode_charges_older_tensors_when_asked_to_and_once(mode: Mode) -> None:
    model = nn.Linear(256, 256, bias=False)
    with memory_budget(MIB, mode=mode) as budget:
        budget.charge([*model.parameters(), model.weight.detach()[3:]])
        assert budget.live_bytes == (model.weight.nbytes if mode == "dispatch" else 0)
        if mode == "dispatch":
            with pytest.raises(torch.OutOfMemoryError):
                budget.charge([nn.Linear(512, 512).weight])


@both_modes
def test_a_forked_data_loader_worker_is_host_memory(mode: Mode) -> None:
    class Heavy(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> torch.Tensor:
            assert current_budget() is None
            return torch.full((4 * MIB,), float(index))[:4].clone()

    with memory_budget(MIB, mode=mode) as budget:
        loader = DataLoader(Heavy(), batch_size=2, num_workers=1, multiprocessing_context="fork")
        (batch,) = list(loader)
        assert batch[1].tolist() == [1.0] * 4
        assert budget.live_bytes < MIB


# --- life of a budget --------------------------------------------------------------------------------------


@both_modes
def test_budgets_do_not_nest_and_can_follow_each_other(mode: Mode) -> None:
    with memory_budget(MIB, mode=mode) as outer:
        assert current_budget() is outer
        with pytest.raises(RuntimeError, match=r"1\.00 MiB is active already"), memory_budget(MIB, mode=mode):
            pass
        with pytest.raises(torch.OutOfMemoryError):
            mib(2)
    with memory_budget(3 * MIB, mode=mode):
        mib(2)
    mib(4)


@both_modes
def test_an_installed_budget_lasts_until_it_is_uninstalled(mode: Mode) -> None:
    installed = install_budget(MIB, mode=mode)
    try:
        assert current_budget() is installed
        with pytest.raises(torch.OutOfMemoryError):
            mib(2)
    finally:
        uninstall_budget()
    with pytest.raises(RuntimeError, match="no memory budget"):
        uninstall_budget()


def test_a_budget_is_above_zero_and_on_a_device_that_has_one() -> None:
    with pytest.raises(ValueError, match="above 0"), memory_budget(0):
        pass
    with pytest.raises(UserError, match="cpu or cuda"), memory_budget(MIB, device="meta"):
        pass

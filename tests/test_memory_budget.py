"""The emulated budget: genuine errors, exact counts, and nothing left behind; in both of its modes."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from foxray.errors import UserError
from foxray.memory import native
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
from foxray.memory.device import device_memory, gpu_identity
from foxray.memory.sampler import GpuSample, host_memory_bytes, sample_gpu

CPU = torch.device("cpu")


def _has_allocator() -> bool:
    try:
        native.load_library()
    except native.CompilerMissing:
        return False
    return True


needs_allocator = pytest.mark.skipif(not _has_allocator(), reason="no C++ compiler")
both_modes = pytest.mark.parametrize("mode", [pytest.param("allocator", marks=needs_allocator), "dispatch"])


def _mib(count: float) -> torch.Tensor:
    return torch.empty(int(count * MIB), dtype=torch.uint8)


@pytest.fixture(autouse=True)
def _one_thread_and_no_budget_left() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the steps are tiny, and waking threads takes ten times as long as they do
    yield
    torch.set_num_threads(threads)
    assert current_budget() is None


# --- the error ---------------------------------------------------------------------------------------------


@both_modes
def test_what_does_not_fit_raises_the_genuine_error_with_cudas_words(mode: Mode) -> None:
    with memory_budget(100 * MIB, mode=mode, gpu_index=3) as budget:
        held = _mib(30)
        with pytest.raises(torch.OutOfMemoryError) as raised:
            _mib(96)
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
        held = _mib(1)
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
        held = _mib(1)
        assert budget.live_bytes == held.numel()
        leave.set()
        thread.join()


@both_modes
def test_the_limit_can_be_moved_and_released(mode: Mode) -> None:
    with memory_budget(MIB, mode=mode, label="RTX 3050 Ti") as budget:
        assert budget.limited and device_memory(CPU).label == "RTX 3050 Ti"
        budget.set_limit(2 * MIB)
        held = _mib(1.5)
        budget.set_limit(MIB)
        assert (budget.limit_bytes, budget.free_bytes) == (MIB, 0)
        budget.release_limit()
        more = _mib(8)
        assert budget.limit_bytes == NO_LIMIT and not budget.limited
        assert budget.live_bytes == held.numel() + more.numel()
        assert device_memory(CPU).label == "cpu"


# --- training steps ----------------------------------------------------------------------------------------


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
        activations = _mib(52).zero_()
        return activations + _mib(52)

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
    before = _mib(3)
    with memory_budget(8 * MIB, mode=mode) as first:
        inside = _mib(2)
        del before
        assert first.live_bytes == 2 * MIB
    assert first.live_bytes == 2 * MIB
    with memory_budget(8 * MIB, mode=mode) as second:
        other = _mib(1)
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
            _mib(2)
    with memory_budget(3 * MIB, mode=mode):
        _mib(2)
    _mib(4)


@both_modes
def test_an_installed_budget_lasts_until_it_is_uninstalled(mode: Mode) -> None:
    installed = install_budget(MIB, mode=mode)
    try:
        assert current_budget() is installed
        with pytest.raises(torch.OutOfMemoryError):
            _mib(2)
    finally:
        uninstall_budget()
    with pytest.raises(RuntimeError, match="no memory budget"):
        uninstall_budget()


def test_a_budget_is_above_zero_and_on_a_device_that_has_one() -> None:
    with pytest.raises(ValueError, match="above 0"), memory_budget(0):
        pass
    with pytest.raises(UserError, match="cpu or cuda"), memory_budget(MIB, device="meta"):
        pass


SCRIPT = """
import logging, sys, torch
logging.basicConfig(format="%(levelname)s %(message)s")
from foxray.memory.budget import memory_budget
with memory_budget(2**20) as budget:
    print(budget.mode)
    try:
        torch.zeros(2**20)
    except torch.OutOfMemoryError as error:
        print(error)
"""


def _start(environment: dict[str, str]) -> subprocess.Popen[str]:
    kept = {key: value for key, value in os.environ.items() if key != "CXX"}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT], env=kept | environment, stdout=pipe, stderr=pipe, text=True
    )


def _finish(process: subprocess.Popen[str]) -> SimpleNamespace:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    mode, message = out.splitlines()
    assert message.startswith("CUDA out of memory. Tried to allocate 4.00 MiB.")
    return SimpleNamespace(mode=mode, warnings=[line for line in err.splitlines() if "WARNING" in line])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "reason"),
    [({"PATH": ""}, "no C++ compiler found"), ({"CXX": "/bin/false"}, "/bin/false failed with status 1")],
)
def test_without_a_working_compiler_it_says_so_in_one_line_and_still_raises(
    environment: dict[str, str], reason: str, tmp_path: Path
) -> None:
    ended = _finish(_start({"XDG_CACHE_HOME": str(tmp_path), **environment}))
    assert ended.mode == "dispatch"
    assert len(ended.warnings) == 1 and reason in ended.warnings[0]


@pytest.mark.slow
@needs_allocator
def test_processes_that_start_together_build_one_library(tmp_path: Path) -> None:
    processes = [_start({"XDG_CACHE_HOME": str(tmp_path)}) for _ in range(3)]
    for process in processes:
        ended = _finish(process)
        assert ended.mode == "allocator" and not ended.warnings
    assert [path.suffix for path in (tmp_path / "foxray").iterdir()] == [".so"]


@pytest.mark.slow
@needs_allocator
def test_a_cache_that_cannot_be_written_is_done_without() -> None:
    assert _finish(_start({"XDG_CACHE_HOME": "/dev/null"})).mode == "allocator"


# --- the seam towards the device ----------------------------------------------------------------------------


@both_modes
def test_the_emulated_device_looks_like_a_card(mode: Mode) -> None:
    with memory_budget(8 * MIB, mode=mode, label="RTX 3050 Ti"):
        device = device_memory(CPU)
        held = _mib(1)
        assert (device.label, device.total_bytes, device.free_bytes) == ("RTX 3050 Ti", 8 * MIB, 7 * MIB)
        assert (device.live_bytes, device.peak_bytes) == (MIB, MIB)
        del held
        device.reset_peak()
        device.empty_cache()
        assert device.peak_bytes == 0
        assert gpu_identity(CPU) == ("RTX 3050 Ti", None)


def test_the_plain_host_knows_its_size_and_no_more() -> None:
    device = device_memory(CPU)
    host = host_memory_bytes()
    assert device.total_bytes == host.total_bytes
    assert 0 < host.available_bytes <= host.total_bytes
    assert (device.label, device.live_bytes, device.peak_bytes) == ("cpu", None, None)
    assert gpu_identity(CPU) == ("cpu", None)


def test_a_gpu_that_is_not_there_has_no_sample() -> None:
    assert sample_gpu("GPU-00000000-0000-0000-0000-000000000000") is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_cuda_budget_caps_the_caching_allocator_and_is_lifted_again() -> None:
    device = torch.device("cuda", 0)

    def allocate(mib: int) -> torch.Tensor:
        return torch.empty(mib * MIB, dtype=torch.uint8, device=device)

    torch.cuda.empty_cache()
    limit = torch.cuda.memory_reserved(device) + 256 * MIB
    with memory_budget(limit, device="cuda") as budget:
        held = allocate(100)
        assert budget.mode == "cuda" and budget.live_bytes >= 100 * MIB
        assert device_memory(device).total_bytes == limit
        with pytest.raises(torch.OutOfMemoryError, match=r"CUDA out of memory\."):
            allocate(300)
        del held
    device_memory(device).empty_cache()
    allocate(300)
    uuid = gpu_identity(device)[1]
    assert uuid is not None
    sample = sample_gpu(uuid)
    assert isinstance(sample, GpuSample) and 0 < sample.used_bytes <= sample.total_bytes

"""How the emulated device is built, and the seam through which the rest of foxray sees any device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from memory_modes import both_modes, mib, needs_allocator, quiet  # noqa: F401

from foxray.memory.budget import Mode, memory_budget
from foxray.memory.catalogue import MIB
from foxray.memory.device import device_memory, gpu_identity
from foxray.memory.sampler import GpuSample, host_memory_bytes, sample_gpu

CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("quiet")


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
    out, err = process.communicate(timeout=300)
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
        held = mib(1)
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

"""What the GPUs and the host are doing now, as the driver sees it: other processes included.

NVML is asked through `nvidia-ml-py`. Where there is no NVIDIA driver there is no sample, which is an
ordinary answer and not an error. NVML numbers all GPUs of the machine and knows nothing of
`CUDA_VISIBLE_DEVICES`, so prefer the UUID.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pynvml


@dataclass(frozen=True, kw_only=True)
class GpuSample:
    """One look at one GPU."""

    used_bytes: int
    """Memory in use by all processes and the driver."""
    total_bytes: int
    """Memory of the card."""
    utilisation_ratio: float | None
    """Share of the last moment (1/6 to 1 s) in which a kernel ran; None where the card does not say."""
    temperature_celsius: int | None
    """Of the chip; None where the card does not say."""


@dataclass(frozen=True, kw_only=True)
class HostSample:
    """One look at the memory of this machine."""

    total_bytes: int
    """Physical memory."""
    available_bytes: int
    """What can be allocated without swapping, by the kernel's estimate."""


@functools.cache
def _nvml_works() -> bool:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    return True


def sample_gpu(index_or_uuid: int | str) -> GpuSample | None:
    """A sample of the GPU with that NVML index or UUID ("GPU-..."); None without NVML or without that GPU."""
    if not _nvml_works():
        return None
    try:
        if isinstance(index_or_uuid, int):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index_or_uuid)
        else:
            handle = pynvml.nvmlDeviceGetHandleByUUID(index_or_uuid)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    except pynvml.NVMLError:
        return None
    percent = _if_known(lambda: int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu))
    return GpuSample(
        used_bytes=int(memory.used),
        total_bytes=int(memory.total),
        utilisation_ratio=None if percent is None else percent / 100,
        temperature_celsius=_if_known(
            lambda: int(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU))
        ),
    )


def _if_known(read: Callable[[], int]) -> int | None:
    # A MIG slice has no utilisation of its own, a passively reported card may have no temperature.
    try:
        return read()
    except pynvml.NVMLError:
        return None


def host_memory_bytes() -> HostSample:
    """Total and available memory of this machine, by /proc/meminfo where there is one."""
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    total_bytes = os.sysconf("SC_PHYS_PAGES") * page_bytes
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return HostSample(total_bytes=total_bytes, available_bytes=int(line.split()[1]) * 1024)
    return HostSample(total_bytes=total_bytes, available_bytes=os.sysconf("SC_AVPHYS_PAGES") * page_bytes)

"""The one seam towards the device: what is above asks for bytes and names here, and never asks CUDA itself.

Three devices look alike: a GPU, an emulated GPU (an active budget on the CPU) and the plain host. A figure
that a device cannot know is None.
"""

from __future__ import annotations

from typing import Protocol

import torch

from foxray.memory.budget import Budget, current_budget
from foxray.memory.sampler import host_memory_bytes


class DeviceMemory(Protocol):
    """Memory of the device a worker trains on; all sizes in bytes, None where unknown."""

    @property
    def label(self) -> str:
        """The card's name, the size of an emulated one, or "cpu"."""

    @property
    def total_bytes(self) -> int | None:
        """What the device has, within the budget if there is one."""

    @property
    def free_bytes(self) -> int | None:
        """What this process can still put in tensors."""

    @property
    def live_bytes(self) -> int | None:
        """What is in tensors now."""

    @property
    def peak_bytes(self) -> int | None:
        """The most that was in tensors since `reset_peak`."""

    def reset_peak(self) -> None:
        """Start measuring the peak again."""

    def empty_cache(self) -> None:
        """Give cached blocks back to the device, after all its work is done."""


class _EmulatedMemory:
    def __init__(self, budget: Budget) -> None:
        self._budget = budget

    @property
    def label(self) -> str:
        # Without its limit it is no longer that card but the host.
        return self._budget.label if self._budget.limited else "cpu"

    @property
    def total_bytes(self) -> int | None:
        return self._budget.limit_bytes if self._budget.limited else host_memory_bytes().total_bytes

    @property
    def free_bytes(self) -> int | None:
        return self._budget.free_bytes if self._budget.limited else host_memory_bytes().available_bytes

    @property
    def live_bytes(self) -> int | None:
        return self._budget.live_bytes

    @property
    def peak_bytes(self) -> int | None:
        return self._budget.peak_bytes

    def reset_peak(self) -> None:
        self._budget.reset_peak()

    def empty_cache(self) -> None:
        """Nothing to do: freed blocks leave the emulated device at once."""


class _CudaMemory:
    """Source: PyTorch's documentation of `torch.cuda` memory management."""

    def __init__(self, index: int) -> None:
        self._index = index

    @property
    def _budget(self) -> Budget | None:
        budget = current_budget()
        return budget if budget is not None and budget.mode == "cuda" and budget.limited else None

    @property
    def label(self) -> str:
        return self._budget.label if self._budget else torch.cuda.get_device_name(self._index)

    @property
    def total_bytes(self) -> int | None:
        return self._budget.limit_bytes if self._budget else torch.cuda.mem_get_info(self._index)[1]

    @property
    def free_bytes(self) -> int | None:
        # Blocks that the caching allocator holds without a tensor in them can be used again.
        cached_bytes = torch.cuda.memory_reserved(self._index) - torch.cuda.memory_allocated(self._index)
        on_card_bytes = torch.cuda.mem_get_info(self._index)[0] + cached_bytes
        return min(on_card_bytes, self._budget.free_bytes) if self._budget else on_card_bytes

    @property
    def live_bytes(self) -> int | None:
        return torch.cuda.memory_allocated(self._index)

    @property
    def peak_bytes(self) -> int | None:
        return torch.cuda.max_memory_allocated(self._index)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._index)

    def empty_cache(self) -> None:
        torch.cuda.synchronize(self._index)
        torch.cuda.empty_cache()


class _HostMemory:
    label = "cpu"
    live_bytes = None
    peak_bytes = None

    @property
    def total_bytes(self) -> int | None:
        return host_memory_bytes().total_bytes

    @property
    def free_bytes(self) -> int | None:
        return host_memory_bytes().available_bytes

    def reset_peak(self) -> None:
        """Nothing to do: nothing counts the host's tensors."""

    def empty_cache(self) -> None:
        """Nothing to do: there is no cache."""


def device_memory(device: torch.device) -> DeviceMemory:
    """The memory of `device`: of the emulated GPU where a budget is active on the CPU."""
    if device.type == "cuda":
        return _CudaMemory(_cuda_index(device))
    budget = current_budget()
    return _HostMemory() if budget is None or budget.mode == "cuda" else _EmulatedMemory(budget)


def gpu_identity(device: torch.device) -> tuple[str, str | None]:
    """The card's name and its UUID as NVML has it ("GPU-..."); an emulated card and the CPU have none."""
    uuid = None
    if device.type == "cuda":
        uuid = f"GPU-{torch.cuda.get_device_properties(_cuda_index(device)).uuid}"
    return device_memory(device).label, uuid


def _cuda_index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index

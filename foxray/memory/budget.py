"""A device that has only so much memory, so that running out of it can be rehearsed, tested and capped.

On the CPU the budget emulates a GPU: every tensor allocated while it is active is charged, and the one
that does not fit raises a genuine `torch.OutOfMemoryError` with CUDA's words, in forward, backward or
optimizer alike. It works inside torch's own CPU allocator where a C++ compiler is found (all threads, no
measurable cost) and otherwise by watching operations (`foxray.memory.dispatch` says what that misses). On
CUDA it caps the caching allocator.

Under emulation the host is the device, so host memory is a scope: what is allocated in `host_memory()` is
not charged. A child process is host memory too: a forked data loader starts without the budget. One
budget is active in a process at a time. A block gives its bytes back to the budget it was charged to,
whenever it is freed, so tensors may outlive their budget.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Literal, Protocol

import torch

from foxray.errors import UserError
from foxray.memory.catalogue import format_bytes
from foxray.memory.dispatch import NO_LIMIT, DispatchAccount
from foxray.memory.native import CompilerMissing, NativeAccount

Mode = Literal["auto", "allocator", "dispatch"]

_log = logging.getLogger(__name__)


class _Account(Protocol):
    @property
    def mode(self) -> str: ...
    @property
    def live_bytes(self) -> int: ...
    @property
    def peak_bytes(self) -> int: ...
    @property
    def allocation_count(self) -> int: ...
    def activate(self) -> None: ...
    def deactivate(self) -> None: ...
    def reset_peak(self) -> None: ...
    def set_limit(self, limit_bytes: int) -> None: ...
    def fail_at(self, k: int) -> None: ...
    def charge(self, tensors: Iterable[torch.Tensor]) -> None: ...
    def enter_host(self) -> None: ...
    def leave_host(self) -> None: ...
    def forget_after_fork(self) -> None: ...


class Budget:
    """The active emulated, or capped, device. Its figures stay readable after it has ended."""

    def __init__(self, account: _Account, limit_bytes: int, label: str) -> None:
        self._account = account
        self._limit_bytes = limit_bytes
        self._label = label

    @property
    def label(self) -> str:
        """The card's name where one is emulated, otherwise the size."""
        return self._label

    @property
    def mode(self) -> str:
        """How the limit is enforced: `allocator`, `dispatch` or `cuda`."""
        return self._account.mode

    @property
    def limit_bytes(self) -> int:
        """What the device has; `NO_LIMIT` (2**63 - 1) once the limit is released."""
        return self._limit_bytes

    @property
    def limited(self) -> bool:
        """False once the limit is released."""
        return self._limit_bytes != NO_LIMIT

    @property
    def live_bytes(self) -> int:
        """Charged and not yet freed, each block rounded up to 512 bytes."""
        return self._account.live_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that was live at once since the budget began or `reset_peak`."""
        return self._account.peak_bytes

    @property
    def free_bytes(self) -> int:
        """What may still be allocated."""
        return max(0, self._limit_bytes - self.live_bytes)

    @property
    def allocation_count(self) -> int:
        """Allocations granted so far."""
        return self._account.allocation_count

    def reset_peak(self) -> None:
        """Start measuring the peak again, from what is live now."""
        self._account.reset_peak()

    def fail_at(self, k: int | None) -> None:
        """Let the k-th allocation from now on (1 is the next) run out of memory, once; None calls it off."""
        if k is not None and k < 1:
            raise ValueError(f"fail_at({k}): allocations are counted from 1; None calls the failure off")
        self._account.fail_at(k or 0)

    def charge(self, tensors: Iterable[torch.Tensor]) -> None:
        """Charge tensors made before the budget began (parameters, optimizer state, a batch), once each.

        Only the dispatch mode can; the others count what is allocated while they are active, and ignore it.
        Raises `torch.OutOfMemoryError` where they do not fit.
        """
        self._account.charge(tensors)

    def set_limit(self, limit_bytes: int) -> None:
        """Change what the device has; what is live already stays, even above it."""
        _check_limit(limit_bytes)
        self._account.set_limit(limit_bytes)
        self._limit_bytes = limit_bytes

    def release_limit(self) -> None:
        """Lift the limit and go on counting: from here the device is the host itself."""
        self._account.set_limit(NO_LIMIT)
        self._limit_bytes = NO_LIMIT


class _CudaAccount:
    """A cap on the caching allocator of one CUDA device; the counts are the allocator's own.

    The cap is on what the allocator reserves, so fragmentation counts against it. Source: PyTorch's
    documentation of `torch.cuda.memory.set_per_process_memory_fraction`.
    """

    mode = "cuda"

    def __init__(self, limit_bytes: int, index: int) -> None:
        self._index = index
        self._total_bytes = torch.cuda.mem_get_info(index)[1]
        if limit_bytes > self._total_bytes:
            raise UserError(
                f"a budget of {format_bytes(limit_bytes)} does not fit on GPU {index}, "
                f"which has {format_bytes(self._total_bytes)}; give a smaller card or size"
            )
        self._limit_bytes = limit_bytes
        self._fraction_before = 1.0

    def activate(self) -> None:
        self._fraction_before = torch.cuda.get_per_process_memory_fraction(self._index)
        self.set_limit(self._limit_bytes)

    def deactivate(self) -> None:
        torch.cuda.set_per_process_memory_fraction(self._fraction_before, self._index)

    @property
    def live_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._index)

    @property
    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self._index)

    @property
    def allocation_count(self) -> int:
        return int(torch.cuda.memory_stats(self._index).get("allocation.all.allocated", 0))

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._index)

    def set_limit(self, limit_bytes: int) -> None:
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / self._total_bytes), self._index)

    def fail_at(self, k: int) -> None:
        if k:
            raise RuntimeError("a real GPU cannot fail at a chosen allocation; emulate one on the CPU")

    def charge(self, tensors: Iterable[torch.Tensor]) -> None:
        """Nothing to do: the caching allocator has counted every tensor on the device."""

    def enter_host(self) -> None:
        """Nothing to do: host memory is not the device's."""

    def leave_host(self) -> None:
        """Nothing to do: host memory is not the device's."""

    def forget_after_fork(self) -> None:
        """Nothing to do: CUDA is not usable in a forked child."""


_lock = threading.Lock()
_current: Budget | None = None


def current_budget() -> Budget | None:
    """The budget active in this process."""
    return _current


def install_budget(
    limit_bytes: int,
    *,
    device: str | torch.device = "cpu",
    mode: Mode = "auto",
    gpu_index: int = 0,
    label: str | None = None,
) -> Budget:
    """Begin a budget that lasts until `uninstall_budget()` or the end of the process.

    `device` is `cpu` (emulate) or `cuda` (cap GPU `gpu_index`). `mode` is for the CPU: `allocator` needs a
    C++ compiler, `dispatch` sees only the calling thread, `auto` takes the first that works, so begin the
    budget in the thread that trains. `gpu_index` is the number in the error's text; `label` names the card.

    Raises RuntimeError if a budget is active already, UserError if the device cannot do it.
    """
    global _current
    _check_limit(limit_bytes)
    with _lock:
        if _current is not None:
            raise RuntimeError(
                f"a memory budget of {format_bytes(_current.limit_bytes)} is active already and budgets do "
                "not nest; leave it, or call uninstall_budget(), first"
            )
        account = _new_account(limit_bytes, torch.device(device), mode, gpu_index)
        account.activate()
        _current = Budget(account, limit_bytes, label or format_bytes(limit_bytes))
        return _current


def uninstall_budget() -> None:
    """End the active budget, in the thread that began it. Raises RuntimeError where there is none."""
    global _current
    with _lock:
        if _current is None:
            raise RuntimeError("no memory budget is active")
        _current._account.deactivate()
        _current = None


@contextmanager
def memory_budget(
    limit_bytes: int,
    *,
    device: str | torch.device = "cpu",
    mode: Mode = "auto",
    gpu_index: int = 0,
    label: str | None = None,
) -> Iterator[Budget]:
    """The device has only `limit_bytes` inside this context; see `install_budget`."""
    budget = install_budget(limit_bytes, device=device, mode=mode, gpu_index=gpu_index, label=label)
    try:
        yield budget
    finally:
        uninstall_budget()


@contextmanager
def host_memory() -> Iterator[None]:
    """Allocations of this thread in here are host memory, not charged to the emulated device. Nests.

    Threads that a kernel starts on its own are not covered; they rarely allocate.
    """
    if _current is None:
        yield
        return
    account = _current._account
    account.enter_host()
    try:
        yield
    finally:
        account.leave_host()


def _check_limit(limit_bytes: int) -> None:
    if not 0 < limit_bytes <= NO_LIMIT:
        raise ValueError(f"a memory budget of {limit_bytes} bytes; it must be above 0")


def _new_account(limit_bytes: int, device: torch.device, mode: Mode, gpu_index: int) -> _Account:
    if device.type == "cuda":
        return _CudaAccount(limit_bytes, gpu_index if device.index is None else device.index)
    if device.type != "cpu":
        raise UserError(f"a memory budget needs the device cpu or cuda, not {device.type!r}")
    if mode == "dispatch":
        return DispatchAccount(limit_bytes, gpu_index)
    try:
        return NativeAccount(limit_bytes, gpu_index)
    except CompilerMissing as problem:
        if mode == "allocator":
            raise UserError(
                f"the allocator mode needs a C++ compiler: {problem}; use the mode auto"
            ) from problem
        _log.warning("emulating GPU memory by watching operations, slower and less exact: %s", problem)
        return DispatchAccount(limit_bytes, gpu_index)


def _forget_in_child() -> None:
    global _current
    if _current is not None:
        _current._account.forget_after_fork()
        _current = None


os.register_at_fork(after_in_child=_forget_in_child)

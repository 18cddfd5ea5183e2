"""The emulated GPU without a compiler: a `TorchDispatchMode` that charges each operation's new storages.

It sees what operations return, in forward, backward and optimizer, and raises after the operation that
went over. Weaker than the allocator in four ways: it sees only the thread that entered it, it misses what a
kernel allocates and frees within itself, tensors made from Python or NumPy data are free until an
operation copies them, and `torch.compile` falls back to eager under any dispatch mode. Tensors that exist
before it is entered are free too, until `charge` is called for them.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from foxray.memory.catalogue import format_bytes

NO_LIMIT = 2**63 - 1
_ROUNDING_BYTES = 512  # as CUDA's caching allocator


class DispatchAccount:
    """The bytes of one budget, counted from the results of operations in the thread that activates it."""

    mode = "dispatch"

    def __init__(self, limit_bytes: int, gpu_index: int) -> None:
        self._limit_bytes = limit_bytes
        self._gpu_index = gpu_index
        self._live_bytes = 0
        self._peak_bytes = 0
        self._allocation_count = 0
        self._until_failure = 0
        self._lock = threading.Lock()
        # Storage address -> (weak reference, bytes charged).
        self._charged: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        # Storages die in any thread, and in the middle of any line if the garbage collector runs. Their
        # callbacks therefore only leave a note here, which needs no lock; the next count settles it.
        self._dead: deque[tuple[int, weakref.ref[torch.UntypedStorage]]] = deque()
        self._host = threading.local()
        self._mode = _ChargingMode(self)

    def activate(self) -> None:
        self._mode.__enter__()  # type: ignore[no-untyped-call]

    def deactivate(self) -> None:
        self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    @property
    def live_bytes(self) -> int:
        with self._lock:
            self._settle()
            return self._live_bytes

    @property
    def peak_bytes(self) -> int:
        return self._peak_bytes

    @property
    def allocation_count(self) -> int:
        return self._allocation_count

    def reset_peak(self) -> None:
        self._peak_bytes = self.live_bytes

    def set_limit(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes

    def fail_at(self, k: int) -> None:
        self._until_failure = k

    def charge(self, tensors: Iterable[torch.Tensor]) -> None:
        """Charge storages that exist already, once each. Raises `torch.OutOfMemoryError` above the limit."""
        for storage in _storages(tensors):
            failure = self._charge_storage(storage)
            if failure is not None:
                raise failure

    def enter_host(self) -> None:
        self._host.depth = getattr(self._host, "depth", 0) + 1

    def leave_host(self) -> None:
        self._host.depth -= 1

    def forget_after_fork(self) -> None:
        self._lock = threading.Lock()  # another thread of the parent may have held the old one
        self._limit_bytes = NO_LIMIT
        self._until_failure = 0

    def charge_results(
        self, results: Iterable[object], given: Iterable[object]
    ) -> torch.OutOfMemoryError | None:
        """Charge what an operation returned, except storages that it was given: views and in-place results.

        The error comes back instead of being raised: the traceback would hold this frame, and with it the
        result that did not fit.
        """
        if getattr(self._host, "depth", 0):
            return None
        for storage in _storages(results):
            known = self._charged.get(storage._cdata)
            if known is None or known[0]() is not storage:
                if any(other is storage for other in _storages(given)):
                    continue
            elif known[1] == _rounded(storage.nbytes()):
                continue
            failure = self._charge_storage(storage)
            if failure is not None:
                return failure
        return None

    def _charge_storage(self, storage: torch.UntypedStorage) -> torch.OutOfMemoryError | None:
        key, size_bytes = storage._cdata, _rounded(storage.nbytes())
        with self._lock:
            self._settle()
            known = self._charged.get(key)
            before_bytes = known[1] if known is not None and known[0]() is storage else 0
            growth_bytes = size_bytes - before_bytes
            if growth_bytes > 0:
                if self._must_fail() or self._live_bytes + growth_bytes > self._limit_bytes:
                    return self._out_of_memory(growth_bytes)
                self._allocation_count += 1
            if growth_bytes != 0:
                reference = weakref.ref(storage, lambda dead: self._dead.append((key, dead)))
                self._charged[key] = (reference, size_bytes)
                self._live_bytes += growth_bytes
                self._peak_bytes = max(self._peak_bytes, self._live_bytes)
        return None

    def _must_fail(self) -> bool:
        if self._until_failure == 0:
            return False
        self._until_failure -= 1
        return self._until_failure == 0

    def _out_of_memory(self, wanted_bytes: int) -> torch.OutOfMemoryError:
        free_bytes = max(0, self._limit_bytes - self._live_bytes)
        return torch.OutOfMemoryError(
            f"CUDA out of memory. Tried to allocate {format_bytes(wanted_bytes)}. GPU {self._gpu_index} has "
            f"a total capacity of {format_bytes(self._limit_bytes)} of which {format_bytes(free_bytes)} is "
            f"free. Of the allocated memory {format_bytes(self._live_bytes)} is allocated by PyTorch, and 0 "
            "bytes is reserved by PyTorch but unallocated. (This GPU is emulated on the CPU by foxray.)"
        )

    def _settle(self) -> None:
        while self._dead:
            key, reference = self._dead.popleft()
            known = self._charged.get(key)
            # A new storage may already live at the address of the dead one, under its own entry.
            if known is not None and known[0] is reference:
                del self._charged[key]
                self._live_bytes -= known[1]


class _ChargingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, account: DispatchAccount) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._account = account

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        results = result if isinstance(result, tuple | list) else (result,)
        failure = self._account.charge_results(results, (*args, *kwargs.values()) if kwargs else args)
        del results
        if failure is not None:
            # The traceback holds this frame: what did not fit must not live on in it, and an error that the
            # frame names would be a cycle, which keeps every tensor below until the garbage collector runs.
            del result
            try:
                raise failure
            finally:
                del failure
        return result


def _rounded(size_bytes: int) -> int:
    return -(-size_bytes // _ROUNDING_BYTES) * _ROUNDING_BYTES


def _storages(values: Iterable[object]) -> list[torch.UntypedStorage]:
    """The storages of the tensors among `values`, lists and tuples included."""
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            # Sparse tensors hold their memory in strided parts; fake and meta ones hold none.
            if value.layout is torch.strided:
                storage = value.untyped_storage()
                if storage.device.type == "cpu":
                    found.append(storage)
        elif isinstance(value, list | tuple):
            found += _storages(value)
    return found

"""Builds and loads `allocator.cpp`, the emulated GPU's memory inside torch's own CPU allocator.

It is compiled on first use with the system's compiler (under two seconds) into the user's cache, under a
name that changes with the source, the torch it was built for and the C++ ABI, so that a wrong library is
never loaded. A library is built under a temporary name and renamed, so that the workers of a run may all
start at once. Where the cache cannot be written the library lives in a temporary folder for the length of
the load. It is called through ctypes; the exceptions it raises never pass ctypes, because torch calls
the allocator from C++.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("allocator.cpp")
_COMPILE_TIMEOUT_SECONDS = 300.0


class CompilerMissing(RuntimeError):
    """The allocator cannot be built here; the text says why."""


class NativeAccount:
    """The bytes of one budget, counted inside torch's CPU allocator: all threads, forward and backward."""

    mode = "allocator"

    def __init__(self, limit_bytes: int, gpu_index: int) -> None:
        self._lib = load_library()
        self._handle: int = self._lib.foxray_account(limit_bytes, gpu_index)

    def activate(self) -> None:
        self._lib.foxray_activate(self._handle)

    def deactivate(self) -> None:
        self._lib.foxray_activate(None)

    @property
    def live_bytes(self) -> int:
        return int(self._lib.foxray_live(self._handle))

    @property
    def peak_bytes(self) -> int:
        return int(self._lib.foxray_peak(self._handle))

    @property
    def allocation_count(self) -> int:
        return int(self._lib.foxray_allocations(self._handle))

    def reset_peak(self) -> None:
        self._lib.foxray_reset_peak(self._handle)

    def set_limit(self, limit_bytes: int) -> None:
        self._lib.foxray_set_limit(self._handle, limit_bytes)

    def fail_at(self, k: int) -> None:
        self._lib.foxray_fail_at(self._handle, k)

    def charge(self, tensors: Iterable[torch.Tensor]) -> None:
        """Nothing to do: whatever was allocated while the budget was active has been charged already."""

    def enter_host(self) -> None:
        self._lib.foxray_host_enter()

    def leave_host(self) -> None:
        self._lib.foxray_host_leave()

    def forget_after_fork(self) -> None:
        self.deactivate()


@functools.cache
def load_library() -> ctypes.CDLL:
    """The allocator, built if need be, loaded and installed into torch. Raises `CompilerMissing`."""
    path = cache_folder() / _library_name()
    if path.exists():
        library = _load(path)
    else:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            writable = os.access(path.parent, os.W_OK)
        except OSError:
            writable = False
        if writable:
            _build(path)
            library = _load(path)
        else:
            with tempfile.TemporaryDirectory(prefix="foxray-") as folder:
                _build(Path(folder) / path.name)
                library = _load(Path(folder) / path.name)
    library.foxray_install()
    return library


def cache_folder() -> Path:
    """Where the built allocator is kept: `$XDG_CACHE_HOME/foxray`, else `~/.cache/foxray`."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path("~/.cache").expanduser()) / "foxray"


def _torch_folder() -> Path:
    return Path(torch.__file__).parent


def _abi() -> int:
    return int(torch.compiled_with_cxx11_abi())


def _library_name() -> str:
    built_from = [SOURCE.read_text(), torch.__version__, _abi(), platform.machine(), _torch_folder()]
    digest = hashlib.sha256("\0".join(map(str, built_from)).encode()).hexdigest()[:16]
    return f"allocator-torch{torch.__version__}-{digest}.so"


def _compiler() -> list[str]:
    configured = shlex.split(os.environ.get("CXX", ""))
    for command in (configured, ["g++"], ["c++"], ["clang++"]):
        if command and shutil.which(command[0]):
            return command
    raise CompilerMissing("no C++ compiler found ($CXX, g++, c++, clang++)")


def _build(path: Path) -> None:
    include, lib = _torch_folder() / "include", _torch_folder() / "lib"
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    os.close(descriptor)
    command = [*_compiler(), "-std=c++20", "-O2", "-fPIC", "-shared", f"-D_GLIBCXX_USE_CXX11_ABI={_abi()}"]
    command += [f"-I{include}", str(SOURCE), "-o", temporary, f"-L{lib}", "-lc10", f"-Wl,-rpath,{lib}"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_COMPILE_TIMEOUT_SECONDS
        )
        if done.returncode != 0:
            errors = [line for line in done.stderr.splitlines() if "error" in line] or [done.stderr.strip()]
            raise CompilerMissing(f"{command[0]} failed with status {done.returncode}: {errors[0][:300]}")
        Path(temporary).replace(path)
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise CompilerMissing(f"{command[0]} could not be run: {problem}") from problem
    finally:
        Path(temporary).unlink(missing_ok=True)


def _load(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
    except OSError as problem:
        raise CompilerMissing(f"the built allocator cannot be loaded: {problem}") from problem
    handle, count = ctypes.c_void_p, ctypes.c_uint64
    signatures: dict[str, tuple[type[ctypes.c_void_p] | type[ctypes.c_uint64] | None, list[type]]] = {
        "foxray_install": (None, []),
        "foxray_account": (handle, [count, ctypes.c_int]),
        "foxray_activate": (None, [handle]),
        "foxray_host_enter": (None, []),
        "foxray_host_leave": (None, []),
        "foxray_live": (count, [handle]),
        "foxray_peak": (count, [handle]),
        "foxray_allocations": (count, [handle]),
        "foxray_reset_peak": (None, [handle]),
        "foxray_set_limit": (None, [handle, count]),
        "foxray_fail_at": (None, [handle, ctypes.c_int64]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library

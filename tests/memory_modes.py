"""What the tests of the emulated budget share: its two modes, and the state a test must leave behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from foxray.memory import native
from foxray.memory.budget import current_budget
from foxray.memory.catalogue import MIB


def _has_allocator() -> bool:
    try:
        native.load_library()
    except native.CompilerMissing:
        return False
    return True


needs_allocator = pytest.mark.skipif(not _has_allocator(), reason="no C++ compiler")
both_modes = pytest.mark.parametrize("mode", [pytest.param("allocator", marks=needs_allocator), "dispatch"])


def mib(count: float) -> torch.Tensor:
    return torch.empty(int(count * MIB), dtype=torch.uint8)


@pytest.fixture
def quiet() -> Iterator[None]:
    """One thread, since the tensors are tiny and waking threads takes longer; and no budget left active."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    assert current_budget() is None

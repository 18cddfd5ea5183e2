"""What a derived feature is, and how families of them that differ in a window are written down.

A feature returns [R] float64, NaN inside its look-back and finite after it, reads no row after its own, and
is a ratio, a share, a score or an angle: no price or volume level, whatever the instrument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from foxray.data.frame import Frame
from foxray.data.rolling import Array


@dataclass(frozen=True, kw_only=True)
class Feature:
    """One derived column."""

    name: str
    """Column name; a number in it is a count of bars unless said otherwise."""

    about: str
    """What it says, in one line."""

    compute: Callable[[Frame], Array]
    """From a frame to [R] float64."""

    needs_volume: bool = False
    """Whether the bars must have a volume."""


def one(name: str, about: str, compute: Callable[[Frame], Array]) -> Feature:
    """Return a feature of its own."""
    return Feature(name=name, about=about, compute=compute)


def each(
    name: str, about: str, windows: Iterable[int], compute: Callable[[Frame, int], Array]
) -> Iterator[Feature]:
    """Yield a feature per window; `{0}` in `about` is the window."""
    for window in windows:
        yield one(f"{name}_{window}", about.format(window), _bind(compute, window))


def each_pair(
    name: str, about: str, pairs: Iterable[tuple[int, int]], compute: Callable[[Frame, int, int], Array]
) -> Iterator[Feature]:
    """Yield a feature per pair of numbers; `{0}` and `{1}` in `about` are the two."""
    for first, second in pairs:
        yield one(f"{name}_{first}_{second}", about.format(first, second), _bind_pair(compute, first, second))


def _bind(compute: Callable[[Frame, int], Array], window: int) -> Callable[[Frame], Array]:
    return lambda f: compute(f, window)


def _bind_pair(
    compute: Callable[[Frame, int, int], Array], first: int, second: int
) -> Callable[[Frame], Array]:
    return lambda f: compute(f, first, second)

"""Is this exception a memory failure, and of which memory?

Types are asked first, over the whole chain of causes; texts are read only where no type tells, and only of
exceptions that libraries use for such news (a ValueError about a column called "oom" is not one).
Errors that mean a lack of memory or a bug count only with evidence: little free memory, see
`low_memory_bytes`.

An allocation that CUDA refuses (error 2) leaves the context usable: the error is reported once and cleared
(CUDA's runtime API, cudaErrorMemoryAllocation; unlike an illegal access, which every later call repeats).
So it is retried in place, like PyTorch's own OutOfMemoryError. What cannot go on in the same process is a
lost CUDA context anywhere in the chain, a process that was killed, and a collective that broke.
"""

import errno
import re
from collections.abc import Iterable

from foxray.oom import patterns
from foxray.oom.chain import Link, links
from foxray.oom.incident import Incident, Kind

_DEVICE_TYPES = (
    "torch.OutOfMemoryError",
    "torch.cuda.OutOfMemoryError",
    "cupy.cuda.memory.OutOfMemoryError",
)
_RAY_OUT_OF_MEMORY = "ray.exceptions.OutOfMemoryError"
_RAY_ERROR = "ray.exceptions.RayError"
_ACCELERATOR_ERROR = "torch.AcceleratorError"
_CUDA_MEMORY_ALLOCATION = 2
# Illegal address, launch timeout, context destroyed, assert, hardware stack, illegal instruction, misaligned
# address, invalid address space, invalid program counter, launch failure, uncorrectable ECC and NVLink.
_STICKY_CUDA_CODES = frozenset({700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 214, 220})

# Exceptions whose texts are about something else, whatever words they hold.
_NEVER_BY_TEXT = (
    "ValueError",
    "TypeError",
    "LookupError",
    "KeyError",
    "IndexError",
    "NameError",
    "AttributeError",
    "ImportError",
    "ModuleNotFoundError",
    "ArithmeticError",
    "AssertionError",
    "SyntaxError",
    "NotImplementedError",
    "RecursionError",
    "StopIteration",
    "Warning",
)

# A library that could not get a handle or a workspace asked for some tens or hundreds of MiB.
_LOW_FRACTION = 0.1
_LOW_AT_MOST_BYTES = 1 << 30
_LOW_WHERE_TOTAL_IS_UNKNOWN_BYTES = 512 << 20

_IMPOSSIBLE_BYTES = 1 << 60
_LONGEST_MESSAGE = 4000

_UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40, "p": 50, "e": 60}
_AMOUNT = r"(\d[\d,]*(?:\.\d+)?)\s*([kmgtpe]?)i?b?(?:yte)?s?\b"
_REQUESTED = re.compile(
    r"(?:(?:tried|unable|trying|failed) to allocate(?: request for)?|calloc async|out of memory allocating"
    rf"|malloc of size|requested\s*:|attempting to (?:reserve|allocate))\s+{_AMOUNT}",
    re.IGNORECASE,
)
_FREE = re.compile(rf"{_AMOUNT} (?:is )?free\b", re.IGNORECASE)
_TOTAL = re.compile(
    rf"(?:total capacity of|device limit\s*:|max allowed:)\s+{_AMOUNT}|{_AMOUNT} total capacity",
    re.IGNORECASE,
)


def classify(
    exc: BaseException, *, free_bytes: int | None = None, total_bytes: int | None = None
) -> Incident | None:
    """The memory failure that `exc` is or carries, or None.

    Looks through causes, contexts (unless suppressed), exception groups, Ray's wrappers and the failures of
    each rank. `free_bytes` and `total_bytes` of the device decide about ambiguous library errors; without
    them these are no memory failures.
    """
    chain = list(links(exc))
    low = free_bytes is not None and free_bytes < low_memory_bytes(total_bytes)
    for judge in (_kind_by_type, _kind_by_text, _kind_by_evidence if low else _unknown):
        for link in chain:
            found = judge(link)
            if found is not None and _impossible(link) is None:
                kind, text = found
                return _incident(kind, text, link, chain, free_bytes, total_bytes)
    return None


def low_memory_bytes(total_bytes: int | None) -> int:
    """Free device memory below this is evidence of a lack of it: a tenth of the device, at most 1 GiB."""
    if total_bytes is None:
        return _LOW_WHERE_TOTAL_IS_UNKNOWN_BYTES
    return min(int(total_bytes * _LOW_FRACTION), _LOW_AT_MOST_BYTES)


def context_lost(exc: BaseException) -> bool:
    """Whether the CUDA context is gone: every later call fails too, and only a new process helps."""
    return _lost_context(links(exc)) is not None


def impossible_request(exc: BaseException) -> str | None:
    """The text of a request that no device could meet (an overflowed size, 1 EiB or more), else None.

    Such a size comes from a bug or from corrupted data; a smaller batch is no cure.
    """
    return next((text for link in links(exc) if (text := _impossible(link)) is not None), None)


def broken_collective(exc: BaseException) -> bool:
    """Whether a collective between ranks broke, usually because a peer is gone."""
    return _broken_collective(links(exc)) is not None


def _unknown(link: Link) -> None:
    return None


def _kind_by_type(link: Link) -> tuple[Kind, str] | None:
    text = link.texts[0]
    if link.is_a(*_DEVICE_TYPES):
        return "device", text
    if link.is_a(_RAY_OUT_OF_MEMORY):
        return "host", text
    if link.is_a(_ACCELERATOR_ERROR) and link.error_code == _CUDA_MEMORY_ALLOCATION:
        return "device", text
    if link.is_a("MemoryError"):
        # Memory managers for the device (RMM, PyCUDA) raise subclasses of MemoryError as well.
        return ("device" if _names_device(text) else "host"), text
    if link.errno == errno.ENOMEM:
        return "host", " ".join(link.texts)
    if link.errno == errno.ENOSPC and (link.path or "").startswith("/dev/shm"):
        return "shm", f"{link.texts[-1]}: {link.path}"
    return None


def _names_device(text: str) -> bool:
    return patterns.DEVICE_MARKS.search(text) is not None or "cuda" in text.lower()


def _kind_by_text(link: Link) -> tuple[Kind, str] | None:
    if link.is_a(*_NEVER_BY_TEXT):
        return None
    for text in link.texts:
        if link.is_a(_RAY_ERROR) and patterns.RAY_KILLED.search(text):
            return "host", text
        kind = patterns.failed_memory(patterns.skimmed(text))
        if kind == "device" and link.is_a("OSError"):
            continue
        if kind is not None:
            return kind, text
    return None


def _kind_by_evidence(link: Link) -> tuple[Kind, str] | None:
    if link.is_a(*_NEVER_BY_TEXT):
        return None
    text = next((text for text in link.texts if patterns.AMBIGUOUS.search(text)), None)
    return ("device", text) if text is not None else None


def _impossible(link: Link) -> str | None:
    for text in link.texts:
        if patterns.IMPOSSIBLE.search(text) or (_bytes(_REQUESTED, text) or 0) >= _IMPOSSIBLE_BYTES:
            return text
    return None


def _lost_context(chain: Iterable[Link]) -> str | None:
    for link in chain:
        if link.error_code in _STICKY_CUDA_CODES:
            return link.texts[0]
        if link.is_a(*_NEVER_BY_TEXT):
            continue
        for text in link.texts:
            if patterns.CONTEXT_LOST.search(text):
                return text
    return None


def _broken_collective(chain: Iterable[Link]) -> str | None:
    for link in chain:
        # A connection lost to a server (an upload) is an OSError or the error type of some client.
        if not link.is_a("RuntimeError") or link.is_a("OSError", "NotImplementedError", "RecursionError"):
            continue
        for text in link.texts:
            if link.is_a("torch.distributed.DistNetworkError") or patterns.BROKEN_COLLECTIVE.search(text):
                return text
    return None


def _incident(
    kind: Kind, text: str, link: Link, chain: list[Link], free_bytes: int | None, total_bytes: int | None
) -> Incident:
    text = patterns.plain(text)
    free, total = _bytes(_FREE, text), _bytes(_TOTAL, text)
    return Incident(
        kind=kind,
        exception_type=link.names[0],
        message=_shortened(text),
        rank=link.rank,
        bytes_requested=_bytes(_REQUESTED, text),
        bytes_free=free_bytes if free is None else free,
        bytes_total=total_bytes if total is None else total,
        fresh_reason=_fresh_reason(text, link, chain),
    )


def _fresh_reason(text: str, link: Link, chain: list[Link]) -> str | None:
    if link.is_a(_RAY_OUT_OF_MEMORY) or patterns.RAY_KILLED.search(text):
        return "process killed"
    if patterns.LOADER_KILLED.search(text):
        return "process killed: a data loader's worker"
    if (lost := _lost_context(chain)) is not None:
        return f"CUDA context lost: {_first_line(lost)}"
    if (broken := _broken_collective(chain)) is not None:
        return f"broken collective: {_first_line(broken)}"
    return None


def _first_line(text: str) -> str:
    return patterns.plain(text).strip().partition("\n")[0]


def _shortened(text: str) -> str:
    text = text.strip()
    if len(text) <= _LONGEST_MESSAGE:
        return text
    return f"{text[:_LONGEST_MESSAGE]} ... ({len(text) - _LONGEST_MESSAGE} more characters)"


def _bytes(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.search(text)
    if found is None:
        return None
    number, unit = [group for group in found.groups() if group is not None]
    return int(float(number.replace(",", "")) * 2 ** _UNITS[unit.lower()])

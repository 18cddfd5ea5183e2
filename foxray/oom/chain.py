"""Everything that an exception carries, laid out flat.

A memory failure seldom arrives bare: it is the cause or the context of another exception, one of a group,
the value that Ray keeps in an attribute, or only a passage in the traceback text that Ray sends where the
cause itself was dropped by pickling. `links` yields each of these once, outermost first.

Types are known by qualified name along the method resolution order, so that neither torch nor Ray is
imported here, and so that their subclasses (Ray makes some at run time) are recognised too.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

RAY_TASK_ERROR = "ray.exceptions.RayTaskError"

# Exceptions that have been decided already (out of memory with everything tried, the user's mistake): what
# they carry is their history.
_DECIDED = "foxray.errors.FoxrayError"

_RAY_HOLDERS = ("health_check_failure", "controller_failure", "_base_exc")
"""Attributes in which Ray Train keeps the one exception that it stands for."""

_CHAINED = re.compile(
    r"\n\n(?:The above exception was the direct cause of the following exception"
    r"|During handling of the above exception, another exception occurred):\n\n"
)
_TRACEBACK_END = re.compile(
    r"(?:^[ \t]+.*\n|\A)(?P<name>[A-Za-z_][\w.]*)(?:: (?P<text>[\s\S]*)|$)", re.MULTILINE
)


@dataclass(frozen=True, kw_only=True)
class Link:
    """One exception of a chain, as classification sees it."""

    names: tuple[str, ...]
    """Qualified names along the method resolution order, the type's own first."""
    texts: tuple[str, ...]
    """Its texts, one for each argument that is one; empty if it only wraps others."""
    errno: int | None = None
    path: str | None = None
    """File named by an OSError."""
    error_code: int | None = None
    """CUDA's error number on a `torch.AcceleratorError`."""
    rank: int | None = None
    """The rank whose failure this is, where Ray Train says so."""

    def is_a(self, *names: str) -> bool:
        """Whether the type or one of its bases has one of these qualified names."""
        return any(name in names for name in self.names)


def qualified(kind: type) -> str:
    """`torch.OutOfMemoryError`, `MemoryError`."""
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def links(exc: BaseException) -> Iterator[Link]:
    """Yield the exception and all that it carries, each object once, outermost first.

    A Ctrl-C, an exit and a failure that was already decided end their branch: what they interrupted or
    report is no longer the cause.
    """
    seen: set[int] = set()
    waiting: list[tuple[BaseException, int | None]] = [(exc, None)]
    while waiting:
        current, rank = waiting.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        names = tuple(qualified(kind) for kind in type(current).__mro__)
        if _DECIDED in names or not ("Exception" in names or isinstance(current, BaseExceptionGroup)):
            continue
        inner = _carried(current)
        if not (inner and _only_wraps(current, names)):
            yield _link(current, names, rank)
        if RAY_TASK_ERROR in names:
            yield from _told_by_traceback(current, rank)
        waiting.extend((child, rank if own_rank is None else own_rank) for child, own_rank in reversed(inner))


def _carried(exc: BaseException) -> list[tuple[BaseException, int | None]]:
    """The exceptions directly below this one, the likeliest first, each with the rank Ray gives it."""
    found: list[tuple[BaseException, int | None]] = []
    by_rank = getattr(exc, "worker_failures", None)
    if isinstance(by_rank, Mapping):
        found += [(failure, rank) for rank, failure in by_rank.items()]
    if isinstance(exc, BaseExceptionGroup):
        found += [(member, None) for member in exc.exceptions]
    held = [getattr(exc, name, None) for name in _RAY_HOLDERS]
    held += [getattr(exc, "cause", None), exc.__cause__]
    if not exc.__suppress_context__:
        held.append(exc.__context__)
    held += exc.args
    return found + [(one, None) for one in held if isinstance(one, BaseException)]


def _only_wraps(exc: BaseException, names: tuple[str, ...]) -> bool:
    """Whether the text is nothing but the texts of what it carries (or a description of the group)."""
    return (
        isinstance(exc, BaseExceptionGroup)
        or RAY_TASK_ERROR in names
        or bool(getattr(exc, "worker_failures", None))
        or any(isinstance(getattr(exc, name, None), BaseException) for name in _RAY_HOLDERS)
    )


def _link(exc: BaseException, names: tuple[str, ...], rank: int | None) -> Link:
    texts = tuple(argument for argument in exc.args if isinstance(argument, str)) or (str(exc),)
    code = getattr(exc, "error_code", None)
    if isinstance(exc, OSError):
        path = str(exc.filename) if exc.filename is not None else None
        return Link(names=names, texts=texts, errno=exc.errno, path=path, rank=rank)
    return Link(names=names, texts=texts, error_code=code if isinstance(code, int) else None, rank=rank)


def _told_by_traceback(exc: BaseException, rank: int | None) -> Iterator[Link]:
    """The causes of a remote exception that did not survive pickling but stand in Ray's traceback text."""
    cause = getattr(exc, "cause", None)
    if isinstance(cause, BaseException) and _DECIDED in (qualified(kind) for kind in type(cause).__mro__):
        return
    told = getattr(exc, "traceback_str", "")
    for part in reversed(_CHAINED.split(told.strip())):
        end = _TRACEBACK_END.search(part)
        if end is not None:
            yield Link(names=(end["name"], "Exception"), texts=(end["text"] or "",), rank=rank)

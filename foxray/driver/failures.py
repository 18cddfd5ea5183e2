"""What a failed launch of a worker group means.

Ray hands the driver one exception for each failed rank. Causes are sorted before anything is decided: a
rank that left in order, a rank out of memory, a process that died, a node that went away, and the peers
that only lost their connection because of one of these.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from foxray.errors import MemoryExhausted
from foxray.oom import Incident, broken_collective, classify
from foxray.training.authority import Cancelled, Rescheduled


@dataclass(frozen=True, kw_only=True)
class Failures:
    """The failed ranks of one launch, by cause."""

    rescheduled: list[int] = field(default_factory=list)
    """Left because the coordinator decided for fresh workers; the decision is on record."""
    cancelled: list[int] = field(default_factory=list)
    exhausted: MemoryExhausted | None = None
    """The coordinator gave up; the text is for the user."""
    incidents: dict[int, Incident] = field(default_factory=dict)
    """Memory failures that no worker could report itself."""
    lost: dict[int, str] = field(default_factory=dict)
    """Workers gone without a memory failure, with the reason."""
    collateral: list[int] = field(default_factory=list)
    """Ranks whose collective broke."""
    other: dict[int, BaseException] = field(default_factory=dict)
    """Plain bugs: never retried."""


def sort_failures(error: BaseException) -> Failures:
    """Sort what `fit()` raised. Types of Ray are recognised by name, so that their home may move."""
    failures = Failures()
    exhausted: MemoryExhausted | None = None
    for rank, failure in _by_rank(error).items():
        died = _death(failure)
        if isinstance(failure, MemoryExhausted):
            exhausted = failure
        elif isinstance(failure, Rescheduled):
            failures.rescheduled.append(rank)
        elif isinstance(failure, Cancelled):
            failures.cancelled.append(rank)
        elif (incident := classify(failure)) is not None:
            reason = incident.fresh_reason or "the worker's loop ended with the error"
            failures.incidents[rank] = replace(incident, rank=rank, fresh_reason=reason)
        elif died is not None and "node" in died:
            failures.lost[rank] = died
        elif died is not None:
            failures.incidents[rank] = Incident(
                kind="host",
                exception_type=type(failure).__name__,
                message=died,
                rank=rank,
                fresh_reason="process killed",
            )
        elif broken_collective(failure):
            failures.collateral.append(rank)
        else:
            failures.other[rank] = failure
    return replace(failures, exhausted=exhausted)


def _by_rank(error: BaseException) -> Mapping[int, BaseException]:
    by_rank: Mapping[int, BaseException] | None = getattr(error, "worker_failures", None)
    return by_rank if by_rank else {0: error}


def _death(failure: BaseException) -> str | None:
    """How a worker process ended, or None if it did not die. "node" in it: its machine went away."""
    inner = getattr(failure, "health_check_failure", failure)
    name = type(inner).__name__
    first_line = str(inner).partition("\n")[0]
    if name in ("ActorUnavailableError", "NodeDiedError") or "node has died" in str(inner):
        return f"node lost: {first_line}"
    if name in ("ActorDiedError", "WorkerCrashedError"):
        return f"worker process died (SIGKILL, the kernel's OOM killer, or a crash): {first_line}"
    return None

"""What a run's events add up to: one pure fold, used by tables, metrics, report and page alike.

An execution has one outcome; one that never ended is `running` while there are signs of life, and `lost`
after. The fold asks nothing but the events, the last heartbeat and the clock, so that anybody who has the
events gets the same numbers.
"""

from collections.abc import Iterable
from datetime import UTC, datetime

from foxray.ledger.events import CheckpointWritten, EpochEnded, Event, RunCreated
from foxray.ledger.fold import fold_execution
from foxray.ledger.store import Heartbeat, Ledger, RunLedger
from foxray.ledger.summary_types import AttemptSummary, ExecutionSummary, PhaseSummary, RunSummary

__all__ = [
    "COUNTED_OUTCOMES",
    "LOST_AFTER_SECONDS",
    "AttemptSummary",
    "ExecutionSummary",
    "PhaseSummary",
    "RunSummary",
    "count_outcomes",
    "success_rate",
    "summarize",
    "summarize_all",
    "summarize_run",
]

LOST_AFTER_SECONDS = 60.0
COUNTED_OUTCOMES = ("success", "oom", "failed", "lost")
"""Outcomes that the success rate is taken over."""


def summarize(
    events: Iterable[Event],
    *,
    heartbeat: Heartbeat | None = None,
    now: datetime | None = None,
    lost_after_seconds: float = LOST_AFTER_SECONDS,
    skipped: list[tuple[str, str]] | None = None,
) -> RunSummary:
    """Fold the events of one run, in the order of the ledger.

    `heartbeat` and `now` (default: the clock) tell a running execution from a lost one. Raises ValueError
    when there are no events.
    """
    events = list(events)
    if not events:
        raise ValueError("no events to summarize")
    by_execution: dict[int, list[Event]] = {}
    for event in events:
        by_execution.setdefault(event.execution, []).append(event)
    numbers = sorted(number for number in by_execution if number > 0)
    executions = [
        fold_execution(
            by_execution[number],
            last=number == numbers[-1],
            heartbeat=heartbeat,
            now=now or datetime.now(UTC),
            lost_after_seconds=lost_after_seconds,
        )
        for number in numbers
    ]
    created = next((event for event in events if isinstance(event, RunCreated)), None)
    epochs = {event.epoch: event for event in events if isinstance(event, EpochEnded)}
    checkpoints = [event for event in events if isinstance(event, CheckpointWritten)]
    running = bool(executions) and executions[-1].outcome == "running"
    return RunSummary(
        run_id=events[0].run_id,
        model=created.model if created else "unknown",
        created_utc=created.time_utc if created else None,
        config=created.config if created else {},
        dataset=(created.dataset if created else None) or {},
        foxray_version=created.foxray_version if created else "unknown",
        executions=executions,
        epochs=[epochs[number] for number in sorted(epochs)],
        last_checkpoint=max(checkpoints, key=lambda c: (c.step, c.epoch), default=None),
        live=heartbeat.live if heartbeat is not None and running else {},
        skipped=skipped or [],
    )


def summarize_run(
    run: RunLedger, *, now: datetime | None = None, lost_after_seconds: float = LOST_AFTER_SECONDS
) -> RunSummary | None:
    """Read and fold one run; None when nothing in it can be read (`run.skipped` says why)."""
    events = run.events()
    if not events:
        return None
    beat = run.read_heartbeat()
    return summarize(
        events, heartbeat=beat, now=now, lost_after_seconds=lost_after_seconds, skipped=list(run.skipped)
    )


def summarize_all(
    ledger: Ledger, *, now: datetime | None = None, lost_after_seconds: float = LOST_AFTER_SECONDS
) -> list[RunSummary]:
    """All runs that have a readable event, oldest first."""
    summaries = (
        summarize_run(ledger.run(run_id), now=now, lost_after_seconds=lost_after_seconds)
        for run_id in ledger.run_ids()
    )
    found = [summary for summary in summaries if summary is not None]
    return sorted(found, key=lambda s: (s.created_utc or "", s.run_id))


def count_outcomes(summaries: Iterable[RunSummary]) -> dict[str, int]:
    """Executions by outcome."""
    counts: dict[str, int] = {}
    for summary in summaries:
        for execution in summary.executions:
            counts[execution.outcome] = counts.get(execution.outcome, 0) + 1
    return counts


def success_rate(summaries: Iterable[RunSummary]) -> float | None:
    """Successful executions / those that ended in success, oom, failed or lost; None without any."""
    counts = count_outcomes(summaries)
    counted = sum(counts.get(outcome, 0) for outcome in COUNTED_OUTCOMES)
    return counts.get("success", 0) / counted if counted else None

"""The fold of one execution's events.

The only part with rules of its own is the table of attempts. An `AttemptStarted` opens an attempt of its
rank; one that says what is known already (the same size again, as validation does every epoch) does not.
A granted decision ends the rank's attempt as `oom` and opens the next one at the granted size, since a
retry in place starts nothing anew. Fresh workers end the attempts of all ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from foxray.ledger.events import (
    AttemptStarted,
    DecisionRecorded,
    Event,
    ExecutionEnded,
    ExecutionStarted,
    IncidentRecorded,
    PhaseEnded,
    RecoveryMeasured,
    WorkersLost,
    WorkerStarted,
    parse_utc,
)
from foxray.ledger.store import Heartbeat
from foxray.ledger.summary_types import (
    AttemptSummary,
    ExecutionSummary,
    PhaseSummary,
    final_phase,
    largest_rank,
)

FRESH_WORKERS = "fresh_workers"


def fold_execution(
    events: list[Event],
    *,
    last: bool,
    heartbeat: Heartbeat | None,
    now: datetime,
    lost_after_seconds: float,
) -> ExecutionSummary:
    """Fold the events of one execution; `last`: no later execution of the run is known."""
    started = next((e for e in events if isinstance(e, ExecutionStarted)), None)
    workers_started = [e for e in events if isinstance(e, WorkerStarted)]
    ended = next((e for e in events if isinstance(e, ExecutionEnded)), None)
    decisions = [e for e in events if isinstance(e, DecisionRecorded)]
    phases = [_phase(e) for e in events if isinstance(e, PhaseEnded)]
    life_utc = _last_sign_of_life(events, heartbeat)
    if ended is not None:
        outcome = ended.outcome
    else:
        alive = last and (now - parse_utc(life_utc)).total_seconds() <= lost_after_seconds
        outcome = "running" if alive else "lost"
    attempts = _attempts(events, outcome)
    started_utc = started.time_utc if started else events[0].time_utc
    return ExecutionSummary(
        execution=events[0].execution,
        outcome=outcome,
        started_utc=started_utc,
        ended_utc=ended.time_utc if ended else None,
        duration_seconds=ended.duration_seconds if ended else _seconds(started_utc, life_utc),
        message=ended.message if ended else "",
        workers=started.workers if started else None,
        device=started.device if started else None,
        # Only a worker knows which card it got; the driver can say no more than "cuda".
        gpu=workers_started[0].gpu if workers_started else (started.gpu if started else None),
        host=started.host if started else None,
        pid=started.pid if started else None,
        resumed=started.resumed if started else False,
        final_batch_size=_final_batch_size(phases, ended, attempts),
        oom_retries=sum(decision.granted for decision in decisions),
        phase_retries=largest_rank(decisions),
        attempts=attempts,
        incidents=[e for e in events if isinstance(e, IncidentRecorded)],
        decisions=decisions,
        phases=phases,
        recovery_seconds=[e.recovery_seconds for e in events if isinstance(e, RecoveryMeasured)],
        workers_started=workers_started,
        workers_lost=[e for e in events if isinstance(e, WorkersLost)],
    )


def _phase(event: PhaseEnded) -> PhaseSummary:
    return PhaseSummary(
        execution=event.execution,
        phase=event.phase,
        batch_sizes=event.batch_sizes,
        duration_seconds=event.duration_seconds,
        rows=event.rows,
        peak_bytes=event.peak_bytes,
    )


def _last_sign_of_life(events: list[Event], heartbeat: Heartbeat | None) -> str:
    last_utc = max(event.time_utc for event in events)
    if heartbeat is not None and heartbeat.execution == events[0].execution:
        return max(last_utc, heartbeat.time_utc)
    return last_utc


def _seconds(start_utc: str, end_utc: str) -> float:
    return (parse_utc(end_utc) - parse_utc(start_utc)).total_seconds()


def _final_batch_size(
    phases: list[PhaseSummary], ended: ExecutionEnded | None, attempts: list[AttemptSummary]
) -> int | None:
    """The smallest rank's: as its phase ended, else as the execution ended, else as far as it has come."""
    phase = final_phase([p.phase for p in phases] + [a.phase for a in attempts])
    finished = [size for p in phases if p.phase == phase for size in p.batch_sizes.values()]
    if finished:
        return min(finished)
    if ended is not None and ended.final_batch_size is not None:
        return ended.final_batch_size
    by_rank = {a.rank: a.batch_size for a in attempts if a.phase == phase}
    return min(by_rank.values(), default=None)


# -- attempts --------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class _Attempt:
    """An attempt while it is folded."""

    batch_size: int
    accumulation_steps: int | None
    step: int
    started_utc: str
    rung: str | None = None
    outcome: str | None = None
    """None: not ended."""
    announced: bool = True
    """False: opened by a decision, and not yet taken up by an `AttemptStarted`."""


_Key = tuple[str, int]
"""(phase, rank)."""


class _Attempts:
    def __init__(self) -> None:
        self.all: list[tuple[_Key, _Attempt]] = []
        self._open: dict[_Key, _Attempt] = {}
        self._step = 0

    def started(self, event: AttemptStarted) -> None:
        key = event.phase, event.rank
        self._step = event.step
        current = self._open.get(key)
        if current is not None and current.batch_size == event.batch_size:
            if not current.announced:
                # Fresh workers may go on from an earlier step than the one that failed.
                current.accumulation_steps, current.announced = event.accumulation_steps, True
                current.step, current.started_utc = event.step, event.time_utc
            return
        self._end("interrupted", lambda k: k == key)
        self._begin(
            key,
            _Attempt(
                batch_size=event.batch_size,
                accumulation_steps=event.accumulation_steps,
                step=event.step,
                started_utc=event.time_utc,
            ),
        )

    def decided(self, event: DecisionRecorded) -> None:
        key = event.phase, event.rank
        if key not in self._open:  # its start was not reported, or is torn
            unreported = _Attempt(
                batch_size=event.previous_batch_size,
                accumulation_steps=None,
                step=self._step,
                started_utc=event.time_utc,
            )
            self._begin(key, unreported)
        self._end("oom", lambda k: k == key)
        if event.action == FRESH_WORKERS:
            self._end("interrupted", lambda _: True)
        if event.granted:
            retry = _Attempt(
                batch_size=event.batch_size,
                accumulation_steps=None,
                step=self._step,
                started_utc=event.time_utc,
                rung=event.rung,
                announced=False,
            )
            self._begin(key, retry)

    def incident(self, event: IncidentRecorded) -> None:
        self._step = event.step

    def end(self, outcome: str, phase: str | None = None) -> None:
        self._end(outcome, lambda key: phase is None or key[0] == phase)

    def _begin(self, key: _Key, attempt: _Attempt) -> None:
        self._open[key] = attempt
        self.all.append((key, attempt))

    def _end(self, outcome: str, which: Callable[[_Key], bool]) -> None:
        for key in [key for key in self._open if which(key)]:
            self._open.pop(key).outcome = outcome


def _attempts(events: list[Event], outcome: str) -> list[AttemptSummary]:
    attempts = _Attempts()
    for event in events:
        match event:
            case AttemptStarted():
                attempts.started(event)
            case IncidentRecorded():
                attempts.incident(event)
            case DecisionRecorded():
                attempts.decided(event)
            case PhaseEnded():
                attempts.end("ok", event.phase)
            case WorkersLost():
                attempts.end("interrupted")
    attempts.end({"success": "ok", "oom": "interrupted"}.get(outcome, outcome))
    return [
        AttemptSummary(
            execution=events[0].execution,
            phase=phase,
            rank=rank,
            batch_size=attempt.batch_size,
            accumulation_steps=attempt.accumulation_steps,
            step=attempt.step,
            started_utc=attempt.started_utc,
            outcome=attempt.outcome or outcome,
            rung=attempt.rung,
        )
        for (phase, rank), attempt in attempts.all
    ]

"""The shape of a summary: what tables, metrics, report and page know of a run.

A summary holds facts that stand in the events, and computes the rest from these, so that no number can
contradict another one: retries are the granted decisions, not the number that an ending event repeats.
"""

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from foxray.ledger.events import (
    CheckpointWritten,
    DecisionRecorded,
    EpochEnded,
    IncidentRecorded,
    WorkersLost,
    WorkerStarted,
)

FINAL_PHASES = ("training", "update")
"""Phases whose batch size is the run's final one; the first that there is."""


@dataclass(frozen=True, kw_only=True)
class AttemptSummary:
    """One try of a phase on a rank at one batch size."""

    execution: int
    phase: str
    rank: int
    batch_size: int
    accumulation_steps: int | None
    """None: not told (a retry in place)."""
    step: int
    """Optimizer steps committed when it began."""
    started_utc: str
    outcome: str
    """"ok", "oom", "interrupted" (another rank's trouble ended it), or the outcome of its execution."""
    rung: str | None
    """The rung of `on_exhausted` that it began on."""


@dataclass(frozen=True, kw_only=True)
class PhaseSummary:
    """A phase that ended on all ranks."""

    execution: int
    phase: str
    batch_sizes: dict[str, int]
    """By rank."""
    duration_seconds: float
    rows: int
    peak_bytes: dict[str, int]
    """By rank."""


@dataclass(frozen=True, kw_only=True)
class ExecutionSummary:
    """One launch or resume of a run."""

    execution: int
    outcome: str
    """success, oom, failed, cancelled, lost or running."""
    started_utc: str
    ended_utc: str | None
    duration_seconds: float
    """Until its end, or its last sign of life."""
    message: str
    workers: int | None
    device: str | None
    gpu: str | None
    host: str | None
    pid: int | None
    resumed: bool
    final_batch_size: int | None
    """The smallest of the ranks' in training; so far, where it has not ended."""
    oom_retries: int
    """Retries that were granted."""
    phase_retries: dict[str, int]
    """Per phase the largest of its ranks' counts, as the policy counts them."""
    attempts: list[AttemptSummary]
    incidents: list[IncidentRecorded]
    decisions: list[DecisionRecorded]
    phases: list[PhaseSummary]
    recovery_seconds: list[float]
    workers_started: list[WorkerStarted]
    workers_lost: list[WorkersLost]


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """One run, over all of its executions."""

    run_id: str
    model: str
    """"unknown" where the run's first event is unreadable."""
    created_utc: str | None
    config: dict[str, Any]
    dataset: dict[str, Any]
    foxray_version: str
    executions: list[ExecutionSummary]
    epochs: list[EpochEnded]
    """By epoch; the last report of each."""
    last_checkpoint: CheckpointWritten | None
    live: dict[str, Any]
    """What the last heartbeat says, while the run is running."""
    skipped: list[tuple[str, str]] = field(default_factory=list)
    """(file name, reason) of what could not be read of its ledger."""

    @property
    def outcome(self) -> str:
        """Of the last execution; "lost" for a run that never came to one."""
        return self.executions[-1].outcome if self.executions else "lost"

    @property
    def message(self) -> str:
        """Of the last execution."""
        return self.executions[-1].message if self.executions else ""

    @property
    def oom_retries(self) -> int:
        """Retries granted over all executions."""
        return sum(execution.oom_retries for execution in self.executions)

    @property
    def phase_retries(self) -> dict[str, int]:
        """Per phase the largest of its ranks' counts over all executions."""
        return largest_rank(self.decisions)

    @property
    def final_batch_size(self) -> int | None:
        """Of the last execution that has one."""
        known = [e.final_batch_size for e in self.executions if e.final_batch_size is not None]
        return known[-1] if known else None

    @property
    def attempts(self) -> list[AttemptSummary]:
        """Of all executions."""
        return [attempt for execution in self.executions for attempt in execution.attempts]

    @property
    def incidents(self) -> list[IncidentRecorded]:
        """Of all executions."""
        return [incident for execution in self.executions for incident in execution.incidents]

    @property
    def decisions(self) -> list[DecisionRecorded]:
        """Of all executions."""
        return [decision for execution in self.executions for decision in execution.decisions]

    @property
    def phases(self) -> list[PhaseSummary]:
        """Of all executions."""
        return [phase for execution in self.executions for phase in execution.phases]

    @property
    def recovery_seconds(self) -> list[float]:
        """Of all executions."""
        return [seconds for execution in self.executions for seconds in execution.recovery_seconds]

    @property
    def peak_bytes(self) -> dict[str, int]:
        """By phase, the highest of its ranks'."""
        peaks: dict[str, int] = {}
        for phase in self.phases:
            for peak_bytes in phase.peak_bytes.values():
                peaks[phase.phase] = max(peak_bytes, peaks.get(phase.phase, 0))
        return peaks

    @property
    def batch_sizes(self) -> dict[str, dict[str, int]]:
        """By phase and rank, the size of the last attempt."""
        sizes: dict[str, dict[str, int]] = {}
        for attempt in self.attempts:
            sizes.setdefault(attempt.phase, {})[str(attempt.rank)] = attempt.batch_size
        return sizes

    @property
    def duration_seconds(self) -> float:
        """All executions together."""
        return sum(execution.duration_seconds for execution in self.executions)

    @property
    def training_loss(self) -> float | None:
        """Of the last epoch."""
        return self.epochs[-1].training_loss if self.epochs else None

    @property
    def validation_loss(self) -> float | None:
        """Of the last epoch."""
        return self.epochs[-1].validation_loss if self.epochs else None

    @property
    def naive_loss(self) -> float | None:
        """The naive forecast's, beside `validation_loss`."""
        return self.epochs[-1].naive_loss if self.epochs else None

    def batch_size_path(self, phase: str | None = None) -> list[int]:
        """The sizes a phase went through (default: the one that gives the final size), as 64, 32, 16."""
        phase = phase or final_phase(attempt.phase for attempt in self.attempts)
        path: list[int] = []
        for attempt in self.attempts:
            if attempt.phase == phase and (not path or attempt.batch_size < path[-1]):
                path.append(attempt.batch_size)
        return path

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain JSON data, computed properties included; what is not a number is null."""
        computed = {
            name: getattr(self, name)
            for name, member in vars(type(self)).items()
            if isinstance(member, property) and name not in ("attempts", "incidents", "decisions", "phases")
        }
        plain = dataclasses.asdict(self) | computed | {"batch_size_path": self.batch_size_path()}
        result: dict[str, Any] = _json_able(plain)
        return result


def largest_rank(decisions: Iterable[DecisionRecorded]) -> dict[str, int]:
    """Granted retries by phase: the largest of its ranks' counts."""
    by_rank: dict[tuple[str, int], int] = {}
    for decision in decisions:
        if decision.granted:
            key = decision.phase, decision.rank
            by_rank[key] = by_rank.get(key, 0) + 1
    largest: dict[str, int] = {}
    for (phase, _), count in by_rank.items():
        largest[phase] = max(count, largest.get(phase, 0))
    return largest


def final_phase(phases: Iterable[str]) -> str:
    """The phase whose batch size is the final one."""
    there = set(phases)
    return next((phase for phase in FINAL_PHASES if phase in there), FINAL_PHASES[0])


def _json_able(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _json_able(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_able(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _json_able(dataclasses.asdict(value))
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value

"""The worker's side of the one retry authority.

A rank never decides about a retry. It reports an incident and does what the answer says. Under Ray the
answer comes from the driver's coordinator; `LocalAuthority` asks the same policy in the same process, for
code that runs without Ray.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from foxray.oom import Attempt, Decision, Incident, OomPolicy

_Error = TypeVar("_Error", bound=Exception)


@dataclass(frozen=True, kw_only=True)
class PhaseReport:
    """What one rank has to say about one phase that it finished."""

    phase: str
    rank: int
    batch_size: int
    """The size that the rank ended with."""
    duration_seconds: float
    rows: int
    """Samples that this rank processed."""
    peak_bytes: int | None
    """Highest device memory in use during the phase; None where the device does not tell."""


class Authority(Protocol):
    """Whom a rank reports to. Every call may be made from any rank."""

    def phase_started(
        self, *, phase: str, rank: int, batch_size: int, accumulation_steps: int, step: int, batches: int
    ) -> None:
        """A phase begins on a rank, at a batch size, at an optimizer step; `batches` are to come."""

    def decide(self, incident: Incident, *, incident_id: str, step: int) -> Decision:
        """Ask what to do. The same `incident_id` reported twice gets the same answer and counts once."""

    def recovered(self, *, incident_id: str, phase: str, rank: int, recovery_seconds: float) -> None:
        """The retry that was granted begins, this long after the error was raised."""

    def phase_ended(self, report: PhaseReport) -> None:
        """A rank finished a phase."""

    def epoch_ended(self, *, epoch: int, step: int, metrics: dict[str, float]) -> None:
        """Rank 0 finished an epoch, validation included."""

    def checkpoint_written(self, *, step: int, epoch: int, path: str) -> None:
        """A committed state is on storage."""

    def progress(self, **live: Any) -> bool:
        """Tell how far the run is, without waiting; True when the run is asked to stop."""


class Rescheduled(Exception):
    """Raised on a worker when the driver goes on with fresh workers; the decision is on record."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.known_to_all = False
        """Whether every rank leaves in the same step, so that rank 0 can keep the committed state."""


def known_to_all(trouble: _Error) -> _Error:
    """The same exception, marked as told to all ranks."""
    if isinstance(trouble, Rescheduled):
        trouble.known_to_all = True
    return trouble


def other_rank_stopped() -> Rescheduled:
    """What a healthy rank raises when it has been told that another one cannot go on."""
    return known_to_all(Rescheduled("another rank cannot go on"))


class Cancelled(Exception):
    """Raised on every worker in the same step when the run was asked to stop."""


@dataclass
class LocalAuthority:
    """The policy asked in this process; keeps what was reported, for whoever wants to look."""

    policy: OomPolicy
    log: Callable[[str], None] = field(default=lambda _: None)
    attempts: list[Attempt] = field(default_factory=list)
    answers: dict[str, Decision] = field(default_factory=dict)
    recovery_seconds: list[float] = field(default_factory=list)
    phases: list[PhaseReport] = field(default_factory=list)
    epochs: list[dict[str, float]] = field(default_factory=list)
    checkpoints: list[str] = field(default_factory=list)
    stop_requested: bool = False

    def phase_started(
        self, *, phase: str, rank: int, batch_size: int, accumulation_steps: int, step: int, batches: int
    ) -> None:
        self.log(f"{phase} starts on rank {rank} at batch_size={batch_size}")

    def decide(self, incident: Incident, *, incident_id: str, step: int) -> Decision:
        if incident_id not in self.answers:
            assert (
                incident.phase is not None and incident.rank is not None and incident.batch_size is not None
            )
            self.attempts.append(
                Attempt(
                    phase=incident.phase,
                    rank=incident.rank,
                    batch_size=incident.batch_size,
                    incident=incident,
                )
            )
            self.answers[incident_id] = self.policy.decide(self.attempts)
        return self.answers[incident_id]

    def recovered(self, *, incident_id: str, phase: str, rank: int, recovery_seconds: float) -> None:
        self.recovery_seconds.append(recovery_seconds)

    def phase_ended(self, report: PhaseReport) -> None:
        self.phases.append(report)

    def epoch_ended(self, *, epoch: int, step: int, metrics: dict[str, float]) -> None:
        self.epochs.append({"epoch": epoch, "step": step} | metrics)

    def checkpoint_written(self, *, step: int, epoch: int, path: str) -> None:
        self.checkpoints.append(path)

    def progress(self, **live: Any) -> bool:
        return self.stop_requested

"""The one retry authority of a run, as a small Ray actor that the driver owns.

Ranks and driver report to it; it removes duplicates by incident id, asks the policy, writes the ledger and
answers. It imports neither torch nor Ray, so it starts fast and can be tested as a plain object. Its
memory is only a cache: what it must know after its own death (batch sizes, retries, committed
checkpoints) stands in the ledger.

It also holds what the driver shows: the log lines of the guide, and the newest progress of each rank.
"""

import threading
import time
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from foxray.errors import UserError
from foxray.ledger import events as ev
from foxray.ledger.store import Ledger
from foxray.oom import Attempt, Decision, Incident, OomPolicy, texts
from foxray.training.authority import PhaseReport

HEARTBEAT_EVERY_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Message:
    """One line for people, and the same as fields for machines."""

    level: str
    text: str
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class View:
    """What the driver gets when it polls."""

    messages: list[Message]
    live: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Newest progress by rank."""
    broken: str | None = None
    """Why the ledger can no longer be written, if so: a run off the record must not go on."""


class Coordinator:
    """Decides, records and relays; one for each execution of a run. Calls may come from any thread."""

    def __init__(
        self,
        *,
        storage: str,
        run_id: str,
        execution: int,
        workers: int,
        policy: OomPolicy,
        phase_policies: dict[str, OomPolicy] | None = None,
        on_cpu: bool,
        batch_sizes: dict[str, int],
        rungs: tuple[str, ...] = (),
        advice: tuple[str, ...] = (),
    ) -> None:
        """`batch_sizes` by "phase" or "phase/rank": where each phase starts. `policy` holds for the phases
        that `phase_policies` does not name."""
        self._run = Ledger(storage).run(run_id)
        self._run_id, self._execution, self._workers = run_id, execution, workers
        self._policy, self._phase_policies = policy, phase_policies or {}
        self._on_cpu, self._advice = on_cpu, advice
        self._sizes = dict(batch_sizes)
        self._initial_rungs, self._rungs = rungs, list(rungs)
        self._history: list[Attempt] = []
        self._answers: dict[str, Decision] = {}
        self._granted: dict[tuple[str, int], int] = {}  # retries by phase and rank
        self._running: dict[int, tuple[str, int]] = {}  # rank -> (phase, batch size) in progress
        self._reports: dict[str, dict[int, PhaseReport]] = {}
        self._restart_from: dict[str, float] = {}  # incident id -> time of a decision for fresh workers
        self._messages: list[Message] = []
        self._live: dict[int, dict[str, Any]] = {}
        self._stop = False
        self._broken: str | None = None
        self._lock = threading.RLock()
        threading.Thread(target=self._beat, daemon=True).start()

    # -- from the ranks ----------------------------------------------------------------------------

    def worker_started(self, *, rank: int, node: str, gpu: str, gpu_uuid: str | None, pid: int) -> None:
        """A worker is up, on this node and GPU."""
        self._write(ev.WorkerStarted, rank=rank, node=node, gpu=gpu, gpu_uuid=gpu_uuid, pid=pid)

    def phase_started(
        self, *, phase: str, rank: int, batch_size: int, accumulation_steps: int, step: int, batches: int
    ) -> None:
        """See `Authority`; also ends the recovery of a fresh start."""
        with self._lock:
            first = all(running[0] != phase for running in self._running.values())
            self._running[rank] = (phase, batch_size)
            self._sizes.setdefault(f"{phase}/{rank}", batch_size)
            self._write(
                ev.AttemptStarted,
                phase=phase,
                rank=rank,
                batch_size=batch_size,
                accumulation_steps=accumulation_steps,
                step=step,
            )
            if first and batches:
                self._say(
                    "info", texts.phase_start(phase, batches=batches, batch_size=batch_size), phase=phase
                )
            for incident_id, since in self._restart_from.items():
                self._write(
                    ev.RecoveryMeasured,
                    incident_id=incident_id,
                    phase=phase,
                    rank=rank,
                    recovery_seconds=time.monotonic() - since,
                )
            self._restart_from.clear()

    def decide(self, incident: Incident, *, incident_id: str, step: int) -> Decision:
        """Answer an incident; asked again with the same id, the same answer is given and nothing counted."""
        with self._lock:
            if incident_id in self._answers:
                return self._answers[incident_id]
            phase, rank = incident.phase or "training", incident.rank or 0
            failed_size = incident.batch_size or self._size(phase, rank)
            self._history.append(Attempt(phase=phase, rank=rank, batch_size=failed_size, incident=incident))
            decision = self._policy_of(phase).decide(
                self._history, on_cpu=self._on_cpu, initial_rungs=self._initial_rungs, advice=self._advice
            )
            self._answers[incident_id] = decision
            self._record(incident, decision, incident_id, failed_size, step)
            if decision.action == "give_up":
                return decision
            self._sizes[f"{phase}/{rank}"] = decision.batch_size
            self._granted[phase, rank] = decision.retries
            if decision.rung is not None:
                self._rungs.append(decision.rung)
            if decision.action == "fresh_workers":
                self._restart_from[incident_id] = time.monotonic()
            else:
                self._running[rank] = (phase, decision.batch_size)
            self._announce_retry(decision, failed_size)
            return decision

    def recovered(self, *, incident_id: str, phase: str, rank: int, recovery_seconds: float) -> None:
        """A retry in place begins, at the size that was granted."""
        self._write(
            ev.RecoveryMeasured,
            incident_id=incident_id,
            phase=phase,
            rank=rank,
            recovery_seconds=recovery_seconds,
        )

    def phase_ended(self, report: PhaseReport) -> None:
        """Gather the reports of all ranks; the last one makes the event and the guide's lines."""
        with self._lock:
            reports = self._reports.setdefault(report.phase, {})
            reports[report.rank] = report
            if len(reports) < self._workers:
                return
            ended = [reports[rank] for rank in sorted(reports)]
            self._write(
                ev.PhaseEnded,
                phase=report.phase,
                batch_sizes={str(r.rank): r.batch_size for r in ended},
                oom_retries=self._phase_retries(report.phase),
                duration_seconds=max(r.duration_seconds for r in ended),
                rows=sum(r.rows for r in ended),
                peak_bytes={str(r.rank): r.peak_bytes for r in ended if r.peak_bytes is not None},
            )
            final = min(r.batch_size for r in ended)
            line = texts.phase_complete(
                report.phase, retries=self._phase_retries(report.phase), batch_size=final
            )
            self._say("info", line, phase=report.phase, batch_size=final)
            seconds = max(r.duration_seconds for r in ended)
            line = texts.phase_duration(report.phase, seconds)
            self._say("info", line, phase=report.phase, seconds=seconds)

    def epoch_ended(self, *, epoch: int, step: int, metrics: dict[str, float]) -> None:
        """An epoch is done, validation included."""
        known = {name: metrics.get(name) for name in ("training_loss", "validation_loss", "naive_loss")}
        rest = {name: value for name, value in metrics.items() if name not in known}
        self._write(ev.EpochEnded, epoch=epoch, step=step, metrics=rest, **known)
        shown = "  ".join(f"{name} {value:.6f}" for name, value in metrics.items())
        self._say("info", f"📈 Epoch {epoch} (step {step}): {shown}", epoch=epoch, step=step, **metrics)

    def checkpoint_written(self, *, step: int, epoch: int, path: str) -> None:
        """A committed state is on storage."""
        self._write(ev.CheckpointWritten, step=step, epoch=epoch, path=path)

    def progress(self, **live: Any) -> bool:
        """Keep the newest progress of a rank; True when the run shall stop."""
        with self._lock:
            self._live[int(live["rank"])] = live
            return self._stop

    # -- from the driver ---------------------------------------------------------------------------

    def poll(self) -> View:
        """Messages since the last call, and the newest progress by rank."""
        with self._lock:
            messages, self._messages = self._messages, []
            return View(messages=messages, live=dict(self._live), broken=self._broken)

    def request_stop(self) -> None:
        """Ask the ranks to end after the optimizer step in progress."""
        self._stop = True

    def decide_for(self, rank: int, incident: Incident, *, incident_id: str) -> Decision:
        """Answer an incident of a rank that could not report it itself."""
        with self._lock:
            live = self._live.get(rank, {})
            phase, size = self._running.get(rank, ("training", self._size("training", rank)))
            phase = live.get("phase", phase)
            known = replace(incident, rank=rank, phase=phase, batch_size=incident.batch_size or size)
            return self.decide(known, incident_id=incident_id, step=live.get("step", 0))

    def next_launch(self) -> tuple[dict[str, int], tuple[str, ...]]:
        """Batch sizes and rungs with which fresh workers start. Ranks may be dealt anew, so the smallest
        size of a phase holds for all of them."""
        with self._lock:
            self._running.clear()
            self._live.clear()
            self._reports.clear()
            by_phase: dict[str, int] = {}
            for key, size in self._sizes.items():
                phase = key.partition("/")[0]
                by_phase[phase] = min(size, by_phase.get(phase, size))
            self._sizes = dict(by_phase)
            return dict(by_phase), tuple(self._rungs)

    def workers_lost(self, *, ranks: list[int], reason: str, restart: bool) -> None:
        """Workers went away without a memory failure."""
        self._write(ev.WorkersLost, ranks=ranks, reason=reason, restart=restart)

    def retries(self) -> int:
        """Retries granted in this execution, over all phases and ranks."""
        with self._lock:
            return sum(self._granted.values())

    def smallest_batch_size(self, phase: str) -> int:
        """The size at which `phase` stands now: the smallest of its ranks."""
        with self._lock:
            return min(size for key, size in self._sizes.items() if key.partition("/")[0] == phase)

    # -- inside ------------------------------------------------------------------------------------

    def _record(
        self, incident: Incident, decision: Decision, incident_id: str, failed_size: int, step: int
    ) -> None:
        fields = asdict(incident)
        self._write(
            ev.IncidentRecorded,
            incident_id=incident_id,
            incident_kind=fields.pop("kind"),
            step=step,
            **(fields | {"phase": decision.phase, "rank": decision.rank, "batch_size": failed_size}),
        )
        self._write(
            ev.DecisionRecorded,
            incident_id=incident_id,
            action=decision.action,
            phase=decision.phase,
            rank=decision.rank,
            batch_size=decision.batch_size,
            previous_batch_size=failed_size,
            retries=decision.retries,
            rung=decision.rung,
            reason=decision.reason,
        )

    def _phase_retries(self, phase: str) -> int:
        """A phase's count is the largest of its ranks'."""
        return max((count for (name, _), count in self._granted.items() if name == phase), default=0)

    def _announce_retry(self, decision: Decision, failed_size: int) -> None:
        known = {"phase": decision.phase, "rank": decision.rank, "action": decision.action}
        for line in texts.retry_lines(
            decision.phase,
            attempt=decision.retries,
            max_retries=self._policy_of(decision.phase).max_retries,
            previous=failed_size,
            batch_size=decision.batch_size,
            rung=decision.rung,
        ):
            self._say("warning", line, batch_size=decision.batch_size, **known)

    def _policy_of(self, phase: str) -> OomPolicy:
        return self._phase_policies.get(phase, self._policy)

    def _size(self, phase: str, rank: int) -> int:
        return self._sizes.get(f"{phase}/{rank}", self._sizes[phase])

    def _say(self, level: str, text: str, **fields: Any) -> None:
        self._messages.append(Message(level=level, text=text, fields=fields))

    def _write(self, kind: type[ev.Event], **fields: Any) -> None:
        try:
            self._run.append(kind(run_id=self._run_id, execution=self._execution, **fields))
        except UserError as error:
            # Most callers do not wait for an answer, so the driver is told: it ends the run.
            self._broken = f"{kind.kind} could not be recorded: {error}"
            raise

    def _beat(self) -> None:
        while True:
            with self._lock:
                live = {"ranks": {str(rank): values for rank, values in self._live.items()}}
            try:
                self._run.heartbeat(self._execution, **live)
            except UserError as error:  # a full disk may have room again before the next beat
                with self._lock:
                    self._say("warning", f"⚠️  heartbeat not written: {error}")
            time.sleep(HEARTBEAT_EVERY_SECONDS)

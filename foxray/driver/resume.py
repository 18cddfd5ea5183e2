"""Where a run goes on: read from its ledger, since everything else may be gone."""

import os
import socket
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from foxray.errors import UserError
from foxray.ledger import events as ev
from foxray.ledger.store import Ledger, RunLedger
from foxray.oom import next_batch_size
from foxray.training.config import TrainConfig

HEARTBEAT_FRESH = timedelta(seconds=30)

# What may differ from the run's first start: how it runs, not what it computes.
CHANGEABLE = frozenset(
    {
        "epochs",
        "workers",
        "device",
        "emulate_gpu",
        "min_batch_size",
        "max_oom_retries",
        "qat_min_batch_size",
        "qat_max_oom_retries",
        "on_exhausted",
        "max_worker_failures",
        "checkpoint_every",
        "storage",
    }
)


@dataclass(frozen=True, kw_only=True)
class Resume:
    """The state of a run as its next execution finds it."""

    execution: int
    """Number of the execution that starts now."""
    batch_sizes: dict[str, int] = field(default_factory=dict)
    """By phase; never a size that is known to fail."""
    rungs: tuple[str, ...] = ()
    effective_batch: int = 0
    """Of the first start; 0: as configured."""


def resume_config(storage: str, run_id: str, explicit: dict[str, object]) -> TrainConfig:
    """The configuration that a run was created with, with the explicit flags that may change.

    Raises UserError for an unknown run, or a flag that would change what is computed.
    """
    ledger = Ledger(storage)
    if not ledger.exists(run_id):
        known = ", ".join(ledger.run_ids()[-5:]) or "none"
        raise UserError(f"--resume {run_id}: no such run in {storage}; the newest there: {known}")
    created = _created(ledger.run(run_id))
    fixed = sorted(
        name
        for name, value in explicit.items()
        if name not in CHANGEABLE and created.config.get(name) != value
    )
    if fixed:
        allowed = ", ".join(sorted(CHANGEABLE))
        raise UserError(
            f"--resume {run_id} with --{fixed[0].replace('_', '-')} {explicit[fixed[0]]}: this would change "
            f"what the run computes (it began with {created.config.get(fixed[0])}); {allowed} may change"
        )
    return TrainConfig(**(created.config | explicit | {"storage": storage}))


def find_resume(run: RunLedger, config: TrainConfig) -> Resume:
    """Fold the ledger of a run into where its next execution starts.

    Raises UserError while another process still works on the run.
    """
    events = run.events()
    created = _created(run)
    last = max((event.execution for event in events), default=0)
    _refuse_running(run, [event for event in events if event.execution == last])
    sizes: dict[str, int] = {}
    rungs: list[str] = []
    for event in events:
        if isinstance(event, ev.AttemptStarted):
            sizes.setdefault(event.phase, event.batch_size)
        elif isinstance(event, ev.DecisionRecorded):
            gave_up = event.action == "give_up"
            minimum = config.phase_policy(event.phase).min_batch_size
            size = next_batch_size(event.batch_size, minimum) if gave_up else event.batch_size
            sizes[event.phase] = min(size, sizes.get(event.phase, size))
            rungs += [event.rung] if event.rung else []
    first = created.config
    sizes = {phase: int(first["batch_size"]) for phase in config.phases} | sizes
    effective = int(first["batch_size"]) * int(first["accumulation_steps"]) * int(first["workers"])
    return Resume(execution=last + 1, batch_sizes=sizes, rungs=tuple(rungs), effective_batch=effective)


def _created(run: RunLedger) -> ev.RunCreated:
    for event in run.events():
        if isinstance(event, ev.RunCreated):
            return event
    raise UserError(f"run {run.path}: its ledger has no readable start; start a new run")


def _refuse_running(run: RunLedger, events: list[ev.Event]) -> None:
    started = [event for event in events if isinstance(event, ev.ExecutionStarted)]
    if not started or any(isinstance(event, ev.ExecutionEnded) for event in events):
        return
    if started[-1].host == socket.gethostname() and not _alive(started[-1].pid):
        return
    beat = run.read_heartbeat()
    if beat is not None and datetime.now(UTC) - datetime.fromisoformat(beat.time_utc) < HEARTBEAT_FRESH:
        raise UserError(
            f"--resume {run.run_id}: the run is still being worked on by process {started[-1].pid} on "
            f"{started[-1].host} (last heartbeat {beat.time_utc}); stop that first"
        )


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True

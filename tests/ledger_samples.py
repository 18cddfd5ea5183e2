"""A hand-written run for the tests of the ledger: two ranks out of memory, a resume, one lost execution."""

from datetime import UTC, datetime, timedelta

from foxray.ledger import events as ev

START = datetime(2026, 1, 31, 9, 0, tzinfo=UTC)


def at(second: float) -> str:
    """Time of an event, so many seconds after the start."""
    return ev.format_utc(START + timedelta(seconds=second))


def created(run_id: str, second: float = 0.0, **changes: object) -> ev.RunCreated:
    """The first event of a run."""
    fields: dict[str, object] = {
        "model": "tft",
        "config": {"batch_size": 64},
        "foxray_version": "0.1.0",
        "dataset": {"rows": 30_000, "duration_days": 31.0},
    }
    return ev.RunCreated(run_id=run_id, execution=0, time_utc=at(second), **(fields | changes))  # type: ignore[arg-type]


def small_run(run_id: str, *, outcome: str = "success", second: float = 0.0) -> list[ev.Event]:
    """A run of one execution that ends without an incident."""
    common = {"run_id": run_id, "execution": 1}
    return [
        created(run_id, second),
        ev.ExecutionStarted(
            **common,
            time_utc=at(second + 1),
            workers=1,
            device="cpu",
            gpu="cpu",
            host="h",
            pid=1,
            resumed=False,
        ),
        ev.AttemptStarted(
            **common,
            time_utc=at(second + 2),
            phase="training",
            rank=0,
            batch_size=64,
            accumulation_steps=1,
            step=0,
        ),
        ev.ExecutionEnded(
            **common,
            time_utc=at(second + 9),
            outcome=outcome,
            final_batch_size=64,
            oom_retries=0,
            duration_seconds=8.0,
            message="",
        ),
    ]


def eventful_run(run_id: str = "tft-1") -> list[ev.Event]:
    """Two ranks; both run out at 64, rank 1 again at 32; the driver is killed; the resume ends well.

    In its second execution rank 0 needs fresh workers in validation (32 -> 16).
    """
    first, second = {"run_id": run_id, "execution": 1}, {"run_id": run_id, "execution": 2}
    events: list[ev.Event] = [created(run_id)]
    events.append(_started(first, 1, resumed=False))
    for rank in (0, 1):
        events.append(_attempt(first, 2 + rank, "training", rank, 64, step=0))
    events += _incident(first, 10, "e1l1-training-r0-1", "training", 0, 64, 32, retries=1, step=5)
    events += _incident(first, 11, "e1l1-training-r1-1", "training", 1, 64, 32, retries=1, step=5)
    events += _incident(first, 12, "e1l1-training-r1-2", "training", 1, 32, 16, retries=2, step=6)
    events.append(_epoch(first, 20, 1, step=100, validation_loss=0.5))
    events.append(ev.CheckpointWritten(**first, time_utc=at(21), step=100, epoch=1, path="checkpoints/100"))
    # killed here
    events.append(_started(second, 100, resumed=True))
    for rank in (0, 1):
        events.append(_attempt(second, 101 + rank, "training", rank, 16, step=100))
    for rank in (0, 1):
        events.append(_attempt(second, 103 + rank, "validation", rank, 32, step=150))
    events += _incident(
        second,
        110,
        "e2l1-validation-r0-1",
        "validation",
        0,
        32,
        16,
        retries=1,
        step=150,
        action="fresh_workers",
    )
    for rank in (0, 1):
        events.append(_attempt(second, 120 + rank, "training", rank, 16, step=150))
    for rank in (0, 1):
        events.append(_attempt(second, 122 + rank, "validation", rank, 16, step=200))
    events.append(_epoch(second, 130, 2, step=200, validation_loss=0.25))
    events.append(ev.CheckpointWritten(**second, time_utc=at(131), step=200, epoch=2, path="checkpoints/200"))
    for index, (phase, peak) in enumerate((("training", 900), ("validation", 400))):
        events.append(
            ev.PhaseEnded(
                **second,
                time_utc=at(132 + index),
                phase=phase,
                batch_sizes={"0": 16, "1": 16},
                oom_retries=index,
                duration_seconds=20.0,
                rows=6400,
                peak_bytes={"0": peak, "1": peak + 50},
            )
        )
    events.append(
        ev.ExecutionEnded(
            **second,
            time_utc=at(140),
            outcome="success",
            final_batch_size=16,
            oom_retries=1,
            duration_seconds=40.0,
            message="",
        )
    )
    return events


def _started(envelope: dict[str, object], second: float, *, resumed: bool) -> ev.Event:
    return ev.ExecutionStarted(
        **envelope,  # type: ignore[arg-type]
        time_utc=at(second),
        workers=2,
        device="cpu",
        gpu="RTX 3050 Ti",
        host="node-a",
        pid=77,
        resumed=resumed,
    )


def _attempt(
    envelope: dict[str, object], second: float, phase: str, rank: int, batch_size: int, *, step: int
) -> ev.Event:
    return ev.AttemptStarted(
        **envelope,  # type: ignore[arg-type]
        time_utc=at(second),
        phase=phase,
        rank=rank,
        batch_size=batch_size,
        accumulation_steps=64 // batch_size,
        step=step,
    )


def _epoch(
    envelope: dict[str, object], second: float, epoch: int, *, step: int, validation_loss: float
) -> ev.Event:
    return ev.EpochEnded(
        **envelope,  # type: ignore[arg-type]
        time_utc=at(second),
        epoch=epoch,
        step=step,
        training_loss=validation_loss / 2,
        validation_loss=validation_loss,
        naive_loss=0.75,
        metrics={"coverage": 0.8},
    )


def _incident(
    envelope: dict[str, object],
    second: float,
    incident_id: str,
    phase: str,
    rank: int,
    before: int,
    after: int,
    *,
    retries: int,
    step: int,
    action: str = "retry_in_place",
) -> list[ev.Event]:
    return [
        ev.IncidentRecorded(
            **envelope,  # type: ignore[arg-type]
            time_utc=at(second),
            incident_id=incident_id,
            phase=phase,
            rank=rank,
            node="node-a",
            gpu="RTX 3050 Ti",
            batch_size=before,
            incident_kind="device",
            exception_type="torch.OutOfMemoryError",
            message="CUDA out of memory. Tried to allocate 512 B.",
            bytes_requested=512,
            bytes_free=100,
            bytes_total=4096,
            step=step,
        ),
        ev.DecisionRecorded(
            **envelope,  # type: ignore[arg-type]
            time_utc=at(second + 0.1),
            incident_id=incident_id,
            action=action,
            phase=phase,
            rank=rank,
            batch_size=after,
            previous_batch_size=before,
            retries=retries,
            reason="halved",
        ),
        ev.RecoveryMeasured(
            **envelope,  # type: ignore[arg-type]
            time_utc=at(second + 0.2),
            incident_id=incident_id,
            phase=phase,
            rank=rank,
            recovery_seconds=0.125,
        ),
    ]

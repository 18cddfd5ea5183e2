"""The coordinator as a plain object: one answer an incident, everything in the ledger."""

from pathlib import Path

import pytest

from foxray.driver.coordinator import Coordinator
from foxray.ledger import events as ev
from foxray.ledger.store import Ledger
from foxray.oom import Incident, OomPolicy
from foxray.training.authority import PhaseReport


@pytest.fixture
def coordinator(tmp_path: Path) -> Coordinator:
    Ledger(str(tmp_path)).create("r1")
    return Coordinator(
        storage=str(tmp_path),
        run_id="r1",
        execution=1,
        workers=2,
        policy=OomPolicy(),
        on_cpu=True,
        batch_sizes={"training": 64, "validation": 64},
    )


def events(tmp_path: Path, kind: type[ev.Event]) -> list[ev.Event]:
    return [event for event in Ledger(str(tmp_path)).run("r1").events() if isinstance(event, kind)]


def incident(rank: int = 0, batch_size: int = 64, fresh_reason: str | None = None) -> Incident:
    return Incident(
        kind="device",
        exception_type="torch.OutOfMemoryError",
        message="CUDA out of memory.",
        phase="training",
        rank=rank,
        batch_size=batch_size,
        fresh_reason=fresh_reason,
    )


def test_the_same_incident_reported_twice_is_one(coordinator: Coordinator, tmp_path: Path) -> None:
    first = coordinator.decide(incident(), incident_id="a", step=3)
    assert coordinator.decide(incident(), incident_id="a", step=3) == first
    assert first.batch_size == 32 and first.action == "retry_in_place"
    assert coordinator.retries() == 1
    assert len(events(tmp_path, ev.IncidentRecorded)) == len(events(tmp_path, ev.DecisionRecorded)) == 1


def test_ranks_count_their_retries_apart_and_fresh_workers_take_the_smallest(
    coordinator: Coordinator,
) -> None:
    coordinator.decide(incident(rank=0), incident_id="a", step=0)
    coordinator.decide(incident(rank=1), incident_id="b", step=0)
    decision = coordinator.decide(
        incident(rank=1, batch_size=32, fresh_reason="held"), incident_id="c", step=0
    )
    assert decision.action == "fresh_workers" and decision.retries == 2
    sizes, rungs = coordinator.next_launch()
    assert sizes == {"training": 16, "validation": 64} and rungs == ()


def test_the_guides_lines(coordinator: Coordinator) -> None:
    coordinator.phase_started(
        phase="training", rank=0, batch_size=64, accumulation_steps=1, step=0, batches=100
    )
    coordinator.decide(incident(), incident_id="a", step=0)
    for rank, size in ((0, 32), (1, 64)):
        coordinator.phase_ended(
            PhaseReport(
                phase="training", rank=rank, batch_size=size, duration_seconds=1.0, rows=10, peak_bytes=5
            )
        )
    lines = [message.text for message in coordinator.poll().messages]
    assert lines == [
        "🏋️  Training Phase: Running 100 batches (initial batch_size=64)",
        "⚠️  Training OOM detected (attempt 1/3), reducing batch_size: 64 → 32",
        "  🧹 Clearing CUDA cache...",
        "  🔄 Retrying training with smaller batch size...",
        "✅ Training complete after 1 OOM retries - final batch_size=32",
        "🏋️  Training Phase: 1 second",
    ]
    assert coordinator.poll().messages == []


def test_an_incident_of_a_dead_rank_gets_the_phase_it_was_in(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    coordinator.phase_started(
        phase="validation", rank=1, batch_size=64, accumulation_steps=1, step=9, batches=3
    )
    killed = Incident(
        kind="host", exception_type="ActorDiedError", message="killed", fresh_reason="process killed"
    )
    decision = coordinator.decide_for(1, killed, incident_id="e1l1-driver-r1")
    assert (decision.phase, decision.batch_size, decision.action) == ("validation", 32, "fresh_workers")
    (event,) = events(tmp_path, ev.IncidentRecorded)
    assert event.rank == 1 and event.incident_kind == "host"


def test_giving_up_grants_nothing(coordinator: Coordinator) -> None:
    decision = coordinator.decide(incident(batch_size=2), incident_id="a", step=0)
    assert decision.action == "give_up" and "batch_size=2 (minimum=2)" in decision.text
    assert coordinator.retries() == 0


def test_stop_reaches_the_ranks(coordinator: Coordinator) -> None:
    assert coordinator.progress(rank=0, step=1) is False
    coordinator.request_stop()
    assert coordinator.progress(rank=0, step=2) is True
    assert coordinator.poll().live[0]["step"] == 2

"""The summary of a run, checked against a run written by hand."""

import json
import math
import time
from datetime import timedelta
from pathlib import Path

import pytest
from ledger_samples import START, at, created, eventful_run, small_run

from foxray.ledger import Ledger, success_rate, summarize
from foxray.ledger import events as ev
from foxray.ledger.store import Heartbeat
from foxray.ledger.summary import count_outcomes, summarize_all


def test_two_ranks_out_of_memory_and_a_resume() -> None:
    summary = summarize(eventful_run(), now=START)
    assert (summary.run_id, summary.model, summary.created_utc) == ("tft-1", "tft", at(0))
    assert [e.outcome for e in summary.executions] == ["lost", "success"] and summary.outcome == "success"
    killed, resumed = summary.executions
    assert (killed.oom_retries, killed.phase_retries) == (3, {"training": 2})
    assert (resumed.oom_retries, resumed.phase_retries) == (1, {"validation": 1})
    assert summary.oom_retries == 4 and summary.phase_retries == {"training": 2, "validation": 1}
    assert killed.final_batch_size == 16 and resumed.final_batch_size == 16 and summary.final_batch_size == 16
    assert resumed.resumed and not killed.resumed and killed.gpu == "RTX 3050 Ti"
    assert killed.duration_seconds == 20.0 and resumed.duration_seconds == 40.0
    assert summary.duration_seconds == 60.0
    assert summary.batch_size_path() == [64, 32, 16] and summary.batch_size_path("validation") == [32, 16]
    assert summary.batch_sizes == {"training": {"0": 16, "1": 16}, "validation": {"0": 16, "1": 16}}
    assert summary.peak_bytes == {"training": 950, "validation": 450}
    assert summary.recovery_seconds == [0.125] * 4
    assert [(e.epoch, e.validation_loss) for e in summary.epochs] == [(1, 0.5), (2, 0.25)]
    assert (summary.training_loss, summary.validation_loss, summary.naive_loss) == (0.125, 0.25, 0.75)
    assert summary.last_checkpoint is not None and summary.last_checkpoint.step == 200
    assert len(summary.incidents) == len(summary.decisions) == 4


def test_the_table_of_attempts() -> None:
    summary = summarize(eventful_run(), now=START)
    rows = [(a.execution, a.phase, a.rank, a.batch_size, a.outcome) for a in summary.attempts]
    assert rows == [
        (1, "training", 0, 64, "oom"),
        (1, "training", 1, 64, "oom"),
        (1, "training", 0, 32, "lost"),
        (1, "training", 1, 32, "oom"),
        (1, "training", 1, 16, "lost"),
        (2, "training", 0, 16, "interrupted"),
        (2, "training", 1, 16, "interrupted"),
        (2, "validation", 0, 32, "oom"),
        (2, "validation", 1, 32, "interrupted"),
        (2, "validation", 0, 16, "ok"),
        (2, "training", 0, 16, "ok"),
        (2, "training", 1, 16, "ok"),
        (2, "validation", 1, 16, "ok"),
    ]
    by_place = {(a.execution, a.phase, a.rank, a.batch_size): a for a in summary.attempts}
    assert by_place[1, "training", 0, 64].accumulation_steps == 1
    assert (
        by_place[1, "training", 0, 32].accumulation_steps is None and by_place[1, "training", 0, 32].step == 5
    )
    assert by_place[2, "validation", 0, 16].accumulation_steps == 4, "taken up by the fresh workers' start"


def test_a_phase_announced_every_epoch_at_the_same_size_is_one_attempt() -> None:
    events = small_run("r")
    again = [
        ev.AttemptStarted(
            run_id="r",
            execution=1,
            time_utc=at(3 + epoch),
            phase="validation",
            rank=0,
            batch_size=32,
            accumulation_steps=1,
            step=epoch,
        )
        for epoch in range(4)
    ]
    summary = summarize([*events[:-1], *again, events[-1]], now=START)
    assert [(a.phase, a.batch_size, a.outcome) for a in summary.attempts] == [
        ("training", 64, "ok"),
        ("validation", 32, "ok"),
    ]


def test_giving_up_is_no_retry_and_ends_with_oom() -> None:
    common = {"run_id": "r", "execution": 1}
    events = [
        *small_run("r")[:-1],
        ev.DecisionRecorded(
            **common,
            time_utc=at(4),
            incident_id="i",
            action="give_up",
            phase="training",
            rank=0,
            batch_size=64,
            previous_batch_size=64,
            retries=0,
            reason="at the minimum",
        ),
        ev.ExecutionEnded(
            **common,
            time_utc=at(5),
            outcome="oom",
            oom_retries=0,
            duration_seconds=4.0,
            message="at the minimum",
        ),
    ]
    summary = summarize(events)
    assert (summary.outcome, summary.oom_retries, summary.phase_retries) == ("oom", 0, {})
    assert [(a.batch_size, a.outcome) for a in summary.attempts] == [(64, "oom")]
    assert summary.final_batch_size == 64 and summary.message == "at the minimum"


@pytest.mark.parametrize(
    ("age_seconds", "beat_second", "beat_execution", "outcome"),
    [
        (30, None, 1, "running"),
        (90, None, 1, "lost"),
        (90, 60, 1, "running"),
        (90, 20, 1, "lost"),
        (90, 60, 7, "lost"),
    ],
)
def test_without_an_end_it_is_running_or_lost(
    age_seconds: float, beat_second: float | None, beat_execution: int, outcome: str
) -> None:
    events = small_run("r")[:-1]
    beat = None
    if beat_second is not None:
        beat = Heartbeat(run_id="r", execution=beat_execution, time_utc=at(beat_second), live={"step": 3})
    summary = summarize(
        events, heartbeat=beat, now=START + timedelta(seconds=age_seconds), lost_after_seconds=60.0
    )
    assert summary.outcome == outcome
    assert summary.live == ({"step": 3} if outcome == "running" and beat else {})
    assert [attempt.outcome for attempt in summary.attempts] == [outcome]


def test_an_execution_that_a_later_one_followed_is_lost_however_fresh() -> None:
    events = eventful_run()
    summary = summarize(events, now=START + timedelta(seconds=21))
    assert summary.executions[0].outcome == "lost"


def test_the_success_rate_is_over_executions_and_leaves_the_cancelled_and_running_out() -> None:
    now = START + timedelta(seconds=10)
    outcomes = ("success", "success", "failed", "oom", "cancelled")
    summaries = [summarize(small_run(f"r{i}", outcome=o), now=now) for i, o in enumerate(outcomes)]
    assert success_rate(summaries) == pytest.approx(2 / 4)
    summaries.append(summarize(small_run("running")[:-1], now=now))
    assert success_rate(summaries) == pytest.approx(2 / 4)
    summaries.append(summarize(eventful_run(), now=now))  # one lost, one success
    assert success_rate(summaries) == pytest.approx(3 / 6)
    assert count_outcomes(summaries)["lost"] == 1
    assert success_rate([]) is None and success_rate(summaries[4:5]) is None


def test_pieces_of_a_ledger_are_summarized_as_far_as_they_go() -> None:
    events = eventful_run()
    for missing in range(len(events)):
        summary = summarize(events[:missing] + events[missing + 1 :], now=START)
        json.dumps(summary.to_dict(), allow_nan=False)
    assert summarize(events[1:], now=START).model == "unknown"
    only_created = summarize([created("r")], now=START)
    assert only_created.outcome == "lost" and only_created.final_batch_size is None
    with pytest.raises(ValueError, match="no events"):
        summarize([])


def test_a_summary_is_plain_json_with_its_computed_numbers() -> None:
    events = eventful_run()
    events.append(
        ev.EpochEnded(
            run_id="tft-1", execution=2, time_utc=at(139), epoch=3, step=9, validation_loss=math.nan
        )
    )
    plain = summarize(events, now=START, skipped=[("x.json", "torn")]).to_dict()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert (
        plain["oom_retries"] == 4
        and plain["outcome"] == "success"
        and plain["batch_size_path"] == [64, 32, 16]
    )
    assert plain["epochs"][-1]["validation_loss"] is None and plain["skipped"] == [["x.json", "torn"]]
    assert plain["executions"][0]["incidents"][0]["bytes_requested"] == 512


def test_an_rl_run_ends_with_the_size_of_its_update_phase() -> None:
    common = {"run_id": "r", "execution": 1}
    events = small_run("r")[:2] + [
        ev.PhaseEnded(
            **common,
            time_utc=at(4 + index),
            phase=phase,
            batch_sizes={"0": size, "1": size * 2},
            oom_retries=0,
            duration_seconds=1.0,
            rows=1,
        )
        for index, (phase, size) in enumerate((("rollout", 4), ("update", 8)))
    ]
    assert summarize(events, now=START).final_batch_size == 8


def test_summarizing_takes_milliseconds_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    ledger = Ledger(tmp_path)
    for number in range(100):
        for event in eventful_run(f"tft-{number:04d}"):
            ledger.run(f"tft-{number:04d}").append(event)
    start = time.process_time()
    summaries = summarize_all(ledger)
    seconds = time.process_time() - start
    assert len(summaries) == 100 and success_rate(summaries) == 0.5
    assert seconds / 100 < 0.01

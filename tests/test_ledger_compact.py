"""Compaction: the same events before and after, whatever happens in between."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from ledger_samples import START, at, created, eventful_run, small_run

from foxray.errors import UserError
from foxray.ledger import Ledger, compact, summarize
from foxray.ledger import compact as compact_function
from foxray.ledger import events as ev
from foxray.ledger.summary import summarize_all


def make(ledger: Ledger, runs: dict[str, list[ev.Event]]) -> dict[str, list[ev.Event]]:
    for run_id, events in runs.items():
        for event in events:
            ledger.run(run_id).append(event)
    return runs


def three_runs() -> dict[str, list[ev.Event]]:
    unfinished = small_run("c")[:-1]
    return {"a": eventful_run("a"), "b": small_run("b", outcome="failed"), "c": unfinished}


def read(ledger: Ledger) -> dict[str, list[ev.Event]]:
    return {run_id: ledger.run(run_id).events() for run_id in ledger.run_ids()}


def small_files(ledger: Ledger, run_id: str) -> list[str]:
    return [name for name, _ in ledger.files.list(f"runs/{run_id}/events")]


def segments(ledger: Ledger) -> list[str]:
    return [name for name, _ in ledger.files.list("compacted")]


@pytest.fixture(params=["folder", "mock"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Opens the same storage anew, as another process would."""
    if request.param == "folder":
        return lambda: Ledger(tmp_path)
    from pyarrow import fs

    filesystem = fs._MockFileSystem()
    return lambda: Ledger("bucket", filesystem=filesystem)


def test_the_same_events_before_and_after(storage: Any) -> None:
    ledger = storage()
    runs = make(ledger, three_runs())
    before = summarize_all(ledger, now=START)
    folded = compact(ledger, now=START + timedelta(minutes=5))
    assert folded == len(runs["a"]) + len(runs["b"])
    assert (
        small_files(ledger, "a") == [] and len(small_files(ledger, "c")) == 3 and len(segments(ledger)) == 1
    )
    for reader in (ledger, storage()):
        assert read(reader) == runs
        assert summarize_all(reader, now=START) == before
        assert reader.exists("a") and not reader.exists("0") and not reader.exists("zzz")
    assert compact(ledger, now=START) == 0, "nothing is left to do"


def test_a_silent_run_is_folded_after_its_time_only(storage: Any) -> None:
    ledger = storage()
    make(ledger, {"c": small_run("c")[:-1]})
    assert compact(ledger, now=START + timedelta(hours=23)) == 0
    assert compact(ledger, now=START + timedelta(hours=25)) == 3


def test_a_live_heartbeat_keeps_a_run_from_being_folded(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    make(ledger, {"c": small_run("c")[:-1]})
    ledger.run("c").heartbeat(1)
    beat = ledger.run("c").read_heartbeat()
    assert beat is not None
    assert compact(ledger, now=ev.parse_utc(beat.time_utc) + timedelta(hours=1)) == 0


def test_killed_between_publishing_and_deleting(storage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = storage()
    runs = make(ledger, three_runs())
    deleted: list[str] = []

    def killed(path: str) -> None:
        if len(deleted) == 2:
            raise KeyboardInterrupt
        deleted.append(path)
        type(ledger.files).delete(ledger.files, path)

    monkeypatch.setattr(ledger.files, "delete", killed)
    with pytest.raises(KeyboardInterrupt):
        compact(ledger, now=START)
    monkeypatch.undo()
    assert len(segments(ledger)) == 1 and len(small_files(ledger, "a")) == len(runs["a"]) - 2
    assert read(storage()) == runs, "what is in both places counts once"
    compact(storage(), now=START)
    assert small_files(ledger, "a") == [] and read(storage()) == runs and len(segments(ledger)) == 1


def test_killed_before_publishing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(tmp_path)
    runs = make(ledger, three_runs())

    def killed(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ledger.files, "write", killed)
    with pytest.raises(KeyboardInterrupt):
        compact(ledger, now=START)
    monkeypatch.undo()
    assert read(Ledger(tmp_path)) == runs and segments(ledger) == []


def test_a_resumed_run_is_read_from_both_places_and_folded_again(storage: Any) -> None:
    ledger = storage()
    events = eventful_run("a")
    first = [event for event in events if event.execution <= 1]
    ended = ev.ExecutionEnded(
        run_id="a",
        execution=1,
        time_utc=at(30),
        outcome="oom",
        oom_retries=3,
        duration_seconds=29.0,
        message="x",
    )
    make(ledger, {"a": [*first, ended]})
    compact(ledger, now=START)
    later = [event for event in events if event.execution == 2]
    make(ledger, {"a": later})
    expected = [*first, ended, *later]
    assert read(storage()) == {"a": expected}
    assert compact(ledger, now=START) == len(later)
    assert len(segments(ledger)) == 1, "the small segment was folded into the new one"
    assert read(storage()) == {"a": expected} and read(ledger) == {"a": expected}


def test_a_reader_in_the_middle_of_a_compaction_misses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader has listed the small files when they go away, and had listed no segment yet."""
    ledger, other = Ledger(tmp_path), Ledger(tmp_path)
    runs = make(ledger, {"a": eventful_run("a")})
    listing = ledger.files.list

    def list_then_compact(folder: str) -> list[tuple[str, bool]]:
        found = listing(folder)
        if folder == "runs/a/events":
            assert compact(other, now=START) == len(runs["a"])
        return found

    monkeypatch.setattr(ledger.files, "list", list_then_compact)
    run = ledger.run("a")
    assert run.events() == runs["a"] and run.skipped == []


def test_a_segment_that_vanishes_under_a_reader_is_looked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, other = Ledger(tmp_path), Ledger(tmp_path)
    runs = make(ledger, {"a": eventful_run("a")})
    compact(ledger, now=START)
    reader = Ledger(tmp_path)
    opening = reader.files.open
    runs |= make(other, {"b": small_run("b")})

    def compact_then_open(path: str) -> Any:
        monkeypatch.undo()
        assert compact(other, now=START) == len(runs["b"])
        assert len(segments(other)) == 1
        return opening(path)

    monkeypatch.setattr(reader.files, "open", compact_then_open)
    assert reader.run("a").events() == runs["a"]
    assert read(reader) == runs


def test_torn_files_stay_and_unknown_kinds_are_kept(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    make(ledger, {"b": small_run("b")})
    folder = Path(ledger.run("b").path, "events")
    (folder / "torn.json").write_bytes(b'{"kind": "run_cr')
    novel = (
        b'{"kind":"moon","schema":9,"run_id":"b","execution":1,"event_id":"m","time_utc":"%s","phase":0.5}'
    )
    (folder / "novel.json").write_bytes(novel % at(3).encode())
    before = read(Ledger(tmp_path))
    compact(ledger, now=START)
    assert small_files(ledger, "b") == ["torn.json"]
    run = Ledger(tmp_path).run("b")
    assert run.events() == before["b"] and [name for name, _ in run.skipped] == ["torn.json"]
    assert any(isinstance(e, ev.UnknownEvent) and e.fields["phase"] == 0.5 for e in run.events())


def test_a_foreign_file_among_the_segments_is_named(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    runs = make(ledger, {"b": small_run("b")})
    compact(ledger, now=START)
    (tmp_path / "compacted" / "foreign.parquet").write_bytes(b"PAR1 but no more than that")
    run = Ledger(tmp_path).run("b")
    assert run.events() == runs["b"]
    assert [name for name, _ in run.skipped] == ["compacted/foreign.parquet"]
    make(ledger, {"d": small_run("d")})
    assert compact(Ledger(tmp_path), now=START) == 4


def test_memory_is_bounded_by_several_segments(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    runs = make(
        ledger, {f"r{number:02d}": small_run(f"r{number:02d}", second=number) for number in range(20)}
    )
    folded = compact(ledger, now=START, segment_body_bytes=4000)
    assert folded == 80 and len(segments(ledger)) > 3
    assert read(Ledger(tmp_path)) == runs


def test_runs_whose_rows_span_row_groups_are_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foxray.ledger.segments.ROW_GROUP_ROWS", 5)
    ledger = Ledger(tmp_path)
    runs = make(ledger, {"a": eventful_run("a"), "b": small_run("b"), "c": small_run("c")})
    compact(ledger, now=START)
    assert read(Ledger(tmp_path)) == runs


def test_the_columns_serve_queries_from_elsewhere(tmp_path: Path) -> None:
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    ledger = Ledger(tmp_path)
    make(ledger, {"a": eventful_run("a")})
    compact(ledger, now=START)
    table = pq.read_table(tmp_path / "compacted")
    decisions = table.filter(pc.equal(table["kind"], "decision_recorded"))
    assert decisions["execution"].to_pylist() == [1, 1, 1, 2]
    assert summarize([ev.from_json(body) for body in table["body"].to_pylist()]).oom_retries == 4


def test_a_storage_that_is_not_writable_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(tmp_path)
    runs = make(ledger, {"b": [created("b"), *small_run("b")[1:]]})
    (tmp_path / "compacted").write_text("in the way")
    with pytest.raises(UserError, match="not writable"):
        compact_function(ledger, now=START)
    assert read(Ledger(tmp_path)) == runs

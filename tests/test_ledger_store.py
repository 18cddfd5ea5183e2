"""The store: whole files, many writers, doubles, torn and foreign files, and other storages than a folder."""

import multiprocessing
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ledger_samples import at, created, eventful_run, small_run

from foxray.errors import UserError
from foxray.ledger import Ledger, RunLedger
from foxray.ledger import events as ev
from foxray.ledger.files import ArrowFiles


def fill(run: RunLedger, events: list[ev.Event]) -> list[ev.Event]:
    for event in events:
        run.append(event)
    return events


def open_storage(kind: str, tmp_path: Path) -> Ledger:
    from pyarrow import fs

    if kind == "folder":
        return Ledger(tmp_path / "store")
    if kind == "file URI":
        return Ledger((tmp_path / "store with space").as_uri())
    if kind == "subtree":
        (tmp_path / "base").mkdir()
        return Ledger("store", filesystem=fs.SubTreeFileSystem(str(tmp_path / "base"), fs.LocalFileSystem()))
    return Ledger("bucket/prefix", filesystem=fs._MockFileSystem())


@pytest.mark.parametrize("kind", ["folder", "file URI", "subtree", "mock"])
def test_a_run_is_read_as_it_was_written(kind: str, tmp_path: Path) -> None:
    ledger = open_storage(kind, tmp_path)
    assert ledger.run_ids() == [] and not ledger.exists("tft-1")
    run = ledger.create("tft-1")
    assert ledger.exists("tft-1") and run.events() == []
    events = fill(run, eventful_run())
    assert run.events() == events and run.skipped == []
    fill(ledger.create("a-2"), small_run("a-2"))
    assert ledger.run_ids() == ["a-2", "tft-1"]
    assert run.read_heartbeat() is None
    run.heartbeat(2, batch_size=16, step=7)
    run.heartbeat(2, batch_size=8, step=9)
    beat = run.read_heartbeat()
    assert beat is not None and (beat.execution, beat.live) == (2, {"batch_size": 8, "step": 9})
    assert run.events() == events
    with pytest.raises(UserError, match="tft-1"):
        ledger.create("tft-1")


def test_an_object_store_gets_one_put_and_no_rename(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from pyarrow import fs

    calls: list[str] = []
    inner = fs._MockFileSystem()

    class OnlyPut:
        type_name = "s3"

        def __getattr__(self, name: str) -> Any:
            calls.append(name)
            if name == "open_output_stream":
                inner.create_dir("bucket/runs/r/events", recursive=True)  # in S3 a key needs no folder
            return getattr(inner, name)

    ledger = Ledger("bucket", filesystem=OnlyPut())
    assert isinstance(ledger.files, ArrowFiles)
    run = ledger.run("r")
    run.append(created("r"))
    assert "move" not in calls and calls.count("open_output_stream") == 1
    assert run.events() == [created("r")] and ledger.exists("r")


def test_events_are_ordered_by_time_whatever_the_order_of_writing(tmp_path: Path) -> None:
    run = Ledger(tmp_path).create("tft-1")
    fill(run, list(reversed(eventful_run())))
    times = [event.time_utc for event in run.events()]
    assert times == sorted(times) and len(times) == len(eventful_run())


def test_an_event_written_twice_is_one_event(tmp_path: Path) -> None:
    run = Ledger(tmp_path).create("tft-1")
    events = fill(run, eventful_run())
    fill(run, events)
    # A coordinator that has lost its memory decides again, later and otherwise: the first answer stands.
    for event in events:
        if isinstance(event, ev.DecisionRecorded):
            run.append(replace(event, event_id="", time_utc=at(500), batch_size=1))
    assert run.events() == events
    assert len(list(Path(run.path, "events").iterdir())) > len(events)


def test_torn_foreign_and_left_over_files_are_named_and_skipped(tmp_path: Path) -> None:
    run = Ledger(tmp_path).create("tft-1")
    events = fill(run, eventful_run())
    folder = Path(run.path, "events")
    whole = sorted(folder.iterdir())[3]
    torn = folder / whole.name.replace("-e0001", "-e0009")
    torn.write_bytes(whole.read_bytes()[:-20])
    (folder / "empty.json").write_bytes(b"")
    (folder / "list.json").write_text("[1, 2]")
    (folder / "notes.txt").write_text("bought milk")
    (folder / "folder.json").mkdir()
    (folder / ".x.json.1234.tmp").write_bytes(b"{")
    (folder / "other.json").write_bytes(ev.to_json(created("another")))
    (folder / "loop.json").symlink_to("loop.json")
    assert run.events() == events
    reasons = dict(run.skipped)
    assert set(reasons) == {
        torn.name,
        "empty.json",
        "list.json",
        "notes.txt",
        "folder.json",
        ".x.json.1234.tmp",
        "other.json",
        "loop.json",
    }
    assert "torn" in reasons[torn.name] and "another" in reasons["other.json"]
    assert "not finished" in reasons[".x.json.1234.tmp"]
    run.events()
    assert len(run.skipped) == len(reasons), "skipped speaks of the last reading only"


def _write_many(storage: str, writer: int, count: int) -> None:
    run = Ledger(storage).run("r")
    for step in range(count):
        run.append(ev.CheckpointWritten(run_id="r", execution=1, step=step, epoch=writer, path="p"))


def test_several_processes_append_at_the_same_time_while_one_reads(tmp_path: Path) -> None:
    run = Ledger(tmp_path).create("r")
    writers = [
        multiprocessing.get_context("fork").Process(target=_write_many, args=(str(tmp_path), w, 40))
        for w in range(4)
    ]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        run.events()
        assert all(name.endswith(".tmp") for name, _ in run.skipped), "half an event was visible"
        time.sleep(0.005)
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    found = [(e.epoch, e.step) for e in run.events() if isinstance(e, ev.CheckpointWritten)]
    assert sorted(found) == [(writer, step) for writer in range(4) for step in range(40)]
    for writer in range(4):
        assert [step for w, step in found if w == writer] == list(range(40)), "a process' own order is kept"
    assert run.skipped == []


def test_of_two_that_create_the_same_run_one_succeeds(tmp_path: Path) -> None:
    one, two = Ledger(tmp_path), Ledger(tmp_path)
    two.exists = lambda run_id: False  # type: ignore[method-assign]  # it asked before the other one created
    one.create("r")
    with pytest.raises(UserError, match="--resume r"):
        two.create("r")


@pytest.mark.parametrize("run_id", ["../x", "a/b", "", ".hidden", "a\\b"])
def test_a_run_id_cannot_lead_out_of_the_storage(run_id: str, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    assert not ledger.exists(run_id)
    with pytest.raises(UserError, match="path"):
        ledger.run(run_id)
    with pytest.raises(UserError, match="letters, digits"):
        ledger.create(run_id)


def test_a_storage_that_cannot_be_written_is_named_with_the_cause(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    storage = tmp_path / "file" / "store"
    with pytest.raises(
        UserError, match=r"(?s)--storage .*file/store: not writable: Not a directory.*another folder"
    ):
        Ledger(storage).create("r")
    with pytest.raises(UserError, match="not writable"):
        Ledger(storage).run("r").append(created("r"))
    with pytest.raises(UserError, match="not writable"):
        Ledger("/proc/nothing").create("r")
    with pytest.raises(UserError, match="nosuchscheme"):
        Ledger("nosuchscheme://host/path")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    with pytest.raises(UserError, match="Permission denied"):
        Ledger(tmp_path / "store").create("r")


def test_an_event_becomes_visible_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Ledger(tmp_path).create("r")
    event, rename, seen = created("r"), os.replace, []

    def look_then_rename(source: str, target: str) -> None:
        assert run.events() == [] and not Path(target).exists()
        assert Path(source).read_bytes() == ev.to_json(event)
        seen.append(target)
        rename(source, target)

    monkeypatch.setattr(os, "replace", look_then_rename)
    run.append(event)
    assert len(seen) == 1 and run.events() == [event]


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Ledger(tmp_path).create("r")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="No space left on device"):
        run.append(created("r"))
    assert list(Path(run.path, "events").iterdir()) == []


def test_a_heartbeat_that_cannot_be_read_counts_as_none(tmp_path: Path) -> None:
    run = Ledger(tmp_path).create("r")
    for torn in (b"", b'{"run_id": "r"', b"{}", b'{"run_id":"r","execution":"x","time_utc":"","live":{}}'):
        Path(run.path, "heartbeat.json").write_bytes(torn)
        assert run.read_heartbeat() is None


def test_an_event_of_another_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="another"):
        Ledger(tmp_path).create("r").append(created("another"))


def test_importing_and_using_a_folder_loads_no_heavy_library(tmp_path: Path) -> None:
    code = (
        "import sys; from foxray.ledger import Ledger\n"
        "from foxray.ledger.summary import summarize_all\n"
        "from foxray.ledger import events as ev\n"
        f"ledger = Ledger({str(tmp_path)!r}); run = ledger.create('r')\n"
        "run.append(ev.CheckpointWritten(run_id='r', execution=1, step=1, epoch=1, path='p'))\n"
        "assert len(summarize_all(ledger)) == 1\n"
        "print([m for m in ('torch', 'ray', 'pyarrow', 'numpy', 'prometheus_client') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_append_is_quick(tmp_path: Path) -> None:
    run = Ledger(tmp_path).create("r")
    times = []
    for step in range(50):
        event = ev.CheckpointWritten(run_id="r", execution=1, step=step, epoch=0, path="p")
        start = time.perf_counter()
        run.append(event)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.005

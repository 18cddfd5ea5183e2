"""A ledger on storage: one folder for each run, one small JSON file for each event.

    <storage>/runs/<run id>/events/<time>-e<execution>-<kind>-<event id>.json
    <storage>/runs/<run id>/heartbeat.json
    <storage>/compacted/<time>-<id>.parquet          (see `foxray.ledger.segments`)

Nothing is ever changed or appended to, so any number of writers on any number of machines can write at
the same time without locks, and a crash can leave behind one torn file at worst, which reading names and
passes over. File names sort by time; an event id counts once, however often it was written.

A reader first lists and reads the small files and only then looks at what was compacted: compaction
publishes before it deletes, so a file that vanishes in between is found in its new place.
"""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from foxray.errors import UserError
from foxray.ledger.events import Event, MalformedEvent, dump_json, from_json, load_json, to_json, utc_now
from foxray.ledger.files import TEMPORARY_SUFFIX, open_files
from foxray.ledger.segments import Segments

RUNS = "runs"
_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_MAX_NAME = 128


class Record(NamedTuple):
    """An event as it lies on storage; the order of records is the order of the ledger."""

    time_utc: str
    name: str
    """Of its file."""
    body: bytes
    event: Event


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """The last sign of life of a run."""

    run_id: str
    execution: int
    time_utc: str
    live: dict[str, Any]
    """Whatever the run says of itself just now: batch size, step, memory in use."""


class Ledger:
    """A storage location that holds runs."""

    def __init__(self, storage: str | Path, *, filesystem: Any = None) -> None:
        """`storage`: a folder, or a URI that pyarrow knows; with `filesystem` (pyarrow's) a path in that.

        Nothing is read or written yet. Raises UserError for a URI that cannot be opened.
        """
        self.storage = str(storage)
        self.files = open_files(storage, filesystem)
        self.segments = Segments(self.files)

    def run_ids(self) -> list[str]:
        """All runs, in the order of their names."""
        found = {name for name, is_file in self.files.list(RUNS) if not is_file and not name.startswith(".")}
        return sorted(found | self.segments.run_ids())

    def exists(self, run_id: str) -> bool:
        """Whether there is such a run."""
        if not _is_one_name(run_id):
            return False
        return self.files.has_folder(f"{RUNS}/{run_id}/events") or bool(self.segments.rows(run_id)[0])

    def run(self, run_id: str) -> "RunLedger":
        """The ledger of one run, which need not exist yet. Raises UserError for an id that is a path."""
        if not _is_one_name(run_id):
            raise UserError(f"run id {run_id!r}: not a name but a path; ids are listed by `foxray runs`")
        return RunLedger(self, run_id)

    def create(self, run_id: str) -> "RunLedger":
        """Claim a new run; of two that try at the same time on a file system, one succeeds.

        Raises UserError for a bad id, one that is taken, or a storage that is not writable.
        """
        if not _SAFE.fullmatch(run_id) or len(run_id) > _MAX_NAME:
            raise UserError(
                f"run id {run_id!r}: use letters, digits, '.', '_' and '-', a letter or digit first, "
                f"at most {_MAX_NAME} of them"
            )
        if self.exists(run_id):
            raise self._taken(run_id)
        run = self.run(run_id)
        try:
            self.files.make_folder(f"{RUNS}/{run_id}/events", new=True)
        except FileExistsError as error:
            if error.filename is None or Path(str(error.filename)).is_dir():
                raise self._taken(run_id) from error
            raise self.not_writable(error) from error
        except OSError as error:
            raise self.not_writable(error) from error
        return run

    def not_writable(self, error: OSError) -> UserError:
        """What a user is told when the storage refuses a write."""
        path = f" ({error.filename})" if error.filename else ""
        reason = error.strerror or str(error)
        return UserError(
            f"--storage {self.storage}: not writable: {reason}{path}; "
            "free space or grant write access there, or name another folder or URI"
        )

    def _taken(self, run_id: str) -> UserError:
        return UserError(
            f"run id {run_id}: there is a run of that name in {self.storage}; "
            f"use --resume {run_id} to continue it, or another name"
        )


class RunLedger:
    """The events of one run, and its heartbeat."""

    def __init__(self, ledger: Ledger, run_id: str) -> None:
        self.ledger, self.run_id = ledger, run_id
        self.skipped: list[tuple[str, str]] = []
        """(file name, reason) of what the last reading passed over."""
        self._folder = f"{RUNS}/{run_id}"

    @property
    def path(self) -> str:
        """The run's folder, as a path within its file system."""
        return f"{self.ledger.files.root}/{self._folder}"

    @property
    def uri(self) -> str:
        """The run's folder as a URI."""
        return f"{self.ledger.files.uri}/{self._folder}"

    def append(self, event: Event) -> None:
        """Put an event on record; when this returns, it is there, whole.

        Raises ValueError for another run's event, UserError when the storage is not writable.
        """
        if event.run_id != self.run_id:
            raise ValueError(
                f"an event of run {event.run_id} does not belong into the ledger of {self.run_id}"
            )
        self._write(f"{self._folder}/events/{file_name(event)}", to_json(event), durable=True)

    def events(self) -> list[Event]:
        """All events by time, each once. What could not be read is in `skipped` afterwards."""
        return [record.event for record in self.records()]

    def records(self) -> list[Record]:
        """All events with their bytes, by time, each once. See `events`."""
        self.skipped = []
        small = list(self.small_files())
        rows, skipped = self.ledger.segments.rows(self.run_id)
        self.skipped += skipped
        records = small + [record for row in rows if (record := self.parse(*row)) is not None]
        first: dict[str, Record] = {}
        for record in sorted(records, key=lambda r: r[:2]):
            first.setdefault(record.event.event_id, record)
        return list(first.values())

    def small_files(self) -> Iterator[Record]:
        """The events that are not compacted yet, in no order, doubles included."""
        names = []
        for name, is_file in sorted(self.ledger.files.list(f"{self._folder}/events")):
            if name.startswith(".") and name.endswith(TEMPORARY_SUFFIX):
                self.skipped.append((name, "a write that was not finished"))
            elif not is_file:
                self.skipped.append((name, "a folder"))
            elif not name.endswith(".json"):
                self.skipped.append((name, "not an event's file"))
            else:
                names.append(name)
        bodies = self.ledger.files.read_all(f"{self._folder}/events/{name}" for name in names)
        for name, body in zip(names, bodies, strict=True):
            if isinstance(body, FileNotFoundError):
                continue  # compacted just now
            if isinstance(body, OSError):
                self.skipped.append((name, f"unreadable: {body.strerror or body}"))
            elif (record := self.parse(name, body)) is not None:
                yield record

    def heartbeat(self, execution: int, **live: Any) -> None:
        """Leave a sign of life, in the place of the one before. Raises UserError when not writable."""
        beat = {"run_id": self.run_id, "execution": execution, "time_utc": utc_now(), "live": live}
        self._write(f"{self._folder}/heartbeat.json", dump_json(beat), durable=False)

    def read_heartbeat(self) -> Heartbeat | None:
        """The last sign of life; None when there is none that can be read."""
        try:
            plain = load_json(self.ledger.files.read(f"{self._folder}/heartbeat.json"))
            return Heartbeat(
                run_id=str(plain["run_id"]),
                execution=int(plain["execution"]),
                time_utc=str(plain["time_utc"]),
                live=dict(plain["live"]),
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def parse(self, name: str, body: bytes) -> Record | None:
        """The record of a file's bytes; None, with the reason in `skipped`, where it is none of this run."""
        try:
            event = from_json(body)
        except MalformedEvent as error:
            self.skipped.append((name, str(error)))
            return None
        if event.run_id != self.run_id:
            self.skipped.append((name, f"belongs to run {event.run_id}"))
            return None
        return Record(event.time_utc, name, body, event)

    def _write(self, path: str, data: bytes, *, durable: bool) -> None:
        files = self.ledger.files
        try:
            try:
                files.write(path, data, durable=durable)
            except FileNotFoundError:  # the first write, or a folder that somebody tidied away
                files.make_folder(path.rpartition("/")[0])
                files.write(path, data, durable=durable)
        except OSError as error:
            raise self.ledger.not_writable(error) from error


def file_name(event: Event) -> str:
    """A name that sorts by time, tells a person what it holds, and is legal everywhere."""
    stamp = event.time_utc.replace("-", "").replace(":", "")
    event_id = event.event_id
    if not _SAFE.fullmatch(event_id) or len(event_id) > _MAX_NAME:
        event_id = hashlib.sha256(event_id.encode("utf-8", "backslashreplace")).hexdigest()
    kind = "" if event_id.startswith(event.kind) else f"{event.kind}-"
    return f"{stamp}-e{event.execution:04d}-{kind}{event_id}.json"


def _is_one_name(run_id: str) -> bool:
    return bool(run_id) and not run_id.startswith(".") and not set("/\\\0") & set(run_id)

"""Compaction: the many small files of finished runs become few Parquet files.

Every step leaves the ledger readable as the same events: a segment is published whole before a file that
it replaces is deleted, and an event that is found twice counts once. So a compaction may be killed at any
moment and simply be run again, also beside running writers, readers and other compactions. Files that
could not be read stay where they are.
"""

from datetime import UTC, datetime

from foxray.ledger.events import Event, ExecutionEnded, parse_utc
from foxray.ledger.segments import FOLDER, publish
from foxray.ledger.store import RUNS, Ledger, Record, RunLedger

SILENT_SECONDS = 86_400.0
SEGMENT_BODY_BYTES = 128 << 20
MERGE_BELOW_BYTES = 4 << 20


def compact(
    ledger: Ledger,
    *,
    silent_seconds: float = SILENT_SECONDS,
    now: datetime | None = None,
    segment_body_bytes: int = SEGMENT_BODY_BYTES,
) -> int:
    """Fold the events of finished runs into Parquet; the number of files that were folded.

    Finished is a run whose last execution has ended, or that gave no sign of life for `silent_seconds`.
    Small segments of earlier compactions are folded in as well, so that their number stays small.
    `segment_body_bytes` bounds the memory that is used. Raises UserError when the storage is not writable.
    """
    now = now or datetime.now(UTC)
    batch = _Batch(ledger, segment_body_bytes)
    for run_id in ledger.run_ids():
        run = ledger.run(run_id)
        run.skipped = []
        small = sorted(run.small_files(), key=lambda r: r[:2])
        if small and _finished(run, [record.event for record in small], now, silent_seconds):
            batch.add(small, [f"{RUNS}/{run_id}/events/{record.name}" for record in small])
    folded = batch.files + len(batch.obsolete)
    if batch.records:
        batch.take_small_segments()
    batch.flush()
    return folded


class _Batch:
    """Events on their way into the next segment, and the files that it makes superfluous."""

    def __init__(self, ledger: Ledger, segment_body_bytes: int) -> None:
        self.records: list[Record] = []
        self.obsolete: list[str] = []
        self.files = 0
        self._ledger, self._limit, self._bytes = ledger, segment_body_bytes, 0
        self._earlier = ledger.segments.names()

    def add(self, records: list[Record], paths: list[str]) -> None:
        self.records += records
        self.obsolete += paths
        self._bytes += sum(len(record.body) for record in records)
        if self._bytes >= self._limit:
            self.files += len(self.obsolete)
            self.flush()

    def take_small_segments(self) -> None:
        """Move the rows of small earlier segments into this one."""
        segments = self._ledger.segments
        for name in self._earlier:
            try:
                if segments.size_bytes(name) >= MERGE_BELOW_BYTES:
                    continue
                rows = list(segments.read(name))
            except (OSError, ValueError):  # gone, or foreign: reading names it
                continue
            records = [self._ledger.run(run_id).parse(*row) for run_id, row in rows]
            if all(record is not None for record in records):
                self.records += [record for record in records if record is not None]
                self.obsolete.append(f"{FOLDER}/{name}")

    def flush(self) -> None:
        """Publish first, delete after."""
        if not self.records:
            return
        files = self._ledger.files
        try:
            publish(files, _without_doubles(self.records))
            for path in self.obsolete:
                files.delete(path)
        except OSError as error:
            raise self._ledger.not_writable(error) from error
        self.records, self.obsolete, self._bytes = [], [], 0


def _without_doubles(records: list[Record]) -> list[Record]:
    first: dict[tuple[str, str], Record] = {}
    for record in sorted(records, key=lambda r: r[:2]):
        first.setdefault((record.event.run_id, record.event.event_id), record)
    return list(first.values())


def _finished(run: RunLedger, events: list[Event], now: datetime, silent_seconds: float) -> bool:
    last = max(event.execution for event in events)
    if any(isinstance(event, ExecutionEnded) and event.execution == last for event in events):
        return True
    beat = run.read_heartbeat()
    signs = [events[-1].time_utc] + ([beat.time_utc] if beat is not None else [])
    return (now - max(map(parse_utc, signs))).total_seconds() > silent_seconds

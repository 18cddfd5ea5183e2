"""Compacted events: Parquet files that hold the events of many runs.

Columns: `run_id`, `execution`, `kind`, `event_id`, `time_utc` for queries from elsewhere, and `name` and
`body`, the file that the event was, unchanged. Rows are sorted by run, so that the statistics of the row
groups lead straight to a run's rows. A segment is never changed; it may vanish when its rows have been
published in another one. pyarrow is imported only when there is a segment.
"""

import io
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from foxray.ledger.events import utc_now
from foxray.ledger.files import Files

if TYPE_CHECKING:
    from foxray.ledger.store import Record

FOLDER = "compacted"
ROW_GROUP_ROWS = 8192
_RELIST_TRIES = 5

Row = tuple[str, bytes]
"""(file name, body) of an event."""
Skipped = tuple[str, str]
"""(file name, reason)."""
_T = TypeVar("_T")


class Segments:
    """The compacted part of a ledger, for reading; what was opened stays open. Safe from any thread."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._open: dict[str, _Segment] = {}
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        """File names of the segments that are there now."""
        return sorted(
            name for name, is_file in self._files.list(FOLDER) if is_file and name.endswith(".parquet")
        )

    def rows(self, run_id: str) -> tuple[list[Row], list[Skipped]]:
        """A run's events, doubles included, and the segments that could not be read."""
        return self._each(lambda segment: segment.rows(run_id))

    def run_ids(self) -> set[str]:
        """Runs that have compacted events."""
        found, _ = self._each(lambda segment: segment.run_ids())
        return set(found)

    def read(self, name: str) -> Iterator[tuple[str, Row]]:
        """(run id, row) of everything in one segment, by run. Raises OSError."""
        segment = _Segment(self._files.open(f"{FOLDER}/{name}"))
        for group in range(segment.groups):
            for run_id, rows in segment.group(group).items():
                for row in rows:
                    yield run_id, row

    def size_bytes(self, name: str) -> int:
        """Size of one segment's file. Raises OSError."""
        return int(self._files.open(f"{FOLDER}/{name}").size())

    def _each(self, ask: Callable[["_Segment"], Iterable[_T]]) -> tuple[list[_T], list[Skipped]]:
        """The answers of all segments; asked again from the start when one vanishes meanwhile."""
        with self._lock:
            for _ in range(_RELIST_TRIES):
                names = self.names()
                self._open = {name: self._open[name] for name in names if name in self._open}
                answers: list[_T] = []
                skipped: list[Skipped] = []
                try:
                    for name in names:
                        try:
                            answers += ask(self._segment(name))
                        except FileNotFoundError:
                            raise
                        except (OSError, ValueError, KeyError) as error:
                            skipped.append((f"{FOLDER}/{name}", f"not a readable segment: {error}"))
                except FileNotFoundError:
                    continue
                return answers, skipped
            raise TimeoutError(f"{self._files.uri}/{FOLDER}: segments kept vanishing while they were read")

    def _segment(self, name: str) -> "_Segment":
        if name not in self._open:
            self._open[name] = _Segment(self._files.open(f"{FOLDER}/{name}"))
        return self._open[name]


class _Segment:
    """One open Parquet file; remembers the row group read last, since runs are mostly read in order."""

    def __init__(self, source: Any) -> None:
        import pyarrow.parquet as pq

        self._file = pq.ParquetFile(source)
        self.groups: int = self._file.num_row_groups
        column = self._file.schema_arrow.names.index("run_id")
        self._ranges = [self._range(group, column) for group in range(self.groups)]
        self._last: tuple[int, dict[str, list[Row]]] = (-1, {})

    def rows(self, run_id: str) -> list[Row]:
        return [
            row
            for group, (low, high) in enumerate(self._ranges)
            if low <= run_id <= high
            for row in self.group(group).get(run_id, [])
        ]

    def run_ids(self) -> list[str]:
        column = self._file.read(columns=["run_id"]).column("run_id")
        return [str(run_id) for run_id in column.unique().to_pylist()]

    def group(self, group: int) -> dict[str, list[Row]]:
        if self._last[0] != group:
            table = self._file.read_row_group(group, columns=["run_id", "name", "body"])
            by_run: dict[str, list[Row]] = {}
            columns = (table.column(name).to_pylist() for name in ("run_id", "name", "body"))
            for run_id, name, body in zip(*columns, strict=True):
                by_run.setdefault(run_id, []).append((name, body))
            self._last = (group, by_run)
        return self._last[1]

    def _range(self, group: int, column: int) -> tuple[str, str]:
        statistics = self._file.metadata.row_group(group).column(column).statistics
        if statistics is None or not statistics.has_min_max:  # of an odd writer: never ruled out
            return "", "\U0010ffff"
        return str(statistics.min), str(statistics.max)


def publish(files: Files, records: "list[Record]") -> str:
    """Make a segment of these events visible, whole and for good; its name. Raises OSError."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    ordered = sorted(records, key=lambda r: (r.event.run_id, r.time_utc, r.name))
    table = pa.table(
        {
            "run_id": pa.array([r.event.run_id for r in ordered], pa.string()),
            "execution": pa.array([r.event.execution for r in ordered], pa.int32()),
            "kind": pa.array([_kind(r) for r in ordered], pa.string()),
            "event_id": pa.array([r.event.event_id for r in ordered], pa.string()),
            "time_utc": pa.array([r.time_utc for r in ordered], pa.string()),
            "name": pa.array([r.name for r in ordered], pa.string()),
            "body": pa.array([r.body for r in ordered], pa.binary()),
        }
    )
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd", row_group_size=ROW_GROUP_ROWS)
    stamp = utc_now().replace("-", "").replace(":", "")
    name = f"{stamp}-{uuid.uuid4().hex[:8]}.parquet"
    files.make_folder(FOLDER)
    files.write(f"{FOLDER}/{name}", sink.getvalue())
    files.settle(FOLDER)
    return name


def _kind(record: "Record") -> str:
    return getattr(record.event, "unknown_kind", record.event.kind)

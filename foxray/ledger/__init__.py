"""The append-only record of runs: every number that foxray shows anywhere is computed from it.

`Ledger` writes and reads events, `summarize` folds a run's events into what people and metrics ask for,
`compact` folds finished runs into Parquet. Needs the standard library only, and pyarrow where there is an
object store or something compacted.
"""

from foxray.ledger.compact import compact
from foxray.ledger.events import Event, MalformedEvent, UnknownEvent, from_json, to_json
from foxray.ledger.store import Heartbeat, Ledger, RunLedger
from foxray.ledger.summary import ExecutionSummary, RunSummary, success_rate, summarize

__all__ = [
    "Event",
    "ExecutionSummary",
    "Heartbeat",
    "Ledger",
    "MalformedEvent",
    "RunLedger",
    "RunSummary",
    "UnknownEvent",
    "compact",
    "from_json",
    "success_rate",
    "summarize",
    "to_json",
]

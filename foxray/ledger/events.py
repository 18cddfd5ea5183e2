"""The events that a ledger consists of, and their JSON form.

One frozen dataclass for each kind, all with the same envelope: whose event it is, which of the run's
executions, an id of its own, when. Units stand in the names: times are UTC (ISO 8601, microseconds, `Z`),
durations seconds, sizes bytes. The JSON form is read leniently, since ledgers outlive versions: kinds and
fields of a newer writer are kept or passed over; what lacks a required field is no event of ours.

An id makes an event one event, however often it is written. Where the event itself says what it is about
(the answer to an incident, the end of an execution) the id follows from that, so that a coordinator that
lost its memory can say it again and nothing counts twice.
"""

import json
import math
import threading
import types
import typing
import uuid
from dataclasses import MISSING, dataclass, field, fields
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

SCHEMA_VERSION = 1
OUTCOMES = ("success", "oom", "failed", "cancelled")
GIVE_UP = "give_up"

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FLOAT_TAG = "$float"


class MalformedEvent(ValueError):
    """The bytes are no event: torn by a crash, or written by something else. The message says why."""


class _Clock:
    """UTC in microseconds that never goes back and never stands still within a process.

    Events of one process so keep their order in the ledger, also when the wall clock is set back.
    """

    def __init__(self) -> None:
        self._last = 0
        self._lock = threading.Lock()

    def __call__(self) -> str:
        now = (datetime.now(UTC) - _EPOCH) // timedelta(microseconds=1)
        with self._lock:
            self._last = max(now, self._last + 1)
            now = self._last
        return format_utc(_EPOCH + timedelta(microseconds=now))


def format_utc(moment: datetime) -> str:
    """`2026-01-31T09:05:00.000000Z` for an aware datetime."""
    return moment.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def parse_utc(text: str) -> datetime:
    """The aware datetime of `format_utc`'s text. Raises ValueError."""
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError(f"time without a zone: {text!r}")
    return moment


utc_now = _Clock()


@dataclass(frozen=True, kw_only=True)
class Event:
    """What all events have. Raises ValueError for an envelope that the ledger could not sort or file."""

    kind: ClassVar[str] = ""
    identity: ClassVar[str | None] = None
    """The field which, with kind and execution, identifies the event; "" when those two suffice."""

    run_id: str
    execution: int
    """Count of the run's launches and resumes, from 1; 0 for what precedes them."""
    event_id: str = ""
    """Unique within the run; made when left empty."""
    time_utc: str = field(default_factory=utc_now)
    schema: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        if not self.run_id:
            raise ValueError("run_id is empty")
        if self.execution < 0:
            raise ValueError(f"execution {self.execution}: below 0")
        if len(self.time_utc) != 27 or self.time_utc[-1] != "Z":  # texts must sort like times
            raise ValueError(f"time_utc {self.time_utc!r}: not like 2026-01-31T09:05:00.000000Z")
        parse_utc(self.time_utc)
        if not self.event_id:
            object.__setattr__(self, "event_id", self._new_id())

    def _new_id(self) -> str:
        if self.identity is None:
            return uuid.uuid4().hex
        about = getattr(self, self.identity) if self.identity else ""
        return "-".join(filter(None, [self.kind, f"e{self.execution}", about]))


@dataclass(frozen=True, kw_only=True)
class RunCreated(Event):
    """A run was accepted: its model, configuration and data."""

    kind: ClassVar[str] = "run_created"
    identity: ClassVar[str | None] = ""

    model: str
    config: dict[str, Any]
    foxray_version: str
    dataset: dict[str, Any] | None = None
    """What is known of the data: rows, duration_days, file."""


@dataclass(frozen=True, kw_only=True)
class ExecutionStarted(Event):
    """A launch or a resume began; by which process."""

    kind: ClassVar[str] = "execution_started"

    workers: int
    device: str
    """"cpu" or "cuda"."""
    gpu: str
    """The emulated card, "cpu", or "cuda": which card it is stands in `worker_started`."""
    host: str
    pid: int
    resumed: bool


@dataclass(frozen=True, kw_only=True)
class WorkerStarted(Event):
    """A rank is up, on this node and GPU."""

    kind: ClassVar[str] = "worker_started"

    rank: int
    node: str
    gpu: str
    gpu_uuid: str | None = None
    pid: int


@dataclass(frozen=True, kw_only=True)
class AttemptStarted(Event):
    """A rank begins, or takes up again, a phase at a batch size."""

    kind: ClassVar[str] = "attempt_started"

    phase: str
    rank: int
    batch_size: int
    accumulation_steps: int
    step: int
    """Optimizer steps committed before."""


@dataclass(frozen=True, kw_only=True)
class IncidentRecorded(Event):
    """Memory ran out: what, where, and how much was asked for."""

    kind: ClassVar[str] = "incident_recorded"
    identity: ClassVar[str | None] = "incident_id"

    incident_id: str
    phase: str
    rank: int
    node: str | None = None
    gpu: str | None = None
    batch_size: int
    """Of the attempt that failed; the piece itself can have been shorter (the last one of a share)."""
    incident_kind: str
    """"device", "host" or "shm"."""
    exception_type: str
    message: str
    bytes_requested: int | None = None
    bytes_free: int | None = None
    bytes_total: int | None = None
    fresh_reason: str | None = None
    """Why only fresh workers can go on; None: a retry in place can."""
    step: int


@dataclass(frozen=True, kw_only=True)
class DecisionRecorded(Event):
    """The answer to an incident. Each that does not give up is one granted retry."""

    kind: ClassVar[str] = "decision_recorded"
    identity: ClassVar[str | None] = "incident_id"

    incident_id: str
    action: str
    """"give_up", or how the retry is made."""
    phase: str
    rank: int
    batch_size: int
    """The size of the retry."""
    previous_batch_size: int
    retries: int
    """Retries of this phase and rank so far, this one included."""
    rung: str | None = None
    """The rung of `on_exhausted` that the retry is made on."""
    reason: str

    @property
    def granted(self) -> bool:
        """Whether a retry follows."""
        return self.action != GIVE_UP


@dataclass(frozen=True, kw_only=True)
class RecoveryMeasured(Event):
    """How long it took from the raise until the retry began."""

    kind: ClassVar[str] = "recovery_measured"
    identity: ClassVar[str | None] = "incident_id"

    incident_id: str
    phase: str
    rank: int
    recovery_seconds: float


@dataclass(frozen=True, kw_only=True)
class WorkersLost(Event):
    """Workers or nodes went away, and it was not a memory failure."""

    kind: ClassVar[str] = "workers_lost"

    ranks: list[int]
    reason: str
    restart: bool
    """Whether the driver's budget for lost workers allows to go on."""


@dataclass(frozen=True, kw_only=True)
class PhaseEnded(Event):
    """A phase is done on all ranks. Keys of the dictionaries are ranks."""

    kind: ClassVar[str] = "phase_ended"

    phase: str
    batch_sizes: dict[str, int]
    oom_retries: int
    duration_seconds: float
    rows: int
    """Samples processed, over all ranks."""
    peak_bytes: dict[str, int] = field(default_factory=dict)
    """Highest device memory in use; ranks whose device does not tell are missing."""


@dataclass(frozen=True, kw_only=True)
class EpochEnded(Event):
    """An epoch is done, validation included."""

    kind: ClassVar[str] = "epoch_ended"

    epoch: int
    step: int
    training_loss: float | None = None
    validation_loss: float | None = None
    naive_loss: float | None = None
    """The naive forecast's loss on the same held-out samples."""
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CheckpointWritten(Event):
    """A committed state is on storage."""

    kind: ClassVar[str] = "checkpoint_written"

    step: int
    epoch: int
    path: str


@dataclass(frozen=True, kw_only=True)
class ExecutionEnded(Event):
    """The one outcome of an execution; an execution without it is running, or lost."""

    kind: ClassVar[str] = "execution_ended"
    identity: ClassVar[str | None] = ""

    outcome: str
    """One of `OUTCOMES`."""
    final_batch_size: int | None = None
    """The smallest of the ranks'."""
    oom_retries: int
    """Granted in this execution."""
    duration_seconds: float
    message: str

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.outcome not in OUTCOMES:
            raise ValueError(f"outcome {self.outcome!r}: not one of {', '.join(OUTCOMES)}")


@dataclass(frozen=True, kw_only=True)
class UnknownEvent(Event):
    """An event of a kind that this version does not know; its envelope, and everything it says."""

    unknown_kind: str
    fields: dict[str, Any]
    """The whole JSON object."""


KINDS: dict[str, type[Event]] = {
    kind.kind: kind
    for kind in (
        RunCreated,
        ExecutionStarted,
        WorkerStarted,
        AttemptStarted,
        IncidentRecorded,
        DecisionRecorded,
        RecoveryMeasured,
        WorkersLost,
        PhaseEnded,
        EpochEnded,
        CheckpointWritten,
        ExecutionEnded,
    )
}


# -- JSON ------------------------------------------------------------------------------------------


def to_json(event: Event) -> bytes:
    """The event as one line of standard JSON (NaN and infinities, which JSON lacks, are tagged)."""
    if isinstance(event, UnknownEvent):
        return dump_json(event.fields)
    return dump_json({"kind": event.kind} | {f.name: getattr(event, f.name) for f in fields(event)})


def from_json(data: bytes) -> Event:
    """The event of `to_json`'s bytes; an `UnknownEvent` for a kind of a newer version.

    Fields that this version does not know are passed over. Raises MalformedEvent for anything else.
    """
    plain = load_json(data)
    kind = plain.get("kind")
    if not isinstance(kind, str) or not kind:
        raise MalformedEvent("no event: it has no kind")
    known = KINDS.get(kind, UnknownEvent)
    source = plain
    if known is UnknownEvent:
        source = plain | {"unknown_kind": kind, "fields": plain}
    values: dict[str, Any] = {}
    for name, allowed, required in _LAYOUTS[known]:
        if name in source:
            value = source[name]
            if type(value) not in allowed:
                raise MalformedEvent(f"{kind}: {name} is {value!r}"[:200])
            values[name] = value
        elif required:
            raise MalformedEvent(f"{kind}: {name} is missing")
    try:
        return known(**values)
    except ValueError as error:
        raise MalformedEvent(f"{kind}: {error}") from error


def dump_json(plain: dict[str, Any]) -> bytes:
    """Standard JSON for what `load_json` gives back. Raises TypeError for what is not plain data."""
    try:
        text = json.dumps(plain, default=_plain, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    except ValueError:  # there are NaN or infinities in it, which is rare
        text = json.dumps(_tag_floats(plain), default=_plain, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


def load_json(data: bytes) -> dict[str, Any]:
    """The JSON object of `dump_json`'s bytes. Raises MalformedEvent."""
    hook = _untag_float if _FLOAT_TAG.encode() in data else None
    try:
        plain = json.loads(data, object_hook=hook)
    except (ValueError, RecursionError) as error:
        raise MalformedEvent(f"torn or no JSON ({len(data)} bytes): {error}") from error
    if not isinstance(plain, dict):
        raise MalformedEvent(f"no JSON object but {type(plain).__name__}")
    return plain


def _layout(kind: type[Event]) -> list[tuple[str, frozenset[type], bool]]:
    """Name, types allowed in JSON, and whether it must be there, of each field.

    Id, time and schema are required although the class has defaults: at reading, these would be made up.
    """
    hints = typing.get_type_hints(kind)
    optional = {f.name for f in fields(kind) if not _required(f)} - {"event_id", "time_utc", "schema"}
    return [(f.name, _json_types(hints[f.name]), f.name not in optional) for f in fields(kind)]


def _required(f: Any) -> bool:
    return f.default is MISSING and f.default_factory is MISSING


def _json_types(hint: Any) -> frozenset[type]:
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        return frozenset().union(*(_json_types(part) for part in typing.get_args(hint)))
    if hint is float:
        return frozenset({float, int})
    return frozenset({origin or hint})


def _plain(value: Any) -> Any:
    if hasattr(value, "item"):  # a scalar of numpy or torch
        return value.item()
    if hasattr(value, "__fspath__"):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no place in the ledger: {value!r}")


def _tag_floats(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tag_floats(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_tag_floats(item) for item in value]
    if not isinstance(value, str | int | bool | float | type(None)):
        value = _plain(value)
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT_TAG: repr(value)}
    return value


def _untag_float(plain: dict[str, Any]) -> Any:
    tagged = plain.get(_FLOAT_TAG)
    return float(tagged) if len(plain) == 1 and tagged in ("nan", "inf", "-inf") else plain


_LAYOUTS = {kind: _layout(kind) for kind in (*KINDS.values(), UnknownEvent)}

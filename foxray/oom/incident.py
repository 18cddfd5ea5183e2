"""What is known about one memory failure.

An incident is made on the worker, where the exception still has its type and its causes, and then
travels: to the driver by pickling, into the ledger by `dataclasses.asdict`. So it holds plain values only.
"""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["device", "host", "shm"]
"""Which memory ran out: the accelerator's, the machine's, or the shared-memory file system's."""


@dataclass(frozen=True, kw_only=True)
class Incident:
    """One classified memory failure."""

    kind: Kind
    exception_type: str
    """Qualified name, `torch.OutOfMemoryError`; builtins without their module."""
    message: str
    """The original text; if it had to be shortened, it ends by saying by how much."""
    phase: str | None = None
    """`calibration`, `training`, `validation`, `rollout` or `update`."""
    rank: int | None = None
    node: str | None = None
    gpu: str | None = None
    batch_size: int | None = None
    """The size of the attempt that failed."""
    bytes_requested: int | None = None
    """What the failed allocation asked for, where the text tells."""
    bytes_free: int | None = None
    bytes_total: int | None = None
    fresh_reason: str | None = None
    """Why the processes cannot go on ("process killed", "CUDA context lost: ...", "broken collective: ...",
    "memory not back at baseline: ..."). None: a retry in place is possible."""

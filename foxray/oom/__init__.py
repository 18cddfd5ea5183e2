"""Running out of memory: what it is, what to do about it, how to say it. Pure functions.

Nothing here imports torch or Ray (their types are known by name), keeps state, or touches a device.
"""

from foxray.oom import texts
from foxray.oom.classify import (
    broken_collective,
    classify,
    context_lost,
    impossible_request,
    low_memory_bytes,
)
from foxray.oom.incident import Incident
from foxray.oom.policy import RUNGS, Attempt, Decision, OomPolicy, next_batch_size

__all__ = [
    "RUNGS",
    "Attempt",
    "Decision",
    "Incident",
    "OomPolicy",
    "broken_collective",
    "classify",
    "context_lost",
    "impossible_request",
    "low_memory_bytes",
    "next_batch_size",
    "texts",
]

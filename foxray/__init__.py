"""foxray: Ray-based distributed training in which running out of memory is an ordinary, recorded,
recovered event.

The names below are loaded when they are first used, so that `import foxray` costs next to nothing: it
imports neither torch nor ray.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from foxray.driver.trainer import TorchTrainer
    from foxray.errors import FoxrayError, MemoryExhausted, UserError
    from foxray.memory.budget import memory_budget
    from foxray.oom import Decision, Incident, OomPolicy, classify
    from foxray.training.recover import recover

_HOMES = {
    "TorchTrainer": "foxray.driver.trainer",
    "OomPolicy": "foxray.oom",
    "Decision": "foxray.oom",
    "Incident": "foxray.oom",
    "classify": "foxray.oom",
    "memory_budget": "foxray.memory.budget",
    "recover": "foxray.training.recover",
    "FoxrayError": "foxray.errors",
    "MemoryExhausted": "foxray.errors",
    "UserError": "foxray.errors",
}

__all__ = [
    "Decision",
    "FoxrayError",
    "Incident",
    "MemoryExhausted",
    "OomPolicy",
    "TorchTrainer",
    "UserError",
    "__version__",
    "classify",
    "memory_budget",
    "recover",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'foxray' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__

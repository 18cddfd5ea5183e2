"""Committed states on storage, each whole or not there.

A checkpoint is two files: `step-00000120-e001.pt` holds the tensors, and a small JSON manifest beside it,
written last, holds the size and digest of the first. Without a manifest that matches there is no
checkpoint, so a torn write, a full disk or a kill in the middle leaves the one before in force, on a file
system as well as on an object store that knows no rename. Files are read with `weights_only=True`: no
pickled code is ever run. The last two are kept.
"""

import hashlib
import io
import json
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from foxray.ledger.files import open_files
from foxray.memory.budget import host_memory

KEEP = 2


@dataclass
class CommittedState:
    """Where a run stands after an optimizer step that all ranks finished, beside the tensors."""

    step: int = 0
    """Optimizer steps done."""
    epoch: int = 0
    """Epochs finished."""
    cursor: int = 0
    """Samples of the current epoch's order that are part of committed updates."""
    effective_batch: int = 0
    """Samples per optimizer step; 0 before the first start."""
    loss_sum: float = 0.0
    """Sum of the losses of the current epoch's committed samples."""
    loss_samples: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the last finished epoch."""
    calibrated_batch: int = 0
    """Smallest batch size with which the calibration of a quantized model ended; 0 before, or without one."""
    validation_losses: list[float] = field(default_factory=list)
    """Of every finished epoch; early stopping looks at them."""


@dataclass(frozen=True, kw_only=True)
class Restored:
    """One checkpoint, read back; tensors are on the CPU."""

    state: CommittedState
    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    spec: dict[str, Any]
    """How to build the model and its inputs, as the workload described it."""


class Checkpoints:
    """The checkpoints of one run, under a folder that may be a path or any `pyarrow.fs` URI."""

    def __init__(self, folder: str, *, spec: dict[str, Any] | None = None) -> None:
        self._files = open_files(folder)
        self._spec = spec or {}
        self.skipped: list[str] = []
        """Checkpoints that `load_latest` passed over, with the reason."""

    def save(self, state: CommittedState, model: dict[str, Tensor], optimizer: dict[str, Any]) -> str:
        """Write a committed state; its path. An OSError leaves the earlier checkpoints as they were."""
        buffer = io.BytesIO()
        with host_memory():
            torch.save(
                {"state": asdict(state), "model": model, "optimizer": optimizer, "spec": self._spec}, buffer
            )
        content = buffer.getvalue()
        name = f"step-{state.step:08d}-e{state.epoch:04d}"
        manifest = {"file": f"{name}.pt", "size_bytes": len(content), "blake2b": _digest(content)}
        self._files.make_folder("")
        self._files.write(f"{name}.pt", content)
        self._files.write(f"{name}.json", json.dumps(manifest | asdict(state)).encode())
        self._prune()
        return f"{self._files.root}/{name}.pt"

    def load_latest(self) -> Restored | None:
        """The newest checkpoint that is whole, or None. Torn ones are passed over."""
        for manifest_name in reversed(self._manifests()):
            content = self._read_whole(manifest_name)
            if content is None:
                continue
            with host_memory():
                saved = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
            return Restored(
                state=CommittedState(**saved["state"]),
                model=saved["model"],
                optimizer=saved["optimizer"],
                spec=saved["spec"],
            )
        return None

    def _read_whole(self, manifest_name: str) -> bytes | None:
        try:
            manifest = json.loads(self._files.read(manifest_name))
            content = self._files.read(manifest["file"])
            whole = len(content) == manifest["size_bytes"] and _digest(content) == manifest["blake2b"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            self.skipped.append(f"{manifest_name}: {type(error).__name__}: {error}")
            return None
        if not whole:
            self.skipped.append(f"{manifest_name}: the state file is torn ({len(content)} bytes)")
            return None
        return content

    def _manifests(self) -> list[str]:
        return sorted(name for name, is_file in self._files.list("") if is_file and name.endswith(".json"))

    def _prune(self) -> None:
        kept = self._manifests()[-KEEP:]
        # Manifests go first: a state file without one is no checkpoint. Such files, left behind by a kill
        # or a full disk, go too; one that is newer than a kept checkpoint may be just being written.
        for suffix in (".json", ".pt"):
            for name, is_file in self._files.list(""):
                if is_file and name.endswith(suffix) and name < kept[0].removesuffix(".json"):
                    self._files.delete(name)


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()

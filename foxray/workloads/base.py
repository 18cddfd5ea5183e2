"""What the training loop has to know of a model family, and nothing about retries.

A workload owns its data on the device and knows how to turn positions in the training or validation set
into a loss. Its methods are all or nothing towards the model: they may raise out-of-memory at any point
and be called again.
"""

from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Workload(Protocol):
    """One model family bound to its data."""

    name: str
    """As in `--model`."""
    num_train: int
    """Samples of an epoch."""
    num_valid: int
    """Samples of the held-out part."""
    validation_sums: tuple[str, ...]
    """Names of what `evaluate` returns; divided by `num_valid` they are the metrics of an epoch."""

    def build_model(self) -> nn.Module:
        """A new model on the CPU; the same one for the same torch seed."""

    def place(self, device: torch.device) -> None:
        """Bring the data to where batches are made."""

    def loss_sum(self, model: nn.Module, positions_B: Tensor) -> Tensor:
        """Scalar sum of the losses of these training samples (int64 positions), with its graph."""

    def evaluate(self, model: nn.Module, positions_B: Tensor) -> Tensor:
        """Float64 sums over these validation samples, in the order of `validation_sums`."""

    def use_gradient_checkpointing(self, model: nn.Module) -> None:
        """Recompute activations in the backward pass from now on, to need less memory."""

    def spec(self) -> dict[str, Any]:
        """JSON-able description from which `foxray predict` can rebuild the model and its inputs."""

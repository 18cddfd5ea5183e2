"""The validation phase: metrics over the held-out samples, each rank its share, in its own batch size.

Of a model under quantization both outputs are judged, the quantized and the float one, on the same samples.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from foxray.errors import MemoryExhausted
from foxray.memory.budget import host_memory
from foxray.models.quantization import Quantization
from foxray.training.authority import Rescheduled, known_to_all, other_rank_stopped
from foxray.training.recovery import Recovery
from foxray.training.sampler import rank_share
from foxray.workloads.base import Workload

LOSS, FLOAT_LOSS = "validation_loss", "float_validation_loss"


class Validation:
    """One rank's part in a validation; called once an epoch, together with all ranks."""

    def __init__(
        self,
        *,
        workload: Workload,
        recovery: Recovery,
        quantization: Quantization | None,
        device: torch.device,
        rank: int,
        world_size: int,
    ) -> None:
        self.recovery = recovery
        self._workload, self._quantization = workload, quantization
        self._rank, self._world_size = rank, world_size
        self._names = (*workload.validation_sums, *([FLOAT_LOSS] if quantization is not None else []))
        # Sums of the metrics, and a flag of a rank that cannot go on.
        self._totals = torch.zeros(len(self._names) + 1, dtype=torch.float64, device=device)

    @property
    def share(self) -> Tensor:
        """The held-out positions that this rank evaluates, int64."""
        with host_memory():
            everything = torch.arange(self._workload.num_valid)
        return rank_share(everything, rank=self._rank, world_size=self._world_size)

    def __call__(self, model: nn.Module, *, on_piece: Callable[[], None]) -> dict[str, float]:
        """Mean of each metric over all held-out samples; `on_piece` is called after each micro-batch.

        Raises MemoryExhausted or Rescheduled.
        """
        positions, recovery = self.share, self.recovery
        recovery.take_baseline()
        self._totals.zero_()

        def evaluate(first: int, end: int) -> None:
            with torch.no_grad():
                self._add(model, positions[first:end])
            on_piece()

        trouble: Exception | None = None
        try:
            recovery.run(len(positions), evaluate)
        except (MemoryExhausted, Rescheduled) as error:
            if self._world_size == 1 or recovery.context_lost:
                raise
            trouble = error  # told to the others first: they wait for the sum
            self._totals[-1].fill_(1.0)
        if self._world_size > 1:
            dist.all_reduce(self._totals)
        *totals, abandoned = self._totals.tolist()
        if abandoned > 0:
            raise known_to_all(trouble) if trouble else other_rank_stopped()
        return {
            name: total / self._workload.num_valid for name, total in zip(self._names, totals, strict=True)
        }

    def _add(self, model: nn.Module, positions_B: Tensor) -> None:
        """All or nothing: what may run out of memory comes first."""
        found = self._workload.evaluate(model, positions_B)
        if self._quantization is not None:
            with self._quantization.disabled():
                plain = self._workload.evaluate(model, positions_B)
            self._totals[len(found)].add_(plain[self._workload.validation_sums.index(LOSS)])
        self._totals[: len(found)].add_(found)

"""The calibration phase of quantization-aware training: what lies between an input's minimum and maximum.

The samples are those of the first effective batches of the training order, forward only, with observers
on. An effective batch moves the observers' average once, by the minimum and maximum over the micro-batches
of all ranks, so neither a batch that was halved nor the number of workers changes the ranges that come out.
A micro-batch that ran out of memory leaves nothing behind, and a calibration that was cut off starts anew:
it is short, and its ranges are only worth keeping whole.
"""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from foxray.errors import MemoryExhausted
from foxray.models.quantization import Quantization
from foxray.training.authority import Cancelled, Rescheduled, known_to_all, other_rank_stopped
from foxray.training.recovery import Recovery
from foxray.training.sampler import epoch_order

FEWEST_BATCHES, MOST_BATCHES = 10, 500
SHARE_OF_TRAINING = 0.03
"""Of the effective batches of the whole training, where their number is not given."""


def calibration_batches(training_batches: int, *, wanted: int | None = None) -> int:
    """Effective batches to calibrate on: as wanted, or 3% of the training within 10 to 500."""
    if wanted is not None:
        return wanted
    return min(max(round(SHARE_OF_TRAINING * training_batches), FEWEST_BATCHES), MOST_BATCHES)


def calibration_order(num_samples: int, *, batch: int, batches: int, seed: int) -> Iterator[Tensor]:
    """The positions of each effective batch: those of the training's first steps, epoch after epoch."""
    epoch, given = 0, 0
    while given < batches:
        for samples in torch.split(epoch_order(num_samples, seed=seed, epoch=epoch), batch)[
            : batches - given
        ]:
            given += 1
            yield samples
        epoch += 1


class Calibration:
    """One rank's part in the calibration: a call for each effective batch, together with all ranks."""

    def __init__(
        self, *, quantization: Quantization, recovery: Recovery, device: torch.device, world_size: int
    ) -> None:
        self.recovery = recovery
        self._quantization = quantization
        self._world_size = world_size
        # One minimum over all ranks merges the ranges, finds the smallest batch size, and tells of a rank
        # that cannot go on or was asked to stop (both -1 then).
        self._wire = torch.zeros(len(quantization.batch_range) + 3, device=device)
        self._range, self._flags = self._wire[:-3], self._wire[-3:]
        self._known: list[float] = []

    def begin(self) -> None:
        """Observe from here on."""
        self._quantization.mode = "observe"

    def finish(self) -> None:
        """Round to the ranges that were found from here on."""
        self.recovery.repeat(self._round)

    def __call__(self, share_N: Tensor, forward: Callable[[Tensor], object], *, stop: bool) -> int:
        """Observe this rank's share of a batch; the smallest batch size of all ranks.

        Raises MemoryExhausted, Rescheduled, or Cancelled where a rank was asked to stop.
        """
        quantization, recovery = self._quantization, self.recovery

        def observe(first: int, end: int) -> None:
            quantization.begin_piece()
            with torch.no_grad():
                forward(share_N[first:end])
            quantization.commit_piece()

        recovery.take_baseline()
        trouble: Exception | None = None
        try:
            recovery.run(len(share_N), observe)
        except (MemoryExhausted, Rescheduled) as error:
            if self._world_size == 1 or recovery.context_lost:
                raise
            trouble = error  # told to the others first: they wait for the merge
        self._fill(abandoned=trouble is not None, stop=stop)
        recovery.once(self._merge, broken="broken collective: out of memory in the all-reduce")
        recovery.repeat(self._read)
        smallest, abandoned, stopped = self._known
        if abandoned < 0:
            raise known_to_all(trouble) if trouble else other_rank_stopped()
        if stopped < 0:
            raise Cancelled("stopped during calibration")
        quantization.batch_range.copy_(self._range)
        quantization.commit_batch()
        return int(smallest)

    def _round(self) -> None:
        self._quantization.mode = "fake_quantize"

    def _fill(self, *, abandoned: bool, stop: bool) -> None:
        self._range.copy_(self._quantization.batch_range)
        for index, value in enumerate((self.recovery.batch_size, -float(abandoned), -float(stop))):
            self._flags[index].fill_(value)

    def _merge(self) -> None:
        if self._world_size > 1:
            dist.all_reduce(self._wire, op=dist.ReduceOp.MIN)

    def _read(self) -> None:
        self._known = self._flags.tolist()

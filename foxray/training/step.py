"""The optimizer step as a transaction over its samples.

A step ends with one update made of exactly its samples, or with no change at all. Two flat buffers make
that cheap. `G` holds the gradient of one micro-batch: the `.grad` of every parameter is a view of it. `W`
(the wire) holds the sum of the committed micro-batches, followed by the number of samples, the sum of
their losses, a stop flag, and one slot per rank for its batch size. A micro-batch zeroes G, runs forward
and backward, and commits by one in-place addition that allocates nothing; what failed before it is simply
zeroed again. When the samples of all ranks are in, a single all-reduce carries gradients and flags, so
local trouble is always settled before a collective and no rank waits for one that will not come.

After the all-reduce nothing is asked of the allocator that cannot be asked again: mean, clipping and the
fused optimizer are computed from W and from a known step count, as often as it takes.

Legend: P = number of parameter elements, N = samples of this rank's share of the step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from foxray.training.recovery import Recovery

LossSum = Callable[[Tensor], Tensor]
"""Gives the scalar *sum* of the losses of the samples it is given, with a graph behind it."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What all ranks know after a committed step."""

    loss: float
    """Mean loss per sample over all ranks."""
    samples: int
    """Samples that the update was made of, over all ranks."""
    batch_sizes: list[int]
    """Current batch size by rank."""
    stop: bool
    """True when rank 0 was asked to stop: all ranks see it in the same step."""


class RepeatableAdamW:
    """AdamW whose step may be called again after an OOM.

    The fused kernel allocates nothing; only the step counters do, before it runs. State is therefore
    created at once instead of in the first step, and the counters are set to a known value before each
    try. Holds for one parameter group of one dtype on one device, which `flat_parameters` guarantees.
    """

    def __init__(self, parameters: list[nn.Parameter], *, learning_rate: float) -> None:
        self.optimizer = torch.optim.AdamW(parameters, lr=learning_rate, fused=True)
        for parameter in parameters:
            self.optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        self.steps_done = 0

    def step(self) -> None:
        """Update the parameters from their `.grad`; exact also when an earlier call ran out of memory."""
        for state in self.optimizer.state.values():
            state["step"].fill_(self.steps_done)
        self.optimizer.step()
        self.steps_done += 1

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take over the state of a saved `optimizer.state_dict()`, counters included.

        Copies into the tensors that exist: those are on the device, the saved ones are not.
        """
        for index, state in enumerate(self.optimizer.state.values()):
            for name, tensor in state.items():
                tensor.copy_(saved["state"][index][name])
        self.steps_done = int(next(iter(self.optimizer.state.values()))["step"].item())


class TransactionalStep:
    """Turns samples into optimizer updates, each whole or not at all, together with all other ranks."""

    def __init__(
        self,
        *,
        parameters: list[nn.Parameter],
        optimizer: RepeatableAdamW,
        recovery: Recovery,
        max_grad_norm: float,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._optimizer = optimizer
        self._recovery = recovery
        self._rank, self._world_size = rank, world_size
        size = sum(parameter.numel() for parameter in parameters)
        like = parameters[0]
        self._gradient_P = torch.zeros(size, dtype=like.dtype, device=like.device)
        self._wire = torch.zeros(size + 3 + world_size, dtype=like.dtype, device=like.device)
        self._sum_P = self._wire[:size]
        self._count, self._loss, self._stop = (self._wire[size + i] for i in range(3))
        self._sizes = self._wire[size + 3 :]
        self._flags = self._wire[size:]
        offset = 0
        for parameter in parameters:
            view = self._gradient_P[offset : offset + parameter.numel()]
            parameter.grad = view.view_as(parameter)
            offset += parameter.numel()
        # Scalars that the part after the all-reduce needs, made now so that nothing is allocated there.
        self._norm = torch.zeros_like(self._count)
        self._scale = torch.zeros_like(self._count)
        self._tiny = torch.full_like(self._count, 1e-6)
        self._max_norm = torch.full_like(self._count, max_grad_norm)
        self._one = torch.ones_like(self._count)

    def __call__(self, samples_N: Tensor, loss_sum: LossSum, *, stop: bool = False) -> StepResult:
        """Compute this rank's share and take one optimizer step with all ranks.

        Raises what `Recovery.run` raises; nothing has changed then.
        """
        self._wire.zero_()
        self._recovery.take_baseline()
        losses: list[float] = []

        def micro_batch(piece: Tensor) -> None:
            self._gradient_P.zero_()
            loss = loss_sum(piece)
            loss.backward()  # type: ignore[no-untyped-call]
            value = loss.item()  # before the commit: whatever can fail has to fail before it
            self._sum_P.add_(self._gradient_P)
            losses.append(value)

        self._recovery.run(samples_N, micro_batch)
        self._count.fill_(len(samples_N))
        self._loss.fill_(sum(losses))
        self._stop.fill_(float(stop))
        self._sizes[self._rank].fill_(self._recovery.batch_size)
        if self._world_size > 1:
            self._recovery.repeat(self._all_reduce)
        self._recovery.repeat(self._set_mean_gradient)
        self._recovery.repeat(self._optimizer.step)
        count, loss, stopped, *sizes = self._flags.tolist()
        return StepResult(
            loss=loss / count, samples=int(count), batch_sizes=[int(s) for s in sizes], stop=stopped > 0
        )

    def _all_reduce(self) -> None:
        dist.all_reduce(self._wire)

    def _set_mean_gradient(self) -> None:
        """Mean over the samples of all ranks, clipped, into G; may be called again at any time."""
        torch.div(self._sum_P, self._count, out=self._gradient_P)
        torch.linalg.vector_norm(self._gradient_P, out=self._norm)
        torch.add(self._norm, self._tiny, out=self._scale)
        torch.div(self._max_norm, self._scale, out=self._scale)
        torch.minimum(self._scale, self._one, out=self._scale)
        self._gradient_P.mul_(self._scale)

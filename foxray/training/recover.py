"""`foxray.recover`: in-place recovery for any PyTorch loop, without Ray.

It is the same step that `foxray train` takes, with the policy asked in this process. A loop hands over what
would have been one batch, and the loss as a function of a part of it; the step computes it in as many
micro-batches as memory asks for and moves the parameters once. With `torch.distributed` initialised, the
ranks take the step together, each with its own batch.
"""

import logging
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from foxray.errors import FoxrayError, UserError
from foxray.memory.device import device_memory
from foxray.oom import Attempt, Decision, Incident, OomPolicy, texts
from foxray.training.authority import LocalAuthority, Rescheduled
from foxray.training.dropout import RowDropout
from foxray.training.optimizers import RepeatableStep
from foxray.training.recovery import Place, Recovery
from foxray.training.step import StepResult, TransactionalStep, batch_length

if TYPE_CHECKING:
    from torch.amp import GradScaler

_log = logging.getLogger("foxray")

_PHASE = "training"


def recover(
    optimizer: torch.optim.Optimizer,
    *,
    batch_size: int | None = None,
    policy: OomPolicy | None = None,
    max_grad_norm: float | None = None,
    scaler: "GradScaler | None" = None,
    reduction: Literal["mean", "sum"] = "mean",
    dropout_seed: int | None = None,
) -> "RecoveringStep":
    """An optimizer step that survives running out of memory; call it with a batch and a loss.

    `batch_size`: samples in one forward and backward to begin with; None: the first batch whole. `policy`:
    how far it may shrink. `max_grad_norm`: clip the gradient of the whole step. `scaler`: for mixed
    precision in float16; it is moved by the step, so do not call its `step` or `update`. `reduction`: what
    the loss does over the samples it is given. `dropout_seed`: have dropout depend on this seed and on a
    sample's place in its batch alone, not on how the batch is split.

    Parameters must have one dtype on one device. Takes device memory for one more copy of the gradients
    than a plain loop; with an optimizer other than Adam or AdamW with `fused=True`, also for a copy of the
    parameters and the optimizer's state, written before each step, to go back to if memory runs out while
    the optimizer has moved half of them. Samples must not mix within a batch (no BatchNorm), as with any
    accumulation of gradients. Parameters that a loss does not use get a gradient of zero, not None.
    """
    if reduction not in ("mean", "sum"):
        raise UserError(f"reduction is {reduction!r}; allowed: mean, sum")
    if batch_size is not None and batch_size < 1:
        raise UserError(f"batch_size is {batch_size}; it must be 1 or more")
    return RecoveringStep(
        optimizer, batch_size, policy or OomPolicy(), max_grad_norm, scaler, reduction, dropout_seed
    )


class RecoveringStep:
    """Made by `recover`; `step(batch, loss)` takes one optimizer step."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        batch_size: int | None,
        policy: OomPolicy,
        max_grad_norm: float | None,
        scaler: "GradScaler | None",
        reduction: str,
        dropout_seed: int | None,
    ) -> None:
        distributed = dist.is_available() and dist.is_initialized()
        self._rank = dist.get_rank() if distributed else 0
        device = optimizer.param_groups[0]["params"][0].device
        memory = device_memory(device)
        self._authority = _LoggingAuthority(policy)
        self._recovery = Recovery(
            phase=_PHASE,
            batch_size=batch_size or 1,
            place=Place(rank=self._rank, node=socket.gethostname(), gpu=memory.label, launch="local"),
            memory=memory,
            authority=self._authority,
            device=device,
            enter_rung=_no_rung,
        )
        self._step = TransactionalStep(
            optimizer=RepeatableStep(optimizer),
            recovery=self._recovery,
            max_grad_norm=max_grad_norm,
            rank=self._rank,
            world_size=dist.get_world_size() if distributed else 1,
            scaler=scaler,
        )
        self._sized = batch_size is not None
        self._started = False
        self._mean = reduction == "mean"
        self._dropout = None if dropout_seed is None else RowDropout(device)
        self._seed = (dropout_seed or 0, self._rank)

    @property
    def batch_size(self) -> int:
        """Samples in one forward and backward now."""
        return self._recovery.batch_size

    @property
    def incidents(self) -> list[Incident]:
        """Every time memory ran out."""
        return [attempt.incident for attempt in self._authority.attempts if attempt.incident is not None]

    @property
    def recovery_seconds(self) -> list[float]:
        """From each error to the begin of the next try."""
        return self._authority.recovery_seconds

    def __call__(self, batch: Any, loss: Callable[[Any], Tensor]) -> StepResult:
        """One optimizer step from all samples of `batch`.

        `batch` is a tensor, or a list, tuple or dict of tensors with the samples in dimension 0; `loss` gets
        the same with fewer samples. To keep a batch on the host until it is needed, move it to the device
        in `loss`. Raises MemoryExhausted when the policy gives up and FoxrayError where only a new process
        helps; parameters and optimizer are as before the step then.
        """
        count = batch_length(batch)
        if not count:
            raise UserError("the batch is empty: a step needs at least one sample")
        if not self._started:
            self._started = True
            self._recovery.batch_size = min(self.batch_size, count) if self._sized else count

        def loss_sum(piece: Any) -> Tensor:
            value = loss(piece)
            return value * batch_length(piece) if self._mean else value

        try:
            result = self._step(batch, loss_sum, around=self._around())
        except Rescheduled as error:
            raise FoxrayError(
                f"training cannot go on in this process ({error.reason}); nothing of this step was applied: "
                f"start a new process from your last checkpoint, with batch_size={self.batch_size} or less"
            ) from error
        self._recovery.step += 1
        return result

    def _around(self) -> Any:
        dropout = self._dropout
        if dropout is None:
            return None
        seed = (*self._seed, self._recovery.step)
        return lambda first, count: dropout.rows(seed=seed, first=first, count=count)


class _LoggingAuthority(LocalAuthority):
    """Tells the log what was decided, in the words of `foxray train`."""

    def decide(self, incident: Incident, *, incident_id: str, step: int) -> Decision:
        decision = super().decide(incident, incident_id=incident_id, step=step)
        if decision.action != "give_up":
            failed: Attempt = self.attempts[-1]
            for line in texts.retry_lines(
                decision.phase,
                attempt=decision.retries,
                max_retries=self.policy.max_retries,
                previous=failed.batch_size,
                batch_size=decision.batch_size,
                rung=decision.rung,
            ):
                _log.warning(line)
        return decision


def _no_rung(rung: str) -> None:
    raise UserError(f"on_exhausted={rung!r} needs a workload of foxray; take it out of the policy")

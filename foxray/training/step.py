"""The optimizer step as a transaction over its samples.

A step ends with one update made of exactly its samples, or with no change at all. Two flat buffers make
that cheap. `G` holds the gradient and the loss of one micro-batch: the `.grad` of every parameter is a view
of it. `W` (the wire) holds the sum of the committed micro-batches, followed by the number of samples, two
flags, and one slot per rank for its batch size. A micro-batch zeroes G, runs forward and backward, and
commits gradient and loss by one in-place addition that allocates nothing; what failed before it is simply
zeroed again. When the samples of all ranks are in, a single all-reduce carries gradients and flags, so
local trouble is always settled before a collective and no rank waits for one that will not come: a rank
that cannot go on says so in its flag, and all leave the step together.

After the all-reduce nothing is asked of the allocator that cannot be asked again: mean, clipping and the
optimizer are computed from W and from what the optimizer's step may move, as often as it takes. The
all-reduce itself is never called a second time: whether a peer has had its part already cannot be known from
here, so an OOM in it counts as a broken collective.

Legend: P = number of parameter elements.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from foxray.errors import MemoryExhausted, UserError
from foxray.training.authority import Rescheduled, known_to_all, other_rank_stopped
from foxray.training.optimizers import RepeatableStep
from foxray.training.recovery import Recovery

if TYPE_CHECKING:
    from torch.amp import GradScaler

LossSum = Callable[[Any], Tensor]
"""Gives the scalar *sum* of the losses of the samples it is given, with a graph behind it."""

Around = Callable[[int, int], Any]
"""A context manager for the forward and backward of `count` samples from number `first` of a share."""


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
    """True when a rank was asked to stop: all ranks see it in the same step."""
    skipped: bool = False
    """With a gradient scaler: the gradient was not finite, the parameters did not move."""


class TransactionalStep:
    """Turns samples into optimizer updates, each whole or not at all, together with all other ranks."""

    def __init__(
        self,
        *,
        optimizer: RepeatableStep,
        recovery: Recovery,
        max_grad_norm: float | None,
        rank: int = 0,
        world_size: int = 1,
        scaler: "GradScaler | None" = None,
    ) -> None:
        """Takes over the `.grad` of the optimizer's parameters, all of one dtype on one device.

        Costs device memory for twice the parameters, of which a plain loop needs one as well (the
        gradient). Raises UserError for parameters of several dtypes or devices.
        """
        self._optimizer = optimizer
        self._recovery = recovery
        self._rank, self._world_size = rank, world_size
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._parameters = _trainable(optimizer.optimizer)
        size = sum(parameter.numel() for parameter in self._parameters)
        like = self._parameters[0]
        # Half precision can neither count samples nor add up many micro-batches.
        dtype = torch.float32 if like.element_size() < 4 else like.dtype
        self._piece = torch.zeros(size + 1, dtype=like.dtype, device=like.device)
        self._wire = torch.zeros(size + 4 + world_size, dtype=dtype, device=like.device)
        self._gradient_P, self._piece_loss = self._piece[:size], self._piece[size]
        self._committed, self._sum_P = self._wire[: size + 1], self._wire[:size]
        self._flags = self._wire[size:]
        self._count, self._stop, self._abandoned = (self._flags[i] for i in (1, 2, 3))
        self._sizes = self._flags[4:]
        self._views = [
            part.view_as(parameter)
            for part, parameter in zip(
                torch.split(self._gradient_P, [p.numel() for p in self._parameters]),
                self._parameters,
                strict=True,
            )
        ]
        self._mean_P = torch.empty_like(self._sum_P) if dtype != like.dtype else self._gradient_P
        self._max_grad_norm = max_grad_norm
        # A scaled loss should be about as large as the mean over a batch that half precision was made for;
        # a power of two leaves every digit of the gradient as it is.
        self._unit = float(2 ** (recovery.batch_size.bit_length() - 1)) if self._scaler is not None else 1.0
        self._norm = torch.zeros((), dtype=dtype, device=like.device)
        self._known: list[float] = []

    def __call__(
        self, batch: Any, loss_sum: LossSum, *, stop: bool = False, around: Around | None = None
    ) -> StepResult:
        """Compute this rank's share (`batch`: a tensor, or a dict, list or tuple of tensors that have the
        samples in dimension 0) and take one optimizer step with all ranks.

        `loss_sum` gets slices of it. Raises MemoryExhausted, or Rescheduled where only a new process helps;
        nothing has changed then.
        """
        count = batch_length(batch)
        self._begin()

        def micro_batch(first: int, end: int) -> None:
            self._piece.zero_()
            piece = pytree.tree_map_only(Tensor, lambda tensor: tensor[first:end], batch)
            if around is None:
                self._backward(loss_sum(piece))
            else:
                with around(first, end - first):
                    self._backward(loss_sum(piece))
            self._committed.add_(self._piece)

        trouble = self._compute(count, micro_batch)
        if trouble is not None:
            self._abandon(trouble)
        self._count.fill_(count)
        self._stop.fill_(float(stop))
        self._sizes[self._rank].fill_(self._recovery.batch_size)
        self._reduce()
        self._recovery.repeat(self._read_flags)
        if self._known[3] > 0:
            raise other_rank_stopped()
        self._recovery.repeat(self._set_mean_gradient)
        skipped = self._scaler is not None and not self._norm.isfinite().item()
        if not skipped:
            self._step_optimizer()
        if self._scaler is not None:
            _move_scale(self._scaler, overflowed=skipped)
        loss, total, stopped, _, *sizes = self._known
        return StepResult(
            loss=loss / total,
            samples=int(total),
            batch_sizes=[int(size) for size in sizes],
            stop=stopped > 0,
            skipped=skipped,
        )

    def _begin(self) -> None:
        self._wire.zero_()
        for parameter, view in zip(self._parameters, self._views, strict=True):
            if parameter.grad is not view:  # somebody called zero_grad(), which drops the gradients
                parameter.grad = view
        self._recovery.take_baseline()

    def _backward(self, loss: Tensor) -> None:
        if self._scaler is None:
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            self._scaler.scale(loss / self._unit).backward()  # type: ignore[no-untyped-call]
        self._piece_loss.copy_(loss.detach())

    def _compute(
        self, count: int, micro_batch: Callable[[int, int], None]
    ) -> MemoryExhausted | Rescheduled | None:
        """Commit all micro-batches; why this rank cannot go on, where it cannot but can still say so."""
        try:
            self._recovery.run(count, micro_batch)
        except (MemoryExhausted, Rescheduled) as error:
            if self._recovery.context_lost:
                raise
            return error
        return None

    def _abandon(self, trouble: Exception) -> NoReturn:
        """Tell the other ranks, who wait or will wait in this step's all-reduce, that there is no step."""
        self._wire.zero_()
        self._abandoned.fill_(1.0)
        try:
            self._all_reduce()
        except Exception as error:
            raise trouble from error
        raise known_to_all(trouble)

    def _reduce(self) -> None:
        self._recovery.once(self._all_reduce, broken="broken collective: out of memory in the all-reduce")

    def _all_reduce(self) -> None:
        if self._world_size > 1:
            dist.all_reduce(self._wire)

    def _read_flags(self) -> None:
        self._known = self._flags.tolist()

    def _set_mean_gradient(self) -> None:
        """Mean over the samples of all ranks, clipped, into G; may be called again at any time."""
        scale = 1.0 if self._scaler is None else self._scaler.get_scale() / self._unit
        torch.div(self._sum_P, self._known[1] * scale, out=self._mean_P)
        if self._max_grad_norm is not None or self._scaler is not None:
            torch.linalg.vector_norm(self._mean_P, out=self._norm)
        if self._max_grad_norm is not None:
            self._mean_P.mul_((self._max_grad_norm / (self._norm + 1e-6)).clamp_(max=1.0))
        if self._mean_P is not self._gradient_P:
            self._gradient_P.copy_(self._mean_P)

    def _step_optimizer(self) -> None:
        self._recovery.repeat(self._optimizer.note)
        if not self._optimizer.moves_only_counters:
            self._recovery.take_baseline()  # the copy stays
        self._recovery.repeat(self._optimizer.step, undo=self._optimizer.settle)


def _trainable(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    kinds = sorted({f"{p.dtype} on {p.device}" for p in parameters})
    if len(kinds) != 1:
        found = ", ".join(kinds) or "no trainable parameter"
        raise UserError(f"a transactional step needs parameters of one dtype on one device; found {found}")
    return parameters


def batch_length(batch: Any) -> int:
    """Samples in a batch. Raises UserError where its tensors disagree or there is none."""
    lengths = {len(leaf) for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)}
    if len(lengths) != 1:
        raise UserError(
            f"a batch needs tensors with the same number of samples in dimension 0; found {sorted(lengths)}"
        )
    return lengths.pop()


def _move_scale(scaler: "GradScaler", *, overflowed: bool) -> None:
    """What `GradScaler.update()` does, without its per-optimizer state, which a repeated step would trip."""
    state = scaler.state_dict()
    if overflowed:
        state["scale"] *= state["backoff_factor"]
        state["_growth_tracker"] = 0
    else:
        state["_growth_tracker"] += 1
        if state["_growth_tracker"] == state["growth_interval"]:
            state["scale"] *= state["growth_factor"]
            state["_growth_tracker"] = 0
    scaler.load_state_dict(state)

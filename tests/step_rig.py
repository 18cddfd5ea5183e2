"""A small regression problem trained through the transactional step, without Ray: the shared fake world
of the step's tests. The memory failures in it are real ones, raised by the emulated budget."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from foxray.memory.device import device_memory
from foxray.oom import OomPolicy
from foxray.training.authority import LocalAuthority
from foxray.training.optimizers import RepeatableStep, fused_adamw
from foxray.training.recovery import Place, Recovery
from foxray.training.sampler import epoch_order
from foxray.training.step import TransactionalStep

SAMPLES = 96


@dataclass
class Rig:
    """One rank: model, step and authority. `seen` holds the sample ids of every committed update."""

    batch_size: int = 32
    dtype: torch.dtype = torch.float64
    max_retries: int = 10
    width: int = 64
    rank: int = 0
    world_size: int = 1
    block_size: int | None = None
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None
    seen: list[list[int]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x_NF = torch.randn(SAMPLES, 8, generator=generator, dtype=self.dtype)
        self.y_N = self.x_NF.sum(1).sin()
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(8, self.width), nn.Tanh(), nn.Linear(self.width, 1)).to(
            self.dtype
        )
        parameters = list(self.model.parameters())
        self.authority = LocalAuthority(OomPolicy(min_batch_size=1, max_retries=self.max_retries))
        device = torch.device("cpu")
        self.recovery = Recovery(
            phase="training",
            batch_size=self.batch_size,
            place=Place(rank=self.rank, node="here", gpu="test", launch="l1"),
            memory=device_memory(device),
            authority=self.authority,
            device=device,
            enter_rung=lambda rung: None,
            block_size=self.block_size,
        )
        self.optimizer = RepeatableStep(
            fused_adamw(parameters, learning_rate=1e-3)
            if self.make_optimizer is None
            else self.make_optimizer(parameters)
        )
        self.step = TransactionalStep(
            optimizer=self.optimizer,
            recovery=self.recovery,
            max_grad_norm=1.0,
            rank=self.rank,
            world_size=self.world_size,
        )

    def loss_sum(self, piece: Tensor) -> Tensor:
        return (self.model(self.x_NF[piece]).squeeze(1) - self.y_N[piece]).pow(2).sum()

    def epoch(self, epoch: int = 0, *, effective_batch: int = 32) -> None:
        order = epoch_order(SAMPLES, seed=0, epoch=epoch)
        for samples in order.split(effective_batch):
            self.one_step(samples)

    def one_step(self, samples: Tensor) -> None:
        share = samples.tensor_split(self.world_size)[self.rank]
        result = self.step(share, self.loss_sum)
        assert result.samples == len(samples)
        self.seen.append(samples.tolist())
        self.losses.append(result.loss)

    def weights(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()]).clone()

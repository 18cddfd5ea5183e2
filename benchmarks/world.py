"""What the training benchmarks share: a TFT over made-up windows, and a trainer of it without Ray."""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foxray.models.quantile import quantile_loss
from foxray.models.tft import TemporalFusionTransformer, TftConfig
from foxray.oom import OomPolicy
from foxray.training.authority import LocalAuthority
from foxray.training.checkpoint import Checkpoints
from foxray.training.config import TrainConfig
from foxray.training.loop import Trainer, WorkerPlan
from foxray.training.recovery import Place

FEATURES, SEQ_LEN, HIDDEN_DIM, NUM_HEADS = 32, 30, 16, 4
QUANTILES = torch.tensor([0.1, 0.5, 0.9])


@dataclass
class World:
    """A `Workload` whose windows lie in memory, so that data cost nothing."""

    num_train: int
    dropout: float = 0.1
    num_valid: int = 1
    name: str = "tft"
    validation_sums: tuple[str, ...] = ("validation_loss",)

    def build_model(self) -> nn.Module:
        return TemporalFusionTransformer(
            TftConfig(
                num_features=FEATURES,
                seq_len=SEQ_LEN,
                hidden_dim=HIDDEN_DIM,
                num_heads=NUM_HEADS,
                dropout=self.dropout,
            )
        )

    def place(self, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(5)
        noise_NTF = torch.randn(self.num_train, SEQ_LEN, FEATURES, generator=generator)
        self.x_NTF = noise_NTF.cumsum(1) / SEQ_LEN**0.5
        self.y_N = (noise_NTF[:, -5:].sum((1, 2)) * 0.2).sin()

    def loss_sum(self, model: nn.Module, positions_B: Tensor) -> Tensor:
        return quantile_loss(model(self.x_NTF[positions_B]), self.y_N[positions_B], QUANTILES)

    def evaluate(self, model: nn.Module, positions_B: Tensor) -> Tensor:
        return self.loss_sum(model, positions_B).double().unsqueeze(0)

    def use_gradient_checkpointing(self, model: nn.Module) -> None:
        raise NotImplementedError

    def spec(self) -> dict[str, Any]:
        return {}


def build_trainer(
    world: World, *, batch_size: int, effective_batch: int, rank: int = 0, on_commit: Any = None
) -> tuple[Trainer, LocalAuthority]:
    """A trainer that is ready for its first epoch, and the authority it reports to."""
    config = TrainConfig(
        parquet_file=Path("none"), epochs=10_000, checkpoint_every=10**9, dropout=world.dropout
    )
    authority = LocalAuthority(OomPolicy(max_retries=10))
    trainer = Trainer(
        config=config,
        plan=WorkerPlan(
            launch="bench",
            effective_batch=effective_batch,
            batch_sizes={"training": batch_size, "validation": 1},
        ),
        workload=world,
        device=torch.device("cpu"),
        place=Place(rank=rank, node="here", gpu="cpu", launch="bench"),
        authority=authority,
        checkpoints=Checkpoints(tempfile.mkdtemp(prefix="foxray-bench-")),
        on_commit=on_commit,
    )
    trainer._build()
    return trainer, authority

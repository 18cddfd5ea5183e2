"""The real TFT in a small size, over a made-up table, trained through the real `Trainer` without Ray."""

from dataclasses import dataclass, field
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

SEQ_LEN, FEATURES = 8, 5
QUANTILES = torch.tensor([0.1, 0.5, 0.9])


@dataclass
class TinyWorkload:
    """A TFT over random walks; `dtype` float64 shows what is exact beyond rounding."""

    dtype: torch.dtype = torch.float32
    dropout: float = 0.0
    num_train: int = 128
    num_valid: int = 24
    pieces: list[list[int]] = field(default_factory=list)
    """Training positions of every micro-batch that was tried."""
    evaluated: list[list[int]] = field(default_factory=list)
    name: str = "tft"
    validation_sums: tuple[str, ...] = ("validation_loss", "samples")

    def build_model(self) -> nn.Module:
        config = TftConfig(
            num_features=FEATURES, seq_len=SEQ_LEN, hidden_dim=8, num_heads=2, dropout=self.dropout
        )
        return TemporalFusionTransformer(config).to(self.dtype)

    def place(self, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(5)
        count = self.num_train + self.num_valid
        x_NTF = torch.randn(count, SEQ_LEN, FEATURES, generator=generator, dtype=torch.float64)
        self.x_NTF = x_NTF.cumsum(1).to(self.dtype)
        self.y_N = (x_NTF.sum((1, 2)) * 0.3).sin().to(self.dtype)
        self.quantiles = QUANTILES.to(self.dtype)

    def loss_sum(self, model: nn.Module, positions_B: Tensor) -> Tensor:
        self.pieces.append(positions_B.tolist())
        return self._loss(model, positions_B)

    def evaluate(self, model: nn.Module, positions_B: Tensor) -> Tensor:
        self.evaluated.append(positions_B.tolist())
        loss = self._loss(model, positions_B + self.num_train).double()
        return torch.stack([loss, torch.tensor(float(len(positions_B)), dtype=torch.float64)])

    def _loss(self, model: nn.Module, rows_B: Tensor) -> Tensor:
        return quantile_loss(model(self.x_NTF[rows_B]), self.y_N[rows_B], self.quantiles)

    def use_gradient_checkpointing(self, model: nn.Module) -> None:
        model.gradient_checkpointing = True  # type: ignore[assignment]

    def spec(self) -> dict[str, Any]:
        return {}


def tiny_trainer(
    folder: Path | str,
    workload: Any,
    *,
    rank: int = 0,
    batch_size: int = 64,
    effective_batch: int = 64,
    validation_batch_size: int | None = None,
    max_retries: int = 10,
    min_batch_size: int = 2,
    launch: str = "l1",
    on_commit: Any = None,
    reports_to: Any = None,
    **config: Any,
) -> tuple[Trainer, LocalAuthority]:
    """A trainer of one rank and an authority, to which it reports unless `reports_to` names another."""
    settings = TrainConfig(
        parquet_file=Path("none"),
        dropout=getattr(workload, "dropout", 0.0),
        min_batch_size=min_batch_size,
        **config,
    )
    authority = LocalAuthority(
        OomPolicy(
            min_batch_size=min_batch_size,
            max_retries=max_retries,
            keep_effective_batch=settings.keep_effective_batch,
        )
    )
    sizes = dict.fromkeys(settings.phases, batch_size)
    sizes["validation"] = validation_batch_size or batch_size
    trainer = Trainer(
        config=settings,
        plan=WorkerPlan(launch=launch, effective_batch=effective_batch, batch_sizes=sizes),
        workload=workload,
        device=torch.device("cpu"),
        place=Place(rank=rank, node="here", gpu="test", launch=launch),
        authority=reports_to or authority,
        checkpoints=Checkpoints(str(folder)),
        on_commit=on_commit,
    )
    return trainer, authority


def weights(trainer: Trainer) -> dict[str, Tensor]:
    """A copy of the parameters."""
    return {name: tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()}

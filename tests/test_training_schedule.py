"""Learning rate, early stopping and logged metrics follow the optimizer step and the epoch, not the tries."""

import math
from pathlib import Path

import pytest
import torch
from tft_rig import TinyWorkload, tiny_trainer, weights
from torch import Tensor, nn

from foxray.errors import UserError
from foxray.memory.budget import memory_budget
from foxray.training.authority import Cancelled
from foxray.training.config import TrainConfig, load_config
from foxray.training.loop import Trainer
from foxray.training.schedule import epochs_without_improvement, learning_rate_at


def test_cosine_falls_from_the_base_to_nothing() -> None:
    rates = [learning_rate_at(p, base=2.0, schedule="cosine") for p in (0.0, 0.25, 0.5, 1.0, 1.5)]
    assert rates == pytest.approx([2.0, 1.0 + math.sqrt(0.5), 1.0, 0.0, 0.0])
    assert learning_rate_at(0.7, base=2.0, schedule="constant") == 2.0


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([], 0),
        ([1.0], 0),
        ([1.0, 0.9, 0.8], 0),
        ([1.0, 1.0], 1),
        ([1.0, 2.0, 1.5, 1.1], 3),
        ([2.0, math.nan, math.nan], 2),
        ([math.nan, math.nan], 2),
        ([math.nan, 1.0], 0),
    ],
)
def test_epochs_without_improvement(losses: list[float], expected: int) -> None:
    assert epochs_without_improvement(losses) == expected


class Worsening(TinyWorkload):
    """Its validation loss falls for two epochs and then rises."""

    def evaluate(self, model: nn.Module, positions_B: Tensor) -> Tensor:
        epoch = self.pieces_seen // 2
        self.evaluated.append(positions_B.tolist())
        count = float(len(positions_B))
        return torch.tensor([count * abs(epoch - 2), count], dtype=torch.float64)

    @property
    def pieces_seen(self) -> int:
        return len(self.pieces)


def test_early_stopping_ends_the_run_and_a_resumed_run_stays_ended(tmp_path: Path) -> None:
    trainer, authority = tiny_trainer(tmp_path, Worsening(), epochs=10, early_stopping_patience=2)
    metrics = trainer.train()
    assert [epoch["validation_loss"] for epoch in authority.epochs] == [1.0, 0.0, 1.0, 2.0]
    assert metrics["validation_loss"] == 2.0
    assert [report.phase for report in authority.phases] == ["training", "validation"]
    again, authority = tiny_trainer(tmp_path, Worsening(), epochs=10, early_stopping_patience=2)
    assert again.train() == metrics
    assert authority.epochs == []


def test_without_patience_all_epochs_run(tmp_path: Path) -> None:
    trainer, authority = tiny_trainer(tmp_path, Worsening(), epochs=6)
    trainer.train()
    assert len(authority.epochs) == 6


def test_the_cosine_goes_on_where_a_resumed_run_begins(tmp_path: Path) -> None:
    def run(folder: Path, rates: list[float], stop_at: int | None) -> Trainer:
        def on_commit(samples: Tensor) -> None:
            rates.append(trainer._optimizer.optimizer.param_groups[0]["lr"])
            trainer._stop = len(rates) == stop_at

        workload = TinyWorkload(dtype=torch.float64)
        trainer, _ = tiny_trainer(folder, workload, epochs=3, lr_schedule="cosine", on_commit=on_commit)
        trainer.train()
        return trainer

    whole: list[float] = []
    undisturbed = run(tmp_path / "whole", whole, None)
    assert whole == [learning_rate_at(step / 6, base=1e-3, schedule="cosine") for step in range(6)]
    parts: list[float] = []
    with pytest.raises(Cancelled, match="stopped after step 4"):
        run(tmp_path / "parts", parts, 3)
    resumed = run(tmp_path / "parts", parts, None)
    assert parts == whole
    ends = weights(undisturbed), weights(resumed)
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_logged_training_loss_counts_every_sample_once(tmp_path: Path) -> None:
    found = []
    for failing in (False, True):
        with memory_budget(1 << 30) as budget:
            trainer, authority = tiny_trainer(tmp_path / str(failing), TinyWorkload(dtype=torch.float64))
            trainer._build()
            trainer._build = lambda: None  # type: ignore[method-assign]
            budget.fail_at(200 if failing else None)
            found.append(trainer.train()["training_loss"])
            budget.fail_at(None)
        assert len(authority.attempts) == failing
    assert found[0] == pytest.approx(found[1], abs=1e-12)


def test_options_are_checked() -> None:
    settings = load_config(
        {"parquet_file": "x", "lr_schedule": "cosine", "early_stopping_patience": 3, "deterministic": True}
    )
    assert (settings.lr_schedule, settings.early_stopping_patience, settings.deterministic) == (
        "cosine",
        3,
        True,
    )
    plain = TrainConfig(parquet_file=Path("x"))
    assert (plain.lr_schedule, plain.early_stopping_patience, plain.deterministic) == (
        "constant",
        None,
        False,
    )
    with pytest.raises(UserError, match="--lr-schedule linear"):
        load_config({"parquet_file": "x", "lr_schedule": "linear"})
    with pytest.raises(UserError, match="--early-stopping-patience 0"):
        load_config({"parquet_file": "x", "early_stopping_patience": 0})

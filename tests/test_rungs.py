"""What is tried at the minimum batch size, with the real model in the emulated budget."""

from pathlib import Path

import pytest
import torch

from foxray.data.prepare import prepare
from foxray.errors import MemoryExhausted
from foxray.memory.budget import memory_budget
from foxray.training.authority import LocalAuthority
from foxray.training.checkpoint import Checkpoints
from foxray.training.config import TrainConfig, load_config
from foxray.training.loop import Trainer, WorkerPlan
from foxray.training.recovery import Place
from foxray.workloads import create_workload

CPU = torch.device("cpu")


def train(
    tmp_path: Path, config: TrainConfig, budget_bytes: int
) -> tuple[LocalAuthority, dict[str, float], int]:
    data = prepare(config.parquet_file, config.data_settings, tmp_path / "prepared", log=lambda line: None)
    authority = LocalAuthority(config.oom_policy)
    with memory_budget(budget_bytes):
        assert config.batch_size is not None
        trainer = Trainer(
            config=config,
            plan=WorkerPlan(
                launch="l1",
                effective_batch=config.batch_size,
                batch_sizes={"training": config.batch_size, "validation": 1},
            ),
            workload=create_workload(config, str(data.path)),
            device=CPU,
            place=Place(rank=0, node="here", gpu="test", launch="l1"),
            authority=authority,
            checkpoints=Checkpoints(str(tmp_path / "checkpoints")),
        )
        metrics = trainer.train()
    (training,) = [report for report in authority.phases if report.phase == "training"]
    assert training.peak_bytes is not None
    return authority, metrics, training.peak_bytes


@pytest.fixture
def config(synthetic_bars: Path) -> TrainConfig:
    return load_config(
        {
            "parquet_file": synthetic_bars,
            "num_features": 48,
            "seq_len": 60,
            "hidden_dim": 16,
            "num_heads": 2,
            "window_stride": 200,
            "batch_size": 4,
            "min_batch_size": 4,
        }
    )


@pytest.mark.slow
def test_gradient_checkpointing_then_cpu_are_entered_at_the_minimum(
    tmp_path: Path, config: TrainConfig
) -> None:
    plain, _, peak_bytes = train(tmp_path / "roomy", config, 1 << 30)
    assert plain.attempts == []
    rungs = {"on_exhausted": ("gradient-checkpointing", "cpu")}
    tight = config.model_copy(update=rungs)
    authority, metrics, _ = train(tmp_path / "checkpointed", tight, int(0.8 * peak_bytes))
    assert [d.rung for d in authority.answers.values()] == ["gradient-checkpointing"]
    assert metrics["validation_loss"] > 0
    authority, metrics, _ = train(tmp_path / "cpu", tight, int(0.2 * peak_bytes))
    assert [d.rung for d in authority.answers.values()] == ["gradient-checkpointing", "cpu"]
    assert metrics["validation_loss"] > 0
    with pytest.raises(MemoryExhausted, match="too large for available GPU memory"):
        train(tmp_path / "raise", config, int(0.8 * peak_bytes))


def test_a_model_that_does_not_fit_at_all_is_said_at_once(tmp_path: Path, config: TrainConfig) -> None:
    with pytest.raises(MemoryExhausted, match=r"it has 256\.00 KiB\), before the first batch"):
        train(tmp_path, config, 256 << 10)

"""What only a real cluster can show: one GPU a worker, and a script that is not ours."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY

pytestmark = pytest.mark.slow


def _visible_gpus(config: dict[str, Any]) -> str:
    return os.environ["CUDA_VISIBLE_DEVICES"]


def test_each_of_two_workers_sees_exactly_one_gpu(ray_cluster: str, tmp_path: Path) -> None:
    """Declared GPUs: the machine needs none."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig
    from ray.train.torch import TorchTrainer as RayTorchTrainer

    from foxray.driver.launch import PinnedTorchConfig
    from foxray.driver.worker import assert_one_gpu
    from foxray.errors import FoxrayError

    def loop(config: dict[str, Any]) -> str:
        import torch.distributed as dist

        mine: list[str | None] = [None, None]
        dist.all_gather_object(mine, os.environ["CUDA_VISIBLE_DEVICES"])
        try:
            assert_one_gpu()
        except FoxrayError as error:
            return f"{mine} refused: {error}"
        return f"{sorted(map(str, mine))} accepted"

    def run(torch_config: TorchConfig) -> str:
        trainer = RayTorchTrainer(
            loop,
            train_loop_config={},
            torch_config=torch_config,
            scaling_config=ScalingConfig(num_workers=2, use_gpu=True),
            run_config=RunConfig(storage_path=str(tmp_path)),
        )
        return str(trainer.fit().return_value)

    assert run(PinnedTorchConfig(backend="gloo")) == "['0', '1'] accepted"


def test_more_than_one_visible_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from foxray.driver.worker import assert_one_gpu
    from foxray.errors import FoxrayError

    for visible in ("0,1", ""):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        with pytest.raises(FoxrayError, match="exactly one GPU"):
            assert_one_gpu()


def test_the_example_runs_out_at_64_and_finishes_at_16(ray_cluster: str, tmp_path: Path) -> None:
    script = REPOSITORY / "examples" / "ray_train_script.py"
    assert len(script.read_text().splitlines()) < 40
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=300,
        env=os.environ | {"RAY_ADDRESS": ray_cluster},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "reducing batch_size: 64 → 32" in done.stdout
    assert "reducing batch_size: 32 → 16" in done.stdout
    assert "finished at {'batch_size': 16, 'accumulation_steps': 4}" in done.stdout


def _small_world_loop(config: dict[str, Any]) -> dict[str, Any]:
    """Runs out of memory above 16 samples."""
    import torch

    from foxray import memory_budget

    with memory_budget(1 << 20):
        torch.zeros(config["batch_size"], 1 << 13).sum()
    return config


def test_it_works_inside_a_ray_tune_trial(ray_cluster: str, tmp_path: Path) -> None:
    from ray import tune
    from ray.train import RunConfig, ScalingConfig

    def trial(config: dict[str, Any]) -> None:
        import foxray

        trainer = foxray.TorchTrainer(
            _small_world_loop,
            train_loop_config={"batch_size": config["batch_size"]},
            scaling_config=ScalingConfig(num_workers=1),
            run_config=RunConfig(name=f"trial-{config['batch_size']}", storage_path=str(tmp_path / "runs")),
        )
        tune.report(trainer.fit().return_value)

    tuner = tune.Tuner(
        tune.with_resources(trial, {"node:__internal_head__": 0.001}),
        param_space={"batch_size": tune.grid_search([64, 8])},
        tune_config=tune.TuneConfig(max_concurrent_trials=2),
        run_config=tune.RunConfig(name="sweep", storage_path=str(tmp_path / "tune")),
    )
    results = tuner.fit()
    assert not results.errors
    ended = sorted((r.metrics["batch_size"], r.metrics["accumulation_steps"]) for r in results)
    assert ended == [(8, 1), (16, 4)]


def test_giving_up_on_a_users_loop_is_memory_exhausted_and_on_record(
    ray_cluster: str, tmp_path: Path
) -> None:
    from ray.train import RunConfig, ScalingConfig

    import foxray
    from foxray.ledger.store import Ledger
    from foxray.ledger.summary import summarize_run

    trainer = foxray.TorchTrainer(
        _small_world_loop,
        train_loop_config={"batch_size": 100},
        oom_policy=foxray.OomPolicy(max_retries=1),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="gives-up", storage_path=str(tmp_path)),
    )
    with pytest.raises(foxray.MemoryExhausted, match="Training OOM after 1 retries"):
        trainer.fit()
    summary = summarize_run(Ledger(tmp_path).run("gives-up"))
    assert summary is not None and summary.outcome == "oom"
    assert 1 <= summary.oom_retries <= 2  # one a rank, where both ran out before the group was ended


def test_what_the_drop_in_cannot_work_with_is_said() -> None:
    from ray.train import FailureConfig, RunConfig

    import foxray

    with pytest.raises(foxray.UserError, match="batch_size"):
        foxray.TorchTrainer(_small_world_loop, train_loop_config={"lr": 1})
    with pytest.raises(foxray.UserError, match="max_failures=2"):
        foxray.TorchTrainer(
            _small_world_loop,
            train_loop_config={"batch_size": 4},
            run_config=RunConfig(failure_config=FailureConfig(max_failures=2)),
        )

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

    from foxray.driver.launch import PinnedTorchConfig
    from foxray.driver.worker import assert_one_gpu
    from foxray.errors import FoxrayError
    from ray.train.torch import TorchTrainer as RayTorchTrainer

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

"""A Ray Train script that survives out-of-memory: the only foxray in it is the import of TorchTrainer.
(The emulated budget stands in for a small GPU; with a real one, drop it and set use_gpu=True.)"""

from pathlib import Path

import ray.train
import torch
from ray.train import RunConfig, ScalingConfig
from torch import nn

from foxray import TorchTrainer, memory_budget  # was: from ray.train.torch import TorchTrainer


def train_loop(config: dict) -> dict:
    torch.manual_seed(0)
    with memory_budget(2 * 2**20):
        model = ray.train.torch.prepare_model(
            nn.Sequential(nn.Linear(16, 4096), nn.GELU(), nn.Linear(4096, 1))
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _step in range(20):
            optimizer.zero_grad()
            for _ in range(config["accumulation_steps"]):  # grows as the batch shrinks
                x = torch.randn(config["batch_size"], 16)
                loss = (model(x).squeeze(1) - x.sum(1)).pow(2).mean() / config["accumulation_steps"]
                loss.backward()
            optimizer.step()
        return {"batch_size": config["batch_size"], "accumulation_steps": config["accumulation_steps"]}


if __name__ == "__main__":
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={"batch_size": 64},
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(name="example", storage_path=str(Path("foxray-runs").absolute())),
    )
    print("finished at", trainer.fit().return_value)

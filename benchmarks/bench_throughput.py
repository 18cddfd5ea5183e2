"""Training throughput: foxray's step against a bare PyTorch loop, and on two workers against DDP.

Same model (a TFT of 32 features over 30 positions, hidden width 16, dropout 0.1), same batches, same
accumulation, clipping and a loss read in every step; both with a fused AdamW, which is the faster one. Steps
are taken in turns, so that a busy machine slows both. 1.00 is the speed of the other.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from benchmarks.world import World, build_trainer
from foxray.training.sampler import epoch_order, rank_share

STEPS = 6
"""Optimizer steps of one epoch."""


def run(repeats: int = 16) -> dict[str, Any]:
    """Speed of foxray over that of the other loop, for each case."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    for batch_size, accumulation in ((64, 1), (32, 2), (32, 1)):
        for dropout in (0.1, 0.0):
            name = f"1 worker, batch {batch_size} x {accumulation}, dropout {dropout}"
            figures[name] = _compare(batch_size, accumulation, dropout, repeats, world_size=1, rank=0)
            _show(name, figures[name], "bare loop")
    for batch_size in (64, 32):
        name = f"2 workers, batch {batch_size} each, dropout 0.1"
        figures[name] = _two_workers(batch_size, repeats)
        _show(name, figures[name], "DistributedDataParallel")
    torch.set_num_threads(threads)
    return figures


def _show(name: str, figures: dict[str, float], peer: str) -> None:
    print(
        f"{name:<40} foxray {figures['foxray_seconds'] * 1e3:7.1f} ms a step, "
        f"{peer} {figures['peer_seconds'] * 1e3:7.1f} ms, speed {figures['ratio']:.3f}"
    )


def _compare(
    batch_size: int, accumulation: int, dropout: float, repeats: int, *, world_size: int, rank: int
) -> dict[str, float]:
    effective = batch_size * accumulation * world_size
    world = World(num_train=effective * STEPS, dropout=dropout)
    steps = {
        "foxray": _our_step(world, batch_size, effective, rank),
        "peer": _plain_step(world, batch_size, world_size, rank),
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(repeats):
        for number, samples in enumerate(epoch_order(world.num_train, seed=0, epoch=repeat).split(effective)):
            for name in list(steps)[:: 1 if number % 2 else -1]:  # in turns, also in who goes first
                started = time.perf_counter()
                steps[name](samples)
                seconds[name].append(time.perf_counter() - started)
    own, peer = (times[STEPS:] for times in seconds.values())  # without the first epoch: it warms up
    # The quicker quarter of the steps is the part that other processes disturb least.
    own_seconds, peer_seconds = (statistics.quantiles(times, n=4)[0] for times in (own, peer))
    return {
        "foxray_seconds": own_seconds,
        "peer_seconds": peer_seconds,
        "ratio": peer_seconds / own_seconds,
    }


def _our_step(world: World, batch_size: int, effective: int, rank: int) -> Callable[[Tensor], None]:
    """A step of the real training loop, with all that it does besides."""
    trainer, _ = build_trainer(world, batch_size=batch_size, effective_batch=effective, rank=rank)
    trainer.model.train()

    def step(samples: Tensor) -> None:
        trainer._optimizer_step(samples)
        trainer.state.cursor = 0

    return step


def _plain_step(world: World, batch_size: int, world_size: int, rank: int) -> Callable[[Tensor], None]:
    """The same with what one would write without foxray."""
    torch.manual_seed(0)
    model = world.build_model()
    wrapped = nn.parallel.DistributedDataParallel(model) if world_size > 1 else model
    wrapped.train()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)

    def step(samples: Tensor) -> None:
        share = rank_share(samples, rank=rank, world_size=world_size)
        optimizer.zero_grad()
        total = 0.0
        for piece in share.split(batch_size):
            loss = world.loss_sum(wrapped, piece) / len(share)
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    return step


def _two_workers(batch_size: int, repeats: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("spawn")
        answers = context.SimpleQueue()
        mp.spawn(_worker, (f"file://{folder}/store", batch_size, repeats, answers), nprocs=2)
        found: dict[str, float] = answers.get()
        return found


def _worker(rank: int, store: str, batch_size: int, repeats: int, answers: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    figures = _compare(batch_size, 1, 0.1, repeats, world_size=2, rank=rank)
    if rank == 0:
        answers.put(figures)
    dist.destroy_process_group()


if __name__ == "__main__":
    run()

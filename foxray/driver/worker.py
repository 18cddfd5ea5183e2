"""What Ray Train runs on each worker for `foxray train`: the bridge from Ray to the training loop.

Everything that knows Ray on the worker's side is here: who I am, which GPU I hold, whom I report to. An
error that leaves this function is one of foxray's own picklable types, since Ray drops causes and
tracebacks on the way to the driver.
"""

import os
import socket
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import ray
import torch

from foxray.errors import FoxrayError
from foxray.memory.budget import memory_budget
from foxray.memory.device import gpu_identity
from foxray.oom import Decision, Incident
from foxray.training.authority import PhaseReport
from foxray.training.checkpoint import Checkpoints
from foxray.training.config import TrainConfig
from foxray.training.loop import Trainer, WorkerPlan
from foxray.training.recovery import Place
from foxray.workloads import create_workload


@dataclass(frozen=True, kw_only=True)
class WorkerTask:
    """All that a worker needs, as the driver sends it."""

    config: TrainConfig
    plan: WorkerPlan
    prepared_path: str
    """Prepared data, on storage that every node reaches."""
    checkpoint_folder: str
    device: str
    """"cuda" or "cpu"."""
    budget_bytes: int | None
    """Emulated device memory; None: what the device has."""
    gpu_label: str | None
    """Name of the emulated card."""
    coordinator: Any
    """Handle of the coordinator actor."""


class CoordinatorClient:
    """`Authority` over a handle of the coordinator actor. Only `decide` waits for its answer."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._progress: Any = None
        self._stop = False

    def worker_started(self, **fields: Any) -> None:
        self._handle.worker_started.remote(**fields)

    def phase_started(
        self, *, phase: str, rank: int, batch_size: int, accumulation_steps: int, step: int, batches: int
    ) -> None:
        self._handle.phase_started.remote(
            phase=phase,
            rank=rank,
            batch_size=batch_size,
            accumulation_steps=accumulation_steps,
            step=step,
            batches=batches,
        )

    def decide(self, incident: Incident, *, incident_id: str, step: int) -> Decision:
        answer = self._handle.decide.remote(incident, incident_id=incident_id, step=step)
        decision: Decision = ray.get(answer)
        return decision

    def recovered(self, *, incident_id: str, phase: str, rank: int, recovery_seconds: float) -> None:
        self._handle.recovered.remote(
            incident_id=incident_id, phase=phase, rank=rank, recovery_seconds=recovery_seconds
        )

    def phase_ended(self, report: PhaseReport) -> None:
        ray.get(self._handle.phase_ended.remote(report))

    def epoch_ended(self, *, epoch: int, step: int, metrics: dict[str, float]) -> None:
        self._handle.epoch_ended.remote(epoch=epoch, step=step, metrics=metrics)

    def checkpoint_written(self, *, step: int, epoch: int, path: str) -> None:
        ray.get(self._handle.checkpoint_written.remote(step=step, epoch=epoch, path=path))

    def progress(self, **live: Any) -> bool:
        """Send without waiting; what is returned is the answer to the call before."""
        if self._progress is not None:
            ready, _ = ray.wait([self._progress], timeout=0)
            if ready:
                self._stop |= bool(ray.get(ready[0]))
                self._progress = None
        if self._progress is None:
            self._progress = self._handle.progress.remote(**live)
        return self._stop


def run_worker(loop_config: dict[str, Any]) -> dict[str, float]:
    """`train_loop_per_worker` of `foxray train`; the metrics of the last epoch."""
    task: WorkerTask = loop_config["task"]
    rank = ray.train.get_context().get_world_rank()
    device = torch.device(task.device)
    if device.type == "cuda":
        assert_one_gpu()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    authority = CoordinatorClient(task.coordinator)
    gpu, gpu_uuid = gpu_identity(device)
    gpu = task.gpu_label or gpu
    authority.worker_started(
        rank=rank, node=socket.gethostname(), gpu=gpu, gpu_uuid=gpu_uuid, pid=os.getpid()
    )
    with ExitStack() as stack:
        if task.budget_bytes is not None:
            stack.enter_context(memory_budget(task.budget_bytes, device=task.device, label=task.gpu_label))
        workload = create_workload(task.config, task.prepared_path)
        trainer = Trainer(
            config=task.config,
            plan=task.plan,
            workload=workload,
            device=device,
            place=Place(rank=rank, node=socket.gethostname(), gpu=gpu, launch=task.plan.launch),
            authority=authority,
            checkpoints=Checkpoints(
                task.checkpoint_folder, spec=workload.spec() | {"quantized": task.config.use_qat}
            ),
        )
        return trainer.train()


def assert_one_gpu() -> None:
    """Fail unless this process sees exactly the one GPU that Ray assigned to it."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if len([entry for entry in visible.split(",") if entry]) != 1:
        raise FoxrayError(
            f"a worker must see exactly one GPU, but CUDA_VISIBLE_DEVICES is {visible!r}: "
            "leave TRAIN_ENABLE_SHARE_CUDA_VISIBLE_DEVICES unset or 0"
        )

"""The Ray cluster that a run uses: joined where there is one, started on this machine otherwise.

Also the settings that Ray reads from the environment of its own processes. They are put into the job's
runtime environment, since the driver's own environment does not reach controller and workers.
"""

import os
from dataclasses import dataclass
from typing import Any

# Without this Ray replaces a loopback address by the machine's own, and listens on all interfaces. It is
# read when Ray is imported, and has to agree with the cluster that is joined.
if not os.environ.get("RAY_ADDRESS"):
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")

import ray

from foxray.errors import UserError

# Poll often, since a failure is noticed by polling; no preemption watcher, since the driver itself owns
# the budget for lost nodes; notice a hung worker after one minute instead of ten.
RAY_ENVIRONMENT = {
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": "60",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "TRAIN_ENABLE_SHARE_CUDA_VISIBLE_DEVICES": "0",
    "TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S": "5",
}

MAX_CPUS_PER_WORKER = 8


@dataclass(frozen=True, kw_only=True)
class ClusterSize:
    """What the cluster has in total."""

    cpus: int
    gpus: int


def connect(*, verbose: bool = False) -> ClusterSize:
    """Join the cluster named by RAY_ADDRESS (set inside `ray job submit`), else start a local one.

    A local one listens on loopback only, and ends with this process. An address file left behind by a dead
    cluster is not looked at.
    """
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not ray.is_initialized():
        address = os.environ.get("RAY_ADDRESS") or "local"
        options: dict[str, Any] = {"address": address, "log_to_driver": verbose}
        if address == "local":
            options["_node_ip_address"] = "127.0.0.1"
        if not verbose:
            options["logging_level"] = "ERROR"
        ray.init(runtime_env={"env_vars": {k: os.environ[k] for k in RAY_ENVIRONMENT}}, **options)
    resources = ray.cluster_resources()
    return ClusterSize(cpus=int(resources.get("CPU", 0)), gpus=int(resources.get("GPU", 0)))


def choose_device(requested: str, size: ClusterSize, *, emulated: bool) -> str:
    """ "cuda" or "cpu" for `--device`; an emulated GPU always runs on the CPU.

    Raises UserError for `--device cuda` on a cluster without GPUs.
    """
    if requested == "cuda" and emulated:
        raise UserError(
            "--device cuda with --emulate-gpu: an emulated GPU runs on the CPU; leave one of them out"
        )
    if requested == "cuda" and size.gpus == 0:
        raise UserError(
            f"--device cuda: the cluster has no GPU (it has {size.cpus} CPUs); "
            "use --device cpu, or --emulate-gpu NAME to rehearse a card"
        )
    if requested == "auto":
        return "cuda" if size.gpus and not emulated else "cpu"
    return requested


def resources_per_worker(workers: int, device: str, size: ClusterSize) -> dict[str, float]:
    """One GPU for each worker, and an equal part of the CPUs.

    Raises UserError when the cluster cannot hold that many workers.
    """
    unit, have = ("GPU", size.gpus) if device == "cuda" else ("CPU", size.cpus)
    if workers > have:
        raise UserError(
            f"--workers {workers}: each needs one {unit}, and the cluster has {have} {unit}s "
            f"({size.cpus} CPUs, {size.gpus} GPUs); use --workers {max(have, 1)} or fewer"
        )
    cpus = max(1, min(MAX_CPUS_PER_WORKER, size.cpus // workers))
    return {"CPU": float(cpus)} | ({"GPU": 1.0} if device == "cuda" else {})

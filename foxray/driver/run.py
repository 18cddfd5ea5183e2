"""`foxray train` from its configuration to its outcome.

What can be wrong with the input is found before Ray starts and before anything is written; then one
execution is entered into the ledger, launched until it succeeds or ends otherwise, and closed with exactly
one outcome.
"""

import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

from foxray import __version__
from foxray.data.prepare import prepare
from foxray.data.prepared import PreparedData
from foxray.driver.coordinator import Coordinator, Message, View
from foxray.driver.resume import Resume, find_resume
from foxray.errors import MemoryExhausted, UserError
from foxray.ledger import events as ev
from foxray.ledger.store import Ledger, RunLedger
from foxray.memory.catalogue import parse_gpu_or_bytes
from foxray.oom import texts
from foxray.training.authority import Cancelled
from foxray.training.config import TrainConfig, default_batch_size

Worker = Callable[[dict[str, Any]], Any]
"""`train_loop_per_worker`, as Ray calls it."""


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How an execution ended well."""

    run_id: str
    metrics: dict[str, float]
    """Of the last epoch."""


@dataclass(kw_only=True)
class Execution:
    """One launch or resume of a run, from its first ledger event to its last."""

    config: TrainConfig
    run: RunLedger
    run_id: str
    number: int
    resume: Resume
    started: float = field(default_factory=time.monotonic)

    def write(self, kind: type[ev.Event], **fields: Any) -> None:
        """Append an event of this execution."""
        self.run.append(kind(run_id=self.run_id, execution=self.number, **fields))


def run_training(
    config: TrainConfig,
    *,
    run_id: str | None = None,
    resume: str | None = None,
    on_view: Callable[[View], None],
    verbose: bool = False,
    worker: Worker | None = None,
) -> RunResult:
    """Train, surviving out-of-memory; every number of it is in the ledger afterwards.

    `worker` replaces what each worker runs (`foxray.driver.worker.run_worker`), which is how tests
    provoke the failures that only a real worker group can have.

    Raises UserError (nothing written), MemoryExhausted, Cancelled, or FoxrayError.
    """
    # Actors have a working directory of their own: a relative path would mean another place to them.
    parquet_file = config.parquet_file.expanduser().absolute()
    config = config.model_copy(
        update={"storage": absolute_storage(config.storage), "parquet_file": parquet_file}
    )
    budget = parse_gpu_or_bytes(config.emulate_gpu) if config.emulate_gpu else None
    ledger = Ledger(config.storage)
    _check_run_id(ledger, run_id=run_id, resume=resume)
    data = prepare(
        config.parquet_file,
        config.data_settings,
        prepared_folder(config.storage),
        log=lambda line: on_view(View(messages=[Message(level="info", text=line)])),
    )
    config = _with_batch_size(config, data)

    from foxray.driver import cluster  # imports ray, which takes seconds: only for input that is right

    size = cluster.connect(verbose=verbose)
    device = cluster.choose_device(config.device, size, emulated=budget is not None)
    resources = cluster.resources_per_worker(config.workers, device, size)

    execution = _enter(ledger, config, data, run_id=run_id, resume=resume)
    gpu = budget[0] if budget else ("cpu" if device == "cpu" else "cuda")
    execution.write(
        ev.ExecutionStarted,
        workers=config.workers,
        device=device,
        gpu=gpu,
        host=socket.gethostname(),
        pid=os.getpid(),
        resumed=resume is not None,
    )
    with _stop_on_signals() as stop:
        return _execute(execution, data, budget, device, resources, on_view, stop, worker)


def _execute(
    execution: Execution,
    data: PreparedData,
    budget: tuple[str, int] | None,
    device: str,
    resources: dict[str, float],
    on_view: Callable[[View], None],
    stop: threading.Event,
    worker: Worker | None,
) -> RunResult:
    import ray

    from foxray.driver.launch import Launches

    config = execution.config
    coordinator = (
        ray.remote(Coordinator)
        .options(num_cpus=0, max_concurrency=8)
        .remote(
            storage=config.storage,
            run_id=execution.run_id,
            execution=execution.number,
            workers=config.workers,
            policy=config.oom_policy,
            phase_policies={phase: config.phase_policy(phase) for phase in config.phases},
            on_cpu=device == "cpu" and budget is None,
            batch_sizes=execution.resume.batch_sizes or dict.fromkeys(config.phases, config.batch_size),
            rungs=execution.resume.rungs,
        )
    )
    launches = Launches(
        coordinator=coordinator,
        execution=execution.number,
        max_worker_failures=config.max_worker_failures,
        on_view=on_view,
        stop=stop,
    )
    fit = _fit_with_ray(execution, data, budget, device, resources, coordinator, worker)
    outcome, message = "failed", ""
    try:
        metrics = launches.run(fit)
        outcome = "success"
        seconds = time.monotonic() - execution.started
        total = Message(level="info", text=texts.total_time(seconds), fields={"seconds": seconds})
        on_view(View(messages=[total]))
        return RunResult(run_id=execution.run_id, metrics=metrics)
    except MemoryExhausted as error:
        outcome, message = "oom", str(error)
        raise
    except (Cancelled, KeyboardInterrupt) as error:
        outcome, message = "cancelled", str(error)
        raise Cancelled(str(error)) from None
    except Exception as error:
        message = str(error)
        raise
    finally:
        _close(execution, coordinator, outcome, message, on_view)


def _fit_with_ray(
    execution: Execution,
    data: PreparedData,
    budget: tuple[str, int] | None,
    device: str,
    resources: dict[str, float],
    coordinator: Any,
    worker: Worker | None,
) -> Callable[[str, dict[str, int], tuple[str, ...]], Any]:
    """How one worker group is run: a `fit()` of Ray's TorchTrainer around the training loop."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from foxray.driver.launch import PinnedTorchConfig
    from foxray.driver.worker import WorkerTask, run_worker
    from foxray.training.loop import WorkerPlan

    config = execution.config

    def fit(launch: str, batch_sizes: dict[str, int], rungs: tuple[str, ...]) -> dict[str, float]:
        off_gpu = "cpu" in rungs and device == "cuda"
        task = WorkerTask(
            config=config,
            plan=WorkerPlan(
                launch=launch,
                effective_batch=execution.resume.effective_batch
                or (config.batch_size or 1) * config.accumulation_steps * config.workers,
                batch_sizes=batch_sizes,
                rungs=rungs,
            ),
            prepared_path=str(data.path),
            checkpoint_folder=checkpoint_folder(config.storage, execution.run_id),
            device="cpu" if off_gpu else device,
            budget_bytes=budget[1] if budget else None,
            gpu_label=budget[0] if budget else None,
            coordinator=coordinator,
        )
        trainer = TorchTrainer(
            worker or run_worker,
            train_loop_config={"task": task},
            torch_config=PinnedTorchConfig(),
            scaling_config=ScalingConfig(
                num_workers=config.workers,
                use_gpu=device == "cuda" and not off_gpu,
                resources_per_worker={"CPU": resources["CPU"]} if off_gpu else resources,
            ),
            run_config=RunConfig(
                name=f"{execution.run_id}-{launch}",
                storage_path=_ray_folder(config.storage, execution.run_id),
                failure_config=FailureConfig(max_failures=0),
            ),
        )
        metrics: dict[str, float] = trainer.fit().return_value
        return metrics

    return fit


def _close(
    execution: Execution, coordinator: Any, outcome: str, message: str, on_view: Callable[[View], None]
) -> None:
    """Write the one outcome of the execution."""
    import ray

    try:
        retries, final = ray.get(
            [coordinator.retries.remote(), coordinator.smallest_batch_size.remote("training")], timeout=10
        )
    except ray.exceptions.RayError as error:
        # The coordinator is gone. The outcome still has to be on record; its numbers are in the ledger.
        retries, final, message = 0, None, f"{message} (coordinator: {type(error).__name__})".strip()
    try:
        execution.write(
            ev.ExecutionEnded,
            outcome=outcome,
            final_batch_size=final,
            oom_retries=retries,
            duration_seconds=time.monotonic() - execution.started,
            message=message,
        )
    except UserError as error:
        # Reported beside the error that ended the run, which must not be hidden by this one.
        on_view(View(messages=[Message(level="error", text=f"⚠️  outcome not recorded: {error}")]))


# -- before the first worker -----------------------------------------------------------------------


def absolute_storage(storage: str) -> str:
    """A storage path that means the same in every process; a URI does already."""
    return storage if "://" in storage else str(Path(storage).expanduser().absolute())


def prepared_folder(storage: str) -> Path:
    """Where prepared data are cached: beside the runs, or in the user's cache for a remote storage."""
    if "://" in storage:
        return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "foxray" / "prepared"
    return Path(absolute_storage(storage)) / "prepared"


def checkpoint_folder(storage: str, run_id: str) -> str:
    """Where the checkpoints of a run are."""
    return f"{absolute_storage(storage)}/runs/{run_id}/checkpoints"


def _ray_folder(storage: str, run_id: str) -> str:
    return f"{absolute_storage(storage)}/runs/{run_id}/ray"


def new_run_id(model: str) -> str:
    """A readable id that sorts by time: model, UTC second, four random digits."""
    return f"{model}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:4]}"


def _check_run_id(ledger: Ledger, *, run_id: str | None, resume: str | None) -> None:
    if run_id is not None and resume is not None:
        raise UserError("--run-id with --resume: --resume already names the run; leave --run-id out")
    if run_id is not None and ledger.exists(run_id):
        raise UserError(
            f"--run-id {run_id}: this run exists; use --resume {run_id} to continue it, or another name"
        )


def _with_batch_size(config: TrainConfig, data: PreparedData) -> TrainConfig:
    batch_size = config.batch_size or default_batch_size(data.duration_days)
    windows = len(data.train_windows_N)
    if config.batch_size is not None and batch_size > windows:
        raise UserError(
            f"--batch-size {batch_size}: above the dataset, which has {windows} training windows "
            f"in {config.parquet_file}; use 1 to {windows}"
        )
    return config.model_copy(update={"batch_size": min(batch_size, windows)})


def _enter(
    ledger: Ledger, config: TrainConfig, data: PreparedData, *, run_id: str | None, resume: str | None
) -> Execution:
    if resume is not None:
        run = ledger.run(resume)
        found = find_resume(run, config)
        return Execution(config=config, run=run, run_id=resume, number=found.execution, resume=found)
    name = run_id or new_run_id(config.model)
    run = ledger.create(name)
    execution = Execution(config=config, run=run, run_id=name, number=1, resume=Resume(execution=1))
    run.append(
        ev.RunCreated(
            run_id=name,
            execution=0,
            model=config.model,
            config=config.to_plain(),
            foxray_version=__version__,
            dataset={
                "file": str(config.parquet_file),
                "rows": data.num_rows,
                "duration_days": data.duration_days,
                "training_windows": len(data.train_windows_N),
                "validation_windows": len(data.valid_windows_N),
                "key": data.key,
            },
        )
    )
    return execution


@contextmanager
def _stop_on_signals() -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set; a second SIGINT ends at once."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def on_signal(signum: int, frame: FrameType | None) -> None:
        if stop.is_set() and signum == signal.SIGINT:
            raise KeyboardInterrupt
        stop.set()

    before = {s: signal.signal(s, on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)

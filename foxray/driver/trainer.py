"""`foxray.TorchTrainer`: Ray's TorchTrainer with one more argument.

The loop stays the user's. It reads `config["batch_size"]`, and `config["accumulation_steps"]` to keep the
effective batch, and continues from `ray.train.get_checkpoint()`. When a worker runs out of memory the
whole group is started anew with half the batch: a loop that is not ours cannot be resumed in the middle.
The run is kept in the same ledger as those of `foxray train`, under the storage path of the RunConfig.
"""

import functools
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray.train.torch import TorchTrainer as RayTorchTrainer

from foxray import __version__
from foxray.driver.cluster import connect
from foxray.driver.coordinator import Coordinator, View
from foxray.driver.launch import Launches, PinnedTorchConfig
from foxray.driver.run import absolute_storage
from foxray.driver.worker import CoordinatorClient, assert_one_gpu
from foxray.errors import MemoryExhausted, UserError
from foxray.ledger import events as ev
from foxray.ledger.store import Ledger
from foxray.oom import OomPolicy, classify
from foxray.training.authority import Cancelled, Rescheduled

PHASE = "training"


class TorchTrainer(RayTorchTrainer):  # type: ignore[misc]
    """Drop-in for `ray.train.torch.TorchTrainer` that survives out-of-memory.

    Args:
        train_loop_per_worker: the user's loop, called with the configuration on each worker.
        oom_policy: what to do about a memory failure; the default is `OomPolicy()`.
        max_worker_failures: fresh starts for workers lost without a memory failure. Ray's own
            `FailureConfig(max_failures=...)` has to stay 0, so that there is one retry authority.
        **ray_arguments: all others of Ray's TorchTrainer, unchanged. `train_loop_config` must hold
            `batch_size` (samples in one forward and backward on one worker).

    Raises:
        UserError: `batch_size` is missing, or Ray is asked to retry on its own.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        oom_policy: OomPolicy | None = None,
        max_worker_failures: int = 3,
        **ray_arguments: Any,
    ) -> None:
        loop_config = ray_arguments.get("train_loop_config") or {}
        if not isinstance(loop_config.get("batch_size"), int) or loop_config["batch_size"] < 1:
            raise UserError(
                f"train_loop_config['batch_size'] is {loop_config.get('batch_size')!r}: foxray needs "
                "the batch size of one worker, a whole number from 1, to have something to halve"
            )
        ray_arguments.setdefault("torch_config", PinnedTorchConfig())
        super().__init__(train_loop_per_worker, **ray_arguments)
        self._policy = oom_policy or OomPolicy()
        self._max_worker_failures = max_worker_failures
        self._ray_arguments = ray_arguments
        failure_config = self.run_config.failure_config
        if failure_config and failure_config.max_failures:
            raise UserError(
                f"FailureConfig(max_failures={failure_config.max_failures}): foxray decides about "
                "retries; leave it 0 and give TorchTrainer(max_worker_failures=...) for lost workers"
            )

    def fit(self) -> Any:
        """Train to the end, rescheduling after memory failures; Ray's Result.

        Raises:
            MemoryExhausted: everything that the policy allows has been tried.
            FoxrayError: anything that is not retried.
        """
        connect()
        started = time.monotonic()
        storage = absolute_storage(str(self.run_config.storage_path or Path.home() / "ray_results"))
        run, number = self._enter(storage)
        coordinator = self._coordinator(storage, number)
        launches = Launches(
            coordinator=coordinator,
            execution=number,
            max_worker_failures=self._max_worker_failures,
            on_view=_print_messages,
            stop=threading.Event(),
        )
        outcome, message = "failed", ""
        try:
            result = launches.run(functools.partial(self._fit_once, coordinator))
            outcome = "success"
            return result
        except MemoryExhausted as error:
            outcome, message = "oom", str(error)
            raise
        except (Cancelled, KeyboardInterrupt) as error:
            outcome, message = "cancelled", str(error)
            raise
        except Exception as error:
            message = str(error)
            raise
        finally:
            retries, final = ray.get(
                [coordinator.retries.remote(), coordinator.smallest_batch_size.remote(PHASE)]
            )
            run.append(
                ev.ExecutionEnded(
                    run_id=run.run_id,
                    execution=number,
                    outcome=outcome,
                    final_batch_size=final,
                    oom_retries=retries,
                    duration_seconds=time.monotonic() - started,
                    message=message,
                )
            )
            ray.kill(coordinator)

    def _fit_once(
        self, coordinator: Any, launch: str, batch_sizes: dict[str, int], rungs: tuple[str, ...]
    ) -> Any:
        first = dict(self.train_loop_config or {})
        batch_size = batch_sizes[PHASE]
        accumulation = int(first.get("accumulation_steps", 1))
        if self._policy.keep_effective_batch:
            accumulation = -(-int(first["batch_size"]) * accumulation // batch_size)
        config = first | {"batch_size": batch_size, "accumulation_steps": accumulation}
        loop = _reporting_loop(self.train_loop_per_worker, coordinator, launch, self.scaling_config.use_gpu)
        arguments = self._ray_arguments | {"train_loop_config": config, "run_config": self.run_config}
        return RayTorchTrainer(loop, **arguments).fit()

    def _enter(self, storage: str) -> tuple[Any, int]:
        """Open or create the run in the ledger and begin an execution of it."""
        name = self.run_config.name
        ledger = Ledger(storage)
        model = getattr(self.train_loop_per_worker, "__name__", "user")
        if ledger.exists(name):
            run = ledger.run(name)
            number = 1 + max((event.execution for event in run.events()), default=0)
        else:
            run, number = ledger.create(name), 1
            config = {
                k: v for k, v in (self.train_loop_config or {}).items() if isinstance(v, str | int | float)
            }
            run.append(
                ev.RunCreated(
                    run_id=name,
                    execution=0,
                    model=model,
                    config=config,
                    foxray_version=__version__,
                    dataset=None,
                )
            )
        use_gpu = bool(self.scaling_config.use_gpu)
        run.append(
            ev.ExecutionStarted(
                run_id=name,
                execution=number,
                workers=int(self.scaling_config.num_workers),
                device="cuda" if use_gpu else "cpu",
                gpu="cuda" if use_gpu else "cpu",
                host=socket.gethostname(),
                pid=os.getpid(),
                resumed=number > 1,
            )
        )
        return run, number

    def _coordinator(self, storage: str, number: int) -> Any:
        actor = ray.remote(Coordinator).options(num_cpus=0, max_concurrency=8)
        return actor.remote(
            storage=storage,
            run_id=self.run_config.name,
            execution=number,
            workers=int(self.scaling_config.num_workers),
            policy=self._policy,
            on_cpu=not self.scaling_config.use_gpu,
            batch_sizes={PHASE: int((self.train_loop_config or {})["batch_size"])},
        )


def _reporting_loop(
    user_loop: Callable[..., Any], coordinator: Any, launch: str, use_gpu: bool
) -> Callable[[dict[str, Any]], Any]:
    """The user's loop, with its memory failures classified where they happen: Ray loses causes on the
    way to the driver."""

    def loop(config: dict[str, Any]) -> Any:
        if use_gpu:
            assert_one_gpu()
        rank = ray.train.get_context().get_world_rank()
        client = CoordinatorClient(coordinator)
        client.phase_started(
            phase=PHASE,
            rank=rank,
            batch_size=config["batch_size"],
            accumulation_steps=config["accumulation_steps"],
            step=0,
            batches=0,
        )
        try:
            return user_loop(config)
        except Exception as error:
            incident = classify(error)
            if incident is None:
                raise
            incident = replace(
                incident,
                phase=PHASE,
                rank=rank,
                node=socket.gethostname(),
                batch_size=config["batch_size"],
                fresh_reason=incident.fresh_reason or "a loop that is not foxray's starts anew",
            )
        decision = client.decide(incident, incident_id=f"{launch}-{PHASE}-r{rank}-1", step=0)
        if decision.action == "give_up":
            raise MemoryExhausted(decision.text)
        raise Rescheduled(decision.reason)

    return loop


def _print_messages(view: View) -> None:
    for message in view.messages:
        print(message.text, flush=True)

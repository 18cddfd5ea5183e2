"""Launches of a worker group until the run is done: the part that `foxray train` and the drop-in
`TorchTrainer` share.

Ray's own `max_failures` stays 0. A launch that fails is sorted by cause; what ran out of memory is decided
by the coordinator, what was lost without a memory failure comes out of a budget of its own, and a plain
bug ends the run at once.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray.train.torch import TorchConfig

from foxray.driver.coordinator import View
from foxray.driver.failures import Failures, sort_failures
from foxray.errors import FoxrayError, MemoryExhausted
from foxray.oom import impossible_request
from foxray.training.authority import Cancelled

POLL_SECONDS = 0.2

Fit = Callable[[str, dict[str, int], tuple[str, ...]], Any]
"""Runs one worker group to its end: (launch name, batch sizes by phase, rungs) -> result."""


class PinnedTorchConfig(TorchConfig):  # type: ignore[misc]
    """Torch's process group with one visible GPU for each worker, instead of all GPUs of its node."""

    @property
    def backend_cls(self) -> type[Any]:
        """Torch's backend, with the sharing of CUDA_VISIBLE_DEVICES between workers off."""
        parent = TorchConfig.backend_cls.fget(self)
        return type("PinnedTorchBackend", (parent,), {"share_cuda_visible_devices": False})


@dataclass(kw_only=True)
class Launches:
    """Starts worker groups one after the other for one execution of a run."""

    coordinator: Any
    """Handle of the coordinator actor."""
    execution: int
    max_worker_failures: int
    on_view: Callable[[View], None]
    """Shows what the coordinator has to say; called a few times a second."""
    stop: threading.Event
    """Set by whoever wants the run to end early."""
    stop_grace_seconds: float = 30.0
    lost_so_far: int = 0

    def run(self, fit: Fit) -> Any:
        """Launch until success; what `fit` returned.

        Raises MemoryExhausted, Cancelled, or FoxrayError for anything that is not retried.
        """
        number = 0
        while True:
            number += 1
            sizes, rungs = ray.get(self.coordinator.next_launch.remote())
            launch = f"e{self.execution}l{number}"
            try:
                return self._watch(partial(fit, launch, sizes, rungs))
            except (KeyboardInterrupt, Cancelled):
                raise
            except Exception as error:  # noqa: BLE001 - sorted by cause, and raised unless retried
                self._judge(sort_failures(error), error, launch)

    def _watch(self, work: Callable[[], Any]) -> Any:
        """Run `work` on a thread of its own, so that this one can show progress and take signals."""
        outcome: dict[str, Any] = {}

        def target() -> None:
            try:
                outcome["result"] = work()
            except BaseException as error:  # noqa: BLE001 - handed to the waiting thread, which raises it
                outcome["error"] = error

        thread = threading.Thread(target=target, daemon=True)
        thread.start()
        waited_after_stop = 0.0
        while thread.is_alive():
            thread.join(POLL_SECONDS)
            self.show()
            if self.stop.is_set():
                if waited_after_stop == 0.0:
                    ray.get(self.coordinator.request_stop.remote())
                waited_after_stop += POLL_SECONDS
                if waited_after_stop > self.stop_grace_seconds:
                    raise Cancelled("stopped without waiting any longer for the workers")
        self.show()
        if "error" in outcome:
            raise outcome["error"]
        return outcome["result"]

    def show(self) -> None:
        """Show what the coordinator has to say now."""
        try:
            view = ray.get(self.coordinator.poll.remote())
        except ray.exceptions.ActorUnavailableError:
            return  # it did not answer in time, on a busy machine; the next poll asks again
        except ray.exceptions.RayActorError as error:
            reason = str(error).strip().splitlines()[-1]
            raise FoxrayError(
                f"the coordinator's process is gone ({reason}); the ledger and the checkpoints are not: "
                "continue with `foxray train --resume RUN`"
            ) from error
        self.on_view(view)
        if view.broken is not None:
            raise FoxrayError(view.broken)

    def _judge(self, failures: Failures, error: Exception, launch: str) -> None:
        """Return when the run goes on with fresh workers; raise otherwise."""
        if failures.exhausted is not None:
            raise failures.exhausted
        if failures.cancelled or self.stop.is_set():
            raise Cancelled("stopped on request")
        if failures.other and not failures.rescheduled:
            rank, cause = next(iter(failures.other.items()))
            if isinstance(cause, FoxrayError):
                raise cause
            if (request := impossible_request(cause)) is not None:
                raise FoxrayError(
                    f"rank {rank} asked for memory that no device has ({request}): a corrupted size or an "
                    "overflow, which no smaller batch cures; check the model's sizes and the data"
                ) from error
            # The last line of what Ray made of it is the error itself; `--verbose` shows the rest.
            last_line = (str(cause).strip().splitlines() or [""])[-1]
            raise FoxrayError(f"rank {rank} failed: {type(cause).__name__}: {last_line}") from error
        self._decide_incidents(failures, launch)
        if failures.lost or (failures.collateral and not failures.rescheduled and not failures.incidents):
            self._spend_worker_failure(failures)
        self.show()

    def _decide_incidents(self, failures: Failures, launch: str) -> None:
        for rank, incident in failures.incidents.items():
            decision = ray.get(
                self.coordinator.decide_for.remote(rank, incident, incident_id=f"{launch}-driver-r{rank}")
            )
            if decision.action == "give_up":
                raise MemoryExhausted(decision.text)

    def _spend_worker_failure(self, failures: Failures) -> None:
        self.lost_so_far += 1
        restart = self.lost_so_far <= self.max_worker_failures
        ranks = sorted(failures.lost) or failures.collateral
        reason = "; ".join(sorted(set(failures.lost.values()))) or "broken collective"
        ray.get(self.coordinator.workers_lost.remote(ranks=ranks, reason=reason, restart=restart))
        if not restart:
            raise FoxrayError(
                f"workers were lost {self.lost_so_far} times ({reason}); "
                f"max_worker_failures is {self.max_worker_failures}"
            )

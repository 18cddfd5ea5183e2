"""Two ranks over gloo on loopback, without Ray: processes that live for a test module and take jobs.

Starting Python and torch costs seconds, so the processes stay; each job gets a process group of its own. A
watchdog waits for the answers: a rank that is stuck is killed and fails the test.
"""

import os
import queue
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


class Stuck(AssertionError):
    """A rank did not answer in time."""


class GlooPair:
    """`pair.run(job, *arguments)` calls the module-level function `job(rank, *arguments)` on both ranks."""

    def __init__(self, ranks: int = 2) -> None:
        self._ranks = ranks
        self._processes: list[Any] = []

    def run(self, job: Callable[..., Any], *arguments: Any, timeout_seconds: float = 60.0) -> list[Any]:
        """The answers by rank; an exception of a rank is its answer. Raises Stuck."""
        if not self._processes:
            self._start()
        folder = tempfile.mkdtemp()
        for tasks in self._tasks:
            tasks.put((job, arguments, f"file://{folder}/store"))
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_seconds
        while len(answers) < self._ranks:
            try:
                rank, answer = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                missing = sorted(set(range(self._ranks)) - set(answers))
                self.close()
                raise Stuck(f"ranks {missing} are stuck in {job.__name__}{arguments}") from None
            answers[rank] = answer
        return [answers[rank] for rank in range(self._ranks)]

    def _start(self) -> None:
        context = mp.get_context("spawn")
        self._answers = context.Queue()
        self._tasks = [context.Queue() for _ in range(self._ranks)]
        for rank, tasks in enumerate(self._tasks):
            process = context.Process(
                target=_serve, args=(rank, self._ranks, tasks, self._answers), daemon=True
            )
            process.start()
            self._processes.append(process)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes = []


def _serve(rank: int, ranks: int, tasks: Any, answers: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    while True:
        job, arguments, store = tasks.get()
        dist.init_process_group(
            "gloo", init_method=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=600)
        )
        dist.barrier()  # a rank that is done at once must not leave while its peer still connects
        try:
            answer = job(rank, *arguments)
        except Exception as error:  # noqa: BLE001 - travels to the test
            error.add_note(traceback.format_exc())
            answer = error
        # A rank that left early must not keep its peer waiting: its connections end with the group.
        dist.destroy_process_group()
        answers.put((rank, answer))
        Path(store.removeprefix("file://")).unlink(missing_ok=True)

"""Work over samples in micro-batches, surviving out-of-memory: the loop that every phase shares.

`Recovery.run(samples, work)` gives `work` pieces of at most `batch_size` samples. `work` is all or
nothing: it either commits its piece at its very end or leaves nothing behind. When it runs out of memory,
the handler first leaves the `except` block (inside it the traceback keeps the tensors alive), frees what
can be freed, compares live memory with the baseline, and only then asks the authority. Only the piece
that failed is done again.

A failed forward can leave a graph behind that neither leaving the block nor the garbage collector
releases; a backward pass through anything does, hence the scalar kept ready for it.
"""

import gc
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from foxray.errors import MemoryExhausted
from foxray.memory.device import DeviceMemory
from foxray.oom import Decision, Incident, classify
from foxray.training.authority import Authority, Rescheduled

# Live memory may end this much above the baseline after an OOM without being called a leak: lazily
# created workspaces and the loss history are small, a kept activation is not.
BASELINE_SLACK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a rank runs; copied into its incidents."""

    rank: int
    node: str
    gpu: str
    launch: str
    """Names this start of the worker group, so that incident ids of two starts differ."""


class Recovery:
    """One rank's recovery in one phase: its batch size, its baseline, its questions to the authority."""

    def __init__(
        self,
        *,
        phase: str,
        batch_size: int,
        place: Place,
        memory: DeviceMemory,
        authority: Authority,
        device: torch.device,
        enter_rung: Callable[[str], None],
    ) -> None:
        """`enter_rung` changes the run to a rung of `on_exhausted` before the retry."""
        self.phase = phase
        self.batch_size = batch_size
        self.step = 0
        self._place = place
        self._memory = memory
        self._authority = authority
        self._enter_rung = enter_rung
        self._incidents = 0
        self._flush_leaf = torch.zeros((), device=device, requires_grad=True)
        self._flush_leaf.grad = torch.zeros((), device=device)
        self.baseline_bytes: int | None = None

    def take_baseline(self) -> None:
        """Note the live memory of a clean moment (between two optimizer steps)."""
        self.baseline_bytes = self._memory.live_bytes

    def run(self, samples_N: Tensor, work: Callable[[Tensor], None]) -> None:
        """Give `work` all of `samples_N` in order, in pieces of at most the current batch size.

        Raises MemoryExhausted when the authority gives up, Rescheduled when it wants fresh workers.
        """
        cursor = 0
        while cursor < len(samples_N):
            piece = samples_N[cursor : cursor + self.batch_size]
            if self._survives(partial(work, piece)):
                cursor += len(piece)

    def repeat(self, work: Callable[[], None]) -> None:
        """Call `work`, which may be called again at any time, until it does not run out of memory."""
        while not self._survives(work):
            pass

    def _survives(self, work: Callable[[], None]) -> bool:
        incident = self._attempt(work)
        if incident is None:
            return True
        raised = time.perf_counter()
        # Named is the batch size, also where the last piece of a step was shorter: what has to shrink is
        # the size, and a tail of two samples that meets a passing shortage is not "at the minimum".
        self._recover(replace(incident, phase=self.phase, batch_size=self.batch_size), raised)
        return False

    def _attempt(self, work: Callable[[], None]) -> Incident | None:
        try:
            work()
        except Exception as error:
            incident = classify(
                error, free_bytes=self._memory.free_bytes, total_bytes=self._memory.total_bytes
            )
            if incident is None:
                raise
            _clear_frames(error)
            return incident
        return None

    def _recover(self, incident: Incident, raised: float) -> None:
        """Free, compare with the baseline, ask, obey. Called outside of any `except` block."""
        kept_bytes = self.release()
        fresh_reason = incident.fresh_reason
        if fresh_reason is None and kept_bytes > BASELINE_SLACK_BYTES:
            fresh_reason = f"memory not back at baseline: {kept_bytes} bytes are still held"
        incident = replace(
            incident,
            rank=self._place.rank,
            node=self._place.node,
            gpu=self._place.gpu,
            bytes_free=self._memory.free_bytes if incident.bytes_free is None else incident.bytes_free,
            bytes_total=self._memory.total_bytes,
            fresh_reason=fresh_reason,
        )
        self._incidents += 1
        incident_id = f"{self._place.launch}-{self.phase}-r{self._place.rank}-{self._incidents}"
        decision = self._authority.decide(incident, incident_id=incident_id, step=self.step)
        self._obey(decision)
        self._authority.recovered(
            incident_id=incident_id,
            phase=self.phase,
            rank=self._place.rank,
            recovery_seconds=time.perf_counter() - raised,
        )

    def _obey(self, decision: Decision) -> None:
        if decision.action == "give_up":
            raise MemoryExhausted(decision.text)
        if decision.action == "fresh_workers":
            raise Rescheduled(decision.reason)
        self.batch_size = decision.batch_size
        if decision.rung is not None:
            self._enter_rung(decision.rung)

    def release(self) -> int:
        """Free what a failed try left; bytes still live above the baseline (0 where it is unknown)."""
        (self._flush_leaf * 1.0).backward()  # type: ignore[no-untyped-call]
        self._memory.empty_cache()
        if self._kept_bytes() > BASELINE_SLACK_BYTES:
            gc.collect()
            self._memory.empty_cache()
        return self._kept_bytes()

    def _kept_bytes(self) -> int:
        live_bytes = self._memory.live_bytes
        if live_bytes is None or self.baseline_bytes is None:
            return 0
        return max(0, live_bytes - self.baseline_bytes)


def _clear_frames(error: BaseException) -> None:
    """Drop the local variables of all finished frames that the error and its causes hold."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        traceback.clear_frames(current.__traceback__)
        pending += [current.__cause__, current.__context__]

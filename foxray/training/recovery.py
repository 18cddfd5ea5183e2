"""Work over samples in micro-batches, surviving out-of-memory: the loop that every phase shares.

`Recovery.run(count, work)` gives `work` pieces of at most `batch_size` samples. `work` is all or
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

from foxray.errors import MemoryExhausted
from foxray.memory.device import DeviceMemory
from foxray.oom import Decision, Incident, classify, context_lost
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
        block_size: int | None = None,
    ) -> None:
        """`enter_rung` changes the run to a rung of `on_exhausted` before the retry.

        With `block_size`, pieces have this size whatever the batch size is (at most the batch size), so that
        sums are taken in the same order before and after an OOM.
        """
        self.phase = phase
        self.batch_size = batch_size
        self.step = 0
        self.context_lost = False
        """Whether the device can no longer be used from this process."""
        self._place = place
        self._memory = memory
        self._authority = authority
        self._enter_rung = enter_rung
        self._block_size = block_size
        self._incidents = 0
        # A backward pass through a graph that is kept: it allocates nothing, so it cannot run out itself.
        leaf = torch.zeros((), device=device, requires_grad=True)
        leaf.grad = torch.zeros((), device=device)
        self._flush_root = leaf.view(())
        self._flush_gradient = torch.zeros((), device=device)
        self.baseline_bytes: int | None = None

    @property
    def piece_size(self) -> int:
        """Samples in the next piece."""
        return self.batch_size if self._block_size is None else min(self._block_size, self.batch_size)

    def take_baseline(self) -> None:
        """Note the live memory of a clean moment (between two optimizer steps)."""
        self.baseline_bytes = self._memory.live_bytes

    def run(self, count: int, work: Callable[[int, int], None]) -> None:
        """Give `work` the samples 0 to `count` in order, as (first, past the last) of each piece.

        Raises MemoryExhausted when the authority gives up, Rescheduled when it wants fresh workers.
        """
        first = 0
        while first < count:
            end = min(first + self.piece_size, count)
            if self._survives(partial(work, first, end)):
                first = end

    def repeat(self, work: Callable[[], None], *, undo: Callable[[], None] | None = None) -> None:
        """Call `work`, which may be called again at any time, until it does not run out of memory.

        `undo` is called after each failure, before memory is compared with the baseline.
        """
        while not self._survives(work, undo=undo):
            pass

    def once(self, work: Callable[[], None], *, broken: str) -> None:
        """Call `work`, which must not be called again: after an OOM in it, only fresh workers can go on.

        `broken` names the damage in the incident.
        """
        self._survives(work, broken=broken)

    def _survives(
        self,
        work: Callable[[], None],
        *,
        broken: str | None = None,
        undo: Callable[[], None] | None = None,
    ) -> bool:
        failure = self._attempt(work)
        if failure is None:
            return True
        if undo is not None and not self.context_lost:
            undo()
        incident, raised = failure
        if broken is not None and incident.fresh_reason is None:
            incident = replace(incident, fresh_reason=broken)
        # Named is the batch size, also where the last piece of a step was shorter: what has to shrink is
        # the size, and a tail of two samples that meets a passing shortage is not "at the minimum".
        self._recover(replace(incident, phase=self.phase, batch_size=self.batch_size), raised)
        return False

    def _attempt(self, work: Callable[[], None]) -> tuple[Incident, float] | None:
        """The memory failure and the time it was raised, or None when `work` was done."""
        try:
            work()
        except Exception as error:
            raised = time.perf_counter()
            self.context_lost = context_lost(error)
            free_bytes, total_bytes = (
                (None, None) if self.context_lost else (self._memory.free_bytes, self._memory.total_bytes)
            )
            incident = classify(error, free_bytes=free_bytes, total_bytes=total_bytes)
            if incident is None:
                raise
            _clear_frames(error)
            return incident, raised
        return None

    def _recover(self, incident: Incident, raised: float) -> None:
        """Free, compare with the baseline, ask, obey. Called outside of any `except` block."""
        if not self.context_lost:
            incident = self._after_freeing(incident)
        incident = replace(incident, rank=self._place.rank, node=self._place.node, gpu=self._place.gpu)
        self._incidents += 1
        incident_id = f"{self._place.launch}-{self.phase}-r{self._place.rank}-{self._incidents}"
        decision = self._authority.decide(incident, incident_id=incident_id, step=self.step)
        self._obey(decision, incident)
        self._authority.recovered(
            incident_id=incident_id,
            phase=self.phase,
            rank=self._place.rank,
            recovery_seconds=time.perf_counter() - raised,
        )

    def _after_freeing(self, incident: Incident) -> Incident:
        kept_bytes = self.release()
        fresh_reason = incident.fresh_reason
        if fresh_reason is None and kept_bytes > BASELINE_SLACK_BYTES:
            fresh_reason = f"memory not back at baseline: {kept_bytes} bytes are still held"
        return replace(
            incident,
            bytes_free=self._memory.free_bytes if incident.bytes_free is None else incident.bytes_free,
            bytes_total=self._memory.total_bytes,
            fresh_reason=fresh_reason,
        )

    def _obey(self, decision: Decision, incident: Incident) -> None:
        if decision.action == "give_up":
            raise MemoryExhausted(decision.text)
        if decision.action == "fresh_workers":
            raise Rescheduled(incident.fresh_reason or decision.reason)
        self.batch_size = decision.batch_size
        if decision.rung is not None:
            self._enter_rung(decision.rung)

    def release(self) -> int:
        """Free what a failed try left; bytes still live above the baseline (0 where it is unknown)."""
        self._flush_root.backward(self._flush_gradient, retain_graph=True)  # type: ignore[no-untyped-call]
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

"""What to do about a memory failure, as a pure function of the attempts so far.

The policy keeps no state: it replays the attempts of the phase and rank that just failed, so the same
history always gives the same answer, in the driver, after the driver's death, or in a test. For each
failure, in this order:

1. not a memory error: give up, it is never retried;
2. at or under the minimum batch size: the next rung of the ladder at the minimum, or give up naming the
   minimum. A size that began under the minimum is not raised to it;
3. recovery switched off (`max_retries=0`, which switches the ladder off as well): give up;
4. retries used up: the next rung, at the minimum batch size, or give up naming the original error;
5. else a smaller batch, never under the minimum.

A rung of `on_exhausted` changes the run instead of the batch size. Each is entered once for a phase and
rank; it counts as a retry granted, but `max_retries` does not limit it. So at most
`max_retries + len(on_exhausted)` retries are ever granted, whatever the history holds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from foxray.oom import texts
from foxray.oom.incident import Incident

RUNGS = ("gradient-checkpointing", "cpu")
"""Names that `on_exhausted` may hold."""

MIN_BATCH_SIZES = (1, 64)
MAX_RETRIES = (0, texts.MOST_RETRIES)

Action = Literal["retry_in_place", "fresh_workers", "give_up"]


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One try of a phase at one batch size that ended."""

    phase: str
    rank: int
    batch_size: int
    incident: Incident | None
    """None: it ended otherwise than by a memory failure."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The answer to the newest attempt."""

    action: Action
    phase: str
    rank: int
    batch_size: int
    """The size to go on with; where given up, the one that failed."""
    retries: int
    """Retries granted so far to this phase and rank, this one included."""
    rung: str | None = None
    """Set when this retry enters a rung of `on_exhausted`."""
    reason: str
    """`shrunk`, `rung`, `at_minimum`, `retries_exhausted`, `recovery_off` or `not_a_memory_error`."""
    text: str = ""
    """For people, where memory failures end in giving up: what happened and what would help."""


def next_batch_size(batch_size: int, minimum: int) -> int:
    """Half of `batch_size`, but not under `minimum`: 64 -> 32; with minimum 4, 6 -> 4."""
    return max(batch_size // 2, minimum)


@dataclass(frozen=True, kw_only=True)
class OomPolicy:
    """How far a run may shrink its batches when memory runs out."""

    min_batch_size: int = 2
    """No retry goes below this; 1 to 64."""
    max_retries: int = 3
    """Retries granted to each phase and rank, 1 to 10; 0 switches recovery off."""
    shrink: Literal["halve"] | Callable[[int, int], int] = "halve"
    """"halve", or a function of the batch size and the minimum. What it gives is held between the minimum
    and one less than the size that failed."""
    keep_effective_batch: bool = True
    """Whether a smaller batch is made up for by as many more micro-batches."""
    on_exhausted: tuple[str, ...] = ()
    """Rungs tried one after the other at the minimum batch size before giving up. "raise" (none) and
    "gradient-checkpointing,cpu" are understood too."""

    def __post_init__(self) -> None:
        _check_range("min_batch_size", self.min_batch_size, *MIN_BATCH_SIZES)
        _check_range("max_retries", self.max_retries, *MAX_RETRIES)
        if self.shrink != "halve" and not callable(self.shrink):
            raise ValueError(f"shrink is {self.shrink!r}; allowed: 'halve' or a function")
        object.__setattr__(self, "on_exhausted", _rungs(self.on_exhausted))

    def decide(
        self,
        history: Sequence[Attempt],
        *,
        on_cpu: bool = False,
        initial_rungs: Sequence[str] = (),
        advice: Sequence[str] = (),
    ) -> Decision:
        """Answer the newest attempt, `history[-1]`.

        `on_cpu`: the work already runs in plain host memory, so that neither the rung nor the hint "cpu"
        would change anything. `initial_rungs`: in force before the first attempt of `history`. `advice`:
        more lines for the failure text.
        """
        failed = history[-1]
        own = [one for one in history if (one.phase, one.rank) == (failed.phase, failed.rank)]
        ladder = [
            rung for rung in self.on_exhausted if rung not in initial_rungs and not (rung == "cpu" and on_cpu)
        ]
        shrunk, entered = 0, list[str]()
        for attempt in own[:-1]:
            step = self._step(attempt, shrunk, [rung for rung in ladder if rung not in entered])
            shrunk += step == "shrunk"
            entered += [step] if step in ladder else []
        step = self._step(failed, shrunk, [rung for rung in ladder if rung not in entered])
        granted = shrunk + len(entered)
        if step == "shrunk":
            return self._retry(failed, self._shrunk(failed.batch_size), granted + 1, rung=None)
        if step in ladder:
            return self._retry(failed, min(failed.batch_size, self.min_batch_size), granted + 1, rung=step)
        tried = [*initial_rungs, *entered]
        return self._give_up(
            failed, step, shrunk, granted, tried, on_cpu=on_cpu or "cpu" in tried, advice=advice
        )

    def _step(self, attempt: Attempt, shrunk: int, ladder: list[str]) -> str:
        """`shrunk`, the name of a rung, or the reason to give up."""
        if attempt.incident is None:
            return "not_a_memory_error"
        # The "cpu" rung moves device memory to the host: no help where the host itself ran out.
        useful = [rung for rung in ladder if rung != "cpu" or attempt.incident.kind == "device"]
        if self.max_retries == 0:
            useful = []
        if attempt.batch_size <= self.min_batch_size:
            return useful[0] if useful else "at_minimum"
        if self.max_retries == 0:
            return "recovery_off"
        if shrunk >= self.max_retries:
            return useful[0] if useful else "retries_exhausted"
        return "shrunk"

    def _shrunk(self, batch_size: int) -> int:
        if callable(self.shrink):
            wanted = self.shrink(batch_size, self.min_batch_size)
            return min(max(wanted, self.min_batch_size), batch_size - 1)
        return next_batch_size(batch_size, self.min_batch_size)

    def _retry(self, failed: Attempt, batch_size: int, retries: int, *, rung: str | None) -> Decision:
        fresh = failed.incident is not None and failed.incident.fresh_reason is not None
        return Decision(
            action="fresh_workers" if fresh else "retry_in_place",
            phase=failed.phase,
            rank=failed.rank,
            batch_size=batch_size,
            retries=retries,
            rung=rung,
            reason="rung" if rung else "shrunk",
        )

    def _give_up(
        self,
        failed: Attempt,
        reason: str,
        shrunk: int,
        granted: int,
        tried: list[str],
        *,
        on_cpu: bool,
        advice: Sequence[str],
    ) -> Decision:
        text = ""
        if failed.incident is not None:
            situation = texts.Situation(
                phase=failed.phase,
                kind=failed.incident.kind,
                batch_size=failed.batch_size,
                min_batch_size=self.min_batch_size,
                retries=shrunk,
                max_retries=self.max_retries,
                on_cpu=on_cpu,
                total_bytes=failed.incident.bytes_total,
                rungs_tried=tuple(tried),
            )
            if reason == "at_minimum":
                text = texts.failure_at_minimum(situation, advice=advice)
            else:
                text = texts.failure_exhausted(
                    situation, original_error=failed.incident.message, advice=advice
                )
        return Decision(
            action="give_up",
            phase=failed.phase,
            rank=failed.rank,
            batch_size=failed.batch_size,
            retries=granted,
            reason=reason,
            text=text,
        )


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        off = " (0 switches recovery off)" if low == 0 else ""
        raise ValueError(f"{name} is {value!r}; allowed: {low} to {high}{off}")


def _rungs(given: str | Sequence[str]) -> tuple[str, ...]:
    names = given.split(",") if isinstance(given, str) else given
    rungs = tuple(dict.fromkeys(name.strip() for name in names))
    rungs = tuple(rung for rung in rungs if rung not in ("", "raise"))
    for rung in rungs:
        if rung not in RUNGS:
            raise ValueError(f"on_exhausted names {rung!r}; allowed: raise, or any of {', '.join(RUNGS)}")
    return rungs

"""How a run is shown: a progress bar on a terminal, plain lines elsewhere, JSON lines for machines."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from foxray.driver.coordinator import View

PLAIN_PROGRESS_EVERY_SECONDS = 10.0


class LogFormat(StrEnum):
    """Values of `--log-format`."""

    AUTO = "auto"
    PLAIN = "plain"
    JSON = "json"


class Console(Protocol):
    """Shows views of a run."""

    def show(self, view: "View") -> None:
        """Show what is new."""


@contextmanager
def open_console(log_format: LogFormat) -> Iterator[Console]:
    """The console for a format; on a terminal, `auto` keeps a progress bar below the lines."""
    if log_format is LogFormat.JSON:
        yield JsonConsole()
    elif log_format is LogFormat.AUTO and sys.stdout.isatty():
        from rich.console import Console as RichConsole
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=RichConsole(highlight=False), transient=True) as progress:
            yield BarConsole(progress)
    else:
        yield PlainConsole()


class JsonConsole:
    """One JSON object a line: `time`, `level`, `message`, and the fields of the message."""

    def __init__(self) -> None:
        self._pace = _Pace()

    def show(self, view: "View") -> None:
        for message in view.messages:
            print_json(message.level, message.text, message.fields)
        if live := self._pace.due(view):
            print_json("info", "progress", live)


def print_json(level: str, text: str, fields: dict[str, Any]) -> None:
    """Print one record of `--log-format json`."""
    record = {"time": datetime.now(UTC).isoformat(), "level": level, "message": text} | fields
    print(json.dumps(record, ensure_ascii=False), flush=True)


class PlainConsole:
    """The lines as they are, and one line of progress now and then."""

    def __init__(self) -> None:
        self._pace = _Pace()

    def show(self, view: "View") -> None:
        for message in view.messages:
            print(message.text, flush=True)
        if live := self._pace.due(view):
            print(f"   epoch {live['epoch'] + 1}/{live['epochs']}  {facts(live)}", flush=True)


class BarConsole:
    """A progress bar over the samples of the epoch; lines scroll above it."""

    def __init__(self, progress: Any) -> None:
        self._progress = progress
        self._task = progress.add_task("starting workers", total=None, facts="")

    def show(self, view: "View") -> None:
        for message in view.messages:
            self._progress.console.print(message.text, markup=False, soft_wrap=True)
        live = slowest(view)
        if live:
            self._progress.update(
                self._task,
                description=f"epoch {live['epoch'] + 1}/{live['epochs']}",
                completed=live["cursor"],
                total=live["samples"],
                facts=facts(live),
            )


class _Pace:
    """Lets progress through only now and then, and only when there is news."""

    def __init__(self) -> None:
        self._next = 0.0
        self._last: dict[str, Any] = {}

    def due(self, view: "View") -> dict[str, Any]:
        live, now = slowest(view), time.monotonic()
        if not live or now < self._next or live == self._last:
            return {}
        self._next, self._last = now + PLAIN_PROGRESS_EVERY_SECONDS, live
        return live


def slowest(view: "View") -> dict[str, Any]:
    """Progress of the rank that is furthest behind, or nothing."""
    return min(view.live.values(), key=lambda live: (live["step"], live["rank"]), default={})


def facts(live: dict[str, Any]) -> str:
    """Step, loss, batch size, and memory of budget, of one rank's progress."""
    from foxray.memory.catalogue import format_bytes

    parts = [f"{live['phase']} step {live['step']}"]
    if "loss" in live:
        parts.append(f"loss {live['loss']:.5f}")
    if "batch_size" in live:
        parts.append(f"batch {live['batch_size']}")
    if live.get("memory_peak_bytes") and live.get("memory_total_bytes"):
        peak, total = live["memory_peak_bytes"], live["memory_total_bytes"]
        parts.append(f"memory {format_bytes(peak)} of {format_bytes(total)}")
    return "  ".join(parts)

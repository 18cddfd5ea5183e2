"""`foxray show RUN`: one run's ledger as tables."""

from json import dumps
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from foxray.ledger.store import Ledger
    from foxray.ledger.summary import RunSummary


def show(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="Id of the run, as `foxray runs` lists it.")],
    storage: Annotated[
        str, typer.Option(envvar="FOXRAY_STORAGE", help="Where the runs are: a folder or a URI.")
    ] = "foxray-runs",
    json: Annotated[bool, typer.Option("--json", help="JSON for machines instead of tables.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Tracebacks.")] = False,
) -> None:
    """Show one run: attempts, incidents, decisions, memory, losses."""
    from foxray.errors import FoxrayError
    from foxray.ledger.store import Ledger
    from foxray.ledger.summary import summarize_run

    ledger = Ledger(storage)
    if not ledger.exists(run_id):
        raise unknown_run(ledger, run_id)
    run = ledger.run(run_id)
    summary = summarize_run(run)
    if summary is None:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in run.skipped) or "it has no events"
        raise FoxrayError(f"run {run_id} in {storage}: nothing of its ledger can be read ({reasons})")
    if json:
        typer.echo(dumps(summary.to_dict(), ensure_ascii=False))
    else:
        _print(summary, run.uri)


def unknown_run(ledger: "Ledger", run_id: str) -> Exception:
    """A UserError that names the id, the storage, and the ids that come close."""
    from difflib import get_close_matches

    from foxray.errors import UserError

    known = ledger.run_ids()
    close = get_close_matches(run_id, known, n=3, cutoff=0.5)
    if close:
        hint = f"did you mean {' or '.join(close)}?"
    elif known:
        hint = f"it has {len(known)} runs, such as {', '.join(known[-3:])}; `foxray runs` lists all"
    else:
        hint = "there are no runs; name the right place with --storage or FOXRAY_STORAGE"
    return UserError(f"run {run_id}: not in {ledger.storage}: {hint}")


def _print(summary: "RunSummary", uri: str) -> None:
    from foxray.cli.tables import open_console

    console = open_console()
    _print_header(console, summary, uri)
    print_attempts(console, summary)
    _print_incidents(console, summary)
    print_phases(console, summary)
    print_epochs(console, summary)
    if summary.message:
        console.print(f"{summary.outcome}: {summary.message}", style="bold")
    for name, reason in summary.skipped:
        console.print(f"⚠️  skipped {name}: {reason}")


def _print_header(console: "Console", summary: "RunSummary", uri: str) -> None:
    from rich.text import Text

    from foxray.cli.tables import STYLES, arrows, moment, new_table, print_fields, seconds, whole

    checkpoint = summary.last_checkpoint
    print_fields(
        console,
        {
            "run": summary.run_id,
            "model": summary.model,
            "data": ", ".join(f"{name} {value}" for name, value in summary.dataset.items()),
            "ledger": uri,
            "created (UTC)": moment(summary.created_utc),
            "outcome": summary.outcome,
            "batch size": arrows(summary.batch_size_path()),
            "OOM retries": str(summary.oom_retries),
            "last checkpoint": f"step {checkpoint.step}, {checkpoint.path}" if checkpoint else None,
        },
    )
    columns = (
        "#",
        "started (UTC)",
        "outcome",
        ">workers",
        "device",
        "gpu",
        "host",
        ">retries",
        ">final batch size",
    )
    table = new_table("Executions", *columns, ">duration")
    for execution in summary.executions:
        table.add_row(
            f"{execution.execution}{' (resumed)' if execution.resumed else ''}",
            moment(execution.started_utc),
            Text(execution.outcome, style=STYLES.get(execution.outcome, "")),
            whole(execution.workers),
            execution.device or "-",
            execution.gpu or "-",
            execution.host or "-",
            str(execution.oom_retries),
            whole(execution.final_batch_size),
            seconds(execution.duration_seconds),
        )
    console.print(table)


def print_attempts(console: "Console", summary: "RunSummary") -> None:
    """A row for each try of a phase at one batch size."""
    from rich.text import Text

    from foxray.cli.tables import STYLES, moment, new_table, whole

    table = new_table(
        "Attempts",
        ">execution",
        "phase",
        ">rank",
        ">batch size",
        ">accumulation",
        ">step",
        "began (UTC)",
        "outcome",
        "rung",
    )
    for attempt in summary.attempts:
        table.add_row(
            str(attempt.execution),
            attempt.phase,
            str(attempt.rank),
            str(attempt.batch_size),
            whole(attempt.accumulation_steps),
            str(attempt.step),
            moment(attempt.started_utc),
            Text(attempt.outcome, style=STYLES.get(attempt.outcome, "")),
            attempt.rung or "",
        )
    console.print(table)


def _print_incidents(console: "Console", summary: "RunSummary") -> None:
    from foxray.cli.tables import new_table, size

    if summary.incidents:
        columns = (
            "incident",
            "kind",
            "phase",
            ">rank",
            "node",
            "gpu",
            ">samples",
            ">asked",
            ">free",
            ">total",
        )
        table = new_table("Incidents", *columns, "error")
        for incident in summary.incidents:
            table.add_row(
                incident.incident_id,
                incident.incident_kind,
                incident.phase,
                str(incident.rank),
                incident.node or "-",
                incident.gpu or "-",
                str(incident.batch_size),
                size(incident.bytes_requested),
                size(incident.bytes_free),
                size(incident.bytes_total),
                _one_line(incident.exception_type, incident.message),
            )
        console.print(table)
    if summary.decisions:
        titles = ("incident", "action", "phase", ">rank", ">batch size", ">retry", "rung", "reason")
        table = new_table("Decisions", *titles)
        for decision in summary.decisions:
            table.add_row(
                decision.incident_id,
                decision.action,
                decision.phase,
                str(decision.rank),
                f"{decision.previous_batch_size} → {decision.batch_size}"
                if decision.granted
                else str(decision.previous_batch_size),
                str(decision.retries),
                decision.rung or "",
                decision.reason,
            )
        console.print(table)
    for execution in summary.executions:
        for lost in execution.workers_lost:
            after = "restarted" if lost.restart else "given up"
            console.print(f"workers {', '.join(map(str, lost.ranks))} lost: {lost.reason} ({after})")


def print_phases(console: "Console", summary: "RunSummary") -> None:
    """A row for each finished phase: batch sizes by rank, duration, peak memory."""
    from foxray.cli.tables import new_table, seconds, size

    if not summary.phases:
        return
    columns = (">execution", "phase", "batch size by rank", ">rows", ">duration", ">peak memory")
    table = new_table("Phases", *columns)
    for phase in summary.phases:
        table.add_row(
            str(phase.execution),
            phase.phase,
            ", ".join(f"{rank}: {batch_size}" for rank, batch_size in phase.batch_sizes.items()),
            str(phase.rows),
            seconds(phase.duration_seconds),
            size(max(phase.peak_bytes.values(), default=None)),
        )
    console.print(table)
    if summary.recovery_seconds:
        times = ", ".join(seconds(value) for value in summary.recovery_seconds)
        console.print(f"recovery, from the error to the next try: {times}")


def print_epochs(console: "Console", summary: "RunSummary") -> None:
    """A row for each epoch: losses and other metrics."""
    from foxray.cli.tables import new_table, number

    if not summary.epochs:
        return
    names = sorted({name for epoch in summary.epochs for name in epoch.metrics})
    columns = (">epoch", ">step", ">training loss", ">validation loss", ">naive loss")
    table = new_table("Epochs", *columns, *(f">{name}" for name in names))
    for epoch in summary.epochs:
        table.add_row(
            str(epoch.epoch),
            str(epoch.step),
            number(epoch.training_loss),
            number(epoch.validation_loss),
            number(epoch.naive_loss),
            *(number(epoch.metrics.get(name)) for name in names),
        )
    console.print(table)


def _one_line(exception_type: str, message: str) -> str:
    text = " ".join(f"{exception_type}: {message}".split())
    return text if len(text) <= 120 else f"{text[:119]}…"

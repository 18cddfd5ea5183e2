"""`foxray runs`: all runs of a storage as one table."""

from json import dumps
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from foxray.ledger.store import Ledger
    from foxray.ledger.summary import RunSummary


def runs(
    storage: Annotated[
        str, typer.Option(envvar="FOXRAY_STORAGE", help="Where the runs are: a folder or a URI.")
    ] = "foxray-runs",
    json: Annotated[bool, typer.Option("--json", help="JSON for machines instead of a table.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Tracebacks.")] = False,
) -> None:
    """List all runs: outcome, out-of-memory retries, final batch size, loss; and the success rate."""
    from foxray.ledger.store import Ledger
    from foxray.ledger.summary import count_outcomes, success_rate, summarize_run

    ledger = Ledger(storage)
    summaries, unreadable = [], {}
    for run_id in ledger.run_ids():
        run = ledger.run(run_id)
        summary = summarize_run(run)
        if summary is not None:
            summaries.append(summary)
        else:
            unreadable[run_id] = [list(skipped) for skipped in run.skipped]
    summaries.sort(key=lambda s: (s.created_utc or "", s.run_id))
    rate, outcomes = success_rate(summaries), count_outcomes(summaries)
    if json:
        plain = [summary.to_dict() for summary in summaries]
        shown = {"runs": plain, "unreadable": unreadable, "outcomes": outcomes, "success_rate": rate}
        typer.echo(dumps(shown, ensure_ascii=False))
    else:
        _print(ledger, summaries, unreadable, outcomes, rate)


def _print(
    ledger: "Ledger",
    summaries: "list[RunSummary]",
    unreadable: dict[str, list[list[str]]],
    outcomes: dict[str, int],
    rate: float | None,
) -> None:
    from rich.text import Text

    from foxray.cli.tables import STYLES, arrows, moment, new_table, number, open_console, seconds, whole

    console = open_console()
    if not summaries and not unreadable:
        console.print(f"no runs in {ledger.storage} yet; `foxray train --storage {ledger.storage}` makes one")
        return
    columns = ("run", "model", "started (UTC)", "outcome", ">executions", ">OOM retries", "batch size")
    table = new_table("", *columns, ">final", ">validation loss", ">naive", ">duration")
    for summary in summaries:
        table.add_row(
            summary.run_id,
            summary.model,
            moment(summary.created_utc),
            Text(summary.outcome, style=STYLES.get(summary.outcome, "")),
            str(len(summary.executions)),
            str(summary.oom_retries),
            arrows(summary.batch_size_path()),
            whole(summary.final_batch_size),
            number(summary.validation_loss),
            number(summary.naive_loss),
            seconds(summary.duration_seconds),
        )
    console.print(table)
    for run_id, skipped in unreadable.items():
        reasons = "; ".join(f"{name}: {reason}" for name, reason in skipped) or "no events"
        console.print(f"⚠️  {run_id}: nothing readable ({reasons})")
    counts = ", ".join(f"{outcomes[outcome]} {outcome}" for outcome in STYLES if outcome in outcomes)
    percent = "-" if rate is None else f"{rate:.1%}"
    console.print(f"{len(summaries)} runs; executions: {counts or 'none'}; success rate: {percent}")

"""`foxray synth`: synthetic futures bars."""

from pathlib import Path
from typing import Annotated

import typer


def synth(
    output: Annotated[Path, typer.Argument(help="The Parquet file to write.")],
    days: Annotated[int, typer.Option(min=1, help="Calendar days.")] = 30,
    symbols: Annotated[str, typer.Option(help="Comma-separated.")] = "ES",
    seed: Annotated[int, typer.Option(min=0)] = 0,
    verbose: Annotated[bool, typer.Option("--verbose", help="Tracebacks.")] = False,
) -> None:
    """Write session-aware synthetic one-minute futures bars (for trials and tests; not real prices)."""
    from foxray.data.synth import synth as run

    rows = run(output, days=days, symbols=[s.strip() for s in symbols.split(",")], seed=seed)
    print(f"{output}: {rows} rows of {days} days")

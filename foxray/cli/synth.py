"""`foxray synth`: synthetic futures bars."""

from pathlib import Path
from typing import Annotated

import typer


def synth(
    output: Annotated[Path, typer.Argument(help="The Parquet file to write.")],
    days: Annotated[
        float | None, typer.Option(help="Calendar days, from 2024-01-01 on.", show_default="30")
    ] = None,
    rows: Annotated[int | None, typer.Option(help="Bars for each symbol, instead of days.")] = None,
    symbols: Annotated[
        str, typer.Option(help="Comma-separated; adds a symbol column.", show_default="none")
    ] = "",
    freq: Annotated[str, typer.Option(help="Length of a bar: 30s, 1min, 1h ...")] = "1min",
    seed: Annotated[int, typer.Option(min=0)] = 0,
    verbose: Annotated[bool, typer.Option("--verbose", help="Tracebacks.")] = False,
) -> None:
    """Write session-aware synthetic futures bars (for trials and tests; not real prices)."""
    import pyarrow.parquet as pq

    from foxray.data.synth import synth as run

    names = [name.strip() for name in symbols.split(",") if name.strip()]
    path = run(output, rows=rows, days=days, seed=seed, symbols=names, freq=freq)
    print(f"{path}: {pq.read_metadata(path).num_rows:,} rows")

"""`foxray convert`: DBN or CSV to Parquet."""

from pathlib import Path
from typing import Annotated

import typer


def convert(
    source: Annotated[Path, typer.Argument(help="A .dbn, .dbn.zst, .csv or .csv.gz file.")],
    output: Annotated[Path, typer.Argument(help="The Parquet file to write.")],
    verbose: Annotated[bool, typer.Option("--verbose", help="Tracebacks.")] = False,
) -> None:
    """Turn DBN or CSV bars into a Parquet file that `foxray train` reads."""
    from foxray.data.convert import convert as run

    run(source, output)

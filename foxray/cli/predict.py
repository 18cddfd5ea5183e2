"""`foxray predict`: quantiles for new bars, from a run's last checkpoint."""

from pathlib import Path
from typing import Annotated

import typer


def predict(
    run: Annotated[str, typer.Argument(help="Id of the run.")],
    parquet_file: Annotated[Path, typer.Option(help="New bars, with the columns of the training data.")],
    output: Annotated[Path, typer.Option(help="The Parquet file to write.")],
    storage: Annotated[str, typer.Option(envvar="FOXRAY_STORAGE", help="Where the run is.")] = "foxray-runs",
    batch_size: Annotated[int, typer.Option(min=1, help="Windows in one forward pass.")] = 256,
    verbose: Annotated[bool, typer.Option("--verbose", help="Tracebacks.")] = False,
) -> None:
    """Write the forecast quantiles for every window of new bars."""
    from foxray.driver.predict import predict as run_prediction

    rows = run_prediction(
        storage, run, parquet_file, output, batch_size=batch_size, log=lambda line: print(line, flush=True)
    )
    print(f"{output}: {rows} forecasts")

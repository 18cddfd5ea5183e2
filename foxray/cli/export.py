"""`foxray export`: a run's model as an ONNX file or a `torch.export` program."""

from pathlib import Path
from typing import Annotated

import typer


def export(
    run: Annotated[str, typer.Argument(help="Id of the run.")],
    file_format: Annotated[str, typer.Option("--format", help="onnx or torch.")] = "onnx",
    output: Annotated[
        Path | None, typer.Option(help="The file to write.", show_default="RUN.onnx or RUN.pt2")
    ] = None,
    as_float: Annotated[
        bool, typer.Option("--float", help="Leave the rounding of a quantized model away.")
    ] = False,
    storage: Annotated[str, typer.Option(envvar="FOXRAY_STORAGE", help="Where the run is.")] = "foxray-runs",
    verbose: Annotated[bool, typer.Option("--verbose", help="Tracebacks.")] = False,
) -> None:
    """Write a trained model as a file that runs without foxray: int8 where it was trained so."""
    from foxray.driver.export import export_run, parse_format
    from foxray.memory.catalogue import format_bytes

    report = export_run(storage, run, output, file_format=parse_format(file_format), as_float=as_float)
    kind = "int8 weights" if report.quantized else "float weights"
    print(f"{report.path}: {format_bytes(report.size_bytes)}, {kind}")
    print(
        f"largest difference from the trained model: {report.largest_difference:.2g} "
        f"(its outputs have a standard deviation of {report.output_deviation:.2g})"
    )

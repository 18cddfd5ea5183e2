"""`foxray export`: the model of a run as a file that runs without foxray.

The file is tried before it is written: what it answers to random windows is compared with the model that was
trained. Scaled features have mean 0 and deviation 1, so standard normal windows are of their kind.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from foxray.data.replacing import replacing
from foxray.driver.restore import RestoredModel, restore_model
from foxray.errors import UserError
from foxray.models.onnx_export import export_onnx, export_program, run_onnx, save_program

Format = Literal["onnx", "torch"]
SUFFIXES: dict[Format, str] = {"onnx": ".onnx", "torch": ".pt2"}
WINDOWS = 64
"""Random windows on which file and model are compared."""


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """What was written."""

    path: Path
    size_bytes: int
    quantized: bool
    largest_difference: float
    """Between the outputs of the file and of the model, in scaled units of the target."""
    output_deviation: float
    """Standard deviation of the model's outputs on the same windows, to judge the difference by."""


def export_run(
    storage: str, run_id: str, output: Path | None, *, file_format: Format, as_float: bool
) -> ExportReport:
    """Write the model of a run's last checkpoint; without `output`, as `RUN.onnx` or `RUN.pt2` right here.

    `as_float` leaves the rounding of a quantized model away. Raises UserError for an unknown run, one without
    a checkpoint, missing packages, or a place that cannot be written.
    """
    restored = restore_model(storage, run_id, command="export")
    quantization = restored.quantization
    if as_float and quantization is not None:
        quantization.mode = "off"
    inputs = _random_inputs(restored)
    with torch.inference_mode():
        expected_BQ = restored.model(*inputs)
    content, found_BQ = _onnx(restored, inputs) if file_format == "onnx" else _torch(restored, inputs)
    path = output or Path(f"{run_id}{SUFFIXES[file_format]}")
    with replacing(path) as temporary:
        temporary.write_bytes(content)
    return ExportReport(
        path=path,
        size_bytes=len(content),
        quantized=quantization is not None and not as_float,
        largest_difference=float((found_BQ - expected_BQ).abs().max()),
        output_deviation=float(expected_BQ.std()),
    )


def _random_inputs(restored: RestoredModel) -> list[Tensor]:
    config, generator = restored.config, torch.Generator().manual_seed(0)
    inputs = [torch.randn(WINDOWS, config.seq_len, config.num_features, generator=generator)]
    if config.static_cardinalities:
        columns = [torch.randint(n, (WINDOWS,), generator=generator) for n in config.static_cardinalities]
        inputs.append(torch.stack(columns, dim=1))
    return inputs


def _onnx(restored: RestoredModel, inputs: list[Tensor]) -> tuple[bytes, Tensor]:
    proto = export_onnx(
        restored.model,
        inputs,
        argument_names=["x_BTF", "static_BS"][: len(inputs)],
        input_names=["features", "symbol"][: len(inputs)],
        output_name="quantiles",
        metadata={name: json.dumps(value) for name, value in _metadata(restored).items()},
    )
    return proto.SerializeToString(), run_onnx(proto, inputs)


def _torch(restored: RestoredModel, inputs: list[Tensor]) -> tuple[bytes, Tensor]:
    program = export_program(restored.model, inputs, names=["x_BTF", "static_BS"][: len(inputs)])
    with torch.inference_mode():
        return save_program(program), program.module()(*inputs)


def _metadata(restored: RestoredModel) -> dict[str, object]:
    """What one needs to make inputs and to read outputs: (feature - mean) / std, output * std + mean."""
    scaling = restored.scaling
    return scaling.to_dict() | {"quantiles": restored.config.quantiles, "seq_len": restored.config.seq_len}


def parse_format(value: str) -> Format:
    """The format of that name. Raises UserError that lists the known ones."""
    for known in SUFFIXES:
        if value == known:
            return known
    raise UserError(f"--format {value}: unknown; choose one of {', '.join(SUFFIXES)}")

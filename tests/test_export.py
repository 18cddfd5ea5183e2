"""Exported models: an ONNX file whose weights are int8, and a program that needs nothing of foxray."""

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_models_quantization import calibrate, tft, windows
from torch import Tensor, nn

from foxray.driver.export import export_run, parse_format
from foxray.driver.predict import predict
from foxray.errors import UserError
from foxray.models.onnx_export import export_onnx, export_program, run_onnx, save_program
from foxray.models.quantization import Quantization

pytestmark = pytest.mark.slow

HIDDEN = 64
Cli = Callable[..., "subprocess.CompletedProcess[str]"]


class Exported:
    """A model with a symbol, and its ONNX files with and without rounding."""

    def __init__(self) -> None:
        self.model = tft(hidden_dim=HIDDEN, static_cardinalities=(3,))
        self.quantization = Quantization(self.model)
        inputs = self.inputs(32, seed=1)
        self.quantization.mode = "observe"
        self.quantization.begin_piece()
        self.model(*inputs)
        self.quantization.commit_piece()
        self.quantization.commit_batch()
        self.plain = self.export("off")
        self.int8 = self.export("frozen")

    def inputs(self, batch: int, seed: int) -> list[Tensor]:
        return [windows(batch, seed), torch.arange(batch).remainder(3).unsqueeze(1)]

    def export(self, mode: str) -> Any:
        self.quantization.mode = mode  # type: ignore[assignment]
        return export_onnx(
            self.model,
            self.inputs(4, seed=2),
            argument_names=["x_BTF", "static_BS"],
            input_names=["features", "symbol"],
            output_name="quantiles",
            metadata={"seq_len": "6"},
        )

    def compare(self, proto: Any, batch: int) -> tuple[float, float, float]:
        """Largest and mean difference of file and model, and the deviation of the model's outputs."""
        inputs = self.inputs(batch, seed=3)
        with torch.no_grad():
            expected = self.model(*inputs)
        difference = (run_onnx(proto, inputs) - expected).abs()
        return float(difference.max()), float(difference.mean()), float(expected.std())


@pytest.fixture(scope="module")
def exported() -> Exported:
    return Exported()


def initializers(proto: Any) -> dict[str, np.ndarray]:
    from onnx import numpy_helper

    return {constant.name: numpy_helper.to_array(constant) for constant in proto.graph.initializer}


@pytest.mark.parametrize("batch", [1, 50])
def test_onnx_runtime_agrees_with_the_fake_quantized_model(exported: Exported, batch: int) -> None:
    exported.quantization.mode = "frozen"
    largest, mean, deviation = exported.compare(exported.int8, batch)
    assert deviation > 0.3
    # A value between two steps of a grid may go to either of them, and what follows with it.
    assert largest < 0.05 * deviation
    assert mean < 0.005 * deviation


@pytest.mark.parametrize("batch", [1, 50])
def test_onnx_runtime_agrees_with_the_float_model(exported: Exported, batch: int) -> None:
    exported.quantization.mode = "off"
    largest, _, deviation = exported.compare(exported.plain, batch)
    assert largest < 1e-5 * deviation


def test_the_rounding_is_in_the_file(exported: Exported) -> None:
    exported.quantization.mode = "off"
    _, mean, deviation = exported.compare(exported.int8, 50)
    assert mean > 0.005 * deviation


def test_the_int8_file_is_at_most_035_of_the_float_file(exported: Exported) -> None:
    sizes = [len(proto.SerializeToString()) for proto in (exported.int8, exported.plain)]
    assert sizes[0] / sizes[1] <= 0.35, sizes


def test_every_quantized_layer_has_its_weight_as_int8_and_its_input_rounded(exported: Exported) -> None:
    constants = initializers(exported.int8)
    nodes = exported.int8.graph.node
    weights = [name for name, values in constants.items() if values.dtype == np.int8 and values.ndim == 2]
    dequantized = {node.input[0] for node in nodes if node.op_type == "DequantizeLinear"}
    matrices = [n for n, p in exported.model.named_parameters() if n.endswith(".original") and p.dim() > 1]
    assert set(weights) <= dequantized and len(weights) == len(matrices)
    total = sum(p.numel() for n, p in exported.model.named_parameters() if n in matrices)
    assert sum(constants[name].size for name in weights) == total
    activations = [node for node in nodes if node.op_type == "QuantizeLinear"]
    assert all(constants[node.input[2]].dtype == np.uint8 for node in activations)
    # Layers that share an input share its node.
    scales = {constants[node.input[1]].item() for node in activations}
    assert scales == set(exported.model.quantization_ranges.scale_P.tolist())


def test_metadata_and_inputs_have_names(exported: Exported) -> None:
    assert {p.key: p.value for p in exported.int8.metadata_props} == {"seq_len": "6"}
    assert [slot.name for slot in exported.int8.graph.input] == ["features", "symbol"]
    assert [slot.name for slot in exported.int8.graph.output] == ["quantiles"]


def test_an_export_leaves_the_model_as_it_was(exported: Exported) -> None:
    assert all(parameter.requires_grad for parameter in exported.model.parameters())
    key = "aten::fake_quantize_per_tensor_affine_cachemask"
    assert not torch._C._dispatch_has_kernel_for_dispatch_key(key, "Meta")


LOAD = """
import sys, torch
program = torch.export.load(sys.argv[1])
x, expected = torch.load(sys.argv[2])
assert "foxray" not in sys.modules
print(float((program.module()(x) - expected).abs().max()))
"""


def test_a_torch_program_runs_without_foxray(tmp_path: Path) -> None:
    model = tft(hidden_dim=8)
    quantization = Quantization(model)
    calibrate(quantization, model, [windows()])
    quantization.mode = "frozen"
    (tmp_path / "m.pt2").write_bytes(save_program(export_program(model, [windows(4)], names=["x_BTF"])))
    with torch.no_grad():
        torch.save((windows(7, seed=5), model(windows(7, seed=5))), tmp_path / "expected.pt")
    done = subprocess.run(
        [sys.executable, "-c", LOAD, "m.pt2", "expected.pt"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1e-6


def test_a_missing_package_is_named_with_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def without_onnx(name: str) -> Any:
        if name.startswith("onnx"):
            raise ImportError(name)
        return real(name)

    monkeypatch.setattr(importlib, "import_module", without_onnx)
    with pytest.raises(UserError, match=r"needs the package onnx.*pip install 'foxray\[onnx\]'"):
        export_onnx(nn.Linear(1, 1), [], argument_names=[], input_names=[], output_name="y", metadata={})


def test_from_bars_to_an_int8_file_with_two_workers(
    foxray_cli: Cli, synthetic_bars: Path, tmp_path: Path
) -> None:
    options = (
        "--device cpu --num-features 8 --seq-len 12 --hidden-dim 8 --num-heads 2 --window-stride 4 "
        "--use-qat --qat-calibration-batches 10 --qat-min-batch-size 2 --qat-max-oom-retries 5 "
        "--batch-size 256 --max-oom-retries 6 --emulate-gpu 3MiB --workers 2 --run-id r"
    )
    done = foxray_cli("train", "--parquet-file", synthetic_bars, *options.split())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "🎯 QAT Calibration Phase: Running 10 batches (initial batch_size=256)" in done.stdout
    assert "⚠️  QAT calibration OOM detected (attempt 1/5), reducing batch_size: 256 → 128" in done.stdout
    assert "float_validation_loss" in done.stdout
    summary = json.loads(foxray_cli("show", "r", "--json").stdout)
    phases = [phase["phase"] for phase in summary["executions"][0]["phases"]]
    assert phases == ["calibration", "training", "validation"]

    written = foxray_cli("export", "r")
    assert written.returncode == 0, written.stdout + written.stderr
    assert "r.onnx: " in written.stdout and "int8 weights" in written.stdout
    import onnxruntime

    session = onnxruntime.InferenceSession(tmp_path / "r.onnx")
    found = session.run(None, {"features": np.zeros((3, 12, 8), dtype=np.float32)})[0]
    assert found.shape == (3, 3)
    metadata = session.get_modelmeta().custom_metadata_map
    assert len(json.loads(metadata["feature_names"])) == 8 and json.loads(metadata["seq_len"]) == 12

    storage, forecasts = str(tmp_path / "foxray-runs"), tmp_path / "p.parquet"
    assert predict(storage, "r", synthetic_bars, forecasts, batch_size=256, log=lambda line: None) > 1000
    with pytest.raises(UserError, match=r"export nobody: no such run in .*; the newest there: r"):
        export_run(storage, "nobody", None, file_format="onnx", as_float=False)


def test_an_unknown_format_is_answered_with_the_known_ones() -> None:
    with pytest.raises(UserError, match="--format tflite: unknown; choose one of onnx, torch"):
        parse_format("tflite")

"""A trained model as an ONNX file; a quantized one with its weights stored as int8.

torch's exporter turns the rounding of a frozen `Quantization` into QuantizeLinear and DequantizeLinear nodes,
but keeps the weights in float and quantizes them whenever the file is run. Here that is done once: what is
constant is rounded now, and only its int8 values and scales are stored. Where a weight is used transposed,
its int8 values are transposed, so that DequantizeLinear stands right before MatMul, which is the pattern that
ONNX Runtime replaces by integer arithmetic.

Needs the packages of the extra `onnx`.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from foxray.errors import UserError

if TYPE_CHECKING:
    import onnx


def export_program(
    model: nn.Module, inputs: Sequence[Tensor], *, names: Sequence[str]
) -> torch.export.ExportedProgram:
    """`torch.export` of a model in evaluation mode, for any number of samples in dimension 0.

    `inputs` are an example of at least 2 samples, `names` those of the arguments of `forward`.
    """
    batch = torch.export.Dim("batch", min=1)
    with _without_gradients(model), _shapes_of_fake_quantize():
        return torch.export.export(
            model,
            tuple(inputs),
            dynamic_shapes={name: {0: batch} for name in names},
        )


def export_onnx(
    model: nn.Module,
    inputs: Sequence[Tensor],
    *,
    argument_names: Sequence[str],
    input_names: Sequence[str],
    output_name: str,
    metadata: Mapping[str, str],
) -> onnx.ModelProto:
    """The model as ONNX, constants folded. Raises UserError where the packages of the extra are missing."""
    helper, checker = (_import(f"onnx.{part}") for part in ("helper", "checker"))
    _import("onnxscript")
    program = export_program(model, inputs, names=argument_names)
    with _quiet(), _shapes_of_fake_quantize(), torch.no_grad():
        exported = torch.onnx.export(
            program, dynamo=True, input_names=list(input_names), output_names=[output_name], verbose=False
        )
    assert exported is not None
    proto: onnx.ModelProto = exported.model_proto
    _fold_weights(proto.graph)
    _strip(proto)
    helper.set_model_props(proto, dict(metadata))
    checker.check_model(proto)
    return proto


def run_onnx(proto: onnx.ModelProto, inputs: Sequence[Tensor]) -> Tensor:
    """What ONNX Runtime answers on the CPU."""
    runtime = _import("onnxruntime")
    session = runtime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    values = {slot.name: tensor.numpy() for slot, tensor in zip(session.get_inputs(), inputs, strict=True)}
    return torch.from_numpy(session.run(None, values)[0])


def save_program(program: torch.export.ExportedProgram) -> bytes:
    """The bytes of a `.pt2` file, for `torch.export.load`."""
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    return buffer.getvalue()


# -- folding ---------------------------------------------------------------------------------------


def _fold_weights(graph: onnx.GraphProto) -> None:
    """Replace QuantizeLinear of constants by its int8 result, transposed where it is used so."""
    _fold_reshapes(graph)
    constants = {constant.name: constant for constant in graph.initializer}
    nodes = list(graph.node)
    users: dict[str, list[onnx.NodeProto]] = {}
    for node in nodes:
        for name in node.input:
            users.setdefault(name, []).append(node)
    folded: set[str] = set()  # names of nodes
    for node in nodes:
        if node.op_type != "QuantizeLinear" or not all(name in constants for name in node.input):
            continue
        dequantize = _only_user(users, node.output[0], "DequantizeLinear")
        if dequantize is None:
            continue
        _store(graph, node, dequantize, [constants[name] for name in node.input])
        folded.add(node.name)
        transpose = _only_user(users, dequantize.output[0], "Transpose")
        if transpose is not None:
            _transpose(graph, dequantize, transpose)
            folded.add(transpose.name)
    kept = [node for node in nodes if node.name not in folded]
    used = {name for node in kept for name in node.input} | {output.name for output in graph.output}
    left = [constant for constant in graph.initializer if constant.name in used]
    for field, values in ((graph.node, kept), (graph.initializer, left)):
        del field[:]
        field.extend(values)


def _fold_reshapes(graph: onnx.GraphProto) -> None:
    """Store constants in the shape in which they are rounded: a stack of weights as one matrix."""
    from onnx import numpy_helper

    constants = {constant.name: constant for constant in graph.initializer}
    for node in list(graph.node):
        if node.op_type == "Reshape" and all(name in constants for name in node.input):
            values, shape = (numpy_helper.to_array(constants[name]) for name in node.input)
            graph.initializer.append(numpy_helper.from_array(values.reshape(shape), node.output[0]))
            graph.node.remove(node)


def _only_user(users: Mapping[str, list[onnx.NodeProto]], name: str, kind: str) -> onnx.NodeProto | None:
    found = users.get(name, [])
    return found[0] if len(found) == 1 and found[0].op_type == kind else None


def _store(
    graph: onnx.GraphProto,
    quantize: onnx.NodeProto,
    dequantize: onnx.NodeProto,
    constants: list[onnx.TensorProto],
) -> None:
    """Put the int8 values of `quantize` into the graph, under the name of its output."""
    from onnx import numpy_helper

    weight, scale, zero_point = (numpy_helper.to_array(constant) for constant in constants)
    assert zero_point.dtype == np.int8 and not zero_point.any(), "weights are symmetric int8"
    axis = _attribute(quantize, "axis").i
    shape = [1] * weight.ndim
    shape[axis] = -1
    limits = np.iinfo(np.int8)
    values = np.clip(np.rint(weight / scale.reshape(shape)), limits.min, limits.max).astype(np.int8)
    graph.initializer.append(numpy_helper.from_array(values, quantize.output[0]))
    del dequantize.input[2:]  # a zero point that is left out is zero


def _transpose(graph: onnx.GraphProto, dequantize: onnx.NodeProto, transpose: onnx.NodeProto) -> None:
    """Transpose the stored values instead of the result of `dequantize`."""
    from onnx import numpy_helper

    order = list(_attribute(transpose, "perm").ints)
    stored = next(constant for constant in graph.initializer if constant.name == dequantize.input[0])
    values = np.ascontiguousarray(numpy_helper.to_array(stored).transpose(order))
    stored.CopyFrom(numpy_helper.from_array(values, stored.name))
    axis = _attribute(dequantize, "axis")
    axis.i = order.index(axis.i)
    dequantize.output[0] = transpose.output[0]


def _attribute(node: onnx.NodeProto, name: str) -> onnx.AttributeProto:
    found: onnx.AttributeProto = next(a for a in node.attribute if a.name == name)
    return found


def _strip(proto: onnx.ModelProto) -> None:
    """Drop the exporter's notes (source lines, inferred shapes), which are larger than a small model."""
    del proto.metadata_props[:]
    del proto.graph.metadata_props[:]
    del proto.graph.value_info[:]
    for part in (*proto.graph.node, *proto.graph.initializer):
        part.doc_string = ""
        del part.metadata_props[:]


# -- around torch's exporter -----------------------------------------------------------------------


@contextmanager
def _without_gradients(model: nn.Module) -> Iterator[None]:
    """An export of parameters that need gradients would trace the backward pass's operations as well."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


@contextmanager
def _shapes_of_fake_quantize() -> Iterator[None]:
    """Tell torch the shapes that rounding gives, which it does not know for a dynamic batch (2.13)."""

    def rounded(x: Tensor, scale: float, zero_point: int, low: int, high: int) -> tuple[Tensor, Tensor]:
        return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)

    name = "aten::fake_quantize_per_tensor_affine_cachemask"
    if torch._C._dispatch_has_kernel_for_dispatch_key(name, "Meta"):
        yield
        return
    library: Any = torch.library.Library("aten", "IMPL", "Meta")  # type: ignore[no-untyped-call]
    library.impl(name.removeprefix("aten::"), rounded)
    try:
        yield
    finally:
        library._destroy()


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporter warns of what has nothing to do with the model: packages, its own future, its folding."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _import(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError:
        raise UserError(
            f"--format onnx needs the package {name}, which is not installed: pip install 'foxray[onnx]'"
        ) from None

"""Quantization-aware training of a model that was built without a thought of it.

`Quantization(model)` attaches itself in place: every weight of a linear map or LSTM gets a
parametrization that rounds it to int8, one symmetric scale per output channel, and the input of every such
layer is observed, and later rounded to eight bits with one affine scale per tensor, by a forward hook.
Nothing moves until the mode says so, and the parameters stay the parameters that the optimizer holds.

Ranges are found by calibration alone and are fixed afterwards. An observation is a minimum and a maximum,
which do not depend on how a batch is split: a micro-batch writes into `piece`, a finished one is merged
into `batch`, and a whole batch moves the average once. Minima and negated maxima lie in one tensor, so that
a single minimum merges pieces, and a single all-reduce merges ranks.

`torch.ao.quantization` is not used: it is deprecated, and it fails on attention and leaves LSTMs alone.

Source: Jacob et al., "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only
Inference", arXiv:1712.05877, sections 2.1 and 3.

Legend: P = observed points, C = output channels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from foxray.errors import UserError
from foxray.models.variable_selection import FeatureLinear

QuantizationMode = Literal["off", "observe", "fake_quantize", "frozen"]

WEIGHT_RANGE = (-128, 127)
ACTIVATION_RANGE = (0, 255)
AVERAGING_CONSTANT = 0.01
"""Share of a new batch in the moving average, as in torch's `MovingAverageMinMaxObserver`."""

_SMALLEST_SCALE = torch.finfo(torch.float32).eps


class _Ranges(nn.Module):
    """Minima and negated maxima of all points, each tensor float32 [2 * P]; infinite: not seen yet."""

    average: Tensor
    batch: Tensor
    piece: Tensor
    scale_P: Tensor
    zero_point_P: Tensor

    def __init__(self, points: int) -> None:
        super().__init__()
        unseen = torch.full((2 * points,), math.inf)
        self.register_buffer("average", unseen.clone())
        self.register_buffer("batch", unseen.clone(), persistent=False)
        self.register_buffer("piece", unseen.clone(), persistent=False)
        self.register_buffer("scale_P", torch.ones(points), persistent=False)
        self.register_buffer("zero_point_P", torch.zeros(points, dtype=torch.int32), persistent=False)


class _FakeQuantizedWeight(nn.Module):
    """Parametrization that rounds a weight to int8, with the gradient passed straight through."""

    _zero_point_C: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.mode: QuantizationMode = "off"
        self._frozen_scale_C: Tensor | None = None
        self.register_buffer("_zero_point_C", torch.zeros(_rows(weight), dtype=torch.int32), persistent=False)

    def forward(self, weight: Tensor) -> Tensor:
        if self.mode in ("off", "observe"):
            return weight
        scale_C = self._frozen_scale_C if self._frozen_scale_C is not None else channel_scales(weight)
        # A stack of linear maps [F, O, I] has F * O output channels.
        rounded = torch.fake_quantize_per_channel_affine(
            weight.flatten(0, -2), scale_C, self._zero_point_C, 0, *WEIGHT_RANGE
        )
        return rounded.view_as(weight)

    def freeze(self, weight: Tensor | None) -> None:
        """Keep the scales of `weight`, the one behind the parametrization; None: let them move again."""
        self._frozen_scale_C = None if weight is None else channel_scales(weight)


def channel_scales(weight: Tensor) -> Tensor:
    """Step of each output channel's int8 grid, float32 [C], for a weight [..., O, I]."""
    largest_C = weight.detach().flatten(0, -2).abs().amax(dim=1)
    return (largest_C / WEIGHT_RANGE[1]).clamp_(min=_SMALLEST_SCALE).float()


def _rows(weight: Tensor) -> int:
    return weight.flatten(0, -2).shape[0]


class Quantization:
    """The quantization of one model; attach it before the optimizer and any `load_state_dict`.

    The averages are part of the model's state dict. Every linear map is covered, the output head
    included: its few weights cost nothing, and a file that is int8 throughout needs no exception for it.
    """

    def __init__(self, model: nn.Module) -> None:
        layers = [
            (name, layer)
            for name, layer in model.named_modules()
            if isinstance(layer, nn.Linear | nn.LSTM | FeatureLinear)
        ]
        self.points = [name for name, _ in layers]
        """Layers whose input is observed, in the order of the ranges."""
        self._ranges = _Ranges(len(layers))
        self._mode: QuantizationMode = "off"
        self._constants: list[tuple[float, int]] = []
        self._averaged = False
        self._weights: list[tuple[nn.Module, str, _FakeQuantizedWeight]] = []
        for point, (_, layer) in enumerate(layers):
            for name in [n for n, _ in layer.named_parameters(recurse=False) if n.startswith("weight")]:
                self._attach_weight(layer, name)
            layer.register_forward_pre_hook(_InputHook(self, point))
            if isinstance(layer, nn.LSTM):
                _read_weights_anew(layer)
        model.add_module("quantization_ranges", self._ranges)

    @property
    def mode(self) -> QuantizationMode:
        """`off`: the model as it was. `observe`: the same output, ranges are noted. `fake_quantize`: inputs
        and weights are rounded, weights on scales of their present values. `frozen`: weights on the scales
        that they had when the mode was set, and nothing is left to compute but the rounding."""
        return self._mode

    @mode.setter
    def mode(self, mode: QuantizationMode) -> None:
        """Raises UserError for rounding to ranges that no calibration has found."""
        if mode not in get_args(QuantizationMode):
            raise ValueError(f"mode is {mode!r}; allowed: {', '.join(get_args(QuantizationMode))}")
        if mode in ("fake_quantize", "frozen"):
            self._set_activation_scales()
        if mode == "frozen":
            scales, zero_points = self._ranges.scale_P.tolist(), self._ranges.zero_point_P.tolist()
            self._constants = list(zip(scales, zero_points, strict=True))
        for layer, name, weight in self._weights:
            weight.freeze(
                layer.parametrizations[name].original  # type: ignore[index,union-attr]
                if mode == "frozen"
                else None
            )
        self._switch(mode)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Off for a while, and back to the same scales; allocates nothing."""
        before = self._mode
        self._switch("off")
        try:
            yield
        finally:
            self._switch(before)

    def begin_piece(self) -> None:
        """Forget what an unfinished micro-batch observed."""
        self._ranges.piece.fill_(math.inf)

    def commit_piece(self) -> None:
        """Merge what a finished micro-batch observed into its batch. Allocates nothing."""
        torch.minimum(self._ranges.batch, self._ranges.piece, out=self._ranges.batch)

    @property
    def batch_range(self) -> Tensor:
        """Float32 [2 * P]: the batch's minima, then its negated maxima; the smaller of two is their union."""
        return self._ranges.batch

    def commit_batch(self) -> None:
        """Move the average by the batch (the first batch sets it) and begin a new one. Allocates nothing."""
        if self._averaged:
            self._ranges.average.lerp_(self._ranges.batch, AVERAGING_CONSTANT)
        else:
            self._ranges.average.copy_(self._ranges.batch)
        self._averaged = True
        self._ranges.batch.fill_(math.inf)

    def activation_ranges(self) -> dict[str, tuple[float, float]]:
        """Smallest and largest input of each layer on average, by the layer's name."""
        low, negative_high = self._ranges.average.view(2, -1).tolist()
        return {name: (low[i], -negative_high[i]) for i, name in enumerate(self.points)}

    def _switch(self, mode: QuantizationMode) -> None:
        self._mode = mode
        for _, _, weight in self._weights:
            weight.mode = mode

    def _attach_weight(self, layer: nn.Module, name: str) -> None:
        rounding = _FakeQuantizedWeight(getattr(layer, name))
        parametrize.register_parametrization(layer, name, rounding)
        self._weights.append((layer, name, rounding))

    def _set_activation_scales(self) -> None:
        low_P, negative_high_P = self._ranges.average.view(2, -1)
        unseen = [
            self.points[i] for i in (~(low_P + negative_high_P).isfinite()).nonzero().flatten().tolist()
        ]
        if unseen:
            raise UserError(
                f"{len(unseen)} of {len(self.points)} layers have no range of their inputs, the first is "
                f"{unseen[0]}: run the calibration phase (--use-qat) before training or export"
            )
        # Zero has to be on the grid: padding, dropout and closed gates are exact zeros.
        low_P, high_P = low_P.clamp(max=0.0), (-negative_high_P).clamp(min=0.0)
        first, last = ACTIVATION_RANGE
        scale_P = ((high_P - low_P) / (last - first)).clamp_(min=_SMALLEST_SCALE)
        self._ranges.scale_P.copy_(scale_P)
        self._ranges.zero_point_P.copy_((first - low_P / scale_P).round_().clamp_(first, last))

    def _see(self, point: int, x: Tensor) -> Tensor:
        """Observe or round the input of one layer."""
        if self._mode == "off":
            return x
        ranges = self._ranges
        if self._mode == "observe":
            low, high = torch.aminmax(x.detach())
            for index, value in ((point, low), (point + len(self.points), -high)):
                seen = ranges.piece[index]
                torch.minimum(seen, value.to(seen.dtype), out=seen)
            return x
        scale: Any = ranges.scale_P[point]
        zero_point: Any = ranges.zero_point_P[point]
        if self._mode == "frozen":  # constants, as export wants them
            scale, zero_point = self._constants[point]
        rounded = torch.fake_quantize_per_tensor_affine(x.float(), scale, zero_point, *ACTIVATION_RANGE)
        return rounded.to(x.dtype)


class _InputHook:
    """Forward pre-hook: the first argument goes through `Quantization._see`, the others pass."""

    def __init__(self, quantization: Quantization, point: int) -> None:
        self._quantization, self._point = quantization, point

    def __call__(self, layer: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self._quantization._see(self._point, arguments[0]), *arguments[1:])


def _read_weights_anew(lstm: nn.LSTM) -> None:
    """Make an LSTM, which keeps a list of its weights, compute the list for each call and drop it after.

    Rounded weights are new tensors each time, with a graph behind them. cuDNN's flat buffer is for weights
    that stay, so they are not moved into one.
    """
    lstm._update_flat_weights = lstm._init_flat_weights  # type: ignore[method-assign]
    lstm.flatten_parameters = _leave_unflattened  # type: ignore[method-assign]
    lstm.register_forward_hook(_drop_flat_weights, always_call=True)


def _leave_unflattened() -> None:
    pass


def _drop_flat_weights(lstm: nn.Module, arguments: Any, output: Any) -> None:
    lstm._flat_weights = []  # type: ignore[assignment]

"""Variable selection with the networks of all features batched into a few matrix products.

Shapes: N tokens (batch-major), F features, C features of one chunk, H hidden, I inputs, O outputs.

The paper gives each feature a gated residual network of its own and mixes their outputs with weights from a
softmax over features. A loop over 225 such networks spends its time in launching thousands of tiny
operations; here their weights are stacked, and a chunk of features at a time goes through them. These are
the largest tensors of the model, [F, N, H], and they decide how large a batch fits. So:

- features go in chunks, and each chunk adds its share of the weighted sum, which bounds what the backward
  pass holds at once and, with gradient checkpointing, what exists at once at all;
- gate, residual, LayerNorm and weighted sum are one autograd function that keeps its inputs and recomputes
  the rest, elementwise and cheap: five tensors of that size are saved instead of eight;
- the selection network reads the features themselves. The paper feeds it the embeddings of all features,
  flattened. A scalar's embedding is affine in that scalar, so whatever its first linear map and its skip
  connection make of the flattened embeddings is an affine map of the features: the same functions with H
  times fewer weights and products.

Source: arXiv:1912.09363, section 4.2 (equations 6 to 8).
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foxray.models.layers import LAYER_NORM_EPS, GatedResidual, run_block

FEATURES_PER_CHUNK = 16
"""Large enough that a GPU sees large products, small enough for the caches of a CPU."""


def _chunked(features: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
    return torch.split(features, FEATURES_PER_CHUNK, dim)


class FeatureLinear(nn.Module):
    """One linear map per feature; `weight_FOI` stacks what F `nn.Linear` would hold.

    `weight.flatten(0, 1)` has one row per output channel, as per-channel quantization wants it.
    """

    def __init__(self, num_features: int, in_dim: int, out_dim: int) -> None:
        super().__init__()
        bound = math.sqrt(6.0 / (in_dim + out_dim))
        self.weight = nn.Parameter(torch.empty(num_features, out_dim, in_dim).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(num_features, out_dim))

    def chunks(self) -> list[tuple[Tensor, Tensor]]:
        """Weights and biases of each chunk; a parametrization of the weight is evaluated once."""
        return list(zip(_chunked(self.weight), _chunked(self.bias), strict=True))

    def forward(self, x_CNI: Tensor, parameters: tuple[Tensor, Tensor]) -> Tensor:
        """x [C, N, I] through the maps of one entry of `chunks()` to [C, N, O]."""
        weight_COI, bias_CO = parameters
        return torch.baddbmm(bias_CO.unsqueeze(1), x_CNI, weight_COI.transpose(1, 2))


class _GateAddNormSum(torch.autograd.Function):
    """sum over c of weights[n, c] * LayerNorm_c(skip + GLU(gate)): [N, H], saving only its inputs.

    In plain operations the sum before the norm, the norm and its affine map would be saved too.
    """

    @staticmethod
    def forward(
        ctx: Any, skip_CNH: Tensor, gate_CNG: Tensor, weights_NC: Tensor, scale_CH: Tensor, shift_CH: Tensor
    ) -> Tensor:
        ctx.save_for_backward(skip_CNH, gate_CNG, weights_NC, scale_CH, shift_CH)
        with torch.autocast(skip_CNH.device.type, enabled=False):
            normal_CNH, _, _, _ = _normalise(skip_CNH, gate_CNG, scale_CH.dtype)
            normal_CNH.mul_(scale_CH.unsqueeze(1)).mul_(weights_NC.t().unsqueeze(-1))
            return normal_CNH.sum(0) + weights_NC.to(scale_CH.dtype) @ shift_CH

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        skip_CNH, gate_CNG, weights_NC, scale_CH, shift_CH = ctx.saved_tensors
        dtype = scale_CH.dtype
        with torch.autocast(skip_CNH.device.type, enabled=False):
            grad_skip_CNH, grad_gate_CNG, grad_weights_NC, grad_scale_CH, grad_shift_CH = _gradients(
                skip_CNH, gate_CNG.to(dtype), weights_NC.to(dtype), scale_CH, shift_CH, grads[0]
            )
        return (
            grad_skip_CNH.to(skip_CNH.dtype),
            grad_gate_CNG.to(gate_CNG.dtype),
            grad_weights_NC.to(weights_NC.dtype),
            grad_scale_CH,
            grad_shift_CH,
        )


def _gradients(
    skip_CNH: Tensor,
    gate_CNG: Tensor,
    weights_NC: Tensor,
    scale_CH: Tensor,
    shift_CH: Tensor,
    grad_NH: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the five inputs, all in the dtype of the parameters."""
    normal_CNH, residual_CNH, mean, rstd = _normalise(skip_CNH, gate_CNG, scale_CH.dtype)
    weights_CN1 = weights_NC.t().unsqueeze(-1)

    product_CNH = normal_CNH.mul_(grad_NH)
    grad_scale_CH = (weights_CN1.transpose(1, 2) @ product_CNH).squeeze(1)
    grad_weights_NC = (product_CNH @ scale_CH.unsqueeze(-1)).squeeze(-1).t() + grad_NH @ shift_CH.t()
    grad_shift_CH = weights_NC.t() @ grad_NH

    grad_normal_CNH = torch.mul(weights_CN1, scale_CH.unsqueeze(1), out=product_CNH).mul_(grad_NH)
    grad_residual_CNH = torch.ops.aten.native_layer_norm_backward(
        grad_normal_CNH, residual_CNH, [residual_CNH.shape[-1]], mean, rstd, None, None, [True, False, False]
    )[0]
    grad_gate_CNG = torch.ops.aten.glu_backward(grad_residual_CNH, gate_CNG, -1)
    return grad_residual_CNH, grad_gate_CNG, grad_weights_NC, grad_scale_CH, grad_shift_CH


def _normalise(
    skip_CNH: Tensor, gate_CNG: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """LayerNorm without affine map of the gated residual, that residual, its mean and 1/deviation."""
    residual_CNH = F.glu(gate_CNG.to(dtype), dim=-1).add_(skip_CNH)
    normal_CNH, mean, rstd = torch.native_layer_norm(
        residual_CNH, [residual_CNH.shape[-1]], None, None, LAYER_NORM_EPS
    )
    return normal_CNH, residual_CNH, mean, rstd


class FeatureResiduals(nn.Module):
    """One gated residual network per feature, and the weighted sum of what they put out."""

    def __init__(self, num_features: int, hidden_dim: int, *, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.hidden = FeatureLinear(num_features, hidden_dim, hidden_dim)
        self.linear = FeatureLinear(num_features, hidden_dim, hidden_dim)
        self.gate = FeatureLinear(num_features, hidden_dim, 2 * hidden_dim)
        self.scale = nn.Parameter(torch.ones(num_features, hidden_dim))
        self.shift = nn.Parameter(torch.zeros(num_features, hidden_dim))

    def chunks(self) -> list[tuple[Any, ...]]:
        """Parameters of each chunk, for `forward`."""
        linears = (self.hidden.chunks(), self.linear.chunks(), self.gate.chunks())
        return list(zip(*linears, _chunked(self.scale), _chunked(self.shift), strict=True))

    def forward(self, skip_CNH: Tensor, weights_NC: Tensor, parameters: tuple[Any, ...]) -> Tensor:
        """Embedded features [C, N, H] and their weights [N, C] to their share of the sum [N, H]."""
        hidden, linear, gate, scale_CH, shift_CH = parameters
        x_CNH = F.elu(self.hidden(skip_CNH, hidden), inplace=True)
        x_CNH = self.linear(x_CNH, linear)
        x_CNH = F.dropout(x_CNH.transpose(0, 1), self.dropout, self.training).transpose(0, 1)
        gate_CNG = self.gate(x_CNH, gate)
        share_NH: Tensor = _GateAddNormSum.apply(  # type: ignore[no-untyped-call]
            skip_CNH, gate_CNG, weights_NC, scale_CH, shift_CH
        )
        return share_NH


class VariableSelection(nn.Module):
    """Weighs scalar features token by token and mixes their transformed embeddings."""

    def __init__(self, num_features: int, hidden_dim: int, *, dropout: float, has_context: bool) -> None:
        super().__init__()
        context_dim = hidden_dim if has_context else None
        self.weigh = GatedResidual(
            num_features,
            hidden_dim,
            num_features,
            dropout=dropout,
            context_dim=context_dim,
            linear_skip=True,
        )
        self.embed = FeatureLinear(num_features, 1, hidden_dim)
        self.residuals = FeatureResiduals(num_features, hidden_dim, dropout=dropout)

    def forward(
        self, x_BTF: Tensor, context_B1H: Tensor | None = None, *, recompute: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Features [B, T, F] to their mixture [B, T, H] and the weights [B, T, F], which sum to 1 over F.

        With `recompute`, no activation of a chunk outlives it; the backward pass computes it again.
        """
        weights_BTF = run_block(self._weights, x_BTF, context_B1H, recompute=recompute)
        x_FN1 = x_BTF.flatten(0, 1).t().contiguous().unsqueeze(-1)
        pieces = zip(
            _chunked(x_FN1),
            _chunked(weights_BTF.flatten(0, 1), dim=1),
            self.embed.chunks(),
            self.residuals.chunks(),
            strict=True,
        )
        shares = (run_block(self._share, *piece, recompute=recompute) for piece in pieces)
        mixed_NH = functools.reduce(torch.add, shares)
        return mixed_NH.unflatten(0, x_BTF.shape[:2]), weights_BTF

    def _weights(self, x_BTF: Tensor, context_B1H: Tensor | None) -> Tensor:
        logits_BTF: Tensor = self.weigh(x_BTF, context_B1H)
        return logits_BTF.softmax(dim=-1)

    def _share(
        self, x_CN1: Tensor, weights_NC: Tensor, embed: tuple[Tensor, Tensor], parameters: tuple[Any, ...]
    ) -> Tensor:
        share_NH: Tensor = self.residuals(self.embed(x_CN1, embed), weights_NC, parameters)
        return share_NH


class EmbeddingSelection(nn.Module):
    """The same for variables that are embedded already, such as categories."""

    def __init__(self, num_features: int, hidden_dim: int, *, dropout: float) -> None:
        super().__init__()
        self.weigh = GatedResidual(num_features * hidden_dim, hidden_dim, num_features, dropout=dropout)
        self.residuals = FeatureResiduals(num_features, hidden_dim, dropout=dropout)

    def forward(self, x_NFH: Tensor) -> Tensor:
        """Embeddings [N, F, H] to their mixture [N, H]."""
        weights_NF = self.weigh(x_NFH.flatten(1)).softmax(dim=-1)
        pieces = zip(
            _chunked(x_NFH.transpose(0, 1)),
            _chunked(weights_NF, dim=1),
            self.residuals.chunks(),
            strict=True,
        )
        shares = (self.residuals(*piece) for piece in pieces)
        mixed_NH: Tensor = functools.reduce(torch.add, shares)
        return mixed_NH

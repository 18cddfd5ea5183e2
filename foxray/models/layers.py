"""The building blocks of the Temporal Fusion Transformer that are not the variable selection.

Shapes: B batch, T positions, N tokens (B x T in batch-major order, or B alone), I inputs, O outputs,
H hidden, D width of one attention head, A attention heads, K keys, R queries.

Three rules hold for every block, because the training step splits a batch into micro-batches and adds
their gradients up: samples never mix, dropout goes through `F.dropout` on tensors that have the batch (or
the tokens, batch-major) in dimension 0, and no parameter has a true gradient of zero (attention keys carry
no bias: softmax ignores it, and an adaptive optimizer would amplify its rounding noise). Every matrix product
is an `nn.Linear` of its own, so that weights can be parametrized and inputs observed by hooks.

Source: Lim et al., "Temporal Fusion Transformers for Interpretable Multi-horizon Time Series Forecasting",
arXiv:1912.09363, sections 4.1 and 4.4.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

LAYER_NORM_EPS = 1e-3
"""As in the authors' implementation (the default of Keras), a hundred times PyTorch's."""


def run_block(block: Any, *arguments: Any, recompute: bool) -> Any:
    """Call a block, or have the backward pass call it again instead of keeping what it computed.

    The random state is kept, so that dropout falls on the same elements the second time.
    """
    if recompute and torch.is_grad_enabled():
        return checkpoint(block, *arguments, use_reentrant=False, preserve_rng_state=True)
    return block(*arguments)


def linear(in_dim: int, out_dim: int, *, bias: bool = True) -> nn.Linear:
    """A linear map initialised as by the authors: Glorot-uniform weights, no offset."""
    layer = nn.Linear(in_dim, out_dim, bias=bias)
    nn.init.xavier_uniform_(layer.weight)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


class GateAddNorm(nn.Module):
    """`LayerNorm(skip + GLU(x))`: a closed gate leaves the normalised skip connection (equation 5)."""

    def __init__(self, in_dim: int, out_dim: int, *, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.gate = linear(in_dim, 2 * out_dim)
        """Rows 0 to out_dim are the values, the others the gate's logits."""
        self.norm = nn.LayerNorm(out_dim, eps=LAYER_NORM_EPS)

    def forward(self, x_NI: Tensor, skip_NO: Tensor) -> Tensor:
        x_NI = F.dropout(x_NI, self.dropout, self.training)
        gated_NO: Tensor = self.norm(skip_NO + F.glu(self.gate(x_NI), dim=-1))
        return gated_NO


class GatedResidual(nn.Module):
    """Gated residual network with an optional context added before the nonlinearity (equations 2 to 4)."""

    def __init__(
        self,
        in_dim: int,
        hidden_dim: int,
        out_dim: int,
        *,
        dropout: float,
        context_dim: int | None = None,
        linear_skip: bool = False,
    ) -> None:
        super().__init__()
        self.skip = linear(in_dim, out_dim) if linear_skip or in_dim != out_dim else nn.Identity()
        self.hidden = linear(in_dim, hidden_dim)
        self.context = None if context_dim is None else linear(context_dim, hidden_dim, bias=False)
        self.linear = linear(hidden_dim, hidden_dim)
        self.gate_add_norm = GateAddNorm(hidden_dim, out_dim, dropout=dropout)

    def forward(self, x_NI: Tensor, context_NH: Tensor | None = None) -> Tensor:
        """x [..., I] and context (broadcast against [..., H]) to [..., O]."""
        hidden_NH = self.hidden(x_NI)
        if self.context is not None:
            hidden_NH = hidden_NH + self.context(context_NH)
        hidden_NH = self.linear(F.elu(hidden_NH, inplace=True))
        output_NO: Tensor = self.gate_add_norm(hidden_NH, self.skip(x_NI))
        return output_NO


class InterpretableAttention(nn.Module):
    """Causal attention whose heads share one value projection (equations 13 to 16).

    With shared values the mean over heads of `attention @ values` is the mean attention times the values, so
    one product serves all heads, and the mean attention is what really weighs the past.
    """

    def __init__(self, hidden_dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = hidden_dim // num_heads
        self.query = linear(hidden_dim, hidden_dim)
        self.key = linear(hidden_dim, hidden_dim, bias=False)
        self.value = linear(hidden_dim, self.head_dim)
        self.output = linear(self.head_dim, hidden_dim, bias=False)

    def forward(self, x_BKH: Tensor, num_queries: int) -> tuple[Tensor, Tensor]:
        """Attend from the last `num_queries` positions to all positions up to each.

        Returns the output [B, R, H] and the attention of each head [B, A, R, K].
        """
        num_keys = x_BKH.shape[1]
        queries_BRH = self.query(x_BKH[:, num_keys - num_queries :]) / math.sqrt(self.head_dim)
        queries_BARD = queries_BRH.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        keys_BADK = self.key(x_BKH).unflatten(-1, (self.num_heads, -1)).permute(0, 2, 3, 1)
        scores_BARK = queries_BARD @ keys_BADK
        if num_queries > 1:
            allowed_RK = torch.ones(num_queries, num_keys, dtype=torch.bool, device=x_BKH.device)
            allowed_RK = allowed_RK.tril(num_keys - num_queries)
            scores_BARK = scores_BARK.masked_fill(~allowed_RK, float("-inf"))
        attention_BARK = scores_BARK.softmax(dim=-1)
        mixed_BRD = attention_BARK.mean(dim=1) @ self.value(x_BKH)
        return self.output(mixed_BRD), attention_BARK


def lstm(hidden_dim: int, num_layers: int) -> nn.LSTM:
    """A batch-first LSTM without inner dropout, initialised as by the authors.

    Glorot input weights, orthogonal recurrent weights and a forget gate that starts open (bias 1).
    """
    module = nn.LSTM(hidden_dim, hidden_dim, num_layers, batch_first=True)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.startswith("weight_ih"):
                nn.init.xavier_uniform_(parameter)
            elif name.startswith("weight_hh"):
                for gate_HH in parameter.chunk(4):
                    nn.init.orthogonal_(gate_HH)
            else:
                parameter.zero_()
                if name.startswith("bias_ih"):
                    parameter[hidden_dim : 2 * hidden_dim] = 1.0
    return module

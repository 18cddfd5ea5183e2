"""Temporal Fusion Transformer for a window of bars: quantiles of one target, and what it looked at.

Shapes: B batch, T positions, F features, S static variables, H hidden, Q quantiles, A attention heads.

The architecture of the paper for a task without known future inputs: variable selection, LSTM, static
enrichment, interpretable causal attention, gated residual networks, quantile head. Training needs the
quantiles of the window's last position only, so `forward` lets that position alone attend and pass through
what follows; `forward_all` answers for every position and returns the weights that explain the answer. Static
variables (a symbol's number, say) bring four contexts: to variable selection, to the LSTM's two initial
states, and to the enrichment. Without static variables there is nothing to enrich with, and neither the
encoders nor the enrichment exist.

Source: Lim et al., arXiv:1912.09363, section 4.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from foxray.errors import UserError
from foxray.models.layers import GateAddNorm, GatedResidual, InterpretableAttention, linear, lstm, run_block
from foxray.models.variable_selection import EmbeddingSelection, VariableSelection


@dataclass(frozen=True, kw_only=True)
class TftConfig:
    """Sizes of a Temporal Fusion Transformer."""

    num_features: int
    """Numeric inputs at each position."""
    seq_len: int = 60
    """Positions of a window. The weights do not depend on it."""
    hidden_dim: int = 64
    """Width of every layer (the paper tries 10 to 320)."""
    num_heads: int = 4
    """Attention heads; they divide `hidden_dim`."""
    lstm_layers: int = 1
    """Stacked LSTM layers, without dropout in between."""
    dropout: float = 0.1
    """Share of elements dropped before each gate while training."""
    quantiles: tuple[float, ...] = (0.1, 0.5, 0.9)
    """Quantiles to predict, rising, strictly between 0 and 1."""
    static_cardinalities: tuple[int, ...] = ()
    """Number of categories of each static variable, for instance `(number of symbols,)`."""

    def __post_init__(self) -> None:
        for name in ("num_features", "seq_len", "hidden_dim", "num_heads", "lstm_layers"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if self.hidden_dim % self.num_heads:
            divisors = [n for n in range(1, min(self.hidden_dim, 16) + 1) if self.hidden_dim % n == 0]
            raise UserError(
                f"hidden_dim {self.hidden_dim} is not divisible by num_heads {self.num_heads}; "
                f"choose num_heads from {', '.join(map(str, divisors))}, "
                f"or a hidden_dim that is a multiple of {self.num_heads}"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise UserError(f"dropout is {self.dropout}; it must be at least 0 and below 1")
        rising = all(low < high for low, high in zip(self.quantiles, self.quantiles[1:], strict=False))
        if not self.quantiles or not rising or not 0.0 < self.quantiles[0] <= self.quantiles[-1] < 1.0:
            raise UserError(f"quantiles are {self.quantiles}; they must rise, strictly between 0 and 1")
        if any(cardinality < 1 for cardinality in self.static_cardinalities):
            raise UserError(f"static_cardinalities are {self.static_cardinalities}; each must be 1 or more")


@dataclass(frozen=True, kw_only=True)
class TftOutput:
    """What the model answers at every position, and why."""

    quantiles_BTQ: Tensor
    """Predicted quantiles, in the unit of the training targets."""
    selection_BTF: Tensor
    """Weight of each feature; at every position they sum to 1."""
    attention_BATT: Tensor
    """Attention of each head from a position (third dimension) to those up to it (fourth)."""


@dataclass(frozen=True, kw_only=True)
class StaticContexts:
    """What the static variables tell the other parts, each [B, H]."""

    selection_BH: Tensor
    lstm_hidden_BH: Tensor
    lstm_cell_BH: Tensor
    enrichment_BH: Tensor


class StaticEncoder(nn.Module):
    """Categories to contexts: embeddings, variable selection over them, one network for each context."""

    def __init__(self, config: TftConfig) -> None:
        super().__init__()
        hidden_dim, dropout = config.hidden_dim, config.dropout
        self.embeddings = nn.ModuleList(nn.Embedding(n, hidden_dim) for n in config.static_cardinalities)
        self.select = EmbeddingSelection(len(config.static_cardinalities), hidden_dim, dropout=dropout)
        self.selection = GatedResidual(hidden_dim, hidden_dim, hidden_dim, dropout=dropout)
        self.lstm_hidden = GatedResidual(hidden_dim, hidden_dim, hidden_dim, dropout=dropout)
        self.lstm_cell = GatedResidual(hidden_dim, hidden_dim, hidden_dim, dropout=dropout)
        self.enrichment = GatedResidual(hidden_dim, hidden_dim, hidden_dim, dropout=dropout)

    def forward(self, static_BS: Tensor) -> StaticContexts:
        embedded = [embed(static_BS[:, s]) for s, embed in enumerate(self.embeddings)]
        static_BH = self.select(torch.stack(embedded, dim=1))
        return StaticContexts(
            selection_BH=self.selection(static_BH),
            lstm_hidden_BH=self.lstm_hidden(static_BH),
            lstm_cell_BH=self.lstm_cell(static_BH),
            enrichment_BH=self.enrichment(static_BH),
        )


class TemporalFusionTransformer(nn.Module):
    """Quantile forecasts from windows of features, for training under a tight memory budget."""

    gradient_checkpointing: bool
    """Recompute activations block by block in the backward pass. May be switched at any time."""

    def __init__(self, config: TftConfig) -> None:
        super().__init__()
        self.config = config
        self.gradient_checkpointing = False
        hidden_dim, dropout = config.hidden_dim, config.dropout
        has_static = bool(config.static_cardinalities)
        self.static = StaticEncoder(config) if has_static else None
        self.selection = VariableSelection(
            config.num_features, hidden_dim, dropout=dropout, has_context=has_static
        )
        self.lstm = lstm(hidden_dim, config.lstm_layers)
        self.lstm_gate = GateAddNorm(hidden_dim, hidden_dim, dropout=dropout)
        self.enrichment = (
            GatedResidual(hidden_dim, hidden_dim, hidden_dim, dropout=dropout, context_dim=hidden_dim)
            if has_static
            else None
        )
        self.attention = InterpretableAttention(hidden_dim, config.num_heads)
        self.attention_gate = GateAddNorm(hidden_dim, hidden_dim, dropout=dropout)
        self.position_wise = GatedResidual(hidden_dim, hidden_dim, hidden_dim, dropout=dropout)
        self.output_gate = GateAddNorm(hidden_dim, hidden_dim, dropout=dropout)
        self.head = linear(hidden_dim, len(config.quantiles))

    def forward(self, x_BTF: Tensor, static_BS: Tensor | None = None) -> Tensor:
        """Quantiles [B, Q] at the last position of windows [B, T, F]; static variables are int64 [B, S]."""
        return self._answer(x_BTF, static_BS, num_queries=1)[0].squeeze(1)

    def forward_all(self, x_BTF: Tensor, static_BS: Tensor | None = None) -> TftOutput:
        """Quantiles at every position, each from the positions up to it, and the weights behind them."""
        quantiles_BTQ, selection_BTF, attention_BATT = self._answer(x_BTF, static_BS, x_BTF.shape[1])
        return TftOutput(
            quantiles_BTQ=quantiles_BTQ, selection_BTF=selection_BTF, attention_BATT=attention_BATT
        )

    def _answer(
        self, x_BTF: Tensor, static_BS: Tensor | None, num_queries: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Quantiles and attention of the last `num_queries` positions, selection weights of all."""
        recompute = self.gradient_checkpointing
        if (self.static is None) != (static_BS is None):
            raise ValueError(
                f"the model has {len(self.config.static_cardinalities)} static variables "
                f"but static_BS is {'missing' if static_BS is None else 'given'}"
            )
        context = None if self.static is None else self.static(static_BS)
        selection_B1H = None if context is None else context.selection_BH.unsqueeze(1)
        mixed_BTH, selection_BTF = self.selection(x_BTF, selection_B1H, recompute=recompute)
        temporal_BTH = run_block(self._remember, mixed_BTH, context, recompute=recompute)
        quantiles_BRQ, attention_BART = run_block(
            self._decide, temporal_BTH, context, num_queries, recompute=recompute
        )
        return quantiles_BRQ, selection_BTF, attention_BART

    def _remember(self, mixed_BTH: Tensor, context: StaticContexts | None) -> Tensor:
        """LSTM with its gated skip connection."""
        state = None
        if context is not None:
            layers = self.config.lstm_layers
            state = (
                context.lstm_hidden_BH.expand(layers, -1, -1).contiguous(),
                context.lstm_cell_BH.expand(layers, -1, -1).contiguous(),
            )
        # PyTorch has a bfloat16 LSTM for few CPUs and raises on the others: there it leaves autocast.
        device = mixed_BTH.device.type
        with torch.autocast(device, enabled=device != "cpu" and torch.is_autocast_enabled(device)):
            recalled_BTH = self.lstm(mixed_BTH, state)[0]
        temporal_BTH: Tensor = self.lstm_gate(recalled_BTH, mixed_BTH)
        return temporal_BTH

    def _decide(
        self, temporal_BTH: Tensor, context: StaticContexts | None, num_queries: int
    ) -> tuple[Tensor, Tensor]:
        """Enrichment, attention and head for the last `num_queries` positions (R)."""
        enriched_BTH = temporal_BTH
        if self.enrichment is not None and context is not None:
            enriched_BTH = self.enrichment(temporal_BTH, context.enrichment_BH.unsqueeze(1))
        attended_BRH, attention_BART = self.attention(enriched_BTH, num_queries)
        attended_BRH = self.attention_gate(attended_BRH, enriched_BTH[:, -num_queries:])
        output_BRH = self.output_gate(self.position_wise(attended_BRH), temporal_BTH[:, -num_queries:])
        # Small moves of a price need more digits than bfloat16 has: the head leaves autocast.
        with torch.autocast(output_BRH.device.type, enabled=False):
            quantiles_BRQ: Tensor = self.head(output_BRH.to(self.head.weight.dtype))
        return quantiles_BRQ, attention_BART

"""Quantile (pinball) loss, and a head that starts from what is known before training.

Shapes: B samples, Q quantiles.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn


def quantile_loss(
    prediction_BQ: Tensor,
    target_B: Tensor,
    quantiles_Q: Tensor,
    reduction: Literal["sum", "mean", "none"] = "sum",
) -> Tensor:
    """Pinball loss `max(q (y - p), (q - 1)(y - p))`, summed over the quantiles of a sample.

    prediction [B, Q], target [B] and quantiles [Q] share a unit for the first two; the result has that unit.
    `sum` adds up the samples and `mean` averages them (scalars); `none` returns the loss of each [B].
    Source: Koenker and Bassett, "Regression Quantiles", 1978; arXiv:1912.09363, equation 25.
    """
    error_BQ = target_B.unsqueeze(-1) - prediction_BQ
    loss_B = torch.maximum(quantiles_Q * error_BQ, (quantiles_Q - 1) * error_BQ).sum(dim=-1)
    if reduction == "none":
        return loss_B
    return loss_B.mean() if reduction == "mean" else loss_B.sum()


def initialise_quantile_head(model: nn.Module, values_Q: Tensor) -> None:
    """Have `model.head` answer `values_Q` [Q] whatever the input, so that training starts from there.

    Meant for the naive forecast: the empirical quantiles of the training targets, in the targets' unit. The
    head's weights become zero; they learn first, and the rest of the model from the second step on.
    """
    head = model.head
    assert isinstance(head, nn.Linear)
    with torch.no_grad():
        head.weight.zero_()
        head.bias.copy_(values_Q)

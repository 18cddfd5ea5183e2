"""A training step (forward and backward) of our TFT against the one of pytorch-forecasting.

Both see 225 real features over 60 positions, hidden width 16, one head count, dropout 0.1 and three
quantiles at one forecast position. The peer has a decoder too; it gets the one position and one feature that
it needs. Steps are interleaved, so that a busy machine slows both.
"""

import importlib.util
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foxray.models.quantile import quantile_loss
from foxray.models.tft import TemporalFusionTransformer, TftConfig

NUM_FEATURES, SEQ_LEN, HIDDEN_DIM, NUM_HEADS, DROPOUT = 225, 60, 16, 4, 0.1
QUANTILES = (0.1, 0.5, 0.9)


def _ours(x_BTF: Tensor, target_B: Tensor, *, gradient_checkpointing: bool) -> Callable[[], None]:
    config = TftConfig(
        num_features=NUM_FEATURES,
        seq_len=SEQ_LEN,
        hidden_dim=HIDDEN_DIM,
        num_heads=NUM_HEADS,
        dropout=DROPOUT,
        quantiles=QUANTILES,
    )
    model = TemporalFusionTransformer(config)
    model.gradient_checkpointing = gradient_checkpointing
    quantiles_Q = torch.tensor(QUANTILES)

    def step() -> None:
        model.zero_grad()
        quantile_loss(model(x_BTF), target_B, quantiles_Q).backward()

    return step


def _peer(x_BTF: Tensor, target_B: Tensor) -> Callable[[], None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from pytorch_forecasting.metrics import QuantileLoss
        from pytorch_forecasting.models import TemporalFusionTransformer as PeerTransformer

        names = [f"feature_{f}" for f in range(NUM_FEATURES)]
        model = PeerTransformer(
            hidden_size=HIDDEN_DIM,
            hidden_continuous_size=HIDDEN_DIM,
            attention_head_size=NUM_HEADS,
            dropout=DROPOUT,
            output_size=len(QUANTILES),
            loss=QuantileLoss(list(QUANTILES)),
            output_transformer=lambda outputs: outputs["prediction"],
            max_encoder_length=SEQ_LEN,
            x_reals=names,
            time_varying_reals_encoder=names,
            time_varying_reals_decoder=names[:1],
        )
    batch = len(x_BTF)
    inputs = {
        "encoder_cont": x_BTF,
        "decoder_cont": x_BTF[:, -1:],
        "encoder_cat": torch.zeros(batch, SEQ_LEN, 0, dtype=torch.long),
        "decoder_cat": torch.zeros(batch, 1, 0, dtype=torch.long),
        "encoder_lengths": torch.full((batch,), SEQ_LEN),
        "decoder_lengths": torch.ones(batch, dtype=torch.long),
        "target_scale": torch.tensor([[0.0, 1.0]]).expand(batch, 2),
    }
    quantiles_Q = torch.tensor(QUANTILES)

    def step() -> None:
        model.zero_grad()
        quantile_loss(model(inputs)["prediction"].squeeze(1), target_B, quantiles_Q).backward()

    return step


def run(batch_sizes: tuple[int, ...] = (4, 32, 64), repeats: int = 7) -> dict[str, Any]:
    """Median seconds of a step at each batch size, and how many times as long the peer takes."""
    has_peer = importlib.util.find_spec("pytorch_forecasting") is not None
    if not has_peer:
        print("pytorch-forecasting is not installed: its row is left out (`make bench` installs it)")
    figures: dict[str, Any] = {}
    for batch_size in batch_sizes:
        torch.manual_seed(0)
        x_BTF, target_B = torch.randn(batch_size, SEQ_LEN, NUM_FEATURES), torch.randn(batch_size)
        steps = {
            "foxray": _ours(x_BTF, target_B, gradient_checkpointing=False),
            "foxray, gradient checkpointing": _ours(x_BTF, target_B, gradient_checkpointing=True),
        }
        if has_peer:
            steps["pytorch-forecasting"] = _peer(x_BTF, target_B)
        figures[f"batch {batch_size}"] = _medians(steps, repeats, batch_size)
    return figures


def _medians(steps: dict[str, Callable[[], None]], repeats: int, batch_size: int) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(repeats + 1):
        for name, step in steps.items():
            started = time.perf_counter()
            step()
            if repeat > 0:  # the first one pages memory in
                seconds[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, median in medians.items():
        ratio = median / medians["foxray"]
        print(f"batch {batch_size:3d}  {name:<31} {median * 1e3:8.0f} ms  {ratio:5.2f} x foxray")
    return medians


if __name__ == "__main__":
    run()

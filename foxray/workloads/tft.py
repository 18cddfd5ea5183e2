"""The Temporal Fusion Transformer over windows of prepared bars, with the quantile loss.

Legend: B = samples of a batch, T = rows of a window, F = features, Q = quantiles, R = rows of the table.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from foxray.data.prepared import PreparedData
from foxray.data.windows import WindowGather
from foxray.memory.budget import current_budget, host_memory
from foxray.memory.device import device_memory
from foxray.models.quantile import initialise_quantile_head, quantile_loss
from foxray.models.tft import TemporalFusionTransformer, TftConfig

if TYPE_CHECKING:
    from foxray.training.config import TrainConfig

# A feature table larger than this part of the free memory stays on the host: activations need the rest.
TABLE_SHARE_OF_FREE_MEMORY = 0.25


class TftWorkload:
    """A TFT bound to prepared data; see `Workload`.

    The loss of a sample is the mean pinball loss over the quantiles, on the scaled target.
    """

    name = "tft"
    validation_sums: tuple[str, ...] = ("validation_loss", "naive_loss", "coverage")

    def __init__(self, config: "TrainConfig", data: PreparedData) -> None:
        self._data = data
        self._precision = config.precision
        self._model_config = TftConfig(
            num_features=len(data.feature_names),
            seq_len=config.seq_len,
            hidden_dim=config.hidden_dim,
            num_heads=config.num_heads,
            dropout=config.dropout,
            static_cardinalities=(len(data.symbols),) if len(data.symbols) > 1 else (),
        )
        self._quantiles = torch.tensor(self._model_config.quantiles)
        self.num_train = len(data.train_windows_N)
        self.num_valid = len(data.valid_windows_N)
        self.place(torch.device("cpu"))

    def build_model(self) -> nn.Module:
        """A TFT whose output starts at the empirical quantiles of the training targets."""
        model = TemporalFusionTransformer(self._model_config)
        initialise_quantile_head(model, self._data.target_quantiles(self._model_config.quantiles))
        return model

    def place(self, device: torch.device) -> None:
        """Keep the feature table on the device if it leaves room for the work, else on the host."""
        self._device = device
        table_RF = self._data.features_RF
        free_bytes = device_memory(device).free_bytes
        is_host = device.type == "cpu" and current_budget() is None
        fits = free_bytes is not None and table_RF.nbytes <= TABLE_SHARE_OF_FREE_MEMORY * free_bytes
        self._on_device = fits and not is_host
        if self._on_device:
            # `clone` even from CPU to CPU: the copy is charged to the emulated device, the map is not.
            table_RF = table_RF.to(device, copy=True)
        self._gather = WindowGather(table_RF, self._model_config.seq_len)

    def loss_sum(self, model: nn.Module, positions_B: Tensor) -> Tensor:
        """Sum over the samples of the mean pinball loss."""
        rows_B = self._data.train_windows_N[positions_B]
        forecast_BQ = self._forecast(model, rows_B)
        return self._loss_B(forecast_BQ, self._target(rows_B)).sum()

    def evaluate(self, model: nn.Module, positions_B: Tensor) -> Tensor:
        """Sums of the loss, of the naive forecast's loss, and of targets between outer quantiles."""
        rows_B = self._data.valid_windows_N[positions_B]
        target_B = self._target(rows_B)
        forecast_BQ = self._forecast(model, rows_B)
        naive_BQ = self._data.naive_forecast(self._model_config.quantiles, rows_B).to(self._device)
        inside_B = (target_B >= forecast_BQ[:, 0]) & (target_B <= forecast_BQ[:, -1])
        return torch.stack(
            [
                self._loss_B(forecast_BQ, target_B).sum(dtype=torch.float64),
                self._loss_B(naive_BQ, target_B).sum(dtype=torch.float64),
                inside_B.sum(dtype=torch.float64),
            ]
        )

    def use_gradient_checkpointing(self, model: nn.Module) -> None:
        """Recompute the variable selection and what follows in the backward pass."""
        assert isinstance(model, TemporalFusionTransformer)
        model.gradient_checkpointing = True

    def spec(self) -> dict[str, Any]:
        """Model, data settings and scaling: all that `foxray predict` needs beside the weights."""
        config = self._model_config
        return {
            "model": self.name,
            "tft": {
                "num_features": config.num_features,
                "seq_len": config.seq_len,
                "hidden_dim": config.hidden_dim,
                "num_heads": config.num_heads,
                "lstm_layers": config.lstm_layers,
                "dropout": config.dropout,
                "quantiles": list(config.quantiles),
                "static_cardinalities": list(config.static_cardinalities),
            },
            "data": self._data.settings.to_dict(),
            "scaling": self._data.scaling.to_dict(),
        }

    def _forecast(self, model: nn.Module, rows_B: Tensor) -> Tensor:
        x_BTF = self._windows(rows_B)
        static_BS = self._static(rows_B)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._precision == "bf16"):
            forecast_BQ: Tensor = model(x_BTF, static_BS)
        return forecast_BQ.float() if forecast_BQ.dtype == torch.bfloat16 else forecast_BQ

    def _windows(self, rows_B: Tensor) -> Tensor:
        if self._on_device:
            return self._gather(rows_B.to(self._device))
        if self._device.type == "cpu" and current_budget() is None:
            return self._gather(rows_B)
        with host_memory():
            x_BTF = self._gather(rows_B)
        return x_BTF.to(self._device, copy=True)

    def _static(self, rows_B: Tensor) -> Tensor | None:
        if not self._model_config.static_cardinalities:
            return None
        return self._data.symbol_R[rows_B].unsqueeze(1).to(self._device)

    def _target(self, rows_B: Tensor) -> Tensor:
        return self._data.target_R[rows_B].to(self._device)

    def _loss_B(self, forecast_BQ: Tensor, target_B: Tensor) -> Tensor:
        """Mean pinball loss over the quantiles, of each sample."""
        quantiles_Q = self._quantiles.to(self._device)
        loss_B = quantile_loss(forecast_BQ, target_B, quantiles_Q, reduction="none")
        return loss_B / len(self._quantiles)

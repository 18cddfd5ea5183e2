"""The model of a run as it stands in the run's last checkpoint, for whatever comes after training."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from foxray.data.scaling import Scaling
from foxray.data.settings import DataSettings
from foxray.driver.run import checkpoint_folder
from foxray.errors import UserError
from foxray.ledger.store import Ledger
from foxray.models.quantization import Quantization
from foxray.models.tft import TemporalFusionTransformer, TftConfig
from foxray.training.checkpoint import Checkpoints


@dataclass(frozen=True, kw_only=True)
class RestoredModel:
    """A trained model in evaluation mode, on the CPU, and what its inputs and outputs mean."""

    model: nn.Module
    config: TftConfig
    quantization: Quantization | None
    """Frozen; None for a float model."""
    scaling: Scaling
    settings: DataSettings


def restore_model(storage: str, run_id: str, *, command: str) -> RestoredModel:
    """Build the model of a run and load its last checkpoint; `command` names the caller in errors.

    Raises UserError for an unknown run, or one without a checkpoint.
    """
    if not Ledger(storage).exists(run_id):
        known = ", ".join(Ledger(storage).run_ids()[-5:]) or "none"
        raise UserError(f"{command} {run_id}: no such run in {storage}; the newest there: {known}")
    restored = Checkpoints(checkpoint_folder(storage, run_id)).load_latest()
    if restored is None:
        raise UserError(f"{command} {run_id}: the run has no whole checkpoint in {storage}; train it first")
    sizes: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in restored.spec["tft"].items()
    }
    config = TftConfig(**sizes)
    model = TemporalFusionTransformer(config)
    quantization = Quantization(model) if restored.spec.get("quantized") else None
    model.load_state_dict(restored.model)
    model.eval()
    if quantization is not None:
        quantization.mode = "frozen"
    return RestoredModel(
        model=model,
        config=config,
        quantization=quantization,
        scaling=Scaling.from_dict(restored.spec["scaling"]),
        settings=DataSettings.from_dict(restored.spec["data"]),
    )

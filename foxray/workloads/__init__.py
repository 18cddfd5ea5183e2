"""The model families, by the name that `--model` takes."""

from typing import TYPE_CHECKING

from foxray.workloads.base import Workload

if TYPE_CHECKING:
    from foxray.training.config import TrainConfig


def create_workload(config: "TrainConfig", prepared_path: str) -> Workload:
    """The workload of a configuration over prepared data (opened by memory map)."""
    from foxray.data.prepared import PreparedData
    from foxray.workloads.tft import TftWorkload

    return TftWorkload(config, PreparedData.open(prepared_path))

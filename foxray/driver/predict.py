"""`foxray predict`: quantiles for new bars from the last checkpoint of a run.

Bars are prepared with the features and the scaling of the run, never with statistics of their own, and
the forecasts are written in the unit of the target.
"""

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from foxray.data.prepare import prepare
from foxray.data.replacing import replacing
from foxray.data.windows import WindowGather
from foxray.driver.restore import restore_model
from foxray.driver.run import prepared_folder


def predict(
    storage: str,
    run_id: str,
    parquet_file: Path,
    output: Path,
    *,
    batch_size: int,
    log: Callable[[str], None],
) -> int:
    """Write one row a window: time, symbol (where there is one), and a column for each quantile.

    Returns the number of rows. Raises UserError for an unknown run, a run without a checkpoint, or bars
    that the run's features cannot be made from.
    """
    restored = restore_model(storage, run_id, command="predict")
    model, config = restored.model, restored.config
    data = prepare(
        parquet_file, restored.settings, prepared_folder(storage), log=log, scaling=restored.scaling
    )
    gather = WindowGather(data.features_RF, config.seq_len)
    rows_N = data.all_windows_N
    chunks = []
    with torch.inference_mode():
        for rows_B in torch.split(rows_N, batch_size):
            static_BS = data.symbol_R[rows_B].unsqueeze(1) if config.static_cardinalities else None
            chunks.append(model(gather(rows_B), static_BS))
    forecast_NQ = data.unscale_target(torch.cat(chunks))
    columns = {"timestamp": pa.array(data.timestamps_R[rows_N].numpy(), pa.timestamp("ns", tz="UTC"))}
    if data.symbols:
        columns["symbol"] = pa.array([data.symbols[i] for i in data.symbol_R[rows_N].tolist()])
    for index, quantile in enumerate(config.quantiles):
        columns[f"p{quantile * 100:g}"] = pa.array(forecast_NQ[:, index].numpy())
    with replacing(output) as temporary:
        pq.write_table(pa.table(columns), temporary)
    return len(rows_N)

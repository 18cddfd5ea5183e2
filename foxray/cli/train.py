"""`foxray train`: flags to configuration, views of the run to the terminal."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from foxray.cli.console import Console, LogFormat, open_console
from foxray.errors import FoxrayError, UserError

# Every option's real default is None, so that a flag that was given can be told from one that was not:
# flags win over the configuration file, the file over the preset, the preset over the defaults.
_DATA, _MODEL, _MEMORY, _RUN = "Data", "Model and training", "Memory", "Run"
_QAT = "Quantization"


def train(
    ctx: typer.Context,
    model: Annotated[str | None, typer.Option(help="Model family: tft.", show_default="tft")] = None,
    parquet_file: Annotated[
        Path | None, typer.Option(help="Bars (OHLCV) or prepared features.", rich_help_panel=_DATA)
    ] = None,
    num_features: Annotated[
        int | None,
        typer.Option(
            help="Take the first N features of the documented order.",
            rich_help_panel=_DATA,
            show_default="all",
        ),
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option(help="Bars in a window.", rich_help_panel=_DATA, show_default="60")
    ] = None,
    horizon: Annotated[
        int | None,
        typer.Option(help="Bars ahead that are forecast.", rich_help_panel=_DATA, show_default="1"),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(help="Column to forecast.", rich_help_panel=_DATA, show_default="log return of close"),
    ] = None,
    train_fraction: Annotated[
        float | None,
        typer.Option(help="Part of the time span to train on.", rich_help_panel=_DATA, show_default="0.8"),
    ] = None,
    session_gap: Annotated[
        float | None,
        typer.Option(
            help="Minutes without a bar that end a session.", rich_help_panel=_DATA, show_default="30"
        ),
    ] = None,
    window_stride: Annotated[
        int | None, typer.Option(help="Take every Nth window.", rich_help_panel=_DATA, show_default="1")
    ] = None,
    epochs: Annotated[int | None, typer.Option(rich_help_panel=_MODEL, show_default="1")] = None,
    learning_rate: Annotated[float | None, typer.Option(rich_help_panel=_MODEL, show_default="0.001")] = None,
    lr_schedule: Annotated[
        str | None,
        typer.Option(help="constant or cosine.", rich_help_panel=_MODEL, show_default="constant"),
    ] = None,
    early_stopping_patience: Annotated[
        int | None,
        typer.Option(
            help="End after N epochs without a lower validation loss.",
            rich_help_panel=_MODEL,
            show_default="off",
        ),
    ] = None,
    hidden_dim: Annotated[int | None, typer.Option(rich_help_panel=_MODEL, show_default="64")] = None,
    num_heads: Annotated[int | None, typer.Option(rich_help_panel=_MODEL, show_default="4")] = None,
    dropout: Annotated[float | None, typer.Option(rich_help_panel=_MODEL, show_default="0.1")] = None,
    precision: Annotated[
        str | None, typer.Option(help="fp32 or bf16 (autocast).", rich_help_panel=_MODEL, show_default="fp32")
    ] = None,
    seed: Annotated[int | None, typer.Option(rich_help_panel=_MODEL, show_default="0")] = None,
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic",
            help="Same bits with and without OOMs: compute in blocks of --min-batch-size (slower).",
            rich_help_panel=_MODEL,
        ),
    ] = False,
    batch_size: Annotated[
        int | None,
        typer.Option(
            help="Samples in one forward and backward on one worker; halved when memory runs out.",
            rich_help_panel=_MEMORY,
            show_default="32, or 16 for data over 180 days",
        ),
    ] = None,
    accumulation_steps: Annotated[
        int | None,
        typer.Option(help="Batches per optimizer step.", rich_help_panel=_MEMORY, show_default="1"),
    ] = None,
    min_batch_size: Annotated[
        int | None,
        typer.Option(help="Give up rather than go below (1-64).", rich_help_panel=_MEMORY, show_default="2"),
    ] = None,
    max_oom_retries: Annotated[
        int | None,
        typer.Option(help="Retries per phase and worker (1-10).", rich_help_panel=_MEMORY, show_default="3"),
    ] = None,
    use_qat: Annotated[
        bool,
        typer.Option(
            "--use-qat",
            help="Quantization-aware training: calibrate, then train with int8 weights.",
            rich_help_panel=_QAT,
        ),
    ] = False,
    qat_calibration_batches: Annotated[
        int | None,
        typer.Option(
            help="Effective batches to calibrate on (10-500).",
            rich_help_panel=_QAT,
            show_default="3% of the training",
        ),
    ] = None,
    qat_min_batch_size: Annotated[
        int | None,
        typer.Option(
            help="--min-batch-size of the calibration (1-64).",
            rich_help_panel=_QAT,
            show_default="--min-batch-size",
        ),
    ] = None,
    qat_max_oom_retries: Annotated[
        int | None,
        typer.Option(
            help="--max-oom-retries of the calibration (1-10).",
            rich_help_panel=_QAT,
            show_default="--max-oom-retries",
        ),
    ] = None,
    no_keep_effective_batch: Annotated[
        bool,
        typer.Option(
            "--no-keep-effective-batch",
            help="Let the optimizer step shrink with the batch, instead of accumulating.",
            rich_help_panel=_MEMORY,
        ),
    ] = False,
    no_oom_recovery: Annotated[
        bool, typer.Option("--no-oom-recovery", help="End at the first OOM.", rich_help_panel=_MEMORY)
    ] = False,
    on_exhausted: Annotated[
        str | None,
        typer.Option(
            help="raise, or rungs to try at the minimum: gradient-checkpointing,cpu",
            rich_help_panel=_MEMORY,
            show_default="raise",
        ),
    ] = None,
    emulate_gpu: Annotated[
        str | None,
        typer.Option(
            help="Rehearse on the CPU with a card's memory (a name, or a size).", rich_help_panel=_MEMORY
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            help="conservative, aggressive, low-vram or manual; flags win.", rich_help_panel=_MEMORY
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(help="Ray Train workers, one GPU each.", rich_help_panel=_RUN, show_default="1"),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="auto, cuda or cpu.", rich_help_panel=_RUN, show_default="auto")
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(
            help="Ledger and checkpoints: a path or a pyarrow.fs URI.",
            envvar="FOXRAY_STORAGE",
            rich_help_panel=_RUN,
            show_default="foxray-runs",
        ),
    ] = None,
    run_id: Annotated[str | None, typer.Option(help="Name of the run.", rich_help_panel=_RUN)] = None,
    resume: Annotated[str | None, typer.Option(help="Continue this run.", rich_help_panel=_RUN)] = None,
    checkpoint_every: Annotated[
        int | None,
        typer.Option(help="Optimizer steps between checkpoints.", rich_help_panel=_RUN, show_default="100"),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML file with these options; flags win.", rich_help_panel=_RUN)
    ] = None,
    log_format: Annotated[
        LogFormat, typer.Option(help="auto: a progress bar on a terminal.", rich_help_panel=_RUN)
    ] = LogFormat.AUTO,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Debug output and tracebacks.", rich_help_panel=_RUN)
    ] = False,
) -> None:
    """Train a model; an out-of-memory halves the batch and goes on."""
    from foxray.driver.resume import resume_config
    from foxray.training.config import load_config, read_yaml

    explicit = _explicit(ctx)
    if resume is not None:
        if preset is not None:
            raise UserError(f"--preset {preset} with --resume: a preset is for a new run; leave it out")
        explicit = (read_yaml(config) if config else {}) | explicit
        settings = resume_config(str(explicit.get("storage", "foxray-runs")), resume, explicit)
    else:
        settings = load_config(explicit, file=config, preset=preset)
    # Imports torch, which takes seconds: only for flags that are right.
    from foxray.cli.outcome import print_outcome
    from foxray.driver.run import run_training

    with open_console(log_format) as console, _errors_as_json(console, log_format):
        result = run_training(settings, run_id=run_id, resume=resume, on_view=console.show, verbose=verbose)
    print_outcome(settings.storage, result.run_id, as_json=log_format is LogFormat.JSON)


@contextmanager
def _errors_as_json(console: Console, log_format: LogFormat) -> Iterator[None]:
    """A machine that reads JSON lines gets the error as one, too."""
    from foxray.driver.coordinator import Message, View

    try:
        yield
    except FoxrayError as error:
        if log_format is LogFormat.JSON:
            fields = {"exit_status": error.exit_status}
            console.show(View(messages=[Message(level="error", text=str(error), fields=fields)]))
        raise


_NOT_CONFIGURATION = {"run_id", "resume", "config", "log_format", "verbose", "preset"}


def _explicit(ctx: typer.Context) -> dict[str, Any]:
    """The configuration options that were given, under the names of `TrainConfig`."""
    given = {
        name: value
        for name, value in ctx.params.items()
        if name not in _NOT_CONFIGURATION and value is not None and value is not False
    }
    if given.pop("no_keep_effective_batch", False):
        given["keep_effective_batch"] = False
    if given.pop("no_oom_recovery", False):
        given["max_oom_retries"] = 0
    return {k: str(v.absolute()) if isinstance(v, Path) else v for k, v in given.items()}

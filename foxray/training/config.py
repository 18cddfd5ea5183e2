"""What one training job is asked to do: the single configuration that the command line, a YAML file and
the driver share, and that travels to every worker.

Validation happens here, where the values are built, so that no later code has to doubt them; a message
names the option, the value seen and what is allowed. The module imports neither torch nor ray.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from foxray.data.settings import DataSettings
from foxray.errors import UserError
from foxray.memory.catalogue import parse_gpu_or_bytes
from foxray.oom import OomPolicy

Preset = Literal["conservative", "aggressive", "low-vram", "manual"]

# The four quick references of the guide. An explicit flag or configuration file wins over them.
PRESETS: dict[str, dict[str, Any]] = {
    "conservative": {"batch_size": 32, "min_batch_size": 2},
    "aggressive": {"batch_size": 64, "min_batch_size": 4},
    "low-vram": {"batch_size": 128, "min_batch_size": 1},
    "manual": {"batch_size": 8, "min_batch_size": 8},
}

# Without a batch size: the guide's safe default for a 4 GB card, and its advice for long data.
DEFAULT_BATCH_SIZE = 32
LONG_DATA_BATCH_SIZE = 16
LONG_DATA_DAYS = 180


class TrainConfig(BaseModel):
    """One training job. Sizes are samples, durations are in the unit that the name says."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: Literal["tft"] = "tft"
    """Model family."""
    parquet_file: Path
    """The bars or prepared features to train on."""
    epochs: int = Field(default=1, ge=1, le=10_000)
    batch_size: int | None = Field(default=None, ge=1)
    """Samples in one forward and backward on one worker; None: 32, or 16 for data over 180 days."""
    accumulation_steps: int = Field(default=1, ge=1)
    """Micro-batches per optimizer step at the start; effective batch = batch_size x this x workers."""
    num_features: int | None = Field(default=None, ge=1)
    """Take the first N features of the documented order; None: all there are (225 for plain OHLCV)."""
    seq_len: int = Field(default=60, ge=2, le=4096)
    horizon: int = Field(default=1, ge=1)
    target: str | None = None
    """Column to forecast, `horizon` bars ahead; None: the log return of `close` over `horizon` bars."""
    train_fraction: float = Field(default=0.8, gt=0.0, lt=1.0)
    session_gap: float = Field(default=30.0, gt=0.0)
    """Minutes without a bar that end a session; no window crosses such a gap."""
    window_stride: int = Field(default=1, ge=1)
    hidden_dim: int = Field(default=64, ge=1)
    num_heads: int = Field(default=4, ge=1)
    dropout: float = Field(default=0.1, ge=0.0, lt=1.0)
    learning_rate: float = Field(default=1e-3, gt=0.0)
    lr_schedule: Literal["constant", "cosine"] = "constant"
    """How the learning rate goes over the run; cosine: from `learning_rate` down to 0."""
    early_stopping_patience: int | None = Field(default=None, ge=1)
    """End after this many epochs in a row without a lower validation loss; None: run all epochs."""
    max_grad_norm: float = Field(default=1.0, gt=0.0)
    """Gradient norm above which the gradient of the whole optimizer step is scaled down."""
    precision: Literal["fp32", "bf16"] = "fp32"
    seed: int = Field(default=0, ge=0)
    deterministic: bool = False
    """Compute in blocks of `min_batch_size` samples from the first step on, so that an OOM changes not even
    the rounding. Slower: each block is a forward and backward of its own."""
    use_qat: bool = False
    """Quantization-aware training: calibrate, then train with int8 weights and eight-bit inputs."""
    qat_calibration_batches: int | None = Field(default=None, ge=10, le=500)
    """Effective batches to calibrate on; None: 3% of the training's, within 10 to 500."""
    qat_min_batch_size: int | None = Field(default=None, ge=1, le=64)
    """`min_batch_size` in the calibration phase; None: the same."""
    qat_max_oom_retries: int | None = Field(default=None, ge=0, le=10)
    """`max_oom_retries` in the calibration phase; None: the same."""
    min_batch_size: int = Field(default=2, ge=1, le=64)
    max_oom_retries: int = Field(default=3, ge=0, le=10)
    """Retries granted per phase and rank, 1-10; 0 (`--no-oom-recovery`) switches recovery off."""
    keep_effective_batch: bool = True
    on_exhausted: tuple[Literal["gradient-checkpointing", "cpu"], ...] = ()
    max_worker_failures: int = Field(default=3, ge=0)
    """Fresh starts granted for workers lost without a memory failure (a node that died)."""
    checkpoint_every: int = Field(default=100, ge=1)
    """Optimizer steps between two checkpoints; one is also written at the end of every epoch."""
    workers: int = Field(default=1, ge=1)
    device: Literal["auto", "cuda", "cpu"] = "auto"
    emulate_gpu: str | None = None
    """A card's name (its usable bytes) or a size: each worker's device has only this much memory."""
    storage: str = "foxray-runs"

    @field_validator("on_exhausted", mode="before")
    @classmethod
    def _split_rungs(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(rung.strip() for rung in value.split(",") if rung.strip() not in ("", "raise"))
        return value

    @field_validator("emulate_gpu")
    @classmethod
    def _known_card_or_size(cls, value: str | None) -> str | None:
        if value is not None:
            parse_gpu_or_bytes(value)  # raises a UserError with the cards that come close
        return value

    @model_validator(mode="after")
    def _heads_divide_hidden(self) -> "TrainConfig":
        if self.hidden_dim % self.num_heads:
            raise ValueError(f"hidden_dim {self.hidden_dim} is not a multiple of num_heads {self.num_heads}")
        return self

    @model_validator(mode="after")
    def _calibration_needs_qat(self) -> "TrainConfig":
        names = ("qat_calibration_batches", "qat_min_batch_size", "qat_max_oom_retries")
        given = [name for name in names if getattr(self, name) is not None]
        if given and not self.use_qat:
            flag = given[0].replace("_", "-")
            raise ValueError(
                f"--{flag} {getattr(self, given[0])}: there is no calibration phase without --use-qat"
            )
        return self

    @property
    def phases(self) -> tuple[str, ...]:
        """The phases that this job has, in order."""
        return ("calibration",) * self.use_qat + ("training", "validation")

    @property
    def data_settings(self) -> DataSettings:
        """The part of this configuration that decides what the prepared data look like."""
        return DataSettings(
            seq_len=self.seq_len,
            horizon=self.horizon,
            num_features=self.num_features,
            target=self.target,
            train_fraction=self.train_fraction,
            session_gap_minutes=self.session_gap,
            window_stride=self.window_stride,
        )

    @property
    def oom_policy(self) -> OomPolicy:
        """What the driver answers when a phase runs out of memory."""
        return OomPolicy(
            min_batch_size=self.min_batch_size,
            max_retries=self.max_oom_retries,
            keep_effective_batch=self.keep_effective_batch,
            on_exhausted=self.on_exhausted,
        )

    def phase_policy(self, phase: str) -> OomPolicy:
        """`oom_policy` with what is set for this phase apart."""
        policy = self.oom_policy
        if phase != "calibration":
            return policy
        minimum, retries = self.qat_min_batch_size, self.qat_max_oom_retries
        return replace(
            policy,
            min_batch_size=policy.min_batch_size if minimum is None else minimum,
            max_retries=policy.max_retries if retries is None else retries,
            # Without a backward pass there are no activations to recompute.
            on_exhausted=tuple(rung for rung in policy.on_exhausted if rung != "gradient-checkpointing"),
        )

    def to_plain(self) -> dict[str, Any]:
        """JSON-able form, as kept in the ledger; `TrainConfig(**plain)` gives this object again."""
        return self.model_dump(mode="json")


def default_batch_size(duration_days: float) -> int:
    """The guide's start size where none is given: 16 for data over 180 days, else 32."""
    return LONG_DATA_BATCH_SIZE if duration_days > LONG_DATA_DAYS else DEFAULT_BATCH_SIZE


def load_config(
    explicit: dict[str, Any], *, file: Path | None = None, preset: str | None = None
) -> TrainConfig:
    """Merge, in rising precedence: defaults, the preset, the YAML file, the explicit flags.

    Raises UserError that names the option, the value and what is allowed.
    """
    values: dict[str, Any] = {}
    if preset is not None:
        if preset not in PRESETS:
            raise UserError(f"--preset {preset}: unknown; choose one of {', '.join(PRESETS)}")
        values |= PRESETS[preset]
    if file is not None:
        values |= read_yaml(file)
    values |= explicit
    try:
        return TrainConfig(**values)
    except ValidationError as error:
        raise UserError(_first_problem(error, file)) from None


def read_yaml(file: Path) -> dict[str, Any]:
    """The options in a YAML file, under the names of `TrainConfig`. Raises UserError naming the file."""
    try:
        content = yaml.safe_load(file.read_text())
    except OSError as error:
        raise UserError(
            f"--config {file}: cannot be read ({error.strerror}); give the path of a YAML file"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        first_line = str(error).splitlines()[0]
        raise UserError(
            f"--config {file}: not valid YAML ({first_line}); write one `option: value` a line"
        ) from None
    if not isinstance(content, dict):
        raise UserError(f"--config {file}: holds {type(content).__name__}, not `option: value` lines")
    return {str(key).replace("-", "_"): value for key, value in content.items()}


def _first_problem(error: ValidationError, file: Path | None) -> str:
    problem = error.errors()[0]
    where = ".".join(str(part) for part in problem["loc"][:1])
    source = f" (from flags or {file})" if file else ""
    if problem["type"] == "extra_forbidden":
        known = ", ".join(sorted(TrainConfig.model_fields))
        return f"{where}: unknown option{source}; the options are {known}"
    if problem["type"] == "missing":
        flag = f"--{where.replace('_', '-')}"
        return f"{flag} is required{source}: give it on the command line or in the YAML file"
    if not where:
        return f"{problem['msg'].removeprefix('Value error, ')}{source}"
    return f"--{where.replace('_', '-')} {problem['input']}: {problem['msg'].lower()}{source}"

"""What a worker does from the first line to the last: the story of a run, told without Ray.

`train` restores or builds the committed state, calibrates a model that is to be quantized, and then for
every epoch takes optimizer steps over the epoch's order, validates, and writes a checkpoint. All that can
run out of memory goes through `Recovery`; all that is worth recording goes to the authority. The same
function runs on one process, on gloo processes in a test, and inside Ray Train.
"""

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from foxray.errors import MemoryExhausted
from foxray.memory.budget import current_budget
from foxray.memory.catalogue import format_bytes
from foxray.memory.device import DeviceMemory, device_memory
from foxray.models.quantization import Quantization
from foxray.oom import classify
from foxray.training.authority import (
    Authority,
    Cancelled,
    PhaseReport,
    Rescheduled,
)
from foxray.training.calibration import Calibration, calibration_batches, calibration_order
from foxray.training.checkpoint import Checkpoints, CommittedState
from foxray.training.config import TrainConfig
from foxray.training.dropout import RowDropout
from foxray.training.optimizers import RepeatableStep, fused_adamw
from foxray.training.recovery import Place, Recovery
from foxray.training.sampler import epoch_order, rank_range, rank_share
from foxray.training.schedule import epochs_without_improvement, learning_rate_at
from foxray.training.step import StepResult, TransactionalStep
from foxray.training.validation import Validation
from foxray.workloads.base import Workload

PROGRESS_EVERY_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class WorkerPlan:
    """What the driver tells a worker at a launch, beside the configuration."""

    launch: str
    """Names this start of the worker group."""
    effective_batch: int
    """Samples per optimizer step over all workers."""
    batch_sizes: dict[str, int] = field(default_factory=dict)
    """Batch size to start each phase with, by "phase" or "phase/rank"; the latter wins."""
    rungs: tuple[str, ...] = ()
    """Rungs of `on_exhausted` that the run is on already."""

    def batch_size(self, phase: str, rank: int) -> int:
        """The size at which `rank` starts `phase`."""
        return self.batch_sizes.get(f"{phase}/{rank}", self.batch_sizes[phase])


class Trainer:
    """One worker's run. `train()` is the whole of it; the other methods are its chapters."""

    def __init__(
        self,
        *,
        config: TrainConfig,
        plan: WorkerPlan,
        workload: Workload,
        device: torch.device,
        place: Place,
        authority: Authority,
        checkpoints: Checkpoints,
        on_commit: Callable[[Tensor], None] | None = None,
    ) -> None:
        """`on_commit` is called after every committed optimizer step with the positions (int64, of all
        ranks, in the training set) that the update was made of."""
        self._config, self._plan, self._workload = config, plan, workload
        self._device, self._place, self._authority = device, place, authority
        self._checkpoints = checkpoints
        self._on_commit = on_commit or (lambda samples: None)
        self._rank = place.rank
        self._world_size = dist.get_world_size() if dist.is_initialized() else 1
        self._memory: DeviceMemory = device_memory(device)
        self._effective_batch = plan.effective_batch
        self._progress_due = 0.0
        self._stop = False
        self._seconds = dict.fromkeys(config.phases, 0.0)
        self._rows = dict.fromkeys(config.phases, 0)
        self._peaks: dict[str, int] = {}

    def train(self) -> dict[str, Any]:
        """Run to the end of the last epoch; the final metrics.

        Raises MemoryExhausted, Rescheduled or Cancelled (after a checkpoint, where there is something
        new to keep).
        """
        self._build_or_give_up()
        try:
            if self._calibration is not None and not self.state.calibrated_batch:
                self._calibrate(self._calibration)
            self._announce_training()
            metrics: dict[str, float] = self.state.metrics
            while self.state.epoch < self._config.epochs and not self._stops_early():
                metrics = self._epoch()
        except (Rescheduled, Cancelled, MemoryExhausted) as stop:
            # The committed state in this process is whole (that is what the step is for): keep it, unless
            # it lies on a device that cannot be read any more. Rank 0 does, if it knows.
            lost = any(recovery.context_lost for recovery in self._recoveries)
            alone = isinstance(stop, Rescheduled) and not stop.known_to_all
            if not lost and (self._rank == 0 or alone):
                self._save()
            raise
        self._report(self._training)
        self._report(self._validation.recovery)
        return metrics

    # -- chapters ----------------------------------------------------------------------------------

    def _build_or_give_up(self) -> None:
        try:
            self._build()
        except Exception as error:
            if classify(error) is None:
                raise
        else:
            return
        total_bytes = self._memory.total_bytes
        has = f" (it has {format_bytes(total_bytes)})" if total_bytes is not None else ""
        raise MemoryExhausted(
            f"model, optimizer and data do not fit into the device's memory{has}, before the first batch: "
            "no batch size is small enough. Use a GPU with more VRAM, or a smaller model "
            "(--hidden-dim, --num-features)"
        )

    def _build(self) -> None:
        torch.manual_seed(self._config.seed)
        self.model: nn.Module = self._workload.build_model()
        self._quantization = Quantization(self.model) if self._config.use_qat else None
        self.model.to(self._device)
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        self._optimizer = RepeatableStep(fused_adamw(parameters, learning_rate=self._config.learning_rate))
        self.state = CommittedState()
        restored = self._checkpoints.load_latest()
        if restored is not None:
            self.state = restored.state
            self.model.load_state_dict(restored.model)
            self._optimizer.load_state_dict(restored.optimizer)
            self._effective_batch = self.state.effective_batch or self._effective_batch
        self.state.effective_batch = self._effective_batch
        self._saved_step = self.state.step if restored is not None else -1
        self._workload.place(self._device)
        for rung in self._plan.rungs:
            self._enter_rung(rung)
        self._training = self._recovery("training")
        self._validation = Validation(
            workload=self._workload,
            recovery=self._recovery("validation"),
            quantization=self._quantization,
            device=self._device,
            rank=self._rank,
            world_size=self._world_size,
        )
        self._recoveries = [self._training, self._validation.recovery]
        self._calibration = self._build_calibration()
        self._dropout = RowDropout(self._device) if self._config.dropout else None
        self._step = TransactionalStep(
            optimizer=self._optimizer,
            recovery=self._training,
            max_grad_norm=self._config.max_grad_norm,
            rank=self._rank,
            world_size=self._world_size,
        )

    def _build_calibration(self) -> Calibration | None:
        if self._quantization is None:
            return None
        if self.state.calibrated_batch:
            self._quantization.mode = "fake_quantize"
            self._start_from_calibrated()
        recovery = self._recovery("calibration")
        self._recoveries.append(recovery)
        return Calibration(
            quantization=self._quantization,
            recovery=recovery,
            device=self._device,
            world_size=self._world_size,
        )

    def _calibrate(self, calibration: Calibration) -> None:
        """Find the ranges of all inputs, then round them from here on."""
        started, recovery = time.perf_counter(), calibration.recovery
        batches = calibration_batches(self._training_batches, wanted=self._config.qat_calibration_batches)
        self._memory.reset_peak()
        self.model.eval()
        calibration.begin()
        self._announce(recovery, batches=batches)
        smallest = recovery.batch_size
        for samples in calibration_order(
            self._workload.num_train, batch=self._effective_batch, batches=batches, seed=self._config.seed
        ):
            share = rank_share(samples, rank=self._rank, world_size=self._world_size)
            smallest = calibration(share, self._loss_sum, stop=self._stop)
            self._rows["calibration"] += len(share)
            self._tell(phase="calibration", batch_size=smallest)
        calibration.finish()
        self.state.calibrated_batch = smallest
        self._start_from_calibrated()
        self._seconds["calibration"] = time.perf_counter() - started
        self._note_peak("calibration")
        self._report(recovery)
        if self._rank == 0:
            self._save()

    def _start_from_calibrated(self) -> None:
        """Training, which needs more memory than calibration, begins with no larger a batch."""
        calibrated = self.state.calibrated_batch
        self._training.batch_size = min(self._training.batch_size, calibrated)
        if not self._config.keep_effective_batch:
            self._follow_smallest([calibrated])

    @property
    def _training_batches(self) -> int:
        """Optimizer steps of the whole run."""
        return -(-self._workload.num_train // self._effective_batch) * self._config.epochs

    def _announce_training(self) -> None:
        self._announce(self._training, batches=self._training_batches - self.state.step)

    def _epoch(self) -> dict[str, float]:
        state, started = self.state, time.perf_counter()
        order = epoch_order(self._workload.num_train, seed=self._config.seed, epoch=state.epoch)
        self._memory.reset_peak()
        self.model.train()
        while state.cursor < len(order):
            samples = order[state.cursor : state.cursor + self._effective_batch]
            self._optimizer_step(samples)
        self._seconds["training"] += time.perf_counter() - started
        self._note_peak("training")
        metrics = {"training_loss": state.loss_sum / max(1, state.loss_samples)} | self._validate()
        state.metrics = metrics
        state.validation_losses.append(metrics.get("validation_loss", math.nan))
        state.epoch, state.cursor, state.loss_sum, state.loss_samples = state.epoch + 1, 0, 0.0, 0
        if self._rank == 0:
            self._authority.epoch_ended(epoch=state.epoch, step=state.step, metrics=metrics)
            self._save()
        return metrics

    def _optimizer_step(self, samples: Tensor) -> None:
        """One committed update from these positions. Raises Cancelled after it if the run shall stop."""
        share = rank_share(samples, rank=self._rank, world_size=self._world_size)
        self._set_learning_rate()
        result = self._step(share, self._loss_sum, stop=self._stop, around=self._around(samples))
        self._rows["training"] += len(share)
        self._commit(result)
        self._on_commit(samples)
        if result.stop:
            raise Cancelled(f"stopped after step {self.state.step}")

    def _validate(self) -> dict[str, float]:
        """Metrics over the held-out windows; every rank computes its share, in its own batch size."""
        started = time.perf_counter()
        self._memory.reset_peak()
        self.model.eval()
        recovery, count = self._validation.recovery, len(self._validation.share)
        recovery.step = self.state.step
        self._announce(recovery, batches=-(-count // recovery.batch_size))
        metrics = self._validation(self.model, on_piece=lambda: self._tell(phase="validation"))
        self._seconds["validation"] += time.perf_counter() - started
        self._rows["validation"] += count
        self._note_peak("validation")
        return metrics

    # -- the committed state -----------------------------------------------------------------------

    def _commit(self, result: StepResult) -> None:
        state = self.state
        state.step += 1
        state.cursor += result.samples
        state.loss_sum += result.loss * result.samples
        state.loss_samples += result.samples
        self._training.step = state.step
        if not self._config.keep_effective_batch:
            self._follow_smallest(result.batch_sizes)
        if self._rank == 0 and state.step % self._config.checkpoint_every == 0:
            self._save()
        self._tell(phase="training", loss=result.loss, batch_size=min(result.batch_sizes))

    def _follow_smallest(self, batch_sizes: list[int]) -> None:
        """The guide's plain behaviour: all ranks go on with the smallest batch, and the step shrinks."""
        smallest = min(batch_sizes)
        # An OOM after the all-reduce is not in `batch_sizes` yet; the next step tells the others.
        self._training.batch_size = min(smallest, self._training.batch_size)
        shrunk = smallest * self._config.accumulation_steps * self._world_size
        self._effective_batch = min(self._effective_batch, shrunk)
        self.state.effective_batch = self._effective_batch

    def _save(self) -> None:
        if self.state.step == self._saved_step and self.state.cursor:
            return
        path = self._checkpoints.save(self.state, self.model.state_dict(), self._optimizer.state_dict())
        self._saved_step = self.state.step
        self._authority.checkpoint_written(step=self.state.step, epoch=self.state.epoch, path=path)

    # -- small helpers -----------------------------------------------------------------------------

    def _loss_sum(self, piece: Tensor) -> Tensor:
        return self._workload.loss_sum(self.model, piece)

    def _around(self, samples: Tensor) -> Callable[[int, int], AbstractContextManager[None]] | None:
        """Gives dropout the place of a micro-batch in the step, so that splits and retries do not matter."""
        dropout = self._dropout
        if dropout is None:
            return None
        seed = (self._config.seed, self.state.step)
        offset, _ = rank_range(len(samples), rank=self._rank, world_size=self._world_size)
        return lambda first, count: dropout.rows(seed=seed, first=offset + first, count=count)

    def _set_learning_rate(self) -> None:
        done = self.state.epoch + self.state.cursor / self._workload.num_train
        for group in self._optimizer.optimizer.param_groups:
            group["lr"] = learning_rate_at(
                done / self._config.epochs,
                base=self._config.learning_rate,
                schedule=self._config.lr_schedule,
            )

    def _stops_early(self) -> bool:
        patience = self._config.early_stopping_patience
        return patience is not None and epochs_without_improvement(self.state.validation_losses) >= patience

    def _recovery(self, phase: str) -> Recovery:
        batch_size = self._plan.batch_size(phase, self._rank)
        if phase != "validation":  # of an optimizer step, a rank has no more than its share
            batch_size = min(batch_size, -(-self._effective_batch // self._world_size))
        return Recovery(
            phase=phase,
            batch_size=batch_size,
            place=self._place,
            memory=self._memory,
            authority=self._authority,
            device=self._device,
            enter_rung=self._enter_rung,
            block_size=self._config.min_batch_size
            if self._config.deterministic and phase == "training"
            else None,
        )

    def _enter_rung(self, rung: str) -> None:
        if rung == "gradient-checkpointing":
            self._workload.use_gradient_checkpointing(self.model)
        elif rung == "cpu":
            budget = current_budget()
            if budget is not None:
                budget.release_limit()
            elif self._device.type != "cpu":
                raise Rescheduled("on_exhausted=cpu: the run goes on without the GPU")

    def _announce(self, recovery: Recovery, *, batches: int) -> None:
        share = -(-self._effective_batch // self._world_size)
        self._authority.phase_started(
            phase=recovery.phase,
            rank=self._rank,
            batch_size=recovery.batch_size,
            accumulation_steps=-(-share // recovery.batch_size) if recovery.phase == "training" else 1,
            step=self.state.step,
            batches=batches,
        )

    def _note_peak(self, phase: str) -> None:
        peak_bytes = self._memory.peak_bytes
        if peak_bytes is not None:
            self._peaks[phase] = max(peak_bytes, self._peaks.get(phase, 0))

    def _tell(self, **live: Any) -> None:
        now = time.monotonic()
        if now < self._progress_due:
            return
        self._progress_due = now + PROGRESS_EVERY_SECONDS
        self._stop |= self._authority.progress(
            rank=self._rank,
            epoch=self.state.epoch,
            epochs=self._config.epochs,
            step=self.state.step,
            cursor=self.state.cursor,
            samples=self._workload.num_train,
            memory_used_bytes=self._memory.live_bytes,
            memory_peak_bytes=self._memory.peak_bytes,
            memory_total_bytes=self._memory.total_bytes,
            **live,
        )

    def _report(self, recovery: Recovery) -> None:
        self._authority.phase_ended(
            PhaseReport(
                phase=recovery.phase,
                rank=self._rank,
                batch_size=recovery.batch_size,
                duration_seconds=self._seconds[recovery.phase],
                rows=self._rows[recovery.phase],
                peak_bytes=self._peaks.get(recovery.phase),
            )
        )

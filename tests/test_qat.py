"""Quantization-aware training: the calibration phase and what follows from it, on the real TFT."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_pair import GlooPair
from tft_rig import TinyWorkload, tiny_trainer, weights
from torch import Tensor, nn

from foxray.driver.coordinator import Coordinator
from foxray.errors import MemoryExhausted
from foxray.ledger import events as ev
from foxray.ledger.store import Ledger
from foxray.memory.budget import memory_budget
from foxray.oom import OomPolicy
from foxray.training.authority import Cancelled
from foxray.training.calibration import calibration_batches, calibration_order
from foxray.training.config import TrainConfig
from foxray.training.loop import Trainer
from foxray.training.sampler import epoch_order

ROOM = 1 << 30
MIB = 1 << 20
BATCHES = 10


class HungryCalibration(TinyWorkload):
    """A TFT whose calibration needs one MiB a sample more than its training."""

    def loss_sum(self, model: nn.Module, positions_B: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            torch.empty(len(positions_B) * MIB, dtype=torch.uint8)
        return super().loss_sum(model, positions_B)


def ranges(trainer: Trainer) -> dict[str, tuple[float, float]]:
    assert trainer._quantization is not None
    return trainer._quantization.activation_ranges()


def assert_same_ranges(one: dict[str, tuple[float, float]], other: dict[str, tuple[float, float]]) -> None:
    assert one.keys() == other.keys()
    for name, limits in one.items():
        assert other[name] == pytest.approx(limits, abs=1e-6), name


def coordinator(folder: Path, **policy: Any) -> Coordinator:
    config = TrainConfig(parquet_file=Path("none"), use_qat=True, **policy)
    run = Ledger(str(folder)).create("r1")
    run.append(
        ev.RunCreated(
            run_id="r1", execution=0, model="tft", config=config.to_plain(), foxray_version="0", dataset={}
        )
    )
    run.append(
        ev.ExecutionStarted(
            run_id="r1", execution=1, workers=1, device="cpu", gpu="cpu", host="here", pid=1, resumed=False
        )
    )
    return Coordinator(
        storage=str(folder),
        run_id="r1",
        execution=1,
        workers=1,
        policy=config.oom_policy,
        phase_policies={phase: config.phase_policy(phase) for phase in config.phases},
        on_cpu=False,
        batch_sizes=dict.fromkeys(config.phases, 64),
    )


def calibrate_in(
    folder: Path, *, fits: int, batches: int = 100, **policy: Any
) -> tuple[Trainer, Coordinator, HungryCalibration]:
    """A run whose calibration fits with `fits` samples, and not with twice as many."""
    authority = coordinator(folder, **policy)
    workload = HungryCalibration()
    with memory_budget(ROOM) as budget:
        trainer, _ = tiny_trainer(
            folder / "checkpoints",
            workload,
            use_qat=True,
            qat_calibration_batches=batches,
            reports_to=authority,
        )
        trainer._build()
        trainer._build = lambda: None  # type: ignore[method-assign]
        budget.set_limit(budget.live_bytes + int(1.5 * fits * MIB))
        try:
            trainer.train()
        finally:
            budget.release_limit()
    return trainer, authority, workload


def lines(authority: Coordinator) -> list[str]:
    return [message.text for message in authority.poll().messages]


def test_the_guides_table_64_32_16_8_with_its_lines(tmp_path: Path) -> None:
    trainer, authority, workload = calibrate_in(tmp_path, fits=8, qat_max_oom_retries=3)
    said = lines(authority)
    again = ["  🧹 Clearing CUDA cache...", "  🔄 Retrying QAT calibration with smaller batch size..."]
    assert said[:11] == [
        "🎯 QAT Calibration Phase: Running 100 batches (initial batch_size=64)",
        "⚠️  QAT calibration OOM detected (attempt 1/3), reducing batch_size: 64 → 32",
        *again,
        "⚠️  QAT calibration OOM detected (attempt 2/3), reducing batch_size: 32 → 16",
        *again,
        "⚠️  QAT calibration OOM detected (attempt 3/3), reducing batch_size: 16 → 8",
        *again,
        "✅ QAT calibration complete after 3 OOM retries - final batch_size=8",
    ]
    assert said[11].startswith("🎯 QAT Calibration Phase: ")
    assert said[12] == "🏋️  Training Phase: Running 2 batches (initial batch_size=8)"
    # 100 batches of 64, in micro-batches of 8 once that was found, and two steps of 64.
    tried = [len(piece) for piece in workload.pieces]
    assert tried == [8] * 8 * (100 + 2)
    assert trainer._effective_batch == 64


def test_the_ledger_tells_calibration_from_training(tmp_path: Path) -> None:
    calibrate_in(tmp_path, fits=16, batches=BATCHES)
    events = Ledger(str(tmp_path)).run("r1").events()
    phases = {event.phase: event for event in events if isinstance(event, ev.PhaseEnded)}
    assert list(phases) == ["calibration", "training", "validation"]
    assert [phase.oom_retries for phase in phases.values()] == [2, 0, 0]
    assert phases["calibration"].rows == BATCHES * 64
    calibration, training = (phases[name].peak_bytes["0"] for name in ("calibration", "training"))
    assert calibration > 16 * MIB > training > 0


def test_the_minimum_is_the_calibrations_own(tmp_path: Path) -> None:
    with pytest.raises(MemoryExhausted) as failure:
        calibrate_in(tmp_path, fits=1, qat_min_batch_size=2, qat_max_oom_retries=10, min_batch_size=64)
    assert str(failure.value).splitlines()[:6] == [
        "QAT calibration OOM: batch_size=2 (minimum=2) is too large for available GPU memory.",
        "   ",
        "   Workarounds:",
        "   (1) Use a GPU with more VRAM (8GB+ recommended for TFT-225 QAT)",
        "   (2) Reduce model size (e.g., fewer features, smaller hidden dimensions)",
        "   (3) Train on CPU (slower but unlimited memory)",
    ]


def test_the_retries_are_the_calibrations_own(tmp_path: Path) -> None:
    with pytest.raises(MemoryExhausted) as failure:
        calibrate_in(tmp_path, fits=2, qat_min_batch_size=4, qat_max_oom_retries=3, max_oom_retries=10)
    first, *rest = str(failure.value).splitlines()
    assert first == "QAT calibration OOM after 3 retries (final batch_size=8)."
    assert rest[1].startswith("   Original error: CUDA out of memory.")
    assert rest[3] == "   Try raising --qat-max-oom-retries to 4 (current: 3) or use CPU."


def run(folder: Path, workload: TinyWorkload, **settings: Any) -> tuple[Trainer, Any]:
    trainer, authority = tiny_trainer(
        folder, workload, use_qat=True, qat_calibration_batches=BATCHES, **settings
    )
    trainer.train()
    return trainer, authority


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainer, TinyWorkload]:
    workload = TinyWorkload(dtype=torch.float64)
    return run(tmp_path_factory.mktemp("undisturbed"), workload)[0], workload


def test_a_smaller_batch_changes_neither_ranges_nor_parameters(
    tmp_path: Path, undisturbed: tuple[Trainer, TinyWorkload]
) -> None:
    split, _ = run(tmp_path, TinyWorkload(dtype=torch.float64), batch_size=16)
    assert_same_ranges(ranges(undisturbed[0]), ranges(split))
    # Exact beyond rounding; over many steps, a value may land on the other side of a grid's edge.
    expected = weights(undisturbed[0])
    for name, tensor in weights(split).items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-9, msg=name)


def test_an_oom_at_any_allocation_of_a_batch_leaves_no_trace_in_the_ranges(
    tmp_path: Path, undisturbed: tuple[Trainer, TinyWorkload]
) -> None:
    expected = ranges(undisturbed[0])
    with memory_budget(ROOM) as budget:

        def fresh(name: str) -> Any:
            trainer, authority = tiny_trainer(
                tmp_path / name, TinyWorkload(dtype=torch.float64), use_qat=True, epochs=1
            )
            trainer._build()
            return trainer, authority, trainer._calibration

        def observe(trainer: Trainer, calibration: Any, fail_at: int | None) -> None:
            order = calibration_order(128, batch=64, batches=BATCHES, seed=0)
            calibration.begin()
            for index, samples in enumerate(order):
                budget.fail_at(fail_at if index == 1 else None)
                calibration(samples, trainer._loss_sum, stop=False)

        trainer, _, calibration = fresh("count")
        calibration.begin()
        before = budget.allocation_count
        calibration(torch.arange(64), trainer._loss_sum, stop=False)
        allocations = budget.allocation_count - before
        assert allocations > 100
        for k in range(1, allocations + 1, 7):
            trainer, authority, calibration = fresh(str(k))
            observe(trainer, calibration, k)
            assert [(a.phase, a.batch_size) for a in authority.attempts] == [("calibration", 64)], k
            assert_same_ranges(expected, ranges(trainer))


def test_a_run_that_ran_out_in_calibration_trains_to_the_same_model(tmp_path: Path) -> None:
    plain, _ = run(tmp_path / "plain", TinyWorkload(), batch_size=16)
    with memory_budget(ROOM) as budget:
        trainer, authority = tiny_trainer(
            tmp_path / "oom", HungryCalibration(), use_qat=True, qat_calibration_batches=BATCHES
        )
        trainer._build()
        trainer._build = lambda: None  # type: ignore[method-assign]
        budget.set_limit(budget.live_bytes + 24 * MIB)
        trainer.train()
    assert [a.batch_size for a in authority.attempts] == [64, 32]
    for name, tensor in weights(trainer).items():
        assert torch.equal(tensor, weights(plain)[name]), name


def test_without_keeping_the_effective_batch_the_step_shrinks_with_the_calibration(tmp_path: Path) -> None:
    with memory_budget(ROOM) as budget:
        trainer, _ = tiny_trainer(
            tmp_path,
            HungryCalibration(),
            use_qat=True,
            qat_calibration_batches=BATCHES,
            keep_effective_batch=False,
        )
        trainer._build()
        trainer._build = lambda: None  # type: ignore[method-assign]
        budget.set_limit(budget.live_bytes + 24 * MIB)
        trainer.train()
    assert trainer.state.effective_batch == trainer._training.batch_size == 16
    assert trainer.state.step == 8


def test_a_resumed_run_does_not_calibrate_again_and_starts_from_the_size_that_worked(tmp_path: Path) -> None:
    first, _ = run(tmp_path, TinyWorkload(), batch_size=16)
    workload = TinyWorkload()
    again, authority = run(tmp_path, workload, batch_size=64, epochs=2)
    assert [report.phase for report in authority.phases] == ["training", "validation"]
    assert ranges(first) == ranges(again)
    assert {len(piece) for piece in workload.pieces} == {16}


def test_a_calibration_that_was_stopped_starts_anew(
    tmp_path: Path, undisturbed: tuple[Trainer, TinyWorkload]
) -> None:
    workload = TinyWorkload(dtype=torch.float64)
    trainer, authority = tiny_trainer(tmp_path, workload, use_qat=True, qat_calibration_batches=BATCHES)
    authority.stop_requested = True
    with pytest.raises(Cancelled, match="during calibration"):
        trainer.train()
    assert 0 < len(workload.pieces) < BATCHES
    resumed, _ = run(tmp_path, TinyWorkload(dtype=torch.float64))
    assert_same_ranges(ranges(undisturbed[0]), ranges(resumed))


def test_both_outputs_are_validated_on_every_sample(undisturbed: tuple[Trainer, TinyWorkload]) -> None:
    trainer, workload = undisturbed
    metrics = trainer.state.metrics
    assert metrics["samples"] == 1.0
    assert metrics["validation_loss"] != metrics["float_validation_loss"]
    assert metrics["validation_loss"] == pytest.approx(metrics["float_validation_loss"], rel=0.2)
    assert trainer._quantization is not None and trainer._quantization.mode == "fake_quantize"
    with trainer._quantization.disabled(), torch.no_grad():
        found = workload.evaluate(trainer.model.eval(), torch.arange(workload.num_valid))[0]
    assert metrics["float_validation_loss"] == pytest.approx(float(found) / workload.num_valid, rel=1e-9)


def test_calibration_sees_the_first_samples_of_the_training_order() -> None:
    order = list(calibration_order(100, batch=32, batches=10, seed=3))
    assert [len(samples) for samples in order] == [32, 32, 32, 4, 32, 32, 32, 4, 32, 32]
    assert torch.equal(torch.cat(order[:4]), epoch_order(100, seed=3, epoch=0))
    assert torch.equal(order[4], epoch_order(100, seed=3, epoch=1)[:32])


@pytest.mark.parametrize(
    ("training", "batches"), [(1, 10), (500, 15), (3000, 90), (10_000, 300), (100_000, 500)]
)
def test_three_percent_of_the_training_within_10_to_500(training: int, batches: int) -> None:
    assert calibration_batches(training) == batches
    assert calibration_batches(training, wanted=77) == 77


# -- two ranks -------------------------------------------------------------------------------------


def calibrate_on_rank(
    rank: int, folder: str, failing: int
) -> tuple[dict[str, tuple[float, float]], int, int]:
    """Ranges, the training batch, and retries of a rank; `failing`: the rank whose memory is short."""
    with memory_budget(ROOM) as budget:
        trainer, authority = tiny_trainer(
            folder,
            HungryCalibration(dtype=torch.float64),
            rank=rank,
            batch_size=32,
            use_qat=True,
            qat_calibration_batches=BATCHES,
        )
        trainer._build()
        trainer._build = lambda: None  # type: ignore[method-assign]
        if rank == failing:
            budget.set_limit(budget.live_bytes + 12 * MIB)
        trainer.train()
        budget.release_limit()
        return ranges(trainer), trainer._training.batch_size, len(authority.attempts)


def give_up_on_rank(rank: int, folder: str) -> str:
    trainer, _ = tiny_trainer(
        folder, HungryCalibration(), rank=rank, batch_size=32, use_qat=True, max_retries=1
    )
    with memory_budget(ROOM) as budget:
        trainer._build()
        trainer._build = lambda: None  # type: ignore[method-assign]
        if rank == 0:
            budget.set_limit(budget.live_bytes + 12 * MIB)
        try:
            trainer.train()
        except Exception as error:  # noqa: BLE001 - its type is the answer
            return type(error).__name__
        finally:
            budget.release_limit()
    return "trained"


@pytest.fixture(scope="module")
def pair() -> Iterator[GlooPair]:
    pair = GlooPair()
    yield pair
    pair.close()


@pytest.mark.slow
def test_two_workers_end_with_the_ranges_of_one(
    pair: GlooPair, tmp_path: Path, undisturbed: tuple[Trainer, TinyWorkload]
) -> None:
    for failing, batch_size in ((2, 32), (1, 8)):
        answers = pair.run(calibrate_on_rank, str(tmp_path / str(failing)), failing)
        for found, size, _ in answers:
            assert size == batch_size
            assert_same_ranges(ranges(undisturbed[0]), found)
        assert [retries for _, _, retries in answers] == [0, 2 if failing == 1 else 0]


@pytest.mark.slow
def test_a_rank_that_gives_up_in_calibration_takes_the_other_with_it(pair: GlooPair, tmp_path: Path) -> None:
    assert pair.run(give_up_on_rank, str(tmp_path)) == ["MemoryExhausted", "Rescheduled"]


def test_the_policies_of_the_phases() -> None:
    config = TrainConfig(
        parquet_file=Path("none"),
        use_qat=True,
        qat_min_batch_size=8,
        on_exhausted=("gradient-checkpointing", "cpu"),
    )
    assert config.phase_policy("training") == config.oom_policy == OomPolicy(on_exhausted=config.on_exhausted)
    assert config.phase_policy("calibration") == OomPolicy(min_batch_size=8, on_exhausted=("cpu",))

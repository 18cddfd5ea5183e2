"""The wording that people alert on, letter for letter, and hints that hold."""

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foxray.oom import Attempt, Incident, OomPolicy, texts
from foxray.oom.texts import Situation, failure_at_minimum, failure_exhausted

GUIDE = Path(__file__).resolve().parents[2] / "shared" / "OOM_RECOVERY_GUIDE.txt"

SUCCESS = [
    "🎯 QAT Calibration Phase: Running 100 batches (initial batch_size=64)",
    "⚠️  QAT calibration OOM detected (attempt 1/3), reducing batch_size: 64 → 32",
    "  🧹 Clearing CUDA cache...",
    "  🔄 Retrying QAT calibration with smaller batch size...",
    "⚠️  QAT calibration OOM detected (attempt 2/3), reducing batch_size: 32 → 16",
    "  🧹 Clearing CUDA cache...",
    "  🔄 Retrying QAT calibration with smaller batch size...",
    "✅ QAT calibration complete after 2 OOM retries - final batch_size=16",
]
AT_MINIMUM = """\
❌ Error: QAT calibration OOM: batch_size=2 (minimum=2) is too large for available GPU memory.
   
   Workarounds:
   (1) Use a GPU with more VRAM (8GB+ recommended for TFT-225 QAT)
   (2) Reduce model size (e.g., fewer features, smaller hidden dimensions)
   (3) Train on CPU (slower but unlimited memory)"""  # noqa: W293
EXHAUSTED = """\
❌ Error: QAT calibration OOM after 3 retries (final batch_size=4).
   
   Original error: CUDA error 2: out of memory
   
   Try reducing --qat-min-batch-size to 2 (current: 4) or use CPU."""  # noqa: W293
TIMES = [
    "🎯 QAT Calibration Phase: 45 seconds",
    "🏋️  Training Phase: 4 minutes 30 seconds",
    "📊 Total Time: 5 minutes 15 seconds",
]


def situation(**changes: object) -> Situation:
    usual: dict[str, object] = {
        "phase": "calibration",
        "kind": "device",
        "batch_size": 2,
        "min_batch_size": 2,
        "retries": 3,
        "max_retries": 3,
    }
    return Situation(**(usual | changes))  # type: ignore[arg-type]


def test_expected_texts_are_those_of_the_guide() -> None:
    if not GUIDE.exists():
        pytest.skip(f"{GUIDE} is not here")
    guide = GUIDE.read_text()
    for passage in ("\n".join(SUCCESS), AT_MINIMUM, EXHAUSTED, "\n".join(TIMES)):
        assert passage in guide


def test_success() -> None:
    lines = [texts.phase_start("calibration", batches=100, batch_size=64)]
    for attempt, (previous, size) in enumerate([(64, 32), (32, 16)], start=1):
        lines += texts.retry_lines(
            "calibration", attempt=attempt, max_retries=3, previous=previous, batch_size=size
        )
    lines.append(texts.phase_complete("calibration", retries=2, batch_size=16))
    assert lines == SUCCESS


def test_times() -> None:
    assert [
        texts.phase_duration("calibration", 45.2),
        texts.phase_duration("training", 270),
        texts.total_time(315),
    ] == TIMES


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 seconds"),
        (0.4, "0 seconds"),
        (1, "1 second"),
        (59.6, "1 minute"),
        (61, "1 minute 1 second"),
        (3600, "1 hour"),
        (7325, "2 hours 2 minutes 5 seconds"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert texts.format_duration(seconds) == text


def test_failure_at_the_minimum() -> None:
    text = texts.error_line(failure_at_minimum(situation(max_retries=10, retries=10)))
    assert text == AT_MINIMUM


def test_failure_with_retries_exhausted() -> None:
    text = failure_exhausted(
        situation(batch_size=4, min_batch_size=4), original_error="CUDA error 2: out of memory\nand more"
    )
    assert texts.error_line(text) == EXHAUSTED


def test_other_phases_say_the_same_with_their_own_name() -> None:
    assert texts.phase_start("training", batches=9, batch_size=8) == (
        "🏋️  Training Phase: Running 9 batches (initial batch_size=8)"
    )
    assert texts.retry_lines("validation", attempt=1, max_retries=3, previous=8, batch_size=4) == [
        "⚠️  Validation OOM detected (attempt 1/3), reducing batch_size: 8 → 4",
        "  🧹 Clearing CUDA cache...",
        "  🔄 Retrying validation with smaller batch size...",
    ]
    assert texts.phase_complete("rollout", retries=1, batch_size=4) == (
        "✅ Rollout complete after 1 OOM retries - final batch_size=4"
    )
    assert failure_at_minimum(situation(phase="update")).startswith("Update OOM: batch_size=2 (minimum=2)")


def test_no_retries_are_not_called_retries() -> None:
    assert (
        texts.phase_complete("training", retries=0, batch_size=64)
        == "✅ Training complete - final batch_size=64"
    )


def test_a_rung_is_not_called_an_attempt() -> None:
    first, _, last = texts.retry_lines(
        "training", attempt=4, max_retries=3, previous=2, batch_size=2, rung="gradient-checkpointing"
    )
    assert first.startswith("⚠️  Training OOM detected") and "gradient-checkpointing" in first
    assert "4/3" not in first
    assert "with gradient-checkpointing" in last


def test_flags_are_those_of_the_phase() -> None:
    for phase, prefix in (("calibration", "--qat-"), ("training", "--"), ("rollout", "--")):
        low = failure_at_minimum(situation(phase=phase, retries=1))
        assert f" {prefix}min-batch-size to 1 (current: 2)" in low
        more = failure_exhausted(situation(phase=phase, batch_size=64), original_error="x")
        assert f" {prefix}max-oom-retries to 8 (current: 3)" in more


def test_lowering_the_minimum_is_offered_only_where_it_helps() -> None:
    assert "min-batch-size" not in failure_at_minimum(situation(batch_size=1, min_batch_size=1))
    assert "min-batch-size" not in failure_at_minimum(situation(batch_size=1, min_batch_size=2))
    text = failure_at_minimum(situation(batch_size=8, min_batch_size=8))
    assert "--qat-min-batch-size to 4 (current: 8) and raise --qat-max-oom-retries to 4 (current: 3)" in text
    assert "raise" not in failure_at_minimum(situation(batch_size=8, min_batch_size=8, retries=2))


def test_raising_the_retries_is_offered_only_where_it_helps() -> None:
    at_limit = failure_exhausted(situation(batch_size=64, retries=10, max_retries=10), original_error="x")
    assert "max-oom-retries" not in at_limit
    assert "--batch-size 32" in at_limit
    one_more = failure_exhausted(situation(batch_size=3), original_error="x")
    assert "raising --qat-max-oom-retries to 4 (current: 3)" in one_more
    off = failure_exhausted(situation(batch_size=64, retries=0, max_retries=0), original_error="x")
    assert "--qat-max-oom-retries to 3 (current: 0, recovery is off)" in off


@pytest.mark.parametrize("changes", [{"on_cpu": True}, {"kind": "host"}, {"kind": "shm"}])
def test_no_cpu_where_it_changes_nothing(changes: dict[str, object]) -> None:
    assert "CPU" not in failure_at_minimum(situation(**changes))
    assert "VRAM" not in failure_at_minimum(situation(**changes))
    assert "CPU" not in failure_exhausted(situation(batch_size=64, **changes), original_error="x")


def test_the_memory_that_ran_out_is_named() -> None:
    assert "available host memory." in failure_at_minimum(situation(kind="host"))
    text = failure_at_minimum(situation(kind="shm"))
    assert "available shared memory." in text and "/dev/shm" in text


def test_a_larger_card_is_not_told_to_be_8_gb() -> None:
    assert "8GB+" in failure_at_minimum(situation(total_bytes=4 << 30))
    assert "8GB+" not in failure_at_minimum(situation(total_bytes=24 << 30))
    assert "8GB+" not in failure_at_minimum(situation(phase="training"))


def test_advice_is_numbered_with_the_workarounds() -> None:
    text = failure_at_minimum(situation(min_batch_size=1, batch_size=1), advice=("A batch of 6 fits 8 GiB",))
    assert text.endswith("\n   (4) A batch of 6 fits 8 GiB")


@settings(deadline=None)
@given(start=st.integers(1, 5000), minimum=st.integers(1, 64), retries=st.integers(0, 10))
def test_following_the_hint_gets_further(start: int, minimum: int, retries: int) -> None:
    """With the settings that the text names, the same device is tried at a smaller batch than before."""

    def smallest_tried(minimum: int, retries: int, start: int) -> tuple[int, str]:
        incident = Incident(kind="device", exception_type="x", message="x")
        policy = OomPolicy(min_batch_size=minimum, max_retries=retries)
        history = list[Attempt]()
        while True:
            history.append(Attempt(phase="training", rank=0, batch_size=start, incident=incident))
            decision = policy.decide(history)
            if decision.action == "give_up":
                return start, decision.text
            start = decision.batch_size

    reached, text = smallest_tried(minimum, retries, start)
    lower = re.search(r"--min-batch-size to (\d+) \(current: (\d+)\)", text)
    more = re.search(r"--max-oom-retries to (\d+) \(current: (\d+)", text)
    smaller_start = re.search(r" --batch-size (\d+)", text)
    assert lower is None or int(lower[2]) == minimum
    assert more is None or int(more[2]) == retries
    if lower or more or smaller_start:
        further, _ = smallest_tried(
            int(lower[1]) if lower else minimum,
            int(more[1]) if more else retries,
            int(smaller_start[1]) if smaller_start else start,
        )
        assert further < reached

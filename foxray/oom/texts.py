"""The lines people alert on in their logs, and the two texts with which recovery ends.

Phases share one wording and put in their own name. A failure text offers only what would change the
outcome: no CPU to a run that is on it, no lower minimum where it is 1 already, no more retries than may be
set. Everything it says comes in as arguments, the planner's advice as ready lines.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from foxray.oom.incident import Kind

MOST_RETRIES = 10
"""The largest `max_retries` that may be set."""

_NAMES = {"calibration": "QAT calibration"}
_ICONS = {"calibration": "🎯 ", "training": "🏋️  ", "validation": "🔎 ", "rollout": "🎲 ", "update": "🔧 "}
_MEMORY = {"device": "GPU memory", "host": "host memory", "shm": "shared memory"}
_INDENT = "   "
_ADVISED_CALIBRATION_BYTES = 8 << 30


@dataclass(frozen=True, kw_only=True)
class Situation:
    """Where a phase stood when recovery ended."""

    phase: str
    kind: Kind
    batch_size: int
    """The size that failed last."""
    min_batch_size: int
    retries: int
    """Times that the batch was made smaller."""
    max_retries: int
    on_cpu: bool = False
    """The work already ran in plain host memory."""
    total_bytes: int | None = None
    """Size of the device."""
    rungs_tried: tuple[str, ...] = ()

    @property
    def min_flag(self) -> str:
        """The flag that sets the minimum batch size of this phase."""
        return "--qat-min-batch-size" if self.phase == "calibration" else "--min-batch-size"

    @property
    def retries_flag(self) -> str:
        """The flag that sets the retries of this phase."""
        return "--qat-max-oom-retries" if self.phase == "calibration" else "--max-oom-retries"

    @property
    def could_use_cpu(self) -> bool:
        """Whether host memory is another memory than the one that ran out."""
        return self.kind == "device" and not self.on_cpu


def phase_name(phase: str) -> str:
    """The phase within a sentence: "QAT calibration", "training"."""
    return _NAMES.get(phase, phase)


def _sentence_start(phase: str) -> str:
    name = phase_name(phase)
    return name[0].upper() + name[1:]


def _heading(phase: str) -> str:
    name = " ".join(word[0].upper() + word[1:] for word in phase_name(phase).split())
    return f"{_ICONS.get(phase, '')}{name} Phase"


def phase_start(phase: str, *, batches: int, batch_size: int) -> str:
    """A phase begins."""
    return f"{_heading(phase)}: Running {batches} batches (initial batch_size={batch_size})"


def retry_lines(
    phase: str, *, attempt: int, max_retries: int, previous: int, batch_size: int, rung: str | None = None
) -> list[str]:
    """The three lines of one retry. `attempt` counts the retries, this one included."""
    name = _sentence_start(phase)
    if rung is None:
        found = f"(attempt {attempt}/{max_retries}), reducing batch_size: {previous} → {batch_size}"
        again = "with smaller batch size"
    else:
        found = f"with smaller batches used up, entering {rung} at batch_size={batch_size}"
        again = f"with {rung}"
    return [
        f"⚠️  {name} OOM detected {found}",
        "  🧹 Clearing CUDA cache...",
        f"  🔄 Retrying {phase_name(phase)} {again}...",
    ]


def phase_complete(phase: str, *, retries: int, batch_size: int) -> str:
    """A phase ended well. Retries are named only where there were any, so that an alert on them is true."""
    after = f" after {retries} OOM retries" if retries else ""
    return f"✅ {_sentence_start(phase)} complete{after} - final batch_size={batch_size}"


def format_duration(seconds: float) -> str:
    """Whole hours, minutes and seconds without the empty ones: "4 minutes 30 seconds", "0 seconds"."""
    minutes, second = divmod(round(seconds), 60)
    hour, minute = divmod(minutes, 60)
    parts = [
        f"{count} {unit}{'' if count == 1 else 's'}"
        for count, unit in ((hour, "hour"), (minute, "minute"), (second, "second"))
        if count
    ]
    return " ".join(parts) or "0 seconds"


def phase_duration(phase: str, seconds: float) -> str:
    """How long a phase took."""
    return f"{_heading(phase)}: {format_duration(seconds)}"


def total_time(seconds: float) -> str:
    """How long everything took."""
    return f"📊 Total Time: {format_duration(seconds)}"


def error_line(text: str) -> str:
    """An error as the command line shows it."""
    return f"❌ Error: {text}"


def failure_at_minimum(situation: Situation, *, advice: Sequence[str] = ()) -> str:
    """The smallest batch allowed does not fit."""
    first = (
        f"{_sentence_start(situation.phase)} OOM: batch_size={situation.batch_size} "
        f"(minimum={situation.min_batch_size}) is too large for available {_MEMORY[situation.kind]}."
    )
    workarounds = [*_other_memory(situation), *_lower_minimum(situation), *advice]
    lines = ["", "Workarounds:", *(f"({number}) {line}" for number, line in enumerate(workarounds, start=1))]
    if situation.rungs_tried:
        lines = ["", f"Tried at the minimum: {', '.join(situation.rungs_tried)}.", *lines]
    return "\n".join([first, *(_INDENT + line for line in lines)])


def failure_exhausted(situation: Situation, *, original_error: str, advice: Sequence[str] = ()) -> str:
    """The retries are used up (or none are allowed) and the batch could still be smaller."""
    first = (
        f"{_sentence_start(situation.phase)} OOM after {situation.retries} retries "
        f"(final batch_size={situation.batch_size})."
    )
    lines = ["", f"Original error: {original_error.partition(chr(10))[0]}"]
    hints = [_hint(situation), *(["use CPU"] if situation.could_use_cpu else [])]
    lines += ["", f"Try {' or '.join(hints)}.", *advice]
    return "\n".join([first, *(_INDENT + line for line in lines)])


def _other_memory(situation: Situation) -> list[str]:
    if situation.kind == "shm":
        return ["Raise the limit of /dev/shm (e.g., docker run --shm-size), or use fewer loader processes"]
    smaller = "Reduce model size (e.g., fewer features, smaller hidden dimensions)"
    if not situation.could_use_cpu:
        return ["Use a machine with more memory", smaller]
    known_larger = (situation.total_bytes or 0) >= _ADVISED_CALIBRATION_BYTES
    advised = " (8GB+ recommended for TFT-225 QAT)"
    if situation.phase != "calibration" or known_larger:
        advised = ""
    return [f"Use a GPU with more VRAM{advised}", smaller, "Train on CPU (slower but unlimited memory)"]


def _lower_minimum(situation: Situation) -> list[str]:
    """A lower minimum helps only if there is a smaller size to go to and a retry to go there with."""
    lower = min(situation.min_batch_size, situation.batch_size) // 2
    if lower < 1:
        return []
    hint = f"Lower {situation.min_flag} to {lower} (current: {situation.min_batch_size})"
    if situation.retries < situation.max_retries:
        return [hint]
    if situation.max_retries == MOST_RETRIES:
        return []
    more = f"{situation.retries_flag} to {situation.max_retries + 1} (current: {situation.max_retries})"
    return [f"{hint} and raise {more}"]


def _hint(situation: Situation) -> str:
    """The one setting that lets the batch shrink further than it did."""
    if situation.batch_size <= situation.min_batch_size and situation.min_batch_size > 1:
        lower = situation.min_batch_size // 2
        return f"reducing {situation.min_flag} to {lower} (current: {situation.min_batch_size})"
    if situation.max_retries == 0:
        return f"setting {situation.retries_flag} to 3 (current: 0, recovery is off)"
    if situation.max_retries < MOST_RETRIES:
        wanted = min(situation.max_retries + _halvings(situation), MOST_RETRIES)
        return f"raising {situation.retries_flag} to {wanted} (current: {situation.max_retries})"
    return f"starting with --batch-size {max(situation.batch_size // 2, situation.min_batch_size)}"


def _halvings(situation: Situation) -> int:
    """Halvings from the size that failed down to the minimum."""
    size, halvings = situation.batch_size, 0
    while size > situation.min_batch_size:
        size, halvings = max(size // 2, situation.min_batch_size), halvings + 1
    return halvings

"""What follows the optimizer step and the epoch: the learning rate, and when to stop early.

Both are functions of the committed state alone, never of how often a step was tried: the learning rate
depends on the share of the run's samples that is in committed updates, so it is the same on any number of
workers and after any number of retries or resumes.
"""

import math
from typing import Literal

Schedule = Literal["constant", "cosine"]


def learning_rate_at(progress: float, *, base: float, schedule: Schedule) -> float:
    """Learning rate of the step that begins at `progress`, the share (0 to 1) of the run's samples done.

    "cosine" falls from `base` to 0 over the run (Loshchilov and Hutter, arXiv:1608.03983, equation 5,
    without restarts).
    """
    if schedule == "constant":
        return base
    return base * 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0)))


def epochs_without_improvement(history: list[float]) -> int:
    """Epochs since the smallest of `history` (one validation loss per epoch); NaN improves nothing."""
    best, since = math.inf, 0
    for loss in history:
        since = 0 if loss < best else since + 1
        best = min(best, loss) if not math.isnan(loss) else best
    return since

"""How long the command line takes to show its help, against importing torch, which it must not do."""

import statistics
import subprocess
import sys
import time
from typing import Any

COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import foxray": ["-c", "import foxray"],
    "foxray --help": ["-m", "foxray", "--help"],
    "import torch": ["-c", "import torch"],
}


def run(repeats: int = 5) -> dict[str, Any]:
    """Median seconds of each command, interleaved."""
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(repeats):
        for name, arguments in COMMANDS.items():
            started = time.perf_counter()
            subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
            seconds[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, median in medians.items():
        print(f"{name:<18} {median:6.2f} s")
    return medians


if __name__ == "__main__":
    run()

"""Draws a command's real output as a terminal picture: `python -m benchmarks.picture OUT.svg COMMAND...`.

The README's picture is made this way, by `make picture`, so that it shows what the code prints.
"""

import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH = 118


def main() -> None:
    """Run the command, show its output, and save it as SVG."""
    target, *command = sys.argv[1:]
    console = Console(record=True, width=WIDTH, highlight=False)
    console.print(Text(f"$ {' '.join(command)}", style="bold"))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            console.print(Text(line.rstrip("\n")), soft_wrap=False)
    if process.returncode:
        sys.exit(process.returncode)
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    console.save_svg(target, title="foxray")


if __name__ == "__main__":
    main()

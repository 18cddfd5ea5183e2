"""The command line: one thin file for each command.

`foxray --help` imports neither torch nor ray: commands import what they need when they run. Exit statuses:
0 well, 1 failure, 2 wrong usage or input, 3 out of memory with everything tried, 130 stopped by Ctrl-C or
SIGTERM. An expected error is one clear text on standard error; `--verbose` adds the traceback.
"""

import sys
import traceback
from itertools import pairwise
from typing import Any

import typer

from foxray.cli.convert import convert
from foxray.cli.export import export
from foxray.cli.predict import predict
from foxray.cli.runs import runs
from foxray.cli.show import show
from foxray.cli.synth import synth
from foxray.cli.train import train
from foxray.errors import FoxrayError

app = typer.Typer(
    name="foxray",
    help="Distributed training in which running out of memory is an ordinary, recorded, recovered event.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("train")(train)
app.command("predict")(predict)
app.command("export")(export)
app.command("runs")(runs)
app.command("show")(show)
app.command("convert")(convert)
app.command("synth")(synth)

CANCELLED_STATUS = 130


def main() -> None:
    """Entry point of the `foxray` command."""
    sys.exit(_run(sys.argv[1:]))


def _run(arguments: list[str]) -> int:
    verbose = "--verbose" in arguments
    try:
        status = app(args=arguments, standalone_mode=False)
        return status if isinstance(status, int) else 0
    except FoxrayError as error:
        return _fail(f"❌ Error: {error}", error.exit_status, verbose)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("Stopped.", CANCELLED_STATUS, verbose)
    except Exception as error:  # noqa: BLE001 - the last line of defence says what it was
        if hasattr(error, "show") and hasattr(error, "exit_code"):
            # A usage error; its class is click's or, in newer typers, that of a copy of click.
            _name_the_value(error, arguments)
            error.show()
            return int(error.exit_code)
        if type(error).__name__ == "Cancelled":  # its module imports what --help must not
            return _fail(f"Stopped: {error}", CANCELLED_STATUS, verbose)
        hint = "" if verbose else "\n(--verbose shows where)"
        return _fail(f"❌ Error: {type(error).__name__}: {error}{hint}", 1, verbose)


def _name_the_value(error: Any, arguments: list[str]) -> None:
    """Add the value seen to a message that only says what it should have been."""
    options = getattr(getattr(error, "param", None), "opts", [])
    for option, value in pairwise(arguments):
        if option in options and value not in error.message:
            error.message += f" (seen: {value})"


def _fail(text: str, status: int, verbose: bool) -> int:
    if verbose:
        traceback.print_exc()
    print(text, file=sys.stderr)
    return status

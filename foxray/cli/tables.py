"""What the commands that print tables share: one console, and how times, sizes and counts are written."""

from typing import Any

import rich.box
from rich.console import Console
from rich.table import Table

# A table that is piped or written into a file has no terminal whose width it must respect.
WIDTH_WITHOUT_TERMINAL = 200

STYLES = {
    "success": "green",
    "ok": "green",
    "oom": "red",
    "failed": "red",
    "lost": "magenta",
    "cancelled": "yellow",
    "interrupted": "yellow",
    "running": "cyan",
}


def open_console() -> Console:
    """A console that prints texts of the ledger as they are: nothing in them is markup."""
    console = Console(markup=False, highlight=False, emoji=False, soft_wrap=False)
    if not console.is_terminal:
        console = Console(markup=False, highlight=False, emoji=False, width=WIDTH_WITHOUT_TERMINAL)
    return console


def new_table(title: str, *columns: str) -> Table:
    """A table; a column whose name begins with ">" is set flush right."""
    table = Table(title=title or None, title_justify="left", title_style="bold", box=rich.box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(
            column.lstrip(">"), justify="right" if column.startswith(">") else "left", overflow="fold"
        )
    return table


def print_fields(console: Console, fields: dict[str, Any]) -> None:
    """Names and values below each other; those without a value are left out."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, value in fields.items():
        if value not in (None, "", [], {}):
            table.add_row(name, str(value))
    console.print(table)


def moment(time_utc: str | None) -> str:
    """A time for people, in UTC to the second."""
    return time_utc[:19].replace("T", " ") if time_utc else "-"


def seconds(value: float | None) -> str:
    """A duration: 0.012 s, 4.2 s, 12m 05s, 3h 07m."""
    if value is None:
        return "-"
    if value < 60:
        return f"{value:.3f} s" if value < 1 else f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02d}m" if hours else f"{minutes}m {rest:02d}s"


def size(value: int | None) -> str:
    """A size in bytes: 512 B, 1.5 KiB, 3.20 GiB."""
    if value is None:
        return "-"
    amount = float(value)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{value} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.2f} GiB"


def number(value: float | None) -> str:
    """A loss."""
    return "-" if value is None else f"{value:.6g}"


def whole(value: int | None) -> str:
    """A count."""
    return "-" if value is None else str(value)


def arrows(sizes: list[int]) -> str:
    """The path of a batch size: 64 → 32 → 16."""
    return " → ".join(map(str, sizes)) or "-"

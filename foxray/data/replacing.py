"""Files that appear whole or not at all: written under another name beside their place, then renamed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from foxray.errors import UserError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path; rename it to `path` when the block ends well, remove it otherwise.

    Raises `UserError` where the folder cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        temporary.replace(path)
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written ({error.strerror or error}). Choose a writable place with free space."
        ) from error
    finally:
        # The folder itself may be what cannot be written: then there is nothing to remove.
        if temporary.parent.is_dir():
            temporary.unlink(missing_ok=True)

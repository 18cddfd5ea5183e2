"""Where a ledger keeps its files: a folder (a local disk, NFS) or any file system of pyarrow.

The little that the ledger asks of a storage: list a folder, read a file, make a file visible whole,
delete. A local folder is served by the operating system's own calls, which cost microseconds and need no
pyarrow. A file is made visible whole by writing beside it and renaming, or on an object store, where
renaming is a copy and half a file is never seen, by one PUT.
"""

import contextlib
import os
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from foxray.errors import UserError

OBJECT_STORES = frozenset({"s3", "gcs", "abfs"})
PARALLEL_READS = 16
TEMPORARY_SUFFIX = ".tmp"


class Files(Protocol):
    """A storage; all paths are relative to its root, with "/" between their parts."""

    root: str
    uri: str

    def list(self, folder: str) -> list[tuple[str, bool]]:
        """(name, whether it is a file) of all that is in a folder; nothing when there is no such folder."""

    def read(self, path: str) -> bytes:
        """A whole file. Raises OSError."""

    def read_all(self, paths: Iterable[str]) -> Iterator[bytes | OSError]:
        """Whole files, in order; the error in the place of one that cannot be read."""

    def write(self, path: str, data: bytes, *, durable: bool = True) -> None:
        """Make a file visible whole, replacing one of that name.

        `durable`: a power cut may still undo the whole write (until `settle`), but leaves no torn file.
        """

    def settle(self, folder: str) -> None:
        """Make what was written into a folder outlast a power cut."""

    def delete(self, path: str) -> None:
        """Delete a file; one that is gone already is no error."""

    def make_folder(self, folder: str, *, new: bool = False) -> None:
        """Make a folder with those above it. With `new`, raises FileExistsError when it was there."""

    def has_folder(self, folder: str) -> bool:
        """Whether there is such a folder."""

    def open(self, path: str) -> Any:
        """A pyarrow file for reading at any place. Raises OSError."""


def open_files(storage: str | Path, filesystem: Any = None) -> Files:
    """The storage that a path or a URI names; `filesystem`: pyarrow's, with `storage` a path in it.

    Raises UserError for a URI that pyarrow does not know.
    """
    text = str(storage)
    if filesystem is not None:
        return ArrowFiles(filesystem, text.rstrip("/"), f"{filesystem.type_name}:{text}")
    if text.startswith("file://"):
        return LocalFiles(Path(unquote(urlsplit(text).path)))
    if "://" not in text:
        return LocalFiles(Path(text).expanduser())
    from pyarrow import fs

    try:
        found, root = fs.FileSystem.from_uri(text)
    except (ValueError, OSError) as error:
        raise UserError(
            f"--storage {text}: not a storage that can be opened ({error}); "
            "use a folder, or a URI like file:///path, s3://bucket/prefix, gs://bucket/prefix"
        ) from error
    return ArrowFiles(found, root.rstrip("/"), text.rstrip("/"))


class LocalFiles:
    """A folder of this machine, or one that is mounted on it."""

    def __init__(self, root: Path) -> None:
        path = root.absolute()
        self.root = str(path)
        self.uri = path.as_uri()

    def list(self, folder: str) -> list[tuple[str, bool]]:
        """See `Files`."""
        try:
            with os.scandir(f"{self.root}/{folder}") as entries:
                return [(entry.name, not _is_folder(entry)) for entry in entries]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def read(self, path: str) -> bytes:
        """See `Files`."""
        with open(f"{self.root}/{path}", "rb", buffering=0) as file:  # noqa: PTH123 - thousands of these a second
            return file.read()

    def read_all(self, paths: Iterable[str]) -> Iterator[bytes | OSError]:
        """See `Files`."""
        for path in paths:
            try:
                yield self.read(path)
            except OSError as error:
                yield error

    def write(self, path: str, data: bytes, *, durable: bool = True) -> None:
        """See `Files`."""
        folder, _, name = f"{self.root}/{path}".rpartition("/")
        temporary = f"{folder}/.{name}.{uuid.uuid4().hex[:8]}{TEMPORARY_SUFFIX}"
        try:
            with open(temporary, "xb", buffering=0) as file:  # noqa: PTH123
                file.write(data)
                if durable:
                    os.fsync(file.fileno())
            os.replace(temporary, f"{folder}/{name}")  # noqa: PTH105
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)  # noqa: PTH108
            raise

    def settle(self, folder: str) -> None:
        """See `Files`."""
        descriptor = os.open(f"{self.root}/{folder}", os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def delete(self, path: str) -> None:
        """See `Files`."""
        Path(self.root, path).unlink(missing_ok=True)

    def make_folder(self, folder: str, *, new: bool = False) -> None:
        """See `Files`."""
        path = Path(self.root, folder)
        if new:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir()
        else:
            path.mkdir(parents=True, exist_ok=True)

    def has_folder(self, folder: str) -> bool:
        """See `Files`."""
        return Path(self.root, folder).is_dir()

    def open(self, path: str) -> Any:
        """See `Files`."""
        import pyarrow as pa

        return pa.memory_map(f"{self.root}/{path}")


class ArrowFiles:
    """A file system of pyarrow: an object store, HDFS, or another one behind the same interface."""

    def __init__(self, filesystem: Any, root: str, uri: str) -> None:
        self.root, self.uri = root, uri
        self._fs = filesystem
        base, kind = filesystem, filesystem.type_name
        while kind == "subtree":
            base = base.base_fs
            kind = base.type_name
        self._one_put = kind in OBJECT_STORES

    def list(self, folder: str) -> list[tuple[str, bool]]:
        """See `Files`."""
        from pyarrow import fs

        found = self._fs.get_file_info(fs.FileSelector(self._path(folder), allow_not_found=True))
        return [(info.base_name, info.type == fs.FileType.File) for info in found]

    def read(self, path: str) -> bytes:
        """See `Files`."""
        with self._fs.open_input_file(self._path(path)) as file:
            data: bytes = file.read()
        return data

    def read_all(self, paths: Iterable[str]) -> Iterator[bytes | OSError]:
        """See `Files`. Several at a time, since each waits for the network."""

        def one(path: str) -> bytes | OSError:
            try:
                return self.read(path)
            except OSError as error:
                return error

        with ThreadPoolExecutor(PARALLEL_READS) as pool:
            yield from pool.map(one, paths)

    def write(self, path: str, data: bytes, *, durable: bool = True) -> None:
        """See `Files`. These stores answer when the data are safe, `durable` or not."""
        target = self._path(path)
        if self._one_put:
            with self._fs.open_output_stream(target) as stream:
                stream.write(data)
            return
        folder, _, name = target.rpartition("/")
        temporary = f"{folder}/.{name}.{uuid.uuid4().hex[:8]}{TEMPORARY_SUFFIX}"
        with self._fs.open_output_stream(temporary) as stream:
            stream.write(data)
        self._fs.move(temporary, target)

    def settle(self, folder: str) -> None:
        """See `Files`. Nothing to do: see `write`."""

    def delete(self, path: str) -> None:
        """See `Files`."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.delete_file(self._path(path))

    def make_folder(self, folder: str, *, new: bool = False) -> None:
        """See `Files`. An object store has no folders: there, nothing is made."""
        if new and self.has_folder(folder):
            raise FileExistsError(folder)
        if not self._one_put:
            self._fs.create_dir(self._path(folder), recursive=True)

    def has_folder(self, folder: str) -> bool:
        """See `Files`."""
        from pyarrow import fs

        return bool(self._fs.get_file_info(self._path(folder)).type == fs.FileType.Directory)

    def open(self, path: str) -> Any:
        """See `Files`."""
        return self._fs.open_input_file(self._path(path))

    def _path(self, path: str) -> str:
        return f"{self.root}/{path}" if self.root else path


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads round in a circle; reading it says so
        return False

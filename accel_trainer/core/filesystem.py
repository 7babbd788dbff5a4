"""Atomic and durable file operations: what they report as written survives a power loss.

The run's files are written through this module. Exceptions are the run lock, and what the
trackers write.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from . import platform
from .errors import OutputError
from .guards import check_not_moved
from .logger import logger

Chunk = bytes | memoryview

# The name of a temporary contains the final (or former) name, the process id and the time.
TEMPORARY_NAME = re.compile(r"\.(tmp|del)-.+-\d+-\d{19}")
_OF_THE_SYSTEM = (".DS_Store", "Thumbs.db", "desktop.ini")
_CHUNK_BYTES = 1 << 20
_MAX_LINE_BYTES = 1 << 20
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | platform.SAFELY


class Disk:
    """The changes to a disk, one method each.

    All functions below call `disk`: tests replace it to count the changes, to crash or fail at one
    of them, or to record them and replay what a power loss may leave.
    """

    def make_directory(self, path: Path) -> None:
        """Create a directory that only this user can change; the umask decides who can enter."""
        check_not_moved(path)
        os.mkdir(path, 0o755)

    def create(self, path: Path) -> int:
        """Create a file that must not exist, and return its descriptor.

        Only this user can write it; the umask decides who can read it.
        """
        check_not_moved(path)
        return os.open(path, _NEW_FILE, 0o644)

    def write(self, path: Path, descriptor: int, data: Chunk) -> None:
        """Append all of `data`."""
        check_not_moved(path)
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]

    def truncate(self, path: Path, descriptor: int, size: int) -> None:
        """Cut the file to `size` bytes."""
        check_not_moved(path)
        os.ftruncate(descriptor, size)

    def sync(self, path: Path, descriptor: int) -> None:
        """Return once the file's bytes survive a power loss."""
        os.fsync(descriptor)

    def sync_directory(self, path: Path) -> None:
        """Return once the names in the directory survive a power loss."""
        platform.sync_directory(path)

    def rename(self, source: Path, target: Path) -> None:
        """Give `source` another name in the same directory, replacing a file of that name."""
        check_not_moved(target)
        os.replace(source, target)

    def link(self, path: Path, target: Path) -> None:
        """Give the file `target` the name `path`, too. Raises OSError where that is impossible."""
        check_not_moved(path)
        os.link(target, path)

    def remove(self, path: Path) -> None:
        """Delete a file."""
        check_not_moved(path)
        os.unlink(path)

    def remove_empty(self, path: Path) -> None:
        """Delete an empty directory. Raises OSError if it is not empty."""
        check_not_moved(path)
        os.rmdir(path)

    def remove_tree(self, path: Path) -> None:
        """Delete a directory and its content. Symlinks are removed, not followed."""
        check_not_moved(path)
        shutil.rmtree(path)


disk = Disk()


@contextmanager
def writes_to(folder: Path) -> Iterator[None]:
    """Turn an OSError of the block, such as a full disk, into an OutputError naming `folder`."""
    try:
        yield
    except OSError as error:
        fact = f"cannot write to {str(folder)[:200]} ({error.strerror})"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OutputError("NO_SPACE", f"{fact}: free some space and start again") from error
        raise OutputError(
            "OUT_DIR_NOT_WRITABLE", f"{fact}: choose a different --output-dir"
        ) from error


def temporary_path(path: Path, kind: str) -> Path:
    """Return a new name beside `path` that `sweep` recognises; `kind` is `tmp` or `del`."""
    return path.with_name(f".{kind}-{path.name}-{os.getpid()}-{time.time_ns():019}")


def make_directory(path: Path) -> None:
    """Create a directory durably. Its parent must exist; the directory itself may."""
    # A symlink raises an error: it may lead to a folder of someone else.
    if path.is_symlink() or not path.is_dir():
        disk.make_directory(path)
    # Even if it existed: the process that created it may have died before its sync.
    disk.sync_directory(path.parent)


def create_file(path: Path, chunks: Iterable[Chunk]) -> None:
    """Write a file that must not exist yet, and sync it.

    Its name is durable once its directory is synced.
    """
    descriptor = disk.create(path)
    try:
        for chunk in chunks:
            disk.write(path, descriptor, chunk)
        disk.sync(path, descriptor)
    finally:
        os.close(descriptor)


def write_file_atomic(path: Path, data: bytes) -> None:
    """Replace `path` by a file of `data`; even after a crash, it has the old bytes or the new."""
    replace_file(path, [data])


def replace_file(path: Path, chunks: Iterable[Chunk]) -> None:
    """Replace `path` by a file of `chunks`, which are consumed while the file is written."""
    temporary = temporary_path(path, "tmp")
    try:
        create_file(temporary, chunks)
        disk.rename(temporary, path)
    except OSError:
        _discard(temporary)
        raise
    disk.sync_directory(path.parent)


@contextmanager
def new_directory(final: Path) -> Iterator[Path]:
    """Yield a temporary directory, to be filled by `create_file` and renamed by `publish`.

    An error in the block leaves nothing behind.
    """
    temporary = temporary_path(final, "tmp")
    try:
        disk.make_directory(temporary)
        yield temporary
    except BaseException:
        _discard(temporary)
        raise


def publish(temporary: Path, final: Path) -> None:
    """Rename a filled directory to `final`, which is complete and durable on return.

    Raises OSError if another process has created `final` in the meantime.
    """
    disk.sync_directory(temporary)
    rename(temporary, final)


def rename(source: Path, target: Path) -> None:
    """Rename within a directory, durably."""
    disk.rename(source, target)
    disk.sync_directory(target.parent)


def remove_own(paths: Iterable[Path], own: Callable[[Path], Collection[str]]) -> None:
    """Delete directories that hold nothing but their `own` files, relative paths of each one.

    One that holds any other file, or is a link, is renamed, with a warning. After a crash, each one
    is complete under its name, or has a name that `sweep` deletes.
    """
    renamed = []
    for path in paths:
        if others := files_in(path) - {*own(path)}:
            kept = path.with_name(f"{path.name}-kept-{time.time_ns()}")
            rename(path, kept)
            logger.warning("%s was renamed to %s: %s is not our own", path, kept, min(others))
        else:
            renamed.append(temporary_path(path, "del"))
            disk.rename(path, renamed[-1])
    if renamed:
        # Otherwise a power loss may restore the name of a directory whose files are gone.
        disk.sync_directory(renamed[0].parent)
    for path in renamed:
        disk.remove_tree(path)


def files_in(directory: Path) -> set[str]:
    """Return the relative paths of all files and links below a directory; a link holds itself.

    Those that a system leaves in each folder that somebody opens are left out.
    """
    if directory.is_symlink() or not directory.is_dir():
        return {"."}
    return {
        path.relative_to(directory).as_posix()
        for path in directory.rglob("*")
        if (path.is_symlink() or not path.is_dir()) and path.name not in _OF_THE_SYSTEM
    }


def sweep(directory: Path) -> None:
    """Delete what crashed writers left in `directory`.

    Call it before writing, and only under the run lock, which proves that the writers are dead:
    process ids do not, since containers reuse them.
    """
    for path in list(directory.iterdir()):
        if TEMPORARY_NAME.fullmatch(path.name):
            _discard(path)


def _discard(path: Path) -> None:
    """Delete a temporary if possible; otherwise `sweep` does it later."""
    try:
        if path.is_dir() and not path.is_symlink():
            disk.remove_tree(path)
        else:
            disk.remove(path)
    except OSError as error:
        if not isinstance(error, FileNotFoundError):
            logger.warning("cannot remove the temporary %s: %s", path, error)


# --- reading: a folder may come from a stranger, so its files are opened with care ---


def open_regular(path: Path, flags: int) -> int:
    """Open a regular file; never follow a symlink or wait for a FIFO. Raises OSError."""
    descriptor = os.open(path, flags | platform.SAFELY | platform.WITHOUT_WAITING, 0o600)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def open_file(path: Path) -> BinaryIO:
    """Open a regular file for reading. Raises OSError."""
    return open(open_regular(path, os.O_RDONLY), "rb")


def read_file(path: Path, *, max_bytes: int) -> bytes:
    """Return the bytes of a regular file. Raises OSError, also if it is larger than `max_bytes`."""
    with open_file(path) as file:
        return file.read(_size_of(file, path, max_bytes))


def read_large_file(path: Path, *, max_bytes: int) -> memoryview:
    """Return the bytes of a regular file, which may be changed. Raises OSError, as `read_file`.

    Unlike a bytearray, their memory is not cleared first and has large pages, which halves the
    time.
    """
    import numpy as np  # late: commands that read no checkpoint start without it

    with open_file(path) as file:
        data = np.empty(_size_of(file, path, max_bytes), np.uint8).data
        num_read: int = file.readinto(data)  # type: ignore[attr-defined]  # missing in its stubs
    if num_read < len(data):
        raise OSError(errno.EIO, "it became shorter while it was read", str(path))
    return data


def _size_of(file: BinaryIO, path: Path, max_bytes: int) -> int:
    size = os.fstat(file.fileno()).st_size
    if size > max_bytes:
        raise OSError(errno.EFBIG, f"{size} bytes, more than {max_bytes}", str(path))
    return size


def read_chunks(path: Path) -> Iterator[bytes]:
    """Yield the bytes of a regular file of any size, a part at a time. Raises OSError."""
    with open_file(path) as file:
        yield from iter(lambda: file.read(_CHUNK_BYTES), b"")


def stamp_of(status: os.stat_result) -> tuple[int, ...]:
    """Return what changes whenever a file does.

    Size and time of modification alone do not: `rsync -t`, `cp -p` and archives set the latter.
    """
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a regular file of any size. Raises OSError."""
    digest = hashlib.sha256()
    for chunk in read_chunks(path):
        digest.update(chunk)
    return digest.hexdigest()


def read_lines(path: Path, *, start: int = 0) -> Iterator[bytes]:
    """Yield the lines of a file from byte `start` on, without one that is still being written.

    Raises OSError, also for a line of more than a MiB.
    """
    with open_file(path) as file:
        file.seek(start)
        while (line := file.readline(_MAX_LINE_BYTES)).endswith(b"\n"):
            yield line
        if len(line) == _MAX_LINE_BYTES:
            raise OSError(errno.EFBIG, f"a line of more than {_MAX_LINE_BYTES} bytes", str(path))


@contextmanager
def probe_file(directory: Path) -> Iterator[Path]:
    """Create an empty file in `directory` for the block. Raises OSError if that fails."""
    probe = temporary_path(directory / "probe", "tmp")
    os.close(disk.create(probe))
    try:
        yield probe
    finally:
        _discard(probe)  # The run that holds the folder may have swept it.


class AppendFile:
    """A file that grows line by line; an append that fails leaves no partial line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not os.path.lexists(path):
            os.close(disk.create(path))
            disk.sync_directory(path.parent)
        self._descriptor = open_regular(path, os.O_RDWR | os.O_APPEND)

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return os.fstat(self._descriptor).st_size

    def append(self, line: bytes) -> None:
        """Append `line`.

        It survives a crash of the process at once, and a power loss after `sync`.
        """
        size = self.size
        try:
            disk.write(self.path, self._descriptor, line)
        except OSError:
            # A full disk may hold a part of the line; the next append must not continue it.
            self.truncate(size)
            raise

    def sync(self) -> None:
        """Return once everything appended survives a power loss."""
        disk.sync(self.path, self._descriptor)

    def truncate(self, size: int) -> None:
        """Cut the file to its first `size` bytes."""
        disk.truncate(self.path, self._descriptor, size)

    def drop_half_line(self) -> None:
        """Cut off an unfinished last line of at most a MiB."""
        with open_file(self.path) as file:
            file.seek(max(0, self.size - _MAX_LINE_BYTES))
            _, _, half = file.read().rpartition(b"\n")
        if half:
            self.truncate(self.size - len(half))

    def close(self) -> None:
        """Close the file, without a sync."""
        os.close(self._descriptor)
        self._descriptor = -1  # another file may get the number

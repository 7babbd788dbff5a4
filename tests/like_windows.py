"""A run of the digits with what Windows has: `python -m tests.like_windows FOLDER`.

The names that Windows lacks are gone before the package is imported, and a few calls behave as they
do there. Drive letters and the file names that are reserved are not imitated, and what it launches
has the names of Linux again.
"""

from __future__ import annotations

import errno
import importlib
import multiprocessing
import os
import pkgutil
import signal
import sys
import types
from contextlib import suppress
from pathlib import Path
from typing import Any

import accelerate  # noqa: F401 - others' modules may ask for the system that they are on
import psutil  # noqa: F401
import safetensors.torch  # noqa: F401
import sklearn.datasets  # noqa: F401
import torch.distributed.fsdp  # noqa: F401
import torch.utils.data  # noqa: F401
import tyro  # noqa: F401

from .digits import ON_DIGITS

MODULES = ("fcntl", "grp", "pwd", "resource", "termios")
OF_OS = (
    "O_CLOEXEC",
    "O_DIRECTORY",
    "O_NOFOLLOW",
    "O_NONBLOCK",
    "chown",
    "fork",
    "geteuid",
    "getgid",
    "getegid",
    "getpgid",
    "getsid",
    "getuid",
    "killpg",
    "nice",
    "pread",
    "pwrite",
    "sched_getaffinity",
    "sched_setaffinity",
    "setsid",
    "sysconf",
    "sync",
    "uname",
)
SIGNALS = ("SIGABRT", "SIGFPE", "SIGILL", "SIGINT", "SIGSEGV", "SIGTERM")


def become_windows() -> None:
    for name in MODULES:
        sys.modules[name] = None  # type: ignore[assignment]
    for name in OF_OS:
        delattr(os, name)
    for name in [name for name in vars(signal) if name.startswith("SIG") and name.isalnum()]:
        if name not in SIGNALS:
            delattr(signal, name)
    os.open = as_on_windows(os.open)
    os.rename = rename
    signal.signal = handle
    os.O_BINARY = 0  # type: ignore[attr-defined]
    sys.modules["msvcrt"] = make_msvcrt()


def as_on_windows(posix_open: Any) -> Any:
    """Return `os.open`, which there opens no directory."""

    def open_(path: Any, *arguments: Any, **options: Any) -> int:
        if not isinstance(path, int) and os.path.isdir(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return int(posix_open(path, *arguments, **options))

    return open_


def rename(source: Any, target: Any, _posix_rename: Any = os.rename) -> None:
    """Which there replaces nothing."""
    if os.path.exists(target):
        raise FileExistsError(errno.EEXIST, "File exists", str(target))
    _posix_rename(source, target)


def handle(number: int, handler: Any, _posix_signal: Any = signal.signal) -> Any:
    """Which there takes these signals alone."""
    if number not in [getattr(signal, name) for name in SIGNALS]:
        raise ValueError("signal number not allowed")
    return _posix_signal(number, handler)


def make_msvcrt() -> types.ModuleType:
    """Return the locks of the C library of Windows as a module; a lock ends with its file."""
    module = types.ModuleType("msvcrt")
    locked: dict[tuple[int, int], int] = {}

    def locking(descriptor: int, mode: int, num_bytes: int) -> None:
        place = os.fstat(descriptor).st_ino, os.lseek(descriptor, 0, os.SEEK_CUR)
        is_held = False
        with suppress(OSError, KeyError):  # whose file is closed
            is_held = locked[place] != descriptor and os.fstat(locked[place]).st_ino == place[0]
        if is_held:
            raise PermissionError(errno.EACCES, "Permission denied")
        locked[place] = descriptor

    module.LK_LOCK, module.LK_NBLCK = 1, 2  # type: ignore[attr-defined]
    module.locking = locking  # type: ignore[attr-defined]
    return module


def main() -> None:
    folder = Path(sys.argv[1])
    become_windows()
    import accel_trainer
    from accel_trainer.core.run_dir import run_lock
    from recipes import cifar

    for module in pkgutil.walk_packages(accel_trainer.__path__, "accel_trainer."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    flags = [
        *ON_DIGITS,
        "--runtime.num-threads",
        "1",
        "--output-dir",
        str(folder / "run"),
        "--cache-dir",
        str(folder / "cache"),
        "--checkpoint-every-n-steps",
        "1",
    ]
    for num_steps in ("3", "5"):
        config = accel_trainer.parse_config(
            cifar.Config, [*flags, "--max-steps", num_steps], description=""
        )
        print(cifar.train(config).position)
    with run_lock(folder / "run" / "run.lock"):
        try:
            cifar.train(config)
        except accel_trainer.UserError as error:
            print(error)
    multiprocessing.get_all_start_methods = lambda: ["spawn"]  # type: ignore[method-assign,assignment]
    accel_trainer.launch(print, "launched", num_processes=2)


if __name__ == "__main__":
    main()

"""Runs a command on a terminal of a given size."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path


def run_python(code: str, *, columns: int, environment: dict[str, str] | None = None) -> str:
    """Return all that `python -c code` writes to a terminal, with its control characters.

    Raises if it fails.
    """
    return run([sys.executable, "-c", code], columns=columns, environment=environment)


def run(command: Sequence[str], *, columns: int, environment: dict[str, str] | None = None) -> str:
    """Return all that a command writes to a terminal of `columns`, with its control characters."""
    screen, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    own = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    child = subprocess.Popen(
        command,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        cwd=Path(__file__).parents[1],
        env=own | (environment or {}),
    )
    os.close(terminal)
    text = b""
    with suppress(OSError):  # how a terminal without a process ends
        while part := os.read(screen, 65536):
            text += part
    os.close(screen)
    assert child.wait() == 0, text.decode()
    return text.decode().replace("\r\n", "\n")


def too_long(text: str, columns: int) -> list[str]:
    """Return lines and bar states that do not fit; a single word, such as a path, may be longer."""
    states = [state for line in text.split("\n") for state in line.split("\r")]
    return [state for state in states if len(state) > columns and " " in state.strip()]

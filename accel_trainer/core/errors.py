"""Errors that a user can fix: one clear line, and an exit code that a scheduler can act on.

The codes are those of sysexits.h where it has one: a job script can distinguish "fix the command"
from "try again".
"""

from __future__ import annotations

import re
from enum import IntEnum
from typing import Any

# a terminal would obey them
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]+")


class ExitCode(IntEnum):
    """How a run ended, as a process exit code."""

    DONE = 0
    USAGE = 64  # a flag or a config value: do not retry
    DATA = 65  # the dataset: do not retry
    INTERNAL = 70  # a bug or a stuck process: retry a few times
    OUTPUT = 73  # the run folder cannot be written, or is locked: do not retry
    CHECKPOINT = 74  # checkpoints cannot be written, or none is valid: do not retry
    PREEMPTED = 75  # stopped by a signal, resumable: run the same command again
    DIVERGED = 79  # a loss or weight became NaN or inf: do not retry
    # the user's own code, such as a model or a callback, raised an error: do not retry
    USER_CODE = 80


class UserError(Exception):
    """What happened, the value, and the fix, in one line.

    Shown without a traceback unless `--debug`.

    `code` is a short stable name (`CKPT_NONE_VALID`) to search for.
    """

    exit_code = ExitCode.INTERNAL

    def __init__(self, code: str, message: str) -> None:
        super().__init__(_CONTROL.sub(" ", message))  # one line, even with a newline in a name
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.code, self.args[0])

    def __str__(self) -> str:
        return f"error[{self.code}]: {self.args[0]}"


class ConfigError(UserError, ValueError):
    """A flag, a config file or a combination of values cannot work."""

    exit_code = ExitCode.USAGE


class OutOfMemoryError(ConfigError):
    """The batch or the model needs more memory than there is."""


class DataError(UserError):
    """The dataset is missing, damaged or does not fit the config."""

    exit_code = ExitCode.DATA


class OutputError(UserError):
    """The run folder cannot be created, written or locked."""

    exit_code = ExitCode.OUTPUT


class CheckpointError(UserError):
    """A checkpoint cannot be written, is damaged, or does not fit the run."""

    exit_code = ExitCode.CHECKPOINT


class DivergedError(UserError):
    """A loss, gradient or weight is NaN or inf."""

    exit_code = ExitCode.DIVERGED


class Preempted(UserError):
    """The run ended early, such as at a signal before its first save: the same command continues it."""

    exit_code = ExitCode.PREEMPTED


class ProcessError(UserError):
    """Process `rank` of the run failed, was killed or is stuck; `exit_code` is that of the process."""

    def __init__(self, code: str, message: str, rank: int, exit_code: int) -> None:
        super().__init__(code, message)
        self.rank, self.exit_code = rank, ExitCode(exit_code)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.code, self.args[0], self.rank, self.exit_code)

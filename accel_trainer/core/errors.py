"""Errors that a user can fix: one clear line, and an exit code that a scheduler can act on.

The codes are those of sysexits.h where it has one: a job script can distinguish "fix the command"
from "try again".
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import IntEnum

# Control characters, which a terminal would obey.
_CONTROL = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff"
    r"\U000e0000-\U000e007f]+"
)


_MAX_LISTED_NAMES = 5


def listed(names: Iterable[str], *, separator: str = ", ") -> str:
    """Return the first of `names` as a text, and how many more there are."""
    found = sorted(names)
    text = separator.join(found[:_MAX_LISTED_NAMES])
    num_more = len(found) - _MAX_LISTED_NAMES
    return f"{text} and {num_more} more" if num_more > 0 else text


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
    USER_CODE = 80  # an error in the user's own code, such as a model or a callback: do not retry


class OneLineError(BaseException):
    """Its message says in one line what happened, with which value, and how to fix it.

    It is shown without a traceback unless `--debug` is set. `code` is a short, stable name to
    search for, such as `CKPT_NONE_VALID`.
    """

    exit_code = ExitCode.INTERNAL

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        # One line, even if a name contains a newline.
        self.message = _CONTROL.sub(" ", message)
        super().__init__(code, self.message)

    def __str__(self) -> str:
        return f"error[{self.code}]: {self.message}"


class UserError(OneLineError, Exception):
    """An error that a user can fix."""


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


class Preempted(OneLineError):
    """A signal has ended the run before its training began; the same command continues it.

    No `Exception`, as KeyboardInterrupt: the code that the signal interrupts, such as that which
    reads a sample, must not take it for an error of its own.
    """

    exit_code = ExitCode.PREEMPTED


class ProcessError(UserError):
    """Process `rank` failed, was killed or is stuck; `exit_code` is that process's exit code."""

    def __init__(self, code: str, message: str, rank: int, exit_code: int) -> None:
        super().__init__(code, message)
        self.args = (code, self.message, rank, exit_code)  # pickle creates the error from these
        self.rank = rank
        self.exit_code = ExitCode(exit_code)

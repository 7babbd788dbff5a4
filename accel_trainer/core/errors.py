"""Errors that a user can fix: one clear line, and an exit code that a scheduler can act on.

The codes are those of sysexits.h where it has one: a job script can distinguish "fix the command"
from "try again".
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from multiprocessing import parent_process
from typing import Any

# Control characters, which a terminal would obey.
_CONTROL = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff"
    r"\U000e0000-\U000e007f]+"
)


_MAX_LISTED_NAMES = 5


def listed(names: Iterable[str], *, separator: str = ", ") -> str:
    """Return the first of `names`, sorted, as a text, and how many more there are."""
    return shortened(sorted(names), separator=separator)


def shortened(names: Sequence[str], *, most: int = _MAX_LISTED_NAMES, separator: str = ", ") -> str:
    """Return the first of `names`, in their order, as a text, and how many more there are."""
    text = separator.join(names[:most])
    num_more = len(names) - most
    return f"{text} and {num_more} more" if num_more > 0 else text


def reason_of(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none."""
    return next(iter(str(error).splitlines()), type(error).__name__)


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
    is_of_python = False
    """Whether its text has keywords, for a Python program, in place of flags."""

    def __init__(self, code: str, message: str, *more: object) -> None:
        self.code = code
        # One line, even if a name contains a newline.
        self.message = _CONTROL.sub(" ", message)
        super().__init__(code, self.message, *more)  # pickle creates the error from these

    @property
    def line(self) -> str:
        """What a command prints: the message with its code."""
        return f"error[{self.code}]: {self.message}"

    def __str__(self) -> str:
        from ..names.everyday import in_python  # few programs fail

        return in_python(self.line) if self.is_of_python else self.line


@contextmanager
def told_in_python() -> Iterator[None]:
    """Let errors inside name keywords; commands, which show their `line`, keep the flags."""
    try:
        yield
    except OneLineError as error:
        error.is_of_python = True
        raise


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


class DamagedError(CheckpointError):
    """A file of a checkpoint is not as it was saved."""


class DivergedError(UserError):
    """A loss, gradient or weight is NaN or inf."""

    exit_code = ExitCode.DIVERGED


class Preempted(OneLineError):
    """A signal has stopped the run, and with it the program; the same command continues both.

    `result` is a `RunResult` with the progress of the run; None if training had not started.

    It is no `Exception`, just as KeyboardInterrupt is none: code that catches the errors of reading
    a sample, or of one trial of a search, must not catch this one.
    """

    exit_code = ExitCode.PREEMPTED

    def __init__(self, code: str, message: str, result: Any = None) -> None:
        super().__init__(code, message, result)
        self.result = result


class PreemptedScript(Preempted, SystemExit):  # type: ignore[misc]  # `code` has two meanings
    """Ends a script without a traceback."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.code = self.exit_code  # type: ignore[assignment]  # SystemExit's


class PreemptedCell(Preempted, KeyboardInterrupt):
    """Ends a notebook's cell, a statement at a prompt or a thread, and not the program."""

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows."""
        return [self.message]


def here(stop: Preempted) -> Preempted:
    """Return the same stop, so that it ends what runs here: a script, or a cell of a notebook."""
    is_prompt = hasattr(sys, "ps1") and parent_process() is None
    if is_prompt or threading.current_thread() is not threading.main_thread():
        return PreemptedCell(*stop.args)
    return PreemptedScript(*stop.args)


class ProcessError(UserError):
    """Process `rank` failed, was killed or is stuck; `exit_code` is that process's exit code."""

    def __init__(self, code: str, message: str, rank: int, exit_code: int) -> None:
        super().__init__(code, message, rank, exit_code)
        self.rank = rank
        self.exit_code = ExitCode(exit_code)


class PartFailed(Exception):
    """A part that users can provide failed: the message names it, and `__cause__` is its error."""


class PeerFailed(PartFailed):
    """A part failed on another process, whose own error says why."""

"""From a command line to an exit code."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn, TypeVar

import torch.distributed as dist

from . import console
from .config import parse_config
from .dry_run import dry_run
from .errors import ExitCode, ProcessError, UserError
from .launcher_variables import setup_launch_env, without_local_rank
from .preemption import ignore_signals
from .run_config import RecipeConfig
from .trainer import RunResult

C = TypeVar("C", bound=RecipeConfig)

_WAIT_FOR_MAIN_S = 2.0  # a launcher ends all processes when one has failed: torchrun after 0.1 s, mpirun sooner


def main(
    train: Callable[[C], RunResult], config_class: type[C], *, description: str, argv: Sequence[str] | None = None
) -> NoReturn:
    """Run `train` on the config that the command line asks for, and exit with a code a scheduler can act on.

    An error of the user's becomes one line on stderr; a bug, and anything with `--debug`, has a traceback too.
    """
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING, stream=sys.stderr)
    if sys.__stderr__ is not None and not faulthandler.is_enabled():
        faulthandler.enable(sys.__stderr__)  # a segmentation fault or bus error then says where
    is_debug = "--debug" in (sys.argv if argv is None else argv)
    try:
        setup_launch_env()  # so that a mistake is reported once, whatever launched this
        if argv is None:
            sys.argv[1:] = without_local_rank(sys.argv[1:])  # for all who read the command later, as a run's record
        config = parse_config(config_class, argv, description=description)
        result = dry_run(train, config) if config.run.dry_run else train(config)
    except Exception as error:
        with suppress(OSError, ValueError):  # stderr takes no more: the exit code still says what happened
            _report(error, is_debug=is_debug)
        if os.environ.get("WORLD_SIZE", "1") != "1":
            # Closed sockets tell the others at once; to close the process group in order would wait for them.
            _finish_printing()
            os._exit(_exit_code(error))
        _finish_printing()
        sys.exit(_exit_code(error))
    ignore_signals()  # all is saved: a late signal must not change the exit code
    _finish_printing()
    sys.exit(ExitCode.PREEMPTED if result.state == "preempted" else ExitCode.DONE)


def _finish_printing() -> None:
    """Hand on what a recipe printed: what fails later, when Python ends, would change the exit code."""
    try:
        console.flush()
    except (OSError, ValueError):
        console.mute()
    with suppress(OSError, ValueError):
        sys.stderr.flush()


def _exit_code(error: Exception) -> int:
    return int(error.exit_code if isinstance(error, UserError) else ExitCode.INTERNAL)


def _report(error: Exception, *, is_debug: bool) -> None:
    """Say in one line what happened, on one process: the main one, or the next if it is the main one that failed.

    A bug has its traceback before that line, from the process that met it. A process that has not met the others
    speaks for itself, unless it is ended meanwhile: then the main one, as wrong as this, was faster.
    """
    is_bug = not isinstance(error, UserError)
    if is_debug or is_bug:
        traceback.print_exception(error)
    named = os.environ.get("RANK", "0")
    rank = int(named) if named.isdecimal() else 0
    is_alone = rank > 0 and not dist.is_initialized()
    if is_alone:
        time.sleep(_WAIT_FOR_MAIN_S)
    if rank == 0 or is_alone or (rank == 1 and isinstance(error, ProcessError) and error.rank == 0):
        notes = getattr(error, "__notes__", [error])
        line = f"error[INTERNAL]: {notes[0]}" if is_bug else str(error)
        print(f"accel_trainer: {f'process {rank}: ' * is_alone}{line}", file=sys.stderr)

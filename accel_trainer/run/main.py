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

from ..callbacks import console
from ..core.callback import RunResult
from ..core.errors import ExitCode, ProcessError, UserError
from ..data.signals import ignore_signals
from ..distributed.launch_env import setup_launch_env
from .config import RecipeConfig
from .dry_run import dry_run
from .parser import parse_config
from .short_help import short_help

C = TypeVar("C", bound=RecipeConfig)

_WAIT_FOR_MAIN_S = 2.0  # a launcher ends all processes when one has failed: torchrun after 0.1 s


def main(
    train: Callable[[C], RunResult], config_class: type[C], *, description: str, argv: Sequence[str] | None = None
) -> NoReturn:
    """Run `train` on the config of the command line, and exit with a code that a scheduler can act on.

    A user's error is one line on stderr; a bug, and with `--debug` any error, also has a traceback.
    """
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING, stream=sys.stderr)
    if sys.__stderr__ is not None and not faulthandler.is_enabled():
        faulthandler.enable(sys.__stderr__)  # shows where a segmentation fault or bus error happened
    is_debug, failed = "--debug" in (sys.argv if argv is None else argv), False
    try:
        setup_launch_env()  # first, so that a mistake in it is reported once
        if {"-h", "--help"} & set(sys.argv[1:] if argv is None else argv):
            try:
                print(short_help(config_class, description=description), flush=True)
            except BrokenPipeError:  # the reader, such as `head`, stopped reading
                console.mute()
            sys.exit(ExitCode.DONE)
        if os.environ.get("NO_COLOR"):
            os.environ["TERM"] = "dumb"  # the only way to stop tyro from colouring --help-all
        config = parse_config(config_class, argv, description=description)
        result = dry_run(train, config) if config.run.dry_run else train(config)
        ignore_signals()  # everything is saved: a late signal must not change the exit code
        code = ExitCode.PREEMPTED if result.state == "preempted" else ExitCode.DONE
    except Exception as error:
        with suppress(OSError, ValueError):  # stderr is closed: the exit code still says what happened
            _report(error, is_debug=is_debug)
        code, failed = error.exit_code if isinstance(error, UserError) else ExitCode.INTERNAL, True
    try:
        console.flush()  # what a recipe printed: a failure when Python exits would change the exit code
    except (OSError, ValueError):
        console.mute()
    if failed and os.environ.get("WORLD_SIZE", "1") != "1":
        # The others notice closed sockets at once; destroying the process group would wait for them.
        os._exit(code)
    sys.exit(code)


def _report(error: Exception, *, is_debug: bool) -> None:
    """Print what happened in one line, on the main process, or on the next if the main process failed.

    If another process failed first, or its machine does not answer, so does the first process of each machine.

    A bug has a traceback before that line. A process that fails before the process group exists reports itself, after
    a delay in which the launcher ends it if the main process has failed, too.
    """
    is_bug = not isinstance(error, UserError)
    if is_debug or is_bug:
        traceback.print_exception(error)
    named = os.environ.get("RANK", "0")
    rank = int(named) if named.isdecimal() else 0
    is_alone = rank > 0 and not dist.is_initialized()
    if is_alone:
        time.sleep(_WAIT_FOR_MAIN_S)
    is_first_here = os.environ.get("LOCAL_RANK") == "0"
    reports_other = isinstance(error, ProcessError) and (is_first_here or (rank == 1 and error.rank == 0))
    if rank == 0 or is_alone or reports_other:
        notes = getattr(error, "__notes__", [error])
        line = f"error[INTERNAL]: {notes[0]}" if is_bug else str(error)
        print(f"accel_trainer: {f'process {rank}: ' * is_alone}{line}", file=sys.stderr)

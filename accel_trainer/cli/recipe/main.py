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
from functools import partial
from typing import NoReturn, TypeVar

import torch.distributed as dist

from ...callbacks import console
from ...core.callback import RunResult
from ...core.errors import ConfigError, DivergedError, ExitCode, ProcessError, UserError
from ...core.user_code import describe_error, exit_code_of, print_error
from ...data.signals import ignore_signals
from ...distributed.launch_env import setup_launch_env
from ...run.config import RecipeConfig
from ...run.parser import parse_config
from ...training.evaluator import nonfinite_loss
from .dry_run import dry_run
from .short_help import short_help

C = TypeVar("C", bound=RecipeConfig)

_WAIT_FOR_MAIN_S = 2.0  # a launcher ends all processes when one has failed: torchrun after 0.1 s


def main(
    train: Callable[[C], RunResult],
    config_class: type[C],
    *,
    description: str,
    argv: Sequence[str] | None = None,
) -> NoReturn:
    """Run `train` on the config of the command line, and exit with a code that a scheduler can act on.

    A user's error is one line on stderr. An error in the user's code also has the traceback of that
    code; a bug, and with `--debug` any error, has the whole traceback.
    """
    logging.basicConfig(
        format="%(levelname)s: %(message)s", level=logging.WARNING, stream=sys.stderr
    )
    if sys.__stderr__ is not None and not faulthandler.is_enabled():
        # shows where a segmentation fault or bus error happened
        faulthandler.enable(sys.__stderr__)

    def run() -> RunResult:
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
        if config.run.dry_run:
            return dry_run(partial(_train, train), config, exit_with=exit_with)
        return _train(train, config)

    exit_with(run, "--debug" in (sys.argv if argv is None else argv))


def exit_with(run: Callable[[], RunResult], is_debug: bool) -> NoReturn:
    """Call `run`, report an error, and exit with the code of how it ended."""
    failed = False
    try:
        result = run()
        ignore_signals()  # everything is saved: a late signal must not change the exit code
        if result.state != "preempted":
            _refuse_diverged(result)
        code = ExitCode.PREEMPTED if result.state == "preempted" else ExitCode.DONE
    except Exception as error:
        # stderr is closed: the exit code still says what happened
        with suppress(OSError, ValueError):
            _report(error, is_debug=is_debug)
        code, failed = exit_code_of(error), True
    try:
        # what a recipe printed: a failure when Python exits would change the exit code
        console.flush()
    except (OSError, ValueError):
        console.mute()
    if failed and os.environ.get("WORLD_SIZE", "1") != "1":
        # The others notice closed sockets at once; destroying the process group would wait for
        # them.
        os._exit(code)
    sys.exit(code)


def _train(train: Callable[[C], RunResult], config: C) -> RunResult:
    """Train.

    Raises ConfigError if the recipe's function returns something else than how the run ended.
    """
    result = train(config)
    if not isinstance(result, RunResult):
        fact = f"the recipe's function returned an object of type {type(result).__name__}"
        raise ConfigError(
            "RECIPE", f"{fact}: return what trainer.fit() returns, which says how the run ended"
        )
    return result


def _refuse_diverged(result: RunResult) -> None:
    """Raise DivergedError if the last evaluation's loss is NaN or inf: everything is saved, but it is no success."""
    if found := nonfinite_loss(result.metrics):
        best = (
            "there are no best weights"
            if result.best is None
            else f"the best weights are those of {result.best.name}"
        )
        fix = "lower the learning rate, and choose another --output-dir"
        raise DivergedError(
            "EVAL_NONFINITE",
            f"training has ended, but {found} in the last evaluation; {best}: {fix}",
        )


def _report(error: Exception, *, is_debug: bool) -> None:
    """Print what happened in one line, on the main process, or on the next if the main process failed.

    If another process failed first, or its machine does not answer, so does the first process of
    each machine.

    A bug and an error in the user's code have a traceback before that line. A process that fails
    before the process group exists reports itself, after a delay in which the launcher ends it if
    the main process has failed, too.
    """
    is_expected = isinstance(error, UserError)
    if is_debug:
        traceback.print_exception(error)
    elif not is_expected:
        print_error(error)
    named = os.environ.get("RANK", "0")
    rank = int(named) if named.isdecimal() else 0
    is_alone = rank > 0 and not dist.is_initialized()
    if is_alone:
        time.sleep(_WAIT_FOR_MAIN_S)
    is_first_here = os.environ.get("LOCAL_RANK") == "0"
    reports_other = isinstance(error, ProcessError) and (
        is_first_here or (rank == 1 and error.rank == 0)
    )
    if rank == 0 or is_alone or reports_other:
        said = describe_error(error)
        where = next(
            (note for note in getattr(error, "__notes__", ()) if note.endswith(said)), said
        )
        line = str(error) if is_expected else f"error[{exit_code_of(error).name}]: {where}"
        print(f"accel_trainer: {f'process {rank}: ' * is_alone}{line}", file=sys.stderr)

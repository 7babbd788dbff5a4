"""From a command line to an exit code."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn, TypeVar

from ...callbacks import console
from ...core.errors import ConfigError, ExitCode
from ...distributed.launch_env import setup_launch_env
from ...run.config import RecipeConfig
from ...training.callback import RunResult
from ..flags.parser import parse_config
from ..flags.short_help import short_help
from .exit import exit_with
from .hours import ending_in_time
from .notes import note_other_items, say_next, warn_if_loss_grew
from .start import SHOWN_BY_COMMAND, this_start
from .train_as import train_as

C = TypeVar("C", bound=RecipeConfig)


@console.speaking_flags()
def main(
    train: Callable[[C], RunResult],
    config_class: type[C],
    *,
    description: str | None = None,
    argv: Sequence[str] | None = None,
) -> NoReturn:
    """Run `train` on the config of the command line, and exit with a code for schedulers.

    `description` is what `--help` says first; None: the first line of the recipe's docstring.

    A user's error is one line on stderr. An error in the user's code also has the traceback of that
    code; a bug, and with `--debug` any error, has the whole traceback.
    """
    console.escape_letters()
    logging.basicConfig(
        format="%(levelname)s: %(message)s", level=logging.WARNING, stream=sys.stderr
    )
    if sys.__stderr__ is not None and not faulthandler.is_enabled():
        # shows where a segmentation fault or bus error happened
        faulthandler.enable(sys.__stderr__)

    if description is None:
        described = sys.modules[train.__module__].__doc__ or train.__doc__ or ""
        description = described.strip().partition("\n")[0]

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
        checked = partial(_train, train)
        if (start := this_start()) is not None:
            return train_as(start, checked, config)
        if config.run.dry_run:
            from .dry_run import dry_run  # most starts are none, and compare nothing

            return dry_run(checked, config)
        if os.environ.get("RANK", "0") != "0":
            return checked(config)
        return _train_with_notes(checked, config)

    # Not from the config, which an error in a flag would leave unknown.
    is_debug = bool({"--debug", "--run.debug"} & set(sys.argv if argv is None else argv))
    exit_with(run, is_debug)


def _train(train: Callable[[C], RunResult], config: C) -> RunResult:
    """Train.

    Raises ConfigError if the recipe's function returns something else than how the run ended.
    """
    with ending_in_time(config):
        result = train(config)
    if not isinstance(result, RunResult):
        fact = f"the recipe's function returned an object of type {type(result).__name__}"
        raise ConfigError(
            "RECIPE", f"{fact}: return the result of trainer.fit(), so that the exit code is right"
        )
    return result


def _train_with_notes(train: Callable[[C], RunResult], config: C) -> RunResult:
    """Train, and print what a person at the terminal should know before and after."""
    is_quiet = config.run.quiet
    if config.run.output_dir is not None and not is_quiet:
        note_other_items(config.run.output_dir)
    result = train(config)
    warn_if_loss_grew(result)
    if not is_quiet and SHOWN_BY_COMMAND not in os.environ:
        say_next(result)
    return result

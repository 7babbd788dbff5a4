"""From a command line to an exit code."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

from .config import parse_config
from .errors import ExitCode, UserError
from .run import RecipeConfig
from .trainer import RunResult

C = TypeVar("C", bound=RecipeConfig)


def main(
    train: Callable[[C], RunResult],
    config_class: type[C],
    *,
    description: str,
    argv: Sequence[str] | None = None,
) -> NoReturn:
    """Run `train` on the config that the command line asks for, and exit with a code a scheduler can act on.

    A `UserError` becomes one line on stderr, from the main process; with `--debug` a traceback.
    """
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING, stream=sys.stderr)
    is_debug = "--debug" in (sys.argv if argv is None else argv)
    try:
        result = train(parse_config(config_class, argv, description=description))
    except UserError as error:
        if is_debug:
            raise
        if int(os.environ.get("RANK", 0)) == 0:
            print(f"accel_trainer: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    sys.exit(ExitCode.PREEMPTED if result.state == "preempted" else ExitCode.DONE)

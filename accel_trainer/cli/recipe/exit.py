"""How a command ends: it reports an error, and exits with a code that a scheduler can act on."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

import torch.distributed as dist

from ...callbacks import console
from ...core.errors import DivergedError, ExitCode, OneLineError, Preempted, ProcessError
from ...core.json_files import write_json
from ...core.user_code import (
    describe_error,
    exit_code_of,
    find_user_code,
    is_lost_peer,
    print_error,
)
from ...data.signals import ignore_signals
from ...distributed.launch_env import error_file
from ...training.callback import RunResult
from ...training.evaluation.evaluation import nonfinite_loss

# When one process has failed, a launcher ends all others: torchrun after 0.1 s. So the main process
# needs time to print its line.
_WAIT_FOR_MAIN_S = 5.0  # before the processes have met
_WAIT_FOR_LINE_S = 0.5


def exit_with(run: Callable[[], RunResult], is_debug: bool) -> NoReturn:
    """Call `run`, report its error if it raises one, and exit with the code of how it ended."""
    has_failed = False
    try:
        result = run()
        ignore_signals()  # everything is saved: a late signal must not change the exit code
        if result.state != "preempted":
            _refuse_diverged(result)
        code = ExitCode.PREEMPTED if result.state == "preempted" else ExitCode.DONE
    except Preempted as stop:  # which has been said
        ignore_signals()
        code = stop.exit_code
        has_failed = stop.result is None
    except Exception as error:
        # If stderr is closed, the exit code still tells what happened.
        with suppress(OSError, ValueError):
            _report(error, is_debug=is_debug)
        code = exit_code_of(error)
        has_failed = True
    try:
        # If Python fails to flush stdout when it ends, it changes the exit code.
        console.flush()
    except (OSError, ValueError):
        console.mute()
    if has_failed and os.environ.get("WORLD_SIZE", "1") != "1":
        # The other processes notice the closed sockets at once. Destroying the process group would
        # wait for them.
        os._exit(code)
    sys.exit(code)


def _refuse_diverged(result: RunResult) -> None:
    """Raise DivergedError if the last evaluation's loss is NaN or inf: the run is no success.

    Everything has been saved by then.
    """
    if found := nonfinite_loss(result.metrics):
        best = (
            "there are no best weights"
            if result.best is None
            else f"the best weights are those of {result.best.name}"
        )
        fix = "lower the learning rate, and choose a different --output-dir"
        raise DivergedError(
            "EVAL_NONFINITE",
            f"training has ended, but {found} in the last evaluation; {best}: {fix}",
        )


def _report(error: BaseException, *, is_debug: bool) -> None:
    """Print in one line what happened; tracebacks of bugs and of the user's code come before it.

    That another process did not come to an exchange is no bug of this one, and has only its line.
    The main process prints the line, or process 1 if the main process failed first. If another
    process failed first or its machine does not answer, the first process of each machine also
    prints it. A process that fails before the process group exists prints its own error, after a
    delay in which the launcher ends it if the main process has failed as well. After it exists, the
    others wait so that the launcher does not end the main process before it has printed the line.
    """
    is_expected = isinstance(error, OneLineError)
    if is_debug:
        traceback.print_exception(error)
    elif not is_expected and (find_user_code(error) or not is_lost_peer(error)):
        print_error(error)
    named = os.environ.get("RANK", "0")
    rank = int(named) if named.isdecimal() else 0
    is_alone = rank > 0 and not dist.is_initialized()
    is_first_here = os.environ.get("LOCAL_RANK") == "0"
    reports_other = isinstance(error, ProcessError) and (
        is_first_here or (rank == 1 and error.rank == 0)
    )
    if rank > 0 and not reports_other:
        time.sleep(_WAIT_FOR_MAIN_S if is_alone else _WAIT_FOR_LINE_S)
    if rank == 0 or is_alone or reports_other:
        said = describe_error(error)
        where = next(
            (note for note in getattr(error, "__notes__", ()) if note.endswith(said)), said
        )
        line = f"error[{exit_code_of(error).name}]: {where}"
        if isinstance(error, OneLineError):
            line = error.line
        print(f"accel_trainer: {f'process {rank}: ' * is_alone}{line}", file=sys.stderr)
        if (file := error_file()) is not None:  # or the line would be lost above torchrun's own
            write_json(file, {"message": line, "timestamp": int(time.time())})

"""`accel-trainer launch`: run accelerate's launcher, but pass on signals and exit codes."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import NoReturn

from ..core.errors import ConfigError, ExitCode
from ..core.platform import SAVE_SIGNALS
from .common.processes import forward_signals

GRACE_S = 300  # torch's 30 s would cut off a longer checkpoint

_EXAMPLE = (
    "example: accel-trainer launch --num_processes 4 --multi_gpu recipes/cifar.py --epochs 30"
)


def main(argv: Sequence[str]) -> int:
    """Do what `accelerate launch` does with `argv`; return the code of the first failed process.

    Raises ConfigError for arguments that accelerate refuses.
    """
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    parser = launch_command_parser()
    parser.prog = "accel-trainer launch"
    parser.usage = "accel-trainer launch [accelerate's flags] RECIPE.py [its flags]"
    parser.epilog = _EXAMPLE
    # Under any other program name, accelerate's own lists only a few flags.
    parser.formatter_class = argparse.HelpFormatter
    vars(parser)["error"] = _refuse
    options = parser.parse_args(argv)
    if options.cpu and (options.num_processes or 1) > 1:
        # accelerate (1.15) would start one process.
        options.cpu = False
        options.multi_gpu = True
        os.environ["ACCELERATE_USE_CPU"] = "true"
    # Torch would also handle the other signals, and change the exit codes.
    options.signals_to_handle = "SIGQUIT"
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(GRACE_S))
    os.environ["ACCEL_TRAINER_LAUNCHER"] = str(os.getpid())
    # The run itself reports a failure, in one line.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    # It lists the defaults of flags.
    logging.getLogger(launch_command.__module__).setLevel(logging.ERROR)
    with forward_signals() as received:
        try:
            launch_command(options)
        except subprocess.CalledProcessError as error:
            return _exit_code(0, error.returncode, received)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            return _exit_code(rank, failure.exitcode, received)
        except OSError:
            raise
        except Exception as error:  # of accelerate, torch or YAML: nothing is running
            _refuse(f"{type(error).__name__}: {error}")
    return ExitCode.DONE


def _refuse(reason: str) -> NoReturn:
    raise ConfigError("LAUNCH", f"accelerate cannot launch: {reason}: see accelerate launch --help")


def _exit_code(rank: int, code: int, received: Sequence[int]) -> int:
    """Return the exit code as a shell reports it; print which process was killed, if any."""
    if code >= 0:
        return code
    if -code in SAVE_SIGNALS or (received and -code in (*received, signal.SIGTERM)):
        return ExitCode.PREEMPTED  # the process had no handlers yet: nothing is lost
    name = signal.Signals(-code).name
    cause = " (out of memory?)" if -code == signal.SIGKILL else ""
    print(f"accel_trainer: error[KILLED]: rank {rank} was killed by {name}{cause}", file=sys.stderr)
    return 128 - code


if __name__ == "__main__":
    from .main import main as run_command

    sys.exit(run_command(["launch", *sys.argv[1:]]))

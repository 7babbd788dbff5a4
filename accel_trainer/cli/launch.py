"""`accel-trainer launch`: run accelerate's launcher, but forward signals and return the run's exit code."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from ..core.errors import ExitCode
from ..core.platform import STOP_SIGNALS

GRACE_S = 300  # torch's 30 s would cut off a longer checkpoint

_EXAMPLE = (
    "example: accel-trainer launch --num_processes 4 --multi_gpu recipes/cifar.py --epochs 30"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Do what `accelerate launch` does with the same arguments; return the code of the first process that fails."""
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    parser = launch_command_parser()
    parser.prog, parser.epilog = "accel-trainer launch", _EXAMPLE
    options = parser.parse_args(argv)
    options.signals_to_handle = "SIGQUIT"  # torch would handle the others and change the exit codes
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(GRACE_S))
    os.environ["ACCEL_TRAINER_LAUNCHER"] = str(os.getpid())
    # the run itself reports it in one line
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    with signals_handed_on() as received:
        try:
            launch_command(options)
        except subprocess.CalledProcessError as error:
            return _exit_code(0, error.returncode, received)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            return _exit_code(rank, failure.exitcode, received)
    return ExitCode.DONE


@contextmanager
def signals_handed_on() -> Iterator[list[int]]:
    """Forward signals to all children inside the block; yield the list of signal numbers received.

    A first INT is forwarded as TERM: a terminal also sends INT to the children, and a second INT
    would make them exit at once. The launchers of torch and accelerate do not say which children
    they start: `Popen` does.
    """
    received: list[int] = []
    children: list[subprocess.Popen[Any]] = []
    start = subprocess.Popen.__init__

    def start_and_remember(self: subprocess.Popen[Any], *args: Any, **options: Any) -> None:
        start(self, *args, **options)
        children.append(self)

    def hand_on(number: int, frame: FrameType | None) -> None:
        is_first = number not in received
        received.append(number)
        for child in children:
            if child.returncode is None:
                child.send_signal(
                    signal.SIGTERM if number == signal.SIGINT and is_first else number
                )

    previous = {number: signal.signal(number, hand_on) for number in STOP_SIGNALS}
    subprocess.Popen.__init__ = start_and_remember  # type: ignore[method-assign]  # for the block
    try:
        yield received
    finally:
        subprocess.Popen.__init__ = start  # type: ignore[method-assign]  # as before
        for number, handler in previous.items():
            signal.signal(number, handler)


def _exit_code(rank: int, code: int, received: Sequence[int]) -> int:
    """Return the exit code as a shell reports it; name a process that was killed."""
    if code >= 0:
        return code
    if received and -code in (*received, signal.SIGTERM):
        return ExitCode.PREEMPTED  # it had no handlers yet, so nothing is lost
    name = signal.Signals(-code).name
    cause = " (out of memory?)" if -code == signal.SIGKILL else ""
    print(f"accel_trainer: error[KILLED]: rank {rank} was killed by {name}{cause}", file=sys.stderr)
    return 128 - code


if __name__ == "__main__":
    sys.exit(main())

"""`accel-trainer status RUN`: how a run is doing or how it ended, also for shell scripts."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import ExitCode, OutputError
from ..run_folder import RunLock
from .parser import CommandParser

_EXAMPLE = "example: accel-trainer status runs/first --exit-code"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the state of a run; with `--exit-code`, leave with the code that the run ended with."""
    parser = CommandParser(prog="accel-trainer status", description=__doc__, epilog=_EXAMPLE)
    parser.add_argument("run", type=Path, help="the run folder")
    parser.add_argument("--exit-code", action="store_true", help="exit as the run did; 0 while it runs")
    options = parser.parse_args(argv)
    try:
        status = read_status(options.run)
    except (OSError, ValueError) as error:
        print(
            f"accel_trainer: error[STATUS]: {options.run} is not a run ({error}): check the path",
            file=sys.stderr,
        )
        return ExitCode.USAGE
    print("\n".join(f"{name}: {value}" for name, value in status.items() if value is not None))
    return int(status["exit_code"] or 0) if options.exit_code else 0


def read_status(run: Path) -> dict[str, Any]:
    """Return what `status.json` says; a run that says `running` and holds no lock was `killed`.

    Raises OSError or ValueError: there is no readable status.
    """
    status = dict(json.loads((run / "status.json").read_bytes()))
    if status["state"] == "running" and _is_dead(run):
        status |= {"state": "killed", "exit_code": int(ExitCode.INTERNAL)}
    return status


def _is_dead(run: Path) -> bool:
    try:
        RunLock(run / "run.lock").release()
    except OutputError:
        return False
    return True

"""`accel-trainer status RUN`: show the state of a run, also for shell scripts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...checkpoint.serialization import read_json_object
from ...core.errors import ConfigError, ExitCode
from ...core.run_dir import is_in_use
from ..parser import CommandParser
from .tables import show

_EXAMPLE = "example: accel-trainer status runs/first --exit-code"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the state of a run; with `--exit-code`, exit with the code of the run."""
    parser = CommandParser(prog="accel-trainer status", description=__doc__, epilog=_EXAMPLE)
    parser.add_argument("run", type=Path, help="the run folder")
    parser.add_argument(
        "--exit-code", action="store_true", help="exit as the run did; 0 while it runs"
    )
    options = parser.parse_args(argv)
    status = require_status(options.run)
    show("\n".join(f"{name}: {value}" for name, value in status.items() if value is not None))
    return (status["exit_code"] or 0) if options.exit_code else 0


def require_status(run: Path) -> dict[str, Any]:
    """Return what `read_status` does, or raise ConfigError."""
    try:
        return read_status(run)
    except (OSError, ValueError) as error:
        raise ConfigError("STATUS", f"{run} is not a run ({error}): check the path") from error


def read_status(run: Path) -> dict[str, Any]:
    """Return the contents of `status.json`; a run that says `running` but holds no lock was `killed`.

    Raises OSError or ValueError if there is no readable status.
    """
    status = read_json_object(run / "status.json")
    if not isinstance(status.get("state"), str) or type(status.get("exit_code", 0)) not in (
        int,
        type(None),
    ):
        raise ValueError("status.json has no state or no exit code")
    if status["state"] == "running" and not is_in_use(run):
        status |= {"state": "killed", "exit_code": int(ExitCode.INTERNAL)}
    return {"exit_code": None, **status}

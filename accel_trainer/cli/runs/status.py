"""`accel-trainer status RUN`: show the state of a run.

example: accel-trainer status runs/first --exit-code
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ...core.errors import ConfigError, ExitCode
from ...core.history import read_history
from ...core.json_files import read_json_object
from ...core.run_dir import is_locked
from ..common.output import JsonObject, show
from ..common.parser import CommandParser


def main(argv: Sequence[str]) -> int:
    """Print the state of a run; with `--exit-code`, exit with the code of the run."""
    parser = CommandParser(__doc__)
    parser.add_run()
    parser.add_switch("--exit-code", "exit with the run's exit code, for scripts; 0 while it runs")
    options = parser.parse_args(argv)
    status = require_status(options.run)
    if status["state"] in ("running", "killed"):
        status |= _written_so_far(options.run)
    show("\n".join(f"{name}: {value}" for name, value in status.items() if value is not None))
    return (status["exit_code"] or 0) if options.exit_code else 0


def _written_so_far(run: Path) -> JsonObject:
    """Return the newest step and checkpoint of a run whose `status.json` is of its start."""
    found: JsonObject = {}
    with suppress(Exception):  # there is no row yet, or a stranger has written them
        found["optimizer_step"] = max(int(row["optimizer_step"]) for row in read_history(run))
    commits = run.glob("checkpoints/step-*/COMMIT")
    found["last_commit"] = max((commit.parent.name for commit in commits), default=None)
    return found


def require_status(run: Path) -> JsonObject:
    """Return what `read_status` returns. Raises ConfigError if that fails."""
    try:
        return read_status(run)
    except FileNotFoundError:
        raise ConfigError(
            "STATUS", f"{run} is not a run (there is no status.json): give the folder of one run"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(
            "STATUS",
            f"{run}/status.json cannot be read ({error}): restore it, or start the run again",
        ) from error


def read_status(run: Path) -> JsonObject:
    """Return the contents of `status.json`, with state `killed` for a run that was killed.

    Such a run still says `running`, but nothing holds its lock.

    Raises OSError or ValueError if there is no readable status.
    """
    stored = read_json_object(run / "status.json")
    # A line break in a text would begin a line that looks like one of the status.
    status = {
        name: " ".join(value.split()) if isinstance(value, str) else value
        for name, value in stored.items()
    }
    has_state = isinstance(status.get("state"), str)
    has_exit_code = type(status.get("exit_code", 0)) in (int, type(None))
    if not has_state or not has_exit_code:
        raise ValueError("status.json has no state or no exit code")
    if status["state"] == "running" and not is_locked(run / "run.lock"):
        status |= {"state": "killed", "exit_code": int(ExitCode.INTERNAL)}
    return {"exit_code": None, **status}

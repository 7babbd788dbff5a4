"""Which recipe each run of this user was started with, in a list outside the runs.

What a run's folder records of itself may be forged. Only the user can write this list, so commands
that train a run again run the recipes in it without asking.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from ..core.json_files import dump_json

_MAX_KEPT = 10_000


def started_folder() -> Path:
    """Return the folder of the list, with an `ID.json` for each start.

    Raises RuntimeError if the home folder is unknown.
    """
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    if not state.is_absolute():  # also if it is not set
        state = Path.home() / ".local/state"
    return state / "accel_trainer/started"


def remember_start(environment: Mapping[str, Any]) -> None:
    """List the recipe of a start, as `describe_environment` has returned it, under its id.

    So are its arguments, without secrets. A list that cannot be written stops no run.
    """
    code = environment["code"]
    if code["sha256"] is None or not hasattr(sys.modules["__main__"], "__file__"):
        return  # in a notebook, it is the program that serves it
    with suppress(OSError, RuntimeError):
        folder = started_folder()
        folder.mkdir(0o700, parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=folder, delete=False) as file:  # for this user alone
            file.write(dump_json({**code, "arguments": environment["command"]["arguments"][1:]}))
        os.replace(file.name, folder / f"{environment['id']}.json")
        if len(os.listdir(folder)) > _MAX_KEPT:  # each look at all of them takes time
            for oldest in sorted(folder.iterdir(), key=os.path.getmtime)[:-_MAX_KEPT]:
                oldest.unlink()

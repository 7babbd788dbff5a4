"""Starts a recipe in new processes, as a user would, for the commands that run one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from ...core.errors import OutputError

_LAUNCH = (
    "-m", "accel_trainer.cli.launch", "--multi_gpu", "--num_machines", "1", "--main_process_port", "0",
    "--dynamo_backend", "no",
)  # fmt: skip


def start_recipe(
    command: Sequence[str], *, num_processes: int = 1, directory: Path | None = None,
    variables: Mapping[str, str] | None = None, output: IO[Any] | int | None = None,
) -> subprocess.Popen[bytes]:  # fmt: skip
    """Start a recipe with its flags. Call it inside `signals_handed_on`; the recipe ends with this process.

    `variables` are added to the environment; `directory` is its working directory (None: this one) and `output` its
    stdout (None: this process's).
    """
    environment = {**os.environ, "ACCEL_TRAINER_LAUNCHER": str(os.getpid()), **(variables or {})}
    precision = environment.get("ACCELERATE_MIXED_PRECISION", "no")
    several = [*_LAUNCH, "--num_processes", str(num_processes), "--mixed_precision", precision]
    launcher = several if num_processes > 1 else []
    return subprocess.Popen([sys.executable, *launcher, *command], cwd=directory, env=environment, stdout=output)


def recorded_start(environment: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the arguments of `start_recipe` that start a run again, from its `environment.json`.

    Raises:
        OutputError: they are not recorded.
    """
    try:
        command, hardware = environment["command"], environment["hardware"]
        kept = {
            name: value
            for name, value in environment["variables"].items()
            if name.startswith(("ACCELERATE_USE_", "FSDP_"))
        }
        kept["ACCELERATE_MIXED_PRECISION"] = environment["mixed_precision"]
        if hardware["device"] == "cpu":
            kept["ACCELERATE_USE_CPU"] = "true"
        return {
            "num_processes": hardware["num_processes"],
            "directory": Path(command["directory"]),
            "variables": kept,
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise _not_recorded(folder, error) from None


def recorded_command(environment: Mapping[str, Any], folder: Path) -> list[str]:
    """Return the recipe and its flags as they were typed. Raises OutputError if they are not recorded."""
    try:
        return [str(word) for word in environment["command"]["arguments"]]
    except (KeyError, TypeError) as error:
        raise _not_recorded(folder, error) from None


def _not_recorded(folder: Path, error: Exception) -> OutputError:
    return OutputError("NOT_RECORDED", f"{folder} does not say what started it ({error}): it is from an older version")

"""Starts a recipe in new processes, as a user would, for the commands that run one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from ...core.errors import ConfigError, OutputError

_LAUNCH = (
    "-m",
    "accel_trainer.cli.launch",
    "--multi_gpu",
    "--num_machines",
    "1",
    "--main_process_port",
    "0",
    "--dynamo_backend",
    "no",
)


def start_recipe(
    command: Sequence[str],
    *,
    num_processes: int = 1,
    directory: Path | None = None,
    variables: Mapping[str, str] | None = None,
    output: IO[Any] | int | None = None,
) -> subprocess.Popen[bytes]:
    """Start a recipe with its flags.

    Call it inside `signals_handed_on`; the recipe ends with this process.

    `variables` are added to the environment; `directory` is its working directory (None: this one)
    and `output` its stdout (None: this process's).
    """
    environment = {**os.environ, "ACCEL_TRAINER_LAUNCHER": str(os.getpid()), **(variables or {})}
    precision = environment.get("ACCELERATE_MIXED_PRECISION", "no")
    several = [*_LAUNCH, "--num_processes", str(num_processes), "--mixed_precision", precision]
    launcher = several if num_processes > 1 else []
    return subprocess.Popen(
        [sys.executable, *launcher, *command], cwd=directory, env=environment, stdout=output
    )


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
        directory = Path(command["directory"])
        num_processes = int(hardware["num_processes"])
        # `python -m` imports modules from its directory
        if num_processes > 1 and _lies_in(directory, folder):
            fact = f"{folder} was started in {directory}, a folder inside it, with a launcher"
            raise OutputError("RERUN", f"{fact}: start its recipe yourself")
        return {
            "num_processes": num_processes,
            "directory": directory,
            "variables": kept,
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _not_recorded(folder, error) from None


def recorded_recipe(environment: Mapping[str, Any], folder: Path, chosen: Path | None) -> Path:
    """Return the file that training again will run: `chosen`, or else the recorded recipe.

    Raises:
        ConfigError: `chosen` is no file, or the recorded recipe lies in the run's folder, which
            others may have filled.
        OutputError: none is recorded, or it is gone.
    """
    if chosen is not None:
        if not chosen.is_file():
            raise ConfigError(
                "RECIPE", f"--recipe {chosen} is not a file: give the recipe of {folder}"
            )
        return chosen.resolve()
    code = environment.get("code")
    recipe = Path(str(code.get("recipe", "") if isinstance(code, dict) else ""))
    if not recipe.is_absolute() or not recipe.is_file():
        fix = "restore it, or give it with --recipe FILE"
        raise OutputError("RERUN", f"the recipe of {folder}, {recipe}, is missing: {fix}")
    if _lies_in(recipe, folder):
        fact = f"the recipe that {folder} names, {recipe}, lies in that folder"
        raise ConfigError(
            "RECIPE", f"{fact}: read it, and if you trust it give it with --recipe FILE"
        )
    return recipe


def _lies_in(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve()) or Path(
        os.path.abspath(path)
    ).is_relative_to(folder.absolute())


def recorded_flags(environment: Mapping[str, Any], folder: Path) -> list[str]:
    """Return the recipe's flags as they were typed. Raises OutputError if they are not recorded."""
    try:
        return [str(word) for word in environment["command"]["arguments"]][1:]
    except (KeyError, TypeError) as error:
        raise _not_recorded(folder, error) from None


def _not_recorded(folder: Path, error: Exception) -> OutputError:
    return OutputError(
        "NOT_RECORDED",
        f"{folder} does not say what started it ({error}): it is from an older version",
    )

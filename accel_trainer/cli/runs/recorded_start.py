"""What a run recorded of its start, for the commands that train it again: `rerun` and `replay`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError, OutputError


def recorded_start(environment: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the arguments of `start_recipe` that start a run again, from its `environment.json`.

    Raises:
        OutputError: they are not recorded.
    """
    try:
        command = environment["command"]
        hardware = environment["hardware"]
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
        # `python -m`, which starts the launcher, imports modules from its working directory.
        if num_processes > 1 and _is_inside(directory, folder):
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
        OutputError: no recipe is recorded, or the file is gone.
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
    if _is_inside(recipe, folder):
        fact = f"the recipe that {folder} names, {recipe}, lies in that folder"
        raise ConfigError(
            "RECIPE", f"{fact}: read it, and if you trust it give it with --recipe FILE"
        )
    return recipe


def recorded_flags(environment: Mapping[str, Any], folder: Path) -> list[str]:
    """Return the recipe's flags as they were typed. Raises OutputError if they are not recorded."""
    try:
        return [str(word) for word in environment["command"]["arguments"]][1:]
    except (KeyError, TypeError) as error:
        raise _not_recorded(folder, error) from None


def _is_inside(path: Path, folder: Path) -> bool:
    """Whether `path` lies in `folder`, by the names as given or after following links."""
    named = Path(os.path.abspath(path))
    return path.resolve().is_relative_to(folder.resolve()) or named.is_relative_to(
        folder.absolute()
    )


def _not_recorded(folder: Path, error: Exception) -> OutputError:
    return OutputError(
        "NOT_RECORDED",
        f"{folder} does not say what started it ({error}): it is from an older version",
    )

"""What a run recorded of its start, for the commands that train it again: `rerun` and `replay`.

A run may come from a stranger: what it recorded decides neither the folder in which its recipe
starts nor the words that the recipe gets, and names only files of the project that one is in.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError, OutputError
from ...core.filesystem import sha256_of
from ...distributed.machine import available_cpus
from ..common.output import tell
from .run_reader import RunReader

_VARIABLES = re.compile("ACCELERATE_USE_[A-Z]+|FSDP_[A-Z_]+")
_PRECISIONS = ("no", "bf16", "fp16")
_MIN_ALLOWED = 8  # processes, however few cores there are


def recorded_start(run: RunReader) -> dict[str, Any]:
    """Return the arguments of `start_recipe` that start a run again, from its `environment.json`.

    It starts in the current folder; a note says so if the run was started in another.

    Raises:
        OutputError: they are not recorded, are not what a run records, or ask for more processes
            than this machine can have.
    """
    try:
        hardware = run.environment["hardware"]
        precision = run.environment["mixed_precision"]
        variables = dict(run.environment["variables"])
        directory = Path(run.environment["command"]["directory"])
        num_processes = int(hardware["num_processes"])
        is_on_cpu = hardware["device"] == "cpu"
        if precision not in _PRECISIONS:
            raise ValueError(f"mixed_precision is {str(precision)[:40]}")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _not_recorded(run.folder, error) from None
    allowed = max(_MIN_ALLOWED, 4 * available_cpus())
    if not 1 <= num_processes <= allowed:
        fact = f"{run.folder} says that it ran on {num_processes} processes"
        raise OutputError("RERUN", f"{fact}, and here at most {allowed} are started: launch it")
    here = Path.cwd()
    if num_processes > 1 and _is_inside(here, run.folder):
        fact = f"the current folder lies in {run.folder}, and `python -m` imports from it"
        raise OutputError("RERUN", f"{fact}: change to the folder of your project")
    if directory != here:
        text = "note: the run was started in %s: relative paths of its config are read from here"
        tell(text % str(directory).encode("unicode_escape").decode(), file=sys.stderr)
    kept = {
        name: value
        for name, value in variables.items()
        if _VARIABLES.fullmatch(name) and isinstance(value, str) and value.isprintable()
    }
    kept["ACCELERATE_MIXED_PRECISION"] = precision
    if is_on_cpu:
        kept["ACCELERATE_USE_CPU"] = "true"
    return {"num_processes": num_processes, "variables": kept}


def recorded_recipe(run: RunReader, chosen: Path | None) -> Path:
    """Return the file that training again will run: `chosen`, or else the recorded recipe.

    Raises:
        ConfigError: `chosen` is no file, or the recorded recipe lies in the run's folder, which
            others may have filled, or outside the current folder.
        OutputError: no recipe is recorded, or the file is gone.
    """
    folder = run.folder
    if chosen is not None:
        if not chosen.is_file():
            fact = f"--recipe {chosen} is not a file"
            raise ConfigError("RECIPE", f"{fact}: give the recipe of {folder}")
        _note_change(run, chosen)
        return chosen.resolve()
    code = run.environment.get("code")
    named = Path(str(code.get("recipe", "") if isinstance(code, dict) else ""))
    if not str(named).isprintable() or not named.is_absolute() or not named.is_file():
        fix = "restore it, or give it with --recipe FILE"
        raise OutputError("RERUN", f"the recipe of {folder}, {named}, is missing: {fix}")
    recipe = named.resolve()  # this very file is started, whatever a link leads to later
    fix = "read it, and if you trust it give it with --recipe FILE"
    if _is_inside(named, folder) or _is_inside(recipe, folder):
        fact = f"the recipe that {folder} names, {named}, lies in that folder"
        raise ConfigError("RECIPE", f"{fact}: {fix}")
    if not recipe.is_relative_to(Path.cwd().resolve()):
        fact = f"the recipe that {folder} names, {recipe}, is not in the current folder"
        raise ConfigError("RECIPE", f"{fact}: change to its project; or {fix}")
    _note_change(run, recipe)
    return recipe


def _note_change(run: RunReader, recipe: Path) -> None:
    """Say so if `recipe` is not the file that the run was trained with."""
    code = run.environment.get("code")
    recorded = code.get("sha256") if isinstance(code, dict) else None
    if recorded is None or recorded == sha256_of(recipe):
        return
    copy = run.folder / "recipe.py"
    where = f"; {copy} is the copy that the run made" if copy.is_file() else ""
    tell(f"note: {recipe} has changed since the run{where}", file=sys.stderr)


def recorded_flags(run: RunReader) -> list[str]:
    """Return the flags for the same settings: the run's own config, on as many threads.

    Raises:
        OutputError: the number of threads, which decides the last bits, is not recorded.
    """
    try:
        num_threads = int(run.environment["hardware"]["num_threads"])
    except (KeyError, TypeError, ValueError) as error:
        raise _not_recorded(run.folder, error) from None
    config = (run.folder / "config.yaml").resolve()
    return ["--config", str(config), "--runtime.num-threads", str(num_threads)]


def _is_inside(path: Path, folder: Path) -> bool:
    """Whether `path` lies in `folder`, by the names as given or after following links."""
    named = Path(os.path.abspath(path))
    is_named_inside = named.is_relative_to(folder.absolute())
    return is_named_inside or path.resolve().is_relative_to(folder.resolve())


def _not_recorded(folder: Path, error: Exception) -> OutputError:
    reason = " ".join(str(error).split())
    fact = f"{folder} does not say what started it ({reason})"
    return OutputError("NOT_RECORDED", f"{fact}: it is from an older version, or damaged")

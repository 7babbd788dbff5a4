"""How a run is started again: which recipe runs, with which flags, processes and variables.

All commands that train a run again use this. A run may come from a stranger: what it recorded
decides neither the folder in which its recipe starts nor the words that the recipe gets. Its recipe
runs only if this user has started it before, or names it.
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ...core.batch_plan import ENDLESS
from ...core.errors import ConfigError, OutputError
from ...core.filesystem import sha256_of
from ...core.json_files import read_json_object
from ...distributed.machine import available_cpus
from ...run.folder import MOVED_FOLDERS
from ...run.known_recipes import started_folder
from ..common.output import JsonObject, tell
from ..common.unknown_recipe import UnknownRecipeError
from ..recipe.start import Start
from .run_reader import RunReader, Runs

_VARIABLES = re.compile("ACCELERATE_USE_(CPU|FSDP)|FSDP_[A-Z_]+")
_ID = re.compile("[0-9a-f]{32}")
_PRECISIONS = ("no", "bf16", "fp16")
NOT_FROM_THE_RUN = {
    "run.runs_dir": ("--run.runs-dir", "runs"),
    "run.cache_dir": ("--cache-dir", "~/.cache/accel_trainer"),
    "run.track": ("--track",),  # with none
    "run.onnx": ("--run.no-onnx",),
    "run.shared": ("--run.no-shared",),
    "run.dry_run": ("--run.no-dry-run",),  # of which `chaos` keeps some
}
"""The flags for settings that write outside the new run folder, start something, or let others
read: training a run again has the defaults, whoever the run is from."""
_MIN_ALLOWED = 8  # processes, however few cores there are


def recorded_starts(runs: Runs, recipes: Sequence[Path | None]) -> list[Start]:
    """Return how each of `runs` is started again: with its settings, threads and processes.

    Its recipe is the one in `recipes`, or else (None) the recorded one, if this user has started
    the run with it on this machine. A run starts in the current folder; a note says so if it was
    started in another.

    Raises:
        UnknownRecipeError: the user has not, as far as is known: the run may be a stranger's.
        ConfigError: a file in `recipes` does not exist.
        OutputError: what started a run is not recorded, is not what a run records, is gone, or asks
            for more processes than this machine can have.
    """
    for run in runs:
        if is_own_loop(run):
            raise OutputError(
                "OWN_LOOP",
                f"the loop of {run.folder} belongs to its program, which cannot be told where to "
                "stop: `accel-trainer rerun` starts it again as a whole",
            )
    found = recorded_recipes(runs, recipes)
    return [_start_of(run, recipe) for run, recipe in zip(runs, found, strict=True)]


def is_own_loop(run: RunReader) -> bool:
    """Whether a program's own loop trained the run: see `exact_run`."""
    return run.config.get("loop") == "own"


def own_start(run: RunReader, folder: Path) -> Start:
    """Return how the program of a run with its own loop is started again, in `folder`.

    It gets the arguments that this user gave it, not those that the run has recorded.

    Raises:
        UnknownRecipeError: the user has not started it, as far as is known.
        OutputError: the run has not ended, and its program could not be stopped at the same step;
            what started it is not recorded, or its arguments had a secret.
    """
    (recipe,) = recorded_recipes([run], [None])
    if run.result.get("state") != "done":
        raise OutputError(
            "OWN_LOOP", f"{run.folder} has not ended: start its program again, and then rerun it"
        )
    arguments = (_entry_at_start(run, recipe) or {}).get("arguments")
    if not isinstance(arguments, list) or any("***" in str(each) for each in arguments):
        fact = f"the arguments of {run.folder} are not recorded, or had a secret"
        raise OutputError("RERUN", f"{fact}: start the program again with a different folder")
    moved = json.dumps({str(run.folder.resolve()): str(folder)})
    start = _start_of(run, recipe, arguments)
    return replace(start, variables={**start.variables, MOVED_FOLDERS: moved})


def _start_of(run: RunReader, recipe: Path, flags: Sequence[str] | None = None) -> Start:
    flags = recorded_flags(run) if flags is None else flags
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
        fact = f"{run.folder} is recorded as a run on {num_processes} processes"
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
    return Start(recipe=str(recipe), flags=flags, num_processes=num_processes, variables=kept)


def recorded_recipes(runs: Runs, chosen: Sequence[Path | None]) -> list[Path]:
    """Return the files that training again will run; tell their paths before they start.

    For each run, that is the one in `chosen`, or else its recorded recipe, if this user has started
    the run with it on this machine.

    Raises:
        UnknownRecipeError: the user has not, as far as is known: the run may be a stranger's.
        ConfigError: the file in `chosen` does not exist.
        OutputError: no recipe is recorded, or the file is gone.
    """
    named = [_named(run, each) for run, each in zip(runs, chosen, strict=True)]
    notes = []
    for run, each, recipe in zip(runs, chosen, named, strict=True):
        recorded = _recorded_code(run).get("sha256")
        if each is None:
            if (entry := _entry_at_start(run, recipe)) is None:
                fact = f"{_shown_folder()} does not list {run.folder} as a run that you started"
                raise UnknownRecipeError(f"{fact}, so {recipe} is not run", named)
            recorded = str(entry["sha256"])
        if recorded not in (None, sha256_of(recipe)):
            copy = run.folder / "recipe.py"
            where = f"; {copy} is the copy in the run folder" if copy.is_file() else ""
            notes.append(f"note: {recipe} has changed since the run{where}")
    for note in notes:
        tell(note, file=sys.stderr)
    return named


def _named(run: RunReader, chosen: Path | None) -> Path:
    """Return the file that the user or else the run names, links followed: it is what will run."""
    if chosen is not None:
        if not chosen.is_file():
            fact = f"--recipe {chosen} is not a file"
            raise ConfigError("RECIPE", f"{fact}: give the recipe of {run.folder}")
        return chosen.resolve()
    recorded = Path(str(_recorded_code(run).get("recipe", "")))
    if not str(recorded).isprintable() or not recorded.is_absolute() or not recorded.is_file():
        fix = "restore it, or give it with --recipe FILE"
        raise OutputError("RERUN", f"the recipe of {run.folder}, {recorded}, is missing: {fix}")
    return recorded.resolve()


def _recorded_code(run: RunReader) -> JsonObject:
    code = run.environment.get("code")
    return code if isinstance(code, dict) else {}


def _entry_at_start(run: RunReader, recipe: Path) -> JsonObject | None:
    """Return what is known of the start of a run with `recipe` by this user; None: nothing.

    Not what the run says counts, but the list that `remember_start` has written: the run only says
    which entry is its own. An entry that another user could have written is none.
    """
    name = run.environment.get("id")
    if not isinstance(name, str) or not _ID.fullmatch(name):
        return None
    try:
        folder = started_folder()
        path = folder / f"{name}.json"
        if not _is_private(folder, 0o700) or not _is_private(path, 0o600):
            return None
        entry = read_json_object(path)
        is_same = entry["recipe"] == _recorded_code(run).get("recipe") == str(recipe)
        return entry if is_same else None
    except (OSError, RuntimeError, ValueError, KeyError):
        return None


def _shown_folder() -> str:
    try:
        return str(started_folder())
    except RuntimeError:  # no home folder
        return "this machine"


def _is_private(path: Path, mode: int) -> bool:
    """Whether a file or folder, not a link to one, is of this user, and of nobody else."""
    if os.name != "posix":
        return True  # Windows protects a home folder differently
    found = path.lstat()
    return found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) == mode


def recorded_flags(run: RunReader) -> list[str]:
    """Return the flags for the same settings: the run's own config, on as many threads.

    Raises:
        OutputError: the number of threads, which decides the last bits, is not recorded.
    """
    try:
        num_threads = int(run.environment["hardware"]["num_threads"])
    except (KeyError, TypeError, ValueError) as error:
        raise _not_recorded(run.folder, error) from None
    flags = flags_with((run.folder / "config.yaml").resolve(), num_threads=num_threads)
    if (run.config.get("trainer") or {}).get("hours") is None:
        return flags
    # No clock decides: until the decay, what is trained does not depend on the length.
    undecided = {"trainer.hours": None, "trainer.num_steps": ENDLESS, "schedule.decay_at": None}
    settings = run.decided or undecided
    allowed = [*((run.config.get("run") or {}).get("allow_change") or []), *settings]
    length = ["--steps", settings["trainer.num_steps"]]
    decay = ["--schedule.decay-at", settings["schedule.decay_at"]]
    return [*flags, *map(str, [*length, *decay, "--allow-change", *allowed])]


def flags_with(config: Path, *, num_threads: int) -> list[str]:
    """Return the flags for the settings in a file, apart from those that no run decides."""
    decided = [word for words in NOT_FROM_THE_RUN.values() for word in words]
    return ["--config", str(config), "--runtime.num-threads", str(num_threads), *decided]


def _is_inside(path: Path, folder: Path) -> bool:
    """Whether `path` lies in `folder`, by the names as given or after following links."""
    named = Path(os.path.abspath(path))
    is_named_inside = named.is_relative_to(folder.absolute())
    return is_named_inside or path.resolve().is_relative_to(folder.resolve())


def _not_recorded(folder: Path, error: Exception) -> OutputError:
    reason = " ".join(str(error).split())
    fact = f"{folder} does not record how it was started ({reason})"
    return OutputError("NOT_RECORDED", f"{fact}: it is from an older version, or damaged")

"""The folder of a run: locked and cleaned up at the start, described once the start is accepted."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from accelerate import Accelerator

from ..callbacks.console import say
from ..callbacks.trackers import check_trackers
from ..checkpoint.loading import has_checkpoints
from ..checks.own_sources import describe_edits
from ..core import filesystem
from ..core.errors import ConfigError, DivergedError, OutOfMemoryError, ProcessError, UserError
from ..core.filesystem import writes_to
from ..core.guards import guarded, guarded_folder
from ..core.json_files import write_json
from ..core.run_dir import prepare_directory, refuse_strange_entries, remove_new_folder, run_lock
from ..core.yaml_files import dump_yaml, read_yaml
from .config import RunConfig
from .known_recipes import remember_start
from .provenance import describe_environment
from .resume import Source, find_source

MOVED_FOLDERS = "ACCEL_TRAINER_MOVED_FOLDERS"
"""A variable of programs that a command starts: new folders by those that their code names."""

# Of a path below which those of checkpoints and of a tracker's files still fit, on Linux.
_MAX_BYTES = 4096 - 256
_RECORD = "config.yaml"  # of an accepted start
_NUM_REMOVALS = 5
_REMOVAL_S = 0.1


def open_folder(
    choose: Callable[[], Path], run: RunConfig, resources: ExitStack
) -> tuple[str, Source | None]:
    """Lock the folder that `choose` returns, and return it; also what the run continues from.

    For the main process, which sends both to the others as JSON values.

    At the end of the run, `resources` closes the lock file and the guards that end the run if a
    different folder takes the path, and removes a new folder after a run that was refused.

    Raises:
        ConfigError: a command has chosen a folder, and the program reads no flags.
        OutputError: the folder cannot be written or is in use.
        CheckpointError: the run that it would continue cannot be read.
    """
    check_trackers(run.track)
    if run.output_dir is None and MOVED_FOLDERS in os.environ:
        raise ConfigError(
            "RECIPE", "this program reads no flags, which a command must set: call main(...) in it"
        )
    wanted = choose()
    with writes_to(wanted):
        is_new = not os.path.exists(wanted)
        if len(os.fsencode(os.path.realpath(wanted))) > _MAX_BYTES:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
    folder = prepare_directory(wanted)
    refuse_strange_entries(folder)
    path = folder / "run.lock"
    descriptor = resources.enter_context(run_lock(path, is_optional=not run.lock))
    with writes_to(folder):
        resources.enter_context(guarded_folder(folder))
    if is_new:
        resources.enter_context(_removed_if_refused(folder))
    resources.enter_context(guarded(folder, path, descriptor))
    # The half-written files of killed attempts go; the checkpointer sweeps its own folder.
    for part in (folder, folder / "logs", folder / "export", folder / "pictures"):
        if part.is_dir():
            filesystem.sweep(part)
    return str(folder), find_source(folder, run)


def moved_folder(folder: Path) -> Path:
    """Return the folder that a command has chosen in place of `folder`, or else that itself."""
    moved = json.loads(os.environ.get(MOVED_FOLDERS, "{}"))
    return Path(moved.get(os.path.realpath(folder), folder))


def record_start(
    settings: dict[str, Any],
    accelerator: Accelerator,
    folder: Path,
    *,
    recipe_defaults: Mapping[str, Any] = MappingProxyType({}),
    copies_recipe: bool = True,
    is_quiet: bool = False,
) -> None:
    """Write what was started, and by which code. For the main process, once nothing is refused.

    `settings` are all values of the config. Unless it is quiet, a line names code that was edited
    since the run trained before. Raises OutputError.
    """
    environment = describe_environment(accelerator, recipe_defaults)
    remember_start(environment)
    path = folder / _RECORD
    if has_checkpoints(folder / "checkpoints"):
        edits = describe_edits(folder, environment["sources"])
        if edits is not None and not is_quiet:
            say(edits)
        # A rerun begins as the run did, even if the last command did not repeat these flags.
        with suppress(OSError, ValueError, KeyError, TypeError):  # somebody has removed the file
            begun = read_yaml(path)["run"]
            settings["run"] |= {name: begun[name] for name in ("resume", "init_from", "init_skip")}
    with writes_to(folder):
        filesystem.write_file_atomic(path, dump_yaml(settings).encode())
        write_json(folder / "environment.json", environment)
        recipe_file = Path(environment["code"]["recipe"])
        if copies_recipe and recipe_file.suffix == ".py" and recipe_file.is_file():
            filesystem.write_file_atomic(folder / "recipe.py", recipe_file.read_bytes())


@contextmanager
def _removed_if_refused(folder: Path) -> Iterator[None]:
    """Remove a new folder if a UserError of the block refuses the run before it is recorded."""
    try:
        yield
    except UserError as error:
        # Of these, the folder says why the run ended: it was not refused.
        is_end = isinstance(error, DivergedError | OutOfMemoryError | ProcessError)
        if not is_end and not (folder / _RECORD).exists():
            _remove_refused(folder)
        raise


def _remove_refused(folder: Path) -> None:
    """Remove a new folder, in which other processes may still be reporting their errors."""
    for _ in range(_NUM_REMOVALS):
        with suppress(OSError):  # a report was written while the folder was being removed
            remove_new_folder(folder)
        if not folder.exists():
            return
        time.sleep(_REMOVAL_S)  # until the others have reported

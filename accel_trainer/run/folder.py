"""Opens the folder of a run: locks it, cleans it up and writes the config into it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from accelerate import Accelerator

from ..callbacks.trackers import check_trackers
from ..core import filesystem
from ..core.config import config_to_dict
from ..core.errors import (
    CheckpointError,
    DivergedError,
    OutOfMemoryError,
    ProcessError,
    UserError,
)
from ..core.guards import guarded, guarded_folder
from ..core.json_files import write_json
from ..core.run_dir import (
    prepare_directory,
    refuse_strange_entries,
    remove_new_folder,
    run_lock,
    writes_to,
)
from ..core.yaml_files import dump_yaml
from ..fault_tolerance.preemption import StopFlag
from .config import RecipeConfig
from .provenance import describe_environment
from .resume import (
    Source,
    check_changes,
    choose_folder,
    find_source,
    read_stored_config,
    with_global_batch_size,
)
from .started import remember_start

_NUM_REMOVALS = 5
_REMOVAL_S = 0.1


class OpenedFolder(NamedTuple):
    """What the main process found in the folder and sends to the others, as JSON values."""

    path: str
    source: Source | None
    """What the run continues from; None: it is new."""
    global_batch_size: int | None
    """The one to train with, where the settings leave it open."""


def open_folder(
    config: RecipeConfig,
    recipe: str,
    *,
    accelerator: Accelerator,
    stop_flag: StopFlag,
    lock: ExitStack,
) -> OpenedFolder:
    """Lock the run folder and write the config into it. For the main process.

    What `lock` closes at the end of the run: the lock file, the guards that end the run if another
    folder takes the path, and the cleanup after a run that was refused. The cleanup removes a new
    folder, or restores the config of an old one.

    Raises:
        ConfigError: the config differs from that of the run it would continue.
        OutputError: the folder cannot be written or is in use.
        CheckpointError: the run that it would continue cannot be read.
    """
    check_trackers(config.run.track)
    wanted = choose_folder(config, recipe)
    is_new = not os.path.exists(wanted)
    folder = prepare_directory(wanted)
    refuse_strange_entries(folder)
    path = folder / "run.lock"
    descriptor = lock.enter_context(run_lock(path, is_optional=not config.run.lock))
    with writes_to(folder):
        lock.enter_context(guarded_folder(folder))
    lock.enter_context(_undone_if_refused(folder, stop_flag, is_new=is_new))
    lock.enter_context(guarded(folder, path, descriptor))
    _sweep(folder)
    source = find_source(folder, config.run)
    stored = None if source is None else read_stored_config(source)
    resolved = with_global_batch_size(config, stored, num_processes=accelerator.num_processes)
    # What does not depend on the data is refused before it is read.
    num_processes = accelerator.num_processes
    enough = num_processes * resolved.batch.resolved_global_batch_size(num_processes)
    resolved.batch.plan(enough, num_processes=num_processes)
    if stored is not None and source is not None:
        check_changes(stored, resolved, source)
    environment = describe_environment(config, accelerator)
    remember_start(environment)
    with writes_to(folder):
        if source is not None and Path(source.run) != folder:
            _copy_history(Path(source.run), folder)
        filesystem.write_file_atomic(
            folder / "config.yaml", dump_yaml(config_to_dict(resolved)).encode()
        )
        write_json(folder / "environment.json", environment)
        recipe_file = Path(environment["code"]["recipe"])
        if config.run.copy_recipe and recipe_file.suffix == ".py" and recipe_file.is_file():
            filesystem.write_file_atomic(folder / "recipe.py", recipe_file.read_bytes())
    return OpenedFolder(str(folder), source, resolved.batch.global_batch_size)


def _sweep(folder: Path) -> None:
    """Remove the half-written files of killed attempts; the checkpointer sweeps its folder."""
    for part in (folder, folder / "logs", folder / "export", folder / "pictures"):
        if part.is_dir():
            filesystem.sweep(part)


def _copy_history(run: Path, folder: Path) -> None:
    """Copy the rows of the run that this one branches off from."""
    path = run / "metrics.jsonl"
    if path.is_symlink() or not path.is_file():
        raise CheckpointError("RUN_HISTORY", f"{path} is not a file: restore it")
    filesystem.replace_file(folder / "metrics.jsonl", filesystem.read_chunks(path))


@contextmanager
def _undone_if_refused(folder: Path, stop_flag: StopFlag, *, is_new: bool) -> Iterator[None]:
    """Leave no trace in the folder if the block refuses the run by a UserError.

    The config of an old folder is restored, unless a checkpoint was saved. From a new folder, what
    the start has written is removed, unless training has begun.
    """
    path = folder / "config.yaml"
    stored = path.read_bytes() if os.access(path, os.R_OK) else None
    checkpoints = folder / "checkpoints"
    before = set(checkpoints.glob("step-*"))
    try:
        yield
    except (DivergedError, OutOfMemoryError, ProcessError):
        raise  # the run was not refused, and the folder says why it ended
    except UserError:
        # The folder may be what failed, and the error itself matters more.
        with suppress(OSError, UserError):
            if stored is not None and set(checkpoints.glob("step-*")) <= before:
                filesystem.write_file_atomic(path, stored)
            elif is_new and stop_flag.is_starting:
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

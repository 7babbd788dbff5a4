"""Starts a run: its processes, its folder, and the checkpoint it continues from."""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from ..callbacks.trackers import check_trackers
from ..checkpoint.format import LoadedCheckpoint
from ..core import filesystem
from ..core.activity import Activity
from ..core.errors import (
    CheckpointError,
    ConfigError,
    DivergedError,
    OutOfMemoryError,
    Preempted,
    ProcessError,
    UserError,
)
from ..core.guards import kept_in_place
from ..core.rng import seed_everything
from ..core.run_dir import (
    RunLock,
    prepare_directory,
    refuse_strange_entries,
    remove_new_folder,
    writes_to,
)
from ..distributed.accelerator import library_versions, start_accelerator
from ..distributed.collectives import differing_lines, run_on_main, shutdown
from ..distributed.determinism import nondeterminism_named
from ..distributed.launch_env import find_launcher
from ..fault_tolerance.failure_report import failures_reported
from ..fault_tolerance.out_of_memory import explain_out_of_memory
from ..fault_tolerance.preemption import StopFlag, stop_on_signals
from ..fault_tolerance.watchdog import Watchdog
from ..training.compile import compile_errors_explained
from .config import RecipeConfig, check_allowed_changes, describe_shared, with_defaults
from .parser import save_config
from .preflight import LaunchContext, log_warnings, refuse_errors
from .provenance import describe_environment, find_origins
from .resume import check_changes, choose_folder, find_source, read_checkpoint, read_stored_config, with_batch

_NUM_REMOVALS, _REMOVAL_S = 5, 0.1


@dataclass(frozen=True)
class Run:
    """A started run: its processes, its folder and the checkpoint it continues from, on every process.

    `config` has the global batch size filled in, which stays the same after a change of hardware.
    """

    config: RecipeConfig
    accelerator: Accelerator
    folder: Path
    checkpoint: LoadedCheckpoint | None
    changes: tuple[str, ...]
    """Settings that decide the training and were changed on purpose since the checkpoint."""
    nondeterministic: set[str]
    """Operations without a deterministic kernel that this process has used so far."""
    activity: Activity
    stop_flag: StopFlag
    resources: ExitStack
    """Closed when the run ends, in whatever way."""


@contextmanager
def start_run(config: RecipeConfig, *, recipe: str) -> Iterator[Run]:
    """Join the processes, lock the run folder and find where to start. **Collective.**

    Raises:
        ConfigError: the config differs from that of the run it would continue, or between processes.
        ProcessError: the other processes cannot be reached, or one of them failed.
        OutputError: the folder cannot be written or is in use.
        CheckpointError: there are checkpoints, and none is valid.
    """
    config = with_defaults(config)
    check_allowed_changes(config)
    launch = LaunchContext(config=config)  # before the accelerator is in use
    refuse_errors(launch)
    accelerator = start_accelerator(config.runtime)
    seed_everything(config.seed)
    check_same_everywhere(describe_identity(config), accelerator)
    rank, num_processes = accelerator.process_index, accelerator.num_processes
    stop_flag = StopFlag(num_processes=num_processes, timeout_s=config.runtime.timeout_s)
    others_wait_s = config.runtime.timeout_s if num_processes > 1 else math.inf
    timeout_s = config.runtime.stuck_timeout_s or others_wait_s
    activity = Activity()
    watchdog = Watchdog(activity, stop_flag, timeout_s=timeout_s, launcher_pid=find_launcher())
    with ExitStack() as lock, stop_on_signals(stop_flag), watchdog:
        stop_flag.may_leave = True  # until there is something to save
        path, source, batch, changes = run_on_main(
            lambda: _open_folder(config, recipe, accelerator, lock, stop_flag), accelerator
        )
        folder, resolved = Path(path), replace(config, batch=replace(config.batch, **batch))
        if not accelerator.is_main_process and folder.is_dir():  # another machine may not share the disk
            lock.enter_context(kept_in_place(folder))
        if accelerator.is_main_process:
            log_warnings(replace(launch, config=resolved))
        with failures_reported(folder, activity, watchdog, rank=rank, num_processes=num_processes):
            with explain_out_of_memory(resolved.batch, activity, accelerator), compile_errors_explained():
                checkpoint = read_checkpoint(source, accelerator, timeout_s=config.runtime.timeout_s)
                operations: set[str] = set()
                with nondeterminism_named(operations, says_it=accelerator.is_main_process), ExitStack() as resources:
                    yield Run(
                        config=resolved,
                        accelerator=accelerator,
                        folder=folder,
                        checkpoint=checkpoint,
                        changes=tuple(changes),
                        nondeterministic=operations,
                        activity=activity,
                        stop_flag=stop_flag,
                        resources=resources,
                    )
            shutdown(accelerator)


def _open_folder(
    config: RecipeConfig, recipe: str, accelerator: Accelerator, lock: ExitStack, stop_flag: StopFlag
) -> list[Any]:
    """Lock the run folder, write the config, and return the folder, the source, the batch and the changes as JSON.

    `lock` holds the lock, and ends the run if another folder takes the path. If the run is refused, it removes a new
    folder or restores the config of an old one.
    """
    check_trackers(config.run.track)
    wanted = choose_folder(config, recipe)
    is_new = not os.path.exists(wanted)
    folder = prepare_directory(wanted)
    refuse_strange_entries(folder)
    run_lock = lock.enter_context(RunLock(folder / "run.lock"))
    with writes_to(folder):
        lock.enter_context(kept_in_place(folder))
    lock.enter_context(_undone_if_refused(folder, stop_flag, is_new=is_new))
    lock.enter_context(run_lock.in_place())
    for part in (folder, folder / "logs", folder / "export", folder / "profile"):
        if part.is_dir():
            filesystem.sweep(part)  # half-written files of killed attempts; the checkpointer sweeps its own folder
    source = find_source(folder, config.run)
    stored = None if source is None else read_stored_config(source[0])
    resolved = with_batch(config, stored, num_processes=accelerator.num_processes)
    resolved.batch.check_reducible(accelerator.num_processes)
    changes: list[str] = []
    if source is not None and stored is not None:
        changes = check_changes(stored, resolved, config.run.allow_change, source[0])
    environment = {**describe_environment(accelerator), "config_origins": find_origins(config)}
    with writes_to(folder):
        if source is not None and source[0] != folder:
            _copy_history(source[0], folder)
        filesystem.write_file_atomic(folder / "config.yaml", save_config(resolved).encode())
        filesystem.write_file_atomic(folder / "environment.json", json.dumps(environment, indent=1).encode())
    where = None if source is None else [str(source[0]), source[1]]
    return [str(folder), where, asdict(resolved.batch), changes]


def _copy_history(run: Path, folder: Path) -> None:
    """Start with the rows of the run that this one branches from."""
    path = run / "metrics.jsonl"
    if path.is_symlink() or not path.is_file():
        raise CheckpointError("RUN_HISTORY", f"{path} is not a file: restore it")
    filesystem.copy_file_atomic(path, folder / "metrics.jsonl")


@contextmanager
def _undone_if_refused(folder: Path, stop_flag: StopFlag, *, is_new: bool) -> Iterator[None]:
    """If the run is refused before it saves a checkpoint, restore the config of an old folder.

    Of a new folder, what the start has written is removed, but nothing once the training has begun.
    """
    path, checkpoints = folder / "config.yaml", folder / "checkpoints"
    stored, before = path.read_bytes() if os.access(path, os.R_OK) else None, set(checkpoints.glob("step-*"))
    try:
        yield
    except (DivergedError, OutOfMemoryError, Preempted, ProcessError):
        raise  # the run was not refused, and the folder says why it ended
    except UserError:
        with suppress(OSError, UserError):  # the folder may be what failed: the error itself matters more
            if stored is not None and set(checkpoints.glob("step-*")) <= before:
                filesystem.write_file_atomic(path, stored)
            elif stored is None and is_new and stop_flag.may_leave:
                _remove_refused(folder)
        raise


def _remove_refused(folder: Path) -> None:
    """Remove a new folder, in which other processes may be reporting their errors at this moment."""
    for _ in range(_NUM_REMOVALS):
        with suppress(OSError):  # a report came between the look and the removal
            remove_new_folder(folder)
        if not folder.exists():
            return
        time.sleep(_REMOVAL_S)  # until the others have reported


def describe_identity(config: RecipeConfig) -> dict[str, str]:
    """Return what must be the same on all processes, by name: versions, sources and config."""
    sources = [*sorted(Path(__file__).parents[1].rglob("*.py")), Path(sys.argv[0])]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources if path.is_file()))
    return {**library_versions(), "code": digest.hexdigest(), "config": describe_shared(config)}


def check_same_everywhere(values: Mapping[str, str], accelerator: Accelerator) -> None:
    """Raise on all processes if a named value differs from the main process's on some. **Collective.**

    Of a value of several lines, the first that differs is shown.
    """
    listed = []
    for name, value in values.items():
        lines = {process: line for process, line in enumerate(differing_lines(value, accelerator)) if line}
        if lines:
            shown = f" ({next(iter(lines.values()))})" if "\n" in value else ""
            listed.append(f"{name} on {', '.join(map(str, lines))}{shown}")
    if listed:
        fix = (
            "Install the same software, copy the same code and data to every machine, start all in the same way, and "
            "let no part of the recipe depend on the process"
        )
        raise ConfigError("PROCESSES_DIFFER", f"not the same as on process 0: {'; '.join(listed)}. {fix}")

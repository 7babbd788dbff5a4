"""What a run continues from: chooses the folder, reads the checkpoint and compares the settings.

These functions are called in the order in which they stand here. On the main process alone,
`open_folder` chooses the folder and finds the source. On all processes, `start_run` then loads the
checkpoint and compares its settings with the new ones, and `build_trainer` restores it
(`restore.py`).
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from accelerate import Accelerator

from ..checkpoint.format import (
    LoadedCheckpoint,
    decode_files,
    list_checkpoints,
    read_manifest,
)
from ..checkpoint.loading import (
    candidates,
    first_valid,
    has_checkpoints,
    read_patiently,
)
from ..checkpoint.sharded import keep_slices
from ..core.errors import CheckpointError, ConfigError, OutputError
from ..core.json_files import read_json_object
from ..core.run_dir import expand_home, is_locked
from ..core.yaml_files import read_yaml
from ..distributed.collectives import broadcast_files, join_peers, run_on_main
from .config import RecipeConfig, RunConfig, training_changes

R = TypeVar("R", bound=RecipeConfig)


class Source(NamedTuple):
    """What a run continues from."""

    run: str
    """The folder of the run that made the checkpoint."""
    checkpoint: str | None = None
    """The name of the checkpoint; None: the newest valid one."""


def choose_folder(config: RecipeConfig, recipe: str) -> Path:
    """Return the run folder: the given one, an unfinished one to resume, or a new name."""
    run = config.run
    if run.output_dir is not None:
        return run.output_dir
    if run.resume != "never":
        for folder in folders_of(recipe, run.runs_dir):
            if not folder.is_symlink() and is_unfinished(folder, config):
                return folder
    name = f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = run.runs_dir / name
    number = 0
    while os.path.lexists(folder):
        number += 1
        folder = run.runs_dir / f"{name}-{number}"
    return folder


def folders_of(recipe: str, runs_dir: Path) -> list[Path]:
    """Return the folders that `choose_folder` has named for a recipe, the newest first."""
    # Neither recipes with longer names, such as `images-small` beside `images`, nor copies of a run
    # that somebody has renamed.
    first = runs_dir / recipe
    name = re.compile(rf"{re.escape(first.name)}-\d{{8}}-\d{{6}}(-\d+)?")
    folders = (folder for folder in first.parent.glob("*") if name.fullmatch(folder.name))
    return sorted(folders, reverse=True)


def is_unfinished(folder: Path, config: RecipeConfig) -> bool:
    """Whether `folder` holds a run of the same start that is neither done nor in use.

    Its config is the same, apart from what `--allow-change` names.
    """
    source = Source(str(folder))
    try:
        stored = stored_settings(source)
        check_changes(stored, with_global_batch_size(config, stored, num_processes=1), source)
        if not stored or is_locked(folder / "run.lock"):
            return False
        result = folder / "result.json"
        is_done = result.exists() and read_json_object(result)["state"] == "done"
        return not is_done and has_same_start(folder, config.run)
    except (OSError, ValueError, KeyError, TypeError, CheckpointError):
        return False


def has_same_start(folder: Path, run: RunConfig) -> bool:
    """Whether the run in `folder` began with the weights of `run`, or from the run that it names.

    With `--resume auto` it may be a branch of any run. Raises OSError, ValueError, KeyError or
    TypeError if the folder does not tell.
    """
    begun = read_yaml(folder / "config.yaml")["run"]
    weights = run.init_from and str(run.init_from)
    return run.resume in ("auto", begun["resume"]) and begun["init_from"] == weights


def stored_settings(source: Source) -> Mapping[str, Any]:
    """Return what the run was trained with, by dotted name; {} if no checkpoint can be read.

    It is read from the manifest of the newest checkpoint. The folder's config.yaml may be of an
    attempt that was killed before its first save.

    Raises CheckpointError if the folder of the checkpoints is a link.
    """
    directory = Path(source.run, "checkpoints")
    named = [directory / source.checkpoint] if source.checkpoint else list_checkpoints(directory)
    for path in reversed(named):
        with suppress(CheckpointError):
            return dict(read_manifest(path)[1].get("settings", {}))
    return {}


def find_source(folder: Path, run: RunConfig) -> Source | None:
    """Return what to continue from; None: the run is new.

    Checkpoints in the run folder come before `--resume`, so that the same command continues a
    branch that it has begun. `--resume` cannot go back to an older one of them.
    """
    path = Path(os.path.realpath(expand_home(Path(run.resume))))
    if has_checkpoints(folder / "checkpoints"):
        if run.resume == "never" or path in list_checkpoints(folder / "checkpoints")[:-1]:
            raise OutputError(
                "RUN_EXISTS",
                f"{folder} has checkpoints, and --resume is {run.resume}: "
                "choose a different folder",
            )
        return Source(str(folder))
    if run.resume in ("auto", "never"):
        return None
    with suppress(OSError):  # it may not be looked up
        if path.parent.name == "checkpoints" and path.is_dir():
            return Source(str(path.parent.parent), path.name)
        if has_checkpoints(path / "checkpoints"):
            return Source(str(path))
    raise CheckpointError(
        "CKPT_NOT_FOUND",
        f"--resume {run.resume} is neither a checkpoint nor a run that can be read: "
        "give the folder of a run, or a checkpoint that is still in it",
    )


def load_for_all(
    source: Source | None, accelerator: Accelerator, *, timeout_s: float
) -> LoadedCheckpoint | None:
    """Return the checkpoint to start from, on every process; None if the run is new.

    If all are damaged, it is the newest one that is valid but for its frozen parameters, which
    `complete_frozen` then takes from the model.

    **Collective.**

    Raises:
        CheckpointError: there is no checkpoint, or no valid one.
    """
    if source is None:
        return None
    directory = Path(source.run, "checkpoints")

    def load(name: str, *, without: str = "") -> LoadedCheckpoint:
        """Return a checkpoint that the processes have verified together. **Collective.**

        The main process reads the files and sends them to the others. Slices of shards are not
        sent: each process reads and verifies its part of them.
        """
        path = directory / name
        read = partial(read_patiently, path, without=without)
        loaded = decode_files(broadcast_files(read, accelerator), path)
        if loaded.slices:
            peers = join_peers(accelerator, timeout_s=timeout_s)
            peers.agree(lambda: keep_slices(loaded.slices, peers))
        return loaded

    name = source.checkpoint
    names = run_on_main(lambda: candidates(directory, name), accelerator)
    level = logging.WARNING if accelerator.is_main_process else logging.DEBUG
    return first_valid(directory, name, names, load, level=level)


def continued(
    config: R, checkpoint: LoadedCheckpoint | None, source: Source | None, *, num_processes: int
) -> R:
    """Return `config` as the run has it, with the global batch size of its checkpoint.

    The settings are compared with those that the checkpoint was trained with.

    Raises ConfigError if a setting has changed that `--allow-change` does not name, or if the
    processes cannot share the global batch.
    """
    stored = {} if checkpoint is None else checkpoint.manifest.get("settings", {})
    config = with_global_batch_size(config, stored, num_processes=num_processes)
    # What does not depend on the data is refused before it is read.
    enough = num_processes * config.batch.resolved_global_batch_size(num_processes)
    config.batch.plan(enough, num_processes=num_processes)
    if stored and source is not None:
        check_changes(stored, config, source)
    return config


def with_global_batch_size(config: R, stored: Mapping[str, Any], *, num_processes: int) -> R:
    """Return `config` with its global batch size filled in.

    It is the given one, else that of the `stored` settings, else it follows from `num_processes`.
    """
    batch = config.batch
    size = (
        batch.global_batch_size
        or stored.get("batch.global_batch_size")
        or batch.resolved_global_batch_size(num_processes)
    )
    return replace(config, batch=replace(batch, global_batch_size=size))


def check_changes(stored: Mapping[str, Any], config: RecipeConfig, source: Source) -> None:
    """Raise ConfigError if a setting has changed that `--allow-change` does not name."""
    names = {name.replace("-", "_") for name in config.run.allow_change}
    refused = [change for change in training_changes(stored, config) if change[0] not in names]
    if refused:
        listed = "; ".join(f"{name}: {old} -> {new}" for name, old, new in refused)
        flags = " ".join(name for name, _, _ in refused)
        raise ConfigError(
            "CONFIG_CHANGED",
            f"{source.run} was made with a different config ({listed}): set it back, choose a "
            f"different --output-dir (--init-from {source.run} starts from these weights), or "
            f"continue with --allow-change {flags}"
            f"{', if the weights have the same shapes' * ('model.' in flags)}",
        )

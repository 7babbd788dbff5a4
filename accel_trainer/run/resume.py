"""The folder of a run, what it continues from, and whether its config allows that."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from accelerate import Accelerator

from ..checkpoint.format import CHECKPOINT_NAME, LoadedCheckpoint, decode_files
from ..checkpoint.retention import find_checkpoint, has_checkpoints
from ..checkpoint.serialization import read_json_object
from ..checkpoint.sharded import keep_slices
from ..core.errors import CheckpointError, ConfigError, OutputError
from ..core.run_dir import expand_home, is_in_use
from ..distributed.collectives import broadcast_files, join_peers, run_on_main
from .config import RecipeConfig, RunConfig, training_changes
from .plain_yaml import read_plain_yaml

R = TypeVar("R", bound=RecipeConfig)


@dataclass(frozen=True)
class Source:
    """What a run continues from: a run's folder, and a checkpoint's name; None: the newest valid one."""

    run: str
    checkpoint: str | None = None


def choose_folder(config: RecipeConfig, recipe: str) -> Path:
    """Return the run folder, which need not exist."""
    run = config.run
    if run.output_dir is not None:
        return run.output_dir
    if run.resume == "auto":
        for folder in sorted(run.runs_dir.glob(f"{recipe}-*"), reverse=True):
            if not folder.is_symlink() and _is_unfinished(folder, config):
                return folder
    name = f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder, number = run.runs_dir / name, 1
    while folder.exists():
        folder, number = run.runs_dir / f"{name}-{number}", number + 1
    return folder


def _is_unfinished(folder: Path, config: RecipeConfig) -> bool:
    """Whether `folder` holds a run of the same config that is neither done nor in use."""
    try:
        stored = read_plain_yaml(folder / "config.yaml")
        resolved = with_batch(config, stored, num_processes=1)
        if (
            training_changes(stored, resolved)
            or not has_checkpoints(folder / "checkpoints")
            or is_in_use(folder)
        ):
            return False
        result = folder / "result.json"
        return not (result.exists() and read_json_object(result)["state"] == "done")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, CheckpointError):
        return False


def find_source(folder: Path, run: RunConfig) -> Source | None:
    """Return what to continue from; a run's own checkpoints come first, so that the same command continues the run."""
    if has_checkpoints(folder / "checkpoints"):
        if run.resume == "never":
            raise OutputError(
                "RUN_EXISTS",
                f"{folder} has checkpoints and --resume is never: choose another folder",
            )
        return Source(str(folder))
    if run.resume in ("auto", "never"):
        return None
    path = expand_home(Path(run.resume)).resolve()
    if CHECKPOINT_NAME.fullmatch(path.name) and path.is_dir():
        return Source(str(path.parent.parent), path.name)
    if has_checkpoints(path / "checkpoints"):
        return Source(str(path))
    raise CheckpointError(
        "CKPT_NOT_FOUND", f"--resume {run.resume} is neither a checkpoint nor a run: check the path"
    )


def read_stored_config(source: Source) -> dict[str, Any]:
    """Return the stored config of the run to continue. Raises CheckpointError."""
    path = Path(source.run, "config.yaml")
    try:
        stored = read_plain_yaml(path)
        batch = stored.get("batch", {})
        is_by_name = isinstance(batch, dict)
        if not is_by_name or not all(
            isinstance(batch[name], int | None) for name in batch if name != "reduce"
        ):
            raise ValueError(f"batch is {str(batch)[:80]}, expected whole numbers by name")
        return stored
    except (OSError, ValueError) as error:
        raise CheckpointError(
            "RUN_CONFIG", f"{path} cannot be read ({error}): restore it"
        ) from error


def with_batch(config: R, stored: Mapping[str, Any] | None, *, num_processes: int) -> R:
    """Return `config` with its global batch: as given, else that of the run that continues, else the computed one."""
    batch, kept = config.batch, (stored or {}).get("batch", {})
    given = batch.global_batch_size or kept.get("global_batch_size")
    batch = replace(
        batch, global_batch_size=given or batch.resolved_global_batch_size(num_processes)
    )
    return replace(config, batch=batch)


def check_changes(stored: Mapping[str, Any], config: RecipeConfig, source: Source) -> list[str]:
    """Return the names of the settings that decide the training and were changed on purpose.

    Raises:
        ConfigError: others have changed, too.
    """
    names = {name.replace("-", "_") for name in config.run.allow_change}
    changes = training_changes(stored, config)
    refused = [change for change in changes if change[0] not in names]
    if refused:
        listed = "; ".join(f"{name}: {old} -> {new}" for name, old, new in refused)
        flags = " ".join(name for name, _, _ in refused)
        fix = f"set it back, choose another --output-dir, or change it on purpose with --allow-change {flags}"
        raise ConfigError(
            "CONFIG_CHANGED", f"{source.run} was made with another config ({listed}): {fix}"
        )
    return [name for name, _, _ in changes]


def read_checkpoint(
    source: Source | None,
    accelerator: Accelerator,
    *,
    timeout_s: float,
    known_damaged: Mapping[str, CheckpointError] = MappingProxyType({}),
) -> LoadedCheckpoint | None:
    """Return the checkpoint to start from; the main process reads and verifies it for all.

    **Collective.**

    Slices of shards are verified by all processes, each its part of them, and sent to none.
    `known_damaged` are checkpoints, by name, in which that has failed.
    """
    if source is None:
        return None
    directory = Path(source.run, "checkpoints")
    found: list[Any] = []

    def read() -> str:
        found[:] = (
            find_checkpoint(
                directory, source.checkpoint, trust_slices=True, known_damaged=known_damaged
            )
            or ()
        )
        return str(found[1].name)

    folder = directory / run_on_main(read, accelerator)
    files, loaded = found or (None, None)
    files = broadcast_files(files, accelerator)
    loaded = loaded or decode_files(files, folder)
    if loaded.slices:
        peers = join_peers(accelerator, timeout_s=timeout_s)
        try:
            peers.agree(
                lambda: keep_slices(loaded.slices, peers.process_index, peers.num_processes)
            )
        except CheckpointError as error:
            if source.checkpoint is not None or error.code != "CKPT_DAMAGED":
                raise
            known_damaged = {**known_damaged, folder.name: error}
            return read_checkpoint(
                source, accelerator, timeout_s=timeout_s, known_damaged=known_damaged
            )
    return loaded

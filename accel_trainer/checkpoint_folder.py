"""The checkpoints of a run side by side: which one to resume from, which is the best, which are kept."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from . import storage
from .checkpoint_files import (
    CHECKPOINT_NAME,
    Files,
    LoadedCheckpoint,
    decode_files,
    is_committed,
    list_checkpoints,
    read_checkpoint,
)
from .errors import CheckpointError
from .run_folder import foreign_access
from .strict_json import MAX_BYTES, dump_json, parse_json

_logger = logging.getLogger(__name__)

BEST_FILE = "best.json"
# On a network file system a name can show before its content does.
RETRY_DELAYS_S = (0.05, 0.2)


@dataclass(frozen=True)
class BestCheckpoint:
    """The checkpoint with the best value of a metric, by name: it is kept while it is the best."""

    name: str
    metric: str
    value: float
    mode: Literal["max", "min"] = "max"
    """Whether a larger or a smaller value is better."""


def find_checkpoint(directory: Path, name: str | None = None) -> Files | None:
    """Return the verified bytes of the newest valid checkpoint, or of the one called `name`.

    A damaged newest one is reported, set aside and passed over; a damaged `name` is an error. None if
    there never was a checkpoint. Raises CheckpointError if there are some, but no valid one: training
    from scratch over them is for the user to decide.
    """
    candidates = list_checkpoints(directory)
    if name is not None:
        if directory / name not in candidates:
            known = ", ".join(path.name for path in candidates[-3:]) or "none"
            raise CheckpointError("CKPT_NOT_FOUND", f"{directory / name} does not exist: there are {known}")
        return _read_patiently(directory / name)
    damaged = []
    for path in reversed(candidates):
        try:
            files = _read_patiently(path)
        except CheckpointError as error:
            if error.code != "CKPT_DAMAGED":
                raise
            _logger.warning("%s", error)
            damaged.append(path)
            continue
        for unusable in damaged:
            _logger.warning("falling back from the damaged %s to %s", unusable.name, path.name)
            set_aside(unusable, "damaged")
        return files
    if damaged or any(directory.glob("damaged-*")):
        raise CheckpointError(
            "CKPT_NONE_VALID",
            f"every checkpoint in {directory} is damaged: restore one from a backup, "
            "or move them away to train from scratch",
        )
    return None


def load_checkpoint(directory: Path, name: str | None = None) -> LoadedCheckpoint | None:
    """Return what `find_checkpoint` finds, decoded."""
    files = find_checkpoint(directory, name)
    return None if files is None else decode_files(files)


def _read_patiently(path: Path) -> Files:
    if (reason := foreign_access(path)) is not None:
        _logger.warning("%s: make sure that you trust its content", reason)
    for delay_s in RETRY_DELAYS_S:
        try:
            return _read_and_try(path)
        except CheckpointError as error:
            if error.code != "CKPT_DAMAGED":
                raise
            time.sleep(delay_s)
    return _read_and_try(path)


def _read_and_try(path: Path) -> Files:
    files = read_checkpoint(path)
    decode_files(files)
    return files


def has_valid(path: Path, metadata: Mapping[str, object]) -> bool:
    """Whether a valid checkpoint of this very run is at `path`. Another one in its place is set aside."""
    if not path.exists() and not path.is_symlink():
        return False
    try:
        manifest = decode_files(read_checkpoint(path)).manifest
    except CheckpointError as error:
        _logger.warning("%s", error)
        set_aside(path, "damaged")
        return False
    if any(manifest.get(name) != metadata.get(name) for name in ("config_sha256", "data_fingerprint")):
        set_aside(path, "superseded")
        return False
    # The process that renamed it may have died before the name was durable.
    storage.sync_directory(path.parent)
    return True


def set_aside(path: Path, reason: str) -> None:
    """Rename a checkpoint so that it is not used and not deleted; only a warning if that fails."""
    target = path.with_name(f"{reason}-{path.name}")
    if target.exists():
        target = path.with_name(f"{target.name}-{time.time_ns()}")
    try:
        storage.rename(path, target)
    except OSError as error:
        _logger.warning("cannot rename %s to %s: %s", path, target.name, error.strerror)


def update_best(directory: Path, best: BestCheckpoint | None) -> None:
    """Write `best` to the file that names it, if its checkpoint was committed and the file differs."""
    if best is None or not is_committed(directory / best.name):
        return
    data = dump_json(asdict(best), indent=1)
    if _read_best(directory) != data:
        storage.write_file_atomic(directory / BEST_FILE, data)


def best_name(directory: Path) -> str | None:
    """Return the name of the best checkpoint, if one is on record."""
    try:
        name = parse_json(_read_best(directory))["name"]
    except (ValueError, KeyError, TypeError):
        return None
    return name if isinstance(name, str) and CHECKPOINT_NAME.fullmatch(name) else None


def _read_best(directory: Path) -> bytes:
    try:
        return storage.read_file(directory / BEST_FILE, max_bytes=MAX_BYTES)
    except OSError:
        return b""


def delete_old(directory: Path, newest: str, *, keep_last_n: int, keep_every_n_steps: int | None) -> None:
    """Delete what is not kept, now that `newest` is committed: only whole checkpoints of ours.

    Kept are the last `keep_last_n`, the best, and multiples of `keep_every_n_steps`. Positions only grow, so a
    checkpoint ahead of `newest` belongs to a future that this run left by resuming from an older one: it is
    set aside.
    """
    candidates = list_checkpoints(directory)
    for path in candidates:
        if path.name > newest:
            _logger.warning("%s is ahead of this run, which resumed from an older one: set aside", path)
            set_aside(path, "superseded")
    committed = [path for path in candidates if path.name <= newest and is_committed(path)]
    kept = {newest, best_name(directory), *(path.name for path in committed[-keep_last_n:])}
    if keep_every_n_steps is not None:
        kept |= {path.name for path in committed if int(path.name.split("-")[1]) % keep_every_n_steps == 0}
    storage.remove_directories(path for path in committed if path.name not in kept)
    storage.sweep(directory)


def has_checkpoints(directory: Path) -> bool:
    """Whether there ever was a checkpoint, be it damaged: a run must then not start from scratch silently."""
    return bool(list_checkpoints(directory)) or any(directory.glob("damaged-*"))

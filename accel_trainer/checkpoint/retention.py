"""The checkpoints of a run: the one to resume from, the best one, and those to delete."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType

from ..core import filesystem
from ..core.errors import CheckpointError
from ..core.json_files import read_json_object, write_json
from ..core.train_state import BestCheckpoint
from .config import CheckpointConfig
from .format import (
    CHECKPOINT_NAME,
    Files,
    LoadedCheckpoint,
    commit_mark,
    decode_files,
    is_committed,
    list_checkpoints,
    read_files,
    step_of,
)

_logger = logging.getLogger(__name__)

BEST_FILE = "best.json"
# On a network file system a name can appear before its content does.
RETRY_DELAYS_S = (0.05, 0.2)


def find_checkpoint(
    directory: Path,
    name: str | None = None,
    *,
    trust_slices: bool = False,
    known_damaged: Mapping[str, CheckpointError] = MappingProxyType({}),
) -> tuple[Files, LoadedCheckpoint] | None:
    """Return the newest valid checkpoint, or the one called `name`: its files' bytes, and decoded.

    Without a `name`, a damaged checkpoint is reported and passed over, and the next save
    quarantines it. With a `name`, damage is an error. With `trust_slices`, slices of shards are not
    verified here: they are when they are read, and the caller then passes the checkpoints that
    proved damaged as `known_damaged`.

    Returns None if there never was a checkpoint. Raises CheckpointError if there are checkpoints
    but none is valid: only the user may decide to start over.
    """
    candidates = list_checkpoints(directory)
    if name is not None:
        if directory / name not in candidates:
            known = ", ".join(path.name for path in candidates[-3:]) or "none"
            raise CheckpointError(
                "CKPT_NOT_FOUND", f"{directory / name} does not exist: there are {known}"
            )
        return _read(directory / name, trust_slices=trust_slices)
    for path in reversed(candidates):
        try:
            if path.name in known_damaged:
                raise known_damaged[path.name]
            return _read(path, trust_slices=trust_slices)
        except CheckpointError as error:
            if error.code != "CKPT_DAMAGED":
                raise
            _logger.warning("%s is passed over: %s", path.name, error)
    if has_checkpoints(directory):
        raise CheckpointError(
            "CKPT_NONE_VALID",
            f"every checkpoint in {directory} is damaged: restore one, or move them away to train "
            "from scratch",
        )
    return None


def load_checkpoint(directory: Path, name: str | None = None) -> LoadedCheckpoint | None:
    """Return the newest valid checkpoint, or the one called `name`, as `find_checkpoint` does.

    Without a `name`, slices are verified here, since another checkpoint can replace a damaged one.
    With a `name` none can, and slices are verified when they are read.
    """
    found = find_checkpoint(directory, name, trust_slices=name is not None)
    return None if found is None else found[1]


def _read(path: Path, *, trust_slices: bool) -> tuple[Files, LoadedCheckpoint]:
    delays_s = iter(RETRY_DELAYS_S)
    while True:
        try:
            files = read_files(path)
            loaded = decode_files(files, path)
            if not trust_slices:
                for stored in loaded.slices:
                    stored.read()
            return files, loaded
        except CheckpointError as error:
            delay_s = next(delays_s, None)
            if error.code != "CKPT_DAMAGED" or delay_s is None:
                raise
        time.sleep(delay_s)  # until the content of a network file arrives


def has_valid(path: Path, metadata: Mapping[str, object]) -> bool:
    """Whether a valid checkpoint of this run is at `path`; any other one there is quarantined."""
    if not os.path.lexists(path):
        return False
    try:
        manifest = _read(path, trust_slices=False)[1].manifest
    except CheckpointError as error:
        _logger.warning("%s", error)
        quarantine(path, "damaged")
        return False
    if any(
        manifest.get(name) != metadata.get(name)
        for name in ("settings", "order", "data_fingerprint")
    ):
        quarantine(path, "superseded")
        return False
    # The process that published it may have died before the name was durable.
    filesystem.disk.sync_directory(path.parent)
    return True


def quarantine(path: Path, reason: str) -> None:
    """Rename a checkpoint so that it is neither used nor deleted. A failure is only a warning."""
    target = path.with_name(f"{reason}-{path.name}")
    if target.exists():
        target = path.with_name(f"{target.name}-{time.time_ns()}")
    try:
        filesystem.rename(path, target)
    except OSError as error:
        _logger.warning("cannot rename %s to %s: %s", path, target.name, error.strerror)


def update_best(directory: Path, best: BestCheckpoint | None) -> None:
    """Write `best` to best.json, if its checkpoint was committed."""
    if best is not None and is_committed(directory / best.name):
        write_json(directory / BEST_FILE, asdict(best))


def best_name(directory: Path) -> str | None:
    """Return the name of the best checkpoint; None without a valid best.json."""
    try:
        name = read_json_object(directory / BEST_FILE)["name"]
    except (OSError, ValueError, KeyError):
        return None
    return name if isinstance(name, str) and CHECKPOINT_NAME.fullmatch(name) else None


def apply_retention(
    directory: Path, newest: str, config: CheckpointConfig, own: Collection[bytes | None]
) -> None:
    """Delete old checkpoints once `newest` is committed.

    Kept are those that `config` asks for, and the best one. Only complete checkpoints whose commit
    mark is in `own` are counted and deleted. Checkpoints later than `newest` date from before the
    run resumed from an older one: they are quarantined.
    """
    candidates = list_checkpoints(directory)
    for path in candidates:
        if path.name > newest:
            _logger.warning(
                "%s is later than this run, which resumed from an older one: quarantined", path
            )
            quarantine(path, "superseded")
    committed = [
        path
        for path in candidates
        if path.name <= newest and commit_mark(path) in own and is_committed(path)
    ]
    older = committed[: -config.keep_last_n]
    kept = {best_name(directory), *(path.name for path in spread(older, config.keep_for_replay))}
    if config.keep_every_n_steps is not None:
        kept |= {path.name for path in older if step_of(path) % config.keep_every_n_steps == 0}
    filesystem.remove_directories(path for path in older if path.name not in kept)
    filesystem.sweep(directory)


def spread(paths: Sequence[Path], count: int) -> list[Path]:
    """Return at most `count` checkpoints, spread over their steps as evenly as possible.

    Called after each save, it leaves gaps that differ by a factor of about 2.
    """
    left = [*paths]
    while len(left) > count:
        steps = [0, *map(step_of, left)]
        # What would be the gap without each one but the last, whose gap is still growing.
        gaps = [after - before for before, after in zip(steps, steps[2:], strict=False)]
        del left[gaps.index(min(gaps)) if gaps else 0]
    return left


def has_checkpoints(directory: Path) -> bool:
    """Whether there is a checkpoint, valid or damaged.

    A run must then not silently start from scratch.
    """
    return bool(list_checkpoints(directory)) or any(directory.glob("damaged-*"))

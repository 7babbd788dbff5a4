"""The checkpoints of a run that are kept, the best one among them, and those that are deleted."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from ..core import filesystem
from ..core.errors import CheckpointError
from ..core.json_files import read_json_object, write_json
from ..core.logger import logger
from ..core.train_state import BestCheckpoint
from .config import CheckpointConfig
from .format import (
    CHECKPOINT_NAME,
    Manifest,
    commit_mark,
    files_of,
    is_committed,
    list_checkpoints,
    step_of,
)
from .loading import load_whole

T = TypeVar("T")


BEST_FILE = "best.json"


def has_valid(path: Path, header: Manifest) -> bool:
    """Whether a valid checkpoint of this run is at `path`; any other one there is quarantined."""
    if not os.path.lexists(path):
        return False
    try:
        manifest = load_whole(path).manifest
    except CheckpointError as error:
        logger.warning("%s", error)
        quarantine(path, "damaged")
        return False
    if any(
        manifest.get(name) != header.get(name) for name in ("settings", "order", "data_fingerprint")
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
        logger.warning("cannot rename %s to %s: %s", path, target.name, error.strerror)


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
            logger.warning(
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
    filesystem.remove_own((path for path in older if path.name not in kept), files_of)
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

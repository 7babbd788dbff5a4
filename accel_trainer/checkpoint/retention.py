"""The checkpoints of a run: the one to resume from, the best one, and those to delete."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from ..core import filesystem
from ..core.errors import CheckpointError, DamagedError
from ..core.json_files import read_json_object, write_json
from ..core.train_state import BestCheckpoint
from ..distributed.collectives import Files
from .config import CheckpointConfig
from .format import (
    CHECKPOINT_NAME,
    LoadedCheckpoint,
    commit_mark,
    decode_files,
    is_committed,
    list_checkpoints,
    read_files,
    step_of,
)

T = TypeVar("T")

_logger = logging.getLogger(__name__)

BEST_FILE = "best.json"
# On a network file system a name can appear before its content does.
RETRY_DELAYS_S = (0.05, 0.2)


def load_checkpoint(directory: Path, name: str | None = None) -> LoadedCheckpoint | None:
    """Return the newest valid checkpoint, or the one called `name`; None: there never was one.

    The slices of the one called `name` are verified when they are read, since no other can replace
    it.

    Raises:
        CheckpointError: it does not exist or is damaged; or there are checkpoints and none is
            valid: only the user may decide to start over.
    """
    names = candidates(directory, name)
    if name is not None:
        return decode_files(read_patiently(directory / name), directory / name)
    found = first_valid(names, lambda each: _load_whole(directory / each))
    if found is None and has_checkpoints(directory):
        raise none_valid(directory)
    return found


def candidates(directory: Path, name: str | None = None) -> list[str]:
    """Return the names of all checkpoints, the newest first, or only `name`.

    Raises CheckpointError if there is none called `name`.
    """
    names = [path.name for path in reversed(list_checkpoints(directory))]
    if name is None:
        return names
    if name not in names:
        known = ", ".join(names[2::-1]) or "none"
        raise CheckpointError(
            "CKPT_NOT_FOUND", f"{directory / name} does not exist: there are {known}"
        )
    return [name]


def first_valid(
    names: Iterable[str], load: Callable[[str], T], *, level: int = logging.WARNING
) -> T | None:
    """Return what `load` returns for the first checkpoint that is not damaged; None: all are.

    A damaged one is reported at `level` and passed over; the next save quarantines it.
    """
    for name in names:
        try:
            return load(name)
        except DamagedError as error:
            _logger.log(level, "%s is passed over: %s", name, error)
    return None


def none_valid(directory: Path) -> CheckpointError:
    """Return the error of a run whose checkpoints are all damaged, or gone."""
    return CheckpointError(
        "CKPT_NONE_VALID",
        f"{directory} has no valid checkpoint: restore one, or move the damaged ones away to train "
        "from scratch",
    )


def read_patiently(path: Path, *, without: str = "") -> Files:
    """Return `read_files`; the content of the files may arrive after their names."""
    for delay_s in RETRY_DELAYS_S:
        with suppress(DamagedError):
            return read_files(path, without=without)
        time.sleep(delay_s)
    return read_files(path, without=without)


def _load_whole(path: Path) -> LoadedCheckpoint:
    """Return a checkpoint whose slices are verified, too."""
    loaded = decode_files(read_patiently(path), path)
    for stored in loaded.slices:
        stored.read()
    return loaded


def has_valid(path: Path, header: Mapping[str, object]) -> bool:
    """Whether a valid checkpoint of this run is at `path`; any other one there is quarantined."""
    if not os.path.lexists(path):
        return False
    try:
        manifest = _load_whole(path).manifest
    except CheckpointError as error:
        _logger.warning("%s", error)
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

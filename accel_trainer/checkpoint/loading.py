"""Finds and reads the checkpoint to resume from: the newest one that is not damaged."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from torch import nn

from ..core.errors import CheckpointError, DamagedError
from ..core.logger import logger
from ..distributed.collectives import Files
from .format import FROZEN_FILE, LoadedCheckpoint, decode_files, list_checkpoints, read_files
from .frozen import complete_frozen

# On a network file system a name can appear before its content does.
RETRY_DELAYS_S = (0.05, 0.2)


def load_checkpoint(
    directory: Path, name: str | None = None, *, model: nn.Module | None = None
) -> LoadedCheckpoint | None:
    """Return the newest valid checkpoint, or the one called `name`; None: there never was one.

    The slices of the one called `name` are verified when they are read, since no other can replace
    it. Frozen parameters whose file is damaged are taken from `model`, if it has the same.

    Raises:
        CheckpointError: it does not exist or is damaged; or there are checkpoints and none is
            valid: only the user may decide to start over.
    """

    def load(each: str, *, without: str = "") -> LoadedCheckpoint:
        path = directory / each
        if name is None:
            loaded = load_whole(path, without=without)
        else:
            loaded = decode_files(read_patiently(path, without=without), path)
        complete_frozen(loaded, model)
        return loaded

    names = candidates(directory, name)
    if not names and not has_checkpoints(directory):
        return None
    return first_valid(directory, name, names, load)


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
    directory: Path,
    name: str | None,
    names: Sequence[str],
    load: Callable[..., LoadedCheckpoint],
) -> LoadedCheckpoint:
    """Return what `load` returns for the first checkpoint that is not damaged.

    If all are, it is the first that `load` accepts `without` FROZEN_FILE, which they may share. A
    damaged one is reported and passed over; the next save quarantines it. `name` is the
    one that was asked for, None for any.

    Raises CheckpointError if there is none.
    """
    for without in ("", FROZEN_FILE):
        for each in names:
            try:
                return load(each, without=without)
            except DamagedError as error:
                if not (without or name):
                    logger.warning("skipping %s: %s", each, error)
    if name is not None:
        return load(name)  # raises what is damaged
    raise CheckpointError(
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


def load_whole(path: Path, *, without: str = "") -> LoadedCheckpoint:
    """Return a checkpoint whose slices are verified, too."""
    loaded = decode_files(read_patiently(path, without=without), path)
    for stored in loaded.slices:
        stored.read()
    return loaded


def has_checkpoints(directory: Path) -> bool:
    """Whether there is a checkpoint, valid or damaged.

    A run must then not silently start from scratch.
    """
    return bool(list_checkpoints(directory)) or any(directory.glob("damaged-*"))

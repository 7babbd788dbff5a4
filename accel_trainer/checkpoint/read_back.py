"""Reads a checkpoint that was just written, as a resume would, before it counts as one."""

from __future__ import annotations

import errno
from pathlib import Path

from ..core.digest import digest_of
from ..core.errors import CheckpointError, DamagedError
from ..core.filesystem import read_large_file
from ..core.logger import logger
from ..core.registry import WEIGHTS
from ..distributed.collectives import Files
from ..distributed.machine import free_memory_bytes
from .format import (
    FROZEN_FILE,
    FROZEN_ORDER,
    decode_piece,
    piece_of,
    read_files,
    read_listed_file,
    read_manifest,
)
from .serialization import Encoded, EncodedPieces, encode

_UNREADABLE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


def check_readable(folder: Path, pieces: EncodedPieces, *, process_index: int) -> None:
    """Compare the checkpoint in `folder` with the `pieces` that were to be written.

    They are read one after the other. A piece for which no memory is free is left out. The main
    process compares what it has written whole, and each process verifies its slices of shards.

    Raises:
        CheckpointError: a piece cannot be parsed, or is not what was to be written.
        OSError: the disk returns other bytes than it was given.
    """
    for piece, written in pieces.items():
        if written.places is None and process_index > 0:
            continue
        try:
            _check_piece(folder, piece, written, process_index)
        except DamagedError as error:
            raise OSError(errno.EIO, error.message) from error
        except _UNREADABLE as error:
            raise CheckpointError(
                "CKPT_UNREADABLE",
                f"a resume could not read {piece} of the checkpoint just written ({error}): it is "
                "not kept, and the run ends here: please report this error of accel_trainer",
            ) from error


def _check_piece(folder: Path, piece: str, written: Encoded, process_index: int) -> None:
    listed = read_manifest(folder)[1]["files"]
    shared = (FROZEN_FILE, FROZEN_ORDER) if piece in WEIGHTS else ()
    names = [name for name in listed if piece_of(name) == piece or name in shared]
    if sum(listed[name]["bytes"] for name in names) > free_memory_bytes():
        logger.info("%s is not read back: there is no free memory for it", piece)
        return
    try:
        # This process has hashed what it wrote, and compares whole pieces with that.
        files: Files = {
            name: read_listed_file(folder / name, listed[name])
            if written.places is not None
            else read_large_file(folder / name, max_bytes=listed[name]["bytes"])
            for name in names
        }
        value, slices = decode_piece(piece, files, folder)
        for each in slices:
            if each.process_index == process_index:
                each.read()
        if written.places is None and _identity(encode(value, name=piece)) != _identity(written):
            raise ValueError("its names, values or bits differ")
    except _UNREADABLE:
        read_files(folder)  # whose hashes tell whether it is the disk's fault
        raise


def _identity(encoded: Encoded) -> tuple[bytes | None, list[str], str]:
    """Return what tells two values apart, also by the order of their names."""
    return encoded.skeleton, [*encoded.tensors], digest_of(encoded.tensors)

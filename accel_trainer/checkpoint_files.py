"""What a checkpoint is on disk: its name, its files, the manifest that hashes them, a mark that it is whole.

A checkpoint's name is its position, so that order never depends on a clock:

    step-0000001200-epoch-00003/
        model.safetensors           a piece that is a flat state dict: any program can load it
        optimizer.json              any other piece: a skeleton ...
        optimizer.safetensors       ... and the tensors it refers to
        manifest.json               the position, what the run was, size and sha256 of every piece's file
        COMMIT                      sha256 of manifest.json, written last
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from . import storage
from .encoding import Encoded, decode
from .errors import CheckpointError
from .machine import free_memory_bytes
from .state import TrainState
from .strict_json import MAX_BYTES, dump_json, parse_json
from .tensor_file import MAX_HEADER_BYTES, check_size, first_nonfinite, pack_tensors, unpack_tensors

_logger = logging.getLogger(__name__)

FORMAT = 1
MANIFEST = "manifest.json"
COMMIT = "COMMIT"
CHECKPOINT_NAME = re.compile(r"step-\d{10}-epoch-\d{5}")
PIECE_NAME = re.compile(r"(?!manifest$)[a-z0-9_]+(-r\d{5})?", re.ASCII)
_FILE_NAME = re.compile(r"(?!manifest\.)[a-z0-9_]+(-r\d{5})?\.(safetensors|json)", re.ASCII)
_LARGE_BYTES = 1 << 28
_PIECES_OF_A_RUN = ("model", "ema", "optimizer", "scaler", "trainer")
_SHA256 = re.compile(r"[0-9a-f]{64}")

_POSITION_FIELDS = tuple(field.name for field in fields(TrainState))

Files = dict[str, bytes]


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A verified checkpoint: its name, its manifest and the state of each piece, with tensors on the CPU."""

    name: str
    manifest: Mapping[str, Any]
    pieces: Mapping[str, Any]

    @property
    def position(self) -> TrainState:
        """Where the run stood."""
        return TrainState(**{name: self.manifest[name] for name in _POSITION_FIELDS})


def checkpoint_name(position: TrainState) -> str:
    """Return the name of the checkpoint at `position`. Names sort as positions do.

    The same optimizer step has two positions: the end of an epoch, and, once that is evaluated, the
    start of the next.
    """
    return f"step-{position.optimizer_step:010d}-epoch-{position.epoch:05d}"


def list_checkpoints(directory: Path) -> list[Path]:
    """Return what is named like a checkpoint, in the order of positions, valid or not.

    Raises CheckpointError for a link in place of the directory: what it leads to is not this run's.
    """
    if directory.is_symlink():
        raise CheckpointError("CKPT_LINK", f"{directory} is a link: give the run that it leads to, or move it away")
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if CHECKPOINT_NAME.fullmatch(path.name))


def write_checkpoint(
    final: Path,
    pieces: Mapping[str, Encoded],
    *,
    header: Mapping[str, object],
    before_commit: Callable[[], None],
) -> None:
    """Write a checkpoint so that it exists whole and durable at the return, and before that not at all."""
    with storage.new_directory(final) as temporary:
        files = {}
        for piece, encoded in pieces.items():
            if encoded.skeleton is not None:
                files[f"{piece}.json"] = _write(temporary / f"{piece}.json", [encoded.skeleton])
            if encoded.tensors:
                chunks = pack_tensors(encoded.tensors)
                files[f"{piece}.safetensors"] = _write(temporary / f"{piece}.safetensors", chunks)
        manifest = dump_json({"format": FORMAT, **header, "files": files}, indent=1)
        _write(temporary / MANIFEST, [manifest])
        before_commit()
        _write(temporary / COMMIT, [_commit_mark(manifest)])


def _write(path: Path, chunks: Iterable[storage.Chunk]) -> dict[str, object]:
    chunks = list(chunks)
    storage.create_file(path, chunks)
    sha256 = hashlib.sha256()
    for chunk in chunks:
        sha256.update(chunk)
    return {"bytes": sum(len(chunk) for chunk in chunks), "sha256": sha256.hexdigest()}


def _commit_mark(manifest: bytes) -> bytes:
    return hashlib.sha256(manifest).hexdigest().encode() + b"\n"


def is_committed(path: Path) -> bool:
    """Whether the checkpoint at `path` was finished, by the mark in it; its pieces are not read."""
    try:
        read_manifest(path)
    except CheckpointError:
        return False
    return True


def read_checkpoint(path: Path) -> Files:
    """Return the verified bytes of all files of a checkpoint; these very bytes `decode_files` parses.

    Raises CheckpointError naming the file that is not what was written.
    """
    files, manifest = read_manifest(path)
    for name, entry in manifest["files"].items():
        files[name] = read_listed_file(path / name, entry)
    if extra := set(os.listdir(path)) - set(files):
        _logger.info("%s holds files that are not part of it, ignored: %s", path, sorted(extra)[:5])
    return files


def read_listed_file(path: Path, entry: Mapping[str, Any]) -> bytes:
    """Return the bytes of a file, if they are those that the manifest's `entry` describes.

    Whether there can be so many is found out before they are read.
    """
    size = entry["bytes"]
    max_bytes = min(size, MAX_BYTES)
    if path.suffix == ".safetensors":
        if size > _LARGE_BYTES:
            _check_size(path, size)
        max_bytes = size
    data = _read(path, max_bytes=max_bytes)
    if len(data) != size:
        raise damaged(path, f"{len(data)} bytes, not the {size} of the manifest")
    if hashlib.sha256(data).hexdigest() != entry["sha256"]:
        raise damaged(path, "its sha256 is not the one in the manifest")
    return data


def _check_size(path: Path, size: int) -> None:
    """Raise CheckpointError unless the tensors in a file are as long as its manifest says, and fit into memory."""
    free = free_memory_bytes()
    if size > free:
        raise damaged(path, f"{size} bytes by the manifest, and {free} bytes of memory are free")
    try:
        with storage.open_file(path) as file:
            check_size(file.read(MAX_HEADER_BYTES), size)
    except OSError as error:
        raise damaged(path, error.strerror or str(error)) from error
    except ValueError as error:
        raise damaged(path, str(error)) from None


def decode_files(files: Files) -> LoadedCheckpoint:
    """Return the checkpoint in verified `files`, such as main has read and every process received.

    Raises CheckpointError naming the file that cannot be parsed, or the tensor that is not finite.
    """
    manifest = parse_manifest(files[MANIFEST], files[COMMIT], where=Path())
    name = _name_in(manifest)
    pieces = {}
    for piece in dict.fromkeys(file.partition(".")[0] for file in manifest["files"]):
        tensors: dict[str, Tensor] = {}
        file = f"{piece}.safetensors"
        try:
            if file in files:
                tensors = unpack_tensors(files[file])
            if (key := first_nonfinite(tensors)) is not None:
                raise CheckpointError(
                    "CKPT_NONFINITE", f"{name}/{file}: {key} is NaN or inf: resume from an older checkpoint"
                )
            file = f"{piece}.json"
            pieces[piece] = decode(files.get(file), tensors)
            _check_kind(piece, pieces[piece])
        except ValueError as error:
            raise damaged(Path(name, file), str(error)) from None
    return LoadedCheckpoint(name, manifest, pieces)


def _check_kind(piece: str, value: Any) -> None:
    """Raise ValueError for a piece of a run that is something else than its name says."""
    is_sound = piece not in _PIECES_OF_A_RUN or isinstance(value, dict)
    if is_sound and piece == "optimizer":
        state, groups = value.get("state"), value.get("param_groups")
        parts = [state, *state.values()] if isinstance(state, dict) else [None]
        parts += groups if isinstance(groups, list) else [None]
        is_sound = all(isinstance(part, dict) for part in parts)
    if not is_sound:
        raise ValueError(f"not the state of a run's {piece}")


def parse_manifest(data: bytes, commit: bytes, *, where: Path) -> dict[str, Any]:
    """Return the manifest if COMMIT vouches for it and every name and number in it is one that we write."""
    if commit != _commit_mark(data):
        raise damaged(where / MANIFEST, "its sha256 is not the one in COMMIT")
    try:
        manifest = parse_json(data)
    except ValueError as error:
        raise damaged(where / MANIFEST, str(error)) from None
    if not isinstance(manifest, dict):
        raise damaged(where / MANIFEST, "not an object")
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            "CKPT_FORMAT",
            f"{where / MANIFEST} has format {str(manifest.get('format'))[:20]}, this version reads {FORMAT}: "
            "use the version of accel_trainer that wrote it",
        )
    if not all(type(manifest.get(name)) is int and manifest[name] >= 0 for name in _POSITION_FIELDS):
        raise damaged(where / MANIFEST, "it has no position")
    match manifest.get("files"):
        case {**files} if all(_is_sound(name, entry) for name, entry in files.items()):
            return manifest
    raise damaged(where / MANIFEST, "its list of files is not sound")


def _is_sound(name: Any, entry: Any) -> bool:
    match entry:
        case {"bytes": int(size), "sha256": str(sha256)}:
            return size >= 0 and bool(_SHA256.fullmatch(sha256) and _FILE_NAME.fullmatch(name))
    return False


def _name_in(manifest: Mapping[str, Any]) -> str:
    return checkpoint_name(TrainState(**{name: manifest[name] for name in _POSITION_FIELDS}))


def read_manifest(path: Path) -> tuple[Files, dict[str, Any]]:
    """Return the bytes of COMMIT and the manifest, and the manifest parsed. Raises CheckpointError."""
    if path.is_symlink() or not path.is_dir():
        raise damaged(path, "not a directory")
    files = {name: _read(path / name, max_bytes=MAX_BYTES) for name in (COMMIT, MANIFEST)}
    manifest = parse_manifest(files[MANIFEST], files[COMMIT], where=path)
    if CHECKPOINT_NAME.fullmatch(path.name) and path.name != _name_in(manifest):
        raise damaged(path / MANIFEST, f"it belongs to {_name_in(manifest)}")
    return files, manifest


def _read(path: Path, *, max_bytes: int) -> bytes:
    try:
        return storage.read_file(path, max_bytes=max_bytes)
    except OSError as error:
        raise damaged(path, error.strerror or str(error)) from error


def damaged(path: Path, reason: str) -> CheckpointError:
    """Return the error for a file that is not what was saved."""
    return CheckpointError("CKPT_DAMAGED", f"{path}: {reason}: use another checkpoint")

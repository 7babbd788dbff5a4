"""A checkpoint on disk: a folder of files, a manifest with their hashes, and a commit mark.

A piece is the state of one part of the run, such as the model. The folder's name is the position,
so the order of checkpoints never depends on a clock:

    step-0000001200-epoch-00003/
        model.safetensors         a piece that is a flat state dict: any program can load it
        optimizer.json            any other piece: a skeleton ...
        optimizer.safetensors     ... and the tensors it refers to
        ema/r00003.safetensors    a piece whose tensors are shards: one file per process
        model.frozen.safetensors  what pieces share of the parameters that nothing changes ...
        model.frozen.json         ... and, by piece, all names in the order of its state dict
        manifest.json             position and metadata; size and SHA-256 of each piece's files
        COMMIT                    the SHA-256 of manifest.json, written last
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core import filesystem
from ..core.errors import CheckpointError
from ..core.json_files import MAX_BYTES, dump_json, parse_json
from ..core.logger import logger
from ..core.registry import Pieces
from ..core.train_state import TrainState, checkpoint_name
from ..distributed.collectives import SINGLE_PROCESS, Files, Peers
from ..distributed.machine import free_memory_bytes
from .serialization import EncodedPieces, Entry, decode, pack_tensors, unpack_tensors
from .sharded import (
    StoredSlice,
    damaged,
    damaged_if_unreadable,
    read_header,
    read_slices,
    stored_tensors,
    write_slices,
)

FORMAT = 1
MANIFEST = "manifest.json"
COMMIT = "COMMIT"
FROZEN = "model.frozen"
FROZEN_FILE = f"{FROZEN}.safetensors"
FROZEN_ORDER = f"{FROZEN}.json"
Manifest = dict[str, Any]
"""What a checkpoint says of itself, its run and its files, as JSON values."""

CHECKPOINT_NAME = re.compile(r"step-\d{10}-epoch-\d{5}")


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A verified checkpoint: its name, its manifest and its pieces, with tensors on the CPU.

    A sharded piece has a StoredTensor in place of each tensor. Their `slices` are verified when
    they are read.
    """

    name: str
    manifest: Manifest
    pieces: Pieces
    slices: Sequence[StoredSlice] = ()
    frozen: Collection[str] = ()
    """The names of the model's tensors in FROZEN_FILE."""

    @property
    def missing(self) -> list[str]:
        """The names of the model's tensors that are None: FROZEN_FILE was not read."""
        return [name for name, each in self.pieces.get("model", {}).items() if each is None]


def list_checkpoints(directory: Path) -> list[Path]:
    """Return the paths named like checkpoints, valid or not, in the order of their positions.

    Raises CheckpointError if the directory is a link, which may lead to another run's checkpoints.
    """
    if directory.is_symlink():
        raise CheckpointError(
            "CKPT_LINK", f"{directory} is a link: give the run that it points to, or move it away"
        )
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if CHECKPOINT_NAME.fullmatch(path.name))


def step_of(path: Path) -> int:
    """Return the optimizer step in the name of the checkpoint at `path`."""
    return int(path.name.split("-")[1])


def write_checkpoint(
    final: Path,
    pieces: EncodedPieces,
    *,
    header: Manifest,
    before_commit: Callable[[], None],
    check: Callable[[Path], None] = lambda folder: None,
    peers: Peers = SINGLE_PROCESS,
) -> None:
    """Write a checkpoint, which is complete and durable on return, and does not exist until then.

    `before_commit` runs on the main process just before the commit mark is written. `check` gets
    the folder of all files just before it gets its name, which it never does after an error.

    **Collective** over `peers`: the main process commits once all have written their files.
    """
    with ExitStack() as stack:

        def begin() -> str:
            if peers.process_index > 0:
                return ""
            temporary = stack.enter_context(filesystem.new_directory(final))
            for piece, encoded in pieces.items():
                if encoded.places is not None:
                    filesystem.disk.make_directory(temporary / piece)
            return temporary.name

        temporary = final.with_name(peers.agree(begin)[0])
        written = peers.agree(lambda: _write_pieces(temporary, pieces, peers.process_index))
        files = {name: entry for entries in written for name, entry in entries.items()}

        def commit() -> None:
            if peers.process_index > 0:
                return
            manifest = dump_json({"format": FORMAT, **header, "files": files}, indent=1)
            _write(temporary / MANIFEST, [manifest])
            before_commit()
            _write(temporary / COMMIT, [_commit_mark(manifest)])

        def publish() -> None:
            if peers.process_index == 0:
                filesystem.publish(temporary, final)

        peers.agree(commit)
        peers.agree(lambda: check(temporary))
        peers.agree(publish)


def _write_pieces(folder: Path, pieces: EncodedPieces, process_index: int) -> dict[str, Entry]:
    """Write this process's files and return their entries for the manifest."""
    files = {}
    for piece, encoded in pieces.items():
        if encoded.skeleton is not None and process_index == 0:
            files[f"{piece}.json"] = _write(folder / f"{piece}.json", [encoded.skeleton])
        if encoded.places is not None and encoded.tensors:
            name = f"{piece}/r{process_index:05d}.safetensors"
            files[name] = write_slices(folder / name, encoded)
        elif encoded.tensors and process_index == 0:
            name = f"{piece}.safetensors"
            write = _write_or_link if piece == FROZEN else _write
            files[name] = write(folder / name, pack_tensors(encoded.tensors))
    return files


def _write(path: Path, chunks: Sequence[filesystem.Chunk]) -> Entry:
    """Write a file and return its entry for the manifest."""
    filesystem.create_file(path, chunks)
    return entry_of(chunks)


def _write_or_link(path: Path, chunks: Sequence[filesystem.Chunk]) -> Entry:
    """Link a file that the newest checkpoint has, or else write it; return its manifest entry.

    If the newest one has it no longer as it was written, all that should have it get it again.
    """
    entry = entry_of(chunks)
    others = list_checkpoints(path.parent.parent)
    is_intact = bool(others) and _has(others[-1] / path.name, entry)
    if is_intact:
        with suppress(OSError):  # the file system cannot link it
            filesystem.disk.link(path, others[-1] / path.name)
            return entry
    filesystem.create_file(path, chunks)
    for other in () if is_intact else others:
        with suppress(CheckpointError, OSError):
            listed = read_manifest(other)[1]["files"].get(path.name)
            if listed == entry and not _has(other / path.name, entry):
                with suppress(FileNotFoundError):
                    filesystem.disk.remove(other / path.name)
                filesystem.disk.link(other / path.name, path)
                logger.warning("%s/%s was damaged: it is written again", other.name, path.name)
    return entry


def _has(path: Path, entry: Entry) -> bool:
    with suppress(OSError):
        return bool(filesystem.sha256_of(path) == entry["sha256"])
    return False


def entry_of(chunks: Sequence[filesystem.Chunk]) -> Entry:
    """Return the entry of a file in the manifest."""
    sha256 = hashlib.sha256()
    for chunk in chunks:
        sha256.update(chunk)
    return {"bytes": sum(map(len, chunks)), "sha256": sha256.hexdigest()}


def _commit_mark(manifest: filesystem.Chunk) -> bytes:
    return hashlib.sha256(manifest).hexdigest().encode() + b"\n"


def commit_mark(path: Path) -> bytes | None:
    """Return the bytes of COMMIT, which identify a checkpoint; None if it is not complete."""
    try:
        return filesystem.read_file(path / COMMIT, max_bytes=MAX_BYTES)
    except OSError:
        return None


def is_committed(path: Path) -> bool:
    """Whether COMMIT and the manifest at `path` are valid; the pieces are not read."""
    try:
        read_manifest(path)
    except CheckpointError:
        return False
    return True


def files_of(path: Path) -> set[str]:
    """Return the names of the files of a checkpoint. Raises CheckpointError if it is damaged."""
    files, manifest = read_manifest(path)
    return {*files, *manifest["files"]}


def read_files(path: Path, *, without: str = "") -> Files:
    """Return the verified bytes of a checkpoint's files by name, for `decode_files`.

    Only the headers of files with slices are read, and the file `without` is not. Raises
    CheckpointError naming a damaged file.
    """
    files, manifest = read_manifest(path)
    listed = manifest["files"]
    listed.pop(without, None)
    # Hashing takes most of the time, and leaves the interpreter to other threads.
    with ThreadPoolExecutor() as pool:
        read = pool.map(lambda name: read_listed_file(path / name, listed[name]), listed)
        return {**files, **dict(zip(listed, read, strict=True))}


def read_listed_file(path: Path, entry: Entry) -> filesystem.Chunk:
    """Return the bytes of a file, verified against its `entry` in the manifest.

    The size is checked first. Only the header of a file with slices is read. Raises CheckpointError
    if the file is damaged.
    """
    if "header_bytes" in entry:
        return read_header(path, entry)
    size = entry["bytes"]
    free = free_memory_bytes()
    if size > free:
        raise damaged(
            path, f"the manifest says {size} bytes, but only {free} bytes of memory are free"
        )
    with damaged_if_unreadable(path):
        data = filesystem.read_large_file(path, max_bytes=size)
    if hashlib.sha256(data).hexdigest() != entry["sha256"]:
        raise damaged(path, "its sha256 is not the one in the manifest")
    return data


def decode_files(files: Files, folder: Path) -> LoadedCheckpoint:
    """Return the checkpoint whose `files` this process or the main one read from `folder`.

    Its tensors are None if FROZEN_FILE was not read. Raises CheckpointError naming the piece
    that cannot be parsed.
    """
    manifest = parse_json(files[MANIFEST])
    checkpoint = _name_of(manifest)
    pieces: Pieces = {}
    slices: list[StoredSlice] = []
    for piece in dict.fromkeys(map(piece_of, manifest["files"])):
        try:
            pieces[piece], found = decode_piece(piece, files, folder)
        except (ArithmeticError, AttributeError, ValueError, LookupError, TypeError) as error:
            raise damaged(Path(checkpoint, piece), str(error)) from None
        slices += found
    own = unpack_tensors(files["model.safetensors"]) if "model.safetensors" in files else {}
    names = parse_json(files.get(FROZEN_ORDER, b"{}")).get("model", ())
    return LoadedCheckpoint(checkpoint, manifest, pieces, slices, {*names} - own.keys())


def piece_of(file: str) -> str:
    """Return the piece that a file of a checkpoint belongs to."""
    return re.split("[./]", file)[0]


def decode_piece(piece: str, files: Files, folder: Path) -> tuple[Any, list[StoredSlice]]:
    """Return a piece and its slices. Raises an error that depends on what is wrong with a file."""
    file = f"{piece}.safetensors"
    tensors = unpack_tensors(files[file]) if file in files else {}
    slices: list[StoredSlice] = []
    for name, data in files.items():
        if name.startswith(f"{piece}/"):
            slices += read_slices(folder / name, data)
    value = decode(files.get(f"{piece}.json"), {**tensors, **stored_tensors(slices)})
    if names := parse_json(files.get(FROZEN_ORDER, b"{}")).get(piece):
        shared: dict[str, Any] = dict.fromkeys(names)
        if FROZEN_FILE in files:
            shared = unpack_tensors(files[FROZEN_FILE])
        shared |= value
        value = {name: shared[name] for name in names}
    return value, slices


def read_manifest(path: Path) -> tuple[Files, Manifest]:
    """Return the bytes of COMMIT and manifest.json by name, and the parsed manifest.

    Raises CheckpointError if COMMIT does not have the manifest's hash, if the format is another, or
    if the folder has the name of another position.
    """
    if path.is_symlink() or not path.is_dir():
        raise damaged(path, "not a directory")
    files: Files = {name: _read(path / name) for name in (COMMIT, MANIFEST)}
    if files[COMMIT] != _commit_mark(files[MANIFEST]):
        raise damaged(path / MANIFEST, "its sha256 is not the one in COMMIT")
    manifest = parse_json(files[MANIFEST])
    if manifest["format"] != FORMAT:
        raise CheckpointError(
            "CKPT_FORMAT",
            f"{path / MANIFEST} has format {manifest['format']}, this version reads {FORMAT}: use "
            "the version of accel_trainer that wrote it",
        )
    name = _name_of(manifest)
    if CHECKPOINT_NAME.fullmatch(path.name) and path.name != name:
        raise damaged(path / MANIFEST, f"it belongs to {name}")
    return files, manifest


def _name_of(manifest: Manifest) -> str:
    return checkpoint_name(TrainState.from_dict(manifest))


def _read(path: Path) -> bytes:
    with damaged_if_unreadable(path):
        return filesystem.read_file(path, max_bytes=MAX_BYTES)

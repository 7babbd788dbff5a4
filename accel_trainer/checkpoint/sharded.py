"""A sharded piece: a folder with one file per process, of the slices of tensors that it holds.

    model/r00003.safetensors    the slices of process 3; process 0 also writes unsharded tensors

The format is that of torch.distributed.checkpoint, whose HuggingFaceStorageReader reads the folder.
The manifest has the SHA-256 of each file's header, and the header the SHA-256 of each slice: a
process verifies what it reads, and no more.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import recursively_apply
from torch import Tensor

from ..core import filesystem
from ..core.errors import DamagedError
from ..core.json_files import parse_json
from ..core.shards import as_shard, is_shard, local_part, place_in_whole
from ..distributed.collectives import Peers
from .serialization import DTYPES, Encoded, Entry, memory_of, pack_header, pack_tensors

# A key of the header's metadata. Of its values, torch reads only `saved_offsets`.
_PLACES = "DCP_SHARDING_INFO"


# --- writing ---


def local_slices(encoded: Encoded, process_index: int) -> Encoded:
    """Return what this process stores of a piece: all of it if none of its tensors is a shard."""
    if not any(map(is_shard, encoded.tensors.values())):
        return encoded
    tensors = {}
    places = {}
    for key, tensor in encoded.tensors.items():
        local = local_part(tensor.detach())
        offsets = place_in_whole(tensor)[0] if is_shard(tensor) else [0] * tensor.ndim
        if process_index == 0 or (is_shard(tensor) and local.numel()):
            tensors[key] = local
            places[key] = {"saved_offsets": offsets, "shape": list(tensor.shape)}
    return replace(encoded, tensors=tensors, places=places)


def write_slices(path: Path, encoded: Encoded) -> Entry:
    """Write this process's file durably, and return its entry for the manifest."""
    assert encoded.places is not None
    places = {
        key: {**place, "sha256": _sha256(memory_of(encoded.tensors[key]))}
        for key, place in encoded.places.items()
    }
    chunks = pack_tensors(encoded.tensors, {"format": "pt", _PLACES: json.dumps(places)})
    filesystem.create_file(path, chunks)
    filesystem.disk.sync_directory(path.parent)
    return {
        "bytes": sum(map(len, chunks)),
        "header_bytes": len(chunks[0]),
        "sha256": _sha256(chunks[0]),
    }


def _sha256(data: filesystem.Chunk) -> str:
    return hashlib.sha256(data).hexdigest()


# --- reading ---


@dataclass
class StoredSlice:
    """A slice of a tensor of shape `whole`.

    It begins at `offsets` in that tensor, and at byte `start` in the file. `kept` is its content if
    it was verified in advance; the first `read` returns that and drops it.
    """

    path: Path
    key: str
    dtype: torch.dtype
    shape: torch.Size
    whole: torch.Size
    offsets: Sequence[int]
    start: int
    sha256: str
    kept: Tensor | None = field(default=None, repr=False)

    @property
    def process_index(self) -> int:
        """The process that wrote it."""
        return int(self.path.stem[1:])

    def read(self) -> Tensor:
        """Return the verified content. Raises CheckpointError if it is damaged."""
        kept = self.kept
        self.kept = None
        if kept is not None:
            return kept
        data = _read(self.path, self.start, self.shape.numel() * self.dtype.itemsize)
        if _sha256(memory_of(data)) != self.sha256:
            raise damaged(self.path, f"the sha256 of {self.key} is not the one in its header")
        return data.view(self.dtype).reshape(self.shape)


def _box(bounds: Sequence[tuple[int, int]], origin: Sequence[int]) -> tuple[slice, ...]:
    """Return the index of the box between `bounds` in a tensor that begins at `origin`."""
    return tuple(
        slice(start - first, end - first)
        for (start, end), first in zip(bounds, origin, strict=True)
    )


@dataclass(frozen=True)
class StoredTensor:
    """A tensor whose slices are read, and verified, when they are needed."""

    shape: torch.Size
    dtype: torch.dtype
    slices: list[StoredSlice] = field(default_factory=list)

    def read(self, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Return the box of `shape` that begins at `offsets`, on the CPU.

        Raises CheckpointError if a slice is damaged.
        """
        result = torch.zeros(tuple(shape), dtype=self.dtype)
        for stored in self.slices:
            both = zip(offsets, shape, stored.offsets, stored.shape, strict=True)
            common = [(max(a, b), min(a + n, b + m)) for a, n, b, m in both]
            if all(start < end for start, end in common):
                result[_box(common, offsets)] = stored.read()[_box(common, stored.offsets)]
        return result


def read_header(path: Path, entry: Entry) -> bytes:
    """Return the header of a file, verified against its `entry` in the manifest.

    Raises CheckpointError if it is damaged.
    """
    header = _read(path, 0, entry["header_bytes"]).numpy().tobytes()
    if _sha256(header) != entry["sha256"]:
        raise damaged(path, "the sha256 of its header is not the one in the manifest")
    return header


def read_slices(path: Path, header: filesystem.Chunk) -> Iterator[StoredSlice]:
    """Yield the slices that the verified `header` of a file describes."""
    entries = parse_json(header[8:])
    places = parse_json(entries.pop("__metadata__")[_PLACES].encode())
    for key, entry in entries.items():
        place = places[key]
        yield StoredSlice(
            path,
            key,
            dtype=DTYPES[entry["dtype"]],
            shape=torch.Size(entry["shape"]),
            whole=torch.Size(place["shape"]),
            offsets=place["saved_offsets"],
            start=len(header) + entry["data_offsets"][0],
            sha256=place["sha256"],
        )


def stored_tensors(slices: Iterable[StoredSlice]) -> dict[str, StoredTensor]:
    """Return the tensors that the slices in all files of a piece make up."""
    tensors: dict[str, StoredTensor] = {}
    for each in slices:
        tensors.setdefault(each.key, StoredTensor(each.whole, each.dtype)).slices.append(each)
    return tensors


def keep_slices(slices: Iterable[StoredSlice], peers: Peers) -> None:
    """Verify and keep this process's part of the slices; the peers divide the files among them.

    If the same number of processes wrote them, these are the slices that this process needs. Raises
    CheckpointError if one is damaged.
    """
    for stored in slices:
        if stored.process_index % peers.num_processes == peers.process_index:
            stored.kept = stored.read()


def _read(path: Path, start: int, num_bytes: int) -> Tensor:
    """Return `num_bytes` of a regular file from `start` on, as uint8 [N].

    Raises CheckpointError if they cannot be read or the file ends before them.
    """
    data = torch.empty(num_bytes, dtype=torch.uint8)
    if path.parent.is_symlink():
        raise damaged(path.parent, "it is a link")
    with damaged_if_unreadable(path), filesystem.open_file(path) as file:
        file.seek(start)
        num_read: int = file.readinto(memory_of(data))  # type: ignore[attr-defined]  # missing in its stubs
    if num_read < num_bytes:
        raise damaged(path, f"it ends after {start + num_read} bytes")
    return data


# --- whole tensors and stored ones ---


def load_whole(stored: Any) -> Any:
    """Return the whole tensor of a StoredTensor, read now; return anything else as it is."""
    if not isinstance(stored, StoredTensor):
        return stored
    return stored.read([0] * len(stored.shape), stored.shape)


def load_all(value: Any) -> Any:
    """Return `value` with all its stored tensors read, and whole tensors in place of shards.

    **Collective** with shards.

    Each tensor is copied into new memory. The alignment of a matrix decides how a product with it
    rounds (torch 2.13), and a tensor in the memory of a file may begin anywhere.
    """

    def load(leaf: Any) -> Any:
        if is_shard(leaf):
            return leaf.full_tensor()
        return leaf.clone() if isinstance(leaf, Tensor) else load_whole(leaf)

    return recursively_apply(load, value, test_type=lambda leaf: True)


def load_like(mine: Tensor, stored: Tensor | StoredTensor) -> Tensor:
    """Return what this process needs of `stored`: if `mine` is a shard, a shard placed like it.

    No more of a StoredTensor is read. If `stored` is a shard already, it is returned.
    """
    if not is_shard(mine) or is_shard(stored):
        return load_whole(stored)  # type: ignore[no-any-return]  # a Tensor: `stored` is one
    offsets, shape = place_in_whole(mine)
    if isinstance(stored, StoredTensor):
        return as_shard(mine, stored.read(offsets, shape))
    box = tuple(slice(start, start + size) for start, size in zip(offsets, shape, strict=True))
    return as_shard(mine, stored[box])


def stream_tensors(tensors: Mapping[str, Tensor | StoredTensor]) -> Iterator[filesystem.Chunk]:
    """Yield the chunks of the file that safetensors' own `save` writes of whole `tensors`.

    Stored tensors are read one after the other.
    """
    dtypes = list(DTYPES.values())
    names = sorted(tensors, key=lambda name: (dtypes.index(tensors[name].dtype), name))
    header, order = pack_header({name: tensors[name] for name in names})
    yield header
    for name in order:
        yield memory_of(load_whole(tensors[name]))


@contextmanager
def damaged_if_unreadable(path: Path) -> Iterator[None]:
    """Raise DamagedError if the block fails with an OSError."""
    try:
        yield
    except OSError as error:
        raise damaged(path, error.strerror or str(error)) from error


def damaged(path: Path, reason: str) -> DamagedError:
    """Return the error for a file that is not as it was saved."""
    return DamagedError("CKPT_DAMAGED", f"{path}: {reason}: use another checkpoint")

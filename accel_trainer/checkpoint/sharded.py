"""A piece whose tensors are shards: a folder with a file per process, of the slices that the process holds.

    model/r00003.safetensors    the slices of process 3; process 0 also writes what is not sharded

The files are those of torch.distributed.checkpoint: its HuggingFaceStorageReader reads the folder.
The manifest has the SHA-256 of each file's header, and the header that of each slice: a process
verifies what it reads, and no more.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core import filesystem
from ..core.errors import CheckpointError
from ..core.shards import as_shard, is_shard, local_part, place_in_whole
from .serialization import (
    DTYPES,
    Encoded,
    memory_of,
    pack_header,
    pack_tensors,
    parse_json,
)

# in the header's metadata; of each slice torch reads only `saved_offsets`
_PLACES = "DCP_SHARDING_INFO"


# --- writing ---


def own_slices(encoded: Encoded, process_index: int) -> Encoded:
    """Return what this process stores of a piece; all of it, if no tensor of it is a shard."""
    if not any(is_shard(tensor) for tensor in encoded.tensors.values()):
        return encoded
    tensors, wholes = {}, {}
    for key, tensor in encoded.tensors.items():
        local = local_part(tensor.detach())
        offsets = place_in_whole(tensor)[0] if is_shard(tensor) else [0] * tensor.ndim
        if process_index == 0 or (is_shard(tensor) and local.numel()):
            tensors[key], wholes[key] = local, (list(tensor.shape), offsets)
    return replace(encoded, tensors=tensors, wholes=wholes)


def write_slices(path: Path, encoded: Encoded) -> dict[str, object]:
    """Write this process's file, durably, and return its entry for the manifest."""
    assert encoded.wholes is not None
    places = {
        key: {
            "saved_offsets": offsets,
            "shape": shape,
            "sha256": _sha256(memory_of(encoded.tensors[key])),
        }
        for key, (shape, offsets) in encoded.wholes.items()
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
    """A slice of a tensor of shape `whole`: it begins there at `offsets`, and in the file at byte `start`.

    `kept` is its content if it was verified in advance; the first `read` takes it.
    """

    path: Path
    key: str
    dtype: torch.dtype
    shape: torch.Size
    whole: torch.Size
    offsets: torch.Size
    start: int
    sha256: str
    kept: Tensor | None = field(default=None, repr=False)

    def read(self) -> Tensor:
        """Return the slice, verified. Raises CheckpointError."""
        if (kept := self.kept) is not None:
            self.kept = None
            return kept
        data = _read(self.path, self.start, self.shape.numel() * self.dtype.itemsize)
        if _sha256(memory_of(data)) != self.sha256:
            raise damaged(self.path, f"the sha256 of {self.key} is not the one in its header")
        return data.view(self.dtype).reshape(self.shape)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor whose slices are read, and verified, when they are needed."""

    shape: torch.Size
    dtype: torch.dtype
    slices: list[StoredSlice] = field(default_factory=list)

    def read(
        self, offsets: Sequence[int] | None = None, shape: Sequence[int] | None = None
    ) -> Tensor:
        """Return the part of `shape` that begins at `offsets`, on the CPU; None: the whole.

        Raises CheckpointError.
        """
        offsets, shape = offsets or [0] * len(self.shape), self.shape if shape is None else shape
        part = torch.zeros(tuple(shape), dtype=self.dtype)
        for stored in self.slices:
            both = list(zip(offsets, shape, stored.offsets, stored.shape, strict=True))
            starts = [max(mine, theirs) for mine, _, theirs, _ in both]
            sizes = [
                min(a + n, b + m) - start for (a, n, b, m), start in zip(both, starts, strict=True)
            ]
            if min(sizes, default=1) > 0:
                found = stored.read()[_box(starts, sizes, stored.offsets)]
                part[_box(starts, sizes, offsets)] = found
        return part


def read_header(path: Path, entry: Mapping[str, Any]) -> bytes:
    """Return the header of a file if it is that of its `entry` in the manifest.

    Raises CheckpointError.
    """
    header = _read(path, 0, entry["header_bytes"]).numpy().tobytes()
    if _sha256(header) != entry["sha256"]:
        raise damaged(path, "the sha256 of its header is not the one in the manifest")
    return header


def read_slices(path: Path, header: bytes) -> list[StoredSlice]:
    """Return the slices that the verified `header` of a file describes."""
    entries = parse_json(header[8:])
    places = parse_json(entries.pop("__metadata__")[_PLACES].encode())
    slices = []
    for key, entry in entries.items():
        numbers = (entry["shape"], places[key]["shape"], places[key]["saved_offsets"])
        shape, whole, offsets = map(torch.Size, numbers)
        dtype, start = DTYPES[entry["dtype"]], len(header) + entry["data_offsets"][0]
        slices.append(
            StoredSlice(path, key, dtype, shape, whole, offsets, start, places[key]["sha256"])
        )
    return slices


def stored_tensors(slices: Iterable[StoredSlice]) -> dict[str, StoredTensor]:
    """Return the tensors that `slices`, of all files of a piece, make."""
    tensors: dict[str, StoredTensor] = {}
    for each in slices:
        tensors.setdefault(each.key, StoredTensor(each.whole, each.dtype)).slices.append(each)
    return tensors


def keep_slices(slices: Iterable[StoredSlice], part: int, num_parts: int) -> None:
    """Verify and keep the slices of every `num_parts`-th file, from number `part` on.

    Raises CheckpointError.

    On as many processes as wrote them, process `part` then needs just these.
    """
    for stored in slices:
        if int(stored.path.stem[1:]) % num_parts == part:
            stored.kept = stored.read()


def _read(path: Path, start: int, num_bytes: int) -> Tensor:
    """Return bytes of a regular file as uint8 [N].

    Raises CheckpointError if it ends before them.
    """
    data = torch.empty(num_bytes, dtype=torch.uint8)
    if path.parent.is_symlink():
        raise damaged(path.parent, "it is a link")
    try:
        with filesystem.open_file(path) as file:
            file.seek(start)
            num_read: int = file.readinto(memory_of(data))  # type: ignore[attr-defined]  # missing in its stubs
    except OSError as error:
        raise damaged(path, error.strerror or str(error)) from error
    if num_read < num_bytes:
        raise damaged(path, f"it ends after {start + num_read} bytes")
    return data


# --- whole tensors and stored ones ---


def _box(
    starts: Sequence[int], sizes: Sequence[int], origin: Sequence[int] | None = None
) -> tuple[slice, ...]:
    """Return the index of the box of `sizes` that begins at `starts`, counted from `origin`."""
    begins = (
        starts if origin is None else [start - at for start, at in zip(starts, origin, strict=True)]
    )
    return tuple(slice(begin, begin + size) for begin, size in zip(begins, sizes, strict=True))


def load_whole(stored: Any) -> Any:
    """Return a stored tensor, read; anything else as it is."""
    return stored.read() if isinstance(stored, StoredTensor) else stored


def load_like(mine: Tensor, stored: Tensor | StoredTensor) -> Tensor:
    """Return what this process needs of `stored`, placed as `mine`; of a StoredTensor, only that is read.

    It may be this process's shard already.
    """
    if not is_shard(mine) or is_shard(stored):
        return load_whole(stored)  # type: ignore[no-any-return]  # a Tensor, as `stored` stands for one
    offsets, shape = place_in_whole(mine)
    local = (
        stored.read(offsets, shape)
        if isinstance(stored, StoredTensor)
        else stored[_box(offsets, shape)]
    )
    return as_shard(mine, local)


def stream_tensors(tensors: Mapping[str, Tensor | StoredTensor]) -> Iterator[filesystem.Chunk]:
    """Yield the file that safetensors' own `save` writes of whole `tensors`, reading one after the other."""
    dtypes = list(DTYPES.values())
    names = sorted(tensors, key=lambda name: (dtypes.index(tensors[name].dtype), name))
    header, order = pack_header({name: tensors[name] for name in names})
    yield header
    for name in order:
        yield memory_of(load_whole(tensors[name]).contiguous())


def damaged(path: Path, reason: str) -> CheckpointError:
    """Return the error for a file that is not what was saved."""
    return CheckpointError("CKPT_DAMAGED", f"{path}: {reason}: use another checkpoint")

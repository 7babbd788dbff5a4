"""State as data, without objects or code: plain values as JSON, and tensors as safetensors files.

The set of types is closed: anything else is an error when it is saved, with the path to it.
"""

from __future__ import annotations

import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.digest import bytes_of
from ..core.errors import CheckpointError
from ..core.filesystem import Chunk
from ..core.json_files import dump_json, parse_json

# In the order in which safetensors' own `save` writes them.
DTYPES = {
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F32": torch.float32,
    "U32": torch.uint32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U16": torch.uint16,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
Tensors = Mapping[str, Tensor]
"""Tensors by name, such as a flat state dict."""

Entry = Mapping[str, Any]
"""What a manifest says of a file: its size and its SHA-256."""

# A name in a file is looked up here: numpy knows types of any size.
_NUMPY = {np.dtype(each).name: each for each in (np.bool_, np.int64, np.float32, np.float64)}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_HEADER_SIZE = struct.Struct("<Q")


# --- tensors as a safetensors file ---


def pack_tensors(tensors: Tensors, metadata: Mapping[str, str] | None = None) -> list[Chunk]:
    """Return a file as chunks: a header, and the memory of contiguous CPU tensors.

    safetensors' own `save` copies everything twice while it holds the interpreter lock: a
    background save would pause training.
    """
    header, order = pack_header(tensors, metadata)
    return [header, *(memory_of(tensors[name]) for name in order)]


def pack_header(
    tensors: Mapping[str, Any], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, list[str]]:
    """Return the header of a file, and the names of tensors in the order of their bytes.

    Only `shape` and `dtype` of the tensors are read.
    """
    header: dict[str, Any] = {}
    # Wide types first: every tensor is aligned, and a reader may map the file.
    order = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    offset = 0
    for name in order:
        shape = tensors[name].shape
        dtype = tensors[name].dtype
        offsets = [offset, offset + shape.numel() * dtype.itemsize]
        header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": offsets}
        offset = offsets[1]
    described = {} if metadata is None else {"__metadata__": metadata}
    # The header lists the tensors in the order of the state dict.
    text = dump_json(described | {name: header[name] for name in tensors})
    text += b" " * (-len(text) % 8)
    return _HEADER_SIZE.pack(len(text)) + text, order


def memory_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a CPU tensor, which share its memory if that is contiguous."""
    return bytes_of(tensor).numpy().data


def unpack_tensors(data: Chunk) -> dict[str, Tensor]:
    """Return the tensors of a file, in the order of its header.

    They share a memoryview, because safetensors' own `load` spends as long on copying them as
    on reading the file.

    Raises ValueError for an invalid file.
    """
    memory = data if isinstance(data, memoryview) else memoryview(bytearray(data))
    try:
        header, first = _unpack_header(memory)
        dict(header.pop("__metadata__", {}))
        places = sorted(entry["data_offsets"] for entry in header.values())
        ends = [end for _, end in places]
        if [start for start, _ in places] + [len(memory) - first] != [0, *ends]:
            raise ValueError("its tensors do not fill it, or overlap")
        return {name: _view(memory, first, **entry) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, struct.error) as error:
        # A KeyError, for instance, comes from a dtype that torch lacks.
        raise ValueError(f"not a safetensors file ({error})") from None


def _view(
    memory: memoryview, first: int, *, dtype: str, shape: list[int], data_offsets: list[int]
) -> Tensor:
    start, end = data_offsets
    kind = DTYPES[dtype]
    count = math.prod(shape)
    if min(shape, default=0) < 0 or count * kind.itemsize != end - start:
        raise ValueError(f"{end - start} bytes for {shape} of {dtype}")
    if not count:
        return torch.empty(shape, dtype=kind)
    found = torch.frombuffer(memory, dtype=kind, count=count, offset=first + start).reshape(shape)
    return found if start % kind.itemsize == first % 8 == 0 else found.clone()


def unpack_metadata(data: Chunk) -> dict[str, str]:
    """Return the metadata of a file that `unpack_tensors` accepts."""
    return dict(_unpack_header(data)[0].get("__metadata__", {}))


def _unpack_header(data: Chunk) -> tuple[dict[str, Any], int]:
    """Return the header, and the byte at which the tensors begin."""
    first = 8 + _HEADER_SIZE.unpack_from(data)[0]
    return dict(parse_json(data[8:first])), first


def first_nonfinite(tensors: Tensors, masks: Collection[str] = ()) -> str | None:
    """Return the name of the first tensor that holds NaN or inf and is not in `masks`, or None.

    **Host sync** for tensors on a device.
    """
    for name, tensor in tensors.items():
        # The sum is 90 times as fast as isfinite, which is only needed where the sum overflows.
        if (
            name not in masks
            and (tensor.is_floating_point() or tensor.is_complex())
            and not tensor.sum().isfinite()
            and not tensor.isfinite().all()
        ):
            return name
    return None


# --- plain values as JSON and the tensors it refers to ---


@dataclass(frozen=True)
class Encoded:
    """A value as JSON, called the skeleton, and the tensors that it refers to by key.

    A flat, non-empty dict of tensors has no skeleton: any other program can load its file as a
    state dict. If the tensors are slices, `places` has the `shape` of each whole tensor and the
    `saved_offsets` at which the slice begins; None: the tensors are whole.
    """

    skeleton: bytes | None
    tensors: Tensors
    places: Mapping[str, Mapping[str, list[int]]] | None = None


EncodedPieces = Mapping[str, Encoded]
"""The pieces of a checkpoint by name."""


def encode(value: object, *, name: str) -> Encoded:
    """Split `value` into JSON and tensors, which are references, not copies.

    Raises CheckpointError with the path of a part that cannot be stored, such as
    `optimizer.state[0].foo`.
    """
    if (
        isinstance(value, dict)
        and value
        and all(type(key) is str and isinstance(each, Tensor) for key, each in value.items())
        and "__metadata__" not in value
    ):
        for key, tensor in value.items():
            _check_tensor(tensor, f"{name}.{key}")
        return Encoded(None, dict(value))
    tensors: dict[str, Tensor] = {}
    try:
        return Encoded(dump_json(_encode(value, name, tensors)), tensors)
    except (ValueError, RecursionError) as error:
        raise _unstorable(name, f"is too large or nested too deeply ({error})") from None


def decode(skeleton: Chunk | None, tensors: Mapping[str, Any]) -> Any:
    """Return the value that `encode` split."""
    if skeleton is None:
        return dict(tensors)
    return parse_json(skeleton, lambda value: _decode(value, tensors))


def _unstorable(path: str, reason: str) -> CheckpointError:
    return CheckpointError(
        "CKPT_TYPE", f"{path} {reason} and cannot be stored: use plain values and tensors"
    )


def _check_tensor(tensor: Tensor, path: str) -> None:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise _unstorable(path, "is not a dense tensor with data")
    if tensor.dtype not in _DTYPE_NAMES:
        raise _unstorable(path, f"is a tensor of {tensor.dtype}")


def is_numpy_number(value: object) -> bool:
    """Return whether a value is a number of numpy that can be stored."""
    return type(value) in _NUMPY.values()


def _encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Return the JSON for `value`, and add its tensors to `tensors`.

    Types must match exactly: a subclass would be loaded as its base class. `{"$tag": ...}` stands
    for what JSON lacks: tensors, tuples, NaN, numpy's numbers, counters and keys that are not text.
    """
    kind = type(value)
    if value is None or kind in (bool, str, int, float):
        is_json = kind is not float or math.isfinite(value)
        return value if is_json else {"$float": repr(value)}
    if is_numpy_number(value):
        number = float(value) if isinstance(value, np.floating) else int(value)
        return {"$numpy": [value.dtype.name, _encode(number, path, tensors)]}
    if kind in (list, tuple):
        items = [_encode(item, f"{path}[{index}]", tensors) for index, item in enumerate(value)]
        return items if kind is list else {"$tuple": items}
    if kind is Counter:  # of a MultiStepLR
        return {"$counter": _encode(dict(value), path, tensors)}
    if kind in (dict, OrderedDict):
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: _encode(item, f"{path}.{key}", tensors) for key, item in value.items()}
        pairs = []
        for pair in value.items():
            where = f"{path}[{pair[0]!r}]"
            pairs.append([_encode(each, where, tensors) for each in pair])
        return {"$dict": pairs}
    if isinstance(value, Tensor):
        _check_tensor(value, path)
        # Two paths can be equal, as in {"a.b": ..., "a": {"b": ...}}.
        while path in tensors:
            path += "'"
        tensors[path] = value
        return {"$tensor": path}
    raise _unstorable(path, f"is a {kind.__module__}.{kind.__qualname__}")


def _decode(value: dict[str, Any], tensors: Mapping[str, Any]) -> Any:
    """Return what a JSON object stands for; the objects inside it have been replaced before.

    Raises ValueError for an unknown tag.
    """
    match value:
        case {"$tensor": key}:
            return tensors[key]
        case {"$tuple": items}:
            return tuple(items)
        case {"$float": text}:
            return float(text)
        case {"$numpy": [name, int() | float() as number]}:
            return _NUMPY[name](number)
        case {"$dict": pairs}:
            return dict(pairs)
        case {"$counter": counts}:
            return Counter(counts)
        case _ if any(key.startswith("$") for key in value):
            raise ValueError(f"unknown tag {next(iter(value))[:20]!r}")
    return value

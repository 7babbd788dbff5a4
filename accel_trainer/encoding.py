"""State as data: plain Python values to a JSON skeleton and tensors, and back. No objects, no code.

The set of types is closed. What is not in it is refused when it is saved, with the path to it.
"""

from __future__ import annotations

import base64
import math
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .errors import CheckpointError
from .strict_json import dump_json, parse_json
from .tensor_file import DTYPES

_MAX_DEPTH = 32
_MAX_HEX_DIGITS = 4096
_NUMPY_DTYPE = re.compile(r"[<>|][biuf][1248]")


@dataclass(frozen=True)
class Encoded:
    """A value as a JSON skeleton and the tensors that it refers to by key.

    There is no skeleton for a flat, non-empty dict of tensors: its own keys say it all, and the file
    of tensors is one that any other program can load as a state dict.
    """

    skeleton: bytes | None
    tensors: Mapping[str, Tensor]


def encode(value: object, *, name: str) -> Encoded:
    """Split `value`; the tensors are references, not copies.

    Raises CheckpointError naming the path, such as `optimizer.state[0].foo`, of what cannot be stored.
    """
    if isinstance(value, dict) and value and all(_is_plain_item(*item) for item in value.items()):
        for key, tensor in value.items():
            _check_tensor(tensor, f"{name}.{key}")
        return Encoded(None, dict(value))
    tensors: dict[str, Tensor] = {}
    tree = _encode(value, name, tensors)
    try:
        return Encoded(dump_json(tree), tensors)
    except ValueError as error:
        raise _unstorable(name, f"is too large beside its tensors ({error})") from None


def decode(skeleton: bytes | None, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value that `encode` split. Raises ValueError for anything that it did not make."""
    if skeleton is None:
        return dict(tensors)
    tree, unused = parse_json(skeleton), dict(tensors)
    try:
        value = _decode(tree, unused)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:  # RecursionError is of the last
        raise ValueError(f"not a stored value ({type(error).__name__}: {str(error)[:80]})") from None
    if unused:
        raise ValueError(f"nothing refers to the stored tensor {next(iter(unused))[:80]!r}")
    return value


def _unstorable(path: str, reason: str) -> CheckpointError:
    return CheckpointError("CKPT_TYPE", f"{path} {reason} and cannot be stored: use plain values and tensors")


def _is_plain_item(key: object, value: object) -> bool:
    return type(key) is str and key != "__metadata__" and isinstance(value, Tensor)


def _check_tensor(tensor: Tensor, path: str) -> None:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise _unstorable(path, "is not a dense tensor with data")
    if tensor.dtype not in DTYPES.values():
        raise _unstorable(path, f"is a tensor of {tensor.dtype}")


def _encode(value: object, path: str, tensors: dict[str, Tensor], depth: int = 0) -> Any:
    """Return the JSON for `value`. Types must match exactly: a subclass would not come back.

    JSON has no tensors, tuples, bytes, NaN or integer keys: `{"$tag": ...}` stands for them.
    """
    if depth > _MAX_DEPTH:
        raise _unstorable(path[:80], "is nested too deeply")
    if type(value) is float and not math.isfinite(value):
        return {"$float": repr(value)}
    if value is None or type(value) in (bool, str, int, float):
        return value
    if type(value) is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        items = [_encode(item, f"{path}[{index}]", tensors, depth + 1) for index, item in enumerate(value)]
        return items if type(value) is list else {"$tuple": items}
    if isinstance(value, dict) and type(value) in (dict, OrderedDict):
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: _encode(item, f"{path}.{key}", tensors, depth + 1) for key, item in value.items()}
        pairs = [(f"{path}[{key!r}]", pair) for key, pair in zip(value, value.items(), strict=True)]
        return {"$dict": [[_encode(each, where, tensors, depth + 1) for each in pair] for where, pair in pairs]}
    if isinstance(value, Tensor):
        return {"$tensor": _keep(value, path, tensors)}
    if isinstance(value, np.ndarray | np.generic) and _NUMPY_DTYPE.fullmatch(value.dtype.str):
        data = torch.from_numpy(np.array(value, order="C").reshape(-1).view(np.uint8))
        shape = list(value.shape) if isinstance(value, np.ndarray) else None
        return {"$numpy": [_keep(data, path, tensors), value.dtype.str, shape]}
    raise _unstorable(path, f"is a {type(value).__module__}.{type(value).__qualname__}")


def _keep(tensor: Tensor, path: str, tensors: dict[str, Tensor]) -> str:
    """Store `tensor` under a unique key that reads like its path."""
    _check_tensor(tensor, path)
    while path in tensors:
        path += "'"
    tensors[path] = tensor
    return path


def _decode(value: Any, unused: dict[str, Tensor]) -> Any:
    """Return the Python value of a parsed JSON value. Whatever Python raises means a tag that we did not write."""
    if isinstance(value, list):
        return [_decode(item, unused) for item in value]
    if not isinstance(value, dict):
        return value
    if not any(key.startswith("$") for key in value):
        return {key: _decode(item, unused) for key, item in value.items()}
    ((tag, argument),) = value.items()
    return _decode_tag(tag, argument, unused)


def _decode_tag(tag: str, argument: Any, unused: dict[str, Tensor]) -> Any:
    match tag, argument:
        case "$tensor", str():
            return unused.pop(argument)
        case "$tuple", [*items]:
            return tuple(_decode(items, unused))
        case "$float", "nan" | "inf" | "-inf":
            return float(argument)
        case "$int", str() if len(argument) <= _MAX_HEX_DIGITS:  # of older versions
            return int(argument, 16)
        case "$bytes", str():
            return base64.b64decode(argument, validate=True)
        case "$dict", [*pairs]:
            return {_decode(key, unused): _decode(item, unused) for key, item in pairs}
        case "$numpy", [str(key), str(dtype), shape] if _NUMPY_DTYPE.fullmatch(dtype):
            array = unused.pop(key).numpy().view(np.dtype(dtype))
            return array.reshape(shape) if shape is not None else array.reshape(1)[0]
    raise ValueError(f"unknown tag {tag[:20]!r}")

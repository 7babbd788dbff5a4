"""State as data: plain Python values to a JSON skeleton and tensors, and back. No objects, no code.

The set of types is closed. What is not in it is refused when it is saved, with the path to it.
"""

from __future__ import annotations

import base64
import math
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .errors import CheckpointError
from .strict_json import MAX_DEPTH, dump_json, parse_json
from .tensor_file import DTYPES

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
    encoder = _Encoder()
    tree = encoder.encode(value, name, 0)
    try:
        return Encoded(dump_json(tree), encoder.tensors)
    except ValueError as error:
        raise _unstorable(name, f"is too large beside its tensors ({error})") from None


def decode(skeleton: bytes | None, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value that `encode` split. Raises ValueError for anything that it did not make."""
    if skeleton is None:
        return dict(tensors)
    tree = parse_json(skeleton)
    decoder = _Decoder(dict(tensors))
    try:
        value = decoder.decode(tree)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"not a stored value ({type(error).__name__}: {str(error)[:80]})") from None
    if decoder.unused:
        raise ValueError(f"nothing refers to the stored tensor {next(iter(decoder.unused))[:80]!r}")
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


@dataclass
class _Encoder:
    """JSON has no tensors, tuples, bytes, NaN or integer keys: `{"$tag": ...}` stands for them."""

    tensors: dict[str, Tensor] = field(default_factory=dict)

    def encode(self, value: object, path: str, depth: int) -> Any:
        """Return the JSON for `value`. Types must match exactly: a subclass would not come back."""
        if depth > MAX_DEPTH:
            raise _unstorable(path[:80], "is nested too deeply")
        if value is None or type(value) in (bool, str, int, float, bytes):
            return _encode_scalar(value, path)
        if type(value) is list:
            return [self.encode(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]
        if type(value) is tuple:
            return {"$tuple": self.encode(list(value), path, depth + 1)}
        if type(value) in (dict, OrderedDict):
            return self._encode_dict(dict(value), path, depth)  # type: ignore[call-overload]
        if isinstance(value, Tensor):
            return {"$tensor": self._keep(value, path)}
        if isinstance(value, np.ndarray | np.generic):
            return self._encode_numpy(value, path)
        raise _unstorable(path, f"is a {type(value).__module__}.{type(value).__qualname__}")

    def _encode_dict(self, value: dict[Any, object], path: str, depth: int) -> Any:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: self.encode(item, f"{path}.{key}", depth + 1) for key, item in value.items()}
        pairs = []
        for key, item in value.items():
            here = f"{path}[{key!r}]"
            pairs.append([self.encode(key, here, depth + 1), self.encode(item, here, depth + 1)])
        return {"$dict": pairs}

    def _encode_numpy(self, value: np.ndarray[Any, Any] | np.generic, path: str) -> Any:
        if not _NUMPY_DTYPE.fullmatch(value.dtype.str):
            raise _unstorable(path, f"has the numpy dtype {value.dtype}")
        data = torch.from_numpy(np.array(value, order="C").reshape(-1).view(np.uint8))
        shape = list(value.shape) if isinstance(value, np.ndarray) else None
        return {"$numpy": [self._keep(data, path), value.dtype.str, shape]}

    def _keep(self, tensor: Tensor, path: str) -> str:
        """Store `tensor` under a unique key that reads like its path."""
        _check_tensor(tensor, path)
        while path in self.tensors:
            path += "'"
        self.tensors[path] = tensor
        return path


def _encode_scalar(value: object, path: str) -> Any:
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": repr(value)}
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        if len(digits := hex(value)) > _MAX_HEX_DIGITS:
            raise _unstorable(path, f"is an integer of {value.bit_length()} bits")
        return {"$int": digits}
    return value


@dataclass
class _Decoder:
    """Turns tags back. Whatever Python raises on the way means that a tag is not one that we wrote."""

    unused: dict[str, Tensor]

    def decode(self, value: Any) -> Any:
        """Return the Python value of a parsed JSON value."""
        if isinstance(value, list):
            return [self.decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        if not any(key.startswith("$") for key in value):
            return {key: self.decode(item) for key, item in value.items()}
        ((tag, argument),) = value.items()
        return self._decode_tag(tag, argument)

    def _decode_tag(self, tag: str, argument: Any) -> Any:
        match tag, argument:
            case "$tensor", str():
                return self.unused.pop(argument)
            case "$tuple", [*items]:
                return tuple([self.decode(item) for item in items])
            case "$float", "nan" | "inf" | "-inf":
                return float(argument)
            case "$int", str() if len(argument) <= _MAX_HEX_DIGITS:
                return int(argument, 16)
            case "$bytes", str():
                return base64.b64decode(argument, validate=True)
            case "$dict", [*pairs]:
                result = {self.decode(key): self.decode(item) for key, item in pairs}
                if len(result) == len(pairs):
                    return result
            case "$numpy", [str(key), str(dtype), shape] if _NUMPY_DTYPE.fullmatch(dtype):
                array = self.unused.pop(key).numpy().view(np.dtype(dtype))
                return array.reshape(shape) if shape is not None else array.reshape(1)[0]
        raise ValueError(f"unknown tag {tag[:20]!r}")

"""`accel-trainer convert SOURCE --to FILE`: convert weights of an accelerate or plain torch checkpoint to safetensors.

SOURCE is a folder written by accelerate's `save_state` or `save_model`, a file of `torch.save`, or a safetensors file.
`--init-from FILE` then starts a run from the result. Pickles are read only with torch's restricted unpickler: a file
that needs more than tensors and plain values is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...checkpoint.serialization import DTYPES, pack_tensors, unpack_tensors
from ...core import filesystem
from ...core.errors import CheckpointError, ConfigError, OutputError
from ..parser import CommandParser

_SAFE_TORCH = (2, 10)  # older restricted unpicklers could be made to run code
_MAX_BYTES = 2**37
_WEIGHTS_KEYS = ("state_dict", "model_state_dict", "model", "module", "net", "weights")
_WRAPPERS = re.compile(r"^(?:module\.|_orig_mod\.)+")

_EXAMPLE = "example: accel-trainer convert old/checkpoint --to weights.safetensors"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the weights at a path as safetensors; return the exit code."""
    parser = CommandParser(prog="accel-trainer convert", description=__doc__, epilog=_EXAMPLE)
    parser.add_argument("source", type=Path, help="what to convert")
    parser.add_argument("--to", type=Path, required=True, help="the safetensors file to write; must not exist")
    parser.add_argument("--key", help="the key of the weights in a torch checkpoint, if it is not found automatically")
    options = parser.parse_args(argv)
    weights, found_in = read_weights(options.source, key=options.key)
    target: Path = options.to
    if target.exists() or not target.parent.is_dir():
        reason = "exists already" if target.exists() else "is in a folder that does not exist"
        raise OutputError("CONVERT", f"{target} {reason}: choose another --to")
    filesystem.write_file_atomic(target, b"".join(pack_tensors(weights)))
    num_bytes = target.stat().st_size
    print(f"{target}: {len(weights)} tensors, {num_bytes:,} bytes, from {found_in}")
    return 0


def read_weights(source: Path, *, key: str | None = None) -> tuple[dict[str, Tensor], str]:
    """Return the weights at `source`, by names without wrappers' prefixes, and where they were found.

    Raises:
        CheckpointError: there are none, or the file needs more than tensors and plain values.
    """
    file = _weights_file(source)
    if file.suffix == ".safetensors":
        found: Any = _read_safetensors(file)
        where = str(file)
    else:
        found, path = _choose(_read_torch(file), key, file)
        where = f"{file}{path}"
    names = {name: _WRAPPERS.sub("", name) for name in found}
    if len(set(names.values())) < len(names):
        raise _refused(source, "names are the same without `module.` and `_orig_mod.`", "rename them")
    if wrong := [name for name, value in found.items() if value.dtype not in DTYPES.values()]:
        raise _refused(source, f"{wrong[0]} is {found[wrong[0]].dtype}", "convert it to a float first")
    return {names[name]: value.detach().clone().contiguous() for name, value in found.items()}, where


def _weights_file(source: Path) -> Path:
    if source.is_file():
        return source
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (source / name).is_file():
            return source / name
    if any(source.glob("*.index.json")):
        raise _refused(source, "the weights are in shards", "join them with accelerate merge-weights")
    raise _refused(source, "no model.safetensors or pytorch_model.bin is there", "name the file itself")


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    try:
        return unpack_tensors(filesystem.read_file(file, max_bytes=_MAX_BYTES))
    except (OSError, ValueError) as error:
        raise _refused(file, str(error), "give an undamaged file") from error


def _read_torch(file: Path) -> Any:
    """Return the content of a `torch.save` file, with the unpickler restricted to tensors and plain values."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < _SAFE_TORCH:
        raise _refused(file, f"torch {torch.__version__} may run code in it", "use torch 2.10 or newer")
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many types for damaged or foreign files
        if type(error).__name__ == "UnpicklingError":
            needs = re.search(r"GLOBAL (\S+)", str(error))
            reason = f"it needs {needs[1] if needs else 'more than tensors and plain values'}"
            raise _refused(file, reason, "where you trust it, save only its state_dict") from error
        reason = f"it cannot be read ({type(error).__name__}: {str(error).splitlines()[0][:80]})"
        raise _refused(file, reason, "give a file of torch.save") from error


def _choose(found: Any, key: str | None, file: Path) -> tuple[dict[str, Tensor], str]:
    """Return the state dict in `found`, and the path to it."""
    if key is None and _is_weights(found):
        return dict(found), ""
    keys = [key] if key is not None else _WEIGHTS_KEYS
    for name in keys:
        if isinstance(found, Mapping) and _is_weights(found.get(name)):
            return dict(found[name]), f"[{name!r}]"
    has = ", ".join(str(name)[:40] for name in list(found)[:8]) if isinstance(found, Mapping) else type(found).__name__
    if key is not None:
        raise ConfigError("CONVERT", f"{file} has no weights under --key {key}, it has {has}: choose another")
    raise _refused(file, f"no weights are in it, but {has}", "say where with --key")


def _is_weights(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and len(value) > 0
        and all(isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in value.items())
    )


def _refused(path: Path, reason: str, fix: str) -> CheckpointError:
    return CheckpointError("CONVERT", f"{path}: {reason}: {fix}")

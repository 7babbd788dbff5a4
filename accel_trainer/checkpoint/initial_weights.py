"""Starts a new run with weights from elsewhere, and reports which were used."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
from torch import Tensor, nn

from ..core import filesystem
from ..core.errors import CheckpointError, ConfigError
from ..core.tensor_memory import make_dense
from .format import CHECKPOINT_NAME, decode_files, read_files
from .retention import load_checkpoint
from .serialization import unpack_tensors
from .sharded import load_whole
from .state_dict import check_weights, rename_weights

_MAX_WEIGHTS_BYTES = 2**36


def load_initial_weights(model: nn.Module, path: Path, *, skip: str | None) -> str:
    """Load the weights in a safetensors file, a checkpoint, or a run's newest one (the EMA if there is one).

    Return a line with names and a hash: that of the file, or that of a checkpoint's weights as a
    safetensors file, such as its export.

    Tensors whose name the regular expression `skip` finds are left out, of the file and of the
    model. So is the head, the module of the model's last parameter, if its size differs. All others
    must match, except that the file may be in another floating-point dtype, and may lack the second
    name of tied weights and how many batches a norm has counted.

    Raises:
        CheckpointError: there are none, or they do not fit.
        ConfigError: `skip` is no regular expression, or finds no name.
    """
    mine = model.state_dict()
    found, sha256 = _read_weights(path)
    theirs = _like(mine, rename_weights(model, found))
    names = [*theirs, *(name for name in mine if name not in theirs)]
    skipped = {name for name in names if re.search(skip, name)} if skip is not None else set()
    if skip is not None and not skipped:
        fact = (
            f"--init-skip {skip!r} matches none of the tensors ({', '.join([names[0], names[-1]])})"
        )
        raise ConfigError("INIT_FROM", f"{fact}: correct or remove it")
    head = list(dict(model.named_parameters()))[-1].rpartition(".")[0]
    in_head = [name for name in mine if name.rpartition(".")[0] == head and name in theirs]
    if any(mine[name].shape != theirs[name].shape for name in in_head):
        skipped.update(in_head)
    skipped.update(
        name for name in mine if name.endswith("num_batches_tracked") and name not in theirs
    )
    kept, expected = (
        {k: v for k, v in tensors.items() if k not in skipped} for tensors in (theirs, mine)
    )
    check_weights("model", expected, kept)
    make_dense(model)
    model.load_state_dict(kept, strict=False)
    parts = [f"{path} (sha256 {sha256}): {len(kept)} tensors loaded"]
    for word, tensors in (("skipped", theirs), ("new", mine)):
        if left := [name for name in tensors if name in skipped]:
            parts.append(
                f"{word}: {', '.join(left[:4])}"
                + (f" and {len(left) - 4} more" if left[4:] else "")
            )
    return "; ".join(parts)


def _like(mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return their weights in the floating-point dtypes of mine, and under each name of weights that are tied."""
    cast = {
        name: tensor.to(mine[name].dtype)
        if name in mine and mine[name].is_floating_point() and tensor.is_floating_point()
        else tensor
        for name, tensor in theirs.items()
    }
    places = {
        (mine[name].data_ptr(), mine[name].shape): name
        for name in mine
        if name in cast and mine[name].numel()
    }
    tied = {
        name: places.get((tensor.data_ptr(), tensor.shape))
        for name, tensor in mine.items()
        if name not in cast
    }
    return cast | {name: cast[other] for name, other in tied.items() if other is not None}


def _read_weights(path: Path) -> tuple[Mapping[str, Tensor], str]:
    if not path.exists():
        raise CheckpointError("INIT_FROM", f"--init-from {path} does not exist: check the path")
    try:
        if path.is_file():
            data = filesystem.read_file(path, max_bytes=_MAX_WEIGHTS_BYTES)
            return unpack_tensors(data), hashlib.sha256(data).hexdigest()
        is_run = (path / "checkpoints").is_dir()
        if not is_run and not CHECKPOINT_NAME.fullmatch(path.resolve().name):
            raise ValueError("a folder that is neither a run nor a checkpoint")
        loaded = (
            load_checkpoint(path / "checkpoints")
            if is_run
            else decode_files(read_files(path), path)
        )
        if loaded is None:
            raise CheckpointError(
                "CKPT_NOT_FOUND", f"--init-from {path} has no checkpoint: check the path"
            )
        stored = loaded.pieces.get("ema", loaded.pieces["model"])
        weights = {name: load_whole(tensor) for name, tensor in stored.items()}
    except (OSError, ValueError) as error:
        fix = "give a safetensors file, a checkpoint or a run"
        raise CheckpointError(
            "INIT_FROM", f"--init-from {path} cannot be read ({error}): {fix}"
        ) from error
    return weights, hashlib.sha256(safetensors.torch.save(weights)).hexdigest()

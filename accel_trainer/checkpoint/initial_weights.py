"""Starts a new run with given weights, and reports which of them were used."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn

from ..core import filesystem
from ..core.errors import CheckpointError, ConfigError, listed
from ..core.json_files import read_json_object
from ..core.tensor_memory import make_dense
from .format import CHECKPOINT_NAME
from .loading import load_checkpoint
from .serialization import Tensors, unpack_tensors
from .sharded import load_whole
from .state_dict import check_weights

_MAX_WEIGHTS_BYTES = 2**36
# How files of torch.save begin: a ZIP, or in older versions a pickle.
_TORCH_SAVES = (b"PK\x03\x04", b"\x80\x02")


def load_initial_weights(
    model: nn.Module, path: Path, *, skip: str | None, class_names: Sequence[str] = ()
) -> str:
    """Load the weights of a safetensors file, a checkpoint, or a run's newest checkpoint.

    A checkpoint's EMA is preferred. Returns a line with the names and a SHA-256, of the file or of
    the checkpoint's weights as a safetensors file, such as its export.

    Tensors whose name the regular expression `skip` finds are left out, in the file and in the
    model. So is the head, which is the module of the model's last parameter, if its size differs.
    If the weights are of a run with other `class_names`, its rows are matched by name instead, and
    rows of new classes stay as they are in the model.
    All other tensors must match, except that the file may have another floating-point dtype, and
    may lack the second name of tied weights and the number of batches that a norm has counted.

    Raises:
        CheckpointError: there are no weights, or they do not fit.
        ConfigError: `skip` is no regular expression, or finds no name, or nothing is left to load.
    """
    mine = model.state_dict()
    found, sha256 = _read_weights(path, model)
    theirs = _cast_and_tie(found, mine)
    names = list(theirs | mine)
    skipped = {name for name in names if skip is not None and re.search(skip, name)}
    if skip is not None and not skipped:
        raise ConfigError(
            "INIT_FROM",
            f"--init-skip {skip!r} matches none of the tensors ({names[0]}, {names[-1]}): "
            "correct or remove it",
        )
    head = list(dict(model.named_parameters()))[-1].rpartition(".")[0]
    in_head = [name for name in mine if name.rpartition(".")[0] == head and name in theirs]
    known = _class_names_of(path) if class_names else []
    for name in in_head:
        if theirs[name].shape == (len(known), *mine[name].shape[1:]):
            rows = dict(zip(known, theirs[name], strict=True))
            own = zip(class_names, mine[name], strict=False)
            theirs[name] = torch.stack([rows.get(each, row) for each, row in own])
    if any(mine[name].shape != theirs[name].shape for name in in_head):
        skipped.update(in_head)
    skipped.update(
        name for name in mine if name.endswith("num_batches_tracked") and name not in theirs
    )
    kept = {name: tensor for name, tensor in theirs.items() if name not in skipped}
    if not kept:
        raise ConfigError(
            "INIT_FROM",
            f"no tensor of {path} would be loaded: correct or remove --init-skip or --init-from",
        )
    expected = {name: tensor for name, tensor in mine.items() if name not in skipped}
    check_weights(f"model in {path}", expected, kept)
    make_dense(model)
    model.load_state_dict(kept, strict=False)
    parts = [f"{path} (sha256 {sha256}): {len(kept)} tensors loaded"]
    if known not in ([], class_names):
        kept_rows = listed(set(known).intersection(class_names))
        parts.append(f"of the head, the classes {kept_rows or '(none)'} are kept by name")
    for word, tensors in (("skipped", theirs), ("new", mine)):
        left = [name for name in tensors if name in skipped]
        if left:
            parts.append(f"{word}: {listed(left)}")
    return "; ".join(parts)


def _class_names_of(path: Path) -> list[str]:
    """Return the classes that the export at `path`, or of its run, names; none if it names none."""
    for folder in (path / "export", path.resolve().parent.parent / "export", path.parent):
        with suppress(OSError, ValueError, KeyError, TypeError):
            return list(read_json_object(folder / "config.json")["class_names"])
    return []


def _cast_and_tie(theirs: Tensors, mine: Tensors) -> dict[str, Tensor]:
    """Return `theirs` in the floating-point dtypes of `mine`, under all names of tied weights."""
    result = {}
    for name, tensor in theirs.items():
        target = mine.get(name, tensor)
        is_cast = tensor.is_floating_point() and target.is_floating_point()
        result[name] = tensor.to(target.dtype) if is_cast else tensor
    places = {
        (tensor.data_ptr(), tensor.shape): name
        for name, tensor in mine.items()
        if name in theirs and tensor.numel()
    }
    for name, tensor in mine.items():
        other = places.get((tensor.data_ptr(), tensor.shape))
        if name not in theirs and other is not None:
            result[name] = result[other]
    return result


def _read_weights(path: Path, model: nn.Module) -> tuple[Tensors, str]:
    """Return the weights at `path` and their SHA-256."""
    try:
        if not path.exists():
            raise CheckpointError("INIT_FROM", f"--init-from {path} does not exist: check the path")
        if path.is_file():
            data = filesystem.read_file(path, max_bytes=_MAX_WEIGHTS_BYTES)
            return _unpack(data), hashlib.sha256(data).hexdigest()
        folder = path.resolve()
        if (folder / "checkpoints").is_dir():
            loaded = load_checkpoint(folder / "checkpoints", model=model)
        elif CHECKPOINT_NAME.fullmatch(folder.name):
            loaded = load_checkpoint(folder.parent, folder.name, model=model)
        else:
            raise ValueError("a folder that is neither a run nor a checkpoint")
        if loaded is None:
            raise CheckpointError(
                "CKPT_NOT_FOUND", f"--init-from {path} has no checkpoint: check the path"
            )
        stored = loaded.pieces.get("ema") or loaded.pieces["model"]
        weights = {name: load_whole(tensor) for name, tensor in stored.items()}
    except (OSError, ValueError) as error:
        raise CheckpointError(
            "INIT_FROM",
            f"--init-from {path} cannot be read ({error}): give a safetensors file, a checkpoint "
            "or a run",
        ) from error
    return weights, hashlib.sha256(safetensors.torch.save(weights)).hexdigest()


def _unpack(data: bytes) -> dict[str, Tensor]:
    try:
        return unpack_tensors(data)
    except ValueError:
        if not data.startswith(_TORCH_SAVES):
            raise
        raise ValueError(
            "it is a torch.save file, which can run code: docs/models.md shows how to convert it "
            "in three lines"
        ) from None

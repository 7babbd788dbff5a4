"""Parameters that nothing changes: checkpoints have them in a file that the next one links."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from torch import nn

from ..core.digest import digest_of
from ..core.json_files import dump_json
from ..core.logger import logger
from ..core.registry import WEIGHTS
from .format import FROZEN, FROZEN_FILE, LoadedCheckpoint, entry_of
from .serialization import Encoded, EncodedPieces, Tensors, pack_tensors
from .sharded import damaged


def digests_of(weights: Tensors, names: Collection[str]) -> dict[str, str]:
    """Return digests of the `weights` that `names` lists. **Host sync.**"""
    # The average may share their memory: reading it here, and not a copy, would end that.
    return {name: digest_of(weights[name].clone()) for name in weights if name in names}


def split_frozen(pieces: EncodedPieces, frozen: Mapping[str, str]) -> dict[str, Encoded]:
    """Move tensors of the model, whose digests are given, and their equals to a piece of their own.

    Their equals are those of the same name in the pieces of `WEIGHTS`.

    `pieces` are copies in host memory. The skeleton of the new one has the names of all tensors of
    those that now lack some, in the order of the state dict.
    """
    model = pieces["model"].tensors
    shared = {name: model[name] for name in model if name in frozen}
    split = dict(pieces)
    order = {}
    for piece in WEIGHTS:
        encoded = pieces.get(piece)
        if encoded is None or encoded.places is not None:
            continue
        tensors = encoded.tensors
        digests = digests_of(tensors, frozen)
        own = {name: tensors[name] for name in tensors if digests.get(name, "") != frozen.get(name)}
        if len(own) < len(tensors):
            order[piece] = [*tensors]
            split[piece] = replace(encoded, tensors=own)
            split[FROZEN] = Encoded(dump_json(order), shared)
    return split


def complete_frozen(checkpoint: LoadedCheckpoint, model: nn.Module | None) -> None:
    """Take frozen parameters that could not be read from `model`, if it has the same.

    Raises DamagedError if it has not, or if there is no model.
    """
    if not (missing := checkpoint.missing):
        return
    known = {} if model is None else model.state_dict()
    found = {name: known[name].cpu().contiguous() for name in missing if name in known}
    path = Path(checkpoint.name, FROZEN_FILE)
    if entry_of(pack_tensors(found)) != checkpoint.manifest["files"][FROZEN_FILE]:
        raise damaged(path, "the model has other values than its frozen parameters had")
    logger.warning("%s is damaged: using the frozen parameters of the model", path)
    for piece in checkpoint.pieces.values():
        piece |= {name: found[name] for name in found if piece.get(name, "") is None}

"""Parameters that nothing changes: checkpoints have them in a file that the next one links."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from torch import Tensor

from ..core.digest import digest_of
from ..core.json_files import dump_json
from ..core.registry import WEIGHTS
from .format import FROZEN
from .serialization import Encoded


def marks_of(weights: Mapping[str, Tensor], names: Collection[str]) -> dict[str, str]:
    """Return digests of the `weights` that `names` lists. **Host sync.**"""
    # The average may share their memory: reading it here, and not a copy, would end that.
    return {name: digest_of(weights[name].clone()) for name in weights if name in names}


def split_frozen(pieces: Mapping[str, Encoded], frozen: Mapping[str, str]) -> dict[str, Encoded]:
    """Move tensors of the model, whose marks are given, and their equals to a piece of their own.

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
        marks = marks_of(tensors, frozen)
        own = {name: tensors[name] for name in tensors if marks.get(name, "") != frozen.get(name)}
        if len(own) < len(tensors):
            order[piece] = [*tensors]
            split[piece] = replace(encoded, tensors=own)
            split[FROZEN] = Encoded(dump_json(order), shared)
    return split

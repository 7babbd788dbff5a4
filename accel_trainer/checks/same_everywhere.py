"""Checks that processes hold the same of what a checkpoint stores once: the main process's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from ..core.digest import digest_of, flatten
from ..core.registry import WEIGHTS, Pieces
from ..core.shards import is_shard
from ..distributed.collectives import differing_lines
from .subject import inexact

_ONE_VALUE = (
    "a checkpoint stores one value: compute it from values that are the same on all processes, "
    "reduce it over them, or make it a buffer of the model; what only the main process knows "
    "belongs in trainer.metadata"
)
# The length of the history, which only the main process writes.
_HISTORY = "callbacks.MetricLogger.history_bytes"


def check_same_parts(pieces: Pieces, accelerator: Accelerator) -> None:
    """Check what the parts of a checkpoint store, but for weights and what goes with a parameter.

    **Collective. Host sync** with several processes, for the tensors among them.

    Raises CheckpointError with the first value that differs between processes.
    """
    if accelerator.num_processes == 1:
        return
    leaves = flatten(dict(_small_parts(pieces)))
    leaves.pop(_HISTORY, None)
    lines = sorted(lines_of(leaves))
    # Eight bytes are exchanged, and all lines only if these differ.
    mine = torch.tensor([int(digest_of(lines), 16) - 2**63], device=accelerator.device)
    if len(accelerator.gather(mine).unique()) > 1:
        check_same_lines(lines, accelerator)


def _small_parts(pieces: Pieces) -> Iterator[tuple[str, Any]]:
    for name, piece in pieces.items():
        if name == "trainer":
            # Only the main process logs.
            yield from ((key, each) for key, each in piece.items() if key != "log")
        elif name.partition("-")[0] == "optimizer":
            yield name, {key: each for key, each in piece.items() if key != "state"}
        elif name not in (*WEIGHTS, "buffers"):
            yield name, piece


def check_same_lines(lines: list[str], accelerator: Accelerator, fix: str = _ONE_VALUE) -> None:
    """Raise CheckpointError if the `lines` of some process differ; `fix` says how they will not.

    **Collective. Host sync.**
    """
    for process, found in enumerate(differing_lines("\n".join(lines), accelerator)):
        if found:
            raise inexact(f"processes differ after a step (process {process}: {found}): {fix}")


def lines_of(state: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each value in `state` that is no shard. **Host sync** for tensors."""
    for path, leaf in flatten(state).items():
        if not is_shard(leaf):
            yield f"{path} {f'bits {digest_of(leaf)}' if isinstance(leaf, Tensor) else repr(leaf)}"

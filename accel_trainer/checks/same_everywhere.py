"""Checks that processes hold the same of what a checkpoint stores once: the main process's."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from accelerate import Accelerator
from torch import Tensor, nn

from ..core.digest import digest_of, flatten
from ..core.registry import WEIGHTS, Pieces
from ..core.shards import is_shard
from ..core.tensor_memory import quick_digest
from ..distributed.collectives import differing_lines, gather_numbers
from .subject import inexact

_ONE_VALUE = (
    "a checkpoint stores one value: compute it from the same values on all processes, reduce it "
    "over them, or make it a buffer; what only the main process knows belongs in trainer.metadata"
)
# Weights, what goes with a parameter, and what only the main process logs and writes.
_LEFT_OUT = re.compile(
    rf"({'|'.join(WEIGHTS)}|buffers|optimizer(-\w+)?\.state|trainer\.log"
    r"|trainer\.callbacks\.MetricLogger\.history_bytes)(?=[.[]|$)"
)
_ALIKE = (
    "a checkpoint stores one value: prepare each model, compute a state from the same values on "
    "all processes or reduce it, and average parameters, not buffers (or use SyncBatchNorm)"
)


def check_same_parts(pieces: Pieces, accelerator: Accelerator) -> None:
    """Check what the parts of a checkpoint store, but for weights and what goes with a parameter.

    **Collective. Host sync** with several processes, for the tensors among them.

    Raises CheckpointError with the first value that differs between processes.
    """
    check_same_lines(_lines_of_parts(pieces), accelerator)


def _lines_of_parts(pieces: Pieces) -> Iterator[str]:
    leaves = sorted(flatten(pieces).items())
    yield from lines_of({path: leaf for path, leaf in leaves if not _LEFT_OUT.match(path)})


def check_same_states(states: Mapping[str, Any], pieces: Pieces, accelerator: Accelerator) -> None:
    """Check the parameters of modules, and of other states the pieces that store them.

    **Collective. Host sync** with several processes. A module's buffers may differ by process.

    Raises CheckpointError with the first value that differs between processes.
    """
    check_same_lines(_lines_of_states(states, pieces), accelerator, _ALIKE)


def _lines_of_states(states: Mapping[str, Any], pieces: Pieces) -> Iterator[str]:
    for name, state in states.items():
        if not isinstance(state, nn.Module):
            yield from lines_of({name: pieces.get(name)})
            continue
        for path, each in state.named_parameters(prefix=name):
            if not is_shard(each):
                yield f"{path} bits {quick_digest(each)}"


def check_same_lines(lines: Iterable[str], accelerator: Accelerator, fix: str = _ONE_VALUE) -> None:
    """Raise CheckpointError if the `lines` of some process differ; `fix` says how they will not.

    **Collective. Host sync.** A single process asks for no line.
    """
    if accelerator.num_processes == 1:
        return
    text = "\n".join(lines)
    # Eight bytes are exchanged, and all lines only if these differ.
    if len({*gather_numbers(int(digest_of(text), 16) - 2**63, accelerator)}) == 1:
        return
    for process, found in differing_lines(text, accelerator).items():
        raise inexact(f"processes differ after a step (process {process}: {found}): {fix}")


def lines_of(state: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each value in `state` that is no shard. **Host sync** for tensors."""
    for path, leaf in flatten(state).items():
        if not is_shard(leaf):
            yield f"{path} {f'bits {digest_of(leaf)}' if isinstance(leaf, Tensor) else repr(leaf)}"

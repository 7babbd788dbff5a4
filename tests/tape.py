"""What a CUDA graph does, on any device: operations are noted as torch runs them, and run anew on the same memory.

What the host computed for them stays as it was, as in a graph, and the host can read no value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from accel_trainer.capture import StepValues


class Tape(TorchDispatchMode):
    """Notes operations, and what was in the memory that they write."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, Any]] = []
        self._before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if operation is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        for argument, value in zip(operation._schema.arguments, args, strict=False):
            # The schema of batch norm does not say that it writes its running statistics.
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_written or argument.name in ("running_mean", "running_var"):
                self._before += [(tensor, tensor.clone()) for tensor in tree_leaves(value) if tensor is not None]
        result = operation(*args, **kwargs)
        self._calls.append((operation, args, kwargs, result))
        return result

    def rewind(self) -> None:
        """Undo what was done while it was noted."""
        for tensor, value in reversed(self._before):
            tensor.copy_(value)
        self._before = []

    def play(self) -> None:
        """Do it all again, reading and leaving tensors where they were."""
        for operation, args, kwargs, result in self._calls:
            again = operation(*args, **kwargs)
            for mine, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(mine, Tensor) and mine.data_ptr() != new.data_ptr():
                    mine.copy_(new)


@torch.no_grad()
def record(work: Callable[[], StepValues]) -> tuple[Callable[[], None], StepValues]:
    """Record `work` as `StepCapture` wants it: on a tape, and not done."""
    tape = Tape()
    try:
        with tape, torch.enable_grad():
            values = work()
    finally:
        tape.rewind()
    return torch.no_grad()(tape.play), values

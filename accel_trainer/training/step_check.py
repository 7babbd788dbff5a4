"""`--check-every`: some steps are computed twice before their update, and the bits are compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..core.errors import ExitCode, ProcessError
from ..core.tensor_memory import sum_of_bits
from ..core.types import StepBatch
from ..core.user_code import PeerFailed

if TYPE_CHECKING:
    from .step import OptimizerStep

_REPLACE = "test or replace the device, then start the same command again"
_REPEAT = (
    "and a third time with others again: keep --runtime.deterministic, let forwards draw from "
    "torch's generators and change only buffers, or leave out --check-every; if they do, "
    f"{_REPLACE}"
)


def repeated_for_check(
    number: int, step: OptimizerStep, model: nn.Module, batch: StepBatch, *, every: int | None
) -> Iterator[StepBatch]:
    """Yield the `batch` of step `number` each time that it is to be computed: once.

    After `every` steps it is twice, and a third time if some process then got other bits: all
    randomness of a forward is seeded by the step and the micro-batch, so a step repeats itself.
    **Collective. Host sync** then; the micro-batches are kept, since a loader may give each once.

    Raises:
        ProcessError: this process got other bits. The third time, torch has refused operations
            without a deterministic kernel (RuntimeError).
        PeerFailed: another process got other bits.
    """
    if every is None or number % every:
        yield batch
        return
    step.guard.flush()
    batch = batch._replace(micro_batches=[*batch.micro_batches])
    first = yield from _attempt(model, batch)
    step.buffers.restore()
    second = yield from _attempt(model, batch)
    accelerator = step.strategy.accelerator
    if not accelerator.reduce(torch.tensor(float(first != second), device=accelerator.device)):
        return
    step.buffers.restore()
    torch.use_deterministic_algorithms(True)
    third = yield from _attempt(model, batch)
    if first == second:
        raise PeerFailed("another process did not repeat its bits")
    name = next(name for name in first if first[name] != second[name])
    place = f"{accelerator.device} of process {accelerator.process_index}"
    raise ProcessError(
        "DEVICE",
        f"step {number} is not applied, since {place} repeated {name} with other bits: "
        + (_REPLACE if third in (first, second) else _REPEAT),
        accelerator.process_index,
        ExitCode.INTERNAL,
    )


def _attempt(model: nn.Module, batch: StepBatch) -> Generator[StepBatch, None, Counter[str]]:
    """Yield the step to compute; return sums of bits that show what was computed. **Host sync.**

    They are those of the gradients, before these are averaged over the processes, in the order of
    backward, and then of the buffers and parameters.
    """
    marks: Counter[str] = Counter()

    def mark(name: str, parameter: Any) -> None:
        marks[name] += int(sum_of_bits(parameter.grad))

    model.zero_grad()
    with ExitStack() as hooks:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                hook = partial(mark, f"the gradient of {name}")
                hooks.callback(parameter.register_post_accumulate_grad_hook(hook).remove)
        yield batch
    for name, tensor in (*model.named_buffers(), *model.named_parameters()):
        marks[name] = int(sum_of_bits(tensor))
    return marks

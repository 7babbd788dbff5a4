"""`--check-every`: the gradients of some steps are computed twice, and the bits are compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from torch import nn

from ...core.errors import ExitCode, PeerFailed, ProcessError
from ...core.tensor_memory import sum_of_bits
from ...distributed.collectives import gather_numbers

T = TypeVar("T")

_REPLACE = "test or replace the device, then start the same command again"
_REPEAT = (
    "and a third time with others again: keep --runtime.deterministic, let forwards draw from "
    "torch's generators and change only buffers, or leave out --check-every; if they do, "
    f"{_REPLACE}"
)


def check_repeats(
    run: Callable[[], T],
    repeat: Callable[[], T],
    restart: Callable[[], None],
    *,
    number: int,
    model: nn.Module,
    accelerator: Accelerator,
) -> T:
    """`run` the micro-batches of step `number`, `repeat` that, and return what `repeat` did.

    **Collective. Host sync.** All randomness of a forward is seeded by the step and the
    micro-batch, so a step repeats itself. If some process got other bits, it runs a third time.
    `restart` is called in between. `repeat` does the same as `run`, and observers may see it.

    Raises:
        ProcessError: this process got other bits. The third time, torch has refused operations
            without a deterministic kernel (RuntimeError).
        PeerFailed: another process got other bits.
    """
    _, first = _run_marked(run, model)
    restart()
    result, second = _run_marked(repeat, model)
    if not any(gather_numbers(int(first != second), accelerator)):
        return result
    restart()
    torch.use_deterministic_algorithms(True)
    _, third = _run_marked(run, model)
    if first == second:
        raise PeerFailed("another process did not repeat its bits")
    name = next(name for name in first if first[name] != second[name])
    place = f"{accelerator.device} of process {accelerator.process_index}"
    raise ProcessError(
        "DEVICE",
        f"step {number} is not applied, since {place} repeated {name} with different bits: "
        + (_REPLACE if third in (first, second) else _REPEAT),
        accelerator.process_index,
        ExitCode.INTERNAL,
    )


def _run_marked(run: Callable[[], T], model: nn.Module) -> tuple[T, Counter[str]]:
    """Return also sums of bits that show what was computed. **Host sync.**

    They are those of the gradients, before these are averaged over the processes, in the order of
    backward, and then of the buffers and parameters.
    """
    sums = Counter[str]()

    def add(name: str, parameter: Any) -> None:
        sums[name] += int(sum_of_bits(parameter.grad))

    model.zero_grad()
    with ExitStack() as hooks:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                hook = partial(add, f"the gradient of {name}")
                hooks.callback(parameter.register_post_accumulate_grad_hook(hook).remove)
        result = run()
    for name, tensor in (*model.named_buffers(), *model.named_parameters()):
        sums[name] = int(sum_of_bits(tensor))
    return result, sums

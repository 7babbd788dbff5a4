"""Checks of what a task returns, with one line that says what is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from torch import Tensor

from ..core.errors import ConfigError
from ..core.types import NO_NUMBERS, StepOutput
from .metrics import describe_tensor


def check_output(output: Any, num_samples: int, *, has_graph: bool) -> None:
    """Raise ConfigError unless `output` has a tensor of `num_samples` losses.

    In training they must have a graph. Looks at types and shapes only: no host sync.
    """
    if not isinstance(output, StepOutput):
        _refuse(output, "return StepOutput(losses) of accel_trainer")
    losses = output.losses
    if not isinstance(losses, Tensor) or (has_graph and not losses.requires_grad):
        _refuse(losses, "return losses with their graph: without detach(), item() or float()")
    shape = (num_samples,) if output.is_per_sample else ()
    if losses.shape != shape:
        fix = "return one for each sample, [B], as reduction='none' does, or, if the model computes"
        mean = "StepOutput.from_mean(loss, num_items=len(batch))"
        fact = f"the losses are {describe_tensor(losses)} for {num_samples} samples"
        raise ConfigError("SHAPES", f"{fact}: {fix} only their mean, {mean}")
    num_items = output.num_items
    if num_items is not None and getattr(num_items, "shape", None) != shape:
        fact = f"num_items are {describe_tensor(num_items)} for {num_samples} samples"
        raise ConfigError("SHAPES", f"{fact}: return the number of items of each sample, [B]")
    if output.numbers is not NO_NUMBERS:
        _check_numbers(output.numbers, num_samples)


def _check_numbers(numbers: Any, num_samples: int) -> None:
    if not isinstance(numbers, Mapping):
        _refuse(numbers, "return the numbers as a dict")
    for name, value in numbers.items():
        if not isinstance(value, Tensor) or value.shape != (num_samples,):
            fact = f"the task returned {describe_tensor(value)} as the number {name!r}"
            raise ConfigError(
                "SHAPES", f"{fact} of {num_samples} samples: return a tensor with one for each, [B]"
            )


def _refuse(value: Any, fix: str) -> NoReturn:
    raise ConfigError("TASK", f"the task returned {describe_tensor(value)}: {fix}")

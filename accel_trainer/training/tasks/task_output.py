"""Checks of what a task returns, with one line that says what is wrong."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor

from ...core.errors import ConfigError
from ...core.history import check_name
from ...core.types import StepOutput
from ...core.wording import counted, describe_tensor


def check_output(output: Any, num_samples: int, *, has_graph: bool) -> None:
    """Raise ConfigError unless `output` has a tensor of `num_samples` losses.

    In training they must have a graph. Looks at types and shapes only: no host sync.
    """
    if not isinstance(output, StepOutput):
        _refuse(output, "return StepOutput(losses) of accel_trainer")
    losses = output.losses
    if not isinstance(losses, Tensor):
        _refuse(losses, "return losses as a tensor: without item() or float()")
    if has_graph and not losses.requires_grad:
        _refuse(losses, "return losses with their graph: without detach() or no_grad(), as floats")
    _check_sizes(output, num_samples)
    if not hasattr(output.numbers, "items"):
        _refuse(output.numbers, "return the numbers as a dict by their names")
    for name, value in output.numbers.items():
        if not isinstance(name, str):
            _refuse(output.numbers, "return the numbers as a dict by their names")
        check_name(name, "the task")
        if not _has_shape(value, num_samples):
            raise ConfigError(
                "SHAPES",
                f"the task returned {describe_tensor(value)} as the number {name!r} of "
                f"{counted(num_samples, 'sample')}: return a tensor with one for each, [B]",
            )


def _check_sizes(output: StepOutput, num_samples: int) -> None:
    losses, num_items = output.losses, output.num_items
    if output.reduction != "mean" and (output.reduction != "sum" or num_items is not None):
        raise ConfigError(
            "TASK",
            f"the task returned reduction={output.reduction!r}: return mean, or sum for losses "
            "[B] without num_items",
        )
    if not output.is_per_sample:
        if not _has_shape(num_items) or losses.ndim:
            raise ConfigError(
                "SHAPES",
                f"StepOutput.from_mean made a loss {describe_tensor(losses)} and num_items "
                f"{describe_tensor(num_items)}: "
                "give the mean loss [] of the micro-batch, and one number",
            )
    elif losses.shape != (num_samples,):
        raise ConfigError(
            "SHAPES",
            f"the losses are {describe_tensor(losses)} for {counted(num_samples, 'sample')}: "
            "return one for each sample, [B], as reduction='none' does, or, if the model computes "
            "only their mean, StepOutput.from_mean(loss, num_items=len(batch))",
        )
    elif num_items is not None and not _has_shape(num_items, num_samples):
        raise ConfigError(
            "SHAPES",
            f"num_items are {describe_tensor(num_items)} for {counted(num_samples, 'sample')}: "
            "return a tensor with the number of items of each sample, [B]",
        )


def _has_shape(value: Any, *shape: int) -> bool:
    return isinstance(value, Tensor) and value.shape == shape


def _refuse(value: Any, fix: str) -> NoReturn:
    raise ConfigError("TASK", f"the task returned {describe_tensor(value)}: {fix}")

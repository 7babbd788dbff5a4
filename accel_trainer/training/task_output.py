"""Checks of what a task returns, with one line that says what is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from torch import Tensor

from ..core.errors import ConfigError
from ..core.types import NO_SUMS
from .metrics import describe_tensor


def check_step_output(output: Any) -> None:
    """Raise ConfigError unless `output` has single numbers, and a loss with its graph.

    Looks at types and shapes only: no host sync.
    """
    if not hasattr(output, "loss_sum"):
        _refuse(output, "return StepOutput(loss_sum) of accel_trainer from train_step")
    loss_sum = output.loss_sum
    if not isinstance(loss_sum, Tensor) or not loss_sum.requires_grad:
        _refuse(loss_sum, "return loss_sum with its graph: without detach(), item() or float()")
    if loss_sum.ndim:
        _check_single(loss_sum, "loss_sum")
    if output.sums is not NO_SUMS:
        _check_sums(output.sums)
    count = output.num_items
    if count is not None and (not isinstance(count, Tensor) or count.ndim):
        fact = f"train_step returned {describe_tensor(count)} as num_items"
        raise ConfigError(
            "NUM_ITEMS", f"{fact}: return the number as a tensor [], such as mask.sum()"
        )


def _check_sums(sums: Any) -> None:
    if not isinstance(sums, Mapping):
        _refuse(sums, "return the sums as a dict")
    for name, value in sums.items():
        if not isinstance(value, Tensor):
            _refuse(value, f"return the sum {name!r} as a tensor: without item() or float()")
        _check_single(value, f"the sum {name}")


def _check_single(value: Tensor, name: str) -> None:
    if value.numel() != 1:
        fact = f"train_step returned {describe_tensor(value)} as {name}"
        raise ConfigError(
            "SHAPES", f"{fact}: return one number, summed over the batch, as .sum() does"
        )


def check_eval_output(output: Any) -> None:
    """Raise ConfigError unless metrics can read `output`."""
    if not isinstance(getattr(output, "losses", None), Tensor):
        fix = "return EvalOutput(losses, outputs) of accel_trainer from eval_step"
        _refuse(output, f"{fix}, the losses a tensor [B]")


def _refuse(value: Any, fix: str) -> NoReturn:
    raise ConfigError("TASK", f"the task returned {describe_tensor(value)}: {fix}")

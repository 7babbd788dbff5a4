"""What a task returned: the kind of output that its step needs, or one line that says what it is instead."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NoReturn

from torch import Tensor

from ..core.errors import ConfigError
from .metrics import describe_tensor

_MAPPINGS = (dict, MappingProxyType, Mapping)  # the usual ones first: an abstract class takes longer


def check_step_output(output: Any) -> None:
    """Raise ConfigError unless a training step can be taken by `output`: single numbers, and a loss with a graph.

    Looks at types and shapes only: no host sync.
    """
    if not hasattr(output, "loss_sum"):
        _refuse(output, "return StepOutput(loss_sum) of accel_trainer from train_step")
    if not isinstance(output.loss_sum, Tensor) or not output.loss_sum.requires_grad:
        _refuse(output.loss_sum, "return loss_sum with its graph: without detach(), item() or float()")
    if not isinstance(output.sums, _MAPPINGS):
        _refuse(output.sums, "return the sums as a dict")
    if output.loss_sum.numel() != 1:
        _refuse_shape(output.loss_sum, "loss_sum")
    for name, value in output.sums.items():
        if not isinstance(value, Tensor):
            _refuse(value, f"return the sum {name!r} as a tensor: without item() or float()")
        if value.numel() != 1:
            _refuse_shape(value, f"the sum {name}")
    count = output.num_items
    if count is not None and (not isinstance(count, Tensor) or count.ndim):
        fact = f"train_step returned {describe_tensor(count)} as num_items"
        raise ConfigError("NUM_ITEMS", f"{fact}: return the number as a tensor [], such as mask.sum()")


def check_eval_output(output: Any) -> None:
    """Raise ConfigError unless metrics can read `output`."""
    if not isinstance(getattr(output, "losses", None), Tensor):
        _refuse(output, "return EvalOutput(losses, outputs) of accel_trainer from eval_step, the losses a tensor [B]")


def _refuse_shape(value: Tensor, name: str) -> NoReturn:
    fact = f"train_step returned {describe_tensor(value)} as {name}"
    raise ConfigError("SHAPES", f"{fact}: return one number, summed over the batch, as .sum() does")


def _refuse(value: Any, fix: str) -> NoReturn:
    raise ConfigError("TASK", f"the task returned {describe_tensor(value)}: {fix}")

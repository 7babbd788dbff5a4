"""Checks of a task in the first step of a run: is its loss a sum, and are its items a count?"""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import recursively_apply
from torch import Tensor, nn

from ..core.errors import ConfigError
from ..core.rng import preserved_generators
from ..core.types import Batch, EvalOutput, StepOutput, Task
from .trial_copy import trial_copy

_FEW = 8  # with fewer samples, a factor of the loss may equal one divided by their number
_CLOSE = 1e-2
_VERY_CLOSE = 1e-3
# The last operation of a loss that is not a plain mean.
_COMBINED = ("Mul", "Add", "Sub", "Neg", "Sum")


class FirstStep:
    """Takes the place of a task in the forwards of the first step, and checks what it returns.

    `check_loss_is_sum` compares the loss with the losses that `eval_step` computes from the same
    outputs of the model. The model is not called again, so that neither running statistics nor
    generators change.
    """

    def __init__(self, task: Task, model: nn.Module, accelerator: Accelerator) -> None:
        self._task = task
        self._model = model
        self._accelerator = accelerator
        self._outputs: list[Any] = []
        self._seen: tuple[Batch, StepOutput] | None = None

    def train_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        """Return what the task returns.

        **Host sync.** Raises ConfigError if the number of items is negative or NaN.
        """
        train_step = self._observe if self._seen is None else self._task.train_step
        output = train_step(model, batch)
        count = getattr(output, "num_items", None)
        if isinstance(count, Tensor) and count.numel() == 1:
            num_items = float(count.detach())
            if not num_items >= 0:  # negative, or NaN
                raise ConfigError(
                    "NUM_ITEMS", f"train_step returned {num_items} as num_items: return a count"
                )
        if self._seen is None and self._outputs and len(batch) > 0:
            self._seen = batch, output
        return output

    def eval_step(self, model: nn.Module, batch: Batch) -> EvalOutput:
        """Return what the task returns."""
        return self._task.eval_step(model, batch)

    def _observe(self, model: nn.Module, batch: Batch) -> StepOutput:
        """Run the task, and record the outputs of the model."""
        if getattr(self._model, "_compiled_call_impl", None) is not None:
            return self._task.train_step(model, batch)  # a hook would change what is compiled
        self._outputs = []

        def record(module: nn.Module, inputs: object, output: object) -> None:
            self._outputs.append(_detached(output))

        with self._model.register_forward_hook(record):
            return self._task.train_step(model, batch)

    def check_loss_is_sum(self) -> None:
        """Raise ConfigError if the loss of the first batch with samples is a mean, not a sum.

        Call it after the step. A task whose `eval_step` uses the model in another way, or measures
        something else, is not checked.
        """
        if self._seen is None:
            return
        batch, output = self._seen
        try:
            widths = _widths(self._outputs)
            losses, _, num_eval_items = self._evaluate(batch)
        except Exception:  # the rehearsal of the evaluation reports what is wrong
            return
        if losses.shape != (len(batch),):
            return
        loss_sum = output.loss_sum
        if output.num_items is not None:
            counts = {"items": float(output.num_items.detach())}
        else:
            counts = {"samples": float(len(batch))}
            if num_eval_items is not None:
                counts["items"] = float(num_eval_items.sum())
        operation = "" if loss_sum.grad_fn is None else loss_sum.grad_fn.name()
        loss = float(loss_sum.detach())
        total = float(losses.sum())
        for unit, count in counts.items():
            # If samples have D numbers each, whose sum `eval_step` returns, then a mean over these
            # numbers looks like a mean over D samples. NllLoss has one number for each sample.
            is_clear = count not in widths or operation.startswith("NllLoss")
            if is_clear and _is_mean(loss, total, count, operation):
                fact = (
                    f"train_step returned {loss:.4g} as loss_sum, the mean over {count:.0f} {unit}"
                )
                fix = "return the sum over the batch, as reduction='sum' does"
                why = "the trainer divides it by the samples or items of the whole step"
                raise ConfigError(
                    "LOSS_SUM", f"{fact}; eval_step's losses add up to {total:.4g}: {fix}; {why}"
                )

    def _evaluate(self, batch: Batch) -> EvalOutput:
        model: Any = _Replay(self._model, self._outputs)
        with (
            preserved_generators(self._accelerator.device),
            torch.no_grad(),
            self._accelerator.autocast(),
        ):
            return trial_copy(self._task).eval_step(model, batch.map(Tensor.clone))


class _Replay:
    """Takes the place of the model: a call returns the next recorded output, and runs nothing."""

    training = False

    def __init__(self, model: nn.Module, outputs: list[Any]) -> None:
        self._model = model
        self._outputs = outputs

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return self._outputs[0] if len(self._outputs) == 1 else self._outputs.pop(0)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._model, name)
        if callable(value):
            raise AttributeError(name)  # a call could run a part of the model
        return value


def _detached(output: Any) -> Any:
    try:
        return recursively_apply(Tensor.detach, output)
    except Exception:  # the output is a container that cannot be built again
        return output


def _widths(outputs: list[Any]) -> set[int]:
    """Return how many numbers a sample has in the outputs, along each choice of dimensions."""
    widths: set[int] = set()

    def look(tensor: Tensor) -> Tensor:
        sizes = tensor.shape[1:]
        for number in range(1, len(sizes) + 1):
            widths.update(map(math.prod, combinations(sizes, number)))
        return tensor

    recursively_apply(look, outputs)
    return widths


def _is_mean(loss: float, total: float, count: float, operation: str) -> bool:
    """Whether `loss` is `total / count`, and is unlikely to be so by chance.

    The factor 0.5 of a loss looks like a mean over two samples: with few samples, or if `operation`
    may have applied a factor, the values must be closer.
    """
    is_combined = operation.startswith(_COMBINED)
    if total == 0 or count < (2 * _FEW if is_combined else 2):
        return False
    tolerance = _VERY_CLOSE if is_combined or count < _FEW else _CLOSE
    return abs(loss * count / total - 1) < tolerance

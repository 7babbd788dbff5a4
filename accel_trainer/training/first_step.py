"""What the first step of a run shows of its task: whether its loss is a sum, and its items a count."""

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

_FEW = 8  # of fewer samples, a factor of a loss may be one divided by their number
_CLOSE, _VERY_CLOSE = 1e-2, 1e-3
# the last operation of a loss that is no plain mean
_COMBINED = ("Mul", "Add", "Sub", "Neg", "Sum")


class FirstStep:
    """A task for the forwards of the first step: it checks what the real one returns.

    `check_loss_is_sum` compares the loss with what `eval_step` computes of the same outputs of the
    model, which is not called again: no running statistic and no generator moves.
    """

    def __init__(self, task: Task, model: nn.Module, accelerator: Accelerator) -> None:
        self._task = task
        self._model = model
        self._accelerator = accelerator
        self._outputs: list[Any] = []
        self._seen: tuple[Batch, StepOutput] | None = None

    def train_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        """Return what the task returns.

        **Host sync.** Raises ConfigError for a number of items that is no count.
        """
        output = (
            self._task.train_step(model, batch)
            if self._seen is not None
            else self._observe(model, batch)
        )
        count = getattr(output, "num_items", None)
        # or NaN
        if (
            isinstance(count, Tensor)
            and count.numel() == 1
            and not (num_items := float(count.detach())) >= 0
        ):
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
        """Run the task, and keep what the model returns."""
        if getattr(self._model, "_compiled_call_impl", None) is not None:
            return self._task.train_step(model, batch)  # a hook would change what is compiled
        self._outputs = []

        def record(module: nn.Module, inputs: object, output: object) -> None:
            self._outputs.append(_detached(output))

        with self._model.register_forward_hook(record):
            return self._task.train_step(model, batch)

    def check_loss_is_sum(self) -> None:
        """Raise ConfigError if the loss of the first batch with samples is its mean.

        Call it after the step.

        Nothing is said of a task that uses the model in another way in `eval_step`, or measures
        something else there.
        """
        if self._seen is None:
            return
        batch, output = self._seen
        items = None if output.num_items is None else float(output.num_items.detach())
        try:
            widths = _widths(self._outputs)
            losses, _, num_items = self._evaluate(batch)
        except Exception:  # the rehearsal of the evaluation says what is wrong, if something is
            return
        if losses.shape != (len(batch),):
            return
        if items is not None:
            counts = {"items": items}
        else:
            counts = {
                "samples": float(len(batch)),
                "items": 0.0 if num_items is None else float(num_items.sum()),
            }
        operation = "" if output.loss_sum.grad_fn is None else output.loss_sum.grad_fn.name()
        for what, count in counts.items():
            # Of D samples, a mean over the D numbers of each, of which eval_step returns the sum,
            # looks the same. of one number for each sample
            is_clear = count not in widths or operation.startswith("NllLoss")
            if is_clear and _is_mean(
                float(output.loss_sum.detach()), float(losses.sum()), count, operation
            ):
                fact = f"train_step returned {output.loss_sum:.4g} as loss_sum, the mean over {count:.0f} {what}"
                fix = "return the sum over the batch, as reduction='sum' does"
                why = "the trainer divides it by the samples or items of the whole step"
                raise ConfigError(
                    "LOSS_SUM",
                    f"{fact}; eval_step's losses add up to {losses.sum():.4g}: {fix}; {why}",
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
    """In the place of the model: its calls return the outputs that it has returned in training, and run nothing."""

    training = False

    def __init__(self, model: nn.Module, outputs: list[Any]) -> None:
        self._model, self._outputs = model, outputs

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return self._outputs[0] if len(self._outputs) == 1 else self._outputs.pop(0)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._model, name)
        if callable(value):
            raise AttributeError(name)  # it could run a part of the model
        return value


def _detached(output: Any) -> Any:
    try:
        return recursively_apply(Tensor.detach, output)
    except Exception:  # of a container that cannot be made again
        return output


def _widths(outputs: list[Any]) -> set[int]:
    """Return how many numbers a sample has in the outputs, in all and along each choice of their dimensions."""
    widths: set[int] = set()

    def look(tensor: Tensor) -> Tensor:
        sizes = tensor.shape[1:]
        for number in range(1, len(sizes) + 1):
            widths.update(map(math.prod, combinations(sizes, number)))
        return tensor

    recursively_apply(look, outputs)
    return widths


def _is_mean(loss: float, total: float, count: float, operation: str) -> bool:
    """Whether `loss` is `total / count`, and that is hardly by chance, as for the factor 0.5 of two samples."""
    is_combined = operation.startswith(_COMBINED)
    if total == 0 or count < (2 * _FEW if is_combined else 2):
        return False
    tolerance = _VERY_CLOSE if is_combined or count < _FEW else _CLOSE
    return abs(loss * count / total - 1) < tolerance

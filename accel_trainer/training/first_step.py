"""What the first step of a run shows of its task: the shapes of what it returns, and whether its loss is a sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import recursively_apply
from torch import Tensor, nn

from ..core.errors import ConfigError
from ..core.rng import preserved_generators
from ..core.types import Batch, StepOutput, Task
from .task_output import check_step_output
from .trial import set_aside

_FEW = 8  # of fewer samples, a factor of a loss may be one divided by their number
_CLOSE, _VERY_CLOSE = 1e-2, 1e-3
_COMBINED = ("Mul", "Add", "Sub", "Neg", "Sum")  # the last operation of a loss that is no plain mean


class FirstStep:
    """A task for the forwards of the first step: it checks what the real one returns.

    `check_loss_is_sum` compares the loss with what `eval_step` computes of the same outputs of the model, which is not
    called again: no running statistic and no generator moves.
    """

    def __init__(self, task: Task, model: nn.Module, accelerator: Accelerator) -> None:
        self._task, self._model, self._accelerator = task, model, accelerator
        self._seen: tuple[Batch, StepOutput, list[Any]] | None = None
        self._is_checked = False

    def train_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        """Return what the task returns. **Host sync.** Raises ConfigError for sums that are none."""
        outputs: list[Any] = []
        record: Callable[..., None] = lambda module, inputs, output: outputs.append(_detached(output))  # noqa: E731
        # A hook would change what is compiled.
        is_compiled = getattr(self._model, "_compiled_call_impl", None) is not None
        handle = None if self._is_checked or is_compiled else self._model.register_forward_hook(record)
        try:
            output = self._task.train_step(model, batch)
        finally:
            if handle is not None:
                handle.remove()
        check_step_output(output)
        if output.num_items is not None and not (num_items := float(output.num_items.detach())) >= 0:  # or NaN
            raise ConfigError("NUM_ITEMS", f"train_step returned {num_items} as num_items: return a count")
        if len(outputs) > 0 and len(batch) > 0:
            self._seen = batch, output, outputs
        return output

    def check_loss_is_sum(self) -> None:
        """Raise ConfigError if the loss is the mean of the first batch with samples. Call it after the backward.

        Nothing is said of a task that uses the model in another way in `eval_step`, or measures something else there.
        """
        if self._is_checked or self._seen is None:
            return
        self._is_checked = True
        batch, output, outputs = self._seen
        self._seen = None
        evaluated = self._evaluate(batch, outputs)
        if evaluated is None:
            return
        total, num_items = evaluated
        loss, grad_fn = float(output.loss_sum.detach()), output.loss_sum.grad_fn
        is_combined = grad_fn is not None and grad_fn.name().startswith(_COMBINED)
        counts = {"samples": float(len(batch)), "items": num_items}
        if output.num_items is not None:
            counts = {"items": float(output.num_items.detach())}
        for what, count in counts.items():
            if _is_mean(loss, total, count, is_combined=is_combined):
                fact = f"train_step returned {loss:.4g} as loss_sum, the mean over {count:.0f} {what}"
                fix = "return the sum over the batch, as reduction='sum' does"
                why = "the trainer divides it by the samples or items of the whole step"
                raise ConfigError("LOSS_SUM", f"{fact}; eval_step's losses add up to {total:.4g}: {fix}; {why}")

    def _evaluate(self, batch: Batch, outputs: list[Any]) -> tuple[float, float] | None:
        """Return the sum of eval_step's losses, and the number of items; None if eval_step fails on them."""
        accelerator = self._accelerator
        model: Any = _Replay(self._model, outputs)
        try:
            with preserved_generators(accelerator.device), torch.no_grad(), accelerator.autocast():
                losses, _, num_items = set_aside(self._task).eval_step(model, batch.map(Tensor.clone))
            if losses.shape != (len(batch),):
                return None
            return float(losses.sum()), 0.0 if num_items is None else float(num_items.sum())
        except Exception:  # the rehearsal of the evaluation says what is wrong, if something is
            return None


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


def _is_mean(loss: float, total: float, count: float, *, is_combined: bool) -> bool:
    """Whether `loss` is `total / count`, and that is hardly by chance, as for the factor 0.5 of two samples."""
    if total == 0 or count < (2 * _FEW if is_combined else 2):
        return False
    tolerance = _VERY_CLOSE if is_combined or count < _FEW else _CLOSE
    return abs(loss * count / total - 1) < tolerance

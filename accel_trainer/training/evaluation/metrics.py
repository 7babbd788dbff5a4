"""Metrics as float64 sums, which add up over batches and processes and give numbers at the end.

They get the samples that count: those of which the task counts no item are left out before.

Legend: B batch, K classes, N samples of the evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from ...core.config import AT_LEAST_ONE
from ...core.errors import ConfigError
from ...core.types import Batch, Directions, Results, StepOutput, Task, eval_step_of
from ...core.wording import counted, describe_tensor
from ..step.targets import trust_labels

_MAX_DENSE_CLASSES = 256
_LABELS = (torch.int64, torch.uint8)  # of torch's cross-entropy
_Step = TypeVar("_Step", bound=Callable[..., StepOutput])
_INTEGERS = (*_LABELS, torch.int32, torch.int16, torch.int8)


class _Mean:
    """The mean of numbers per sample, or per item where the task counts items."""

    name: str

    def empty(self, device: torch.device) -> Tensor:
        """Return sums [2]: the numbers, and how many samples or items there are."""
        return torch.zeros(2, dtype=torch.float64, device=device)

    def compute(self, sums: Tensor) -> Results:
        """Return the mean. Raises ConfigError if a number of items is wrong."""
        total, num_items = sums.tolist()
        if not num_items > 0:
            fact = "that are negative or NaN" if num_items else "of 0 for all samples"
            raise ConfigError("NUM_ITEMS", f"the task returned num_items {fact}: return counts")
        return {self.name: total / num_items}

    def _add(self, sums: Tensor, values: Tensor, batch: Batch, output: StepOutput) -> None:
        sums[0].add_(values.sum(dtype=torch.float64))
        num_items = output.num_items
        if num_items is None:
            sums[1].add_(len(batch))
        else:
            num_items = num_items.double()
            sums[1].add_(num_items.masked_fill(num_items < 0, math.nan).sum())


class MeanLoss(_Mean):
    """The mean of the losses per sample, or per item where the task counts items, as `loss`."""

    name = "loss"
    higher_is_better: ClassVar[Directions] = {"loss": False}

    def update(self, sums: Tensor, batch: Batch, output: StepOutput) -> None:
        """Add the losses, and their number or that of the items."""
        self._add(sums, output.losses, batch, output)


class MeanNumber(_Mean):
    """The mean of a number of each sample, per sample or item as in MeanLoss, as `name`.

    It is `name` of the `numbers` that the task returns in evaluation. `higher_is_better` says which
    direction is better if it may select the best checkpoint.
    """

    def __init__(self, name: str, higher_is_better: bool | None = None) -> None:
        self.name = name
        self.higher_is_better: Directions = (
            {} if higher_is_better is None else {name: higher_is_better}
        )

    def update(self, sums: Tensor, batch: Batch, output: StepOutput) -> None:
        """Add the number of each sample [B]. Raises ConfigError if the task returned none."""
        if self.name not in output.numbers:
            found = f"the numbers {', '.join(output.numbers)}" if output.numbers else "no numbers"
            raise ConfigError(
                "METRIC",
                f"the task returned {found} in evaluation: "
                f"return StepOutput(..., numbers={{{self.name!r}: ...}}) there",
            )
        self._add(sums, output.numbers[self.name], batch, output)


class TopKAccuracy(_Mean):
    """The fraction of samples whose label is among the `k` largest logits.

    It is reported as `accuracy`, or for `k` above 1 as `top<k>_accuracy`.
    """

    def __init__(self, k: int = 1) -> None:
        self.k = k
        AT_LEAST_ONE.check(self, "TopKAccuracy", "k")
        self.name = "accuracy" if k == 1 else f"top{k}_accuracy"
        self.higher_is_better: Directions = {self.name: True}

    def update(self, sums: Tensor, batch: Batch, output: StepOutput) -> None:
        """Add the hits of logits [B, K] against labels [B]. Raises ConfigError for other shapes."""
        sums[1].add_(check_labels(batch, output).sum())
        if self.k == 1:
            hits = output.outputs.argmax(1) == batch.targets
        else:
            k = min(self.k, output.outputs.shape[1])
            hits = (output.outputs.topk(k, dim=1).indices == batch.targets[:, None]).any(1)
        sums[0].add_(hits.sum())


@dataclass(frozen=True)
class ConfusionMatrix:
    """Counts of (label, prediction), as `confusion_matrix` [K, K] and `per_class_accuracy` [K].

    The accuracy of a class without samples is None. With more than 256 classes,
    `confused_pairs` [M, 3] takes the place of the matrix: label, prediction and count of each pair
    that occurs, correct ones included. The sums are the cell of the matrix of each sample, by its
    id, so that they do not grow with the number of classes.
    """

    num_classes: int
    num_samples: int = 0
    """The evaluator sets it."""
    higher_is_better: ClassVar[Directions] = {}  # neither result is one number

    def __post_init__(self) -> None:
        AT_LEAST_ONE.check(self, "ConfusionMatrix", "num_classes")

    def for_samples(self, num_samples: int) -> ConfusionMatrix:
        """Return the metric for an evaluation of `num_samples`."""
        return replace(self, num_samples=num_samples)

    def empty(self, device: torch.device) -> Tensor:
        """Return 0 or the cell of each sample [N] that counts: 1 + label * K + prediction."""
        return torch.zeros(self.num_samples, dtype=torch.float64, device=device)

    def update(self, sums: Tensor, batch: Batch, output: StepOutput) -> None:
        """Write the pairs of labels [B] and largest logits of [B, K] by their sample ids.

        Raises ConfigError for other shapes.
        """
        check_labels(batch, output)
        if output.outputs.shape[1] != self.num_classes:
            raise ConfigError(
                "SHAPES",
                f"{output.outputs.shape[1]} logits per sample, the confusion matrix has "
                f"{counted(self.num_classes, 'class')}: give both the same number",
            )
        cells = batch.targets.long() * self.num_classes + output.outputs.argmax(1) + 1
        sums.index_add_(0, batch.sample_ids, cells.double())

    def compute(self, sums: Tensor) -> Results:
        """Return the matrix, whose rows are labels, or the pairs, and the accuracy of each class.

        Raises ConfigError for a label that is not a class.
        """
        num_classes = self.num_classes
        cells, counts = (sums[sums != 0].long() - 1).unique(return_counts=True)
        labels = cells // num_classes
        if bool(((labels < 0) | (labels >= num_classes)).any()):
            raise ConfigError(
                "LABELS",
                f"the evaluation has labels from {int(labels.min())} to {int(labels.max())}, "
                f"the classes are 0 to {num_classes - 1}: correct the labels",
            )
        predictions = cells % num_classes
        totals = torch.zeros(num_classes, dtype=torch.int64).index_add_(0, labels, counts)
        hits = torch.zeros_like(totals).index_add_(0, labels, counts * (labels == predictions))
        rows = zip(hits.tolist(), totals.tolist(), strict=True)
        accuracies = [right / total if total else None for right, total in rows]
        per_class = {"per_class_accuracy": accuracies}
        if num_classes > _MAX_DENSE_CLASSES:
            return {"confused_pairs": torch.stack([labels, predictions, counts], 1), **per_class}
        matrix = torch.zeros(num_classes, num_classes, dtype=torch.int64)
        matrix[labels, predictions] = counts
        return {"confusion_matrix": matrix, **per_class}


# --- shapes, dtypes and kinds ---


def check_logits(logits: Any, targets: Any, *, in_loss: bool) -> None:
    """Raise ConfigError unless `logits` are [B, K] and `targets` integer class ids [B].

    In a loss, targets must be ids of dtype int64 or uint8, or float weights [B, K]. Looks at types
    and shapes only: no host sync.
    """
    if misfit := _misfit(logits, targets, in_loss=in_loss):
        raise misfit_of(logits, targets, misfit)


def check_labels(batch: Batch, output: StepOutput) -> Tensor:
    """Return the factors of `trust_labels`, 1 for a label that is a class.

    Raises ConfigError for other shapes than logits [B, K] and labels [B].
    """
    check_logits(output.outputs, batch.targets, in_loss=False)
    return trust_labels(batch, output.outputs.shape[1])


def misfit_of(outputs: Any, targets: Any, fix: str) -> ConfigError:
    """Return the error of outputs whose shape or dtype does not fit the targets."""
    return ConfigError(
        "SHAPES",
        f"the model returns {describe_tensor(outputs)} for targets {describe_tensor(targets)}: "
        + fix,
    )


def _misfit(logits: Any, targets: Any, *, in_loss: bool) -> str | None:
    if not isinstance(logits, Tensor):
        return "return only the logits [B, K] from it, or extract them in your own task"
    if logits.ndim != 2:
        return "a classifier returns logits [B, K]; anything else needs your own task and metric"
    num_samples, num_classes = logits.shape
    if num_classes == 1:
        return (
            "the cross-entropy of one class is always 0: "
            "give it a logit for each class, 2 for yes and no"
        )
    is_tensor = isinstance(targets, Tensor)
    if is_tensor and targets.shape == (num_samples,):
        allowed = _LABELS if in_loss else _INTEGERS
        return None if targets.dtype in allowed else "give labels int64 [B], as labels.long() does"
    if isinstance(targets, list | tuple) and isinstance((*targets, None)[0], str):
        return f"the labels are texts, such as {targets[0]!r}: number the classes from 0"
    if not is_tensor or targets.shape[:1] != (num_samples,):
        return "give each sample one target"
    if targets.shape == (num_samples, 1):
        return "give labels [B], as labels.squeeze(1) does"
    if in_loss and targets.shape == logits.shape and targets.is_floating_point():
        return None
    return "give labels int64 [B]" + ", or float weights [B, K] of the classes" * in_loss


def returns_logits(step: _Step) -> _Step:
    """Mark a `step` or `eval_step` whose `outputs` are logits; an override has to say so itself."""
    step.returns_logits = True  # type: ignore[attr-defined]  # a function can have attributes
    return step


def are_logits(task: Task) -> bool:
    """Return whether the outputs of `task` in evaluation are known to be logits."""
    return getattr(eval_step_of(task), "returns_logits", False)


def sums_device(device: torch.device) -> torch.device:
    """Return `device` for the float64 sums, or the CPU if it lacks float64, as Apple's GPUs do."""
    try:
        (torch.ones((), dtype=torch.float64, device=device) + 1).item()
    except (RuntimeError, TypeError):
        return torch.device("cpu")
    return device

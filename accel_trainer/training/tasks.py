"""Tasks: how a loss is computed from a batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.config import BELOW_ONE
from ..core.errors import ConfigError, DataError
from ..core.types import Batch, StepOutput
from ..data.fingerprint import hash_value
from .metrics import MeanLoss, TopKAccuracy, check_logits, describe_tensor, misfit_of


@dataclass(frozen=True, kw_only=True)
class ClassificationConfig:
    """The loss of a classifier."""

    label_smoothing: float = 0.0
    """Fraction of the target spread evenly over all classes (0..1), in training only."""
    train_accuracy: bool = False
    """Whether to report the accuracy on the (augmented) training batches as `train/accuracy`."""
    class_weights: Literal["none", "balanced"] = "none"
    """Weigh the losses of samples: `balanced` divides by the number of samples of their class, in
    training only."""

    def __post_init__(self) -> None:
        BELOW_ONE.check(self, "task", "label_smoothing")


class ClassificationTask:
    """Cross-entropy over logits [B, K]; targets are class ids [B] or class weights [B, K].

    `class_weights` [K] are factors on the losses of the classes, in training only. The config may
    ask for balanced ones instead, which follow from `class_counts` [K], the number of training
    samples of each class; their mean over the samples is 1.

    Raises:
        ConfigError: the config needs `class_counts`.
    """

    metrics = (MeanLoss(), TopKAccuracy())

    def __init__(
        self,
        config: ClassificationConfig | None = None,
        *,
        class_weights: Tensor | None = None,
        class_counts: Tensor | None = None,
    ) -> None:
        self.config = config or ClassificationConfig()
        if not isinstance(self.config, ClassificationConfig):
            raise ConfigError(
                "CONFIG", f"the task has config {config!r}: give a ClassificationConfig"
            )
        self._class_weights = class_weights
        if self.config.class_weights == "balanced":
            if class_weights is not None or class_counts is None:
                raise ConfigError(
                    "CONFIG",
                    "--task.class-weights balanced follows from the number of samples of a class: "
                    "give the task class_counts=, and not class_weights=",
                )
            class_counts = torch.as_tensor(class_counts)
            num_classes = (class_counts > 0).sum()
            self._class_weights = class_counts.sum() / (num_classes * class_counts.clamp_min(1))

    def fingerprint(self) -> str:
        """Return a hash of the class weights; empty without any."""
        return "" if self._class_weights is None else hash_value([self._class_weights]).hex()

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        """Return the cross-entropies [B] with label smoothing, and the logits [B, K].

        Raises ConfigError for other shapes.
        """
        return self.loss(call_model(model, batch), batch)

    def loss(self, logits: Tensor, batch: Batch) -> StepOutput:
        """Return the training loss of logits [B, K]. Raises ConfigError for other shapes."""
        check_logits(logits, batch.targets, in_loss=True)
        weights = self._class_weights
        if weights is not None:
            if not isinstance(weights, Tensor) or weights.shape != logits.shape[1:]:
                raise ConfigError(
                    "SHAPES",
                    f"class_weights are {describe_tensor(weights)} for logits "
                    f"{describe_tensor(logits)}: give a tensor [K] with a weight for each class",
                )
            weights = weights.to(logits)
        losses = _cross_entropy(logits, batch.targets, weights, self.config.label_smoothing)
        if not self.config.train_accuracy:
            return StepOutput(losses, logits)
        labels = batch.targets if batch.targets.ndim == 1 else batch.targets.argmax(1)
        is_right = logits.detach().argmax(1) == labels
        return StepOutput(losses, logits, numbers={"accuracy": is_right})

    def eval_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        """Return the cross-entropies [B] and the logits [B, K].

        Raises ConfigError for other shapes.
        """
        logits = call_model(model, batch)
        check_logits(logits, batch.targets, in_loss=True)
        return StepOutput(_cross_entropy(logits, batch.targets), logits)


class _ElementwiseTask:
    """The mean of a loss of each element, per sample."""

    _loss: Callable[..., Tensor]

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        """Return the mean losses [B] and the outputs. Raises ConfigError for other shapes."""
        outputs = call_model(model, batch)
        if outputs.shape != batch.targets.shape:
            raise misfit_of(outputs, batch.targets, "both must have the same shape")
        losses = self._loss(outputs, batch.targets.to(outputs.dtype), reduction="none")
        return StepOutput(losses.reshape(len(outputs), -1).mean(1), outputs)


class RegressionTask(_ElementwiseTask):
    """Mean squared error of predictions [B, ...] against targets of the same shape, per sample."""

    _loss = staticmethod(F.mse_loss)


class MultiLabelTask(_ElementwiseTask):
    """Binary cross-entropy of logits [B, K] and targets [B, K] in 0..1, for multi-label data."""

    _loss = staticmethod(F.binary_cross_entropy_with_logits)


class DistillationTask:
    """Classification that also learns from the logits of a `teacher`.

    The loss is (1 - weight) * cross-entropy + weight * T**2 * KL(teacher || student) at temperature
    T (Hinton et al. 2015, arXiv 1503.02531). The task `labels` computes the cross-entropy and
    evaluates. The teacher is moved to the device at the first batch, and its hash is stored with
    the checkpoints.

    Raises:
        ConfigError: the weight is outside 0..1, or the temperature is not positive and finite.
    """

    def __init__(
        self,
        teacher: nn.Module,
        *,
        weight: float = 0.5,
        temperature: float = 4.0,
        labels: ClassificationTask | None = None,
    ) -> None:
        if not (0 <= weight <= 1 and 0 < temperature < math.inf):
            raise ConfigError(
                "CONFIG",
                f"DistillationTask has weight={weight} and temperature={temperature}: "
                "give a weight from 0 to 1 and a temperature above 0",
            )
        self._teacher = teacher.eval().requires_grad_(False)
        self._weight = weight
        self._temperature = temperature
        self._labels = labels or ClassificationTask()
        self.eval_step = self._labels.eval_step

    def fingerprint(self) -> str:
        """Return a hash of the teacher's weights and of the options."""
        return hash_value([self._teacher.state_dict(), self._weight, self._temperature]).hex()

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        """Return the weighted sums of both losses [B].

        Raises ConfigError for other shapes, and for a teacher of other classes.
        """
        logits = call_model(model, batch)
        labels = self._labels.loss(logits, batch)
        with torch.no_grad():
            teacher_logits = self._teacher.to(batch.sample_ids.device)(batch.inputs)
        if teacher_logits.shape != logits.shape:
            raise ConfigError(
                "SHAPES",
                f"the teacher returns {describe_tensor(teacher_logits)}, the model "
                f"{describe_tensor(logits)}: both must have the same classes",
            )
        student = F.log_softmax(logits / self._temperature, 1)
        teacher = F.log_softmax(teacher_logits / self._temperature, 1)
        divergence = F.kl_div(student, teacher, reduction="none", log_target=True).sum(1)
        imitation = divergence * self._temperature**2
        losses = (1 - self._weight) * labels.losses + self._weight * imitation
        return labels._replace(losses=losses)


def call_model(model: nn.Module, batch: Batch) -> Any:
    """Return the model's output for the inputs.

    Raises ConfigError if the samples have no targets.
    """
    if batch.targets is None:
        raise ConfigError(
            "DATASET",
            f"the samples are {describe_tensor(batch.inputs)}, without labels: name the columns of "
            'inputs and targets, as in DatasetOptions(columns=("image", "label"))',
        )
    return model(batch.inputs)


def _cross_entropy(
    logits: Tensor,
    targets: Tensor,
    weight: Tensor | None = None,
    smoothing: float = 0.0,
) -> Tensor:
    """Return torch's cross-entropies [B] of logits [B, K].

    Raises DataError for a label that is not a class; on the CPU only.
    """
    try:
        return F.cross_entropy(logits, targets, weight, reduction="none", label_smoothing=smoothing)
    except IndexError as error:
        num_classes = logits.shape[1]
        raise DataError(
            "DATA_LABEL",
            f"the model has {num_classes} classes ({error}): "
            f"num_classes={num_classes} of DatasetOptions names the sample",
        ) from error

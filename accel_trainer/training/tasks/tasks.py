"""Tasks: how a loss is computed from a batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...core.config import BELOW_ONE, Config, answers_unknown
from ...core.errors import ConfigError
from ...core.types import Batch, StepOutput
from ...core.wording import describe_tensor
from ...data.fingerprint import hash_value
from ..evaluation.metrics import MeanLoss, TopKAccuracy, check_logits, misfit_of, returns_logits
from ..step.targets import are_known_to_fit, rows_of, trust, trust_labels

_NO_LABEL = torch.iinfo(torch.int64).min  # is ignored, and no label has it


@dataclass(frozen=True, kw_only=True)
class ClassificationConfig(Config):
    """The loss of a classifier."""

    label_smoothing: float = 0.0
    """Fraction of the target spread evenly over all classes (0..1), in training only."""
    train_accuracy: bool = False
    """Whether to report the accuracy on the (augmented) training batches as `train/accuracy`."""
    class_weights: Literal["none", "balanced"] = "none"
    """Weigh the losses of samples: `balanced` divides by the number of samples of their class, in
    training only."""
    ignore_index: int | None = None
    """A label that means "no label", such as -100: such samples affect no loss and no metric.
    None: every label must be a class."""

    def __post_init__(self) -> None:
        BELOW_ONE.check(self, "task", "label_smoothing")


class ClassificationTask:
    """Cross-entropy over logits [B, K]; targets are class ids [B] or class weights [B, K].

    The loss of a step is torch's `F.cross_entropy` over all its samples, on any number of
    processes. `class_weights` [K] weigh the classes, in training only: a step is the weighted mean,
    so a factor on all of them changes nothing; for targets [B, K] it is the mean over the samples,
    as in torch. The config may ask for balanced ones instead, which follow from `class_counts` [K],
    the number of training samples of each class; their mean over the samples is 1. Samples with the
    label `ignore_index` count in no loss and no metric. Any other target that is no class, negative
    or NaN is an error.

    Raises:
        ConfigError: the weights are negative, NaN, inf or all 0, the config needs `class_counts`,
            or the config and `ignore_index` differ.
    """

    metrics = (MeanLoss(), TopKAccuracy())

    @answers_unknown
    def __init__(
        self,
        config: ClassificationConfig | None = None,
        *,
        class_weights: Tensor | None = None,
        class_counts: Tensor | None = None,
        ignore_index: int | None = None,
    ) -> None:
        self.config = config or ClassificationConfig()
        if not isinstance(self.config, ClassificationConfig):
            raise ConfigError(
                "CONFIG", f"the task has config {config!r}: give a ClassificationConfig"
            )
        if self.config.class_weights == "balanced":
            if class_weights is not None or class_counts is None:
                raise ConfigError(
                    "CONFIG",
                    "--task.class-weights balanced follows from the number of samples of a class: "
                    "give the task class_counts=, and not class_weights=",
                )
            class_counts = torch.as_tensor(class_counts)
            num_classes = (class_counts > 0).sum()
            class_weights = class_counts.sum() / (num_classes * class_counts.clamp_min(1))
        self._class_weights = _checked_weights("class_weights", class_weights)
        named = {self.config.ignore_index, ignore_index} - {None}
        if len(named) > 1:
            raise ConfigError(
                "CONFIG", f"the task has two values of ignore_index, {named}: remove one of them"
            )
        self._ignored = next(iter(named), _NO_LABEL)

    def fingerprint(self) -> str:
        """Return a hash of the class weights and the ignored label; empty without any."""
        if self._class_weights is None and self._ignored == _NO_LABEL:
            return ""
        return hash_value([self._class_weights, self._ignored]).hex()

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        """Return the cross-entropies [B] with label smoothing, and the logits [B, K].

        Raises ConfigError for other shapes, and DataError for a target that cannot be used.
        """
        return self.loss(call_model(model, batch), batch)

    def loss(self, logits: Tensor, batch: Batch) -> StepOutput:
        """Return the training loss of logits [B, K]. Raises as `step`."""
        weights = _weights_for("class_weights", self._class_weights, logits)
        output = self._output(logits, batch, weights, self.config.label_smoothing)
        if not self.config.train_accuracy:
            return output
        labels = batch.targets if batch.targets.ndim == 1 else batch.targets.argmax(1)
        is_right = logits.detach().argmax(1) == labels
        hits = is_right if output.num_items is None else is_right * output.num_items
        return output._replace(numbers={"accuracy": hits})

    @returns_logits
    def eval_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        """Return the cross-entropies [B] and the logits [B, K]. Raises as `step`."""
        return self._output(call_model(model, batch), batch)

    def _output(
        self, logits: Tensor, batch: Batch, weights: Tensor | None = None, smoothing: float = 0.0
    ) -> StepOutput:
        """Return cross-entropies [B], logits, and the weight of each label; None if all have 1."""
        targets = batch.targets
        check_logits(logits, targets, in_loss=True)
        num_classes = logits.shape[1]
        options: dict[str, Any] = {"weight": weights, "reduction": "none"}
        has_labels = targets.ndim == 1
        factors = None
        if has_labels:
            options["ignore_index"] = self._ignored
            targets = targets.long()  # for uint8, torch lacks weights with smoothing (torch 2.13)
            if not targets.is_cpu and not are_known_to_fit(
                batch.targets, lambda label: 0 <= label < num_classes
            ):
                factors = trust_labels(batch, num_classes, self._ignored)
                targets = targets * (factors == 1)
        elif not are_known_to_fit(targets, _is_weight):
            factors = trust(
                batch, _is_weight(targets), "which cannot be the weight of a class: use 0 or more"
            )
        try:
            losses = F.cross_entropy(logits, targets, label_smoothing=smoothing, **options)
        except IndexError:  # on the CPU, torch looks at each label
            trust_labels(batch, num_classes, self._ignored)
            raise
        if factors is not None:
            losses = losses * factors
        num_items = None
        if has_labels and (weights is not None or self._ignored != _NO_LABEL):
            # Not in bfloat16, which cannot represent 257.
            num_items = F.nll_loss(-torch.ones_like(logits), targets, **options).float()
        return StepOutput(losses, logits, num_items)


class _ElementwiseTask:
    """The mean of a loss of each element, per sample."""

    _loss: Callable[..., Tensor]
    _fits: Callable[[Any], Any]  # of targets, or of one number
    _fix: str

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        """Return the mean losses [B] and the outputs.

        Raises ConfigError for other shapes, and DataError for a target that is out of range.
        """
        outputs = call_model(model, batch)
        targets = batch.targets
        if getattr(outputs, "shape", None) != getattr(targets, "shape", ()):
            raise misfit_of(outputs, targets, "both must have the same shape")
        # Half precision would round the targets, and float16 ends at 65504.
        exact = outputs.to(torch.promote_types(outputs.dtype, torch.float))
        losses = self._loss(exact, targets.to(exact), reduction="none")
        losses = rows_of(losses).mean(1)
        if not are_known_to_fit(targets, self._fits):
            losses = losses * trust(batch, self._fits(targets), self._fix)
        return StepOutput(losses, outputs)


class RegressionTask(_ElementwiseTask):
    """Mean squared error of predictions [B, ...] against targets of the same shape, per sample.

    A target that is NaN or inf is an error.
    """

    _loss = staticmethod(F.mse_loss)
    _fits = staticmethod(lambda targets: (targets > -math.inf) & (targets < math.inf))
    _fix = "which no prediction can reach: correct it, or leave the sample out"


class MultiLabelTask(_ElementwiseTask):
    """Binary cross-entropy of logits [B, K] and targets [B, K] in 0..1, for multi-label data.

    Any other target is an error, such as -1 for "unknown". `pos_weight` [K] weighs the classes that
    are present, as in torch's `BCEWithLogitsLoss`.

    Raises:
        ConfigError: the weights are negative, NaN, inf or all 0.
    """

    _fix = "but a class is absent (0) or present (1): correct it, or leave the sample out"
    _fits = staticmethod(lambda targets: (targets >= 0) & (targets <= 1))
    _pos_weight: Tensor | None = None

    def __init__(self, *, pos_weight: Tensor | Sequence[float] | None = None) -> None:
        self._pos_weight = _checked_weights("pos_weight", pos_weight)

    @returns_logits
    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        """Return the mean losses [B] and the logits. Raises as that of RegressionTask."""
        return super().step(model, batch)

    def fingerprint(self) -> str:
        """Return a hash of the weights; empty without any."""
        return "" if self._pos_weight is None else hash_value(self._pos_weight).hex()

    def _loss(self, logits: Tensor, targets: Tensor, reduction: str) -> Tensor:
        weights = _weights_for("pos_weight", self._pos_weight, logits)
        return F.binary_cross_entropy_with_logits(
            logits, targets, pos_weight=weights, reduction=reduction
        )


def _is_weight(values: Any) -> Any:
    return (values >= 0) & (values < math.inf)


def _checked_weights(name: str, given: Any) -> Tensor | None:
    """Return what the argument `name` has, as a tensor. Raises ConfigError for unusable weights."""
    weights = None if given is None else torch.as_tensor(given)
    if weights is not None and not (weights.min() >= 0 and 0 < weights.sum() < math.inf):
        raise ConfigError(
            "CONFIG",
            f"{name} range from {weights.min():g} to {weights.max():g}: use finite weights of 0 or "
            "more, at least one of them above 0",
        )
    return weights


def _weights_for(name: str, weights: Tensor | None, logits: Any) -> Tensor | None:
    """Return `weights` [K] on the device of logits [B, K]. Raises ConfigError for other shapes."""
    if weights is None or not isinstance(logits, Tensor):
        return None
    if weights.shape != logits.shape[1:]:
        raise ConfigError(
            "SHAPES",
            f"{name} are {describe_tensor(weights)} for logits {describe_tensor(logits)}: "
            "give a tensor [K] with a weight for each class",
        )
    return weights.to(logits)


def call_model(model: nn.Module, batch: Batch) -> Any:
    """Return the model's output for the inputs, or its `logits` if it has several by name.

    Raises ConfigError if the samples have no targets.
    """
    if batch.targets is None:
        raise ConfigError(
            "DATASET",
            f"the samples are {describe_tensor(batch.inputs)}, without labels: name the columns of "
            'inputs and targets, as in DatasetOptions(columns=("image", "label"))',
        )
    return logits_of(model(batch.inputs))


def logits_of(output: Any) -> Any:
    """Return the `logits` of a record of outputs, as models of transformers return them."""
    return getattr(output, "logits", output)

"""Metrics of other libraries, exact for any number of processes.

Legend: B batch, K outputs per sample, T targets per sample, N samples of the evaluation.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn

from ...core.errors import ConfigError
from ...core.types import Batch, Directions, Results, StepOutput, Task
from ...core.wording import describe_tensor
from .metrics import are_logits

_CLASSIFICATION = "torchmetrics.classification"
# Counts 1 sample for a batch of which no sample counts (torchmetrics 1.9).
_NO_SUMS = ("MultilabelRankingLoss",)


@dataclass(frozen=True)
class TorchMetric:
    """A metric of torchmetrics whose state is sums: accuracy, F1, IoU, AUROC with `thresholds`.

    It is reported as `name`; the metrics of a MetricCollection as `name_MulticlassF1Score` and so
    on. `arguments` returns what the metric's `update` takes; None: the outputs and the targets.

    torchmetrics takes the outputs of a batch for probabilities if all are within 0..1, and else for
    logits. Here, the logits of a task of this package, or a slice of them, always count as logits.
    For other outputs, it is an error if batches of both kinds decide the result.
    """

    name: str
    metric: Any
    arguments: Callable[[Batch, StepOutput], tuple[Any, ...]] | None = None
    of_logits: bool = field(default=False, kw_only=True)
    """Whether the outputs of the task are logits; the evaluator sets it."""

    def __post_init__(self) -> None:
        for metric in self._metrics.values():
            # BootStrapper, MinMaxMetric, ClasswiseWrapper, ...
            if not getattr(metric, "metric_state", None):
                raise ConfigError(
                    "METRIC",
                    f"{type(metric).__name__} keeps its state in the metrics that it wraps: "
                    "pass those, or write your own Metric",
                )
            metric.sync_on_compute = False  # the evaluator adds up the sums of the processes
            for name, value in metric._defaults.items():
                how = metric._reductions[name]
                is_zero = isinstance(value, Tensor) and not value.any()
                is_added = getattr(how, "__name__", how) == "dim_zero_sum"
                if not (is_zero and is_added) or type(metric).__name__ in _NO_SUMS:
                    raise ConfigError(
                        "METRIC",
                        f"{type(metric).__name__} keeps {name}, which is not a sum: "
                        "pass thresholds=100 if it accepts them, or use WholeSetMetric",
                    )

    def for_task(self, task: Task) -> TorchMetric:
        """Return the metric for the outputs of `task`."""
        return replace(self, of_logits=are_logits(task))

    @property
    def _metrics(self) -> dict[str, Any]:
        """The metrics of torchmetrics by the names that their results are reported as."""
        if isinstance(self.metric, nn.ModuleDict):  # a MetricCollection
            return {f"{self.name}_{name}": metric for name, metric in self.metric.items()}
        return {self.name: self.metric}

    @property
    def higher_is_better(self) -> Directions:
        """Whether more is better, by name, where torchmetrics says so."""
        return {
            name: metric.higher_is_better
            for name, metric in self._metrics.items()
            if metric.higher_is_better is not None
        }

    def empty(self, device: torch.device) -> Tensor:
        """Return zeros: for each metric its states, and how many batches it took for which kind."""
        sizes = [len(_state_of(metric)) + 2 for metric in self._metrics.values()]
        return torch.zeros(sum(sizes), dtype=torch.float64, device=device)

    def update(self, sums: Tensor, batch: Batch, output: StepOutput) -> None:
        """Add the states that the metrics have after this batch alone.

        Raises ConfigError if a metric cannot use the batch.
        """
        own = self.arguments(batch, output) if self.arguments else None
        outputs = own[0] if own else output.outputs
        are_logits = self.of_logits and _shares_memory(outputs, output.outputs)
        parts = []
        try:
            for metric in self._metrics.values():
                metric.to(sums.device)
                others = own[1:] if own else (_targets_for(metric, batch.targets),)
                parts += _measure(metric, outputs, others, are_logits=are_logits)
            sums.add_(torch.cat(parts))
        except Exception as error:  # the library's own types
            raise ConfigError(
                "METRIC",
                f"{type(metric).__name__} cannot use these outputs and targets "
                f"({shorten(str(error), 200)}): choose a metric that fits, say what its update "
                "takes in TorchMetric(arguments=...), or use WholeSetMetric",
            ) from error

    def compute(self, sums: Tensor) -> Results:
        """Return what the metrics compute from the sums over all samples.

        Raises ConfigError if some batches were taken for probabilities, and others for logits.
        """
        start = 0
        for name, metric in self._metrics.items():
            metric.to(sums.device).reset()
            for key, state in metric.metric_state.items():
                summed = sums[start : start + state.numel()]
                setattr(metric, key, summed.view(state.shape).to(state.dtype))
                start += state.numel()
            if sums[start : start + 2].all():
                raise ConfigError(
                    "METRIC",
                    f"{name} depends on the batches: torchmetrics treats outputs as "
                    "probabilities if all of a batch are within 0..1, and otherwise as logits. "
                    "Pass probabilities, as in TorchMetric(..., arguments=lambda batch, output: "
                    "(output.outputs.sigmoid(), batch.targets))",
                )
            start += 2
            # Otherwise it warns that `update` was not called (torchmetrics 1.9).
            metric._update_count = 1
        return {name: metric.compute() for name, metric in self._metrics.items()}


def _measure(
    metric: Any, outputs: Any, others: tuple[Any, ...], *, are_logits: bool
) -> list[Tensor]:
    """Return the states of `metric` after this batch, and the kinds [2] that it took it for.

    The first is 1 if it took the outputs for probabilities, and as logits they would count
    differently; the second is 1 if it took them for logits.
    """

    def state_of(outputs: Any) -> Tensor:
        metric.reset()
        metric.update(outputs, *others)
        return _state_of(metric)

    activation = _activation_of(metric)
    if activation is None or not (isinstance(outputs, Tensor) and outputs.is_floating_point()):
        state = state_of(outputs)
        return [state, state.new_zeros(2)]
    # In float64, in which different logits in float32 keep their order.
    of_logits = state_of(activation(outputs.double()))
    if are_logits:
        return [of_logits, of_logits.new_zeros(2)]
    state = state_of(outputs)
    is_within = ((outputs >= 0) & (outputs <= 1)).all()
    kinds = torch.stack([is_within & (state != of_logits).any(), ~is_within])
    return [state, kinds.to(state)]


def _activation_of(metric: Any) -> Callable[[Tensor], Tensor] | None:
    """Return what `metric` applies to outputs that it takes for logits; None for other metrics."""
    names = _classes_of_classification(metric)
    if any(name.startswith("Multiclass") for name in names):
        return partial(torch.softmax, dim=1)
    return torch.sigmoid if names else None


def _classes_of_classification(metric: Any) -> list[str]:
    kinds = type(metric).__mro__
    return [each.__name__ for each in kinds if each.__module__.startswith(_CLASSIFICATION)]


def _shares_memory(one: Any, other: Any) -> bool:
    return (
        isinstance(one, Tensor)
        and isinstance(other, Tensor)
        and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    )


def _state_of(metric: Any) -> Tensor:
    return torch.cat([state.double().reshape(-1) for state in metric.metric_state.values()])


def _targets_for(metric: Any, targets: Any) -> Any:
    """Return whole numbers as integers if `metric` is one of classification; losses need floats."""
    if not (_classes_of_classification(metric) and targets.is_floating_point()):
        return targets
    integers = targets.long()
    return integers if (integers == targets).all() else targets


@dataclass
class WholeSetMetric:
    """Numbers that a function computes from the whole evaluation set.

    `function(outputs [N, K], targets [N] or [N, T])` runs on every process, for the samples that
    count. Outputs are float64; targets are int64 if they were integers, else float64.

    Each process writes the rows of its samples, by their ids, into an array over all N samples, and
    the arrays are added up: nothing is padded, gathered twice or out of order. That takes about
    8 * N * (K + T) bytes on every process.
    """

    function: Callable[[Tensor, Tensor], Results]
    num_outputs: int
    num_targets: int = 1
    higher_is_better: Directions = field(default_factory=dict)
    num_samples: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ConfigError(
                "METRIC",
                f"WholeSetMetric({self.function!r:.40}, ...) needs a function first: "
                "give WholeSetMetric(function, num_outputs)",
            )

    def for_samples(self, num_samples: int) -> WholeSetMetric:
        """Return the metric for an evaluation of `num_samples`."""
        metric = copy.copy(self)
        metric.num_samples = num_samples
        return metric

    def empty(self, device: torch.device) -> Tensor:
        """Return [N, K + T + 1]: outputs, targets, and 1 or, for targets that are integers, 2."""
        size = self.num_samples, self.num_outputs + self.num_targets + 1
        return torch.zeros(size, dtype=torch.float64, device=device)

    def update(self, sums: Tensor, batch: Batch, output: StepOutput) -> None:
        """Write the batch into the rows of its sample ids.

        Raises ConfigError for other numbers of outputs or targets.
        """
        outputs = output.outputs.reshape(len(batch), -1)
        targets = batch.targets.reshape(len(batch), -1)
        if (outputs.shape[1], targets.shape[1]) != (self.num_outputs, self.num_targets):
            raise ConfigError(
                "SHAPES",
                f"the evaluation has outputs {describe_tensor(output.outputs)} and targets "
                f"{describe_tensor(batch.targets)}, which do not fit this metric: "
                f"set num_outputs={outputs.shape[1]}, num_targets={targets.shape[1]}",
            )
        kind = 1 if batch.targets.is_floating_point() else 2
        kinds = torch.full_like(outputs[:, :1], kind, dtype=torch.float64)
        rows = torch.cat([outputs.double(), targets.double(), kinds], 1)
        sums.index_add_(0, batch.sample_ids, rows)

    def compute(self, sums: Tensor) -> Results:
        """Return what the function computes."""
        rows = sums[sums[:, -1] > 0]  # those of samples that count
        outputs, targets, kinds = rows.split([self.num_outputs, self.num_targets, 1], 1)
        targets = targets.squeeze(1) if self.num_targets == 1 else targets
        return self.function(outputs, targets.long() if (kinds == 2).all() else targets)

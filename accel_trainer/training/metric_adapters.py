"""Metrics of other libraries, exact for any number of processes.

Legend: B batch, K outputs per sample, T targets per sample, N samples of the evaluation.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from textwrap import shorten
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import ConfigError
from ..core.types import Batch, StepOutput
from ..core.wording import describe_tensor
from .metrics import check_labels


@dataclass(frozen=True)
class TorchMetric:
    """A metric of torchmetrics whose state is sums: accuracy, F1, IoU, AUROC with `thresholds`.

    It is reported as `name`; the metrics of a MetricCollection as `name_MulticlassF1Score` and so
    on. `arguments` returns what the metric's `update` takes; None: the outputs and the targets.
    """

    name: str
    metric: Any
    arguments: Callable[[Batch, StepOutput], tuple[Any, ...]] | None = None

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
            for name, value in metric.metric_state.items():
                how = metric._reductions[name]
                if not isinstance(value, Tensor) or getattr(how, "__name__", how) != "dim_zero_sum":
                    raise ConfigError(
                        "METRIC",
                        f"{type(metric).__name__} keeps {name}, which is not a sum: "
                        "pass thresholds=100 if it accepts them, or use WholeSetMetric",
                    )

    @property
    def _metrics(self) -> dict[str, Any]:
        """The metrics of torchmetrics by the names that their results are reported as."""
        if isinstance(self.metric, nn.ModuleDict):  # a MetricCollection
            return {f"{self.name}_{name}": metric for name, metric in self.metric.items()}
        return {self.name: self.metric}

    @property
    def higher_is_better(self) -> Mapping[str, bool]:
        """Whether more is better, by name, where torchmetrics says so."""
        return {
            name: metric.higher_is_better
            for name, metric in self._metrics.items()
            if metric.higher_is_better is not None
        }

    def empty(self, device: torch.device) -> Tensor:
        """Return the state as one vector of zeros."""
        return torch.zeros_like(self._state(), device=device)

    def update(self, sums: Tensor, batch: Batch, output: StepOutput) -> None:
        """Add the state that the metric has after this batch alone.

        Raises ConfigError if a metric cannot use the batch.
        """
        own = self.arguments(batch, output) if self.arguments else None
        try:
            for metric in self._metrics.values():
                metric.to(sums.device).reset()
                metric.update(*own or (output.outputs, _targets_for(metric, batch.targets)))
            sums.add_(self._state())
        except Exception as error:  # the library's own types
            raise ConfigError(
                "METRIC",
                f"{type(metric).__name__} cannot use these outputs and targets "
                f"({shorten(str(error), 200)}): choose a metric that fits, say what its update "
                "takes in TorchMetric(arguments=...), or use WholeSetMetric",
            ) from error

    def compute(self, sums: Tensor) -> dict[str, Any]:
        """Return what the metrics compute from the sums over all samples."""
        start = 0
        for metric in self._metrics.values():
            metric.to(sums.device).reset()
            for name, state in metric.metric_state.items():
                summed = sums[start : start + state.numel()]
                setattr(metric, name, summed.view(state.shape).to(state.dtype))
                start += state.numel()
            # Otherwise it warns that `update` was not called (torchmetrics 1.9).
            metric._update_count = 1
        return {name: metric.compute() for name, metric in self._metrics.items()}

    def _state(self) -> Tensor:
        states = [
            state for metric in self._metrics.values() for state in metric.metric_state.values()
        ]
        return torch.cat([state.double().reshape(-1) for state in states])


def _targets_for(metric: Any, targets: Any) -> Any:
    """Return whole numbers as integers if `metric` is one of classification; losses need floats."""
    is_wanted = any(
        each.__module__.startswith("torchmetrics.classification") for each in type(metric).__mro__
    )
    if not (is_wanted and targets.is_floating_point()):
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

    function: Callable[[Tensor, Tensor], Mapping[str, Any]]
    num_outputs: int
    num_targets: int = 1
    higher_is_better: Mapping[str, bool] = field(default_factory=dict)
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

    def compute(self, sums: Tensor) -> Mapping[str, Any]:
        """Return what the function computes."""
        rows = sums[sums[:, -1] > 0]  # those of samples that count
        outputs, targets, kinds = rows.split([self.num_outputs, self.num_targets, 1], 1)
        targets = targets.squeeze(1) if self.num_targets == 1 else targets
        return self.function(outputs, targets.long() if (kinds == 2).all() else targets)


class EvaluateMetric(WholeSetMetric):
    """Any metric of the `evaluate` library over all predicted classes.

    `metric` is what `evaluate.load` returned; a path to a local module works offline. The library
    does not say whether more is better: name the numbers that may select the best checkpoint in
    `higher_is_better`, as in `{"f1": True}`.
    """

    def __init__(
        self,
        metric: Any,
        compute_arguments: Mapping[str, Any] = MappingProxyType({}),
        higher_is_better: Mapping[str, bool] = MappingProxyType({}),
    ) -> None:
        def compute(predictions: Tensor, labels: Tensor) -> Any:
            classes = predictions.squeeze(1).long().numpy()
            return metric.compute(
                predictions=classes, references=labels.numpy(), **compute_arguments
            )

        super().__init__(compute, num_outputs=1, higher_is_better=higher_is_better)

    def update(self, sums: Tensor, batch: Batch, output: StepOutput) -> None:
        """Write the predicted classes of logits [B, K] and the labels [B] into their rows.

        Raises ConfigError for other shapes.
        """
        check_labels(batch, output)
        super().update(sums, batch, StepOutput(output.losses, output.outputs.argmax(1)))

"""Metrics of other libraries, exact for any number of processes.

Legend: B batch, K outputs per sample, T targets per sample, N samples of the evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import ConfigError
from ..core.types import Batch, EvalOutput
from .metrics import check_logits, describe_tensor


@dataclass(frozen=True)
class TorchMetric:
    """A metric of torchmetrics whose state is sums, as `name`: accuracy, F1, IoU, or AUROC with `thresholds`.

    The metrics of a MetricCollection are reported as `name_MulticlassF1Score` and so on.
    `arguments` gives what `update` takes; None: the outputs and the targets.
    """

    name: str
    metric: Any
    arguments: Callable[[Batch, EvalOutput], tuple[Any, ...]] | None = None

    def __post_init__(self) -> None:
        for metric in self._metrics.values():
            if not metric.metric_state:  # BootStrapper, MinMaxMetric, ClasswiseWrapper and the like
                fact = f"{type(metric).__name__} keeps its state in the metrics that it wraps"
                raise ConfigError("METRIC", f"{fact}: give these, or write a Metric of your own")
            metric.sync_on_compute = False  # the evaluator adds up the sums of the processes
            for name, value in metric.metric_state.items():
                how = metric._reductions[name]
                if not isinstance(value, Tensor) or getattr(how, "__name__", how) != "dim_zero_sum":
                    fact = f"{type(metric).__name__} keeps {name}, which is not a sum"
                    fix = "pass thresholds=100 if it accepts them, or use WholeSetMetric"
                    raise ConfigError("METRIC", f"{fact}: {fix}")

    @property
    def _metrics(self) -> dict[str, Any]:
        """The metrics by the names of their numbers."""
        if isinstance(self.metric, nn.ModuleDict):  # a MetricCollection
            return {f"{self.name}_{name}": metric for name, metric in self.metric.items()}
        return {self.name: self.metric}

    @property
    def higher_is_better(self) -> Mapping[str, bool]:
        """As torchmetrics says."""
        known = {name: metric.higher_is_better for name, metric in self._metrics.items()}
        return {name: is_better for name, is_better in known.items() if is_better is not None}

    def empty(self, device: torch.device) -> Tensor:
        """Return the state as one vector of zeros."""
        return torch.zeros_like(self._state(), device=device)

    def update(self, sums: Tensor, batch: Batch, output: EvalOutput) -> None:
        """Add the state that the metric has after this batch only."""
        arguments = (
            self.arguments(batch, output) if self.arguments else (output.outputs, batch.targets)
        )
        for metric in self._metrics.values():
            metric.to(sums.device).reset()
            metric.update(*arguments)
        sums.add_(self._state())

    def compute(self, sums: Tensor) -> dict[str, Any]:
        """Return the numbers of all samples."""
        start = 0
        for metric in self._metrics.values():
            metric.to(sums.device).reset()
            for name, state in metric.metric_state.items():
                part = sums[start : start + state.numel()]
                setattr(metric, name, part.view(state.shape).to(state.dtype))
                start += state.numel()
            metric._update_count = 1  # or it warns that it has not been updated (torchmetrics 1.9)
        return {name: metric.compute() for name, metric in self._metrics.items()}

    def _state(self) -> Tensor:
        states = [
            state for metric in self._metrics.values() for state in metric.metric_state.values()
        ]
        return torch.cat([state.double().reshape(-1) for state in states])


@dataclass(frozen=True)
class WholeSetMetric:
    """Numbers that `function(outputs [N, K], targets [N] or [N, T])` computes from the whole evaluation set.

    Each process writes its rows at the samples' ids of an array over all N samples, which the merge
    adds up: nothing is padded, gathered twice or out of order. That takes 8 * N * (K + T) bytes on
    every process. Outputs come as float64, targets in the dtype that they had. `function` runs on
    every process.
    """

    function: Callable[[Tensor, Tensor], Mapping[str, Any]]
    num_samples: int
    num_outputs: int
    num_targets: int = 1
    higher_is_better: Mapping[str, bool] = field(default_factory=dict)

    def for_samples(self, num_samples: int) -> WholeSetMetric:
        """Return the metric, if the evaluation has the number of samples that it expects.

        Raises ConfigError.
        """
        if self.num_samples != num_samples:
            fact = f"{type(self).__name__} has num_samples={self.num_samples}"
            raise ConfigError(
                "METRIC", f"{fact}, but the evaluation has {num_samples}: set it to that"
            )
        return self

    def empty(self, device: torch.device) -> Tensor:
        """Return [N, K + T + 1]: outputs, targets, and whether these are integers."""
        size = self.num_samples, self.num_outputs + self.num_targets + 1
        return torch.zeros(size, dtype=torch.float64, device=device)

    def update(self, sums: Tensor, batch: Batch, output: EvalOutput) -> None:
        """Place the batch at its sample ids.

        Raises ConfigError for other numbers of outputs or targets.
        """
        outputs, targets = (
            tensor.reshape(len(batch), -1) for tensor in (output.outputs, batch.targets)
        )
        if (outputs.shape[1], targets.shape[1]) != (self.num_outputs, self.num_targets):
            fact = f"outputs {describe_tensor(output.outputs)} and targets {describe_tensor(batch.targets)}"
            fix = f"set num_outputs={outputs.shape[1]}, num_targets={targets.shape[1]}"
            raise ConfigError(
                "SHAPES",
                f"the evaluation has {fact}, which is not what the metric was made for: {fix}",
            )
        is_integer = torch.full_like(
            outputs[:, :1], not batch.targets.is_floating_point(), dtype=torch.float64
        )
        sums.index_add_(
            0, batch.sample_ids, torch.cat([outputs.double(), targets.double(), is_integer], 1)
        )

    def compute(self, sums: Tensor) -> Mapping[str, Any]:
        """Return what the function computes."""
        outputs, targets, is_integer = sums.split([self.num_outputs, self.num_targets, 1], 1)
        targets = targets.squeeze(1) if self.num_targets == 1 else targets
        return self.function(outputs, targets.long() if is_integer.all() else targets)


class EvaluateMetric(WholeSetMetric):
    """Any metric of the `evaluate` library over all predicted classes, exact for any number of processes.

    `metric` is what `evaluate.load` returned; a path to a local module works offline. The library
    does not say which of its numbers are better when they are higher: name those that a run may be
    judged by in `higher_is_better`, such as `{"f1": True}`.
    """

    def __init__(
        self,
        metric: Any,
        num_samples: int,
        compute_arguments: Mapping[str, Any] = MappingProxyType({}),
        higher_is_better: Mapping[str, bool] = MappingProxyType({}),
    ) -> None:
        def compute(predictions: Tensor, labels: Tensor) -> Any:
            classes = predictions.squeeze(1).long().numpy()
            return metric.compute(
                predictions=classes, references=labels.numpy(), **compute_arguments
            )

        super().__init__(compute, num_samples, num_outputs=1, higher_is_better=higher_is_better)

    def update(self, sums: Tensor, batch: Batch, output: EvalOutput) -> None:
        """Place the predicted classes of logits [B, K] and the labels [B].

        Raises ConfigError for other shapes.
        """
        check_logits(output.outputs, batch.targets, in_loss=False)
        super().update(sums, batch, EvalOutput(output.losses, output.outputs.argmax(1)))

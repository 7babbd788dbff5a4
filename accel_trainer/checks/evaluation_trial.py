"""Tries an evaluation on one batch before the first step: what cannot work fails in one line."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch import Tensor, nn

from ..core.errors import DataError, UserError
from ..core.logger import logger
from ..core.types import Directions, Metric, Position, Results, Task, eval_step_of
from ..core.user_code import describe_error
from ..fault_tolerance.preemption import StopFlag
from ..training.evaluation.evaluation import EvaluationFailed, EvaluationRefused
from ..training.evaluation.evaluator import Evaluator, check_counted, compute, join
from .additive import check_additive
from .coupling import warn_if_coupled
from .trial_copy import trial_copy


@dataclass(frozen=True)
class EvaluationTrial:
    """Evaluates a few batches of each process, for itself, and checks the labels that are at hand.

    With the `train_loader`, the trial stands for the training, too: its labels are checked, and
    whether the task mixes the samples of a batch.
    """

    evaluator: Evaluator
    train_loader: object

    @property
    def monitors(self) -> Directions:
        """As of the evaluator."""
        return self.evaluator.monitors

    def run(
        self, model: nn.Module, position: Position, stop_flag: StopFlag, limit: int = 1
    ) -> Results:
        """Return the metrics of `limit` batches, None for a number that so few do not have.

        **Host sync.** Call it by `run_evaluation`. An exception in an `eval_step` or in `compute`
        is no error here: some need a trained model, and some metrics need many samples.

        Raises:
            ConfigError: the sums of a metric are not float64 or do not add up, or it cannot measure
                a batch.
            DataError: a label cannot be used.
            EvaluationFailed: the update of a metric raised an error.
        """
        evaluator = self.evaluator
        task = trial_copy(evaluator.task)
        batches = [*islice(evaluator.loader.batches(), limit)]
        sums_of = evaluator.empty_sums()
        try:
            measured = evaluator.measure(model, task, batches, sums_of)
        except Exception as error:
            # Training calls `step` before anything else, so it needs nothing that training leaves.
            if isinstance(error, UserError) or not hasattr(task, "eval_step"):
                raise
            logger.warning(
                "the evaluation cannot be tried before training (%s)", describe_error(error)
            )
            return dict.fromkeys(self.monitors)
        if measured.failure:
            raise measured.failure
        if len(measured.sample_ids) == evaluator.loader.num_samples:
            check_counted(measured.num_counted)
        results: dict[str, Any] = {}
        for metric, sums in zip(evaluator.metrics, measured.sums, strict=True):
            if measured.num_counted and sums._version == 0:  # it writes `sums = sums + x`
                logger.warning(
                    "[METRIC] the update of metric %s has not changed its sums: "
                    "add to them in place, as sums.add_(x) does",
                    type(metric).__name__,
                )
            check_additive(metric, batches, measured.output)
            join(results, _compute_of_few(metric, sums.cpu()))
        if measured.output is not None and isinstance(measured.output.outputs, Tensor):
            for loader in (self.train_loader, evaluator.loader):
                _check_extremes(loader, task, measured.output.outputs)
        if self.train_loader is not None and not evaluator.has_collective_forward:
            warn_if_coupled(task, model, batches)
        return results


def _compute_of_few(metric: Metric, sums: Tensor) -> Results:
    """Return what `metric` computes from few samples, None for its numbers if it needs more."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return compute(metric, sums)
    except EvaluationFailed as failure:
        if isinstance(failure, EvaluationRefused) and sums.any():  # else they may have no items
            raise
        return dict.fromkeys(metric.higher_is_better)


def _check_extremes(loader: Any, task: Task, outputs: Tensor) -> None:
    """Check the smallest and the largest labels that a `loader` has at hand, on the CPU.

    `outputs` [B, ...] are some of the model: their values do not matter here.

    Raises DataError if `task` cannot use a label.
    """
    try:
        batch = loader.extremes()
        answers = outputs[:1].cpu().expand(len(batch), *outputs.shape[1:])
        eval_step_of(task)(lambda *_, **__: answers, batch)  # type: ignore[arg-type]
    except DataError:
        raise
    except Exception:  # no labels are at hand, or the task needs more than a forward
        return

"""Evaluation: every sample exactly once on any number of processes, with one host sync."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import recursively_apply, send_to_device
from torch import Tensor, nn

from ..core.batch_plan import parts_of_process
from ..core.buffers import BufferCopy, buffer_places, buffers_at
from ..core.errors import ConfigError, UserError
from ..core.history import check_name, is_number
from ..core.pairwise import PairwiseSum
from ..core.rng import preserved_generators, seed_evaluation
from ..core.training_mode import set_training_mode
from ..core.types import (
    START,
    Batch,
    EvalSource,
    Metric,
    Position,
    StepOutput,
    Task,
    eval_step_of,
)
from ..core.user_code import PartFailed, PeerFailed, describe_error
from ..distributed.collectives import broadcast_from_main, sum_pairwise
from ..fault_tolerance.preemption import StopFlag
from .metrics import describe_tensor, plain_values, sums_device
from .targets import check_extremes
from .task_output import check_output
from .trial_copy import trial_copy

_logger = logging.getLogger(__name__)


class EvaluationStopped(Exception):
    """A signal ended the evaluation early on all processes; there is no result."""


class MetricFailed(PartFailed):
    """A metric raised an error on some process; no process has a result."""


class MetricRefused(MetricFailed, ConfigError):
    """A metric cannot measure what the task returns: one line with a fix, on all processes."""


class Evaluator:
    """Runs a task over an evaluation set and merges its metrics over all processes.

    With `num_parts`, the loader must split the samples into that number of contiguous blocks and
    begin a batch at each. The sums of the blocks are added up in pairs: the metrics are then the
    same bits on any number of processes.

    Random numbers that a task, a model or a metric draws depend on `seed` and on the batch's first
    sample: they are the same in every evaluation. The generators are restored afterwards.
    """

    def __init__(
        self,
        loader: EvalSource,
        *,
        task: Task,
        metrics: Sequence[Metric],
        accelerator: Accelerator,
        num_parts: int | None = None,
        seed: int = 0,
        has_collective_forward: bool = False,
    ) -> None:
        for metric in metrics:
            is_higher = getattr(metric, "higher_is_better", None)
            if not (isinstance(is_higher, Mapping) and {*map(type, is_higher.values())} <= {bool}):
                raise ConfigError(
                    "METRIC",
                    f"higher_is_better of metric {type(metric).__name__} is {is_higher!r}: say "
                    "which numbers can select the best checkpoint, "
                    'as in {"loss": False}, or {} for none',
                )
        metrics = [
            metric.for_samples(loader.num_samples) if hasattr(metric, "for_samples") else metric
            for metric in metrics
        ]
        names = [name for metric in metrics for name in metric.higher_is_better]
        for name in names:
            check_name(name, "a metric")
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(
                "METRIC",
                f"two metrics report numbers named {', '.join(repeated)}: "
                "remove one, or rename its numbers",
            )
        self.loader = loader
        self.task = task
        self.metrics = metrics
        self.accelerator = accelerator
        self._sums_device = sums_device(accelerator.device)
        self._num_parts = num_parts
        self._blocks = parts_of_process(
            range(loader.num_samples),
            num_parts or accelerator.num_processes,
            accelerator.num_processes,
            accelerator.process_index,
        )
        self._seed = seed
        self.has_collective_forward = has_collective_forward

    def run(
        self, model: nn.Module, *, position: Position = START, stop_flag: StopFlag | None = None
    ) -> dict[str, Any]:
        """Return the metrics of the unwrapped `model` over all samples.

        **Collective. Host sync** (one, and one for each batch if the task counts items).

        `model` must not be wrapped in DDP: its forward would wait for processes that have fewer
        samples. If its weights are sharded, the loader must give every process the same number of
        batches, some perhaps empty.

        Raises:
            EvaluationStopped: some process got a signal.
            MetricFailed: a metric raised an error, or returned something other than numbers, texts,
                lists and dicts.
            RuntimeError: the processes together did not count each sample once.
        """
        stop_flag = stop_flag or StopFlag()
        with preserved_generators(self.accelerator.device):
            # Running statistics differ between processes where norms are not synchronised.
            broadcast_from_main(buffers_at([*buffer_places(model).values()]), self.accelerator)
            # Without parts, all samples are added up together.
            ends = [block.stop for block in self._blocks] if self._num_parts else []
            block_sums = _BlockSums(self._empty_sums(), ends)
            batches = (
                batch.at(position) for batch in stop_flag.until_preempted(self.loader.batches())
            )
            with evaluation_mode(model):
                ids, num_counted, _, failure = self._update(model, self.task, block_sums, batches)
            if stop_flag.agreed.is_preemption:
                raise EvaluationStopped
            num_samples = self.loader.num_samples
            # The first and the last place are for ids that are out of range.
            counts = torch.zeros(num_samples + 2, dtype=torch.float64, device=self._sums_device)
            places = ids.clamp(-1, num_samples) + 1
            counts.index_add_(0, places, torch.ones_like(ids, dtype=torch.float64))
            notes = counts.new_tensor([failure is not None, num_counted])
            counts, notes, *merged = self._merge([counts, notes, *block_sums.current])
            # First, since metrics may fail because of wrong ids.
            if not torch.all(counts[1:-1] == 1) or counts[0] or counts[-1]:
                raise RuntimeError(
                    f"evaluation counted {int(counts.sum())} samples, not each of {num_samples} "
                    "once: the evaluation loader must give each sample to exactly one process"
                )
            if notes[0]:
                raise failure or PeerFailed("a metric failed on another process")
            _check_counted(notes[1])
            seed_evaluation(self._seed, num_samples, self.accelerator.device)
            results: dict[str, Any] = {}
            for metric, sums in zip(self.metrics, merged, strict=True):
                results |= _compute(metric, sums)
            return results

    def rehearse(
        self, model: nn.Module, *, monitored: str | None, train_loader: object = None
    ) -> list[Batch]:
        """Try the metrics on the first batch of each process, before any work, and return it.

        The labels that the loaders of this set and of the training set have at hand are checked.

        **Collective. Host sync.**

        `monitored` is the number of this set that will decide the best checkpoint, such as `loss`;
        None if it belongs to a different set. An exception in an `eval_step` or in `compute` is not
        an error here: some need a trained model, and some metrics need many samples.

        Raises:
            ConfigError: sums are not float64, a metric cannot measure the batch, or `monitored` is
                not one number.
            DataError: a label cannot be used.
            MetricFailed: a metric raised an error in `update`.
            Exception: the `step` of a task without `eval_step` raised it.
        """
        block_sums = _BlockSums(self._empty_sums(), [])
        task = trial_copy(self.task)
        failure: Exception | None = None
        ids, num_counted, output = torch.zeros(0), 0, None
        batches: list[Batch] = []
        with (
            evaluation_mode(model),
            preserved_generators(self.accelerator.device),
            torch.compiler.set_stance("force_eager"),  # the rehearsal must not change what compiles
        ):
            try:
                batches += islice(self.loader.batches(), 1)
                ids, num_counted, output, failure = self._update(model, task, block_sums, batches)
            except UserError:
                raise
            except Exception as error:
                failure = error
            has_failed = failure is not None
            # Training calls `step` before anything else, so it needs nothing that training leaves.
            is_error = isinstance(failure, MetricFailed) or not hasattr(task, "eval_step")
            flags = torch.tensor(
                [has_failed and is_error, has_failed, num_counted, len(ids)],
                dtype=torch.float64,
                device=self._sums_device,
            )
            flags, *merged = self._merge([flags, *block_sums.current])
            if flags[0]:
                raise failure or PeerFailed("the evaluation failed on another process")
            if flags[1]:
                _logger.warning(
                    "the evaluation cannot be tried before training (%s)",
                    describe_error(failure) if failure else "on another process",
                )
            else:
                if flags[3] == self.loader.num_samples:
                    _check_counted(flags[2])
                for metric, own, sums in zip(self.metrics, block_sums.current, merged, strict=True):
                    if num_counted and own._version == 0:  # it writes `sums = sums + x`
                        _logger.warning(
                            "[METRIC] the update of metric %s has not changed its sums: "
                            "add to them in place, as sums.add_(x) does",
                            type(metric).__name__,
                        )
                    _rehearse_compute(metric, sums, monitored)
                if output is not None and isinstance(output.outputs, Tensor):
                    for loader in (train_loader, self.loader):
                        check_extremes(loader, task, output.outputs)
        return batches

    def _empty_sums(self) -> list[Tensor]:
        """Return zeroed sums of all metrics.

        Raises ConfigError unless they are float64, which holds counts exactly.
        """
        all_sums = [metric.empty(self._sums_device) for metric in self.metrics]
        for metric, sums in zip(self.metrics, all_sums, strict=True):
            if not isinstance(sums, Tensor) or sums.dtype != torch.float64:
                raise ConfigError(
                    "METRIC",
                    f"the sums of metric {type(metric).__name__} are {describe_tensor(sums)}: "
                    "return float64 zeros from its empty, in which counts are exact",
                )
        return all_sums

    def _update(
        self, model: nn.Module, task: Task, block_sums: _BlockSums, batches: Iterable[Batch]
    ) -> tuple[Tensor, int, StepOutput | None, MetricFailed | None]:
        """Add `batches` to the sums.

        Return the sample ids, how many of the samples count, an output, and a metric's first
        failure.
        """
        seen = [torch.zeros(0, dtype=torch.int64, device=self._sums_device)]
        num_counted = 0
        latest: StepOutput | None = None
        failure: MetricFailed | None = None
        eval_step = eval_step_of(task)
        first_sample = self._blocks[0].start
        # Not inference mode: tensors that a forward caches there, or FSDP gathers, cannot be
        # trained on (torch 2.13).
        with torch.no_grad(), self.accelerator.autocast():
            for batch in batches:
                seed_evaluation(self._seed, first_sample, self.accelerator.device)
                if len(batch) > 0 or self.has_collective_forward:
                    output = eval_step(model, batch)
                    check_output(output, len(batch), has_graph=False)
                if len(batch) == 0:
                    continue
                if self._sums_device != self.accelerator.device:
                    # Not by `Batch.to`, whose copies do not block: the host would read them before
                    # they are complete.
                    batch = batch.map(lambda tensor: tensor.to(self._sums_device))
                    output = send_to_device(output, self._sums_device)
                latest = output
                seen.append(batch.sample_ids)
                block_sums.begin_batch(first_sample)
                first_sample += len(batch)
                batch, output = _without_ignored(batch, output)
                num_counted += len(batch)
                if len(batch) == 0:
                    continue
                for metric, sums in zip(self.metrics, block_sums.current, strict=True):
                    try:
                        returned: object = metric.update(sums, batch, output)  # type: ignore[func-returns-value]
                        if isinstance(returned, Tensor) and returned is not sums:
                            raise ConfigError(
                                "METRIC", "update returned new sums: add to the given ones in place"
                            )
                    except Exception as error:
                        failure = failure or _failure_of(metric, error)
            block_sums.end()
        return torch.cat(seen).long(), num_counted, latest, failure

    def _merge(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Add up tensors over the processes in one collective; return them on the CPU."""
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        if self._num_parts is None:
            flat = self.accelerator.reduce(flat, reduction="sum")
        else:
            sum_pairwise(flat, self.accelerator)
        merged = flat.cpu().split([tensor.numel() for tensor in tensors])
        return [each.view(tensor.shape) for each, tensor in zip(merged, tensors, strict=True)]


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode, and restore its mode and buffers afterwards."""
    was_training = model.training
    buffers = BufferCopy([*buffer_places(model).values()])
    model.eval()
    yield
    # A forward may change buffers in evaluation, too, even into tensors that cannot be trained.
    buffers.put_back()
    if was_training:
        set_training_mode(model)


def _without_ignored(batch: Batch, output: StepOutput) -> tuple[Batch, StepOutput]:
    """Leave out the samples of which no item counts. **Host sync** if the task counts items."""
    items = output.num_items
    if items is None or not output.is_per_sample or items.all():
        return batch, output

    def kept(tensor: Tensor) -> Tensor:
        return tensor[items != 0]

    return batch.map(kept), recursively_apply(kept, output)


def _check_counted(number: Tensor) -> None:
    """Raise MetricRefused if the `number` of samples to measure is 0."""
    if not number:
        raise MetricRefused(
            "NUM_ITEMS",
            "no sample of an evaluation set counts in the loss: all targets are ignored, or the "
            "task returned num_items of 0 for all samples: evaluate on samples with labels",
        )


class _BlockSums:
    """The metrics' sums over the blocks of this process.

    `current` are the sums of the block in progress; the sums of earlier blocks are added up in
    pairs. `ends` are the samples before which a block ends; without any, all samples are one block.
    """

    def __init__(self, sums: list[Tensor], ends: list[int]) -> None:
        self.current = sums
        self._ends = ends
        self._tree = PairwiseSum()

    def begin_batch(self, first_sample: int) -> None:
        """Complete the blocks that end before the batch that begins with `first_sample`."""
        while self._ends and first_sample >= self._ends[0]:
            del self._ends[0]
            self._tree.add([sums.clone() for sums in self.current])
            for sums in self.current:
                sums.zero_()

    def end(self) -> None:
        """Complete the blocks that are left; `current` then has the sums over all blocks."""
        if self._ends:
            self.begin_batch(self._ends[-1])
            self.current = self._tree.total()


def _compute(metric: Metric, sums: Tensor) -> dict[str, Any]:
    """Return what `metric` computes, as plain values. Raises MetricFailed."""
    try:
        return plain_values(metric.compute(sums))
    except Exception as error:
        raise _failure_of(metric, error) from error


def _rehearse_compute(metric: Metric, sums: Tensor, monitored: str | None) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            values = _compute(metric, sums)
    except MetricFailed as failure:
        if isinstance(failure, MetricRefused) and sums.any():  # else the batch may have no items
            raise
        _logger.info("one batch is too few: %s", failure)
        return
    if monitored is not None and monitored in metric.higher_is_better:
        check_monitored(values, monitored)


def group_of(set_name: str, *, is_average: bool) -> str:
    """Return the group of an evaluation's metrics, such as `eval`, `eval_ema` or `eval_hard`."""
    return "eval" + "_ema" * is_average + f"_{set_name}" * bool(set_name)


def check_monitored(values: Mapping[str, Any], name: str) -> float:
    """Return the number that decides the best checkpoint, NaN for None.

    Raises MetricRefused if it is missing, or not a single number.
    """
    if name not in values:
        raise MetricRefused(
            "METRIC",
            f"{name} decides the best checkpoint, and the metrics computed "
            f"{', '.join(values) or 'nothing'}: "
            "name it alike in `compute` and `higher_is_better` of the metric",
        )
    value = values[name]
    if value is None:
        return math.nan
    if not is_number(value):
        raise MetricRefused(
            "METRIC",
            f"{name} decides the best checkpoint, and is of type {type(value).__name__}: "
            "set --trainer.monitor to a single number, such as eval/loss",
        )
    return value


def nonfinite_loss(metrics: Mapping[str, Any]) -> str | None:
    """Return the name and value of a loss that is NaN or inf; None if there is no such loss."""
    for name, value in metrics.items():
        if name.endswith("/loss") and is_number(value) and not math.isfinite(value):
            return f"{name} is {value}"
    return None


def _failure_of(metric: Metric, error: Exception) -> MetricFailed:
    """Return `error`, raised by `metric`, as an error that names the metric."""
    name = type(metric).__name__
    failure = MetricFailed(f"metric {name} failed ({type(error).__name__}: {error})")
    if isinstance(error, UserError):
        failure = MetricRefused(error.code, f"metric {name}: {error.message}")
    failure.__cause__ = error
    return failure

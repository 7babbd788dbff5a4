"""Evaluation: every sample exactly once on any number of processes, with one host sync."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import recursively_apply, send_to_device
from torch import Tensor, nn

from ...core.batch_plan import parts_of_process
from ...core.errors import ConfigError, PeerFailed, UserError
from ...core.pairwise import PairwiseSum
from ...core.rng import seed_evaluation
from ...core.types import (
    Batch,
    EvalSource,
    Metric,
    Position,
    Results,
    StepOutput,
    Task,
    eval_step_of,
)
from ...core.wording import describe_tensor
from ...distributed.collectives import sum_pairwise
from ...fault_tolerance.preemption import StopFlag
from ..plain_values import plain_values
from ..tasks.task_output import check_output
from .evaluation import EvaluationFailed, EvaluationRefused, check_directions
from .metrics import sums_device


class Measured(NamedTuple):
    """What a process measures: the sums, and of how many samples.

    `output` is that of the last batch, and `failure` the first one of a metric.
    """

    sums: list[Tensor]
    sample_ids: Tensor
    num_counted: int
    output: StepOutput | None
    failure: EvaluationFailed | None


@dataclass(eq=False)
class Evaluator:
    """The exact evaluation of a set by a task, whose metrics are merged over all processes.

    With `num_parts`, the loader must split the samples into that number of contiguous blocks and
    begin a batch at each. The sums of the blocks are added up in pairs: the metrics are then the
    same bits on any number of processes.

    Random numbers that a task, a model or a metric draws depend on `seed` and on the batch's first
    sample: they are the same in every evaluation.

    Raises:
        ConfigError: a metric does not say which of its numbers can select the best checkpoint, or
            two report numbers of the same name.
    """

    loader: EvalSource
    _: KW_ONLY
    task: Task
    metrics: Sequence[Metric]
    accelerator: Accelerator
    num_parts: int | None = None
    seed: int = 0
    has_collective_forward: bool = False

    def __post_init__(self) -> None:
        self.monitors: dict[str, bool] = {}
        num_samples = self.loader.num_samples
        metrics = []
        for metric in self.metrics:
            check_directions(metric, "higher_is_better")
            join(self.monitors, metric.higher_is_better)
            if hasattr(metric, "for_samples"):
                metric = metric.for_samples(num_samples)
            if hasattr(metric, "for_task"):
                metric = metric.for_task(self.task)
            metrics.append(metric)
        self.metrics = metrics
        self._sums_device = sums_device(self.accelerator.device)
        num_processes = self.accelerator.num_processes
        self._blocks = parts_of_process(
            range(num_samples),
            self.num_parts or num_processes,
            num_processes,
            self.accelerator.process_index,
        )

    def run(
        self,
        model: nn.Module,
        position: Position,
        stop_flag: StopFlag,
    ) -> Results:
        """Return the metrics of `model` over all samples; call it by `run_evaluation`.

        **Collective. Host sync** (one, and one for each batch if the task counts items).

        `model` must not be wrapped in DDP: its forward would wait for processes that have fewer
        samples. If its weights are sharded, the loader must give every process the same number of
        batches, some perhaps empty.

        Raises:
            ConfigError: the sums of a metric are not float64.
            DataError: a label cannot be used.
            EvaluationFailed: a metric raised an error, or returned something other than numbers,
                texts, lists and dicts.
            RuntimeError: the processes together did not count each sample once.
        """
        batches = (batch.at(position) for batch in stop_flag.until_preempted(self.loader.batches()))
        # Without parts, all samples are added up together.
        ends = [block.stop for block in self._blocks] if self.num_parts else []
        sums, ids, num_counted, _, failure = self.measure(
            model, self.task, batches, self.empty_sums(), ends
        )
        num_samples = self.loader.num_samples
        # The first and the last place are for ids that are out of range.
        counts = torch.zeros(num_samples + 2, dtype=torch.float64, device=self._sums_device)
        counts.index_add_(0, ids.clamp(-1, num_samples) + 1, counts.new_ones(len(ids)))
        notes = counts.new_tensor([failure is not None, num_counted])
        counts, notes, *merged = self._merge([counts, notes, *sums])
        # First, since metrics may fail because of wrong ids.
        if not torch.all(counts[1:-1] == 1) or counts[0] or counts[-1]:
            raise RuntimeError(
                f"evaluation counted {int(counts.sum())} samples, not each of {num_samples} "
                "once: the evaluation loader must give each sample to exactly one process"
            )
        if notes[0]:
            raise failure or PeerFailed("a metric failed on another process")
        check_counted(notes[1])
        seed_evaluation(self.seed, num_samples, self.accelerator.device)
        results: dict[str, Any] = {}
        for metric, total in zip(self.metrics, merged, strict=True):
            join(results, compute(metric, total))
        return results

    def empty_sums(self) -> list[Tensor]:
        """Return zeroed sums of all metrics.

        Raises ConfigError unless they are float64, which holds counts exactly.
        """
        all_sums = []
        for metric in self.metrics:
            sums = metric.empty(self._sums_device)
            all_sums.append(sums)
            if not isinstance(sums, Tensor) or sums.dtype != torch.float64:
                raise ConfigError(
                    "METRIC",
                    f"the sums of metric {type(metric).__name__} are {describe_tensor(sums)}: "
                    "return float64 zeros from its empty, in which counts are exact",
                )
        return all_sums

    def measure(
        self,
        model: nn.Module,
        task: Task,
        batches: Iterable[Batch],
        sums: list[Tensor],
        ends: Sequence[int] = (),
    ) -> Measured:
        """Add this process's `batches` to the `sums` of the metrics.

        `ends` are the samples before which a block ends; without any, all samples are one block.
        """
        block_sums = _BlockSums(sums, [*ends])
        seen = [torch.zeros(0, dtype=torch.int64, device=self._sums_device)]
        num_counted = 0
        latest: StepOutput | None = None
        failure: EvaluationFailed | None = None
        eval_step = eval_step_of(task)
        first_sample = self._blocks[0].start
        with self.accelerator.autocast():
            for batch in batches:
                seed_evaluation(self.seed, first_sample, self.accelerator.device)
                if len(batch) or self.has_collective_forward:
                    output = eval_step(model, batch)
                    check_output(output, len(batch), has_graph=False)
                if not len(batch):
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
                batch, output = without_ignored(batch, output)
                num_counted += len(batch)
                if not len(batch):
                    continue
                for metric, current in zip(self.metrics, block_sums.current, strict=True):
                    try:
                        returned: object = metric.update(current, batch, output)  # type: ignore[func-returns-value]
                        if isinstance(returned, Tensor) and returned is not current:
                            raise ConfigError(
                                "METRIC", "update returned new sums: add to the given ones in place"
                            )
                    except Exception as error:
                        failure = failure or _failure_of(metric, error)
            block_sums.end()
        ids = torch.cat(seen).long()
        return Measured(block_sums.current, ids, num_counted, latest, failure)

    def _merge(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Add up tensors over the processes in one collective; return them on the CPU."""
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        if self.num_parts is None:
            flat = self.accelerator.reduce(flat)
        else:
            sum_pairwise(flat, self.accelerator)
        merged = flat.cpu().split([tensor.numel() for tensor in tensors])
        return [each.view(tensor.shape) for each, tensor in zip(merged, tensors, strict=True)]


def without_ignored(batch: Batch, output: StepOutput) -> tuple[Batch, StepOutput]:
    """Leave out the samples of which no item counts. **Host sync** if the task counts items."""
    items = output.num_items
    if items is None or not output.is_per_sample or items.all():
        return batch, output

    def kept(tensor: Tensor) -> Tensor:
        return tensor[items != 0]

    return batch.map(kept), recursively_apply(kept, output)


def check_counted(number: Tensor | int) -> None:
    """Raise EvaluationRefused if the `number` of samples to measure is 0."""
    if not number:
        raise EvaluationRefused(
            "NUM_ITEMS",
            "no sample of an evaluation set counts in the loss: all targets are ignored, or the "
            "task returned num_items of 0 for all samples: evaluate on samples with labels",
        )


def join(known: dict[str, Any], found: Mapping[str, Any]) -> None:
    """Add what a metric has `found`. Raises ConfigError if another one has the same name."""
    if repeated := sorted(known.keys() & found.keys()):
        raise ConfigError(
            "METRIC",
            f"two metrics report numbers named {', '.join(repeated)}: "
            "remove one, or rename its numbers",
        )
    known |= found


@dataclass
class _BlockSums:
    """The metrics' sums over the blocks of this process.

    `current` are the sums of the block in progress; the sums of earlier blocks are added up in
    pairs. `ends` are the samples before which a block ends; without any, all samples are one block.
    """

    current: list[Tensor]
    ends: list[int]
    _tree: PairwiseSum = field(default_factory=PairwiseSum)

    def begin_batch(self, first_sample: int) -> None:
        """Complete the blocks that end before the batch that begins with `first_sample`."""
        while self.ends and first_sample >= self.ends[0]:
            del self.ends[0]
            self._tree.add([sums.clone() for sums in self.current])
            for sums in self.current:
                sums.zero_()

    def end(self) -> None:
        """Complete the blocks that are left; `current` then has the sums over all blocks."""
        if self.ends:
            self.begin_batch(self.ends[-1])
            self.current = self._tree.total()


def compute(metric: Metric, sums: Tensor) -> Results:
    """Return what `metric` computes, as plain values. Raises EvaluationFailed."""
    try:
        return plain_values(metric.compute(sums))
    except Exception as error:
        raise _failure_of(metric, error) from error


def _failure_of(metric: Metric, error: Exception) -> EvaluationFailed:
    """Return `error`, raised by `metric`, as an error that names the metric."""
    name = type(metric).__name__
    failure = EvaluationFailed(f"metric {name} failed ({type(error).__name__}: {error})")
    if isinstance(error, UserError):
        failure = EvaluationRefused(error.code, f"metric {name}: {error.message}")
    failure.__cause__ = error
    return failure

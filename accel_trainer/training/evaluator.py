"""Evaluation: every sample exactly once for any number of processes, one collective and one host sync."""

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
from accelerate.utils import send_to_device
from torch import Tensor, nn

from ..core.batch_plan import parts_of_process
from ..core.buffers import BufferCopy, buffer_places, buffers_at
from ..core.errors import ConfigError, DataError, UserError
from ..core.pairwise import PairwiseSum
from ..core.rng import preserved_generators, seed_evaluation
from ..core.training_mode import set_training_mode
from ..core.types import Batch, EvalLoader, Metric, Task
from ..core.user_code import PartFailed, PeerFailed
from ..distributed.collectives import copy_from_main, sum_pairwise
from ..fault_tolerance.preemption import StopFlag
from .metrics import describe_tensor, is_number, plain_values, sums_device
from .task_output import check_eval_output
from .trial import set_aside

_logger = logging.getLogger(__name__)


class EvaluationStopped(Exception):
    """A signal ended an evaluation early, on all processes: it has no result."""


class MetricFailed(PartFailed):
    """A metric raised an error, on one process or more: the evaluation has no result, on any."""


class MetricRefused(MetricFailed, ConfigError):
    """A metric cannot measure what the task returns for a batch: a one-line error with its fix, on all processes."""


class Evaluator:
    """Runs a task over an evaluation set and merges its metrics over all processes.

    With `num_parts`, which a loader of as many parts must have split the samples into, the sums of
    the parts are added up in pairs: the metrics are then the same bits on any number of processes.

    Random numbers that a task, a model or a metric draws depend on `seed` and on the place of the
    batch in the set: they are the same in every evaluation. The generators are restored afterwards.
    """

    def __init__(
        self,
        loader: EvalLoader,
        *,
        task: Task,
        metrics: Sequence[Metric],
        accelerator: Accelerator,
        num_parts: int | None = None,
        seed: int = 0,
        has_collective_forward: bool = False,
    ) -> None:
        if loader.num_samples < 1:
            raise DataError("DATA_TOO_SMALL", "there are no samples to evaluate on: add some")
        for metric in metrics:
            if not hasattr(metric, "higher_is_better"):
                fix = 'say which of its numbers can select the best checkpoint, as in {"loss": False}, or {} for none'
                raise ConfigError(
                    "METRIC", f"metric {type(metric).__name__} has no higher_is_better: {fix}"
                )
        metrics = [
            metric.for_samples(loader.num_samples) if hasattr(metric, "for_samples") else metric
            for metric in metrics
        ]
        names = [name for metric in metrics for name in metric.higher_is_better]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            fix = "remove one, or rename its numbers"
            raise ConfigError(
                "METRIC", f"two metrics report numbers named {', '.join(repeated)}: {fix}"
            )
        self.loader, self.task, self.metrics, self.accelerator = loader, task, metrics, accelerator
        self._sums_device = sums_device(accelerator.device)
        self._num_parts = num_parts
        self._seed = seed
        self._has_collective_forward = has_collective_forward

    def run(self, model: nn.Module, *, stop_flag: StopFlag | None = None) -> dict[str, Any]:
        """Return the metrics of the unwrapped `model` over all samples.

        **Collective. Host sync** (one).

        `model` must not be wrapped in DDP: its forward would wait for processes that have fewer
        samples. If its weights are sharded, the loader must give every process the same number of
        batches, some perhaps empty.

        Raises:
            EvaluationStopped: some process got a signal.
            MetricFailed: a metric raised, or returned something else than numbers, texts, lists and
                dicts.
            RuntimeError: the processes together did not count each sample once.
        """
        with preserved_generators(self.accelerator.device):
            return self._run(model, stop_flag)

    def _run(self, model: nn.Module, stop_flag: StopFlag | None) -> dict[str, Any]:
        # Statistics differ where norms are not synchronised.
        copy_from_main(buffers_at([*buffer_places(model).values()]), self.accelerator)
        parts = _PartSums(self._empty_sums(), self._part_ends())
        batches: Iterable[Batch] = self.loader.batches()
        if stop_flag is not None:
            batches = stop_flag.until_preempted(batches)
        with _evaluation_mode(model):
            seen, failure = self._update(model, self.task, parts, batches)
        if stop_flag is not None and stop_flag.agreed.is_preemption:
            raise EvaluationStopped
        num_samples = self.loader.num_samples
        ids = (torch.cat(seen).long() if seen else torch.zeros(0, dtype=torch.int64)).to(
            self._sums_device
        )
        places = torch.where((ids >= 0) & (ids < num_samples), ids, num_samples)
        # How often each sample was counted; the last count is of ids that are out of range.
        counts = torch.zeros(num_samples + 1, dtype=torch.float64, device=self._sums_device)
        counts.index_add_(0, places, torch.ones_like(places, dtype=torch.float64))
        counts, num_failures, *merged = self._merge(
            [counts, counts.new_full((1,), failure is not None), *parts.sums]
        )
        if num_failures:
            raise failure or PeerFailed("a metric failed on another process")
        if not torch.all(counts[:-1] == 1) or counts[-1]:
            fact = f"evaluation counted {int(counts.sum())} samples, not each of {num_samples} once"
            raise RuntimeError(
                f"{fact}: the evaluation loader must give each sample to exactly one process"
            )
        self._seed_batch(num_samples)
        results: dict[str, Any] = {}
        for metric, sums in zip(self.metrics, merged, strict=True):
            try:
                values = metric.compute(sums)
            except Exception as error:
                raise _failure_of(metric, error) from error
            try:
                results.update(plain_values(values))
            except TypeError as error:
                raise _failure_of(metric, ConfigError("METRIC", str(error))) from None
        return results

    def rehearse(self, model: nn.Module, *, monitored: str | None) -> None:
        """Try the metrics on the first batch of each process, before any work.

        **Collective. Host sync.**

        `monitored` is the number that will decide the best checkpoint, such as `eval/loss`. An
        exception of the task or of `compute` is not an error here: some need what training leaves,
        or many samples.

        Raises:
            ConfigError: sums are not float64, a metric cannot measure the batch, or `monitored` is
                not one number.
            MetricFailed: a metric raised in `update`.
        """
        parts, task = _PartSums(self._empty_sums(), []), set_aside(self.task)
        failure: Exception | None = None
        with (
            _evaluation_mode(model),
            preserved_generators(self.accelerator.device),
            torch.compiler.set_stance("force_eager"),  # what is compiled must not depend on this
        ):
            try:
                _, failure = self._update(model, task, parts, islice(self.loader.batches(), 1))
            except UserError:
                raise
            except Exception as error:
                failure = error
            own = [float(isinstance(failure, MetricFailed)), float(failure is not None)]
            flags, *merged = self._merge(
                [torch.tensor(own, dtype=torch.float64, device=self._sums_device), *parts.sums]
            )
            if flags[0]:
                raise (
                    failure
                    if isinstance(failure, MetricFailed)
                    else PeerFailed("a metric failed on another process")
                )
            if flags[1]:
                _logger.info(
                    "the evaluation cannot be tried before training (%s)",
                    failure or "on another process",
                )
            else:
                self._warn_of_unchanged(parts)
                for metric, sums in zip(self.metrics, merged, strict=True):
                    self._rehearse_compute(metric, sums, monitored)

    def _warn_of_unchanged(self, parts: _PartSums) -> None:
        """Warn of a metric that writes `sums = sums + x`: it would measure nothing but zeros."""
        is_empty = len(self._parts()[0]) == 0
        for metric, sums in zip(self.metrics, parts.sums, strict=True):
            if sums._version == 0 and not is_empty:
                fact = f"the update of metric {type(metric).__name__} has not changed its sums"
                _logger.warning("[METRIC] %s: add to them in place, as sums.add_(x) does", fact)

    def _rehearse_compute(self, metric: Metric, sums: Tensor, monitored: str | None) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                values = plain_values(metric.compute(sums))
        except UserError as error:
            raise _failure_of(metric, error) from error
        except Exception as error:
            _logger.info("%s does not compute of one batch (%s)", type(metric).__name__, error)
            return
        group, _, name = (monitored or "").partition("/")
        if name in metric.higher_is_better:
            check_monitored(
                {f"{group}/{each}": value for each, value in values.items()}, f"{group}/{name}"
            )

    def _empty_sums(self) -> list[Tensor]:
        """Return zeroed sums of all metrics.

        Raises ConfigError unless they are float64, in which counts are exact.
        """
        all_sums = [metric.empty(self._sums_device) for metric in self.metrics]
        for metric, sums in zip(self.metrics, all_sums, strict=True):
            if not isinstance(sums, Tensor) or sums.dtype != torch.float64:
                fact = f"the sums of metric {type(metric).__name__} are {describe_tensor(sums)}"
                raise ConfigError(
                    "METRIC",
                    f"{fact}: return float64 zeros from its empty, in which counts are exact",
                )
        return all_sums

    def _seed_batch(self, position: int) -> None:
        seed_evaluation(self._seed, position=position, device=self.accelerator.device)

    def _parts(self) -> list[range]:
        """Return the samples of each part of this process."""
        accelerator = self.accelerator
        num_parts = self._num_parts or accelerator.num_processes
        samples = range(self.loader.num_samples)
        return parts_of_process(
            samples, num_parts, accelerator.num_processes, accelerator.process_index
        )

    def _part_ends(self) -> list[int]:
        """Return after how many of its samples each part of this process ends."""
        if self._num_parts is None:
            return []
        parts = self._parts()
        return [part.stop - parts[0].start for part in parts]

    def _update(
        self, model: nn.Module, task: Task, parts: _PartSums, batches: Iterable[Batch]
    ) -> tuple[list[Tensor], MetricFailed | None]:
        """Add `batches` to the metrics' sums; return the sample ids, and the first failure of a metric."""
        seen: list[Tensor] = []
        failure: MetricFailed | None = None
        position = self._parts()[0].start
        # Not inference mode: what a forward caches there, or FSDP gathers, cannot be trained on
        # (torch 2.13).
        with torch.no_grad(), self.accelerator.autocast():
            for batch in batches:
                self._seed_batch(position)
                position += len(batch)
                if len(batch) > 0 or self._has_collective_forward:
                    output = task.eval_step(model, batch)
                    check_eval_output(output)
                if len(batch) == 0:
                    continue
                if self._sums_device != self.accelerator.device:
                    # Not by `Batch.to`, whose copies do not block: the host would read them too
                    # early.
                    batch = batch.map(lambda tensor: tensor.to(self._sums_device))
                    output = send_to_device(output, self._sums_device)
                seen.append(batch.sample_ids)
                parts.begin_batch(len(batch))
                for metric, sums in zip(self.metrics, parts.sums, strict=True):
                    try:
                        returned: object = metric.update(sums, batch, output)  # type: ignore[func-returns-value]
                        if isinstance(returned, Tensor) and returned is not sums:
                            raise ConfigError(
                                "METRIC", "update returned new sums: add to the given ones in place"
                            )
                    except Exception as error:
                        failure = failure or _failure_of(metric, error)
            parts.end()
        return seen, failure

    def _merge(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Add up all sums over the processes at once; return them on the CPU."""
        flat = torch.cat([part.reshape(-1) for part in parts])
        if self._num_parts is None:
            flat = self.accelerator.reduce(flat, reduction="sum")
        else:
            sum_pairwise(flat, self.accelerator)
        pieces = flat.cpu().split([part.numel() for part in parts])
        return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Let the model be in evaluation mode, and after the block as before."""
    was_training = model.training
    buffers = BufferCopy([*buffer_places(model).values()])
    model.eval()
    yield
    # a forward may change them in evaluation, too, even into tensors that cannot be trained
    buffers.put_back()
    if was_training:
        set_training_mode(model)


class _PartSums:
    """The metrics' sums: `sums` of the part in progress, and in pairs those of the parts before it.

    `ends` are the samples of this process after which a part is complete; empty: all are added up
    as one part.
    """

    def __init__(self, sums: list[Tensor], ends: list[int]) -> None:
        self.sums = sums
        self._ends, self._num_samples, self._tree = ends, 0, PairwiseSum()

    def begin_batch(self, num_samples: int) -> None:
        """Complete the parts that end before the next batch."""
        while self._ends and self._num_samples >= self._ends[0]:
            self._complete()
        self._num_samples += num_samples

    def end(self) -> None:
        """Complete the parts that are left, and let `sums` be the sums over all."""
        if self._ends:
            while self._ends:
                self._complete()
            self.sums = self._tree.total()

    def _complete(self) -> None:
        del self._ends[0]
        self._tree.add([sums.clone() for sums in self.sums])
        for sums in self.sums:
            sums.zero_()


def check_monitored(values: Mapping[str, Any], name: str) -> float:
    """Return the number that decides the best checkpoint, NaN for None.

    Raises MetricRefused if it is not there, or not a single number.
    """
    value = values.get(name, values)
    if value is None or is_number(value):
        return math.nan if value is None else value
    if value is values:
        fact = f"{name} decides the best checkpoint, and the metrics computed {', '.join(values) or 'nothing'}"
        raise MetricRefused(
            "METRIC", f"{fact}: name it alike in `compute` and `higher_is_better` of the metric"
        )
    fact = f"{name} decides the best checkpoint, and is a {type(value).__name__}"
    raise MetricRefused(
        "METRIC", f"{fact}: set --trainer.monitor to a single number, such as eval/loss"
    )


def nonfinite_loss(metrics: Mapping[str, Any]) -> str | None:
    """Return the name and the value of a loss that is NaN or inf, if an evaluation measured one."""
    losses = {
        name: value
        for name, value in metrics.items()
        if name.endswith("/loss") and is_number(value)
    }
    return next(
        (f"{name} is {value}" for name, value in losses.items() if not math.isfinite(value)), None
    )


def _failure_of(metric: Metric, error: Exception) -> MetricFailed:
    if isinstance(error, UserError):
        failure: MetricFailed = MetricRefused(
            error.code, f"metric {type(metric).__name__}: {error.args[0]}"
        )
    else:
        failure = MetricFailed(
            f"metric {type(metric).__name__} failed ({type(error).__name__}: {error})"
        )
    failure.__cause__ = error
    return failure

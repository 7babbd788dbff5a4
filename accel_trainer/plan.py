"""The batch arithmetic: how an epoch is cut into windows, processes and micro-batches. Pure integers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

import tyro

from .errors import ConfigError, DataError


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """Cuts an epoch of `num_samples` into windows of `global_batch_size`, the same for any hardware.

    A window is the samples of one optimizer step. Each process takes a contiguous share of it, cut
    into micro-batches of at most `per_device_batch_size`. The last window of an epoch may be short:
    it is trained as it is, every sample once, or left out with `drop_last`.
    """

    num_samples: int
    global_batch_size: int
    per_device_batch_size: int
    num_processes: int = 1
    drop_last: bool = False

    def __post_init__(self) -> None:
        if self.num_samples < max(1, self.num_processes):
            fact = f"{self.num_samples} training samples are too few for {self.num_processes} processes"
            raise DataError("DATA_TOO_SMALL", f"{fact}: add data, or launch fewer processes")
        for name in ("global_batch_size", "per_device_batch_size", "num_processes"):
            if getattr(self, name) < 1:
                raise ConfigError("BATCH_SIZE", f"{name} is {getattr(self, name)}: set it to 1 or more")
        if self.global_batch_size > self.num_samples:
            raise ConfigError(
                "BATCH_SIZE",
                f"global batch {self.global_batch_size} is larger than the {self.num_samples} training samples: "
                "set --global-batch-size (or --batch-size) so that the global batch is at most "
                f"{self.num_samples - self.num_samples % self.num_processes}",
            )
        if self.global_batch_size % self.num_processes:
            raise ConfigError(
                "BATCH_SIZE",
                f"global batch {self.global_batch_size} is not divisible by {self.num_processes} processes: "
                f"set --global-batch-size to a multiple of {self.num_processes}",
            )

    @cached_property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one epoch."""
        full, rest = divmod(self.num_samples, self.global_batch_size)
        return full + (rest > 0 and not self.drop_last)

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches of a full window on one process."""
        return math.ceil(self.global_batch_size // self.num_processes / self.per_device_batch_size)

    def window_size(self, step_in_epoch: int) -> int:
        """Samples over all processes in window `step_in_epoch`; less than the global batch only in a short last one."""
        return min(self.global_batch_size, self.num_samples - step_in_epoch * self.global_batch_size)

    def micro_batches(self, step_in_epoch: int, process_index: int) -> list[range]:
        """Return the positions in the epoch's order of each micro-batch of one process; as many for every process."""
        first = step_in_epoch * self.global_batch_size
        return split_evenly(
            range(first, first + self.window_size(step_in_epoch)),
            batch_size=self.per_device_batch_size,
            num_processes=self.num_processes,
            process_index=process_index,
        )

    def describe(self) -> str:
        """Return the arithmetic in one line."""
        return (
            f"{self.per_device_batch_size} per device x {self.num_processes} processes "
            f"x {self.accumulation_steps} accumulation = {self.global_batch_size} per step, "
            f"{self.steps_per_epoch} steps per epoch of {self.num_samples} samples"
        )


def split_evenly(positions: range, *, batch_size: int, num_processes: int, process_index: int) -> list[range]:
    """Return one process's contiguous share of `positions`, cut into batches of at most `batch_size`.

    As many for every process, the last of one perhaps empty: normalisation over all processes, and
    weights that are gathered for a forward, make each forward a collective.
    """
    first, size = positions.start, len(positions)
    start = first + math.ceil(size * process_index / num_processes)
    stop = first + math.ceil(size * (process_index + 1) / num_processes)
    cuts = range(start, start + math.ceil(size / num_processes), batch_size)
    return [range(min(cut, stop), min(cut + batch_size, stop)) for cut in cuts]


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """How many samples make a step.

    Per device x processes x accumulation = global. The global batch decides what is trained; the
    split of it over processes and micro-batches does not.
    """

    per_device_batch_size: Annotated[int, tyro.conf.arg(aliases=["--batch-size"])] = 128
    """Samples of one forward on one process."""
    global_batch_size: Annotated[int | None, tyro.conf.arg(aliases=["--global-batch-size"])] = None
    """Samples of one optimizer step; None: per device x processes x accumulation. If set, the split is derived."""
    accumulation_steps: Annotated[int, tyro.conf.arg(aliases=["--accumulate"])] = 1
    """Micro-batches of one optimizer step on each process."""
    fit_batch: Annotated[bool, tyro.conf.arg(aliases=["--fit-batch"])] = False
    """When memory runs out, take the step anew with half the samples per forward and twice the forwards, and go on so,
    also at the next start. The global batch stays; BatchNorm and dropout see smaller forwards, as with accumulation."""
    drop_last: bool = False
    """Whether to leave out the short last step of an epoch; otherwise it is trained, every sample once."""
    eval_batch_size: int = 500
    """Samples of one forward in evaluation, on one process. It never changes a metric."""
    num_workers: int = 0
    """Processes that read samples for each training process, where the data does not lie decoded in memory."""

    def __post_init__(self) -> None:
        for name, flag in (
            ("per_device_batch_size", "--batch-size"),
            ("global_batch_size", "--global-batch-size"),
            ("accumulation_steps", "--accumulate"),
            ("eval_batch_size", "--batch.eval-batch-size"),
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError("BATCH_SIZE", f"{flag} is {value}: set it to 1 or more")
        if self.num_workers < 0:
            raise ConfigError("BATCH_SIZE", f"--batch.num-workers is {self.num_workers}: set it to 0 or more")

    def resolved_global_batch_size(self, num_processes: int) -> int:
        """Return the samples of one optimizer step on `num_processes`."""
        return self.global_batch_size or self.per_device_batch_size * num_processes * self.accumulation_steps

    def resolved_per_device_batch_size(self, num_processes: int) -> int:
        """Return the samples of one forward on one of `num_processes`."""
        share = math.ceil(self.resolved_global_batch_size(num_processes) / num_processes)
        if self.accumulation_steps > 1:
            return math.ceil(share / self.accumulation_steps)
        return min(self.per_device_batch_size, share)

    def plan(self, num_samples: int, *, num_processes: int) -> BatchPlan:
        """Return the arithmetic for `num_samples` on `num_processes`.

        Raises:
            ConfigError: the global batch is larger than the data, or is not a whole number per process.
            DataError: there are fewer samples than processes.
        """
        return BatchPlan(
            num_samples=num_samples,
            global_batch_size=self.resolved_global_batch_size(num_processes),
            per_device_batch_size=self.resolved_per_device_batch_size(num_processes),
            num_processes=num_processes,
            drop_last=self.drop_last,
        )

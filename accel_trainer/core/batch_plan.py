"""Batch arithmetic: how an epoch is split into step batches, processes and micro-batches.

All values are plain integers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path
from typing import Annotated, Literal

from .config import AT_LEAST_ONE, NOT_NEGATIVE, Config, short_flag
from .errors import ConfigError, DataError
from .wording import counted

Reduce = Literal["float", "exact"]

_BATCH_SIZE = 128
ENDLESS = 2**62
"""The number of samples of a stream without a length: no run comes to its end."""


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """Splits an epoch of `num_samples` into step batches, the same ones on any hardware.

    A step batch has the `global_batch_size` samples of one optimizer step. Each process takes a
    contiguous slice of it, split into micro-batches of at most `per_device_batch_size`. The last
    step batch of an epoch may be short: it is trained, every sample once, or left out with
    `drop_last`.
    """

    num_samples: int
    global_batch_size: int
    per_device_batch_size: int
    num_processes: int = 1
    drop_last: bool = False
    reduce: Reduce = "float"

    def __post_init__(self) -> None:
        num_samples = self.num_samples
        batch_size = self.global_batch_size
        num_processes = self.num_processes
        if num_samples < max(1, num_processes):
            raise DataError(
                "DATA_TOO_SMALL",
                f"{counted(num_samples, 'training sample')} for "
                f"{counted(num_processes, 'process')}: add data, or launch fewer processes",
            )
        AT_LEAST_ONE.check(
            self, "batch", "global_batch_size", "per_device_batch_size", "num_processes"
        )
        if batch_size > num_samples:
            data = counted(num_samples, "training sample")
            fact = f"global batch {batch_size} is larger than the {data}"
            largest = num_samples - num_samples % num_processes
            each = largest // math.ceil(batch_size / self.per_device_batch_size)
            raise ConfigError(
                "BATCH_SIZE",
                f"{fact}: set --batch-size to at most {max(1, each)}, "
                f"or --global-batch-size to at most {largest}",
            )
        if self.reduce == "exact":
            self._check_reducible()
        if batch_size % num_processes:
            raise ConfigError(
                "BATCH_SIZE",
                f"global batch {batch_size} is not divisible by {num_processes} processes: "
                f"set --global-batch-size to a multiple of {num_processes}",
            )

    def _check_reducible(self) -> None:
        """Raise ConfigError unless micro-batches and processes can be added in pairs."""
        num_processes = self.num_processes
        num_parts, rest = divmod(self.global_batch_size, self.per_device_batch_size)
        if rest or num_parts & (num_parts - 1):
            raise ConfigError(
                "REDUCE",
                "--reduce exact needs 1, 2, 4, 8, ... micro-batches per step, and global batch "
                f"{self.global_batch_size} / --batch-size {self.per_device_batch_size} is "
                f"{self.global_batch_size / self.per_device_batch_size:g}: "
                "set --global-batch-size to a power of two times --batch-size",
            )
        if num_processes & (num_processes - 1) or num_processes > num_parts:
            fewer = min(num_parts, 1 << num_processes.bit_length() - 1)
            raise ConfigError(
                "REDUCE",
                f"--reduce exact needs 1, 2, 4, 8, ... processes, and at most {num_parts}, the "
                f"micro-batches per step, but there are {num_processes}: launch {fewer}",
            )

    @cached_property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one epoch."""
        full, rest = divmod(self.num_samples, self.global_batch_size)
        return full + (rest > 0 and not self.drop_last)

    @property
    def is_endless(self) -> bool:
        """Whether the data is a stream without a length."""
        return self.num_samples >= ENDLESS

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches of a full step batch on one process."""
        return math.ceil(self.global_batch_size // self.num_processes / self.per_device_batch_size)

    @property
    def num_parts(self) -> int:
        """The number of contiguous parts that the samples are split into.

        Every process holds the same number of them: one, or with `exact` any number.
        """
        if self.reduce == "float":
            return self.num_processes
        return self.global_batch_size // self.per_device_batch_size

    def step_batch_size(self, step_in_epoch: int) -> int:
        """Return the samples of a step over all processes: fewer in a short last step."""
        samples_before = step_in_epoch * self.global_batch_size
        return min(self.global_batch_size, self.num_samples - samples_before)

    def micro_batches(self, step_in_epoch: int, process_index: int) -> list[range]:
        """Return the positions in the epoch's order of each micro-batch of one process.

        Every process has the same number of micro-batches.
        """
        first = step_in_epoch * self.global_batch_size
        positions = range(first, first + self.step_batch_size(step_in_epoch))
        return split_evenly(
            positions,
            self.per_device_batch_size,
            self.num_processes,
            process_index,
            num_parts=self.num_parts,
        )

    def smallest_forward(self, step_in_epoch: int, *, over_processes: bool) -> int:
        """Return the fewest samples of a forward of a step, on one process or over all of them.

        Forwards without samples are left out.
        """
        sizes = [
            [len(micro) for micro in self.micro_batches(step_in_epoch, index)]
            for index in range(self.num_processes)
        ]
        forwards = map(sum, zip(*sizes, strict=True)) if over_processes else chain(*sizes)
        return min(filter(None, forwards))

    def describe(self) -> str:
        """Return the arithmetic in one line."""
        size = self.per_device_batch_size
        processes = counted(self.num_processes, "process")
        split = f" ({size} per device x {processes} x {self.accumulation_steps} accumulation)"
        if size * self.num_processes * self.accumulation_steps != self.global_batch_size:
            split = f" ({processes} x {self.accumulation_steps} micro-batches of at most {size})"
        elif size == self.global_batch_size:
            split = ""
        of = (
            "a stream"
            if self.is_endless
            else f"{counted(self.steps_per_epoch, 'step')} per epoch "
            f"of {counted(self.num_samples, 'sample')}"
        )
        return f"{counted(self.global_batch_size, 'sample')} per step{split}, {of}"


def split_evenly(
    positions: range,
    batch_size: int,
    num_processes: int,
    process_index: int,
    *,
    num_parts: int | None = None,
) -> list[range]:
    """Return one process's slice of `positions`, split into batches of at most `batch_size`.

    `positions` is cut into `num_parts` (None: `num_processes`), and the slice is one or more
    consecutive parts. No batch spans two parts: with a fixed number of parts, the batches are the
    same on any number of processes that divides it.

    Every process has the same number of batches, of which the last one of a part may be empty: a
    forward is a collective if batch norms span all processes or weights are sharded.
    """
    num_parts = num_parts or num_processes
    cuts = range(0, math.ceil(len(positions) / num_parts), batch_size)
    parts = parts_of_process(positions, num_parts, num_processes, process_index)
    return [part[cut : cut + batch_size] for part in parts for cut in cuts]


def parts_of_process(
    positions: range, num_parts: int, num_processes: int, process_index: int
) -> list[range]:
    """Return one process's parts of `positions`, which is cut into `num_parts`.

    The lengths of all parts differ by at most 1.
    """
    first = process_index * num_parts // num_processes
    end = (process_index + 1) * num_parts // num_processes
    cuts = [math.ceil(len(positions) * part / num_parts) for part in range(first, end + 1)]
    return [positions[start:stop] for start, stop in pairwise(cuts)]


@dataclass(frozen=True, kw_only=True)
class BatchConfig(Config):
    """How many samples make a step: per device x processes x accumulation = global.

    Only the global batch affects what is learned, not how it is split over processes and
    micro-batches.
    """

    per_device_batch_size: Annotated[int, short_flag("--batch-size")] = _BATCH_SIZE
    """Samples per forward pass on one process; the default is lowered for smaller data."""
    global_batch_size: Annotated[int | None, short_flag("--global-batch-size")] = None
    """Samples per optimizer step over all processes; None: per device x processes x accumulation.
    If set, it determines the accumulation."""
    accumulation_steps: Annotated[int, short_flag("--accumulate")] = 1
    """Micro-batches per optimizer step on each process."""
    drop_last: bool = False
    """Drop the short last step of an epoch; otherwise it is also trained, each sample once."""
    order: Literal["uniform", "stored", "balanced"] = "uniform"
    """Which samples are in an epoch: `uniform` shuffles them, `stored` keeps their order, and
    `balanced` draws the same number from each class."""
    leave_out: Annotated[Path | None, short_flag("--leave-out")] = None
    """A file with the ids of samples not to train on, one per line; None: train on all."""
    reduce: Annotated[Reduce, short_flag("--reduce")] = "float"
    """How the micro-batches of a step are summed: `float` is fastest, but rounds differently for
    each process count; `exact` sums in a fixed order: the same bits on 1, 2, 4, ... processes. Both
    are float32."""
    eval_batch_size: int = 500
    """Samples per forward pass on one process in evaluation. It changes metrics only by rounding,
    unless evaluation is random; with `--reduce exact`, a resume cannot change it."""
    num_workers: Annotated[int, short_flag("--num-workers")] = 0
    """Data workers per training process, for data that is not already decoded in memory."""

    def __post_init__(self) -> None:
        AT_LEAST_ONE.check(
            self,
            "batch",
            "per_device_batch_size",
            "global_batch_size",
            "accumulation_steps",
            "eval_batch_size",
        )
        NOT_NEGATIVE.check(self, "batch", "num_workers")
        if self.reduce == "exact" and self.accumulation_steps > 1:
            raise ConfigError(
                "REDUCE",
                "--reduce exact does not work with --accumulate, which changes the micro-batches: "
                "leave it out, and choose --batch-size and --global-batch-size",
            )

    def resolved_global_batch_size(self, num_processes: int) -> int:
        """Return the samples of one optimizer step on `num_processes`."""
        return (
            self.global_batch_size
            or self.per_device_batch_size * num_processes * self.accumulation_steps
        )

    def resolved_per_device_batch_size(self, num_processes: int) -> int:
        """Return the samples of one forward on one of `num_processes`."""
        if self.reduce == "exact":
            return self.per_device_batch_size
        per_process = math.ceil(self.resolved_global_batch_size(num_processes) / num_processes)
        if self.accumulation_steps > 1:
            return math.ceil(per_process / self.accumulation_steps)
        return min(self.per_device_batch_size, per_process)

    def plan(self, num_samples: int, *, num_processes: int) -> BatchPlan:
        """Return the arithmetic for `num_samples` on `num_processes`.

        Raises:
            ConfigError: the global batch is larger than the data, or not divisible by the
                processes.
            DataError: there are fewer samples than processes.
        """
        batch = self._fitting(num_samples, num_processes)
        return BatchPlan(
            num_samples=num_samples,
            global_batch_size=batch.resolved_global_batch_size(num_processes),
            per_device_batch_size=batch.resolved_per_device_batch_size(num_processes),
            num_processes=num_processes,
            drop_last=self.drop_last,
            reduce=self.reduce,
        )

    def _fitting(self, num_samples: int, num_processes: int) -> BatchConfig:
        """Return the config with fewer samples per step if the data is smaller than the default."""
        size = self.resolved_global_batch_size(num_processes)
        sizes = (self.per_device_batch_size, self.accumulation_steps, self.reduce)
        is_default = sizes == (_BATCH_SIZE, 1, "float") and size == _BATCH_SIZE * num_processes
        if not is_default or size <= num_samples:
            return self
        return replace(self, global_batch_size=num_samples // num_processes * num_processes or size)

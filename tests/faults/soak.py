"""A long run with everything on: memory, open files and threads must not grow with its steps.

    python -m tests.faults.soak [--steps 100000] [--num-workers 0]

A tiny net trains, evaluates, saves, logs and tells its callbacks; then the last tenth of the run is
compared with the second, for the first is warm-up. The exit code is 1 if anything has grown.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from accel_trainer import Callback, CheckpointConfig, StepReport, Trainer
from tests import workload

NUM_TRAIN = 1600
STEPS_PER_EPOCH = 100
MAX_GROWTH = 0.05
SAMPLES_PER_ROW = 10
NUM_ROWS = 10


@dataclass(frozen=True)
class Sample:
    """What the process holds after a step."""

    step: int
    seconds: float
    rss_mib: float
    open_files: int
    threads: int


def take_sample(step: int, seconds: float) -> Sample:
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Sample(
        step=step,
        seconds=seconds,
        rss_mib=resident_pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        open_files=len(os.listdir("/proc/self/fd")),
        threads=len(os.listdir("/proc/self/task")),
    )


class Sampler(Callback):
    """Looks at its own process a hundred times."""

    def __init__(self, num_steps: int) -> None:
        self._every_n_steps = num_steps // (SAMPLES_PER_ROW * NUM_ROWS)
        self._start_s = time.monotonic()
        self.samples: list[Sample] = []

    def on_step_end(self, trainer: Trainer, report: StepReport) -> None:
        if report.optimizer_step % self._every_n_steps == 0:
            self.samples.append(
                take_sample(report.optimizer_step, time.monotonic() - self._start_s)
            )


def train(
    folder: Path, num_steps: int, *callbacks: Callback, num_workers: int = 0
) -> Sequence[Sample]:
    """Train for `num_steps`, and return what was seen on the way.

    Data workers are restarted in every epoch.
    """
    config = workload.make_config(
        folder, checkpoint=CheckpointConfig(every_n_steps=STEPS_PER_EPOCH // 2)
    )
    config = replace(
        config,
        trainer=replace(
            config.trainer,
            num_epochs=num_steps // STEPS_PER_EPOCH,
            log_every_n_steps=10,
            monitor="eval/loss",
            monitor_mode="min",
        ),
        run=replace(config.run, track=("tensorboard",)),
    )
    sampler = Sampler(num_steps)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        workload.train(
            config,
            num_train=NUM_TRAIN,
            norm="batch",
            dropout=0.1,
            callbacks=(sampler, *callbacks),
            num_workers=num_workers,
        )
    return sampler.samples


def rows_of(samples: Sequence[Sample]) -> list[Sample]:
    """Return a sample per tenth of the run.

    A running save holds more memory, which a median hides, and an open file: on a slow disk, more
    than half of the samples see one, so files and threads are the fewest that a sample saw.
    """
    tenths = [
        samples[start : start + SAMPLES_PER_ROW]
        for start in range(0, len(samples), SAMPLES_PER_ROW)
    ]
    return [
        Sample(
            step=tenth[-1].step,
            seconds=tenth[-1].seconds,
            rss_mib=statistics.median(sample.rss_mib for sample in tenth),
            open_files=min(sample.open_files for sample in tenth),
            threads=min(sample.threads for sample in tenth),
        )
        for tenth in tenths
    ]


def what_grew(rows: Sequence[Sample]) -> list[str]:
    """Return what is more than 5 % above its early value at the end."""
    early, late = rows[1], rows[-1]
    pairs = {
        name: (getattr(early, name), getattr(late, name))
        for name in ("rss_mib", "open_files", "threads")
    }
    return [
        f"{name} grew from {before:g} to {after:g}"
        for name, (before, after) in pairs.items()
        if after > (1 + MAX_GROWTH) * before
    ]


def describe(rows: Sequence[Sample]) -> str:
    lines = [f"{'step':>8}  {'seconds':>7}  {'RSS MiB':>7}  {'open files':>10}  {'threads':>7}"]
    lines += [
        f"{row.step:>8,}  {row.seconds:>7.0f}  {row.rss_mib:>7.1f}  "
        f"{row.open_files:>10}  {row.threads:>7}"
        for row in rows
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000, help="a multiple of 100")
    parser.add_argument("--num-workers", type=int, default=0)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        rows = rows_of(train(Path(folder) / "run", options.steps, num_workers=options.num_workers))
        num_bytes = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    grown = what_grew(rows)
    print(describe(rows))
    print(f"the run folder has {num_bytes / 2**20:.1f} MiB")
    print("; ".join(grown) or f"nothing grew by more than {MAX_GROWTH:.0%} after the first fifth")
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())

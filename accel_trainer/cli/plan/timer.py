"""A callback that ends a training once enough steps were timed, and writes the times of a run."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from accel_trainer.checkpoint.loading import load_checkpoint
from accel_trainer.core.json_files import write_json
from accel_trainer.core.types import Batch, EvalSource, Results, StepReport
from accel_trainer.data.loader import EvalLoader
from accel_trainer.distributed.collectives import run_on_main
from accel_trainer.distributed.machine import peak_memory_bytes
from accel_trainer.run.data import MAX_EVAL_SAMPLES, TEST_SET, RunData
from accel_trainer.run.extra_callbacks import Observer
from accel_trainer.run.session import Run
from accel_trainer.training.callback import RunResult, TrainerView
from accel_trainer.training.evaluation.evaluation import Evaluation

TIMER = __file__
"""This file, for the callbacks of a start."""
NUM_FIRST_STEPS = 3
"""Steps that are not timed: they allocate, choose kernels and compile, and a run checks them."""
_MIN_STEPS = 3
_GROWTH = 1.25  # of the number of steps between two looks at the clock
_NUM_EVAL_BATCHES = 2  # the first one starts data workers


@dataclass(frozen=True)
class Times:
    """What the main process of a trial has measured."""

    batch: Mapping[str, Any]
    """The fields of the `BatchPlan`."""
    device: str
    start_s: float
    """From the start of the process to the end of the first `NUM_FIRST_STEPS` steps."""
    num_steps: int
    steps_s: float
    """Of the `num_steps` steps after the first ones."""
    num_saves: int
    num_evaluated: int
    """Samples of all sets but the test set that one evaluation has measured."""
    evaluation_s: float
    """Of one evaluation with all samples."""
    evaluated_time: float
    rest_of_test_s: float
    """Of the samples of the test set that were left out."""
    peak_memory_bytes: int
    """Of the main process, or of its GPU, as if all data were read."""


class Timer(Observer):
    """Writes `Times` as JSON into `file` once about `seconds` of steps were timed.

    The process was started at `start_time`, in seconds since 1970, as are all times here.
    """

    def __init__(self, file: str, seconds: float, start_time: float) -> None:
        self._file = Path(file)
        self._seconds = seconds
        self._start_time = start_time
        self._first_time = start_time
        self._last_time = start_time
        self._evaluated_time = start_time
        self._num_steps = 0
        self._next_look = _MIN_STEPS
        self._num_saves = 0
        self.passes: list[Pass] = []
        """Over sets of samples, since the first step."""

    def build_data(self, build: Callable[..., RunData], run: Run, *sets: Any) -> RunData:
        """Return the data of a run, whose evaluations are timed."""
        data = build(run, *sets)
        timed = {
            name: part if isinstance(part, Evaluation) else TimedLoader(name, part, run, self)
            for name, part in data.evaluation.items()
        }
        return replace(data, evaluation=timed)

    def on_step_end(self, trainer: TrainerView, report: StepReport) -> None:
        """Look at the clock if it is time to. **Collective. Host sync** then."""
        self.passes.clear()  # of the evaluation that is tried before the first step
        if report.optimizer_step == 1:
            trainer.request_save()  # a run trains with the copy of a checkpoint in memory
        self._num_steps = report.optimizer_step - NUM_FIRST_STEPS
        is_first = self._num_steps <= 0
        is_due = self._num_steps >= self._next_look
        if is_first or is_due:
            _wait_for(trainer.accelerator.device)
        self._last_time = time.time()
        if is_first:
            self._first_time = self._last_time
        if is_due:
            self._next_look = int(_GROWTH * self._num_steps) + 1
            spent_s = self._last_time - self._first_time
            if run_on_main(lambda: spent_s >= self._seconds, trainer.accelerator):
                trainer.request_stop("the steps were timed")

    def on_checkpoint(self, trainer: TrainerView, name: str) -> None:
        """Count it."""
        self._num_saves += 1

    def on_evaluate_end(self, trainer: TrainerView, metrics: Results) -> None:
        """Note the time."""
        self._evaluated_time = time.time()

    def on_fit_end(self, trainer: TrainerView, result: RunResult) -> None:
        """Write the times on the main process."""
        if not trainer.accelerator.is_main_process:
            return
        evaluations = [each for each in self.passes if each.set_name != TEST_SET]
        start_time = evaluations[0].start_time if evaluations else self._last_time
        measured_s = self._evaluated_time - start_time
        # A run whose last step ends an epoch reads its last checkpoint, to see that it is valid, in
        # the writer's thread. A thread does not reuse memory that a different one has freed.
        with ThreadPoolExecutor(1) as writer:
            writer.submit(load_checkpoint, result.folder / "checkpoints").result()
        peak_bytes = peak_memory_bytes(trainer.accelerator)
        if trainer.accelerator.device.type == "cpu":
            peak_bytes += _unread_bytes()
        times = Times(
            batch=asdict(trainer.loader.plan),
            device=str(trainer.accelerator.device),
            start_s=self._first_time - self._start_time,
            num_steps=max(0, self._num_steps),
            steps_s=self._last_time - self._first_time,
            num_saves=self._num_saves,
            num_evaluated=sum(each.num_samples for each in evaluations),
            evaluation_s=measured_s + sum(each.rest_s for each in evaluations),
            evaluated_time=self._evaluated_time,
            rest_of_test_s=sum(each.rest_s for each in self.passes if each not in evaluations),
            peak_memory_bytes=peak_bytes,
        )
        write_json(self._file, asdict(times))


def _wait_for(device: torch.device) -> None:
    """Wait until the device has done all that it was asked to."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def _unread_bytes() -> int:
    """Return the bytes of files that are mapped to be shared, and are not in memory yet.

    Linux counts what was read of them as memory of the process. Elsewhere it is 0.
    """
    if not sys.platform.startswith("linux"):
        return 0
    shared = (each for each in psutil.Process().memory_maps(grouped=False) if "s" in each.perms)
    return sum(each.size - each.rss for each in shared if Path(each.path).is_file())


# --- evaluations ---


class Pass:
    """One pass over a set: the times at which batches of this process were done.

    `num_left_out` are the samples that a whole pass would have besides.
    """

    def __init__(self, set_name: str, num_left_out: int) -> None:
        self.set_name = set_name
        self.start_time = time.time()
        self.num_samples = 0
        self._num_left_out = num_left_out
        self._done = [(0, self.start_time)]

    def add(self, num_samples: int) -> None:
        """Note that a batch is done."""
        self.num_samples += num_samples
        self._done.append((self.num_samples, time.time()))

    @property
    def rest_s(self) -> float:
        """The seconds of the samples that were left out, at the speed of all but the first."""
        before, start = self._done[min(1, len(self._done) - 2)]
        after, end = self._done[-1]
        return self._num_left_out * (end - start) / (after - before) if after > before else 0.0


class TimedLoader:
    """Evaluation batches of a loader, perhaps only the first ones, and the times they took."""

    def __init__(self, set_name: str, loader: EvalSource, run: Run, timer: Timer) -> None:
        num_processes = run.accelerator.num_processes
        most = max(MAX_EVAL_SAMPLES, _NUM_EVAL_BATCHES * run.config.batch.eval_batch_size)
        whole = loader.num_samples // num_processes
        self._set_name = set_name
        self.reader = getattr(loader, "reader", loader)
        self._loader = loader
        self._num_left_out = 0
        if whole > most and isinstance(loader, EvalLoader):
            self._loader = loader.first(most * num_processes)
            self._num_left_out = whole - most
        self._device = run.accelerator.device
        self._timer = timer

    @property
    def num_samples(self) -> int:
        """The number of samples of a pass, over all processes."""
        return self._loader.num_samples

    def batches(self) -> Iterator[Batch]:
        """Yield this process's samples, and note when each batch is done. **Host sync.**"""
        timed = Pass(self._set_name, self._num_left_out)
        self._timer.passes.append(timed)
        for batch in self._loader.batches():
            yield batch
            _wait_for(self._device)
            timed.add(len(batch))

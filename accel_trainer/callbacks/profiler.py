"""Writes a trace of some steps (`--profile`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import torch
from accelerate.utils import ProfileKwargs

from ..core import filesystem
from ..core.guards import check_not_moved
from ..core.logger import logger
from ..core.types import StepReport
from ..training.callback import Callback, RunResult, TrainerView
from ..training.config import TrainerConfig

_WARMUP_STEPS = 5
_STEPS = 10
_NEEDED_STEPS = _WARMUP_STEPS + _STEPS


@dataclass(eq=False)
class Profile(Callback):
    """Traces steps 6 to 15 of an attempt, with shapes and memory, into `trace.json` in `folder`.

    `operators.txt` is a table of the operators, sorted by CPU time.
    For the main process. Profiling does not change the bits of the weights. `show` gets a line that
    says where the trace is.
    """

    folder: Path
    _: KW_ONLY
    config: TrainerConfig
    show: Callable[[str], None]

    def __post_init__(self) -> None:
        self._profiler: torch.profiler.profile | None = None

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Start the profiler, which does not record the first steps; warn if there are too few."""
        if trainer.is_finished:
            return
        num_steps = self.config.last_step(trainer.loader.plan.steps_per_epoch)
        if (left := num_steps - trainer.state.optimizer_step) < _NEEDED_STEPS:
            logger.warning(
                "--profile needs %d steps, but this run has only %d left", _NEEDED_STEPS, left
            )
        filesystem.make_directory(self.folder)
        schedule = {"wait": _WARMUP_STEPS - 1, "warmup": 1, "active": _STEPS, "repeat": 1}
        self._profiler = ProfileKwargs(
            schedule_option=schedule, record_shapes=True, profile_memory=True
        ).build()
        self._profiler.start()

    def on_step_end(self, trainer: TrainerView, report: StepReport) -> None:
        """Tell the profiler that a step has ended; after the last one, write the trace.

        **Host sync** when it does.
        """
        profiler = self._profiler
        if profiler is None:
            return
        profiler.step()
        if profiler.step_num == _NEEDED_STEPS:
            self._profiler = None
            profiler.stop()
            trace = self.folder / "trace.json"
            check_not_moved(trace)  # here, since torch writes the file
            profiler.export_chrome_trace(str(trace))
            table = profiler.key_averages().table("self_cpu_time_total")
            filesystem.write_file_atomic(self.folder / "operators.txt", table.encode())
            self.show(
                f"profile: steps {_WARMUP_STEPS + 1} to {profiler.step_num} are in {trace}, "
                "with a table in operators.txt"
            )

    def on_fit_end(self, trainer: TrainerView, result: RunResult) -> None:
        """Report that there were too few steps."""
        if self._profiler is not None:
            self._profiler.stop()
            self.show(
                f"no profile: it needs {_NEEDED_STEPS} steps, there were {self._profiler.step_num}"
            )

"""The history of a run: one row of numbers for each log interval and each evaluation."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from ..core.digest import samples_digest
from ..core.errors import ConfigError, DataError
from ..core.filesystem import writes_to
from ..core.history import is_number
from ..core.registry import StateDict
from ..core.types import Results, StepReport
from ..distributed.collectives import gather_numbers
from ..distributed.machine import peak_memory_bytes
from ..fault_tolerance.activity import Activity
from ..training.callback import Callback, RunResult, TrainerView
from ..training.evaluation.metrics import sums_device
from ..training.step.turns import names_in
from .learning_rates import learning_rates
from .metrics_file import MetricsFile, Row
from .samples_so_far import SamplesSoFar

_MAX_PENDING = 256  # step reports kept before they are summed
_ITEMS = "num_items"  # the column of what a Task divides its sums by, if not by samples
_NORM = "grad_norm"
_RESERVED = {"loss", _NORM, _ITEMS}


@dataclass(eq=False)
class MetricLogger(Callback):
    """Writes rows to the history and passes them to `sinks` (progress bar, trackers).

    For the main process; the others take part in the sums.

    A row has `event`, `optimizer_step`, `epoch` and numbers; (event, optimizer_step) never repeats.
    The event is `train`, `eval`, or `log` for what callbacks have logged after the last row. An
    interruption changes nothing in the rows but `perf/...`. The times of compiling and evaluating,
    which `activity` has, are left out of the throughput.
    """

    accelerator: Accelerator
    _: KW_ONLY
    history: MetricsFile | None
    every_n_steps: int
    digest_every_n_steps: int | None
    activity: Activity
    sinks: Sequence[Callable[[Row], None]] = ()

    def __post_init__(self) -> None:
        self._samples = SamplesSoFar(self.accelerator, is_on=self.digest_every_n_steps is not None)
        self._meters = Meters(self.accelerator, self._samples)
        self.peak_memory_bytes = 0
        """Of the fullest process, at the last row."""
        self._total_s = 0.0
        self._total_samples = 0
        self._num_empty_steps = 0  # of this epoch, without an item

    @property
    def samples_per_s(self) -> float | None:
        """Samples that all processes have trained on per second of this attempt.

        None before the first row.
        """
        return self._total_samples / self._total_s if self._total_samples else None

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Start the clock."""
        self._restart_timer(trainer)

    def on_step_end(self, trainer: TrainerView, report: StepReport) -> None:
        """Write a row every n steps and at the end of each epoch.

        **Collective. Host sync** when it writes one.

        Raises DataError after an epoch in which no item counted.
        """
        self._meters.update(report)
        self._timed_samples += report.num_samples
        is_epoch_end = trainer.state.step_in_epoch == trainer.loader.plan.steps_per_epoch
        if is_epoch_end or report.optimizer_step % self.every_n_steps == 0:
            self._write_training(trainer)
        if is_epoch_end:
            if self._num_empty_steps == trainer.state.step_in_epoch:
                raise DataError(
                    "NUM_ITEMS",
                    "no sample of the training set counts in the loss: all targets are ignored, or "
                    "the task returned num_items of 0 for all: train on samples with labels",
                )
            self._num_empty_steps = 0

    def on_evaluate_end(self, trainer: TrainerView, metrics: Results) -> None:
        """Write the evaluation's numbers as a row, after a row of the steps since the last one."""
        if self._meters.num_steps:
            self._write_training(trainer)
        self._write("eval", trainer, _numbers(metrics))

    def _write_training(self, trainer: TrainerView) -> None:
        """Write a row of the steps since the last one. **Collective. Host sync.**"""
        step = trainer.state.optimizer_step
        every = self.digest_every_n_steps or math.inf
        last_step = step - self._meters.num_steps
        is_digest_due = step // every > last_step // every  # a multiple lies between the rows
        values = self._meters.read()  # waits for the device, so the clocks are read after it
        if not {"train/loss", "optim/skipped_steps"} & values.keys():
            self._num_empty_steps += step - last_step
        now_s = self._read_clocks(trainer)
        spent_s = {name: seconds - self._before_s[name] for name, seconds in now_s.items()}
        training_s = spent_s["all"] - spent_s["compile"] - spent_s["evaluation"]
        values |= learning_rates(trainer.optimizers)
        if trainer.accelerator.scaler is not None:
            values["optim/loss_scale"] = trainer.accelerator.scaler.get_scale()
        if self._timed_samples:  # 0 if this attempt only evaluates what an earlier one trained
            self._total_s += training_s
            self._total_samples += self._timed_samples
            values["perf/samples_per_s"] = self._timed_samples / training_s
            values["perf/data_wait_fraction"] = spent_s["data"] / training_s
        peak = peak_memory_bytes(trainer.accelerator)
        self.peak_memory_bytes = max(gather_numbers(peak, trainer.accelerator))
        values["perf/peak_memory_gib"] = self.peak_memory_bytes / 2**30
        if spent_s["compile"]:
            values["perf/compile_s"] = spent_s["compile"]
        if is_digest_due:
            values |= {f"digest/{part}": text for part, text in trainer.digests().items()}
            if (samples := self._samples.total()) is not None:
                values["digest/samples_so_far"] = samples_digest(samples)
        self._write("train", trainer, {**values, **trainer.log.read()})
        self._restart_timer(trainer)

    def on_fit_end(self, trainer: TrainerView, result: RunResult) -> None:
        """Write what is left: what was logged after the last row, and the test set's numbers."""
        if result.state != "preempted" and (left := trainer.log.read()):
            self._write("log", trainer, left)
        if numbers := _numbers(result.metrics, "test/"):
            self._write("test", trainer, numbers)
        if self.history is not None:
            with writes_to(self.history.path.parent):
                self.history.sync()

    def _write(self, event: str, trainer: TrainerView, values: Row) -> None:
        state = trainer.state
        # The epoch that the step belongs to, counted from 1 as people do.
        epoch = state.epoch + (state.step_in_epoch > 0)
        row = {"event": event, "optimizer_step": state.optimizer_step, "epoch": epoch, **values}
        if self.history is not None:
            self.history.append(row)
        for sink in self.sinks:
            sink(row)

    def _read_clocks(self, trainer: TrainerView) -> dict[str, float]:
        return {
            "all": time.perf_counter(),
            "data": trainer.data_wait_s,
            "compile": self.activity.compilation.seconds,
            "evaluation": self.activity.phase_s.get("evaluation", 0.0),
        }

    def _restart_timer(self, trainer: TrainerView) -> None:
        self._before_s = self._read_clocks(trainer)
        self._timed_samples = 0

    def state_dict(self) -> StateDict:
        """Return the sums since the last row, that of all samples, and the length of the history.

        **Collective. Host sync.**
        """
        return {
            "meters": self._meters.state_dict(),  # adds the pending steps to the samples, too
            "samples": self._samples.total(),
            "history_bytes": self.history.size if self.history else 0,
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Restore the sums, and note how long the history was at the checkpoint."""
        self._meters.load_state_dict(state["meters"])
        self._samples.restore(state.get("samples"))  # not in older versions
        if self.history is not None:
            self.history.kept_bytes = state["history_bytes"]


def _numbers(metrics: Results, group: str = "") -> dict[str, float]:
    return {
        name: value
        for name, value in metrics.items()
        if name.startswith(group) and is_number(value)
    }


def summable(values: Tensor) -> Tensor:
    """Return float64 `values` rounded to 36 bits (Veltkamp's split), which add up exactly."""
    scaled = values * (2**17 + 1)
    return scaled - (scaled - values)


class Meters:
    """Sums step reports between two rows, without a kernel or a host sync in each step.

    Reports are kept, and summed in float64 when the sums are read. Sums of float32 in float64 are
    exact over any realistic interval, so the means do not depend on when reports were summed or
    saved. The samples of the same reports are added to `samples`.

    Of steps with several `updates`, each has sums and counts of its own: their names begin with its
    name, such as `critic/loss`.
    """

    def __init__(self, accelerator: Accelerator, samples: SamplesSoFar) -> None:
        self._accelerator = accelerator
        self._samples = samples
        self._device = sums_device(accelerator.device)
        self._clear()

    def _clear(self) -> None:
        self._pending: list[StepReport] = []
        self._local: dict[str, Tensor] = {}
        self._counts = Counter(num_items=0, num_updates=0, num_skipped=0)

    @property
    def num_steps(self) -> int:
        """Steps since the last read."""
        return len(self._pending) + self._counts["num_updates"] + self._counts["num_skipped"]

    def update(self, report: StepReport) -> None:
        """Add a step to the sums; a skipped step is only counted.

        Raises ConfigError if a sum has a reserved name.
        """
        for each in (report, *report.updates):
            for name in each.sums:
                if name in _RESERVED:
                    raise ConfigError(
                        "SUMS",
                        f"the task returned a number named {name}, which is reserved: rename it",
                    )
        self._pending.append(report)
        if len(self._pending) >= _MAX_PENDING:
            self._sum_pending()

    def _sum_pending(self) -> None:
        steps, self._pending = self._pending, []
        self._samples.add([step for step in steps if not step.was_skipped])
        groups: dict[str, list[StepReport]] = defaultdict(list, {"": steps})
        for step in steps:
            for each in step.updates:
                groups[f"{'+'.join(names_in(each.turn))}/"].append(each)
        for group, reports in groups.items():
            self._sum(group, reports)

    def _sum(self, group: str, reports: Sequence[StepReport]) -> None:
        """Add `reports` to the sums and counts whose names begin with `group`."""
        # Skipped steps are left out: their loss may be NaN, and would make the mean NaN.
        applied = [report for report in reports if not report.was_skipped]
        self._counts[f"{group}num_skipped"] += len(reports) - len(applied)
        self._counts[f"{group}num_updates"] += len(applied)
        self._counts[f"{group}num_items"] += sum(report.num_samples for report in applied)
        rows = [
            {"loss": each.loss_sum, **each.sums, _ITEMS: each.num_items, _NORM: each.grad_norm}
            for each in applied
            if not each.updates
        ]
        for name in rows[0] if rows else ():
            column = [number for row in rows if (number := row[name]) is not None]
            if not column:
                continue
            values = torch.stack(column).to(self._device).double()
            if name == _NORM and not self._accelerator.is_main_process:
                values.zero_()  # every process has the same norm, which counts once
            place = group + name
            self._local[place] = self._local.get(place, 0) + summable(values).sum()

    def _global_sums(self) -> dict[str, float]:
        """Return the sums over all processes. **Collective. Host sync.**"""
        self._sum_pending()
        if not self._local:
            return {}
        sums = self._accelerator.reduce(torch.stack(list(self._local.values())))
        return dict(zip(self._local, sums.tolist(), strict=True))

    def read(self) -> dict[str, Any]:
        """Return the means since the last read, over all processes, and start again.

        **Collective. Host sync.**
        """
        sums = self._global_sums()  # must come first: it counts the pending steps
        means: dict[str, Any] = {}
        groups = [name[: -len("num_updates")] for name in self._counts if "/num_updates" in name]
        for group in groups or [""]:
            named = {
                name.removeprefix(group): sums[name] for name in sums if name.startswith(group)
            }
            num_items = named.pop(_ITEMS, self._counts[f"{group}num_items"])
            norm = named.pop(_NORM, None)
            means |= {
                f"train/{group}{name}": value / num_items
                for name, value in named.items()
                if num_items
            }
            if norm is not None:
                means[f"optim/{group}grad_norm"] = norm / self._counts[f"{group}num_updates"]
        if losses := [means[loss] for group in groups if (loss := f"train/{group}loss") in means]:
            means = {"train/loss": sum(losses), **means}
        if num_skipped := self._counts["num_skipped"]:
            means["optim/skipped_steps"] = float(num_skipped)
        self._clear()
        return means

    def state_dict(self) -> StateDict:
        """Return the global sums. **Collective. Host sync.**"""
        # The sums come first: they count the pending steps.
        return {"sums": self._global_sums(), **self._counts}

    def load_state_dict(self, state: StateDict) -> None:
        """Restore the sums on the main process; all others start at zero.

        So the state can be loaded by any number of processes.
        """
        self._clear()
        is_main = self._accelerator.is_main_process
        self._local = {
            name: torch.tensor(value if is_main else 0.0, dtype=torch.float64, device=self._device)
            for name, value in state["sums"].items()
        }
        self._counts.update({name: count for name, count in state.items() if name != "sums"})

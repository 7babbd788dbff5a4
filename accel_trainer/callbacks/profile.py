"""`--profile`: where the time of a run goes, as a trace of some steps and as a table."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.utils import ProfileKwargs
from torch import nn
from torch.profiler import record_function
from torch.utils.flop_counter import FlopCounterMode

from .. import storage
from ..runtime import peak_memory_bytes
from ..types import Batch, EvalOutput, StepOutput, StepReport, Task
from .base import Callback
from .log import MetricsLog

if TYPE_CHECKING:
    from ..trainer import RunResult, Trainer

_WARMUP_STEPS, _STEPS = 5, 10

# What the events of a phase are called, by torch and its backends. Device events are kernels and copies; the
# others are ranges on the host, with what they started on the device.
_PHASES = {
    "forward": ("forward",),
    "backward": ("autograd::engine::evaluate_function",),
    "optimizer": ("Optimizer.step",),
    "communication": ("gloo:", "ncclDevKernel", "ncclKernel"),
    "host to device": ("Memcpy HtoD",),
}

# Dense bfloat16 or float16 with float32 sums, from NVIDIA's data sheets, in TFLOP/s.
_PEAK_TFLOPS = {"H200": 989, "H100 PCIe": 756, "H100": 989, "A100": 312, "L40S": 362, "L4": 121, "V100": 125}


class ProfiledTask:
    """A task whose forward in training has a name in the trace."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def train_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        """Return what the task returns."""
        with record_function("forward"):
            return self._task.train_step(model, batch)

    def eval_step(self, model: nn.Module, batch: Batch) -> EvalOutput:
        """Return what the task returns."""
        return self._task.eval_step(model, batch)


class Profile(Callback):
    """Traces steps 6 to 15 of an attempt on the main process, and leaves `trace.json` and `table.txt` in `folder`.

    The table is also handed to `show`. What is trained stays the same, bit for bit.
    """

    def __init__(self, folder: Path, *, log: MetricsLog, show: Callable[[str], None]) -> None:
        self._folder, self._log, self._show = folder, log, show
        self._profiler: torch.profiler.profile | None = None
        self._num_steps = 0
        self._start: dict[str, float] = {}
        self._rows: dict[str, float] = {}
        self._flops: float | None = None

    def on_fit_start(self, trainer: Trainer) -> None:
        """Start the profiler, which waits for the first steps to pass."""
        if trainer.is_finished or not trainer.accelerator.is_main_process:
            return
        storage.make_directory(self._folder)
        self._flops = flops_per_sample(trainer)
        schedule = {"wait": _WARMUP_STEPS - 1, "warmup": 1, "active": _STEPS, "repeat": 1}
        self._profiler = ProfileKwargs(schedule_option=schedule).build()
        self._profiler.start()

    def on_step_end(self, trainer: Trainer, report: StepReport) -> None:
        """Mark the step; after the last, write the trace. **Host sync** before the first and after the last."""
        if self._profiler is None or self._num_steps > _WARMUP_STEPS + _STEPS:
            return
        self._num_steps += 1
        if self._num_steps == _WARMUP_STEPS:
            self._start = self._times(trainer)
        self._profiler.step()
        if self._num_steps == _WARMUP_STEPS + _STEPS:
            spent = {name: now - self._start[name] for name, now in self._times(trainer).items()}
            self._profiler.stop()
            self._profiler.export_chrome_trace(str(self._folder / "trace.json"))
            is_on_device = trainer.accelerator.device.type != "cpu"
            phases = sum_phases(self._profiler.events() or (), is_on_device=is_on_device)
            self._rows = per_step(spent, phases)

    def on_fit_end(self, trainer: Trainer, result: RunResult) -> None:
        """Write and show the table."""
        if self._profiler is None:
            return
        if self._num_steps < _WARMUP_STEPS + _STEPS:
            self._profiler.stop()
            self._show(f"no profile: it needs {_WARMUP_STEPS + _STEPS} steps, there were {self._num_steps}")
            return
        lines = [f"where the time of a step goes, mean of {_STEPS}:"]
        whole = self._rows["step"]
        lines += [f"  {name:<16}{ms:>10.3f} ms{ms / whole:>8.1%}" for name, ms in self._rows.items()]
        lines += describe_run(trainer, self._log.items_per_s, self._flops)
        self._show("\n".join(lines))
        storage.write_file_atomic(self._folder / "table.txt", ("\n".join(lines) + "\n").encode())

    @staticmethod
    def _times(trainer: Trainer) -> dict[str, float]:
        """Return clocks in seconds. **Host sync.**"""
        if trainer.accelerator.device.type == "cuda":
            torch.cuda.synchronize()
        elsewhere = sum(trainer.watchdog.phase_s.get(phase, 0.0) for phase in ("evaluation", "save"))
        return {"step": time.perf_counter() - elsewhere, "data": trainer.data_wait.seconds}


def sum_phases(events: Iterable[Any], *, is_on_device: bool) -> dict[str, float]:
    """Return the milliseconds of each phase; on an accelerator those of its kernels, elsewhere of the host."""
    sums = dict.fromkeys(_PHASES, 0.0)
    for event in events:
        for phase, names in _PHASES.items():
            is_inner = event.cpu_parent is not None and event.cpu_parent.name.startswith(names)
            if event.name.startswith(names) and not is_inner:
                is_range = event.device_type.name == "CPU"
                us = event.device_time_total if is_on_device or not is_range else event.cpu_time_total
                sums[phase] += us / 1000
    return sums


def per_step(spent: Mapping[str, float], phases: Mapping[str, float]) -> dict[str, float]:
    """Return the rows of the table in milliseconds per step: the phases, what is left, and the whole."""
    rows = {"data": 1000 * spent["data"], **phases}
    rows["other"] = 1000 * spent["step"] - sum(rows.values())
    rows["step"] = 1000 * spent["step"]
    return {name: ms / _STEPS for name, ms in rows.items()}


def describe_run(trainer: Trainer, items_per_s: float | None, flops: float | None) -> list[str]:
    """Return the lines below the table: what is known of the whole run."""
    seconds = trainer.watchdog.phase_s
    lines = [f"  {name} {seconds.get(name, 0.0):.3f} s in all" for name in ("evaluation", "save")]
    if items_per_s is not None:
        lines.append(f"  {items_per_s:,.0f} images/s")
    if flops is not None:
        lines.append(f"  {flops / 1e9:.3f} GFLOP an image, forward and backward")
        peak = peak_flops(trainer.accelerator)
        if items_per_s is not None and peak is not None:
            lines.append(f"  MFU {items_per_s * flops / peak:.1%} of {peak / 1e12:,.0f} TFLOP/s")
    return [*lines, f"  peak memory {peak_memory_bytes(trainer.accelerator) / 2**30:.2f} GiB"]


def flops_per_sample(trainer: Trainer) -> float | None:
    """Count the operations of matrix products and convolutions in one forward and backward; None: sharded."""
    if trainer.accelerator.distributed_type == "FSDP":
        return None
    model = trainer.raw_model.eval()  # neither running statistics nor collectives
    window = next(iter(trainer.loader.windows(trainer.state.epoch, 0)))
    batch = window.micro_batches[0]
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with FlopCounterMode(display=False) as counter:
        with trainer.accelerator.autocast():
            loss = trainer.task.train_step(model, batch).loss_sum
        torch.autograd.grad(loss, parameters, allow_unused=True)
    model.train()
    return float(counter.get_total_flops()) / max(1, len(batch))


def peak_flops(accelerator: Accelerator) -> float | None:
    """Return what the GPUs of all processes could do at most in half precision; None: not known."""
    if accelerator.device.type != "cuda" or accelerator.mixed_precision == "no":
        return None
    name = torch.cuda.get_device_name(accelerator.device)
    peaks = [tflops for part, tflops in _PEAK_TFLOPS.items() if part in name]
    return peaks[0] * 1e12 * accelerator.num_processes if peaks else None

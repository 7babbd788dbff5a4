"""What the loaders copy to a GPU beside the computation: that it is whole, and that it is
beside."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, Dataset

from accel_trainer import Batch, BatchConfig, build_train_loader
from accel_trainer.core.types import StepBatch
from accel_trainer.data import loader

from .. import loops
from .page import Page, Setting

MIN_UNDER_COMPUTE = 0.8


class Noise(Dataset[tuple[Tensor, int]]):
    """Random images that depend on their index alone."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, 32, 32, generator=generator), index % 10


class LateCopy(loader.DeviceCopy):
    """Copies that come late: the stream of the copies has other work first."""

    def __call__(self, batch: Batch) -> Batch:
        if self._stream is not None:
            with self._stream:
                work = torch.ones(4096, 4096, device=self._device)
                for _ in range(4):
                    work = work @ work
        return super().__call__(batch)


def compare_pixels(page: Page, setting: Setting) -> None:
    """Hash what a training step would read: copied in time, and late."""
    num_steps = 8 if setting.is_tiny else 500
    in_time = _hash_pixels(num_steps)
    with patch.object(loader, "DeviceCopy", LateCopy):
        late = _hash_pixels(num_steps)
    row = {"steps": num_steps, "in time": in_time[:16], "late": late[:16]}
    page.add("Pixels on the device", row)
    page.judge(
        f"the pixels of {num_steps} steps are the same where copies come late",
        holds=in_time == late,
    )


def _hash_pixels(num_steps: int) -> str:
    """Return a hash of each step's pixels, as the stream that trains sees them, with the next
    copies under way."""
    found: list[Tensor] = []
    for batch in _step_batches(num_steps):
        pixels = batch.micro_batches[0].inputs.view(torch.int32).flatten().long()
        # Sums of integers, which have one value in any order.
        found.append((pixels * torch.arange(1, len(pixels) + 1, device=pixels.device)).sum())
    return hashlib.sha256(torch.stack(found).cpu().numpy().tobytes()).hexdigest()


def _step_batches(num_steps: int) -> Iterator[StepBatch]:
    size = loops.BATCH_SIZE
    workers = min(8, os.cpu_count() or 1)
    batch = BatchConfig(global_batch_size=size, per_device_batch_size=size, num_workers=workers)
    images = Noise(num_steps * size)
    train = build_train_loader(images, batch, seed=0, accelerator=Accelerator())
    return train.step_batches(0, 0)


class Copied(DataLoader[Any]):
    """Batches for `loops`, copied by our loader while the step before computes."""

    def __init__(self, num_steps: int) -> None:
        super().__init__(Noise(1))
        self._num_steps = num_steps

    def __iter__(self) -> Any:
        for step in _step_batches(self._num_steps):
            (batch,) = step.micro_batches
            yield batch.inputs, batch.targets


def trace_copies(page: Page, setting: Setting) -> None:
    """Record a run, and add up for how long of a copy from pinned memory something is computed."""
    model, num_steps = ("resnet8", 4) if setting.is_tiny else ("fast resnet18", 60)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        activity = ProfilerActivity.CUDA if setting.device == "cuda" else ProfilerActivity.CPU
        with profile(activities=[activity]) as profiler:
            loops.LOOPS["ours, all on"](
                loops.make_model(model).to(setting.device), Copied(num_steps), num_steps
            )
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    num_copies, share = under_compute(events)
    row = {"model": model, "copies from pinned memory": num_copies, "under compute %": 100 * share}
    page.add("Copies beside the computation", row)
    if setting.device == "cuda":
        claim = f"{100 * share:.0f} % of the time of {num_copies} copies is under compute"
        page.judge(
            f"{claim}, at least {100 * MIN_UNDER_COMPUTE:.0f} %", holds=share >= MIN_UNDER_COMPUTE
        )


def under_compute(events: Sequence[Mapping[str, Any]]) -> tuple[int, float]:
    """Return the number of copies from pinned memory, and the share of their time in which a kernel
    runs."""
    copies = [_span(event) for event in events if "Pinned -> Device" in str(event.get("name"))]
    kernels = sorted(_span(event) for event in events if event.get("cat") == "kernel")
    covered_us = 0.0
    for start, end in copies:
        reached = start
        for begun, over in kernels:
            if begun < end and over > reached:
                covered_us += min(over, end) - max(begun, reached)
                reached = min(over, end)
    total_us = sum(end - start for start, end in copies)
    return len(copies), covered_us / total_us if total_us else 0.0


def _span(event: Mapping[str, Any]) -> tuple[float, float]:
    return event["ts"], event["ts"] + event["dur"]

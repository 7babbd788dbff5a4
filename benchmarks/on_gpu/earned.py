"""What the code that exists for GPUs alone earns: training with each piece of it replaced by the
plain way, and a copy of the state in pinned and in pageable memory."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from unittest.mock import patch

import torch

from accel_trainer import Batch
from accel_trainer.checkpoint import staging
from accel_trainer.checkpoint.serialization import encode
from accel_trainer.data import loader
from accel_trainer.training import step

from .. import loops, results
from .copies import Copied
from .page import Page, Setting

AS_IT_IS = "as it is"


class CopyInLine(loader.DeviceCopy):
    """Copies on the stream that trains, without waiting."""

    def __call__(self, batch: Batch) -> Batch:
        moved = batch.map(lambda tensor: tensor.to(self._device, non_blocking=True))
        return moved.to(self._device)


class CopyAndWait(loader.DeviceCopy):
    """Copies on the stream that trains, and waits for each."""

    def __call__(self, batch: Batch) -> Batch:
        return batch.to(self._device)


VARIANTS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    AS_IT_IS: nullcontext,
    "batches copied on the training stream": lambda: patch.object(loader, "DeviceCopy", CopyInLine),
    "batches copied and waited for": lambda: patch.object(loader, "DeviceCopy", CopyAndWait),
    "each step waits for its NaN check": lambda: patch.object(
        step, "has_streams", lambda device: False
    ),
}


def run(page: Page, setting: Setting) -> None:
    page.attempt("copies of the state", partial(_time_snapshots, page, setting))
    nets = ("resnet8",) if setting.is_tiny else ("resnet18", "fast resnet18")
    for net in nets:
        page.attempt(f"steps of {net}", partial(_compare, page, setting, net))


def _compare(page: Page, setting: Setting, net: str) -> None:
    num_steps = 8 if setting.is_tiny else 400
    of_plain: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for number in range(1, setting.num_repeats + 1):
        base_us = 0.0
        for variant in VARIANTS:
            found = results.in_process("on_gpu.earned", variant, net, str(num_steps))
            base_us = base_us or found["step_us"]  # the first of a round
            of_plain[variant].append(found["step_us"] / base_us)
            row = {"how": variant, "round": number, "us/step": found["step_us"]}
            page.add(f"{net}, batch 128 from the host", row)
    for variant, ratios in of_plain.items():
        row = {"how": variant, "of the time as it is": statistics.median(ratios)}
        page.add(f"{net}: median of {setting.num_repeats}", row)


def _time_snapshots(page: Page, setting: Setting) -> None:
    """Time copies of the state of a ResNet-50 with momentum: until the call returns, which pauses
    the training, and until all is in host memory."""
    model = loops.make_model("resnet8" if setting.is_tiny else "resnet50").to(setting.device)
    pieces = {
        name: encode(
            {key: value.clone() for key, value in model.inner.state_dict().items()}, name=name
        )
        for name in ("model", "momentum")
    }
    ways: dict[str, AbstractContextManager[object]] = {
        "pinned": nullcontext(),
        "pageable": patch.object(staging, "has_streams", lambda device: False),
    }
    for name, chosen in ways.items():
        with chosen:
            snapshot = staging.Snapshot()
            snapshot.take(pieces)[1]()  # allocates
            _wait_for_device(setting)
            begin_s = time.perf_counter()
            _, wait = snapshot.take(pieces)
            paused_s = time.perf_counter() - begin_s
            wait()
            _wait_for_device(setting)
            row = {"memory": name, "training pauses ms": 1000 * paused_s}
            page.add(
                "A copy of the state of ResNet-50 and its momentum",
                {**row, "copied after ms": 1000 * (time.perf_counter() - begin_s)},
            )


def _wait_for_device(setting: Setting) -> None:
    if setting.device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    variant, net, num_steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = loops.make_model(net).to(device)
    with VARIANTS[variant]():
        loops.LOOPS["ours, all on"](model, Copied(num_steps), num_steps)
    print(json.dumps({"step_us": loops.mean_step_us(model, num_steps)}))


if __name__ == "__main__":
    main()

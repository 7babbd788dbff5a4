"""What a step costs beside a raw loop and other toolkits, and what an epoch of ResNet-18 costs from files."""

from __future__ import annotations

import tempfile
import warnings
from functools import partial
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from .. import loops, overhead
from .page import Page, Setting
from .runs import result, rows, train

LOOPS = ("raw", "ours, all on", "accelerate", "Lightning", "HF Trainer")
STEPS = {"tiny": 4000, "resnet18": 300}
MAX_OF_RAW, MAX_SYNCS = 1.15, 0
RESNET18 = ("--config", "recipes/configs/cifar10_resnet18.yaml", "--epochs", "1", "--quiet", "--seed", "0")


def run(page: Page, setting: Setting) -> None:
    for model, steps in ({"tiny": 8} if setting.is_tiny else STEPS).items():
        page.attempt(f"a step of {model}", partial(_measure_step, page, setting, model, steps))
    page.attempt("syncs", partial(_count_syncs, page, setting))
    for precision in ("no",) if setting.is_tiny else ("bf16", "fp16", "no"):
        page.attempt(f"ResNet-18, {precision}", partial(_train_epoch, page, setting, precision))
    if not setting.is_tiny:
        page.attempt("ResNet-18, bf16, compiled", partial(_train_epoch, page, setting, "bf16", "--compile"))


def _measure_step(page: Page, setting: Setting, model: str, steps: int) -> None:
    names = LOOPS[:2] if setting.is_tiny else LOOPS
    found = overhead.measure(model, names, steps, 1 if setting.is_tiny else 3, device=setting.device)
    for row in found:
        page.add(f"A step of {model}, batch 128, float32", row)
    ours = next(row["of raw"] for row in found if row["loop"].startswith("ours"))
    page.judge(f"a step of {model} takes {ours:.2f} times a raw loop's, at most {MAX_OF_RAW}", holds=ours <= MAX_OF_RAW)


def _count_syncs(page: Page, setting: Setting) -> None:
    """Count the times that the host waits for the device in 50 steps, beyond those of a run of 25."""
    counts = {}
    for num_steps in (25, 75):
        model = loops.make_model("tiny").to(setting.device)
        batches = DataLoader(loops.Batches((32,), num_steps, setting.device), batch_size=None)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            if setting.device == "cuda":
                torch.cuda.set_sync_debug_mode("warn")
            loops.LOOPS["ours, all on"](model, batches, num_steps)
            if setting.device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        counts[num_steps] = sum("synchronizing" in str(warning.message) for warning in found)
    more = counts[75] - counts[25]
    page.add(
        "Waits of the host for the device", {"in 25 steps": counts[25], "in 75 steps": counts[75], "in 50 more": more}
    )
    page.judge(f"50 more steps wait for the device {more} times more, at most {MAX_SYNCS}", holds=more <= MAX_SYNCS)


def _train_epoch(page: Page, setting: Setting, precision: str, *flags: str) -> None:
    few = ("--model", "resnet8", "--batch-size", "64", "--global-batch-size", "64", "--max-steps", "1")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        chosen = (*RESNET18, "--mixed-precision", precision, *flags, *(few if setting.is_tiny else ()))
        train(setting, folder, *chosen)
        found = result(folder)
        waited = rows(folder, "perf/data_wait_fraction")
    row = {
        "precision": " ".join((precision, *flags)), "images/s": found["images_per_s"], "wall s": found["wall_s"],
        "waiting for data %": 100 * sum(waited) / len(waited) if waited else None,
        "memory GiB": found["peak_memory_bytes"] / 2**30, "accuracy %": 100 * found["metrics"]["eval/accuracy"],
    }  # fmt: skip
    page.add(f"An epoch of ResNet-18 on {setting.described}", row)

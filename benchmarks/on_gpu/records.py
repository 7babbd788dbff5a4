"""Whole trainings to an accuracy that others have published a time for."""

from __future__ import annotations

import tempfile
import time
from functools import partial
from pathlib import Path

from .. import results
from .page import Page, Setting
from .runs import result, train

CONFIGS = results.ROOT / "recipes" / "configs"
# The config, its flags, the seeds, and the accuracy in percent that the others' time is for.
TRAININGS = (
    ("cifar10_94.yaml", (), 3, 94.0),
    ("cifar10_94.yaml", ("--compile",), 3, 94.0),
    ("cifar10_96.yaml", (), 1, 96.0),
    ("cifar10_resnet18.yaml", ("--mixed-precision", "bf16", "--epochs", "15"), 1, 94.0),
)
FEW = ("--model", "resnet8", "--batch-size", "64", "--global-batch-size", "64", "--max-steps", "1")
TINY_TRAININGS = (("cifar10_resnet18.yaml", FEW, 1, 94.0),)


def run(page: Page, setting: Setting) -> None:
    for config, flags, num_seeds, goal in TINY_TRAININGS if setting.is_tiny else TRAININGS:
        for seed in range(num_seeds):
            name = " ".join((config, *flags))
            page.attempt(
                f"{name}, seed {seed}", partial(_train, page, setting, config, flags, seed, goal)
            )


def _train(
    page: Page, setting: Setting, config: str, flags: tuple[str, ...], seed: int, goal: float
) -> None:
    chosen = ("--config", str(CONFIGS / config), "--seed", str(seed), *flags)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        start_s = time.monotonic()
        train(setting, folder, *chosen)
        process_s = time.monotonic() - start_s
        record = result(folder)
    accuracy = 100 * record["metrics"]["eval/accuracy"]
    row = {
        "training": " ".join((config, *flags)),
        "seed": seed,
        "accuracy %": accuracy,
        "training s": record["samples_seen"] / record["samples_per_s"],
        "start to end s": process_s,
        "images/s": record["samples_per_s"],
        "memory GiB": record["peak_memory_bytes"] / 2**30,
    }
    page.add(f"Whole trainings on {setting.described}", row)
    if setting.is_cifar10 and not setting.is_tiny:
        page.judge(
            f"{config}, seed {seed}: {accuracy:.2f} %, at least {goal - 0.3:.1f}",
            holds=accuracy >= goal - 0.3,
        )

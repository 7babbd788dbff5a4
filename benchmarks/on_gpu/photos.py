"""Photos decoded from the disk into a ResNet-50: how much of a step waits for them, by the number
of workers."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

from .page import Page, Setting
from .runs import result, rows, train

NUM_TIMES, NUM_STEPS, BATCH_SIZE = 16, 30, 256
SUFFIXES = {".jpg", ".jpeg", ".png"}


def run(page: Page, setting: Setting) -> None:
    if setting.photos is None:
        page.miss("photos, as no folder of them was given (--photos)")
        return
    cores = os.cpu_count() or 1
    most_first = sorted({cores // 4, cores // 2, cores}, reverse=True)
    with tempfile.TemporaryDirectory() as name:
        photos = Path(name) / "photos"
        repeat_photos(setting.photos, photos, num_times=1 if setting.is_tiny else NUM_TIMES)
        many = replace(setting, photos=photos)
        for workers in (0,) if setting.is_tiny else most_first:
            page.attempt(f"{workers} workers", partial(_train, page, many, workers))


def repeat_photos(photos: Path, folder: Path, *, num_times: int) -> None:
    """Copy the photos of each class `num_times`, so that an epoch has enough steps to be timed."""
    for path in sorted(path for path in photos.rglob("*") if path.suffix in SUFFIXES):
        place = folder / path.parent.name
        place.mkdir(parents=True, exist_ok=True)
        for number in range(num_times):
            shutil.copy(path, place / f"{number}-{path.name}")


def _train(page: Page, setting: Setting, workers: int) -> None:
    model = "resnet8" if setting.is_tiny else "resnet50"
    size = (
        ("--image-size", "16", "--max-steps", "2")
        if setting.is_tiny
        else ("--image-size", "224", "--max-steps", str(NUM_STEPS))
    )
    precision = "no" if setting.device == "cpu" else "bf16"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        flags = (
            "--model",
            model,
            "--val-fraction",
            "0.1",
            "--epochs",
            "100",
            "--batch-size",
            "16" if setting.is_tiny else str(BATCH_SIZE),
        )
        log = ("--trainer.log-every-n-steps", "1" if setting.is_tiny else "10", "--quiet")
        train(
            setting,
            folder,
            *flags,
            *size,
            *log,
            "--batch.num-workers",
            str(workers),
            "--mixed-precision",
            precision,
            recipe="images",
        )
        found, speeds, waits = (
            result(folder),
            rows(folder, "perf/samples_per_s"),
            rows(folder, "perf/data_wait_fraction"),
        )
    row = {
        "workers": workers,
        "photos/s": speeds[-1],
        "waiting for data %": 100 * waits[-1],
        "memory GiB": found["peak_memory_bytes"] / 2**30,
    }
    page.add(f"{model}, {precision}, {size[1]} pixels, batch {flags[-1]}", row)

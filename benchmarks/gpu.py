"""Runs what needs a GPU, all that matters in eight minutes: `python -m benchmarks.gpu --minutes 8`;
or in parts: `--part exact`.

It needs only the repository: no network, pip or make. It trains on CIFAR-10 from the hub or from
`--dataset FOLDER`, or otherwise on random images of the same shape. Each part writes its results as
it gets them, to .benchmarks/results/gpu_PART.json or to the folder `--to`, to be committed
unchanged; a part that fails costs only itself. Without a GPU nothing is measured; `--tiny` tries
the parts with a few steps, and of each list of cases the first; `--every-case` all.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from accel_trainer import UserError
from accel_trainer.vision import load_images

from . import results
from .input_pipeline import write_noise
from .on_gpu import (
    bits,
    checks,
    digests,
    earned,
    exact,
    memory,
    nccl,
    photos,
    records,
    smoke,
    speed,
)
from .on_gpu.page import Page, Setting, gpu_environment
from .on_gpu.shares import run_in_shares

PARTS: Mapping[str, tuple[str, Callable[[Page, Setting], None]]] = {
    "smoke": ("On a GPU: the first minute", smoke.run),
    "tests": ("On a GPU: tests", checks.run),
    "bits": ("On a GPU: wrong bits, and their cause", bits.run),
    "exact": ("On a GPU: exactness", exact.run),
    "digests": ("On a GPU: what digests cost", digests.run),
    "earned": ("On a GPU: what the code for GPUs alone earns", earned.run),
    "speed": ("On a GPU: speed", speed.run),
    "nccl": ("On a GPU: several processes", nccl.run),
    "memory": ("On a GPU: memory", memory.run),
    "records": ("On a GPU: whole trainings", records.run),
    "photos": ("On a GPU: photos from the disk", photos.run),
}


def find_images(
    dataset: str | None, cache_dir: Path, folder: Path, *, num_random: int
) -> tuple[str, str, Path, bool]:
    """Return the dataset, what it is, its cache, and whether it is
    CIFAR-10 itself: the given one, that of the hub, or random images."""
    if dataset is not None:
        load_images(dataset, cache_dir=cache_dir)  # decoded before any clock runs
        return dataset, "the images of --dataset", cache_dir, False
    try:
        load_images("cifar10", cache_dir=cache_dir)
        return "cifar10", "CIFAR-10 of the hub", cache_dir, True
    except UserError:
        folder.mkdir()
        write_noise(folder, num_train=num_random, num_test=num_random // 5)
        load_images(str(folder), cache_dir=folder / "cache")
        return str(folder), "random images, as the hub is out of reach", folder / "cache", False


def run_part(part: str, setting: Setting, folder: Path, *, time_s: float) -> Page:
    """Run a part and show its page, whatever happens in it."""
    title, run = PARTS[part]
    started = results.environment() | gpu_environment()
    page = Page(part, title, folder, started, time.monotonic() + time_s)
    page.write()
    try:
        run(page, setting)
    except Exception as error:  # outside of its checks
        page.fail(part, error)
    print((folder / f"gpu_{part}.json").resolve())
    for finding in page.findings:
        print(f"- {finding}", flush=True)
    return page


def _flags_of_parts(options: argparse.Namespace, setting: Setting) -> list[str]:
    """Return the flags with which each part finds the images that are decoded by now."""
    flags = ["--dataset", setting.dataset, "--cache-dir", str(setting.cache_dir), "--repeats", "1"]
    if setting.photos is not None:
        flags += ["--photos", str(setting.photos)]
    return flags + ["--tiny"] * setting.is_tiny + ["--every-case"] * options.every_case


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--part",
        nargs="+",
        choices=PARTS,
        default=list(PARTS),
        help="which; default: all, in order",
    )
    parser.add_argument(
        "--dataset", help="a folder of CIFAR-10; None: from the hub, else random images"
    )
    parser.add_argument("--photos", type=Path, help="a folder of photos, for the part of that name")
    parser.add_argument(
        "--cache-dir", type=Path, default=Path("~/.cache/accel_trainer").expanduser()
    )
    parser.add_argument(
        "--to", type=Path, help="where results are written; default: .benchmarks/results"
    )
    parser.add_argument(
        "--time-s", type=float, default=420, help="no check of a part begins after as many seconds"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        help="all that matters, each part in its share of as many minutes, and a summary",
    )
    parser.add_argument(
        "--repeats", type=int, default=3, help="how often a loop is timed, in a process each time"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="try it with a few steps, also without a GPU"
    )
    parser.add_argument(
        "--every-case", action="store_true", help="with --tiny: not only the first of each list"
    )
    options = parser.parse_args()
    started_s = time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.tiny:
        print("no GPU: nothing is measured; --tiny tries the command itself")
        return
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        try:
            num_random = 512 if options.tiny else 50_000
            found = find_images(
                options.dataset, options.cache_dir, scratch / "noise", num_random=num_random
            )
        except UserError as error:
            sys.exit(str(error))
        dataset, described, cache_dir, is_cifar10 = found
        setting = Setting(
            device=device,
            dataset=dataset,
            described=described,
            photos=options.photos,
            cache_dir=cache_dir,
            is_tiny=options.tiny,
            has_every_case=options.every_case or not options.tiny,
            is_cifar10=is_cifar10,
            num_repeats=1 if options.tiny else options.repeats,
        )
        # What is only tried is not kept beside what was measured.
        folder = options.to or (scratch / "results" if options.tiny else results.FOLDER / "results")
        if options.minutes is not None:
            end_s = started_s + 60 * options.minutes
            sys.exit(run_in_shares(end_s, _flags_of_parts(options, setting), folder))
        for part in options.part:
            run_part(part, setting, folder, time_s=options.time_s)
    if not options.tiny and options.to is None:
        results.write_readme(results.FOLDER)


if __name__ == "__main__":
    main()

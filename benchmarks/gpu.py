"""Runs what needs a GPU, in about ten minutes: tests, the cost of a step, the speed of training runs.

`make gpu` needs only the repository. It trains on CIFAR-10 from the hub, from a folder with `make gpu DATASET=FOLDER`,
or otherwise on random images of the same shape. It prints a page of results, and writes them to results/gpu.json, to be
committed unchanged. Without a GPU nothing is measured; `--tiny` tests the command itself.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import torch

from accel_trainer import UserError
from accel_trainer.vision import load_images

from . import overhead, recipe, results
from .input_pipeline import write_noise

CONFIGS = results.ROOT / "recipes" / "configs"
LOOPS = ("raw", "ours, all on", "accelerate", "Lightning", "HF Trainer")
MAX_OF_RAW, MIN_SCALING, MIN_ACCURACY, MAX_LOSS_OF_ACCURACY = 1.15, 0.8, 93.7, 5.0
OUTCOMES = {"failure": "failed", "error": "failed", "skipped": "left out"}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is done."""

    tests: str = "tests"
    steps: Mapping[str, int] = field(default_factory=lambda: {"tiny": 4000, "resnet20": 400})
    repeats: int = 3
    precisions: tuple[str, ...] = ("no", "bf16", "fp16")
    num_random_images: int = 50_000
    flags: tuple[str, ...] = ()
    max_94_s: float = 120.0
    compiles: bool = True


TINY = Sizes(
    tests="tests/training/test_pretend_device.py", steps={"tiny": 8}, repeats=1, precisions=("no",),
    num_random_images=256,
    flags=("--model", "resnet8", "--batch-size", "64", "--global-batch-size", "64", "--max-steps", "1"),
    max_94_s=float("inf"), compiles=False,
)  # fmt: skip


@dataclass
class Page:
    """The results: tables, and which expectations held."""

    tables: dict[str, list[results.Row]] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)

    def judge(self, claim: str, *, holds: bool) -> None:
        self.findings.append(f"{'Held' if holds else '**Did not hold**'}: {claim}.")


@dataclass(frozen=True)
class Images:
    """The training data: `dataset` as for recipes/cifar.py."""

    dataset: str
    described: str
    cache_dir: Path
    are_real: bool = True


def find_images(dataset: str | None, cache_dir: Path, folder: Path, *, num_random: int) -> Images:
    """Return the given dataset, else CIFAR-10 from the hub, else as many random images, written to `folder`."""
    if dataset is not None:
        load_images(dataset, cache_dir=cache_dir)  # decoded before any clock runs
        return Images(dataset, "the images of DATASET", cache_dir)
    try:
        load_images("cifar10", cache_dir=cache_dir)
        return Images("cifar10", "CIFAR-10 of the hub", cache_dir)
    except UserError:
        write_noise(folder, num_train=num_random, num_test=num_random // 5)
        load_images(str(folder), cache_dir=folder / "cache")
        return Images(str(folder), "random images, as the hub is out of reach", folder / "cache", are_real=False)


def run_tests(page: Page, sizes: Sizes) -> None:
    """Run the tests that need a GPU."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--junitxml", str(report), sizes.tests]
        subprocess.run(command, cwd=results.ROOT, check=False)
        cases = list(ElementTree.parse(report).iter("testcase"))
    rows: list[results.Row] = []
    for case in cases:
        child = next((child for child in case if child.tag in OUTCOMES), None)
        said = "" if child is None else child.get("message", "").strip()
        why = said.splitlines()[-1][:200] if said else None
        outcome = "passed" if child is None else OUTCOMES[child.tag]
        rows.append({"test": case.get("name"), "outcome": outcome, "s": float(case.get("time", 0)), "why": why})
    page.tables["Tests that need a GPU"] = rows
    counts = {kind: sum(row["outcome"] == kind for row in rows) for kind in ("passed", "failed", "left out")}
    listed = ", ".join(f"{number} {kind}" for kind, number in counts.items())
    page.judge(f"the tests that need a GPU pass ({listed})", holds=counts["passed"] > 0 == counts["failed"])


def measure_overhead(page: Page, sizes: Sizes, device: str) -> None:
    """Measure what the loop adds to a step of a tiny and of a small network."""
    for model, steps in sizes.steps.items():
        rows = overhead.measure(model, LOOPS, steps, sizes.repeats, device=device)
        page.tables[f"A step of {model}, batch 128, float32"] = rows
        ours = next(row["of raw"] for row in rows if row["loop"].startswith("ours"))
        page.judge(
            f"a step of {model} takes {ours:.2f} times a raw loop's, at most {MAX_OF_RAW}", holds=ours <= MAX_OF_RAW
        )


def train(config: str, images: Images, sizes: Sizes, name: str, *flags: str, num_gpus: int = 1) -> results.Row:
    """Return a row for a training with one process per GPU."""
    record = recipe.train(
        CONFIGS / config, dataset=images.dataset, cache_dir=images.cache_dir, seed=0,
        flags=[*flags, *sizes.flags], num_processes=num_gpus,
    )  # fmt: skip
    return {
        "training": name,
        "images/s": record["images_per_s"],
        "training s": record["samples_seen"] / record["images_per_s"],
        "start to end s": record["process_s"],
        "memory GiB": record["peak_memory_bytes"] / 2**30,
        "accuracy %": 100 * record["metrics"]["eval/accuracy"],
    }


def train_resnet18(page: Page, sizes: Sizes, images: Images) -> None:
    """Train an epoch of ResNet-18 in each precision, and on all GPUs if there are several."""
    rows = page.tables[f"An epoch of ResNet-18 on {images.described}"] = []
    run = partial(train, "cifar10_resnet18.yaml", images, sizes)
    for precision in sizes.precisions:
        rows.append(run(precision, "--epochs", "1", "--mixed-precision", precision))
    if images.are_real and len(rows) > 1:
        least = min(row["accuracy %"] - rows[0]["accuracy %"] for row in rows)
        claim = f"half precision costs at most {MAX_LOSS_OF_ACCURACY:g} points of accuracy ({least:+.1f})"
        page.judge(claim, holds=least >= -MAX_LOSS_OF_ACCURACY)
    number = torch.cuda.device_count()
    if number > 1:
        flags = ("--epochs", "1", "--mixed-precision", "bf16", "--global-batch-size", str(128 * number))
        rows.append(run(f"bf16, {number} GPUs, {128 * number} a step", *flags, num_gpus=number))
        speed = rows[-1]["images/s"] / rows[1]["images/s"]
        claim = f"{number} GPUs train {speed:.2f} times as fast as one, at least {MIN_SCALING * number:g}"
        page.judge(claim, holds=speed >= MIN_SCALING * number)


def train_to_94(page: Page, sizes: Sizes, images: Images) -> None:
    """Train the airbench94 network, if the ResNet-18 was fast enough for there to be time."""
    speeds = [row["images/s"] for caption, rows in page.tables.items() if "ResNet-18" in caption for row in rows]
    expected_s = 8 * 50_000 / max(speeds, default=1)
    if expected_s > sizes.max_94_s:
        page.findings.append(f"Not tried: cifar10_94.yaml, of about {expected_s:.0f} s.")
        return
    rows = page.tables[f"cifar10_94.yaml on {images.described}"] = []
    rows.append(train("cifar10_94.yaml", images, sizes, "eager"))
    if sizes.compiles:
        rows.append(train("cifar10_94.yaml", images, sizes, "--compile", "--compile"))
    if images.are_real:
        least = min(row["accuracy %"] for row in rows)
        claim = f"cifar10_94.yaml comes to {least:.2f} % with one seed, at least {MIN_ACCURACY}"
        page.judge(claim, holds=least >= MIN_ACCURACY)


def try_all(page: Page, parts: Mapping[str, Callable[[], None]], *, time_s: float) -> None:
    """Run the `parts` for which there is time; if one fails, continue with the next."""
    start_s = time.monotonic()
    for name, part in parts.items():
        elapsed_s = time.monotonic() - start_s
        if elapsed_s > time_s:
            page.findings.append(f"Not tried: {name}, as {time_s:.0f} s were over.")
            continue
        print(f"{name} ({elapsed_s:.0f} s)", flush=True)
        try:
            part()
        except Exception as error:  # the page says so, and the other parts may tell why
            print(error, file=sys.stderr)
            page.judge(f"{name} ({type(error).__name__}, see what it printed)", holds=False)


def gpu_environment() -> results.Row:
    """Return the facts about the GPUs that `results.environment` lacks."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        driver = None
    return {"num_gpus": torch.cuda.device_count(), "cuda": torch.version.cuda, "driver": driver}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", help="a folder of CIFAR-10; None: from the hub, else random images")
    parser.add_argument("--cache-dir", type=Path, default=Path("~/.cache/accel_trainer").expanduser())
    parser.add_argument("--time-s", type=float, default=600, help="no part begins after as many seconds")
    parser.add_argument("--tiny", action="store_true", help="try it with a few steps, also without a GPU")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.tiny:
        print("no GPU: nothing is measured; --tiny tries the command itself")
        return
    started, page, sizes = results.environment() | gpu_environment(), Page(), TINY if options.tiny else Sizes()
    with tempfile.TemporaryDirectory() as folder:
        try:
            images = find_images(options.dataset, options.cache_dir, Path(folder), num_random=sizes.num_random_images)
        except UserError as error:
            sys.exit(str(error))
        parts = {
            "tests": partial(run_tests, page, sizes),
            "overhead": partial(measure_overhead, page, sizes, device),
            "ResNet-18": partial(train_resnet18, page, sizes, images),
            "cifar10_94.yaml": partial(train_to_94, page, sizes, images),
        }
        try_all(page, parts, time_s=options.time_s)
    results.write(
        "gpu",
        title="On a GPU",
        how="All in one start. A step is the mean of a run's last three quarters, by the clock; a column is the median "
        "of processes started in turn. Trainings have their evaluations, checkpoints and rows.",
        tables=page.tables,
        goals=page.findings,
        started=started,
        is_kept=not options.tiny,
    )


if __name__ == "__main__":
    main()

"""What `accel-trainer plan` predicts of a run, against what the run then takes: time and memory."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from accel_trainer.cli.common.recipes import find_config_class
from accel_trainer.cli.flags.parser import parse_config
from accel_trainer.cli.plan.measure import measure
from accel_trainer.cli.plan.steps import plan_run, without_open_settings
from accel_trainer.cli.runs.run_reader import read_run

from . import results
from .input_pipeline import write_noise
from .photos import cut_photos

RECIPES = results.ROOT / "recipes"


def cases(folder: Path) -> dict[str, tuple[str, list[str]]]:
    """Return the recipe and the flags of each case, by its name."""
    digits = ["--config", str(RECIPES / "configs" / "digits.yaml"), "--epochs", "60"]
    resnet20 = ["--config", str(RECIPES / "configs" / "cifar10_resnet20.yaml")]
    resnet20 += ["--dataset", str(folder / "cifar"), "--epochs", "3", "--evaluate-every", "1epochs"]
    resnet20 += ["--runtime.mixed-precision", "no"]
    photos = ["--dataset", str(folder / "photos"), "--val-fraction", "0.1", "--image-size", "96"]
    photos += ["--batch-size", "32", "--epochs", "6"]
    segmentation = ["--optimizer.name", "adamw", "--batch-size", "32", "--epochs", "6"]
    return {
        "digits, small ResNet": ("cifar.py", digits),
        "CIFAR-sized noise, ResNet-20": ("cifar.py", resnet20),
        "photos, ResNet-18": ("images.py", photos),
        "a recipe of one's own: characters": ("characters.py", ["--epochs", "6"]),
        "segmentation with EMA": ("segmentation.py", [*segmentation, "--ema", "0.99"]),
    }


def write_data(folder: Path) -> None:
    """Write what the recipes train on: noise like CIFAR-10, and a folder of photos."""
    (folder / "cifar").mkdir()
    write_noise(folder / "cifar", num_train=8000, num_test=4000)
    write_photos(folder / "photos")


def write_photos(folder: Path) -> None:
    """Write a folder of 600 photos in two classes."""
    for index, photo in enumerate(10 * cut_photos(500, 375)):
        path = folder / "ab"[index % 2] / f"{index:03}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(photo)


def compare(name: str, recipe: Path, flags: Sequence[str], seconds: float) -> results.Row:
    """Plan a run, train it, and return what was predicted and what happened."""
    config = parse_config(find_config_class(recipe), list(flags), description="")
    # What decodes the data for the first time needs more memory than any later start.
    measure(recipe, flags, num_processes=1, seconds=0)
    measured = measure(recipe, flags, num_processes=1, seconds=seconds)
    config = without_open_settings(config, measured.batch.num_samples, num_processes=1)
    predicted_s = sum(measured.costs(plan_run(config, measured.batch)).values())
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        start_s = time.perf_counter()
        subprocess.run(
            [sys.executable, str(recipe), *flags, "--output-dir", str(run), "--quiet"], check=True
        )
        happened_s = time.perf_counter() - start_s
        peak_bytes = read_run(run).result["peak_memory_bytes"]
    return {
        "run": name,
        "planned s": predicted_s,
        "happened s": happened_s,
        "time off %": 100 * (predicted_s / happened_s - 1),
        "planned MiB": measured.times.peak_memory_bytes / 2**20,
        "happened MiB": peak_bytes / 2**20,
        "memory off %": 100 * (measured.times.peak_memory_bytes / peak_bytes - 1),
        "planning s": measured.total_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=5, help="only the first ones")
    parser.add_argument("--seconds", type=float, default=12, help="of steps, for each plan")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="of all runs")
    options = parser.parse_args()
    started = results.environment()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.cases > 1:  # the first one needs none
            write_data(folder)
        places = ["--cache-dir", str(folder / "cache")]
        for case, (recipe, flags) in list(cases(folder).items())[: options.cases]:
            rows.append(
                compare(case, RECIPES / recipe, [*flags, *places, *options.flags], options.seconds)
            )
            print(".", end="", flush=True)
    print()
    worst = {kind: max(abs(row[f"{kind} off %"]) for row in rows) for kind in ("time", "memory")}
    results.write(
        "plan",
        title="What a plan predicts",
        how=f"Each recipe is planned, by {options.seconds:g} s of its steps, and then "
        "trained as planned; from the start of Python to its end.",
        tables={"Planned and happened": rows},
        goals=[
            f"Time within 20 %: at most {worst['time']:.0f} % off.",
            f"Memory within 10 %: at most {worst['memory']:.0f} % off.",
        ],
        started=started,
    )


if __name__ == "__main__":
    main()

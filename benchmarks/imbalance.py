"""Unequal classes: the samples as they are, balanced by their order, and balanced by their weights.

CIFAR-10 made long-tailed, about an hour of one core; with `--photos FOLDER` a folder of photos with
unequal classes instead, about 10 minutes. `--max-steps 1` is a quick test that writes no result.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from accel_trainer.vision import load_images

from . import results

CONFIG = results.ROOT / "recipes" / "configs" / "cifar10_cpu.yaml"
CIFAR = ["--config", str(CONFIG), "--epochs", "10"]
PHOTOS = [
    *("--image-size", "48", "--val-fraction", "0.3", "--model", "resnet9", "--model.width", "16"),
    *("--epochs", "12", "--batch-size", "32", "--lr", "0.1", "--schedule.shape", "triangular"),
    *("--augment.crop-scale", "0.35", "1.0", "--task.label-smoothing", "0.1"),
]
WAYS = {
    "unequal, as they are": [],
    "balanced by `--batch.order`": ["--batch.order", "balanced"],
    "balanced by `--task.class-weights`": ["--task.class-weights", "balanced"],
}
IMBALANCE = 100


def make_long_tailed(labels: Tensor, path: Path) -> list[int]:
    """List the samples to leave out, so that the last class has 1 % of the first one's samples.

    The numbers of samples fall by the same factor from class to class, as in Cui et al. 2019 (arXiv
    1901.05555). Returns them.
    """
    classes = labels.unique().tolist()
    left_out: list[int] = []
    counts = []
    for place, label in enumerate(classes):
        ids = (labels == label).nonzero().flatten().tolist()
        count = round(len(ids) * IMBALANCE ** (-place / (len(classes) - 1)))
        counts.append(count)
        left_out += ids[count:]
    path.write_text("".join(f"{sample_id}\n" for sample_id in left_out), encoding="utf-8")
    return counts


def train(recipe: str, run: Path, flags: Sequence[str]) -> list[float]:
    """Return the accuracy in percent of each class that the evaluation of a run has."""
    command = [sys.executable, f"recipes/{recipe}.py", "--output-dir", str(run), *flags]
    subprocess.run(
        command,
        cwd=results.ROOT,
        check=True,
        stdout=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    print(".", end="", flush=True)
    metrics = json.loads((run / "result.json").read_text())["metrics"]
    per_class = metrics["eval/per_class_accuracy"]
    return [100 * accuracy for accuracy in per_class if accuracy is not None]


def measure(
    name: str, recipe: str, folder: Path, num_seeds: int, flags: Sequence[str], by_size: list[int]
) -> list[results.Row]:
    """Return a row for each way. `by_size` are the classes from the largest to the smallest."""
    rows: list[results.Row] = []
    for way, own in WAYS.items():
        runs = []
        for seed in range(num_seeds):
            run = folder / f"{name}-{len(rows)}-{seed}"
            runs.append(train(recipe, run, [*flags, *own, "--seed", str(seed)]))
        means = [statistics.mean(run) for run in runs]
        third = len(by_size) // 3
        rows.append(
            {
                "data": name,
                "classes are": way,
                "mean accuracy of the classes %": f"{statistics.mean(means):.1f}",
                "+-": f"{statistics.stdev(means):.1f}" if len(means) > 1 else None,
                "of the largest third": _mean_of(runs, by_size[:third]),
                "of the smallest third": _mean_of(runs, by_size[-third:]),
                "n": len(runs),
                "samples": [[round(value, 1) for value in run] for run in runs],
            }
        )
    return rows


def _mean_of(runs: Sequence[Sequence[float]], classes: Sequence[int]) -> str:
    return f"{statistics.mean(run[label] for run in runs for label in classes):.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset", default="cifar10", help="as of recipes/cifar.py")
    parser.add_argument("--photos", type=Path, help="a folder of photos in place of CIFAR-10")
    parser.add_argument(
        "--cache-dir", type=Path, default=Path("~/.cache/accel_trainer").expanduser()
    )
    parser.add_argument("--folder", type=Path, help="for the runs, which another start continues")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--max-steps", type=int)
    options = parser.parse_args()
    started = results.environment()
    short = [] if options.max_steps is None else ["--max-steps", str(options.max_steps)]
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        if options.photos is None:
            rows, how = measure_cifar(folder, options, short)
        else:
            rows, how = measure_photos(folder, options, short)
    print()
    is_cifar = options.photos is None
    results.write(
        "imbalance" if is_cifar else "imbalance_photos",
        title="Unequal classes" if is_cifar else "Unequal classes of photos",
        how=f"{how} Accuracy at the end, as the mean over the classes.",
        tables={"Accuracy with unequal classes": rows},
        started=started,
        is_kept=options.max_steps is None,
        command=None if is_cifar else "benchmarks.imbalance --photos FOLDER",
    )


def measure_cifar(
    folder: Path, options: argparse.Namespace, short: list[str]
) -> tuple[list[results.Row], str]:
    """Return the rows of a long-tailed CIFAR-10, and what was done."""
    images = load_images(options.dataset, cache_dir=options.cache_dir)
    counts = make_long_tailed(images.train.labels, folder / "left_out.txt")
    flags = [*CIFAR, "--dataset", options.dataset, "--cache-dir", str(options.cache_dir)]
    flags += ["--leave-out", str(folder / "left_out.txt"), *short]
    by_size = list(range(len(counts)))
    return measure("long-tailed CIFAR-10", "cifar", folder, options.seeds, flags, by_size), (
        "`recipes/cifar.py` with `recipes/configs/cifar10_cpu.yaml` for 10 epochs on CIFAR-10 with "
        f"{', '.join(map(str, counts))} training images of the classes (`--leave-out`), all "
        "10,000 test images."
    )


def measure_photos(
    folder: Path, options: argparse.Namespace, short: list[str]
) -> tuple[list[results.Row], str]:
    """Return the rows of a folder of photos, and what was done."""
    names = sorted((options.photos / "train").iterdir())
    sizes = torch.tensor([len(list(name.iterdir())) for name in names])
    flags = [*PHOTOS, "--dataset", str(options.photos.resolve()), *short]
    by_size = sizes.argsort(descending=True, stable=True).tolist()
    return measure("photos", "images", folder, options.seeds, flags, by_size), (
        f"`recipes/images.py` on {sizes.sum()} photos of {len(names)} classes "
        f"({', '.join(map(str, sizes.sort(descending=True).values.tolist()))}) at 48 pixels for 12 "
        "epochs, 30 % of the photos for the evaluation."
    )


if __name__ == "__main__":
    main()

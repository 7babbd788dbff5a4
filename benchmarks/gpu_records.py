"""The accuracy and time of a recipe beside airbench (K. Jordan) on the same images and the same GPU.

airbench is not part of this repository: fetch github.com/KellerJordan/cifar10-airbench, and name its script with
`--airbench`. It runs as it is. A run that was cut off is started again and goes on after the seeds that are done.

    python -m benchmarks.gpu_records --airbench airbench94_muon.py
    python -m benchmarks.gpu_records --airbench legacy/airbench96.py --config recipes/configs/cifar10_96.yaml --seeds 5
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from accel_trainer.vision import ImageDataset, load_images

from . import recipe, results

CONFIG = results.ROOT / "recipes" / "configs" / "cifar10_94.yaml"
OURS, THEIRS = "ours", "airbench"
Trainings = dict[str, list[results.Row]]


def write_tensors(images: ImageDataset, folder: Path) -> None:
    """Write the images as airbench keeps them: uint8 [N, H, W, C], where it looks before it downloads."""
    (folder / "cifar10").mkdir()
    for name, split in (("train", images.train), ("test", images.test)):
        pixels = split.images.permute(0, 2, 3, 1).contiguous()
        data = {"images": pixels, "labels": split.labels.clone(), "classes": list(images.class_names)}
        torch.save(data, folder / "cifar10" / f"{name}.pt")


def run_airbench(script: Path, images: ImageDataset, num_runs: int) -> list[results.Row]:
    """Run the script until it has printed `num_runs` evaluations, its warm-up not counted."""
    runs: list[results.Row] = []
    with tempfile.TemporaryDirectory() as folder:
        write_tensors(images, Path(folder))
        start = time.perf_counter()
        command = [sys.executable, "-u", str(script.resolve())]
        with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
            name = ""
            for line in process.stdout or ():
                # run, epoch, ..., tta_val_acc, time_seconds; the run is named in its first row alone
                cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
                if len(cells) < 6:
                    continue
                name = cells[0] or name
                if cells[1] == "eval" and name != "warmup":
                    cold_s = time.perf_counter() - start if not runs else None
                    runs.append({"accuracy": float(cells[-2]), "training_s": float(cells[-1]), "cold_s": cold_s})
                if len(runs) == num_runs:
                    process.terminate()
                    break
    if len(runs) < num_runs:
        raise RuntimeError(f"{script} printed {len(runs)} evaluations of {num_runs}, exit code {process.returncode}")
    return runs


def run_ours(config: Path, dataset: str, cache_dir: Path, seed: int) -> results.Row:
    flags = ["--compile", "--capture"] if torch.cuda.is_available() else []
    record = recipe.train(config, dataset=dataset, cache_dir=cache_dir, seed=seed, flags=flags)
    training_s = record["samples_seen"] / record["images_per_s"]
    accuracy = record["metrics"]["eval/accuracy"]
    return {"accuracy": accuracy, "training_s": training_s, "cold_s": record["process_s"]}


def row(name: str, runs: list[results.Row]) -> results.Row:
    accuracies = [100 * run["accuracy"] for run in runs]
    return {
        "training": name,
        "accuracy %": f"{statistics.mean(accuracies):.2f}",
        "+-": f"{statistics.pstdev(accuracies):.2f}",
        "training s": statistics.median(run["training_s"] for run in runs),
        "start to accuracy s": statistics.median(run["cold_s"] for run in runs if run["cold_s"] is not None),
        "n": len(runs),
        "samples": runs,
    }


def part_of(config: Path) -> str:
    return f"{config.stem}: trainings, a seed each"


def write(parts: dict[str, Trainings], started: results.Row) -> None:
    results.write(
        "gpu_records",
        title="CIFAR-10 in seconds on a GPU",
        how="A recipe with `--compile --capture`, a process a seed, and airbench's script, all seeds in one process. "
        "Compilation counts for the time from the start alone.",
        tables={part: [row(name, done) for name, done in runs.items()] for part, runs in parts.items()},
        goals=["At most its training time for its accuracy less 0.1, and a quarter of it from the start."],
        started=started,
    )


def read(started: results.Row) -> dict[str, Trainings]:
    """Return what has been measured by this code on this machine."""
    before = results.measured_before("gpu_records", now=started)
    return {part: {row["training"]: row["samples"] for row in rows} for part, rows in before.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--airbench", type=Path, help="a script of airbench, as fetched; None: ours alone")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--dataset", default="cifar10", help="as of recipes/cifar.py")
    parser.add_argument("--cache-dir", type=Path, default=Path("~/.cache/accel_trainer").expanduser())
    parser.add_argument("--config", type=Path, help="another recipe than cifar10_94.yaml, such as one for a CPU")
    options = parser.parse_args()
    if options.config is None and not torch.cuda.is_available():
        print("no GPU: not measured")
        return
    config = options.config or CONFIG
    images = load_images(options.dataset, cache_dir=options.cache_dir)  # decoded before any clock runs
    started = results.environment()
    parts = read(started)
    runs = parts.setdefault(part_of(config), {})
    if options.airbench is not None and THEIRS not in runs:
        runs[THEIRS] = run_airbench(options.airbench, images, options.seeds)
        write(parts, started)
    for seed in range(len(runs.get(OURS, [])), options.seeds):
        done = run_ours(config, options.dataset, options.cache_dir, seed)
        runs.setdefault(OURS, []).append(done)
        write(parts, started)


if __name__ == "__main__":
    main()

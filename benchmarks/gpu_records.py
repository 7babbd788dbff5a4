"""The accuracy and time of `cifar10_94.yaml` beside airbench94 (K. Jordan) on the same images and the same GPU.

airbench is not part of this repository: fetch github.com/KellerJordan/cifar10-airbench, and name its script with
`--airbench`. It runs as it is. A run that was cut off is started again and goes on after the seeds that are done.
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
PART = "Trainings, a seed each"


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
            for line in process.stdout or ():
                cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
                # run, epoch, train_acc, val_acc, tta_val_acc, time_seconds
                if len(cells) == 6 and cells[1] == "eval" and cells[0].isdigit():
                    cold_s = time.perf_counter() - start if not runs else None
                    runs.append({"accuracy": float(cells[4]), "training_s": float(cells[5]), "cold_s": cold_s})
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


def write(runs: dict[str, list[results.Row]], started: results.Row) -> None:
    results.write(
        "gpu_records",
        title="CIFAR-10 in seconds on a GPU",
        how="`recipes/configs/cifar10_94.yaml --compile --capture`, a process a seed, and airbench's script, all seeds "
        "in one process. Compilation counts for the time from the start alone.",
        tables={PART: [row(name, done) for name, done in runs.items()]},
        goals=["At most its training time for its accuracy less 0.1, and a quarter of it from the start."],
        started=started,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--airbench", type=Path, help="airbench94_muon.py, as fetched; None: ours alone")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--dataset", default="cifar10", help="as of recipes/cifar.py")
    parser.add_argument("--cache-dir", type=Path, default=Path("~/.cache/accel_trainer").expanduser())
    parser.add_argument("--config", type=Path, help="another recipe, such as one that a CPU can run")
    options = parser.parse_args()
    if options.config is None and not torch.cuda.is_available():
        print("no GPU: not measured")
        return
    images = load_images(options.dataset, cache_dir=options.cache_dir)  # decoded before any clock runs
    started = results.environment()
    before = results.measured_before("gpu_records", now=started).get(PART, [])
    runs: dict[str, list[results.Row]] = {part["training"]: part["samples"] for part in before}
    if options.airbench is not None and THEIRS not in runs:
        runs[THEIRS] = run_airbench(options.airbench, images, options.seeds)
        write(runs, started)
    for seed in range(len(runs.get(OURS, [])), options.seeds):
        done = run_ours(options.config or CONFIG, options.dataset, options.cache_dir, seed)
        runs.setdefault(OURS, []).append(done)
        write(runs, started)


if __name__ == "__main__":
    main()

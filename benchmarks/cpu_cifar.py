"""Accuracy against wall time on a CPU: our recipe, and the same net, data and schedule in a plain
accelerate script.

Runs two full trainings per seed, a few minutes each. `--max-steps 3` is a quick test that writes no
result.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from . import recipe, results

CONFIG = results.ROOT / "recipes" / "configs" / "cifar10_cpu.yaml"


def run_ours(dataset: str, cache_dir: Path, seed: int, max_steps: int | None) -> results.Row:
    flags = [] if max_steps is None else ["--max-steps", str(max_steps)]
    record = recipe.train(CONFIG, dataset=dataset, cache_dir=cache_dir, seed=seed, flags=flags)
    return {"accuracy": record["metrics"]["eval/accuracy"], "wall_s": record["process_s"]}


def run_plain(dataset: str, cache_dir: Path, seed: int, max_steps: int | None) -> results.Row:
    command = [
        sys.executable,
        "-m",
        "benchmarks.cpu_cifar",
        "--plain",
        "--dataset",
        dataset,
        "--seed",
        str(seed),
    ]
    command += ["--cache-dir", str(cache_dir)] + (
        [] if max_steps is None else ["--max-steps", str(max_steps)]
    )
    start = time.perf_counter()
    run = subprocess.run(command, cwd=results.ROOT, check=True, capture_output=True, text=True)
    accuracy = json.loads(run.stdout.splitlines()[-1])["accuracy"]
    return {"accuracy": accuracy, "wall_s": time.perf_counter() - start}


def train_plain(dataset: str, cache_dir: Path, seed: int, max_steps: int | None) -> float:
    """Train as in an accelerate tutorial: a DataLoader over decoded images, transforms per batch,
    no toolkit."""
    import torch
    import yaml
    from accelerate import Accelerator
    from accelerate.utils import set_seed
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, TensorDataset

    from accel_trainer.vision import ModelConfig, build_model, load_images

    config = yaml.safe_load(CONFIG.read_text())
    set_seed(seed)
    accelerator = Accelerator(cpu=True, mixed_precision=config["runtime"]["mixed_precision"])
    images = load_images(dataset, cache_dir=cache_dir)
    mean = torch.tensor(images.normalization.mean)[:, None, None]
    std = torch.tensor(images.normalization.std)[:, None, None]
    padding, batch_size = (
        config["augment"]["crop_padding"],
        config["batch"]["per_device_batch_size"],
    )

    def augment(pixels: torch.Tensor) -> torch.Tensor:
        size = pixels.shape[-1]
        padded = F.pad((pixels.float() / 255 - mean) / std, (padding,) * 4, mode="reflect")
        crops = []
        for image in padded:
            row, column, flip = (
                int(torch.randint(high, ())) for high in (2 * padding + 1, 2 * padding + 1, 2)
            )
            crop = image[:, row : row + size, column : column + size]
            crops.append(crop.flip(-1) if flip else crop)
        return torch.stack(crops).contiguous(memory_format=torch.channels_last)

    model = build_model(
        ModelConfig(**config["model"]), in_channels=3, num_classes=images.num_classes
    )
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in its stubs
    settings = config["optimizer"]
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=settings["learning_rate"],
        momentum=settings.get("momentum", 0.9),
        nesterov=True,
        weight_decay=settings["weight_decay"],
    )
    loader = DataLoader(
        TensorDataset(images.train.images, images.train.labels), batch_size, shuffle=True
    )
    num_steps = config["trainer"]["num_epochs"] * len(loader)
    peak_step: float = config["schedule"]["peak_fraction"] * num_steps

    def triangle(step: int) -> float:
        return (
            (step + 1) / peak_step
            if step < peak_step
            else (num_steps - step) / (num_steps - peak_step)
        )

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, triangle)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    step = 0
    for _ in range(config["trainer"]["num_epochs"]):
        model.train()
        for pixels, labels in loader:
            logits = model(augment(pixels))
            loss = F.cross_entropy(
                logits, labels, label_smoothing=config["task"]["label_smoothing"]
            )
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            step += 1
            if step == max_steps:
                break
        accuracy = evaluate_plain(model, images.test, mean, std)
        if step == max_steps:
            break
    return accuracy


def evaluate_plain(model: Any, split: Any, mean: Any, std: Any) -> float:
    import torch

    model.eval()
    hits = 0
    with torch.inference_mode():
        for start in range(0, len(split), 500):
            pixels = (split.images[start : start + 500].float() / 255 - mean) / std
            hits += int((model(pixels).argmax(1) == split.labels[start : start + 500]).sum())
    return hits / len(split)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset", default="cifar10", help="as of recipes/cifar.py")
    parser.add_argument(
        "--cache-dir", type=Path, default=Path("~/.cache/accel_trainer").expanduser()
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--max-steps", type=int)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    where = (options.dataset, options.cache_dir)
    if options.plain:
        print(json.dumps({"accuracy": train_plain(*where, options.seed, options.max_steps)}))
        return
    from accel_trainer.vision import load_images

    load_images(options.dataset, cache_dir=options.cache_dir)  # decoded once, before any clock runs
    started = results.environment()
    ways = {"our recipe": run_ours, "plain accelerate script": run_plain}
    rounds = [
        {name: run(*where, seed, options.max_steps) for name, run in ways.items()}
        for seed in range(options.seeds)
    ]
    rows = []
    for name in ways:
        accuracies = [row[name]["accuracy"] for row in rounds]
        walls = [row[name]["wall_s"] for row in rounds]
        rows.append(
            {
                "training": name,
                "accuracy %": f"{100 * statistics.mean(accuracies):.2f}",
                "+-": f"{100 * statistics.pstdev(accuracies):.2f}",
                "wall s": statistics.median(walls),
                "of plain": statistics.median(
                    row[name]["wall_s"] / row["plain accelerate script"]["wall_s"] for row in rounds
                ),
                "n": len(rounds),
                "samples": list(zip(accuracies, walls, strict=True)),
            }
        )
    if options.max_steps is not None:
        print(json.dumps(rows))
        return
    results.write(
        "cpu_cifar",
        title="CIFAR-10 on a CPU",
        how="`recipes/configs/cifar10_cpu.yaml`, and a script with the same network, optimizer, "
        "schedule and augmentation. From the start of Python to its end, including "
        "evaluations and, for ours, checkpoints; the data is decoded beforehand.",
        tables={"Full trainings, alternating, one seed after the other": rows},
        started=started,
    )


if __name__ == "__main__":
    main()

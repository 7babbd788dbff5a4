"""A net trained on five classes of CIFAR-10, fine-tuned to the other five with 50 images a class,
in several ways.

About 25 minutes of one core. `--max-steps 1` is a quick test that writes no result.
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

import numpy as np
import torch
from torch import Tensor

from accel_trainer.vision import load_images

from . import results
from .input_pipeline import write_parquet

CONFIG = results.ROOT / "recipes" / "configs" / "cifar10_cpu.yaml"
PRETRAINING = ["--epochs", "4", "--batch-size", "128", "--lr", "0.3"]
FINE_TUNING = ["--epochs", "40", "--batch-size", "50", "--evaluate-every", "40epochs"]
NUM_A_CLASS = 50
WAYS = {
    "frozen: only the head is trained": ["--freeze", "blocks"],
    "layer decay of 0.5 a block": ["--optimizer.layer-decay", "0.5"],
    "whole": [],
    "from scratch": None,
}
LEARNING_RATES = ("0.02", "0.1", "0.5")


def write_splits(folder: Path, images: dict[str, tuple[Tensor, Tensor]]) -> Path:
    """Write images uint8 [N, 3, 32, 32] and labels [N] of `train` and `test` as parquet."""
    folder.mkdir()
    for split, (pixels, labels) in images.items():
        write_parquet(
            folder / f"{split}.parquet", pixels.permute(0, 2, 3, 1).numpy(), labels.tolist()
        )
    return folder


class Data:
    """CIFAR-10, cut into datasets of five classes each."""

    def __init__(self, dataset: str, cache_dir: Path, folder: Path) -> None:
        images = load_images(dataset, cache_dir=cache_dir)
        self._folder, self._train, self._test = folder, images.train, images.test

    def pretraining(self) -> Path:
        """All images of the first five classes."""
        splits = {}
        for name, split in (("train", self._train), ("test", self._test)):
            is_in = split.labels < 5
            splits[name] = split.images[is_in], split.labels[is_in]
        return write_splits(self._folder / "pretraining", splits)

    def few(self, seed: int) -> Path:
        """50 training images of each of the other five classes, and all their test images."""
        chosen, _ = self._draw(seed)
        is_in = self._test.labels >= 5
        test = self._test.images[is_in], self._test.labels[is_in] - 5
        return write_splits(
            self._folder / f"few-{seed}", {"train": self._rows(chosen), "test": test}
        )

    def few_to_choose(self, seed: int) -> Path:
        """The same, with 200 more training images of each class instead of the test images."""
        chosen, others = self._draw(seed)
        splits = {"train": self._rows(chosen), "test": self._rows(others)}
        return write_splits(self._folder / f"choice-{seed}", splits)

    def _draw(self, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        rows = [(self._train.labels == label).nonzero().flatten() for label in range(5, 10)]
        rows = [of_class[torch.randperm(len(of_class), generator=generator)] for of_class in rows]
        return (
            torch.cat([of_class[:NUM_A_CLASS] for of_class in rows]),
            torch.cat([of_class[NUM_A_CLASS : 5 * NUM_A_CLASS] for of_class in rows]),
        )

    def _rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return self._train.images[rows], self._train.labels[rows] - 5


def train(dataset: Path, run: Path, flags: Sequence[str]) -> float:
    """Return the accuracy at the end of a run of the recipe."""
    command = [
        sys.executable,
        "recipes/cifar.py",
        "--config",
        str(CONFIG),
        "--dataset",
        str(dataset),
    ]
    command += ["--output-dir", str(run), "--cache-dir", str(run.parent / "cache"), *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(
        command, cwd=results.ROOT, check=True, stdout=subprocess.DEVNULL, env=environment
    )
    print(".", end="", flush=True)
    return float(json.loads((run / "result.json").read_text())["metrics"]["eval/accuracy"])


def fine_tune(way: str, dataset: Path, run: Path, net: Path, flags: Sequence[str]) -> float:
    own = WAYS[way]
    start = [] if own is None else ["--init-from", str(net), "--init-skip", r"head\..*", *own]
    return train(dataset, run, [*FINE_TUNING, *start, *flags])


def measure(
    folder: Path, data: Data, num_seeds: int, flags: Sequence[str]
) -> tuple[list[results.Row], ...]:
    """Return the rows of the pretrained nets, of the choice of the learning rates, and of the
    ways."""
    nets, pretrained = [], []
    pretraining = data.pretraining()
    for seed in range(num_seeds):
        run = folder / f"net-{seed}"
        pretrained.append(train(pretraining, run, [*PRETRAINING, "--seed", str(seed), *flags]))
        nets.append(run / "export" / "model.safetensors")
    to_choose = data.few_to_choose(num_seeds)  # images of no other seed
    choice: list[results.Row] = []
    for way in WAYS:
        accuracies = []
        for rate in LEARNING_RATES:
            run = folder / f"choice-{len(choice)}-{rate}"
            options = ["--lr", rate, "--seed", str(num_seeds), *flags]
            accuracies.append(fine_tune(way, to_choose, run, nets[0], options))
        named = {
            f"lr {rate}: accuracy %": 100 * value
            for rate, value in zip(LEARNING_RATES, accuracies, strict=True)
        }
        chosen = LEARNING_RATES[int(np.argmax(accuracies))]
        choice.append({"way": way, **named, "chosen": chosen})
    sets = [data.few(seed) for seed in range(num_seeds)]
    rows = []
    for place, way in enumerate(WAYS):
        accuracies = []
        for seed in range(num_seeds):
            options = ["--lr", choice[place]["chosen"], "--seed", str(seed), *flags]
            accuracies.append(
                fine_tune(way, sets[seed], folder / f"way-{place}-{seed}", nets[seed], options)
            )
        rows.append(accuracy_row({"way": way, "lr": choice[place]["chosen"]}, accuracies))
    return (
        [accuracy_row({"net": "the five classes that it was trained on"}, pretrained)],
        choice,
        rows,
    )


def accuracy_row(start: results.Row, accuracies: Sequence[float]) -> results.Row:
    """Return a mean and standard deviation in percent."""
    percent = [round(100 * accuracy, 2) for accuracy in accuracies]
    deviation = f"{statistics.stdev(percent):.2f}" if len(percent) > 1 else None
    return {
        **start,
        "accuracy %": f"{statistics.mean(percent):.2f}",
        "+-": deviation,
        "n": len(percent),
    } | {"samples": percent}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset", default="cifar10", help="as of recipes/cifar.py")
    parser.add_argument(
        "--cache-dir", type=Path, default=Path("~/.cache/accel_trainer").expanduser()
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--max-steps", type=int)
    options = parser.parse_args()
    started = results.environment()
    flags = [] if options.max_steps is None else ["--max-steps", str(options.max_steps)]
    with tempfile.TemporaryDirectory() as scratch:
        data = Data(options.dataset, options.cache_dir, Path(scratch))
        pretrained, choice, rows = measure(Path(scratch), data, options.seeds, flags)
    print()
    by_way = [float(row["accuracy %"]) for row in rows]
    results.write(
        "fine_tuning",
        title="Fine-tuning on five other classes",
        how="`recipes/cifar.py` with the net of `recipes/configs/cifar10_cpu.yaml`, trained for "
        "4 epochs on the 25,000 images of five classes of CIFAR-10; then `--init-from` that "
        f"net, with a new head, on {NUM_A_CLASS} images of each of the other five classes "
        "(other images for each seed), for 40 epochs. Accuracy at the end, on all 5,000 test "
        "images of the classes; mean and standard deviation.",
        tables={
            "Fine-tuned on 250 images": rows,
            "The learning rate of each way, chosen by other images: 50 a class to train, 200 to "
            "compare": choice,
            "The pretrained nets": pretrained,
        },
        goals=[f"Better than from scratch: {max(by_way) - by_way[-1]:+.1f} points."],
        started=started,
        is_kept=options.max_steps is None,
    )


if __name__ == "__main__":
    main()

"""Photos without a setting: those that the rules of the recipe choose, against fixed ones.

Five classes of CIFAR-10 and, with `--photos FOLDER`, a folder of photos: 10, 50 and 500 photos of a
class, as far as there are so many, from scratch and from weights of the other five classes of
CIFAR-10.

About an hour of one core. Another start with the same `--folder` continues. `--max-steps 1` is a
quick test that writes no result.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import math
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from accel_trainer import main as main_of_recipe
from recipes import images

from . import results

NET = ["--model", "resnet18", "--model.width", "16", "--image-size", "96"]
PRETRAINING = ["--epochs", "4", "--batch-size", "128", "--lr", "0.1"]
PRETRAINING += ["--schedule.warmup-epochs", "0.5", "--optimizer.weight-decay", "0.0005"]
FIXED = ["--epochs", "10", "--lr", "0.1", "--schedule.warmup-epochs", "0"]
FIXED += ["--optimizer.weight-decay", "0.0005"]
FIXED_BATCH = 128
"""With `FIXED`, what the recipe had for all photos before it had rules. A batch that is larger than
the data is refused, so that it is the whole data there."""
FEW_EPOCHS = ["--epochs", "5"]
"""Of the largest datasets, both ways, for runs of a minute or two."""
STARTS = ("from scratch", "from weights")
WAYS = ("fixed", "rules")
A_CLASS = (10, 50, 500)
NUM_TEST = 200  # of a class, and at most a fifth of it
SHORT_SIDE = 128
EXPLODED = 10.0
"""A loss above it, or one that is not finite, is an explosion: guessing has the logarithm of the
number of classes, which is 2.5 for 12."""


class Data:
    """Photos with labels, of which small datasets are drawn."""

    def __init__(self, name: str, photos: Any, folder: Path) -> None:
        self.name, self._photos, self._folder = name, photos, folder
        self._labels = np.array(photos["label"])
        counts = np.bincount(self._labels)
        self.num_classes, self.largest_class = len(counts), max(counts)

    def draw(self, a_class: int, seed: int) -> Path:
        """Write `train` and `test` as parquet: at most `a_class` photos of each class to train on.

        Seeds have other photos.
        """
        folder = self._folder / f"{self.name}-{a_class}-{seed}".replace(" ", "-")
        if not folder.exists():
            random = np.random.default_rng(seed)
            rows: dict[str, list[int]] = {"train": [], "test": []}
            for label in np.unique(self._labels):
                of_class = random.permutation(np.flatnonzero(self._labels == label))
                num_test = min(NUM_TEST, max(2, len(of_class) // 5))
                rows["test"] += of_class[:num_test].tolist()
                rows["train"] += of_class[num_test : num_test + a_class].tolist()
            for split, chosen in rows.items():
                folder.mkdir(exist_ok=True)
                self._photos.select(chosen).to_parquet(str(folder / f"{split}.parquet"))
        return folder


def read_cifar(source: str, cache: Path) -> Any:
    """Return the training images of CIFAR-10, in a folder of parquet or on the hub."""
    import datasets

    if Path(source).is_dir():
        file = str(Path(source, "train.parquet"))
        return datasets.load_dataset("parquet", data_files=file, cache_dir=str(cache))["train"]
    return datasets.load_dataset(source, cache_dir=str(cache))["train"]


def classes_of(photos: Any, classes: Sequence[int]) -> Any:
    """Return the photos of some classes, which are numbered from 0."""
    import datasets

    labels = np.array(photos["label"])
    rows = np.flatnonzero(np.isin(labels, classes))
    numbers = [list(classes).index(label) for label in labels[rows]]
    chosen = photos.select(rows).remove_columns("label").add_column("label", numbers)
    return chosen.cast_column("label", datasets.ClassLabel(num_classes=len(classes)))


def read_photos(folder: Path) -> Any:
    """Return the photos of a folder with a subfolder per class, with 128 pixels on a side."""
    import datasets
    from PIL import Image, ImageOps

    folders = sorted(path for path in (folder / "train").iterdir() if path.is_dir())
    columns: dict[str, list[Any]] = {"img": [], "label": []}
    for label, path in enumerate(folders):
        for file in sorted(path.iterdir()):
            photo = ImageOps.exif_transpose(Image.open(file)).convert("RGBA")
            photo = Image.alpha_composite(Image.new("RGBA", photo.size, "white"), photo)
            scale = SHORT_SIDE / min(photo.size)
            size = [max(1, round(scale * side)) for side in photo.size]
            buffer = io.BytesIO()
            photo.convert("RGB").resize(size).save(buffer, "JPEG", quality=92)
            columns["img"].append({"bytes": buffer.getvalue(), "path": None})
            columns["label"].append(label)
    names = [path.name for path in folders]
    features = {"img": datasets.Image(), "label": datasets.ClassLabel(names=names)}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


def train(dataset: Path, run: Path, flags: Sequence[str]) -> results.Row:
    """Return the accuracy in percent and the loss at the end of a run of the recipe, and the
    largest loss of its training rows; None: it ended with an error.

    Each run has a process of its own, forked from one that has only imported the recipe.
    """
    command = [*NET, "--dataset", str(dataset), "--output-dir", str(run), *flags]
    command += ["--cache-dir", str(run.parent / "cache"), "--runtime.num-threads", "1", "--quiet"]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([images.__name__])
    start = time.perf_counter()
    process = context.Process(
        target=run_recipe, args=([*command, "--evaluate-every", "1000000epochs"],)
    )
    process.start()
    process.join()
    print(".", end="", flush=True)
    seconds = round(time.perf_counter() - start, 1)
    row: results.Row = {"seconds": seconds, "accuracy": None, "loss": None, "largest": None}
    if process.exitcode:
        return row
    metrics = json.loads((run / "result.json").read_text())["metrics"]
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return row | {
        "accuracy": round(100 * metrics["eval/accuracy"], 1),
        "loss": metrics["eval/loss"],
        "largest": max(line["train/loss"] for line in lines if "train/loss" in line),
    }


def run_recipe(words: Sequence[str]) -> None:
    main_of_recipe(images.train, images.Config, argv=words)


def measure(
    folder: Path, sets: Sequence[Data], weights: Path, num_seeds: int, flags: Sequence[str]
) -> list[results.Row]:
    """Return a row for each run. Those that are in `rows.jsonl` are not measured again."""
    path = folder / "rows.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    keys = ("data", "a class", "start", "way", "seed")
    known = {tuple(row[key] for key in keys) for row in rows}
    for seed, data, a_class, start, way in itertools.product(
        range(num_seeds), sets, A_CLASS, STARTS, WAYS
    ):
        key = (data.name, a_class, start, way, seed)
        if key in known or a_class > 2 * data.largest_class:  # of which 50 are nearly all
            continue
        dataset = data.draw(a_class, seed)
        num_photos = count_rows(dataset / "train.parquet")
        own = ["--seed", str(seed), *flags]
        if a_class == max(A_CLASS) and data.num_classes * a_class <= num_photos:
            own += FEW_EPOCHS
        if way == "fixed":
            own = [*FIXED, "--batch-size", str(min(FIXED_BATCH, num_photos)), *own]
        if start == "from weights":
            own += ["--init-from", str(weights), "--init-skip", "^fc"]
        run = folder / "-".join(map(str, key)).replace(" ", "-")
        row = {**dict(zip(keys, key, strict=True)), "photos": num_photos}
        row |= train(dataset, run, own)
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        rows.append(row)
    return rows


def count_rows(path: Path) -> int:
    import pyarrow.parquet

    return int(pyarrow.parquet.read_metadata(path).num_rows)


def is_exploded(row: results.Row) -> bool:
    losses = [row["loss"], row["largest"]]
    return any(loss is None or not math.isfinite(loss) or loss > EXPLODED for loss in losses)


def summarize(rows: Sequence[results.Row]) -> list[results.Row]:
    """Return a row for each cell: both ways side by side."""
    cells: dict[tuple[Any, ...], dict[str, list[results.Row]]] = {}
    for row in rows:
        cell = cells.setdefault((row["data"], row["a class"], row["start"]), {})
        cell.setdefault(row["way"], []).append(row)
    table = []
    for (data, a_class, start), by_way in cells.items():
        own: results.Row = {"data": data, "photos of a class, at most": a_class, "start": start}
        own["photos"] = by_way[WAYS[0]][0]["photos"]
        for way, runs in by_way.items():
            accuracies = [run["accuracy"] for run in runs if run["accuracy"] is not None]
            spread = f" +- {statistics.stdev(accuracies):.1f}" if len(accuracies) > 1 else ""
            mean = f"{statistics.mean(accuracies):.1f}" if accuracies else "-"
            own[f"{way}: accuracy %"] = f"{mean}{spread}"
            own[f"{way}: exploded"] = f"{sum(map(is_exploded, runs))} of {len(runs)}"
        own["samples"] = {
            way: [[run[key] for key in ("accuracy", "loss", "seconds")] for run in runs]
            for way, runs in by_way.items()
        }
        table.append(own)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--cifar", "--dataset", default="uoft-cs/cifar10", help="or a folder of parquet"
    )
    parser.add_argument("--photos", type=Path, help="a folder with train/CLASS/PHOTO")
    parser.add_argument("--folder", type=Path, help="for the runs, which another start continues")
    parser.add_argument("--cache-dir", type=Path, help="of datasets; default: in the folder")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--max-steps", type=int)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    started = results.environment()
    flags = [] if options.max_steps is None else ["--max-steps", str(options.max_steps)]
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.folder or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        cifar = read_cifar(options.cifar, options.cache_dir or folder / "cache")
        others = Data("other CIFAR-10", classes_of(cifar, range(5)), folder)
        sets = [Data("CIFAR-10", classes_of(cifar, range(5, 10)), folder)]
        if options.photos is not None:
            sets.append(Data("photos", read_photos(options.photos), folder))
        weights = folder / "weights"
        if not (weights / "export").exists():
            train(others.draw(10**6, 0), weights, [*PRETRAINING, *flags])
        rows = measure(folder, sets, weights / "export" / "model.safetensors", options.seeds, flags)
    print()
    results.write(
        "defaults",
        title="Settings chosen from the photos",
        how="`recipes/images.py` with a resnet18 of width 16 at 96 pixels. *Fixed* is what it had "
        "before it had rules: batches of 128 or all photos, 10 epochs, learning rate 0.1, no "
        "warmup. *Rules* is without a setting. (Both have 5 epochs of 2,500 photos.) The weights "
        "are of 4 epochs on the images of the other five classes of CIFAR-10. Accuracy at the end "
        "on other photos, mean and standard deviation of the seeds, each of which has other photos "
        "to train on and to test.",
        tables={"Accuracy": summarize(rows)},
        started=started,
        is_kept=options.max_steps is None,
        command="benchmarks.defaults --cifar FOLDER --photos FOLDER",
    )


if __name__ == "__main__":
    main()

"""The head of a frozen network: on features that are computed once, and on photos in each epoch."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import save_file

from accel_trainer.vision import ModelConfig, build_model, load_photos

from . import results
from .plan import write_photos


def timed(recipe: str, flags: Sequence[str], *, folder: Path) -> float:
    """Return the seconds of a new run of a recipe, from the start of Python to its end."""
    with tempfile.TemporaryDirectory() as run:
        command = [sys.executable, f"recipes/{recipe}.py", *flags, "--quiet"]
        command += ["--output-dir", run, "--cache-dir", str(folder / "cache")]
        start_s = time.perf_counter()
        subprocess.run(command, cwd=results.ROOT, check=True)
        return time.perf_counter() - start_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset", help="a folder of photos; cuts of two by default")
    parser.add_argument("--val-fraction", default="0.2")
    parser.add_argument("--size", default="224")
    parser.add_argument("--epochs", default="30")
    options = parser.parse_args()
    started = results.environment()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if options.dataset is None:
            write_photos(folder / "photos")
        dataset = options.dataset or str(folder / "photos")
        photos = load_photos(
            dataset, val_fraction=float(options.val_fraction), cache_dir=folder / "cache"
        )
        shape = {
            "in_channels": 3,
            "num_classes": photos.num_classes,
            "image_size": 2 * (int(options.size),),
        }
        model = build_model(ModelConfig(name="resnet18"), **shape)  # type: ignore[arg-type]
        trunk = str(folder / "trunk.safetensors")
        save_file(model.state_dict(), trunk)
        flags = ["--dataset", dataset, "--val-fraction", options.val_fraction]
        flags += ["--model", "resnet18", "--photos.image-size", options.size]
        once = ["--trunk", trunk, "--epochs", options.epochs]
        rows = [
            {"run": name, "s": timed(recipe, [*flags, *more], folder=folder)}
            for name, recipe, more in (
                (f"features.py, {options.epochs} epochs", "features", once),
                ("the same again, with the features of the cache", "features", once),
                (
                    "images.py with a frozen trunk, 1 epoch",
                    "images",
                    ["--freeze", "^(?!fc)", "--init-from", trunk, "--epochs", "1"],
                ),
            )
        ]
    num_photos = len(photos.train.labels) + len(photos.val.labels)
    results.write(
        "features",
        title="Features that are computed once",
        how=f"A resnet18 of random weights, which take as long as others, on {num_photos} photos "
        f"of {photos.num_classes} classes at {options.size} pixels. Each in a new process, with "
        "the evaluation and the export.",
        tables={"Seconds of a run": rows},
        started=started,
    )


if __name__ == "__main__":
    main()

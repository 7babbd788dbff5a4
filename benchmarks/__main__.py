"""Run all benchmarks, or the ones given: `python -m benchmarks [--shortest | --record] [NAME ...]`.

Each has its own `--help`. Results are written to `.benchmarks`. With `--record` they replace the
ones that are committed, and the tables of the documentation. With `--shortest`, each only shows
that it runs, with its smallest sizes, and nothing is written.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from . import summary
from .input_pipeline import write_noise
from .results import COMMITTED, write_readme

NAMES = (
    "overhead",
    "own_loop",
    "digests",
    "input_pipeline",
    "photos",
    "evaluation",
    "checkpointing",
    "sharded",
    "startup",
    "plan",
    "features",
    "scaling",
    "traffic",
    "cpu_cifar",
    "fine_tuning",
    "imbalance",
    "defaults",
    "padded_lm",
    "comparisons",
    "gpu",
)
ON_IMAGES = ("cpu_cifar", "fine_tuning", "imbalance", "defaults")
OURS = ("ours, all on", "ours, the others' optimizer")
SHORTEST = {
    "overhead": [
        "--loops",
        "raw",
        *OURS,
        "--repeats",
        "1",
        "--steps",
        "8",
        "--resnet-repeats",
        "0",
    ],
    "own_loop": ["--repeats", "1", "--steps", "16"],
    "digests": ["--repeats", "1", "--nets", "tiny", "resnet20"],
    "input_pipeline": ["--images", "1024", "--repeats", "1", "--workers", "0"],
    "photos": ["--repeats", "1", "--batches", "2", "--records", "2000"],
    "evaluation": ["--repeats", "1"],
    "checkpointing": ["--repeats", "2"],
    "sharded": ["--repeats", "2", "--rounds", "1"],
    "startup": ["--repeats", "1"],
    "plan": ["--cases", "1", "--seconds", "0", "--flags", "--max-steps", "8"],
    "features": ["--size", "32", "--epochs", "1"],
    "cpu_cifar": ["--seeds", "1", "--max-steps", "1"],
    "fine_tuning": ["--seeds", "1", "--max-steps", "1"],
    "imbalance": ["--seeds", "1", "--max-steps", "1"],
    "defaults": ["--seeds", "1", "--max-steps", "1"],
    "padded_lm": [
        "--seeds",
        "1",
        "--ways",
        "ours: the task returns num_items",
        "--layouts",
        "1 x 8",
    ],
    "comparisons": ["--pairs", "2"],
    "scaling": ["--repeats", "1", "--steps", "2"],
    "traffic": [],
    "gpu": ["--tiny"],
}


def main() -> None:
    names = [word for word in sys.argv[1:] if word not in ("--shortest", "--record")]
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        sys.exit(f"no benchmark {unknown[0]!r}: name some of {', '.join(NAMES)}")
    if "--shortest" in sys.argv:
        with tempfile.TemporaryDirectory() as folder:
            run_shortest(names or NAMES, Path(folder))
        return
    is_recorded = "--record" in sys.argv
    places = {"BENCHMARKS_FOLDER": str(COMMITTED)} if is_recorded else {}
    for name in names or NAMES:
        print(f"{name}", flush=True)
        command = [sys.executable, "-m", f"benchmarks.{name}"]
        subprocess.run(command, check=True, env=os.environ | places)
    if is_recorded:
        write_readme(COMMITTED)
        summary.write()


def run_shortest(names: Sequence[str], folder: Path) -> None:
    """Run benchmarks with their smallest sizes, on noise in place of CIFAR-10."""
    write_noise(folder, num_train=2600)
    for name in names:
        print(f"{name}", flush=True)
        options = list(SHORTEST[name])
        if name in (*ON_IMAGES, "gpu"):
            options += ["--cache-dir", str(folder / "cache")]
        if name in ON_IMAGES:
            options += ["--dataset", str(folder)]
        subprocess.run(
            [sys.executable, "-m", f"benchmarks.{name}", *options],
            check=True,
            env={**os.environ, "BENCHMARKS_FOLDER": str(folder)},
        )


if __name__ == "__main__":
    main()

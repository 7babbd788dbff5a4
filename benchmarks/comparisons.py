"""What `accel-trainer compare` finds for three changes of a small network, and how precisely."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import results

RECIPE = Path(__file__).with_name("small_digits.py")
FLAGS = ["--epochs", "4", "--lr", "0.02", "--schedule.shape", "triangular", "--batch-size", "64"]
FLAGS += ["--augment.crop-padding", "1", "--augment.flip", "none"]
CHANGES = ("--augment.crop-padding 0", "--lr 0.1", "--ema 0.9")


def compare(folder: Path, num_pairs: int, question: Sequence[str]) -> dict[str, Any]:
    """Return the JSON of `accel-trainer compare`; its runs are kept in `folder`."""
    command = [sys.executable, "-m", "accel_trainer", "compare", str(RECIPE), *FLAGS, *question]
    command += ["--pairs", str(num_pairs), "--output-dir", str(folder), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode not in (0, 10, 11):  # better, worse, undecided
        sys.exit(done.returncode)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def row_of(change: str, found: dict[str, Any]) -> results.Row:
    """Return a row of the table: what was found with how many pairs."""
    rho, runs = found["rho"], found["whole_runs_needed"]
    return {
        "B": f"`{change}`",
        "n": found["num_pairs"],
        "verdict": found["verdict"],
        "gain in points": _with_interval(found["gain"], found["interval"], 100),
        "rho": None if rho is None else _with_interval(rho, found["rho_interval"], 1),
        "variance ratio": None if runs is None else runs / (2 * found["num_pairs"]),
        "independent runs for the same precision": None if runs is None else round(runs),
    }


def _with_interval(value: float, interval: Sequence[float] | None, factor: int) -> str:
    shown = f"{factor * value:.2f}"
    if interval is None:
        return shown
    low, high = interval
    return f"{shown} ({factor * low:.2f} to {factor * high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=20)
    options = parser.parse_args()
    started = results.environment()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = {
            change: compare(folder, options.pairs, ["--b", change, "--at", "75%"])
            for change in CHANGES
        }
    at, length = (found[CHANGES[0]][name] for name in ("at_step", "num_steps"))
    results.write(
        "comparisons",
        title="Comparisons of two settings",
        how=f"`accel-trainer compare benchmarks/small_digits.py`, on the digits of scikit-learn, "
        f"with a change from step {at} of {length}. In brackets: 95 % intervals.",
        tables={"B against A": [row_of(change, each) for change, each in found.items()]},
        started=started,
    )


if __name__ == "__main__":
    main()

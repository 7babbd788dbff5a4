"""What `accel-trainer compare` prints for a small network on digits, with a change.

python -m benchmarks.compare_example > benchmarks/results/compare_example.txt
"""

from __future__ import annotations

import subprocess
import sys
import tempfile

from . import results
from .comparisons import RECIPE

FLAGS = ["--epochs", "8", "--lr", "0.05", "--schedule.shape", "triangular", "--batch-size", "64"]
FLAGS += ["--augment.crop-padding", "2", "--augment.flip", "none"]
QUESTION = ["--b", "--augment.crop-padding 0", "--at", "75%", "--pairs", "8"]


def main() -> None:
    """Print what the machine is, and then the output."""
    where = results.environment()
    print(f"{where['cpu']}, {where['cores']} cores, {where['versions']}, commit {where['commit']}")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "accel_trainer", "compare", str(RECIPE), *FLAGS, *QUESTION]
        command += ["--output-dir", folder]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(f"\n{' '.join([*FLAGS, *QUESTION])}\n\n{done.stdout}", end="")
    if done.returncode not in (0, 10, 11):  # better, worse, undecided
        sys.exit(done.returncode)


if __name__ == "__main__":
    main()

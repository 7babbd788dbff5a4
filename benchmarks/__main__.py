"""Run all benchmarks, or the ones given: `python -m benchmarks [NAME ...]`.

Each has its own `--help`.
"""

from __future__ import annotations

import subprocess
import sys

from . import summary
from .results import write_readme

NAMES = (
    "overhead",
    "digests",
    "input_pipeline",
    "photos",
    "evaluation",
    "checkpointing",
    "sharded",
    "startup",
    "scaling",
    "traffic",
    "cpu_cifar",
    "fine_tuning",
    "imbalance",
    "padded_lm",
    "gpu",
)


def main() -> None:
    unknown = [name for name in sys.argv[1:] if name not in NAMES]
    if unknown:
        sys.exit(f"no benchmark {unknown[0]!r}: name some of {', '.join(NAMES)}")
    for name in sys.argv[1:] or NAMES:
        print(f"{name}", flush=True)
        subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=True)
    write_readme()
    summary.write()


if __name__ == "__main__":
    main()

"""Starts the recipe in a new process, as users do."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from . import results


def train(
    config: Path,
    *,
    dataset: str,
    cache_dir: Path,
    seed: int,
    flags: Sequence[str] = (),
    num_processes: int = 1,
) -> results.Row:
    """Return `result.json`, plus `process_s`, the time from the start of Python to its end."""
    launcher = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(num_processes),
    ]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *(launcher if num_processes > 1 else [])]
        command += ["recipes/cifar.py", "--config", str(config), "--dataset", dataset]
        command += [
            "--seed",
            str(seed),
            "--output-dir",
            folder,
            "--cache-dir",
            str(cache_dir),
            *flags,
        ]
        start = time.perf_counter()
        subprocess.run(command, cwd=results.ROOT, check=True, stdout=subprocess.DEVNULL)
        process_s = time.perf_counter() - start
        record: results.Row = json.loads((Path(folder) / "result.json").read_text())
    return record | {"process_s": process_s}

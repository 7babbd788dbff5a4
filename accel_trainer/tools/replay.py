"""`accel-trainer replay RUN --step N`: take a step again, elsewhere, and tell which samples made it NaN or inf."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..checkpoint_files import list_checkpoints
from ..errors import OutputError
from ..run_folder import prepare_directory


def main(argv: Sequence[str] | None = None) -> int:
    """Replay from the newest checkpoint before the step, in a temporary folder; return what the recipe returned.

    The same checkpoint, data and number of processes come to the same bits, and `--on-nonfinite skip`
    to the same weights: so it is the same step that is taken again.
    """
    parser = argparse.ArgumentParser(prog="accel-trainer replay", description=__doc__)
    parser.add_argument("run", type=Path, help="the run folder")
    parser.add_argument("--step", type=int, required=True, help="the optimizer step; the first is 1")
    options = parser.parse_args(argv)
    run = options.run.resolve()
    try:
        environment = json.loads((run / "environment.json").read_bytes())
        command, num_processes = environment["command"], environment["hardware"]["num_processes"]
    except (OSError, ValueError, KeyError) as error:
        raise OutputError(
            "REPLAY", f"{run} does not say what started it ({error!r}): check the path"
        ) from None
    with tempfile.TemporaryDirectory(prefix="replay-") as temporary:
        folder = prepare_directory(Path(temporary) / "run")
        arguments = [*command["arguments"], *_flags(run, options.step, folder)]
        done = subprocess.run(
            [sys.executable, *_launcher(num_processes), *arguments],
            cwd=command["directory"], env=os.environ | _settings(environment),
            stdout=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        record = folder / f"nonfinite-step-{options.step:010d}.json"
        if record.exists():
            _show(json.loads(record.read_bytes()))
            return 0
    print(f"step {options.step} has a finite gradient" if done.returncode == 0 else "the replay failed")
    return done.returncode


def _flags(run: Path, step: int, folder: Path) -> list[str]:
    """Return what makes the run's own command take its steps up to `step` again, in `folder`."""
    before = [path for path in list_checkpoints(run / "checkpoints") if int(path.name.split("-")[1]) < step]
    flags = ["--output-dir", str(folder), "--max-steps", str(step), "--on-nonfinite", "skip"]
    return [*flags, "--resume", str(before[-1]) if before else "never"]


def _launcher(num_processes: int) -> list[str]:
    if num_processes == 1:
        return []
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes)]


def _settings(environment: dict[str, Any]) -> dict[str, str]:
    """Return what accelerate's launcher told the processes."""
    settings = {"ACCELERATE_MIXED_PRECISION": environment["mixed_precision"]}
    return settings | ({"ACCELERATE_USE_CPU": "true"} if environment["hardware"]["device"] == "cpu" else {})


def _show(record: dict[str, Any]) -> None:
    position = record["position"]
    print(
        f"step {record['optimizer_step']} (epoch {position['epoch'] + 1}, its step {position['step_in_epoch'] + 1}, "
        f"seed {record['seed']}): loss {record['loss']}"
    )
    for batch in record["micro_batches"]:
        where = f"process {batch['process']}, micro-batch {batch['micro_batch']}"
        print(f"  {where}: loss sum {batch['loss_sum']} over {len(batch['sample_ids'])} samples")
    print(f"sample ids with a loss that is NaN or inf: {record['nonfinite_sample_ids'] or 'none alone'}")

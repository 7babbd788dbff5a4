"""`accel-trainer replay RUN --step N`: repeat a step; name the samples with a NaN or inf loss."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...checkpoint.format import list_checkpoints, step_of
from ...checkpoint.serialization import read_json_object
from ...core.run_dir import prepare_directory
from ..common.output import show, tell
from ..common.parser import CommandParser
from ..common.processes import forward_signals, start_recipe
from .recorded_start import recorded_flags, recorded_recipe, recorded_start
from .run_reader import read_run

_EXAMPLE = "example: accel-trainer replay runs/diverged --step 1234"


def main(argv: Sequence[str] | None = None) -> int:
    """Replay from the newest checkpoint before the step, in a temporary folder.

    The same checkpoint, data and number of processes give the same bits, and `--on-nonfinite skip`
    does not change the weights, so exactly the same step is repeated.

    Returns 0 if the step was repeated and is not finite, else the recipe's exit code.
    """
    parser = CommandParser(prog="accel-trainer replay", description=__doc__, epilog=_EXAMPLE)
    parser.add_argument("run", type=Path, help="the run folder")
    parser.add_argument(
        "--step", type=int, required=True, help="the optimizer step; the first is 1"
    )
    parser.add_argument(
        "--recipe",
        type=Path,
        metavar="FILE",
        help="the recipe to run; default: the recorded one, if it is below the current folder",
    )
    options = parser.parse_args(argv)
    run = read_run(options.run)
    recipe = recorded_recipe(run, options.recipe)
    flags = recorded_flags(run)
    start = recorded_start(run)
    show(f"repeating step {options.step} with {recipe}")
    sys.stdout.flush()
    with tempfile.TemporaryDirectory(prefix="replay-") as temporary:
        folder = prepare_directory(Path(temporary) / "run")
        command = [str(recipe), *flags, *_flags(run.folder.resolve(), options.step, folder)]
        with (
            forward_signals(),
            start_recipe(command, **start, output=subprocess.DEVNULL) as process,
        ):
            code = process.wait()
        record = folder / f"nonfinite-step-{options.step:010d}.json"
        if record.exists():
            _show(read_json_object(record))
            return 0
    tell(f"step {options.step} has a finite gradient" if code == 0 else "the replay failed")
    return code


def _flags(run: Path, step: int, folder: Path) -> list[str]:
    """Return the flags that make the run's command repeat its steps up to `step`, in `folder`."""
    before = [path for path in list_checkpoints(run / "checkpoints") if step_of(path) < step]
    flags = ["--output-dir", str(folder), "--max-steps", str(step), "--on-nonfinite", "skip"]
    if not before:
        return [*flags, "--resume", "never"]
    # The checkpoint has the weights, also those that the run was initialised from.
    return [*flags, "--resume", str(before[-1]), "--init-from", "None", "--init-skip", "None"]


def _show(record: dict[str, Any]) -> None:
    position = record["position"]
    epoch = position["epoch"] + 1
    step_in_epoch = position["step_in_epoch"] + 1
    tell(
        f"step {record['optimizer_step']} (epoch {epoch}, its step {step_in_epoch}): "
        f"loss sum {record['loss_sum']}"
    )
    sample_ids = record["nonfinite_sample_ids"] or "no single one"
    tell(f"sample ids with a loss that is NaN or inf: {sample_ids}")

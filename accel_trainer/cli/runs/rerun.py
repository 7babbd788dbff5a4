"""`accel-trainer rerun RUN`: repeat a run and compare the final weights, bit for bit.

example: accel-trainer rerun runs/first --output-dir runs/first-again
"""

# A start is made of the same pieces as in `Replay`. But a rerun is the whole run, and shows the
# recipe's own output and exit code; a replay is silent, and ends after a chosen step.

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ...core.errors import CheckpointError, ExitCode
from ..common.output import say, tell
from ..common.parser import CommandParser
from ..common.processes import forward_signals, start_recipe
from ..recipe.start import SHOWN_BY_COMMAND
from .changes import compare_runs
from .checkpoints import checkpoints_in
from .difference import Difference
from .recorded_start import is_own_loop, own_start, recorded_starts
from .rows import Rows, at_both, by_place, read_rows
from .run_reader import RunReader, read_run

_DIFFERENT = 1
_POLL_S = 0.2
_LOSS = "train/loss"


def main(argv: Sequence[str]) -> int:
    """Start the run's recipe with its `config.yaml`.

    Returns 0 if the final weights have the same hash, else 1, or the exit code of a rerun that
    failed.
    """
    parser = CommandParser(__doc__)
    parser.add_run()
    parser.add_argument(
        "--output-dir", type=Path, help="the folder of the new run; default: RUN-rerun"
    )
    parser.add_recipe_option()
    options = parser.parse_args(argv)
    run = read_run(options.run)
    folder = Path(os.path.realpath(options.output_dir or _free_folder(options.run)))
    final = _final_weights(run)  # before any work: this fails if the run has no checkpoint
    if is_own_loop(run):
        start = own_start(run, folder)
    else:
        (start,) = recorded_starts([run], [options.recipe])
        start = replace(start, flags=[*start.flags, *_flags(run, folder, final[0])])
    start = replace(start, variables={**start.variables, SHOWN_BY_COMMAND: "1"})
    say(f"training {run.name} again in {folder}, with {start.recipe}")
    tell(f"note: running {start.recipe}", file=sys.stderr)
    with forward_signals(), start_recipe(start) as process:
        _warn_as_it_starts(run, folder, process)
        code = process.wait()
    if code:
        tell(f"the rerun ended with exit code {code}: nothing can be compared", file=sys.stderr)
        return code if code > 0 else 128 - code  # as a shell tells of a signal
    again = read_run(folder)
    _warn(run, again, "data")
    return _compare_weights(run, final, again)


def _free_folder(run: Path) -> Path:
    """Return `RUN-rerun`, or `RUN-rerun-N` with the first free number if it exists."""
    first = run.resolve().with_name(f"{run.resolve().name}-rerun")
    others = (first.with_name(f"{first.name}-{number}") for number in itertools.count(2))
    return next(each for each in itertools.chain([first], others) if not each.exists())


def _flags(run: RunReader, folder: Path, step: int) -> list[str]:
    """Return the flags for the same start, up to the same step."""
    flags = {"--output-dir": folder, "--resume": run.began_from}
    if run.result.get("state") != "done":  # stopped by time or signal
        flags["--max-steps"] = step
    return [str(word) for flag in flags.items() for word in flag]


def _final_weights(run: RunReader) -> tuple[int, dict[str, str]]:
    """Return the step of the newest checkpoint, and the SHA-256 of its weights and its EMA."""
    checkpoints = checkpoints_in(run.folder)
    if not checkpoints:
        raise CheckpointError(
            "RERUN", f"{run.folder} has no checkpoint to compare with: finish it first"
        )
    files = checkpoints[-1].read_manifest()["files"]
    hashes = {
        name: file["sha256"] for name, file in files.items() if name.startswith(("model", "ema"))
    }
    return checkpoints[-1].step, hashes


def _warn_as_it_starts(run: RunReader, folder: Path, process: subprocess.Popen[bytes]) -> None:
    """Report differences between the environments as soon as the rerun has recorded its own."""
    recorded = folder / "environment.json"
    while process.poll() is None and not recorded.exists():
        time.sleep(_POLL_S)  # the rerun has no way to signal that the file is there
    if recorded.exists():
        _warn(run, read_run(folder), "environment")


def _warn(run: RunReader, again: RunReader, group: str) -> None:
    for name, old, new in compare_runs(run, again)[group]:
        tell(f"warning: differs from the run: {name} {old} -> {new}", file=sys.stderr)


def _compare_weights(run: RunReader, final: tuple[int, dict[str, str]], again: RunReader) -> int:
    """Print whether the final weights are the same, and return the exit code."""
    step, expected = final
    last, found = _final_weights(again)
    if step != last:
        tell(f"DIFFERENT: the run ended after step {step}, the rerun after step {last}")
        return _DIFFERENT
    changed = [name for name in expected if expected[name] != found.get(name)]
    for name in changed:
        hashes = f"{expected[name][:16]} -> {found.get(name, '')[:16]}"
        where = _first_difference(run, again)
        tell(f"DIFFERENT: {name} after step {step}: SHA-256 {hashes}{where}")
    operations = again.result.get("nondeterministic_operations", [])
    if changed and operations:
        fact = "the same bits cannot be expected: without a deterministic kernel there"
        tell(f"{fact}: {', '.join(operations)}")
    if not changed:
        hashes = ", ".join(f"{name} {sha256[:16]}" for name, sha256 in expected.items())
        tell(f"equal: the same weights after step {step}, SHA-256 of {hashes}")
    return _DIFFERENT if changed else ExitCode.DONE


def _first_difference(run: RunReader, again: RunReader) -> str:
    """Return where the logged losses first differ, as text; empty if they do not."""
    found = Difference.of(*at_both(*(_losses(each.folder) for each in (run, again))))
    if found is None:
        return ""
    losses = "{!r} -> {!r}".format(*found.values(_LOSS))
    return f"; the loss differs at or before step {found.step}: {losses}"


def _losses(folder: Path) -> Rows:
    rows = by_place(read_rows(folder))
    return {place: {_LOSS: row[_LOSS]} for place, row in rows.items() if _LOSS in row}

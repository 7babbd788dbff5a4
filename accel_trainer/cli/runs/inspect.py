"""`accel-trainer inspect RUN_OR_CHECKPOINT`: list the checkpoints, any damage, and which one a resume would use.

Reads only. The exit code is 74 if there is no valid checkpoint to resume from, else 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from ...checkpoint.retention import best_name
from ...core.errors import CheckpointError, ExitCode
from ...core.filesystem import TEMPORARY_NAME
from ..parser import CommandParser
from .checkpoint_report import CheckpointReport, inspect_checkpoint, inspect_checkpoints
from .run_reader import reading
from .tables import format_table, show

_TENSOR = re.compile(r"[a-z]+\d* \[[\d, ]*\]")
_POSITION = ("optimizer_step", "epoch", "step_in_epoch", "samples_seen")

_EXAMPLE = "example: accel-trainer inspect runs/first"


def main(argv: Sequence[str] | None = None) -> int:
    """Describe the run or checkpoint at a path; return the exit code."""
    parser = CommandParser(prog="accel-trainer inspect", description=__doc__, epilog=_EXAMPLE)
    parser.add_argument("path", type=Path, help="a run folder, or one of its checkpoints")
    parser.add_argument("--full", action="store_true", help="list every tensor and value of a run's checkpoint")
    options = parser.parse_args(argv)
    path = options.path.resolve()
    with reading(path):
        return _inspect(path, is_full=options.full)


def _inspect(path: Path, *, is_full: bool) -> int:
    if (path / "checkpoints").is_dir():
        return _inspect_run(path, is_full=is_full)
    if not (path / "manifest.json").exists() and not (path / "COMMIT").exists():
        raise CheckpointError("CKPT_NOT_FOUND", f"{path} is neither a run nor a checkpoint: check the path")
    report = inspect_checkpoint(path)
    show("\n".join(_describe_checkpoint(report, is_full=True)))
    return ExitCode.DONE if report.problem is None else ExitCode.CHECKPOINT


def _inspect_run(run: Path, *, is_full: bool) -> int:
    directory = run / "checkpoints"
    reports, usable = inspect_checkpoints(directory)
    best = best_name(directory)
    rows = []
    for report in reports:
        marks = [mark for mark, name in (("best", best), ("resumes here", usable)) if name == report.name]
        state = "whole" if report.problem is None else "DAMAGED"
        rows.append([report.name, state, f"{report.num_bytes:,}", ", ".join(marks)])
    show(f"run {run}")
    print(format_table(["checkpoint", "state", "bytes", ""], rows))
    for report in reports:
        if report.problem is not None:
            show(f"damaged: {report.problem}")
    known = {report.name for report in reports}
    for other in sorted(path.name for path in directory.iterdir() if path.is_dir() and path.name not in known):
        kind = "left by a killed save, deleted at the next start" if TEMPORARY_NAME.fullmatch(other) else "set aside"
        show(f"not used: {other} ({kind})")
    if usable is None:
        show("there is no valid checkpoint to resume from" if reports else "there is no checkpoint yet")
        return ExitCode.CHECKPOINT
    show(f"a resume would use {usable}\n")
    chosen = next(report for report in reports if report.name == usable)
    show("\n".join(_describe_checkpoint(chosen, is_full=is_full)))
    return ExitCode.DONE


def _describe_checkpoint(report: CheckpointReport, *, is_full: bool) -> Iterable[str]:
    manifest = report.manifest
    yield f"checkpoint {report.name}: {'whole' if report.problem is None else f'DAMAGED: {report.problem}'}"
    if manifest:
        yield "position: " + ", ".join(f"{name.replace('_', ' ')} {manifest[name]:,}" for name in _POSITION)
    for name, value in manifest.items():
        if name not in ("files", *_POSITION):
            text = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
            yield f"{name}: {text}"
    rows = [[f.name, f"{f.num_bytes:,}", f.sha256[:16], f.problem or "whole"] for f in report.files]
    yield "\n" + format_table(["file", "bytes", "sha256", "state"], rows)
    for piece, contents in report.contents.items():
        tensors = [text for text in contents.values() if _TENSOR.fullmatch(text)]
        yield f"\n{piece}: {len(tensors)} tensors, {len(contents) - len(tensors)} values"
        if is_full:
            width = max(map(len, contents), default=0)
            yield from (f"  {path:<{width}}  {text}" for path, text in contents.items())
    if report.contents and not is_full:
        yield "\n--full lists every tensor and value."

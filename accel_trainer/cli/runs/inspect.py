"""`accel-trainer inspect RUN_OR_CHECKPOINT`: list and verify the checkpoints of a run.

It also shows which checkpoint a resume would use. Nothing is written. The exit code is 74 if there
is no valid checkpoint to resume from, else 0: a resume skips a damaged one, and so does this. That
of a single checkpoint is 74 if it is damaged.

example: accel-trainer inspect runs/first
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...checkpoint.format import decode_files, list_checkpoints, read_listed_file, read_manifest
from ...checkpoint.retention import best_name
from ...checkpoint.sharded import read_slices
from ...core.errors import CheckpointError, ExitCode
from ...core.filesystem import TEMPORARY_NAME
from ..common.output import format_table, show, tell
from ..common.parser import CommandParser
from .run_reader import is_run, reading

_POSITION = ("optimizer_step", "epoch", "step_in_epoch", "samples_seen")


@dataclass(frozen=True)
class CheckpointReport:
    """A checkpoint and its first problem (None: it is complete).

    `manifest` is empty if it is unreadable. `problems` has the problem of each file, None for a
    file with the recorded hash.
    """

    name: str
    problem: str | None
    manifest: Mapping[str, Any]
    problems: Mapping[str, str | None]

    @property
    def num_bytes(self) -> int:
        """Total size of the files."""
        return sum(self.manifest["files"][name]["bytes"] for name in self.problems)


def main(argv: Sequence[str]) -> int:
    """Describe the run or checkpoint at a path; return the exit code."""
    parser = CommandParser(__doc__)
    parser.add_argument("path", type=Path, help="a run folder, or one of its checkpoints")
    path = Path(os.path.realpath(parser.parse_args(argv).path))
    with reading(path):
        if (path / "checkpoints").is_dir():
            return _show_run(path)
        if is_run(path):
            raise CheckpointError("CKPT_NOT_FOUND", f"{path} has no checkpoints: start it again")
        if not (path / "manifest.json").exists() and not (path / "COMMIT").exists():
            raise CheckpointError(
                "CKPT_NOT_FOUND", f"{path} is neither a run nor a checkpoint: check the path"
            )
        report = inspect_checkpoint(path)
        show("\n".join(_describe(report)))
        return ExitCode.DONE if report.problem is None else ExitCode.CHECKPOINT


def inspect_checkpoints(directory: Path) -> tuple[list[CheckpointReport], str | None]:
    """Return a report per checkpoint, in order, and the name of the one that a resume would use."""
    reports = [inspect_checkpoint(path) for path in list_checkpoints(directory)]
    complete = [report.name for report in reports if report.problem is None]
    return reports, complete[-1] if complete else None


def inspect_checkpoint(path: Path) -> CheckpointReport:
    """Return what is in the checkpoint at `path`, after reading all of it."""
    problems: dict[str, str | None] = {}
    manifest: dict[str, Any] = {}
    try:
        files, manifest = read_manifest(path)
        for name, entry in manifest["files"].items():
            problems[name] = None
            try:
                files[name] = read_listed_file(path / name, entry)
                if "header_bytes" in entry:
                    for stored in read_slices(path / name, files[name]):
                        stored.read()
            except CheckpointError as error:
                problems[name] = error.message
        problem = next(filter(None, problems.values()), None)
        if problem is None:
            decode_files(files, path)
    except CheckpointError as error:
        problem = error.message
    return CheckpointReport(path.name, problem, manifest, problems)


def _show_run(run: Path) -> int:
    directory = run / "checkpoints"
    reports, usable = inspect_checkpoints(directory)
    best = best_name(directory)
    rows = []
    for report in reports:
        marks = [
            mark for mark, name in (("best", best), ("resumes here", usable)) if name == report.name
        ]
        state = "complete" if report.problem is None else "DAMAGED"
        rows.append([report.name, state, f"{report.num_bytes:,}", ", ".join(marks)])
    show(f"run {run}")
    tell(format_table(["checkpoint", "state", "bytes", ""], rows))
    for report in reports:
        if report.problem is not None:
            show(f"damaged: {report.problem}")
    known = {report.name for report in reports}
    for name in sorted(path.name for path in directory.iterdir() if path.is_dir()):
        if name not in known:
            kind = (
                "left by a killed save, deleted at the next start"
                if TEMPORARY_NAME.fullmatch(name)
                else "set aside"
            )
            show(f"not used: {name} ({kind})")
    if not reports:
        show("there is no checkpoint yet")
        return ExitCode.CHECKPOINT
    if usable is None:
        show("there is no valid checkpoint to resume from")
        return ExitCode.CHECKPOINT
    show(f"a resume would use {usable}\n")
    (chosen,) = (report for report in reports if report.name == usable)
    show("\n".join(_describe(chosen)))
    return ExitCode.DONE


def _describe(report: CheckpointReport) -> Iterator[str]:
    """Yield lines about a checkpoint and its files."""
    manifest = report.manifest
    state = "complete" if report.problem is None else f"DAMAGED: {report.problem}"
    yield f"checkpoint {report.name}: {state}"
    if manifest:
        yield "position: " + ", ".join(
            f"{name.replace('_', ' ')} {manifest[name]:,}" for name in _POSITION
        )
    for name, value in manifest.items():
        if name in ("files", *_POSITION) or value in ("", [], {}):
            continue
        if name == "settings" and isinstance(value, dict):
            yield f"{name}:"
            yield from (f"  {key}: {entry}" for key, entry in value.items())
            continue
        if name == "metadata":
            value = json.dumps(value, ensure_ascii=False)
        elif isinstance(value, dict):
            value = ", ".join(f"{key} {entry}" for key, entry in value.items())
        yield f"{name}: {value}"
    rows = []
    for name, problem in report.problems.items():
        file = manifest["files"][name]
        rows.append([name, f"{file['bytes']:,}", file["sha256"][:16], problem or "ok"])
    yield "\n" + format_table(["file", "bytes", "sha256", "state"], rows)

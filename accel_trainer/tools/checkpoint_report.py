"""What lies in checkpoints, whole or damaged, told for people. Reads only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ..checkpoint_files import decode_files, list_checkpoints, read_listed_file, read_manifest
from ..encoding import encode
from ..errors import CheckpointError


@dataclass(frozen=True)
class FileReport:
    """A file as the manifest lists it; `problem` says what is wrong with it, if anything."""

    name: str
    num_bytes: int
    sha256: str
    problem: str | None


@dataclass(frozen=True)
class CheckpointReport:
    """A checkpoint; `tensors` holds per piece and key the shape and dtype, and is empty if it is damaged."""

    name: str
    problem: str | None
    files: tuple[FileReport, ...]
    tensors: Mapping[str, Mapping[str, str]]


def inspect_checkpoint(path: Path) -> CheckpointReport:
    """Return what is in the checkpoint at `path` and what is wrong with it."""
    reports: list[FileReport] = []
    try:
        files, manifest = read_manifest(path)
        for name, entry in manifest["files"].items():
            problem = None
            try:
                files[name] = read_listed_file(path / name, entry)
            except CheckpointError as error:
                problem = error.args[0]
            reports.append(FileReport(name, entry["bytes"], entry["sha256"], problem))
        problem = next((report.problem for report in reports if report.problem is not None), None)
        pieces = decode_files(files).pieces if problem is None else {}
    except CheckpointError as error:
        problem, pieces = error.args[0], {}
    tensors = {
        piece: {key: _describe(tensor) for key, tensor in encode(value, name=piece).tensors.items()}
        for piece, value in pieces.items()
    }
    return CheckpointReport(path.name, problem, tuple(reports), tensors)


def inspect_checkpoints(directory: Path) -> tuple[list[CheckpointReport], str | None]:
    """Return a report for each checkpoint in order, and the name of the one that a run would resume from."""
    reports = [inspect_checkpoint(path) for path in list_checkpoints(directory)]
    return reports, next((report.name for report in reversed(reports) if report.problem is None), None)


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"

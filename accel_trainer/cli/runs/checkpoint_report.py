"""Describes the contents of checkpoints, valid or damaged. Reads only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ...checkpoint.format import decode_files, list_checkpoints, read_listed_file, read_manifest
from ...checkpoint.sharded import StoredTensor, read_slices
from ...core.errors import CheckpointError

_MAX_VALUE_LENGTH = 60
_STRUCTURE = (dict, list, Tensor, StoredTensor)


@dataclass(frozen=True)
class FileReport:
    """A file as listed in the manifest; `problem` is None if it is intact."""

    name: str
    num_bytes: int
    sha256: str
    problem: str | None


@dataclass(frozen=True)
class CheckpointReport:
    """A checkpoint. `manifest` is empty if it is unreadable; `contents` is empty if anything is damaged.

    `contents` maps each piece and path (`state[0].momentum_buffer`) to a tensor's dtype and shape, or to a value.
    """

    name: str
    problem: str | None
    manifest: Mapping[str, Any]
    files: tuple[FileReport, ...]
    contents: Mapping[str, Mapping[str, str]]

    @property
    def num_bytes(self) -> int:
        """Total size of the listed files."""
        return sum(file.num_bytes for file in self.files)


def inspect_checkpoint(path: Path) -> CheckpointReport:
    """Return the contents of the checkpoint at `path` and the first problem."""
    reports: list[FileReport] = []
    manifest: dict[str, Any] = {}
    try:
        files, manifest = read_manifest(path)
        for name, entry in manifest["files"].items():
            problem = None
            try:
                files[name] = read_listed_file(path / name, entry)
                if "header_bytes" in entry:
                    for stored in read_slices(path / name, files[name]):
                        stored.read()
            except CheckpointError as error:
                problem = error.args[0]
            reports.append(FileReport(name, entry["bytes"], entry["sha256"], problem))
        problem = next((report.problem for report in reports if report.problem is not None), None)
        pieces = decode_files(files, path).pieces if problem is None else {}
    except CheckpointError as error:
        problem, pieces = error.args[0], {}
    contents = {piece: dict(_describe(value, "")) for piece, value in pieces.items()}
    return CheckpointReport(path.name, problem, manifest, tuple(reports), contents)


def inspect_checkpoints(directory: Path) -> tuple[list[CheckpointReport], str | None]:
    """Return a report per checkpoint, in order, and the name of the one that a resume would use."""
    reports = [inspect_checkpoint(path) for path in list_checkpoints(directory)]
    return reports, next((report.name for report in reversed(reports) if report.problem is None), None)


def _describe(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield the path and a short description of each tensor and plain value in `value`."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            name = key if isinstance(key, str) else f"[{key!r}]"
            yield from _describe(item, f"{path}.{name}" if path and isinstance(key, str) else f"{path}{name}")
    elif isinstance(value, list) and any(isinstance(item, _STRUCTURE) for item in value):
        for index, item in enumerate(value):
            yield from _describe(item, f"{path}[{index}]")
    elif isinstance(value, Tensor | StoredTensor):
        yield path, f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    else:
        text = repr(value)
        yield path, text if len(text) <= _MAX_VALUE_LENGTH else f"{text[: _MAX_VALUE_LENGTH - 3]}..."

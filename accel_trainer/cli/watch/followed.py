"""Reads runs again when their files change."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ...callbacks.evaluation_file import EVALUATION_FILE
from ...core.errors import ConfigError, OutputError
from ...core.filesystem import stamp_of
from ...vision.mistakes import MISTAKES_FILE
from ..report.by_itself import Fault, fault_of
from ..runs.run_reader import MetricsReader, RunReader, is_run, read_run
from ..runs.runs import run_folders
from ..runs.status import read_status

# What a page shows of a run; `checkpoints` changes when one is added or removed.
_SHOWN = (
    "config.yaml",
    "environment.json",
    "metrics.jsonl",
    "attempts.jsonl",
    "result.json",
    EVALUATION_FILE,
    MISTAKES_FILE,
    "checkpoints",
)


class Followed:
    """The runs in some folders, of which each is a run or a folder of runs.

    Runs may appear and end. Of a file of rows only the new ones are read.

    Raises:
        ConfigError: one of `folders` is no folder.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        for folder in folders:
            if not folder.is_dir():
                raise ConfigError("WATCH", f"{folder} is not a folder: check the path")
        self._folders = folders
        self._marks: dict[Path, object] = {}
        self._runs: dict[Path, RunReader] = {}
        self._metrics: dict[Path, MetricsReader] = {}
        self.faults: list[Fault] = []

    def look(self) -> bool:
        """Return whether something has changed since the last look."""
        marks = {place: _mark(place) for folder in self._folders for place in run_folders(folder)}
        has_changed = marks != self._marks
        for place in self._marks:
            if marks.get(place) != self._marks[place]:
                self._runs.pop(place, None)
        self._marks = marks
        return has_changed

    def read(self) -> list[RunReader]:
        """Return the runs of the last look; without folders that are no runs (yet).

        What cannot be read is in `faults`.
        """
        self.faults = []
        for place in self._marks:
            if place not in self._runs:
                metrics = self._metrics.setdefault(place, MetricsReader(place / "metrics.jsonl"))
                try:
                    self._runs[place] = read_run(place, metrics)
                except OutputError as error:
                    if is_run(place):
                        self.faults.append(fault_of(place, error))
        return [self._runs[place] for place in self._marks if place in self._runs]


def _mark(run: Path) -> object:
    """Return what changes if the page of a run does: its state, and files by size and time."""
    try:
        state = read_status(run)["state"]
    except (OSError, ValueError):
        state = None
    return state, [_stat(run / name) for name in _SHOWN]


def _stat(path: Path) -> tuple[int, ...] | None:
    try:
        return stamp_of(os.lstat(path))
    except OSError:
        return None

"""Copies `metrics.jsonl` into trackers, through accelerate's adapters."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, filter_trackers
from accelerate.utils import patch_environment

from ..core import filesystem
from ..core.config import flatten_config
from ..core.errors import ConfigError
from ..core.history import read_history
from ..core.json_files import read_json_object, write_json
from ..core.logger import logger
from ..training.callback import Callback, RunResult, TrainerView
from .metrics_file import Row

_WANDB_SETTINGS = {"console": "off", "silent": True}
_PLAIN = (bool, int, float, str)  # the types of hyperparameters that every tracker accepts
# Some trackers read their settings from the environment: these defaults keep them in their folder
# and quiet.
_VARIABLES = {
    "mlflow": {"MLFLOW_TRACKING_URI": "sqlite:///{}/mlflow.db", "MLFLOW_LOGGING_LEVEL": "WARNING"},
    "trackio": {"TRACKIO_DIR": "{}"},
    "wandb": {"WANDB_MODE": "offline", "WANDB_INIT_TIMEOUT": "60"},  # seconds
}


def check_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError for a tracker that accelerate does not know or whose package is missing."""
    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            known = ", ".join(sorted(map(str, LOGGER_TYPE_TO_CLASS)))
            raise ConfigError(
                "TRACKER", f"--track {name}: accelerate has no such tracker: choose from {known}"
            )
        if not filter_trackers([name], "."):
            raise ConfigError(
                "TRACKER", f"--track {name} needs a package that is missing: pip install {name}"
            )


@dataclass(eq=False)
class Trackers(Callback):
    """Keeps a copy of the history in each named tracker, in `trackers/` in the run folder.

    For the main process.

    Every start makes the copy again from the rows of the history, so that no row is missing or
    repeated; a folder in which somebody has put a file is renamed first. Trackers work offline
    unless their environment variables say otherwise. An id in the run folder lets a resume continue
    an online run of wandb. A tracker that raises an error is ignored until the next start; the run
    continues.
    """

    names: Sequence[str]
    _: KW_ONLY
    run: Path
    config: Mapping[str, Any]

    def __post_init__(self) -> None:
        self._trackers: dict[str, GeneralTracker] = {}
        self._noted: dict[str, list[str]] = {}
        self._variables = ExitStack()

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Start the trackers, and copy the rows that the history has at the checkpoint."""
        filesystem.make_directory(self.run / "trackers")
        for name in self.names:
            folder = self.run / "trackers" / name
            variables = {
                key: os.environ.get(key, default.format(folder))
                for key, default in _VARIABLES.get(name, {}).items()
            }
            self._variables.enter_context(patch_environment(**variables))
            with self._dropped_on_error(name):
                self._trackers[name] = _start(name, self.run, self.config)
        for row in read_history(self.run):
            self._log(row)
        self._note_files()

    def show(self, row: Row) -> None:
        """Log the numbers of a row in every tracker. A sink of `MetricLogger`."""
        self._log(row)
        self._note_files()

    def _log(self, row: Row) -> None:
        values = {
            name: float(value)
            for name, value in row.items()
            if "/" in name and not name.startswith("digest/") and not isinstance(value, dict)
        }
        for name, tracker in list(self._trackers.items()):
            with self._dropped_on_error(name):
                tracker.log(values, step=row["optimizer_step"])

    def on_fit_end(self, trainer: TrainerView, result: RunResult) -> None:
        """Close the trackers."""
        self._close()

    def on_error(self, trainer: TrainerView, error: BaseException) -> None:
        """Close the trackers."""
        self._close()

    def _close(self) -> None:
        for name, tracker in list(self._trackers.items()):
            with self._dropped_on_error(name):
                tracker.finish()
        self._note_files()
        self._variables.close()

    def _note_files(self) -> None:
        """Note which files a tracker has made: the next start may remove these, and no others."""
        for name in [*self._trackers]:
            folder = self.run / "trackers" / name
            found = sorted(filesystem.files_in(folder))
            if found != self._noted.get(name):
                self._noted[name] = found
                with self._dropped_on_error(name):
                    write_json(folder.with_suffix(".json"), {"files": found})

    @contextmanager
    def _dropped_on_error(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._trackers.pop(name, None)
            logger.warning(
                "%s failed (%s: %s) and is ignored until the next start; training continues",
                name,
                type(error).__name__,
                error,
            )


def _start(name: str, run: Path, config: Mapping[str, Any]) -> GeneralTracker:
    """Start a tracker in an empty folder, as run `run.name` of the project `run.parent.name`.

    TensorBoard has no projects, and WANDB_PROJECT may name another one.
    """
    folder = run / "trackers" / name
    adapter = LOGGER_TYPE_TO_CLASS[name]
    if os.path.lexists(folder):
        filesystem.remove_own([folder], _files_of_before)
    filesystem.make_directory(folder)
    options: dict[str, dict[str, Any]] = {
        "tensorboard": {"purge_step": 0},  # an open viewer drops the rows that it had read
        "mlflow": {"run_name": run.name},
        "trackio": {"name": run.name},
        "wandb": {
            "name": run.name,
            "dir": str(folder),
            "settings": _WANDB_SETTINGS,
            "id": _run_id(run),
            "resume": "allow",
        },
    }
    where = [str(folder)] if adapter.requires_logging_directory else []
    projects = {"tensorboard": run.name, "wandb": os.environ.get("WANDB_PROJECT")}
    project = projects.get(name) or run.parent.name
    tracker = adapter(project, *where, **options.get(name, {}))
    tracker.start()
    plain = {
        key: value if isinstance(value, _PLAIN) else str(value)
        for key, value in flatten_config(config)
    }
    tracker.store_init_configuration(plain)
    return tracker


def _files_of_before(folder: Path) -> set[str]:
    """Return the names of the files that the tracker had made in `folder` before this start."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return {*read_json_object(folder.with_suffix(".json"))["files"]}
    return set()


def _run_id(run: Path) -> str:
    """Return the run's id, which is kept in a file: a resume continues the same run of wandb."""
    path = run / "trackers" / "id"
    if not path.exists():
        filesystem.write_file_atomic(path, uuid.uuid4().hex.encode())
    return filesystem.read_file(path, max_bytes=64).decode()

"""Copies of `metrics.jsonl` in trackers, through accelerate's adapters, in a thread: none can stop a run."""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, filter_trackers
from accelerate.utils import patch_environment

from ..core import filesystem
from ..core.callback import Callback, RunResult, TrainerView
from ..core.config import flatten_config
from ..core.errors import ConfigError
from .metrics_file import MetricsFile

_logger = logging.getLogger(__name__)

Row = Mapping[str, Any]

_INIT_TIMEOUT_S = 60
_PLAIN = (bool, int, float, str)  # what every tracker takes as a hyperparameter
# Defaults that keep trackers in their folder and quiet, for those that read them from the environment.
_VARIABLES = {
    "mlflow": {"MLFLOW_TRACKING_URI": "sqlite:///{}/mlflow.db", "MLFLOW_LOGGING_LEVEL": "WARNING"},
    "trackio": {"TRACKIO_DIR": "{}"},
}


def check_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError for a tracker that accelerate does not know or whose package is missing."""
    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            known = ", ".join(sorted(map(str, LOGGER_TYPE_TO_CLASS)))
            raise ConfigError("TRACKER", f"--track {name}: accelerate has no such tracker: choose from {known}")
        if not filter_trackers([name], "."):
            raise ConfigError("TRACKER", f"--track {name} needs a package that is missing: pip install {name}")


class Trackers(Callback):
    """Keeps a copy of the history in each tracker named, below `trackers/` in the run folder. For the main process.

    Every start makes the copy again from the rows that the checkpoint kept, so that each row is there once, with the
    value of the history. Offline, unless the tracker's own environment variables say otherwise; an online run is
    continued by an id that is kept in the run folder.
    """

    def __init__(
        self, names: Sequence[str], *, run: Path, history: MetricsFile, config: Mapping[str, Any], drain_s: float = 30.0
    ) -> None:
        self._names, self._run, self._history, self._config, self._drain_s = names, run, history, config, drain_s
        self._rows: SimpleQueue[Row | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._follow, name="trackers", daemon=True)

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Start the trackers; the history has been cut back to the checkpoint."""
        filesystem.make_directory(self._run / "trackers")
        for row, _ in self._history.read(0):
            self._rows.put(row)
        self._thread.start()

    def show(self, row: Row) -> None:
        """Queue a row for the trackers. A sink of `MetricLogger`."""
        self._rows.put(row)

    def on_fit_end(self, trainer: TrainerView, result: RunResult) -> None:
        """Close the trackers."""
        self._close()

    def on_error(self, trainer: TrainerView, error: BaseException) -> None:
        """Close the trackers."""
        self._close()

    def _close(self) -> None:
        self._rows.put(None)
        if self._thread.is_alive():
            self._thread.join(self._drain_s)
        if self._thread.is_alive():
            names = ", ".join(self._names)
            _logger.warning("%s does not answer, so the last rows may be missing there: metrics.jsonl has all", names)

    def _follow(self) -> None:
        """Log every row in every tracker; drop one that fails until the next start."""
        places = {name: self._run / "trackers" / name for name in self._names}
        wanted = {key: value.format(places[name]) for name in places for key, value in _VARIABLES.get(name, {}).items()}
        with patch_environment(**{key: value for key, value in wanted.items() if key not in os.environ}):
            trackers: dict[str, GeneralTracker] = {}
            for name in self._names:
                with _dropped_on_error(name, trackers):
                    trackers[name] = _start(name, self._run, self._config)
            for row in iter(self._rows.get, None):
                values = {name: float(value) for name, value in row.items() if "/" in name}
                for name in list(trackers):
                    with _dropped_on_error(name, trackers):
                        trackers[name].log(values, step=row["optimizer_step"])
            for name in list(trackers):
                with _dropped_on_error(name, trackers):
                    trackers[name].finish()


@contextmanager
def _dropped_on_error(name: str, trackers: dict[str, GeneralTracker]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        trackers.pop(name, None)
        text = "%s failed (%s: %s) and is ignored until the next start; training continues"
        _logger.warning(text, name, type(error).__name__, error)


def _start(name: str, run: Path, config: Mapping[str, Any]) -> GeneralTracker:
    """Start a tracker in an empty folder, as run `run.name` of the project `run.parent.name`."""
    folder, adapter, id_file = run / "trackers" / name, LOGGER_TYPE_TO_CLASS[name], run / "trackers" / "id"
    if not id_file.exists():
        filesystem.write_file_atomic(id_file, uuid.uuid4().hex.encode())
    if folder.exists():
        filesystem.remove_directories([folder])
    filesystem.make_directory(folder)
    same_run = {"id": filesystem.read_file(id_file, max_bytes=64).decode(), "resume": "allow"}
    mode = os.environ.get("WANDB_MODE", "offline")
    settings = {"console": "off", "silent": True, "init_timeout": _INIT_TIMEOUT_S}
    wandb = {"name": run.name, "dir": str(folder), "mode": mode, "settings": settings}
    options: dict[str, dict[str, Any]] = {
        "tensorboard": {"purge_step": 0},  # a viewer that is open forgets what it had read
        "mlflow": {"run_name": run.name},
        "trackio": {"name": run.name},
        "wandb": {**wandb, **same_run} if mode == "online" else wandb,
        "comet_ml": {"experiment_key": same_run["id"], "mode": "get_or_create"},
        "swanlab": same_run,
    }
    where = [str(folder)] if adapter.requires_logging_directory else []
    tracker = adapter(run.parent.name, *where, **options.get(name, {}))
    tracker.start()
    plain = {key: value if isinstance(value, _PLAIN) else str(value) for key, value in flatten_config(config)}
    tracker.store_init_configuration(plain)
    return tracker

"""Copies of `metrics.jsonl` in trackers, by accelerate's adapters: each in a thread, so that none can stop a run."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, filter_trackers

from .. import storage
from ..config import flatten_config
from ..errors import ConfigError
from ..history import History
from .base import Callback

if TYPE_CHECKING:
    from ..trainer import RunResult, Trainer

_logger = logging.getLogger(__name__)

_MAX_FAILURES = 3
_PLAIN = (bool, int, float, str)  # what every tracker takes as a hyperparameter
# What keeps those trackers in their folder and quiet that read it from the environment, unless it is set.
_ENVIRONMENT = {
    "mlflow": {"MLFLOW_TRACKING_URI": "sqlite:///{}/mlflow.db", "MLFLOW_LOGGING_LEVEL": "WARNING"},
    "trackio": {"TRACKIO_DIR": "{}"},
}


def check_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError for a tracker that accelerate does not know or whose package is missing."""
    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            known = ", ".join(sorted(map(str, LOGGER_TYPE_TO_CLASS)))
            raise ConfigError("TRACKER", f"--track {name}: accelerate knows no such tracker, but {known}")
        if not filter_trackers([name], "."):
            raise ConfigError("TRACKER", f"--track {name} needs a package that is missing: pip install {name}")


class Trackers(Callback):
    """Keeps a copy of the history in each tracker named, below `trackers/` in the run folder.

    A copy is made anew at every start, from the rows that the checkpoint left: so it has each row once,
    with the value of the history, whatever was killed before. Offline, unless the tracker's own
    environment variables say otherwise. `history` is None on processes other than main.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        run: Path,
        history: History | None,
        config: Mapping[str, Any],
        drain_s: float = 30.0,
    ) -> None:
        self._copies = [] if history is None else [_Copy(name, run, history, config) for name in names]
        self._folder, self._drain_s = run / "trackers", drain_s

    def on_fit_start(self, trainer: Trainer) -> None:
        """Start the trackers; the history has been cut back to the checkpoint."""
        if self._copies:
            storage.make_directory(self._folder)
        for copy in self._copies:
            copy.start()

    def show(self, row: Mapping[str, Any]) -> None:
        """Wake the threads: there is a new row. A sink of `MetricsLog`."""
        for copy in self._copies:
            copy.tell(is_last=False)

    def on_fit_end(self, trainer: Trainer, result: RunResult) -> None:
        """Close the trackers."""
        self._close()

    def on_error(self, trainer: Trainer, error: BaseException) -> None:
        """Close the trackers."""
        self._close()

    def _close(self) -> None:
        started = [copy for copy in self._copies if copy.ident is not None]
        for copy in started:
            copy.tell(is_last=True)
        deadline_s = time.monotonic() + self._drain_s
        for copy in started:
            copy.join(max(0.0, deadline_s - time.monotonic()))
            if copy.is_alive():
                _logger.warning("%s does not answer and lacks the last rows: metrics.jsonl has all", copy.name)


class _Copy(threading.Thread):
    """The history in one tracker, kept up to date."""

    def __init__(self, name: str, run: Path, history: History, config: Mapping[str, Any]) -> None:
        super().__init__(name=name, daemon=True)
        self._run, self._history, self._config = run, history, config
        self._has_news, self._is_closing = threading.Event(), False
        self._tracker: GeneralTracker | None = None
        self._position, self._num_failures = 0, 0

    def tell(self, *, is_last: bool) -> None:
        """Say that the history has new rows, or its last ones."""
        self._is_closing = is_last
        self._has_news.set()

    def run(self) -> None:
        """Follow the history to its end."""
        with _local_environment(self.name, self._run / "trackers" / self.name):
            while self._num_failures < _MAX_FAILURES:
                is_last = self._is_closing  # first: what came before it is in the history
                try:
                    tracker = self._catch_up()
                    if is_last:
                        tracker.finish()
                        return
                except Exception as error:
                    self._warn(error)
                if not is_last:
                    self._has_news.wait()
                    self._has_news.clear()

    def _catch_up(self) -> GeneralTracker:
        if self._tracker is None:
            self._tracker = _start(self.name, self._run, self._config)
        for row, end in self._history.read(self._position):
            values = {name: float(value) for name, value in row.items() if "/" in name}
            self._tracker.log(values, step=row["optimizer_step"])
            self._position, self._num_failures = end, 0
        return self._tracker

    def _warn(self, error: Exception) -> None:
        self._num_failures += 1
        if self._num_failures == 1:
            _logger.warning("%s failed (%s: %s); training goes on", self.name, type(error).__name__, error)
        if self._num_failures == _MAX_FAILURES:
            _logger.warning("%s failed again and is left alone from now on", self.name)


@contextmanager
def _local_environment(name: str, folder: Path) -> Iterator[None]:
    wanted = {key: value.format(folder) for key, value in _ENVIRONMENT.get(name, {}).items()}
    added = wanted.keys() - os.environ.keys()
    os.environ.update({key: wanted[key] for key in added})
    try:
        yield
    finally:
        for key in added:
            del os.environ[key]


def _start(name: str, run: Path, config: Mapping[str, Any]) -> GeneralTracker:
    """Start a tracker in an empty folder, as run `run.name` of the project `run.parent.name`."""
    folder, adapter = run / "trackers" / name, LOGGER_TYPE_TO_CLASS[name]
    if folder.exists():
        storage.remove_directories([folder])
    storage.make_directory(folder)
    mode, quiet = os.environ.get("WANDB_MODE", "offline"), {"console": "off", "silent": True}
    options: dict[str, dict[str, Any]] = {
        "tensorboard": {"purge_step": 0},  # a viewer that is open forgets what it had read
        "mlflow": {"run_name": run.name},
        "trackio": {"name": run.name},
        "wandb": {"name": run.name, "dir": str(folder), "mode": mode, "settings": quiet},
    }
    where = [str(folder)] if adapter.requires_logging_directory else []
    tracker = adapter(run.parent.name, *where, **options.get(name, {}))
    tracker.start()
    plain = {key: value if isinstance(value, _PLAIN) else str(value) for key, value in flatten_config(config)}
    tracker.store_init_configuration(plain)
    return tracker

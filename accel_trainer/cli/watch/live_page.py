"""The page of runs as they are now: a report without pictures of its curves, and its version."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial
from importlib import resources
from pathlib import Path

from ..report.by_itself import Fault, draw_soundly
from ..report.charts import group_curves, title_of
from ..report.classes import draw_classes
from ..report.figures import Chart
from ..report.page import report_script, write_page
from ..runs.run_reader import RunReader, Runs
from .followed import Followed

# Between two looks; longer if the page takes long to make, so that most of the time this process
# leaves the machine to the training.
_INTERVAL_S = 1.0
_MAX_INTERVAL_S = 15.0
_REST = 10
_MAX_DRAWN = 3  # with more runs, no classes are drawn: those of 20 take half a minute
_EMPTY = '<svg role="img"></svg>'  # the page's script draws the curves


class LivePage:
    """Looks for changes of the runs, and makes their page, when somebody asks for it."""

    def __init__(self, followed: Followed) -> None:
        self._followed = followed
        self._lock = threading.Lock()
        self._drawn: dict[Path, tuple[RunReader, Sequence[Chart]]] = {}
        self._page = b""
        self._page_version = -1
        self._making_s = 0.0
        self._version = 0
        self._followed.look()
        self._looked_s = time.monotonic()

    def version(self) -> int:
        """Return how often the runs have changed; they are looked at again after a while."""
        with self._lock:
            interval_s = min(max(_INTERVAL_S, _REST * self._making_s), _MAX_INTERVAL_S)
            if time.monotonic() - self._looked_s >= interval_s:
                self._version += self._followed.look()
                self._looked_s = time.monotonic()
            return self._version

    def html(self) -> bytes:
        """Return the newest page. Raises OutputError if the contents of a run are malformed."""
        version = self.version()
        with self._lock:
            if self._page_version != version:
                begun_s = time.monotonic()
                runs = self._followed.read()
                make = partial(self._make, version)
                page, _ = draw_soundly(runs, make, self._followed.faults)
                self._page = page.encode(errors="backslashreplace")
                if self._page_version >= 0:  # the first page also imports
                    self._making_s = time.monotonic() - begun_s
                self._page_version = version
            return self._page

    def _make(self, version: int, runs: Runs, faults: Sequence[Fault]) -> str:
        curves = [Chart(name, title_of(name), _EMPTY, b"") for name in group_curves(runs)]
        script = resources.files(__package__).joinpath("watch.js").read_text(encoding="utf-8")
        return write_page(
            runs,
            curves,
            [self._classes(run) if len(runs) <= _MAX_DRAWN else () for run in runs],
            scripts=[*[report_script()] * bool(curves), script],
            version=version,
            faults=faults,
        )

    def _classes(self, run: RunReader) -> Sequence[Chart]:
        known, charts = self._drawn.get(run.folder, (None, ()))
        if known is None or _drawn_from(known) != _drawn_from(run):
            charts = draw_classes(run)
            self._drawn[run.folder] = run, charts
        return charts


def _drawn_from(run: RunReader) -> object:
    """Return what changes if the classes of a run do."""
    evaluations = run.evaluations()
    return evaluations[-1:], run.state

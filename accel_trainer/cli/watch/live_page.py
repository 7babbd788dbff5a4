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
from ..runs.run_reader import RunReader
from .followed import Followed

# Between two looks; longer if the page takes long to make, so that most of the time this process
# leaves the machine to the training.
_INTERVAL_S = 1.0
_MAX_INTERVAL_S = 15.0
_REST = 10
_MAX_DRAWN = 3  # with more runs, no classes are drawn: those of 20 take half a minute
_EMPTY = '<svg role="img"></svg>'  # the page's script draws the curves


class LivePage:
    """Follows runs in a thread, and makes their page when somebody asks for it."""

    def __init__(self, followed: Followed) -> None:
        self._followed = followed
        self._news = threading.Condition()
        self._making = threading.Lock()
        self._has_ended = threading.Event()
        self._drawn: dict[Path, tuple[RunReader, Sequence[Chart]]] = {}
        self._page = b""
        self._page_version = -1
        self._making_s = 0.0
        self.version = 0
        self._followed.look()

    def follow(self) -> None:
        """Look for changes until `end` is called."""
        while not self._has_ended.wait(
            min(max(_INTERVAL_S, _REST * self._making_s), _MAX_INTERVAL_S)
        ):
            with self._making:
                has_changed = self._followed.look()
            if has_changed:
                with self._news:
                    self.version += 1
                    self._news.notify_all()

    def end(self) -> None:
        """Let `follow` and all that wait return."""
        self._has_ended.set()
        with self._news:
            self._news.notify_all()

    def wait(self, version: int, timeout_s: float) -> int | None:
        """Return a version that is not `version`, or `version` after a while; None at the end."""
        with self._news:
            self._news.wait_for(
                lambda: self.version != version or self._has_ended.is_set(), timeout_s
            )
            return None if self._has_ended.is_set() else self.version

    def html(self) -> bytes:
        """Return the newest page. Raises OutputError if the contents of a run are malformed."""
        with self._making:
            version = self.version
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

    def _make(self, version: int, runs: Sequence[RunReader], faults: Sequence[Fault]) -> str:
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

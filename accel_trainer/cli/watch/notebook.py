"""The live page of runs in a cell of a notebook."""

from __future__ import annotations

import html
import os
from contextlib import ExitStack
from pathlib import Path

from ..report.report import report_needs
from .followed import Followed
from .server import serving


class LiveCell:
    """The page of `accel-trainer watch` in a frame: make it the last line of a cell.

    `folders` are runs, or folders of runs. Threads of this process serve the page until `end` is
    called or the process ends, also while a later cell trains. `height` is in pixels.

    Raises:
        ConfigError: one of `folders` is no folder.
        OutputError: a package of the extra `report` is missing.
    """

    def __init__(self, *folders: str | os.PathLike[str], height: int = 700) -> None:
        followed = Followed([Path(folder) for folder in folders])
        try:
            from .live_page import LivePage
        except ImportError as error:
            raise report_needs(error) from error
        page = LivePage(followed)
        self._serving = ExitStack()
        self.url = self._serving.enter_context(serving(page, "127.0.0.1", 0)).url
        self._height = height

    def _repr_html_(self) -> str:
        source = html.escape(self.url)
        return f'<iframe src="{source}" width="100%" height="{self._height}"></iframe>'

    def end(self) -> None:
        """Stop serving the page."""
        self._serving.close()

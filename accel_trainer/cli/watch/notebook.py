"""The live page of runs in a cell of a notebook."""

from __future__ import annotations

import html
import os
from contextlib import ExitStack
from pathlib import Path

from .followed import Followed
from .live_page import LivePage
from .server import serving


class LiveCell:
    """The page of `accel-trainer watch` in a frame: make it the last line of a cell.

    `folders` are runs, or folders of runs. Threads of this process serve the page until `end` is
    called or the process ends, also while a later cell trains. `height` is in pixels.
    """

    def __init__(self, *folders: str | os.PathLike[str], height: int = 700) -> None:
        page = LivePage(Followed([Path(folder) for folder in folders]))
        self._serving = ExitStack()
        self.url = self._serving.enter_context(serving(page, "127.0.0.1", 0)).url
        self._height = height

    def _repr_html_(self) -> str:
        source = html.escape(self.url)
        return f'<iframe src="{source}" width="100%" height="{self._height}"></iframe>'

    def end(self) -> None:
        """Stop serving the page."""
        self._serving.close()

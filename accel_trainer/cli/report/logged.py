"""The latest pictures that the callbacks of a run have logged.

The rows may come from a stranger: what does not fit the format is left out.
"""

from __future__ import annotations

import base64
import re

from ...core import filesystem
from ..runs.run_reader import RunReader
from .pictures import Picture

_PATH = re.compile(r"pictures/[\w.=-]+\.png", re.ASCII)
_PNG = b"\x89PNG\r\n\x1a\n"
_MAX_BYTES = 2**22  # of a picture
_MAX_SHOWN = 16


def read_pictures(run: RunReader) -> list[Picture]:
    """Return the last logged picture of each name, without those that cannot be read.

    Nothing outside `pictures/` in the run's folder is read, and nothing through a symlink.
    """
    shown: list[Picture] = []
    for name, value in run.logged.items():
        data = _read_png(run, value.get("picture"))
        if data is not None and len(shown) < _MAX_SHOWN:
            source = f"data:image/png;base64,{base64.b64encode(data).decode()}"
            shown.append({"src": source, "label": name})
    return shown


def _read_png(run: RunReader, path: object) -> bytes | None:
    if not isinstance(path, str) or not _PATH.fullmatch(path):
        return None
    if (run.folder / "pictures").is_symlink():
        return None
    try:
        data = filesystem.read_file(run.folder / path, max_bytes=_MAX_BYTES)
    except OSError:
        return None
    return data if data.startswith(_PNG) else None

"""Lists folders that another process may be changing."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path


def files_with_status(path: Path) -> dict[Path, os.stat_result]:
    """Return the files at or below `path`, sorted; what vanishes meanwhile is left out."""
    places = [path, *(Path(place, name) for place, _, names in os.walk(path) for name in names)]
    found = {}
    for each in sorted(places):
        with suppress(OSError):
            status = each.stat()
            if stat.S_ISREG(status.st_mode):
                found[each] = status
    return found

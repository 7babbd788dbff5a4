"""The latest pictures and histograms that the callbacks of a run have logged.

The rows may come from a stranger: what does not fit the format is left out.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ...core import filesystem
from ..runs.run_reader import RunReader
from .figures import LIGHT, Chart, draw_chart
from .pictures import Picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PATH = re.compile(r"pictures/[\w.=-]+\.png", re.ASCII)
_PNG = b"\x89PNG\r\n\x1a\n"
_MAX_BYTES = 2**22  # of a picture
_MAX_SHOWN = 16  # of either kind
_MAX_BINS = 1_000
_MAX_COUNT = 2**63
_SIZE = (4.6, 2.2)  # inches


class Histogram(NamedTuple):
    """How many values lie in each of equally wide bins between `low` and `high`."""

    counts: list[int]
    low: float
    high: float


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


def draw_histograms(run: RunReader) -> list[Chart]:
    """Return a chart of the last logged histogram of each name."""
    found = ((name, _read_histogram(value)) for name, value in run.logged.items())
    valid = [(name, histogram) for name, histogram in found if histogram is not None]
    return [_draw(run, name, histogram) for name, histogram in valid[:_MAX_SHOWN]]


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


def _read_histogram(value: Mapping[str, Any]) -> Histogram | None:
    match value:
        case {"counts": [_, *_] as counts, "low": int() | float(), "high": int() | float()}:
            low, high = value["low"], value["high"]
            are_counts = all(isinstance(count, int) and 0 <= count < _MAX_COUNT for count in counts)
            if are_counts and len(counts) <= _MAX_BINS and -_MAX_COUNT < low < high < _MAX_COUNT:
                return Histogram(counts, float(low), float(high))
    return None


def _draw(run: RunReader, name: str, histogram: Histogram) -> Chart:
    counts, low, high = histogram
    width = (high - low) / len(counts)

    def draw(axes: Axes) -> None:
        places = [low + width * number for number in range(len(counts))]
        axes.bar(places, counts, width=width, align="edge", color=LIGHT.series[0])
        axes.locator_params(nbins=6)

    file_name = re.sub(r"\W+", "_", f"{run.name}-{name}")
    return draw_chart(file_name, title=name, size=_SIZE, draw=draw)

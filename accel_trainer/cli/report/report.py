"""`accel-trainer report RUN [RUN ...]`: write one self-contained HTML page about runs.

Its charts are also written as PNG. The page works offline. Its charts show values on hover, zoom
and smooth; without scripts they are pictures.
"""

from __future__ import annotations

import itertools
import os
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from ...core import filesystem
from ...core.errors import OutputError
from ...core.run_dir import expand_home
from ...vision import ImageDataset, Photos
from ..common.output import tell
from ..common.parser import CommandParser
from ..runs.run_reader import RunReader, read_run, reading
from ..runs.runs import find_runs
from .classes import draw_classes
from .logged import draw_histograms
from .pictures import draw_samples, load_data

_EXAMPLE = "example: accel-trainer report runs --open"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page and its charts and print their paths."""
    parser = CommandParser(prog="accel-trainer report", description=__doc__, epilog=_EXAMPLE)
    parser.add_argument("run", type=Path, nargs="+", help="a run folder, or a folder of runs")
    parser.add_argument("--open", action="store_true", help="open the page in the browser")
    parser.add_argument(
        "--to",
        type=Path,
        default=Path("report.html"),
        help="the file to write; default: report.html",
    )
    parser.add_argument("--dataset", help="dataset to show training images of; default: none")
    parser.add_cache_option()
    options = parser.parse_args(argv)
    path = options.to
    data = None
    charts = path.with_suffix("")
    with reading(*options.run):
        runs = [run for folder in options.run for run in find_runs(folder) or [read_run(folder)]]
        if options.dataset is not None:
            data = load_data(runs[0], options.dataset, cache_dir=expand_home(options.cache_dir))
        page, files = render(runs, data)
    try:
        # JSON and YAML may hold half a character, which no file can.
        filesystem.write_file_atomic(path, page.encode(errors="backslashreplace"))
        filesystem.make_directory(charts)
        for name, png in files.items():
            filesystem.write_file_atomic(charts / name, png)
    except OSError as error:
        raise OutputError(
            "REPORT", f"{path} cannot be written ({error.strerror}): choose another --to"
        ) from error
    tell(f"{path}\n{charts}{os.sep}  {len(files)} charts")
    if options.open and not webbrowser.open(path.resolve().as_uri()):
        tell("no browser was found: open the page yourself")
    return 0


def render(
    runs: Sequence[RunReader], data: ImageDataset | Photos | None = None
) -> tuple[str, dict[str, bytes]]:
    """Return the report as an HTML page, and its charts as PNG by file name.

    It reads nothing but the run folders. With `data`, the dataset of the runs, the page shows some
    training images.
    """
    try:
        from .charts import draw_curves, draw_time
        from .page import Sections, report_script, write_page

        time = draw_time(runs)
        curves = draw_curves(runs)
        sections = [
            Sections(
                draw_classes(run),
                draw_histograms(run),
                samples=[] if data is None or number else draw_samples(run, data),
            )
            for number, run in enumerate(runs)
        ]
        scripts = [report_script()] if curves else []
        page = write_page(runs, curves, time, sections, scripts=scripts)
    except ImportError as error:
        raise report_needs(error) from error
    files: dict[str, bytes] = {}
    drawn = [chart for section in sections for chart in (*section.classes, *section.histograms)]
    for chart in itertools.chain(curves, [] if time is None else [time], drawn):
        name = f"{chart.name}.png"
        numbers = itertools.count(2)
        while name in files:  # two runs may have the same name
            name = f"{chart.name}-{next(numbers)}.png"
        files[name] = chart.png
    return page, files


def report_needs(error: ImportError) -> OutputError:
    """Return the error of a machine without what draws a report."""
    return OutputError(
        "REPORT", f"a report needs {error.name}: pip install 'accel-trainer[report]'"
    )

"""`accel-trainer report RUN [RUN ...]`: write one self-contained HTML page about runs.

The page works offline. Its charts can be zoomed and smoothed, and show values on hover; without
scripts, they are static images. The charts are also written as PNG files.

example: accel-trainer report runs --open
"""

from __future__ import annotations

import itertools
import os
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from ...core import filesystem
from ...core.errors import ConfigError, OutputError, UserError
from ...core.filesystem import writes_to
from ...core.wording import counted
from ..common.output import tell
from ..common.own_files import is_own_file, refuse_other_file, write_own_file
from ..common.parser import CommandParser
from ..runs.run_reader import RunReader, Runs, read_run, reading
from ..runs.runs import find_runs
from .by_itself import Fault, draw_soundly, fault_of
from .classes import draw_classes


def main(argv: Sequence[str]) -> int:
    """Write the page and its charts and print their paths."""
    parser = CommandParser(__doc__)
    parser.add_argument("run", type=Path, nargs="+", help="a run folder, or a folder of runs")
    parser.add_switch("--open", "open the page in the browser")
    parser.add_argument(
        "--to",
        type=Path,
        default=Path("report.html"),
        help="the file to write; default: report.html",
    )
    options = parser.parse_args(argv)
    path = options.to
    if not path.suffix:
        raise ConfigError(
            "USAGE", f"--to {path} has no suffix, for which its charts have a folder: add .html"
        )
    charts = path.with_suffix("")
    refuse_other_file(path, "--to")
    runs, faults = _read_runs(options.run)
    page, files = render(runs, faults)
    # Their names have letters of UTF-8, whatever the encoding of names is here.
    pictures = {charts / os.fsdecode(name.encode()): png for name, png in files.items()}
    if charts.is_dir():
        for picture in pictures:
            refuse_other_file(picture, "--to")
    # JSON and YAML may hold half a character, which no file can.
    write_own_file(path, page.encode(errors="backslashreplace"), "--to")
    with writes_to(charts):
        filesystem.make_directory(charts)
        for picture in {*charts.glob("*.png")} - pictures.keys():  # of an earlier report
            if is_own_file(picture):
                filesystem.disk.remove(picture)
        for picture, png in pictures.items():
            filesystem.write_file_atomic(picture, png)
    tell(f"{path}\n{charts}{os.sep}  {counted(len(files), 'chart')}")
    if options.open and not webbrowser.open(path.resolve().as_uri()):
        tell("no browser was found: open the page yourself")
    return 0


def _read_runs(folders: Sequence[Path]) -> tuple[list[RunReader], list[Fault]]:
    """Return the runs in folders, of which each is a run or a folder of runs.

    Raises OutputError if none can be read.
    """
    runs: list[RunReader] = []
    faults = []
    for folder in folders:
        try:
            with reading(folder):
                runs += find_runs(folder) or [read_run(folder)]
        except (UserError, OSError) as error:
            faults.append(fault_of(folder, error))
            if len(folders) == len(faults):
                raise
    return runs, faults


def render(runs: Runs, faults: Sequence[Fault] = ()) -> tuple[str, dict[str, bytes]]:
    """Return the report as an HTML page, and its charts as PNG by file name.

    It reads nothing but the run folders. Runs that cannot be drawn are named on the page, and on
    stderr, with the reason.
    """
    drawn, found = draw_soundly(runs, _draw, faults)
    for fault in found:
        tell(f"left out: {fault.message}", file=sys.stderr)
    return drawn


def _draw(runs: Runs, faults: Sequence[Fault]) -> tuple[str, dict[str, bytes]]:
    try:
        from .charts import draw_curves
        from .page import report_script, write_page

        curves = draw_curves(runs)
        classes = [draw_classes(run) for run in runs]
        scripts = [report_script()] if curves else []
        page = write_page(runs, curves, classes, scripts=scripts, faults=faults)
    except ImportError as error:
        raise report_needs(error) from error
    files: dict[str, bytes] = {}
    for chart in itertools.chain(curves, *classes):
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

"""`accel-trainer watch RUN [RUN ...]`: follow runs in the browser while they train.

It serves the page of `accel-trainer report`, read-only and only on this machine. If the machine is
remote, forward its port: ssh -L 8765:localhost:8765 MACHINE. Stop it with Ctrl-C.

example: accel-trainer watch runs --open
"""

from __future__ import annotations

import threading
import webbrowser
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ..common.output import tell
from ..common.parser import CommandParser
from ..report.report import report_needs
from .followed import Followed
from .server import serving


def main(argv: Sequence[str]) -> int:
    """Serve the page until Ctrl-C, and print its address."""
    parser = CommandParser(__doc__)
    parser.add_argument("run", type=Path, nargs="+", help="a run folder, or a folder of runs")
    parser.add_argument("--port", type=int, default=8765, help="0 picks a free one; default: 8765")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="the address to listen on; default: 127.0.0.1, only this machine",
    )
    parser.add_switch("--open", "open the page in the browser")
    options = parser.parse_args(argv)
    followed = Followed(options.run)
    try:
        from .live_page import LivePage
    except ImportError as error:
        raise report_needs(error) from error
    page = LivePage(followed)
    with suppress(KeyboardInterrupt), serving(page, options.host, options.port) as server:
        tell(f"{server.url}  (Ctrl-C stops this page, not the runs)", flush=True)
        if options.open and not webbrowser.open(server.url):
            tell("no browser was found: open the page yourself", flush=True)
        threading.Event().wait()
    return 0

"""Serves a live page on this machine, with an event for each of its versions."""

from __future__ import annotations

import gzip
import secrets
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, cast

from ...core.errors import OutputError, UserError

if TYPE_CHECKING:
    from .live_page import LivePage

_HEARTBEAT_S = 10.0  # of an event stream, so that a reader that has gone is noticed
_POLL_S = 0.1  # how long the end of the server may take
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class PageServer(ThreadingHTTPServer):
    """Answers `/TOKEN/` with the page, and `/TOKEN/events` with its versions.

    The token is random: other people on this machine, and pages of other origins, cannot guess it.
    """

    daemon_threads = True

    def __init__(self, page: LivePage, host: str, port: int) -> None:
        self.page = page
        self.token = secrets.token_urlsafe(9)
        super().__init__((host, port), _Answer)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a reader that has gone; print the traceback of everything else."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        """The address to open."""
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}/{self.token}/"


class _Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server = cast(PageServer, self.server)
        _, token, *rest = [*self.path.partition("?")[0].split("/"), ""]
        if not secrets.compare_digest(token.encode(), server.token.encode()):
            self.send_error(HTTPStatus.NOT_FOUND)
        elif rest[0] == "events":
            self._send_events(server.page)
        elif rest[0] == "":
            self._send_newest(server.page)
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _begin(self, status: HTTPStatus, kind: str, **headers: str) -> None:
        self.send_response(status)
        for name, value in (_HEADERS | {"Content-Type": kind} | headers).items():
            self.send_header(name, value)
        self.end_headers()

    def _send_newest(self, page: LivePage) -> None:
        try:
            newest = page.html()
        except (UserError, OSError) as error:
            self._begin(HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain; charset=utf-8")
            self.wfile.write(f"{error}\n".encode(errors="backslashreplace"))
        else:
            self._send_page(newest)

    def _send_page(self, page: bytes) -> None:
        is_packed = "gzip" in self.headers.get("Accept-Encoding", "")
        body = gzip.compress(page, 1) if is_packed else page
        packed = {"Content-Encoding": "gzip"} if is_packed else {}
        headers = {"Content-Length": str(len(body))} | packed
        self._begin(HTTPStatus.OK, "text/html; charset=utf-8", **headers)
        self.wfile.write(body)

    def _send_events(self, page: LivePage) -> None:
        self._begin(HTTPStatus.OK, "text/event-stream")
        known = -1
        while (newest := page.wait(known, _HEARTBEAT_S)) is not None:
            self.wfile.write(f"data: {newest}\n\n".encode())
            known = newest

    def log_message(self, format: str, *arguments: object) -> None:
        """Print nothing: a page asks once a second."""


@contextmanager
def serving(page: LivePage, host: str, port: int) -> Iterator[PageServer]:
    """Serve `page` while the block runs. Raises OutputError if the address is not free."""
    try:
        server = PageServer(page, host, port)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", error)
        raise OutputError(
            "WATCH", f"{host}:{port} cannot be used ({reason}): choose another --port or --host"
        ) from error
    threads = [
        threading.Thread(target=page.follow, daemon=True),
        threading.Thread(target=server.serve_forever, args=(_POLL_S,), daemon=True),
    ]
    for thread in threads:
        thread.start()
    try:
        yield server
    finally:
        page.end()
        server.shutdown()
        server.server_close()

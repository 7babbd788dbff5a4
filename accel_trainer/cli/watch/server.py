"""Serves a live page on this machine, and the number of its version."""

from __future__ import annotations

import gzip
import secrets
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, cast

from ...core.errors import OutputError, UserError

if TYPE_CHECKING:
    from .live_page import LivePage

_MAX_CONNECTIONS = 64
_TIMEOUT_S = 30.0  # of a reader that neither sends its request nor takes the answer
_POLL_S = 0.1  # how long the end of the server may take
_ANSWERS = {"": "text/html", "version": "text/plain"}
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class PageServer(ThreadingHTTPServer):
    """Answers `/TOKEN/` with the page, and `/TOKEN/version` with its version.

    The token is random: other people on this machine, and pages of other origins, cannot guess it.
    Connections beyond a limit are closed at once, and those that wait for half a minute.
    """

    daemon_threads = True

    def __init__(self, page: LivePage, host: str, port: int) -> None:
        self.page = page
        self.token = secrets.token_urlsafe(9)
        self._free = threading.Semaphore(_MAX_CONNECTIONS)
        super().__init__((host, port), _Answer)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a new thread, unless too many are busy."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and make room for the next."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a reader that has gone; print the traceback of everything else."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        """The address to open."""
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}/{self.token}/"


class _Answer(BaseHTTPRequestHandler):
    timeout = _TIMEOUT_S

    def setup(self) -> None:
        """Prepare to read the request, which has to be there in time as a whole."""
        super().setup()
        self._late = threading.Timer(_TIMEOUT_S, self._stop_reading)
        self._late.daemon = True
        self._late.start()

    def finish(self) -> None:
        """Close what was read and written."""
        self._late.cancel()
        super().finish()

    def _stop_reading(self) -> None:
        with suppress(OSError):  # it has gone
            self.connection.shutdown(socket.SHUT_RD)

    def do_GET(self) -> None:
        server = cast(PageServer, self.server)
        _, token, *rest = [*self.path.partition("?")[0].split("/"), ""]
        if secrets.compare_digest(token.encode(), server.token.encode()) and rest[0] in _ANSWERS:
            self._answer(server.page, rest[0])
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _answer(self, page: LivePage, asked: str) -> None:
        status, kind, headers = HTTPStatus.OK, _ANSWERS[asked], dict(_HEADERS)
        try:
            content = str(page.version()).encode() if asked else page.html()
        except (UserError, OSError) as error:
            status, kind = HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain"
            content = f"{error}\n".encode(errors="backslashreplace")
        if "gzip" in self.headers.get("Accept-Encoding", "") and kind == "text/html":
            content = gzip.compress(content, 1)
            headers["Content-Encoding"] = "gzip"
        self.send_response(status)
        headers |= {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(content))}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

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
            "WATCH", f"{host}:{port} cannot be used ({reason}): choose a different --port or --host"
        ) from error
    threading.Thread(target=server.serve_forever, args=(_POLL_S,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()

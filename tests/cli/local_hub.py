"""The part of the hub that a download needs, on this machine: what is asked over HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_REVISION = "0" * 40


class LocalHub(ThreadingHTTPServer):
    """Keeps the files of one repository."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.files: dict[str, bytes] = {}


@contextmanager
def local_hub() -> Iterator[LocalHub]:
    """Yield a hub that answers while the block runs."""
    with LocalHub() as hub:
        thread = threading.Thread(target=hub.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


class _Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: LocalHub

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2]
        if "/tree/" in self.path:
            files = self.server.files.items()
            self._say(
                [{"type": "file", "path": p, "size": len(d), "oid": _REVISION} for p, d in files]
            )
        elif self.path.startswith("/api/models/me/digits"):
            siblings = [{"rfilename": name} for name in self.server.files]
            self._say({"id": "me/digits", "sha": _REVISION, "siblings": siblings})
        elif "/resolve/" in self.path and name in self.server.files:
            self._send(self.server.files[name])
        else:
            self.send_error(404)

    do_HEAD = do_GET

    def _say(self, values: Any) -> None:
        self._send(json.dumps(values).encode())

    def _send(self, data: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("X-Repo-Commit", _REVISION)
        self.send_header("ETag", f'"{len(data):040x}"')
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *unused: object) -> None:
        """Stay silent."""

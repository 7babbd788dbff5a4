"""The part of the hub that a push and a download need, on this machine: what `huggingface_hub` asks
over HTTP."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_REVISION = "0" * 40


class LocalHub(ThreadingHTTPServer):
    """Keeps the files of one repository, and everything that it was asked for."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.created: dict[str, Any] = {}
        self.files: dict[str, bytes] = {}
        self.checked_cards: list[str] = []


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

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/api/repos/create":
            self.server.created = json.loads(body)
            self._say({"url": f"{self.server.url}/me/digits"})
        elif self.path == "/api/validate-yaml":
            self.server.checked_cards.append(json.loads(body)["content"])
            self._say({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            files = [file["path"] for file in json.loads(body)["files"]]
            self._say(
                {
                    "files": [
                        {"path": path, "uploadMode": "regular", "shouldIgnore": False}
                        for path in files
                    ]
                }
            )
        elif "/commit/" in self.path:
            for row in map(json.loads, body.splitlines()):
                if row["key"] == "file":
                    self.server.files[row["value"]["path"]] = base64.b64decode(
                        row["value"]["content"]
                    )
            self._say(
                {
                    "commitUrl": f"{self.server.url}/me/digits/commit/{_REVISION}",
                    "commitOid": _REVISION,
                }
            )
        else:
            self.send_error(404)

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

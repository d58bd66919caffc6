"""A server on this machine that speaks as much of the Hub's protocol as loading and inspecting take, with ranges."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "c" * 40


@dataclass
class Hub:
    """What was asked of the server: bytes sent, and GET requests, by file."""

    url: str
    sent: Counter[str] = field(default_factory=Counter)
    requests: Counter[str] = field(default_factory=Counter)


@contextmanager
def hub(
    repositories: dict[str, Path], *, ignores_ranges: bool = False, shifts: int = 0, adds: int = 0
) -> Iterator[Hub]:
    """Serve folders under the ids that they are given by.

    Args:
        repositories: folders, by id.
        ignores_ranges: answer with whole files.
        shifts: bytes by which other ranges are sent than are asked for.
        adds: bytes that follow each range.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, *, with_body: bool) -> None:
            path = self.path.partition("?")[0]
            info = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/[^/]+)?", path)
            file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path)
            if info and info[1] in repositories:
                self._send(200, _info(info[1], repositories[info[1]]), with_body, {})
                return
            found = repositories[file[1]] / file[2] if file and file[1] in repositories else None
            if found is None or not found.is_file():
                self._send(404, b"{}", with_body, {"X-Error-Code": "EntryNotFound"})
                return
            self._send_file(found, with_body)

        def _send_file(self, found: Path, with_body: bool) -> None:
            content = found.read_bytes()
            headers = {"ETag": f'"{_sha256(content)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
            asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            if asked and not ignores_ranges:
                first, last = int(asked[1]), int(asked[2])
                headers["Content-Range"] = f"bytes {first + shifts}-{last + shifts}/{len(content)}"
                content = content[first : last + 1] + bytes(adds)
            if with_body:
                known.sent[found.name] += len(content)
                known.requests[found.name] += 1
            self._send(206 if "Content-Range" in headers else 200, content, with_body, headers)

        def _send(self, status: int, content: bytes, with_body: bool, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    known = Hub(f"http://127.0.0.1:{server.server_port}")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield known
    finally:
        server.shutdown()
        server.server_close()


def _info(name: str, folder: Path) -> bytes:
    files = [
        {"rfilename": path.name, "size": path.stat().st_size, "blobId": _sha256(path.read_bytes())[:40]}
        for path in sorted(folder.iterdir())
    ]
    info = {"_id": "0", "id": name, "modelId": name, "sha": COMMIT, "siblings": files, "tags": [], "private": False}
    return json.dumps(info).encode()


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()

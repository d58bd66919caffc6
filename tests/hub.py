"""A stand-in for the Hub: serves a folder as a model, to the process that calls it, and notes what it is asked."""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextlib.contextmanager
def hub(folder: Path, model: str, commit: str = COMMIT) -> Iterator[list[str]]:
    """Let huggingface_hub ask a server of this process that has one model; yields what it is asked, "HEAD config.json".

    The default cache of huggingface_hub is empty then, whatever this machine has in it.

    Args:
        folder: what the model's only commit holds.
        model: its name, "org/model".
        commit: that is its only one.
    """
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            asked.append(f"{self.command} {path.rpartition('/')[2]}")
            if path.startswith(f"/api/models/{model}"):
                self._answer(
                    200, json.dumps(tree(folder) if "/tree/" in path else facts(folder, model, commit)).encode(), {}
                )
                return
            file = folder / path.rpartition("/")[2]
            if not path.startswith(f"/{model}/resolve/") or not file.is_file():
                self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
                return
            content = file.read_bytes()
            self._answer(200, content, {"ETag": f'"{_etag(content)}"'})

        def _answer(self, status: int, content: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in {"X-Repo-Commit": commit, "Content-Length": str(len(content)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with (
            tempfile.TemporaryDirectory() as cache,
            pointed_at(f"http://127.0.0.1:{server.server_port}", cache),
        ):
            yield asked
    finally:
        server.shutdown()
        server.server_close()


def facts(folder: Path, model: str, commit: str) -> dict[str, Any]:
    return {"id": model, "sha": commit, "siblings": [{"rfilename": file.name} for file in folder.iterdir()]}


def tree(folder: Path) -> list[dict[str, Any]]:
    return [
        {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": _etag(file.read_bytes())}
        for file in folder.iterdir()
    ]


def _etag(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()


@contextlib.contextmanager
def pointed_at(endpoint: str, cache: str) -> Iterator[None]:
    """Let huggingface_hub of this process ask a server.

    Args:
        endpoint: its URL.
        cache: the folder of what is downloaded.
    """
    from huggingface_hub import constants, file_download
    from transformers.utils import hub as of_transformers

    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    wanted: dict[str, Any] = {"ENDPOINT": endpoint, "HUGGINGFACE_CO_URL_TEMPLATE": template}
    wanted |= {"HF_HUB_OFFLINE": False, "_is_offline_mode": False, "HF_HUB_CACHE": cache}
    # Older releases have copies of the template, and of what says that the Hub is not asked.
    before = [
        (where, name, getattr(where, name))
        for where in (constants, file_download, of_transformers)
        for name in wanted
        if hasattr(where, name)
    ]
    for where, name, _ in before:
        setattr(where, name, wanted[name])
    try:
        yield
    finally:
        for where, name, value in before:
            setattr(where, name, value)

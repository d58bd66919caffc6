"""A server that gives one answer to all requests, and what tests of remote files share: logins, secrets, forks."""

import os
import ssl
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def with_login(url: str) -> str:
    return url.replace("http://", "http://user-name:pass%2Fword@") + "?X-Amz-Signature=signature&sig=other"


SECRETS = (
    *("user-name", "pass%2Fword", "pass/word", "signature", "other", "secret-token", "hub-token", "Bearer", "dXNlc"),
    *("access-key", "secret-key", "session-token", "AWS4-HMAC", "Signature"),
)


def assert_no_secrets(*texts: str) -> None:
    for text in texts:
        assert [secret for secret in SECRETS if secret in text] == [], text


asked: list[dict[str, str]] = []
"""Headers of the requests to servers of `answering`, and the path."""


class answering:  # noqa: N801  it is used as a function
    """A server that gives one answer to all requests; yields the URL of a file on it."""

    def __init__(
        self, headers: dict[str, str], *, status: int = 200, content: bytes = b"", tls: ssl.SSLContext | None = None
    ) -> None:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                asked.append({**{name.lower(): value for name, value in self.headers.items()}, "path": self.path})
                self.send_response(status)
                own = {} if "Transfer-Encoding" in headers else {"Content-Length": str(len(content))}
                for name, value in {**own, **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._scheme = "https" if tls else "http"
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, args=[0.01], daemon=True)

    def __enter__(self) -> str:
        self._thread.start()
        return f"{self._scheme}://127.0.0.1:{self._server.server_port}/file"

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def in_child(act: Callable[[], bool], timeout_s: float = 60) -> bool:
    """Return what a forked process finds."""
    child = os.fork()
    if child == 0:
        os._exit(0 if act() else 1)
    until_s = time.monotonic() + timeout_s
    while time.monotonic() < until_s:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.02)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return False

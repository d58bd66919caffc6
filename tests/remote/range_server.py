"""An HTTP server of folders by byte ranges, as fast as sendfile, that counts what it does and fails as it is told.

`range_server(folder, error_503=0.01)` serves from a thread of the test, `in_own_process(folder)` from a process of its
own. With folders by name it is S3 and GCS enough for obstore to read and list, each folder a bucket, whatever the
signature: an endpoint that fails as no real one does.

Its control paths, which neither fail nor count: GET `/_stats` (`?asked` lists every request too), POST `/_reset`
(counts to 0), POST `/_set` with JSON of what changes of Behaviour.
"""

from __future__ import annotations

import contextlib
import copy
import json
import multiprocessing
import os
import re
import socket
import socketserver
import stat
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote
from urllib.request import Request as UrlRequest
from urllib.request import urlopen
from xml.sax.saxutils import escape

from tests.remote.behaviour import BEFORE_BODY, IN_BODY, Behaviour
from tests.remote.listing import etag as listing_etag
from tests.remote.listing import listing

MOST_ASKED = 100_000
PLAIN = Behaviour()
CHUNK_BYTES = 1 << 30

Folders = Path | str | Mapping[str, Path]


@dataclass
class Stats:
    """What a server has done."""

    requests: int = 0
    """For files, with those that failed."""
    bytes_sent: int = 0
    """Of files."""
    authorized: int = 0
    """Requests that had an Authorization header."""
    methods: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    path_requests: Counter[str] = field(default_factory=Counter)
    path_bytes: Counter[str] = field(default_factory=Counter)
    asked: list[str] = field(default_factory=list)
    """The first of all requests, as 'GET /model.safetensors bytes=0-7 if-match="64-1b"'."""


@dataclass(frozen=True)
class Request:
    """What a client asks."""

    method: str
    path: str
    """As it stands in the URL, percent signs and all."""
    query: str
    headers: Message
    body: bytes


@dataclass
class Answer:
    """What goes back: the content, or a part of a file."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    content: bytes = b""
    file: int = -1
    """Its descriptor; -1: the content is in memory."""
    first: int = 0
    count: int = 0


class Connection(BaseHTTPRequestHandler):
    """A connection by which a client sends requests, one after the other."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: RangeServer

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if not self.server.answer(self, Request(self.command, path, query, self.headers, body)):
            self.close_connection = True

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET  # noqa: N815  named by http.server

    def log_message(self, *_: Any) -> None:
        pass

    def send_head(self, status: int, headers: dict[str, str]) -> None:
        """Send the status and the headers."""
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def send_file(self, file: int, first: int, count: int) -> int:
        """Send a range of a file, given its descriptor; returns how many bytes went, fewer if the file ends."""
        sent = 0
        while sent < count:
            went = os.sendfile(self.connection.fileno(), file, first + sent, min(CHUNK_BYTES, count - sent))
            if not went:
                break
            sent += went
        return sent

    def reset(self) -> None:
        """Close so that the other side's next call fails with ECONNRESET."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()


class RangeServer(socketserver.ThreadingTCPServer):
    """Serves folders on a port; `close` it, or use `range_server`.

    Args:
        folders: one, whose files are at the root, or several by what their paths begin with.
        host: "0.0.0.0" for all of this machine's addresses.
        behaviour: values of Behaviour by name.
    """

    daemon_threads = True
    request_queue_size = 512

    def __init__(self, folders: Folders, *, host: str = "127.0.0.1", **behaviour: Any) -> None:
        self._folders = dict(folders) if isinstance(folders, Mapping) else {"": Path(folders)}
        self.behaviour = Behaviour().changed(behaviour)
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._stats = Stats()
        self._numbered = self._failed = 0
        self._open: set[Any] = set()
        super().__init__((host, 0), Connection)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self._serving = threading.Thread(target=self.serve_forever, args=[0.01], name=self.url, daemon=True)
        self._serving.start()

    def set(self, **changes: Any) -> None:
        """Behave otherwise from now on."""
        self.behaviour = self.behaviour.changed(changes)

    def stats(self) -> dict[str, Any]:
        """What was done since the start or the last reset, by the names of Stats."""
        with self._lock:
            return {name: copy.copy(value) for name, value in vars(self._stats).items()}

    def reset(self) -> None:
        """Begin to count again."""
        with self._lock:
            self._stats = Stats()
            self._numbered = self._failed = 0

    def signed(self, path: str) -> str:
        """A URL that is good for a while where signatures are checked."""
        return self.url + self.behaviour.signed(path)

    def close(self) -> None:
        """Stop, and cut off all who are connected; may be called again."""
        if self._closing.is_set():
            return
        self._closing.set()
        self.shutdown()
        self.server_close()
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # the client may have gone
            super().handle_error(request, client_address)

    def answer(self, connection: Connection, request: Request) -> bool:
        """Answer a request; returns whether the connection is as good as before."""
        if request.path.startswith("/_"):
            return self._send(connection, request, self._control(request))
        behaviour = self.behaviour
        fault = self._count(request, behaviour)
        if behaviour.latency_ms:
            self._closing.wait(behaviour.latency_ms / 1000)
        if fault == "reset_before":
            self._note(fault=fault)
            connection.reset()
            return False
        answer = self._failure(fault, behaviour) or self._refusal(request, behaviour)
        answer = answer or self.answer_to(request, behaviour)
        try:
            return self._send(connection, request, answer, behaviour, fault)
        finally:
            if answer.file >= 0:
                os.close(answer.file)

    def _count(self, request: Request, behaviour: Behaviour) -> str:
        """Count a request; return which fault befalls it, or ""."""
        fault = ""
        with self._lock:
            stats = self._stats
            stats.requests += 1
            stats.methods[request.method] += 1
            stats.path_requests[request.path] += 1
            stats.authorized += "authorization" in request.headers
            if len(stats.asked) < MOST_ASKED:
                condition = request.headers.get("if-match")
                wanted = request.headers.get("range"), condition and f"if-match={condition}"
                stats.asked.append(" ".join(filter(None, (request.method, request.path, *wanted))))
            if behaviour.counts(request.path):
                if behaviour.at_most < 0 or self._failed < behaviour.at_most:
                    fault = _befalls(request, behaviour.fault(self._numbered))
                self._numbered += 1
                self._failed += bool(fault)
        return fault

    def _note(self, *, status: int = 0, fault: str = "", path: str = "", sent: int = 0) -> None:
        with self._lock:
            self._stats.bytes_sent += sent
            if path:
                self._stats.path_bytes[path] += sent
            if status:
                self._stats.statuses[status] += 1
            if fault:
                self._stats.faults[fault] += 1

    def _failure(self, fault: str, behaviour: Behaviour) -> Answer | None:
        if fault not in BEFORE_BODY:
            return None
        self._note(fault=fault)
        statuses = {"error_500": 500, "error_503": 503, "too_many": 429}
        if fault in statuses:
            return Answer(statuses[fault], content=b"as it was told to\n")
        return _s3_error(503, "SlowDown", "Please reduce your request rate.")

    def _refusal(self, request: Request, behaviour: Behaviour) -> Answer | None:
        authorization = request.headers.get("authorization", "")
        if request.method == "HEAD" and behaviour.head_status:
            return Answer(behaviour.head_status)
        if behaviour.gone:
            return _s3_error(403, "AccessDenied", "Access Denied", request if behaviour.repeats else None)
        if behaviour.refuse_authorization and authorization:
            return _s3_error(400, "InvalidArgument", "Only one auth mechanism allowed")
        if behaviour.token and authorization != f"Bearer {behaviour.token}":
            return Answer(401, {"WWW-Authenticate": "Bearer"}, b"a token is wanted\n")
        if behaviour.check_signature and (wrong := behaviour.wrong_in(request.path, request.query)):
            message = "Request has expired" if wrong == "ExpiredToken" else "Access Denied"
            return _s3_error(403, wrong, message, request if behaviour.repeats else None)
        return None

    def answer_to(self, request: Request, behaviour: Behaviour) -> Answer:
        """What a request gets that neither fails nor is refused."""
        if request.method not in ("GET", "HEAD"):
            return Answer(405, {"Allow": "GET, HEAD"})
        bucket = request.path.strip("/")
        if "list-type=2" in request.query and bucket in self._folders:
            content = listing(bucket, self._folders[bucket], request.query)
            return Answer(200, {"Content-Type": "application/xml"}, content)
        path = self.path_of(request.path)
        if path is not None and path.is_dir() and request.path.endswith("/") and behaviour.lists:
            names = sorted(each.name + "/" * each.is_dir() for each in path.iterdir())
            links = "".join(f'<a href="{quote(name)}">{escape(name)}</a>\n' for name in names)
            return Answer(200, {"Content-Type": "text/html"}, f"<html><a href='../'>up</a>\n{links}".encode())
        if path is None or path.is_dir():
            return Answer(404, content=b"no such file\n")
        if behaviour.redirect_to:
            return Answer(302, {"Location": behaviour.redirect_to + behaviour.signed(request.path)})
        return file_answer(path, request, behaviour)

    def path_of(self, path: str) -> Path | None:
        """The file that a URL's path names, if there is one."""
        path = unquote(path).strip("/")
        if ".." in path.split("/") or "\0" in path:
            return None
        for name, folder in self._folders.items():
            if not name or f"{path}/".startswith(f"{name}/"):
                found = folder / path[len(name) :].lstrip("/")
                return found if found.exists() else None
        return None

    def _send(
        self, connection: Connection, request: Request, answer: Answer, behaviour: Behaviour = PLAIN, fault: str = ""
    ) -> bool:
        count = answer.count if answer.file >= 0 else len(answer.content)
        with_body = request.method != "HEAD" and count > 0
        fault = fault if fault in IN_BODY and with_body and answer.file >= 0 and count > 1 else ""
        if fault == "short" and answer.status == 206:
            count //= 2
            total = answer.headers["Content-Range"].rpartition("/")[2]
            answer.headers["Content-Range"] = f"bytes {answer.first}-{answer.first + count - 1}/{total}"
        elif fault == "short":
            fault = ""
        is_file_request = not request.path.startswith("/_")
        self._note(status=answer.status if is_file_request else 0, fault=fault)
        connection.send_head(answer.status, {"Content-Length": str(count), **answer.headers})
        if not with_body:
            return True
        if answer.file < 0:
            connection.wfile.write(answer.content)
            return True
        return self._send_file(connection, request, answer, count, behaviour, fault)

    def _send_file(
        self, connection: Connection, request: Request, answer: Answer, count: int, behaviour: Behaviour, fault: str
    ) -> bool:
        added = behaviour.adds if answer.status == 206 else 0
        count -= added
        halves = [count // 2, count - count // 2] if fault in ("reset_middle", "cut", "stall") else [count]
        done = 0
        for i, part in enumerate(halves):
            if i:
                if fault == "stall":
                    self._closing.wait(behaviour.stall_s)
                else:
                    if fault == "reset_middle":
                        connection.reset()
                    return False
            self._note(path=request.path, sent=part)  # before the client has them, and may ask for the count
            sent = 0
            try:
                sent = connection.send_file(answer.file, answer.first + done, part)
            finally:
                self._note(path=request.path, sent=sent - part)
            done += sent
            if sent < part:
                return False  # the file has become shorter
        connection.wfile.write(bytes(added))
        return True

    def _control(self, request: Request) -> Answer:
        what = request.path[2:]
        if what == "stats":
            stats = self.stats()
            if request.query != "asked":
                del stats["asked"]
            return _json(stats)
        if what == "reset":
            self.reset()
            return _json({})
        if what == "set":
            try:
                self.set(**json.loads(request.body))
            except (TypeError, ValueError) as error:
                return Answer(400, content=f"{error}\n".encode())
            return _json({})
        return Answer(404)


def file_answer(path: Path, request: Request, behaviour: Behaviour, etag: str = "") -> Answer:
    """The answer to a GET or HEAD of a file that is there: of all of it, or of a range, with its preconditions."""
    file = os.open(path, os.O_RDONLY)
    try:
        answer = _whole_or_range(file, request, behaviour, etag)
    except BaseException:
        os.close(file)
        raise
    if answer.file < 0:
        os.close(file)
    return answer


def _whole_or_range(file: int, request: Request, behaviour: Behaviour, etag: str) -> Answer:
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        return Answer(404)
    size = status.st_size
    etag = etag or listing_etag(status)
    headers = {
        "Accept-Ranges": "bytes",
        "Content-Type": "application/octet-stream",
        "Last-Modified": time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(status.st_mtime)),
        "ETag": f"W/{etag}" if behaviour.weak_etags else etag,
    }
    if behaviour.no_etags:
        del headers["ETag"]
    if "if-match" in request.headers and not _matches(request.headers["if-match"], headers.get("ETag", "")):
        return Answer(412, headers)
    asked = request.headers.get("range")
    if asked is None or behaviour.ignores_ranges:
        return Answer(200, headers, file=file, count=size)
    found = re.fullmatch(r"bytes=(\d+)-(\d+)", asked)
    if not found:
        return Answer(200, headers, file=file, count=size)
    first, last = int(found[1]), min(int(found[2]), size - 1)
    if first > last:
        return Answer(416, {**headers, "Content-Range": f"bytes */{size}"})
    first, last = first + behaviour.shifts, last + behaviour.shifts
    headers["Content-Range"] = f"bytes {first}-{last}/{size}"
    return Answer(206, headers, file=file, first=first, count=last - first + 1 + behaviour.adds)


def _matches(wanted: str, etag: str) -> bool:
    return wanted == "*" or etag in [one.strip() for one in wanted.split(",")]


def _befalls(request: Request, fault: str) -> str:
    """The fault, or "" if the request has nothing that it could happen to."""
    has_middle = request.method == "GET" and request.headers.get("range") != "bytes=0-0"  # which asks for the size
    if fault in IN_BODY and not has_middle:
        return ""
    return "" if fault == "short" and "range" not in request.headers else fault


def _s3_error(status: int, code: str, message: str, repeated: Request | None = None) -> Answer:
    content = f"<Code>{code}</Code><Message>{message}</Message>"
    if repeated:
        signed = [f"{repeated.method}\n{repeated.path}\n{repeated.query}"]
        signed += [f"{name}:{value}" for name, value in repeated.headers.items()]
        content += f"<CanonicalRequest>{escape(chr(10).join(signed))}</CanonicalRequest>"
        content += f"<Token-0>{escape(repeated.headers.get('x-amz-security-token', ''))}</Token-0>"
    content = f'<?xml version="1.0" encoding="UTF-8"?>\n<Error>{content}</Error>'
    return Answer(status, {"Content-Type": "application/xml"}, content.encode())


def _json(what: dict[str, Any]) -> Answer:
    return Answer(200, {"Content-Type": "application/json"}, json.dumps(what).encode())


def range_server(folders: Folders, **behaviour: Any) -> contextlib.closing[RangeServer]:
    """Serve folders from threads of this process while a block runs."""
    return contextlib.closing(RangeServer(folders, **behaviour))


@dataclass(frozen=True)
class FarServer:
    """A server in another process."""

    url: str

    def stats(self, *, asked: bool = False) -> dict[str, Any]:
        """As RangeServer.stats, but for JSON."""
        return json.loads(self._ask("GET", "/_stats?asked" if asked else "/_stats"))

    def reset(self) -> None:
        """Begin to count again."""
        self._ask("POST", "/_reset")

    def set(self, **changes: Any) -> None:
        """Behave otherwise from now on."""
        self._ask("POST", "/_set", json.dumps(changes).encode())

    def _ask(self, method: str, path: str, body: bytes | None = None) -> bytes:
        with urlopen(UrlRequest(self.url + path, data=body, method=method), timeout=10) as answer:
            return answer.read()


@contextlib.contextmanager
def in_own_process(folders: Folders, *, host: str = "127.0.0.1", **behaviour: Any) -> Iterator[FarServer]:
    """Serve folders from a process that ends when this block does, or this process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, folders, host, behaviour), daemon=True)
    process.start()
    theirs.close()
    try:
        yield FarServer(ours.recv())
    finally:
        process.kill()


def _serve(parent: Any, folders: Folders, host: str, behaviour: dict[str, Any]) -> None:
    parent.send(RangeServer(folders, host=host, **behaviour).url)
    with contextlib.suppress(EOFError):
        parent.recv()  # until the parent has ended

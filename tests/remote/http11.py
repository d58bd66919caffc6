"""As much of HTTP/1.1 as a fast file server takes: requests off a socket, and answers whose bodies are sendfile'd."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from dataclasses import dataclass
from http import HTTPStatus

MOST_HEADER_BYTES = 64 << 10
CHUNK_BYTES = 1 << 30


class Closed(Exception):
    """The other side has closed the connection, or speaks no HTTP."""


@dataclass(frozen=True)
class Request:
    """What a client asks."""

    method: str
    path: str
    """As it stands in the URL, percent signs and all."""
    query: str
    headers: dict[str, str]
    """By name in small letters."""
    body: bytes

    @property
    def keeps_alive(self) -> bool:
        return self.headers.get("connection", "").lower() != "close"


class Connection:
    """A socket that a client sends requests to, one after the other."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = sock
        self._read = b""

    def request(self) -> Request:
        """Wait for the next request; raises Closed or OSError if none comes."""
        while b"\r\n\r\n" not in self._read:
            if len(self._read) > MOST_HEADER_BYTES:
                raise Closed
            self._receive()
        head, _, self._read = self._read.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        try:
            method, target, version = first.split(" ")
        except ValueError:
            raise Closed from None
        if version != "HTTP/1.1":
            raise Closed
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        length = int(headers.get("content-length", 0))
        while len(self._read) < length:
            self._receive()
        body, self._read = self._read[:length], self._read[length:]
        path, _, query = target.partition("?")
        return Request(method, path, query, headers, body)

    def _receive(self) -> None:
        received = self.socket.recv(MOST_HEADER_BYTES)
        if not received:
            raise Closed
        self._read += received

    def send_head(self, status: int, headers: dict[str, str], *, body_follows: bool) -> None:
        """Send the status and the headers."""
        lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", *(f"{name}: {headers[name]}" for name in headers)]
        more = socket.MSG_MORE if body_follows else 0
        self._send_all("\r\n".join([*lines, "", ""]).encode("latin-1"), more)

    def send(self, content: bytes) -> None:
        """Send what is in memory."""
        self._send_all(content, 0)

    def _send_all(self, content: bytes, flags: int) -> None:
        left = memoryview(content)
        while left:
            left = left[self.socket.send(left, flags) :]

    def send_file(self, file: int, first: int, count: int) -> int:
        """Send a range of a file, given its descriptor; returns how many bytes went, fewer if the file ends."""
        sent = 0
        while sent < count:
            went = os.sendfile(self.socket.fileno(), file, first + sent, min(CHUNK_BYTES, count - sent))
            if not went:
                break
            sent += went
        return sent

    def reset(self) -> None:
        """Close so that the other side's next call fails with ECONNRESET."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def close(self) -> None:
        """Close in order."""
        self.socket.close()

    def cut_off(self) -> None:
        """Let the thread that waits for the connection go on, with an error."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

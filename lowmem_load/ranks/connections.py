"""TCP connections between ranks, over which they send each other what they have read.

Not by torch.distributed: a receive of its gloo backend says that it is done only to who waits for it, and a group with
work that does not end, because some rank has failed, can be neither aborted nor destroyed before its timeout (seen with
torch 2.13). Here whoever waits looks around meanwhile, and leaves by closing, which the other side sees at once.

The ranks tell each other their addresses, and a secret of the group, by an exchange; both sides of a connection prove
that they know it. What goes through is neither signed nor encrypted, as with the collectives of torch.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from lowmem_load.ranks.group import RankGroup, StoppedError
from lowmem_load.ranks.life import machine

POLL_S = 0.1
"""Seconds after which a rank that waits for another one looks around."""

CONNECT_S = 30.0
"""Until all ranks of a group must be connected: all have just been there to tell their addresses."""

CALL_S = 5.0
"""Until an address answers."""

MAX_TOLD = 4
"""Ranks that could not be connected whose reasons are told: those of the others are the same or follow."""

BUFFER_BYTES = 128 << 10
"""Of the system's buffers for a connection, each way. By itself Linux lets them grow to 10 MiB and more for each of 63
connections; limited so, they held 448 KiB of a stream that nobody took (Linux 6)."""

MAX_CALLERS = 256
"""That are heard before they have said who they are; then the first of them is dropped. Few of them are ranks."""

_CALL = struct.Struct("!I32s")
"""What a rank that connects says: its place, and a proof that it knows the secret; it is answered with another one."""

_ELSEWHERE = ("192.0.2.1", "2001:db8::1")
"""Addresses that nobody has (RFC 5737 and 3849), to see by which of its own this machine reaches others. Nothing is
sent."""


class Address(NamedTuple):
    """Where a rank listens.

    Attributes:
        network: equal for those that reach each other by 127.0.0.1.
        hosts: addresses by which other machines may reach it.
        port: for this occasion.
        secret: of the group, if this is its first rank's address.
    """

    network: str
    hosts: tuple[str, ...]
    port: int
    secret: bytes


class Connections:
    """A stream of bytes from each rank of a group to each, itself included, in order.

    One thread may send while another one receives.

    Args:
        place: of this rank in the group.
        members: the ranks, for messages.
        sockets: by place; that of this rank is missing.

    Attributes:
        place, num_ranks: as given.
    """

    def __init__(self, place: int, members: Sequence[int], sockets: dict[int, socket.socket]) -> None:
        self.place, self.num_ranks, self._members = place, len(members), members
        out, back = socket.socketpair()
        self._out, self._back = {**sockets, place: out}, {**sockets, place: back}
        for each in self._sockets():
            each.settimeout(POLL_S)

    def send(self, place: int, content: memoryview, check: Callable[[], None]) -> None:
        """Send bytes to a rank. `check` is called now and then while it does not take them, and raises to end that.

        Raises:
            StoppedError: the connection is lost. Why, that rank says in the next agreement, or is named there.
        """
        while content:
            num_bytes = self._moved(place, self._out[place].send, content)
            content = content[num_bytes:]
            if not num_bytes:
                check()

    def receive(self, place: int, memory: memoryview, check: Callable[[], None]) -> None:
        """Fill memory with the next bytes from a rank; see `send`."""
        while memory:
            num_bytes = self._moved(place, self._back[place].recv_into, memory)
            memory = memory[num_bytes:]
            if not num_bytes:
                check()

    def end(self) -> None:
        """Send and receive no more; the others notice at once, after what was sent before."""
        for each in self._sockets():
            with contextlib.suppress(OSError):  # it has ended
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give everything back, once no thread sends or receives."""
        for each in self._sockets():
            each.close()

    def _sockets(self) -> Iterator[socket.socket]:
        yield from self._out.values()
        yield self._back[self.place]

    def _moved(self, place: int, move: Callable[[memoryview], int], memory: memoryview) -> int:
        """Return how many bytes were sent or received; 0 for none within `POLL_S`."""
        try:
            num_bytes = move(memory)
        except TimeoutError:
            return 0
        except OSError as error:
            raise StoppedError(self._lost(place, error.strerror or str(error))) from error
        if not num_bytes:
            raise StoppedError(self._lost(place, "it was closed there"))
        return num_bytes

    def _lost(self, place: int, why: str) -> str:
        return f"stopped because the connection to rank {self._members[place]} was lost: {why}"


@contextlib.contextmanager
def connections(ranks: RankGroup, members: Sequence[int]) -> Iterator[tuple[Connections | None, str]]:
    """Yield connections between some ranks, this one among them, and else why there are none.

    Collective: two small exchanges of all ranks.

    Args:
        ranks: that load together.
        members: the ranks that are to be connected with this one, the same for each of them; none for this rank alone.
    """
    listener, address, found, trouble = None, None, None, ""
    with contextlib.ExitStack() as closing:
        with contextlib.ExitStack() as listening:
            if members:
                try:
                    listener = listening.enter_context(_listener())
                    secret = secrets.token_bytes(32) if ranks.rank == members[0] else b""
                    address = Address(_network(ranks.rank), _hosts(), listener.getsockname()[1], secret)
                except OSError as error:
                    trouble = f"no connections can be accepted: {error}"
            addresses = ranks.all_gather_object(address)
            theirs = [known for member in members if (known := addresses[member]) is not None]
            if listener is not None and len(theirs) == len(members):
                place = members.index(ranks.rank)
                try:
                    sockets = _connected(place, members, theirs, listener, ranks.watch())
                    found = Connections(place, members, sockets)
                    closing.callback(found.close)
                except (OSError, StoppedError) as error:
                    trouble = str(error)
        troubles = ranks.all_gather_object(trouble)
        told = [f"rank {member}: {troubles[member]}" for member in members if troubles[member]]
        yield (None, "; ".join(told[:MAX_TOLD])) if told else (found, "")


def _listener() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=socket.SOMAXCONN, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=socket.SOMAXCONN)


def _network(rank: int) -> str:
    try:
        return f"{machine()} {os.readlink('/proc/self/ns/net')}"
    except OSError:  # not told here
        return f"rank {rank}"


def _hosts() -> tuple[str, ...]:
    """Return the addresses of this machine by which it reaches where the ranks meet, and others."""
    found = []
    for host in (os.environ.get("MASTER_ADDR"), *_ELSEWHERE):
        with contextlib.suppress(OSError):
            for family, kind, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
                with socket.socket(family, kind) as probe, contextlib.suppress(OSError):
                    probe.connect(address)
                    found.append(probe.getsockname()[0])
    return tuple(host for host in dict.fromkeys(found) if not ipaddress.ip_address(host).is_loopback)


def _connected(
    place: int,
    members: Sequence[int],
    addresses: Sequence[Address],
    listener: socket.socket,
    check: Callable[[], None],
) -> dict[int, socket.socket]:
    """Return a connection to each other rank: those before this one are called, those after it call.

    Raises:
        OSError: one of them cannot be reached, or has not called.
        StoppedError: as `check`.
    """
    until, secret = time.monotonic() + CONNECT_S, addresses[0].secret
    found: dict[int, socket.socket] = {}
    try:
        for other in range(place):
            found[other] = _called(place, other, members, addresses, secret, until, check)
        _Callers(place, len(members), listener, secret).take(found, until, check)
        absent = [members[other] for other in range(len(members)) if other not in found and other != place]
        if absent:
            raise TimeoutError(f"rank(s) {absent[:8]} have not connected within {CONNECT_S:g} s")
        for each in found.values():
            each.setblocking(True)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                each.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
    except BaseException:
        for each in found.values():
            each.close()
        raise
    return found


def _called(
    place: int,
    other: int,
    members: Sequence[int],
    addresses: Sequence[Address],
    secret: bytes,
    until: float,
    check: Callable[[], None],
) -> socket.socket:
    address, errors = addresses[other], []
    hosts = ("127.0.0.1",) if address.network == addresses[place].network else address.hosts
    for host in hosts:
        try:
            left_s = max(POLL_S, until - time.monotonic())
            made = socket.create_connection((host, address.port), timeout=min(CALL_S, left_s))
            try:
                made.sendall(_CALL.pack(place, _proof(secret, place, other)))
                made.settimeout(POLL_S)
                if not hmac.compare_digest(_exactly(made, 32, until, check), _proof(secret, other, place)):
                    raise ConnectionRefusedError("another process answers")
                return made
            except BaseException:
                made.close()
                raise
        except OSError as error:
            errors.append(f"{host}: {error}")
    told = "; ".join(errors) or "it has no address"
    raise ConnectionError(f"rank {members[other]} cannot be reached at port {address.port}: {told}")


class _Callers:
    """Those that connect to this rank: all are heard at a time, so that one that says nothing keeps nobody waiting.

    Args:
        place: of this rank.
        num_ranks: of the group; those of higher places will call.
        listener: that they call.
        secret: by which they are told from strangers.
    """

    def __init__(self, place: int, num_ranks: int, listener: socket.socket, secret: bytes) -> None:
        self._place, self._num_ranks, self._listener, self._secret = place, num_ranks, listener, secret
        self._heard: dict[socket.socket, bytes] = {}  # of those that have not said all yet, oldest first
        self._selector = selectors.DefaultSelector()

    def take(self, found: dict[int, socket.socket], until: float, check: Callable[[], None]) -> None:
        """Add those that are ranks to `found`, by place, until all are there or time is up."""
        self._listener.setblocking(False)
        try:
            self._selector.register(self._listener, selectors.EVENT_READ)
            while len(found) < self._num_ranks - 1 and time.monotonic() < until:
                check()
                for key, _ in self._selector.select(POLL_S):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._heard:
                        self._hear(key.fileobj, found)
        finally:
            self._selector.close()
            for caller in self._heard:
                caller.close()

    def _accept(self) -> None:
        try:
            caller, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):  # who called has gone
            return
        caller.setblocking(False)
        self._heard[caller] = b""
        self._selector.register(caller, selectors.EVENT_READ)
        if len(self._heard) > MAX_CALLERS:
            self._forget(next(iter(self._heard))).close()

    def _hear(self, caller: socket.socket, found: dict[int, socket.socket]) -> None:
        try:
            more = caller.recv(_CALL.size - len(self._heard[caller]))
            self._heard[caller] += more
            if more and len(self._heard[caller]) < _CALL.size:
                return
            other, proof = _CALL.unpack(self._heard[caller].ljust(_CALL.size))
            is_rank = self._place < other < self._num_ranks and other not in found
            if not is_rank or not hmac.compare_digest(proof, _proof(self._secret, other, self._place)):
                raise ConnectionRefusedError("not one of the ranks")
            caller.sendall(_proof(self._secret, self._place, other))
        except OSError:
            self._forget(caller).close()
        else:
            found[other] = self._forget(caller)

    def _forget(self, caller: socket.socket) -> socket.socket:
        self._selector.unregister(caller)
        del self._heard[caller]
        return caller


def _proof(secret: bytes, sender: int, receiver: int) -> bytes:
    return hmac.digest(secret, f"{sender} to {receiver}".encode(), "sha256")


def _exactly(connection: socket.socket, nbytes: int, until: float, check: Callable[[], None]) -> bytes:
    found = b""
    while len(found) < nbytes:
        check()
        if time.monotonic() > until:
            raise TimeoutError("it does not answer")
        with contextlib.suppress(TimeoutError):
            if not (more := connection.recv(nbytes - len(found))):
                raise ConnectionResetError("it was closed")
            found += more
    return found

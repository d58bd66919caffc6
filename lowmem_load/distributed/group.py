"""The ranks that do something together: each step of it either succeeds on all of them, or raises on all.

Which steps take place depends only on what all ranks know. So a failure of one is an error on all, and never a hang.
How ranks hear of each other: `distributed/store_channel.py`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, ClassVar

import torch.distributed as dist

from lowmem_load.distributed.heartbeat import Limits
from lowmem_load.distributed.processes import Progress
from lowmem_load.distributed.store_channel import Group, StoppedError, StoreChannel
from lowmem_load.distributed.verdict import Entry, Verdict, verdict_on
from lowmem_load.errors import ConfigError, RankError, spelled

MAX_TEXT = 20_000
"""Characters of an error that other ranks hear: a message of many megabytes would break the store's connection."""

_KNOWN = "_lowmem_load_known_to_all"
"""Attribute of errors that all ranks know of."""

_NEVER = timedelta(days=7)
"""Timeout of clients whose calls wait for other ranks; who waits is watched over otherwise."""


class Step:
    """What this rank brings to a step, and what all ranks have brought.

    Attributes:
        digest: fingerprint of what must be equal on all ranks; set within the block.
        payload: for the other ranks, JSON data; set within the block.
        payloads: of all ranks, by rank; there after the block.
    """

    __slots__ = ("digest", "payload", "payloads")

    def __init__(self) -> None:
        self.digest = ""
        self.payload: Any = None
        self.payloads: list[Any] = []


class RankGroup:
    """The ranks that load a model together.

    Args:
        group: of torch.distributed; None for the default group, whichever is live.
    """

    __slots__ = ("_group",)

    # One for each default group, with which it ends.
    _channels: ClassVar[weakref.WeakKeyDictionary[dist.ProcessGroup, StoreChannel]] = weakref.WeakKeyDictionary()

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group of torch.distributed; None for the default group."""
        return self._group

    @property
    def rank(self) -> int:
        """Rank of this process in the group."""
        require_live()
        return dist.get_rank(self._group)

    @property
    def world_size(self) -> int:
        """Number of ranks in the group."""
        require_live()
        return dist.get_world_size(self._group)

    @property
    def is_fake(self) -> bool:
        """Whether this is torch's fake backend, which has no other ranks."""
        return bool(dist.get_backend(self._group) == "fake")

    @property
    def hears_of_failures(self) -> bool:
        """Whether `check` tells this rank that another one has failed: there are others, and a store."""
        return self._channel() is not None

    @contextlib.contextmanager
    def step(
        self, title: str, *, name: str = "", progress: Callable[[], Progress] | None = None, demand: str = ""
    ) -> Iterator[Step]:
        """Run the block on every rank; then all ranks go on, or all raise.

        All raise if one rank raised, ended or got stuck, if ranks are at steps of different titles, or if their
        digests differ. An interrupt or exit of this rank stays one, and is a `RankError` on the others. Steps may
        nest. On a single rank, and on torch's fake backend, where every rank counts as a copy of this one, only the
        own error counts.

        Collective: one step of `distributed/store_channel.py`, whatever happens.

        Args:
            title: what is done: "planning".
            name: of what it is done with, for messages. It may differ between ranks.
            progress: says how far the block is; asked by another thread. If it says the same for longer than
                `Limits.silence_s`, the other ranks give this one up. None: nothing is known of that, so it gets the
                timeout of the process group; see [Note: gone or silent] in `distributed/heartbeat.py`.
            demand: what scripts have to do, for a step that they are likely to run on one rank only: the others have
                to come within `Limits.silence_s`.

        Raises:
            RankError: names each rank that failed, with its message. It is chained to this rank's own error, if any.
            BaseException: the block's own error, where there is one rank, or all ranks failed alike: nothing is learnt
                from a wrapper then.
        """
        step, error, payload, channel = Step(), None, "null", self._channel()
        with self._doing(f"{name}: {title}" if name else title, progress):
            try:
                if channel is not None:
                    timeout_s = _default_store().timeout.total_seconds()
                    channel.set_limits(Limits.from_environment(timeout_s, demand))
                yield step
                payload = json.dumps(step.payload)
            except RankError:
                raise
            except (Exception, KeyboardInterrupt, SystemExit, StoppedError) as caught:
                if getattr(caught, _KNOWN, False):  # an inner step has ended with it
                    raise
                error = caught
            verdict = self._verdict(_entry(title, name, step, payload, error))
        if error is not None and (verdict.is_alike or not isinstance(error, Exception | StoppedError)):
            raise _known(error)  # an interrupt stays one, now that the others have heard of it
        if verdict.failures:
            raise RankError(verdict.title, dict(verdict.failures)) from error
        step.payloads = verdict.by_rank()

    @contextlib.contextmanager
    def session(self, what: str) -> Iterator[None]:
        """Send heartbeats within the block, also between steps; an error of this rank alone that leaves it aborts it.

        Args:
            what: is done, for messages: "save_model".
        """
        with self._doing(what, None):
            try:
                yield
            except RankError:
                raise
            except BaseException as error:
                self.abort(what, error)
                raise

    def abort(self, what: str, error: BaseException, *, any_group: bool = False) -> None:
        """Tell the other ranks that this one does not come to their next step. Local.

        Args:
            what: is left, for messages: "streaming()".
            error: by which; nothing is told of one that all ranks know of.
            any_group: whether the group of these ranks is not known.
        """
        channel = self._channel() if dist.is_initialized() and not getattr(error, _KNOWN, False) else None
        if channel is not None:
            channel.abort(None if any_group else self._place(channel), f"left {what}: {spelled(error, MAX_TEXT)}")
            _known(error)

    def check(self) -> None:
        """Raise StoppedError if another rank has failed, or if the store is silent. Local; takes a microsecond."""
        channel = RankGroup._channels.get(_default_group())
        if channel is not None:
            channel.check()

    @contextlib.contextmanager
    def _doing(self, what: str, progress: Callable[[], Progress] | None) -> Iterator[None]:
        channel = self._channel()
        with contextlib.nullcontext() if channel is None else channel.doing(self._place(channel), what, progress):
            yield

    def _verdict(self, entry: Entry) -> Verdict:
        channel = self._channel()
        if channel is not None:
            try:
                return channel.agree(self._place(channel), entry)
            except BaseException as interrupt:
                _known(interrupt)  # by `agree`
                raise
        if self.world_size == 1 or self.is_fake:
            return verdict_on(dict.fromkeys(range(self.world_size), entry))
        members, texts = dist.get_process_group_ranks(self._group or _default_group()), [""] * self.world_size
        dist.all_gather_object(texts, entry.encoded(), group=self._group)
        return verdict_on(dict(zip(members, map(Entry.decoded, texts), strict=True)))

    def _channel(self) -> StoreChannel | None:
        """Return the channel to the other ranks; None where there are none, or torch.distributed has no store (MPI)."""
        if self.world_size == 1 or self.is_fake or (store := _default_store()) is None:
            return None
        found = RankGroup._channels.get(_default_group())
        if found is None:
            found = RankGroup._channels[_default_group()] = StoreChannel(lambda: _own_client(store), dist.get_rank())
        if found.pid != os.getpid():
            raise ConfigError(
                "this process was forked from a rank, whose connections it must not use; load in the rank itself, or "
                "start this process by spawn"
            )
        return found

    def _place(self, channel: StoreChannel) -> Group:
        group = self._group or _default_group()
        members = tuple(dist.get_process_group_ranks(group))
        return channel.group(hashlib.sha256(f"{group.group_name} {members}".encode()).hexdigest()[:16], members)


def _entry(title: str, name: str, step: Step, payload: str, error: BaseException | None) -> Entry:
    if error is None:
        return Entry(title, name, digest=step.digest, payload=json.loads(payload))
    return Entry(title, name, spelled(error, MAX_TEXT), is_stopped=isinstance(error, StoppedError))


def _known(error: BaseException) -> BaseException:
    """Mark an error of which all ranks know."""
    with contextlib.suppress(AttributeError, TypeError):  # somebody's own class
        setattr(error, _KNOWN, True)
    return error


def require_live() -> None:
    """Raise ConfigError where there is no default group."""
    if not dist.is_initialized():
        raise ConfigError(
            "DistributedInterface: the process group was destroyed. Construct a new DistributedInterface."
        )


def _default_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None  # as `require_live` has seen
    return group


def _default_store() -> Any:
    """Return the store that the ranks of the default group met in; None for a group that needs none (MPI).

    Source: torch 2.13 distributed_c10d.py, `_get_default_store`.
    """
    return dist.distributed_c10d._get_default_store()  # noqa: SLF001


def _own_client(store: Any) -> Any:
    """Return another client of the same store: each serves one call at a time, and some calls wait long.

    Before torch 2.8 stores have no `clone`. There the store is connected to, or opened, anew. That leaves out the
    prefixes around it, which tell a group from an earlier one in the same store: the ranks agree on one of their own.
    """
    if hasattr(store, "clone"):
        client = store.clone()
    else:
        prefix = store.compare_set("lowmem_load", "", secrets.token_hex(8)).decode()
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        is_file = isinstance(store, dist.FileStore)  # type: ignore[attr-defined]
        client = dist.FileStore(store.path) if is_file else dist.TCPStore(store.host, store.port, is_master=False)  # type: ignore[attr-defined]
        client = dist.PrefixStore(prefix, client)  # type: ignore[attr-defined]
    client.set_timeout(_NEVER)
    return dist.PrefixStore("lowmem_load", client)  # type: ignore[attr-defined]

"""Ranks that work together: each step of theirs succeeds on all of them, or raises on all.

All ranks do the same steps, whatever happens: so a failure of one rank is an error on all, and never a hang. How ranks
learn of each other's failures: `distributed/store_channel.py`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch.distributed as dist

from lowmem_load.distributed.heartbeat import Limits, Progress
from lowmem_load.distributed.live_group import default_group, default_store, new_client, require_live
from lowmem_load.distributed.store_channel import PART, Group, StoppedError, StoreChannel
from lowmem_load.distributed.verdict import Entry, Verdict, verdict_on
from lowmem_load.errors import ConfigError, RankError, spelled
from lowmem_load.io.stand_ins import name_origins

MAX_TEXT = 20_000
"""Characters of an error that are sent to other ranks: megabytes would break the store's connection."""

_KNOWN = "_lowmem_load_known_to_all"
"""Attribute of errors that all ranks know of."""


@dataclass(eq=False, slots=True)
class Step:
    """What this rank brings to a step, and what all ranks have brought."""

    digest: Mapping[str, str] = field(default_factory=dict)  # values that must be equal, by topic ("commit", "files")
    payload: Any = None  # for the other ranks, JSON data
    payloads: list[Any] = field(default_factory=list)  # of all ranks, by rank; there after the block


class RankGroup:
    """The ranks of a group of torch.distributed, which load a model together; of the live default group for None."""

    __slots__ = ("_group",)

    # One for each default group, with which it ends. They are numbered: a later group may get the same store.
    _channels: ClassVar[weakref.WeakKeyDictionary[dist.ProcessGroup, StoreChannel]] = weakref.WeakKeyDictionary()
    _lives: ClassVar[Iterator[int]] = itertools.count()

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
        """Whether this is torch's fake backend."""
        return bool(dist.get_backend(self._group) == "fake")

    @property
    def hears_of_failures(self) -> bool:
        """Whether there are other ranks, so that `check` may raise."""
        return self._channel() is not None

    @contextlib.contextmanager
    def step(
        self,
        title: str,
        *,
        name: str = "",
        progress: Callable[[], Progress] | None = None,
        is_prompt: bool = False,
    ) -> Iterator[Step]:
        """Run the block on every rank; then all ranks go on, or all raise.

        All raise if one rank raised, ended or got stuck, if ranks are at steps of different titles, or if their
        digests differ. An interrupt or exit of this rank stays one, and is a `RankError` on the others. Steps may
        nest. A single rank, or one of torch's fake backend, raises its own error only. Collective.

        Args:
            title: what is done: "planning".
            name: what it is done with, for messages. It may differ between ranks.
            progress: how far the block is; called in another thread. None if that is not known: then this rank has the
                timeout of the process group; see [Note: lost ranks] in `distributed/heartbeat.py`.
            is_prompt: whether ranks have to come within `Limits.silence_s` instead of that timeout, for steps that
                scripts are likely to run on one rank only.

        Raises:
            RankError: names each rank that failed, with its message. It is chained to this rank's own error, if any.
            BaseException: the block's own error, where there is one rank, or all ranks failed alike.
        """
        step, entry, error, channel = Step(), Entry(title, name), None, self._channel()
        with self._doing(entry.full_title, progress):
            try:
                if channel is not None:
                    absence_s = default_store().timeout.total_seconds()
                    channel.limits = Limits.from_environment(absence_s, is_prompt=is_prompt)
                yield step
                text = json.dumps(step.payload)
                if len(text) > PART:
                    raise ValueError(f"the payload has {len(text):,} characters, at most {PART:,} can be sent")
                payload = json.loads(text)
                entry = Entry(title, name, digest=step.digest, payload=payload)
            except RankError:
                raise
            except BaseException as caught:  # also what is no Exception, such as asyncio's CancelledError
                if getattr(caught, _KNOWN, False):  # an inner step has ended with it
                    raise
                error = caught
                name_origins(error)
                entry = Entry(title, name, spelled(error, MAX_TEXT), is_stopped=isinstance(error, StoppedError))
            verdict = self._verdict(channel, entry)
        if error is not None and (
            verdict.is_alike or not verdict.failures or not isinstance(error, Exception | StoppedError)
        ):
            raise _known(error)  # an interrupt stays one, now that the others know of it
        if verdict.failures:
            raise RankError(verdict.title, dict(verdict.failures)) from error
        step.payloads = list(verdict.payloads)

    @contextlib.contextmanager
    def session(self, what: str) -> Iterator[None]:
        """Send heartbeats within the block, also between steps. An error of this rank alone aborts it for all."""
        with self._doing(what):
            try:
                yield
            except RankError:
                raise
            except BaseException as error:
                name_origins(error)
                self.abort(what, error)
                raise

    def abort(self, what: str, error: BaseException) -> None:
        """Tell the other ranks that this one does not come to their next step, unless all know of the error. Local."""
        channel = self._channel() if dist.is_initialized() and not getattr(error, _KNOWN, False) else None
        if channel is not None:
            channel.abort(self._members(channel), f"left {what}: {spelled(error, MAX_TEXT)}")
            _known(error)

    def next_step(self) -> int:
        """Return the number of the group's next step, for `leave`; 0 where there are no other ranks. Local."""
        channel = self._channel()
        return 0 if channel is None else self._members(channel).number

    def leave(self, number: int, title: str, why: str) -> None:
        """Tell the other ranks that this one does not come to step `number`, which has this title. For finalizers.

        Local. Does nothing where the process group or the interpreter is at its end, or other steps have begun.
        """
        with contextlib.suppress(ConfigError):  # of a process that was forked meanwhile
            channel = self._channel() if dist.is_initialized() else None
            if channel is not None:
                channel.leave(self._members(channel), number, title, why)

    def check(self) -> None:
        """Raise StoppedError if another rank has failed, or if the store is silent. Local; takes microseconds."""
        channel = RankGroup._channels.get(default_group())
        if channel is not None:
            channel.check()

    @contextlib.contextmanager
    def _doing(self, what: str, progress: Callable[[], Progress] | None = None) -> Iterator[None]:
        channel = self._channel()
        with contextlib.nullcontext() if channel is None else channel.doing(self._members(channel), what, progress):
            yield

    def _verdict(self, channel: StoreChannel | None, entry: Entry) -> Verdict:
        if channel is None:
            return verdict_on(dict.fromkeys(range(self.world_size), entry))
        try:
            return channel.agree(self._members(channel), entry)
        except BaseException as interrupt:
            _known(interrupt)  # `agree` has told the others
            raise

    def _channel(self) -> StoreChannel | None:
        if self.world_size == 1 or self.is_fake:
            return None
        found = RankGroup._channels.get(default_group())
        if found is None:
            store, life = default_store(), next(RankGroup._lives)
            client = functools.partial(new_client, store, life)
            found = RankGroup._channels[default_group()] = StoreChannel(client, dist.get_rank())
            weakref.finalize(default_group(), found.end)
        if found.pid != os.getpid():
            raise ConfigError(
                "this process was forked from a rank, whose connections it must not use; load in the rank itself, or "
                "start this process by spawn"
            )
        return found

    def _members(self, channel: StoreChannel) -> Group:
        group = self._group or default_group()
        members = tuple(dist.get_process_group_ranks(group))
        return channel.group(hashlib.sha256(f"{group.group_name} {members}".encode()).hexdigest()[:16], members)


def _known(error: BaseException) -> BaseException:
    with contextlib.suppress(AttributeError, TypeError):  # of a class with slots
        setattr(error, _KNOWN, True)
    return error

"""Ranks that work together: each step of theirs succeeds on all of them, or raises on all.

All ranks do the same steps, whatever happens: so a failure of one rank is an error on all, and never a hang. How ranks
learn of each other's failures: `distributed/channel.py`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar

import torch.distributed as dist

from lowmem_load.distributed.channel import Group, StoppedError, StoreChannel, differences, verdict_on
from lowmem_load.distributed.environment import LAUNCHER_NAMES
from lowmem_load.distributed.peers import Entry, Limits, Progress
from lowmem_load.errors import ConfigError, RankError, error_text
from lowmem_load.text import fingerprint

MAX_TEXT = 20_000  # characters of an error that are sent to other ranks
_KNOWN_TO = "_lowmem_load_known_to"  # attribute of errors: the ranks of the world that know of it

_NEVER = timedelta(days=7)
"""Timeout of the store's clients: who uses them finds out for itself that the store is silent."""


def has_group() -> bool:
    """Return whether there is a default group."""
    return dist.is_initialized()


def require_live() -> None:
    """Raise ConfigError if there is no default group, or if it was live when this process was forked."""
    if not dist.is_initialized():
        raise ConfigError(
            "there is no process group: it was destroyed, or not made yet; call torch.distributed.init_process_group "
            "or lowmem_load.DistributedInterface() on every rank before"
        )
    inherited = _Fork.inherited and _Fork.inherited()
    if inherited is not None and inherited is dist.group.WORLD and dist.get_backend() != "fake":
        raise ConfigError(
            f"this process was forked from rank {dist.get_rank()} while its process group was live; the threads that "
            "carry its messages stayed behind, so every exchange would wait for ever. Load in the rank itself, or "
            f"start this process by spawn, with none of {', '.join(LAUNCHER_NAMES)} in its environment."
        )


class _Fork:
    """What a fork left to this process: a group that cannot be used here, as none of its threads is."""

    inherited: ClassVar[weakref.ref[dist.ProcessGroup] | None] = None

    @classmethod
    def note(cls) -> None:
        """Run in every child of a fork."""
        group = dist.group.WORLD if dist.is_initialized() else None
        cls.inherited = None if group is None else weakref.ref(group)


os.register_at_fork(after_in_child=_Fork.note)


def default_group() -> dist.ProcessGroup:
    """Return the default group, which must be live."""
    group = dist.group.WORLD
    assert group is not None  # as `require_live` has seen
    return group


def default_store() -> Any:
    """Return the store of the default group. No other group has its keys: torch's own would not form in them, either.

    Source: torch 2.13 distributed_c10d.py.
    """
    store = dist.distributed_c10d._get_default_store()  # noqa: SLF001
    if store is None:
        raise ConfigError(f"the process group (backend {dist.get_backend()}) has no store; use gloo or nccl")
    return store


def new_client(store: Any) -> Any:
    """Return another client of a store, for another thread."""
    client = store.clone()
    client.set_timeout(_NEVER)
    return dist.PrefixStore("lowmem_load", client)  # type: ignore[attr-defined]


@dataclass(eq=False, slots=True)
class Step:
    """What this rank brings to a step, and what all ranks have brought."""

    digest: Mapping[str, str] = field(default_factory=dict)  # values that must be equal, by topic ("commit", "files")
    payload: Any = None  # for the other ranks, JSON data
    payloads: list[Any] = field(default_factory=list)  # of all ranks, by rank; there after the block


class RankGroup:
    """The ranks of a group of torch.distributed, which load a model together; of the live default group for None."""

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
        """Whether this is torch's fake backend."""
        return bool(dist.get_backend(self._group) == "fake")

    @property
    def timeout_s(self) -> float:
        """How long the group waits for a rank, seconds."""
        return float(default_store().timeout.total_seconds())

    @property
    def world_ranks(self) -> tuple[int, ...]:
        """The ranks in the default group, by rank in this one."""
        return tuple(dist.get_process_group_ranks(self._group or default_group()))

    @contextlib.contextmanager
    def step(
        self,
        title: str,
        *,
        name: str = "",
        progress: Callable[[], Progress] | None = None,
        is_prompt: bool = False,
        loop: str = "",
    ) -> Iterator[Step]:
        """Run the block on every rank; then all ranks go on, or all raise.

        All raise if one rank raised, ended or got stuck, if ranks are at steps of different titles, or if their
        digests differ. An interrupt or exit of this rank stays one, and is a `RankError` on the others. Steps may
        nest. A single rank, or one of torch's fake backend, raises its own error only. Collective.

        Args:
            title: what is done: "planning".
            name: what it is done with, for messages. It may differ between ranks.
            progress: how far the block is; called in another thread. None if that is not known: then this rank has the
                timeout of the process group; see [Note: lost ranks] in `distributed/peers.py`.
            is_prompt: whether ranks have to come within `Limits.silence_s` instead of that timeout, for steps that
                scripts are likely to run on one rank only.
            loop: the step fails if a rank has left this loop; see `new_loop`.

        Raises:
            RankError: names each rank that failed, with its message. It is chained to this rank's own error, if any.
            BaseException: the block's own error, where there is one rank, or all ranks failed alike.
        """
        full_title = f"{name}: {title}" if name else title
        step, entry, payload, error = Step(), Entry(title, loop=loop), "", None
        with self._doing(full_title, progress) as channel:
            try:
                if channel is not None:  # an error of this rank's variables is one of all ranks
                    channel.limits = Limits.from_environment(self.timeout_s, is_prompt=is_prompt)
                yield step
                payload = "" if step.payload is None else json.dumps(step.payload)
                if step.digest:
                    entry = entry._replace(digest=fingerprint([json.dumps(step.digest, sort_keys=True)]))
            except BaseException as caught:  # also what is no Exception, such as asyncio's CancelledError
                if self._all_know(caught):  # an inner step has ended with it, on all ranks of this one
                    raise
                error = caught
                entry = entry._replace(error=error_text(error, MAX_TEXT), is_stopped=isinstance(error, StoppedError))
            if channel is None:
                verdict, texts = verdict_on({self.rank: entry}), [payload] * self.world_size
            else:
                try:
                    verdict, texts = channel.agree(self._members(channel), entry, payload)
                    if verdict.differs:  # now all ranks tell their topics
                        told = json.dumps(dict(step.digest))
                        verdict, texts = channel.agree(self._members(channel), Entry(title), told)
                        if not verdict.failures:
                            verdict = verdict._replace(failures=_differing(self.world_ranks, texts))
                except BaseException as interrupt:
                    self.abort(full_title, interrupt)
                    raise
        # An interrupt stays one, now that the others know of it.
        if error is not None and (verdict.is_alike or not isinstance(error, Exception | StoppedError)):
            raise self._note_known(error)
        if verdict.failures:
            raise self._note_known(RankError(verdict.title or full_title, dict(verdict.failures))) from error
        step.payloads = [json.loads(text or "null") for text in texts]

    @contextlib.contextmanager
    def session(self, what: str) -> Iterator[None]:
        """Send heartbeats within the block, also between steps. An error of this rank alone aborts it for all."""
        with self._doing(what):
            try:
                yield
            except BaseException as error:
                self.abort(what, error)
                raise

    def abort(self, what: str, error: BaseException) -> None:
        """Tell the other ranks that this one does not come to their next step, unless all know of the error. Local."""
        channel = self._channel() if dist.is_initialized() else None
        if channel is not None and not self._all_know(error):
            channel.abort(self._members(channel), f"left {what}: {error_text(error, MAX_TEXT)}")
            self._note_known(error)

    def new_loop(self) -> str:
        """Return a name for steps from the next one on that each rank may leave at any time. The same on all ranks."""
        channel = self._channel()
        members = None if channel is None else self._members(channel)
        return "" if members is None else f"{members.name}/{members.number}"

    def leave(self, loop: str, why: str) -> None:
        """Tell the other ranks that this one comes to no further step of a loop. Local, and takes no lock."""
        channel = RankGroup._channels.get(default_group()) if loop and dist.is_initialized() else None
        if channel is not None:
            channel.leave(loop, why)

    def check(self) -> None:
        """Raise StoppedError if another rank has failed, or if the store is silent. Local; takes microseconds."""
        channel = RankGroup._channels.get(default_group())
        if channel is not None:
            channel.check()

    @contextlib.contextmanager
    def _doing(self, what: str, progress: Callable[[], Progress] | None = None) -> Iterator[StoreChannel | None]:
        channel = self._channel()
        with contextlib.nullcontext() if channel is None else channel.doing(self._members(channel), what, progress):
            yield channel

    def _channel(self) -> StoreChannel | None:
        if self.world_size == 1 or self.is_fake:
            return None
        channel = RankGroup._channels.get(default_group())
        if channel is None:
            channel = StoreChannel(functools.partial(new_client, default_store()), dist.get_rank())
            RankGroup._channels[default_group()] = channel
            weakref.finalize(default_group(), channel.end)
        return channel

    def _members(self, channel: StoreChannel) -> Group:
        group, members = self._group or default_group(), self.world_ranks
        return channel.group(hashlib.sha256(f"{group.group_name} {members}".encode()).hexdigest()[:16], members)

    def _all_know(self, error: BaseException) -> bool:
        return getattr(error, _KNOWN_TO, frozenset()).issuperset(self.world_ranks)

    def _note_known(self, error: BaseException) -> BaseException:
        """Note that all ranks of the group know of an error; return it."""
        with contextlib.suppress(AttributeError, TypeError):  # of a class with slots
            setattr(error, _KNOWN_TO, getattr(error, _KNOWN_TO, frozenset()).union(self.world_ranks))
        return error


class Alone(RankGroup):
    """This process, where there is no group of torch.distributed: it agrees with itself."""

    __slots__ = ()

    rank, world_size, world_ranks = 0, 1, (0,)

    def __init__(self) -> None:
        super().__init__(None)

    @property
    def is_fake(self) -> bool:
        """There is no backend."""
        return False

    def check(self) -> None:
        """There is no other rank that could have failed."""

    def _channel(self) -> None:
        return None


def _differing(ranks: Sequence[int], texts: Sequence[str]) -> Sequence[tuple[int, str]]:
    """Return, of ranks whose values are not those of most, which topics differ; `texts` are the digests of all."""
    digests = {rank: json.loads(text) for rank, text in zip(ranks, texts, strict=True)}
    found = defaultdict[int, list[str]](list)
    for topic in dict.fromkeys(topic for digest in digests.values() for topic in digest):
        values = {rank: digest.get(topic, "none") for rank, digest in digests.items()}
        for rank, text in differences(f"holds {topic}", "hold", values).items():
            found[rank].append(text)
    return [(rank, "; ".join(found[rank])) for rank in sorted(found)]

"""Ranks that work together: each of their steps succeeds on all of them, or raises the same error on all.

[Note: agreement] Ranks agree by torch's rendezvous store, because a collective cannot say who is late.
- All ranks of a group do the same steps, which they number. A rank's heartbeat, a key that a thread writes once a
  second, says what it does, and in which step. When it has done its part, with or without an error, it adds its entry
  and waits.
- A step ends with its verdict, another key. compare_set writes it, so the first one counts. The leader, the group's
  first rank, writes it when it has read the entries of all. A rank that gives up another one or itself, or does not
  come to the step, writes that instead. Then all go on to the next number, so a load that failed may be tried again.
- The leader watches the heartbeats of all ranks, and the others that of the leader; `distributed/peers.py` says who is
  lost. All look for the verdict, and for a key which says that a rank has failed: then busy ranks stop.
- Values that must be equal go into one digest. If digests differ, ranks tell each value, in a second step.
- A step of some ranks may lie within one of more ranks. If the outer one fails, so does the inner one, because a rank
  may wait there for the one that failed.
- A loop of steps that each rank may leave at any time, even when the garbage collector runs, is a group of its own. A
  rank that leaves it writes the verdict on its next step, to which others may come.
"""

from __future__ import annotations

import contextlib
import functools
import json
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch.distributed as dist

from lowmem_load.distributed.channel import Group, Place, StoppedError, StoreChannel, new_client
from lowmem_load.distributed.environment import default_group, default_store, require_live
from lowmem_load.distributed.peers import Entry, Limits, Verdict, differences, verdict_on
from lowmem_load.errors import RankError, error_text
from lowmem_load.phases import Progress
from lowmem_load.text import fingerprint

MAX_TEXT = 20_000  # characters of an error that are sent to other ranks
_KNOWN_TO = "_lowmem_load_known_to"  # attribute of errors: the ranks of the world that know of it


@dataclass(eq=False, slots=True)
class Step:
    """The values that this rank brings to a step, and those that all ranks have brought."""

    digest: Mapping[str, str] = field(default_factory=dict)  # values that must be equal, by topic ("commit", "files")
    payload: Any = None  # for the other ranks, JSON data
    payloads: list[Any] = field(default_factory=list)  # of all ranks, by rank; there after the block


class RankGroup:
    """The ranks of a group of torch.distributed, which load a model together; of the live default group for None."""

    __slots__ = ("_loop", "group")

    # One for each default group, with which it ends.
    _channels: ClassVar[weakref.WeakKeyDictionary[dist.ProcessGroup, StoreChannel]] = weakref.WeakKeyDictionary()

    def __init__(self, group: dist.ProcessGroup | None, loop: Group | None = None) -> None:
        self.group, self._loop = group, loop

    @property
    def rank(self) -> int:
        """Rank of this process in the group."""
        require_live()
        return dist.get_rank(self.group)

    @property
    def world_size(self) -> int:
        """Number of ranks in the group."""
        require_live()
        return dist.get_world_size(self.group)

    @property
    def is_fake(self) -> bool:
        """Whether this is torch's fake backend."""
        return bool(dist.get_backend(self.group) == "fake")

    @property
    def world_ranks(self) -> tuple[int, ...]:
        """The ranks in the default group, by rank in this one."""
        return tuple(dist.get_process_group_ranks(self.group or default_group()))

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
                timeout of the process group; see [Note: lost ranks] in `distributed/peers.py`.
            is_prompt: whether ranks have to come within `Limits.silence_s` instead of that timeout, for steps that
                scripts are likely to run on one rank only.

        Raises:
            RankError: names each rank that failed, with its message. It is chained to this rank's own error, if any.
            BaseException: the block's own error, where there is one rank, or all ranks failed alike.
        """
        full_title = f"{name}: {title}" if name else title
        step, entry, error = Step(), Entry(title), None
        with self.session(full_title, progress):
            try:
                if group := self._joined():  # an error of this rank's variables is one of all ranks
                    timeout_s = default_store().timeout.total_seconds()
                    group.channel.limits = Limits.from_environment(timeout_s, is_prompt=is_prompt)
                yield step
                digest = fingerprint([json.dumps(step.digest, sort_keys=True)]) if step.digest else ""
                payload = "" if step.payload is None else json.dumps(step.payload)
                entry = entry._replace(digest=digest, payload=payload)
            except BaseException as caught:  # also what is no Exception, such as asyncio's CancelledError
                if self._all_know(caught):  # an inner step has ended with it, on all ranks of this one
                    raise
                error = caught
                entry = entry._replace(error="" if isinstance(error, StoppedError) else error_text(error, MAX_TEXT))
            verdict = self._agree(entry)
            if verdict.differs:
                verdict = self._agree(Entry(title, payload=json.dumps(dict(step.digest))))
                failures = verdict.failures or _differing(self.world_ranks, verdict.payloads)
                verdict = verdict._replace(failures=failures)
        # An interrupt stays one, now that the others know of it.
        if error is not None and (verdict.is_alike or not isinstance(error, Exception | StoppedError)):
            raise self._note_known(error)
        if verdict.failures:
            raise self._note_known(RankError(verdict.title or full_title, dict(verdict.failures))) from error
        step.payloads = [json.loads(text or "null") for text in verdict.payloads]

    @contextlib.contextmanager
    def session(self, what: str, progress: Callable[[], Progress] | None = None) -> Iterator[None]:
        """Send heartbeats within the block, also between steps. An error of this rank alone aborts it for all."""
        with self._doing(what, progress):
            try:
                yield
            except BaseException as error:
                self.abort(what, error)
                raise

    def abort(self, what: str, error: BaseException) -> None:
        """Tell the other ranks that this one does not come to their next step, unless all know of the error. Local."""
        if dist.is_initialized() and self._joined() and not self._all_know(error):
            with self._doing("leaving"):
                while not self._agree(Entry("", f"left {what}: {error_text(error, MAX_TEXT)}")).failures:
                    pass  # that step ended well before this rank could say it
            self._note_known(error)

    def loop(self) -> RankGroup:
        """Return the ranks for steps that each of them may leave at any time. Call on all of them."""
        if (group := self._joined()) is None:
            return self
        group.num_loops += 1
        name = f"{group.key}.{group.num_loops}"
        return RankGroup(self.group, Group(group.channel, name, group.members, read=group.read))

    def leave(self, why: str) -> None:
        """Tell the other ranks that this one comes to no further step of this loop. Local, and takes no lock."""
        if self._loop is not None:
            self._loop.channel.leave(self._loop, why)

    @property
    def next_step(self) -> str:
        """A name for the next step that no other has. The same on all ranks."""
        group = self._joined()
        return "" if group is None else group.key

    def check(self) -> None:
        """Raise StoppedError if another rank has failed, or if the store is silent. Local; takes microseconds."""
        if dist.is_initialized() and (channel := RankGroup._channels.get(default_group())):
            channel.check()

    @contextlib.contextmanager
    def _doing(self, title: str, progress: Callable[[], Progress] | None = None) -> Iterator[None]:
        """Send heartbeats within the block, with its title and progress. Blocks nest."""
        if (group := self._joined()) is None:
            yield
            return
        channel, outer = group.channel, group.channel.place
        try:
            channel.place = Place(group, title, progress and weakref.ref(progress), outer)
            if not outer.title:
                channel.wait()  # should this rank end at once, the others know that it had come
            yield
        finally:
            channel.place = replace(outer, entry=None) if outer.title else Place(group)
            if not outer.title:
                channel.wait()

    def _agree(self, entry: Entry) -> Verdict:
        """Bring an entry to the next step; return the verdict. Within `_doing`.

        An entry without a title fails the step, unless that is over, and waits for nobody.
        """
        if (group := self._joined()) is None:
            return verdict_on({self.rank: entry})._replace(payloads=[entry.payload] * self.world_size)
        channel = group.channel
        channel.place = replace(channel.place, entry=entry)
        verdict = channel.wait() or Verdict([(0, channel.broken)])
        if not channel.broken:
            group.number, group.num_loops = group.number + 1, 0
        return verdict

    def _joined(self) -> Group | None:
        """Return these ranks as the channel of this one knows them; None for a single rank, or a fake backend."""
        if self._loop is not None or self.world_size == 1 or self.is_fake:
            return self._loop
        live = default_group()
        channel = self._channels.get(live)
        if channel is None:
            channel = RankGroup._channels[live] = StoreChannel(
                functools.partial(new_client, default_store()), dist.get_rank()
            )
            weakref.finalize(live, channel.end)
        name = fingerprint([(self.group or live).group_name, str(self.world_ranks)])
        return channel.groups.setdefault(name, Group(channel, name, self.world_ranks))

    def _all_know(self, error: BaseException) -> bool:
        return getattr(error, _KNOWN_TO, frozenset()).issuperset(self.world_ranks)

    def _note_known(self, error: BaseException) -> BaseException:
        """Note that all ranks of the group know of an error, unless one may have left them; return it."""
        if self._loop is None:
            with contextlib.suppress(AttributeError, TypeError):  # of a class with slots
                setattr(error, _KNOWN_TO, getattr(error, _KNOWN_TO, frozenset()).union(self.world_ranks))
        return error


class Alone(RankGroup):
    """This process where there is no group of torch.distributed. It agrees with itself."""

    __slots__ = ()

    rank, world_size, world_ranks, is_fake = 0, 1, (0,), False

    def __init__(self) -> None:
        super().__init__(None)


def _differing(ranks: Sequence[int], texts: Sequence[str]) -> Sequence[tuple[int, str]]:
    """Return, of ranks whose values are not those of most, which topics differ; `texts` are the digests of all."""
    digests = {rank: json.loads(text) for rank, text in zip(ranks, texts, strict=True)}
    found = defaultdict[int, list[str]](list)
    for topic in dict.fromkeys(topic for digest in digests.values() for topic in digest):
        values = {rank: digest.get(topic, "none") for rank, digest in digests.items()}
        for rank, text in differences(f"has {topic}", "have", values).items():
            found[rank].append(text)
    return [(rank, "; ".join(found[rank])) for rank in sorted(found)]

"""Small objects among the ranks of one group, and agreement: either all of them go on, or all raise.

Which exchanges take place depends only on what all ranks know, so that a failure of one is an error on all and never a
hang. A rank that ends, gets stuck or goes away is named by the others; see `ranks/line.py`.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import os
import pickle
import re
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any, ClassVar, Generic, TypeVar

import torch.distributed as dist

from lowmem_load.errors import ConfigError, RankError, spelled
from lowmem_load.ranks.exchanges import LostError
from lowmem_load.ranks.life import SILENCE, Limits, Progress
from lowmem_load.ranks.line import SIGN_EVERY_S, Line

T = TypeVar("T")


MAX_TEXT = 20_000
"""Characters of an error that other ranks hear: a message of many megabytes would break the store's connection."""

_EXCHANGING = "exchanging objects"
_TOLD = "_lowmem_load_told"
"""Attribute of errors that all ranks know of."""


class StoppedError(BaseException):
    """Ends a step of this rank because another rank has failed; what that was, the agreement at its end says."""


class Aside(Generic[T]):
    """What ranks tell each other by the way, in an agreement that takes place anyhow: an exchange takes a millisecond.

    Attributes:
        said: by this rank; set by the end of the block of `agreed`.
        heard: what each rank has said, by rank; there once all have agreed.
    """

    __slots__ = ("heard", "said")

    said: T
    heard: list[T]


class RankGroup:
    """The ranks that load a model together.

    Args:
        group: of torch.distributed; None for the default group, whichever is live.
    """

    __slots__ = ("_group",)

    # A line belongs to a group of torch.distributed and ends with it; numbers of exchanges are counted in it.
    _lines: ClassVar[weakref.WeakKeyDictionary[dist.ProcessGroup, Line]] = weakref.WeakKeyDictionary()
    _leaves: ClassVar[dict[str, int]] = {}  # see Line

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

    def all_gather_object(self, obj: T) -> list[T]:
        """Returns every rank's object, by rank. Collective.

        On the fake backend, whose collectives return garbage, every rank counts as a copy of this one.

        Raises:
            RankError: A rank is not waited for any longer.
        """
        return self._exchange(_EXCHANGING, obj)

    def broadcast_object(self, obj: T, src: int = 0) -> T:
        """Returns rank `src`'s object. Collective. On the fake backend: this rank's own."""
        if self._is_alone:
            return obj
        contents: list[Any] = self._exchange(_EXCHANGING, obj if self.rank == src else None)
        received: T = contents[src]
        return received

    def agree(
        self,
        step: str,
        error: BaseException | None,
        digest: str | None = None,
        *,
        name: str = "",
        aside: Aside[T] | None = None,
    ) -> None:
        """Returns if no rank has an error, and all are at the same step with the same digest; else raises, on all.

        Collective:
            Exactly one exchange, whatever happens; none on a single rank or on the fake backend, where only the own
            error counts.

        Args:
            step: What was done: "planning".
            error: What went wrong on this rank, if something did.
            digest: Fingerprint of what must be equal on all ranks.
            name: Of what it was done with, for the message. It may differ between ranks.
            aside: What is told by the way. On a rank with an error nothing need have been said.

        Raises:
            RankError: Some rank failed or is lost, or digests differ. It is chained to this rank's own error, if any.
            BaseException: `error` itself, where there is one rank, or all ranks failed alike: nothing is learnt from
                a wrapper then.
        """
        if self._is_alone:
            if error is not None:
                raise error
            if aside is not None:
                aside.heard = [aside.said] * self.world_size
            return
        title = f"{name}: {step}" if name else step
        message = None if error is None else spelled(error, MAX_TEXT)
        said = None if aside is None or error is not None else aside.said
        found: list[Any] = self._exchange(step, (message, isinstance(error, StoppedError), digest, said), title)
        statuses = [status for *status, _ in found]  # error, whether it is another's, digest
        failed = {rank: text for rank, (text, _, _) in self._by_rank(statuses).items() if text is not None}
        if error is not None and len(failed) == len(statuses) and len(set(map(_comparable, failed.values()))) == 1:
            raise _told(error)
        followers = {rank for rank, (_, is_stopped, _) in self._by_rank(statuses).items() if is_stopped}
        failures = {rank: text for rank, text in failed.items() if rank not in followers} or failed
        failures = failures or _minorities(self._by_rank(held for *_, held in statuses), "holds digest {}", "hold {}")
        if failures:
            raise RankError(title, failures) from error
        if aside is not None:
            aside.heard = [theirs for *_, theirs in found]

    @contextlib.contextmanager
    def agreed(
        self,
        step: str,
        *,
        name: str = "",
        progress: Callable[[], Progress] | None = None,
        aside: Aside[T] | None = None,
    ) -> Iterator[list[str]]:
        """Runs the block on every rank, then lets all ranks go on or raises on all of them, as `agree` does.

        The block may append one digest to the list that it is given. Blocks may nest. An interrupt or exit of this rank
        stays one; to the other ranks it is a `RankError`.

        Args:
            step: See `agree`.
            name: See `agree`.
            progress: Says how far the block is; asked by another thread. Where it says the same for longer than
                `Limits.silence_s`, the other ranks give this one up. None: nothing is known of that, so it gets the
                timeout of the process group; see [Note: gone or silent] in `ranks/life.py`.
            aside: See `agree`; something is said in it by the end of the block.
        """
        digest: list[str] = []
        error: BaseException | None = None
        with self._doing(f"{name}: {step}" if name else step, progress):
            try:
                self._set_limits()
                yield digest
            except RankError:
                raise
            except (Exception, KeyboardInterrupt, SystemExit, StoppedError) as caught:
                if getattr(caught, _TOLD, False):  # an inner block has agreed on it
                    raise
                error = caught
                line = self._line()
                if line is not None and not isinstance(error, StoppedError):
                    line.warn(spelled(error, MAX_TEXT))
            try:
                self.agree(step, error, digest[0] if digest and error is None else None, name=name, aside=aside)
            except RankError:
                if error is None or isinstance(error, Exception | StoppedError):
                    raise
        if error is not None:  # an interrupt of this rank stays one, now that the others have heard of it
            raise _told(error)

    def all_come(self, step: str, demand: str) -> None:
        """Return once all ranks have come to a step that scripts are likely to run on one rank only. Collective.

        Args:
            step: what they come to.
            demand: what scripts have to do, for the message.

        Raises:
            RankError: a rank is elsewhere, or has not come within `Limits.silence_s`.
        """
        line = None if self._is_alone else self._line()
        if line is None:
            return
        self._set_limits()
        absence = f"{SILENCE}; {demand}"
        line.limits = replace(line.limits, absence_s=line.limits.silence_s, absence=absence)
        self._exchange(step, None)

    @contextlib.contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Inside, the ranks come to the same exchanges; one that leaves by an error of its own tells the others.

        They hear of it in the exchange that they come to next, or wait in. Errors that all ranks have agreed on are
        no news.

        Args:
            what: is left, for the message: "load_model".
        """
        with self._doing(what, None):
            try:
                yield
            except RankError:
                raise
            except BaseException as error:
                self.leave(what, error)
                raise

    def leave(self, what: str, error: BaseException, *, any_group: bool = False) -> None:
        """Tell the other ranks that this one does not come to their next exchange. Local.

        Args:
            what: is left, for the message: "streaming()".
            error: by which; nothing is told of one that all ranks have agreed on.
            any_group: whether the group of these exchanges is not known.
        """
        if not dist.is_initialized() or self._is_alone or getattr(error, _TOLD, False):
            return
        line = self._line()
        if line is not None:
            line.leave(f"left {what}: {spelled(error, MAX_TEXT)}", any_line=any_group)

    def stop_if_troubled(self) -> None:
        """Raise StoppedError if this rank has heard that another one has failed. Local; takes microseconds."""
        _stop_if_troubled(RankGroup._lines.get(self._key()))

    def stopper(self) -> Callable[[], None]:
        """Return what does the same as `stop_if_troubled` in less time, for thousands of calls. Of use in `agreed`."""
        return functools.partial(_stop_if_troubled, RankGroup._lines.get(self._key()))

    def watch(self) -> Callable[[], None]:
        """Return what to call now and then while this rank waits for others by means of its own, as in shared memory.

        It raises StoppedError if this rank has heard that another one has failed, or if the store by which it would
        hear has not answered for `Limits.gone_s`: its process may be the one that is waited for. Local.
        """
        line = None if self._is_alone else self._line()
        signs, since, silence_s = -1, time.monotonic(), 0.0

        def check() -> None:
            nonlocal signs, since, silence_s
            _stop_if_troubled(line)
            now = time.monotonic()
            if line is None or now - since < SIGN_EVERY_S:
                return
            # Counted, not measured, as in `Line.exchange`.
            silence_s = 0.0 if line.num_signs != signs else silence_s + SIGN_EVERY_S
            signs, since = line.num_signs, now
            line.silence_s = silence_s  # the exchange that follows need not wait as long again
            if silence_s > line.limits.gone_s:
                raise StoppedError(f"stopped because the store has not answered for {line.limits.gone_s:g} s")

        return check

    @property
    def hears_of_trouble(self) -> bool:
        """Whether this rank learns of others' failures while it waits for them by other means than exchanges."""
        return not self._is_alone and self._line() is not None

    @property
    def _is_alone(self) -> bool:
        return self.world_size == 1 or self.is_fake

    def _key(self) -> dist.ProcessGroup:
        group = self._group or dist.group.WORLD
        assert group is not None  # require_live
        return group

    def _line(self) -> Line | None:
        """Returns the line to the other ranks; None where torch.distributed has no store (MPI)."""
        key = self._key()
        if key in RankGroup._lines and RankGroup._lines[key].pid != os.getpid():
            raise ConfigError(
                "this process was forked from a rank, whose connections it must not use; load in the rank itself, or "
                "start this process by spawn"
            )
        if key not in RankGroup._lines:
            store = _default_store()
            if store is None:
                return None
            members = dist.get_process_group_ranks(key)
            name = hashlib.sha256(f"{key.group_name} {members}".encode()).hexdigest()[:16]
            prefixed = dist.PrefixStore("lowmem_load", _own_client(store))  # type: ignore[attr-defined]
            RankGroup._lines[key] = Line(prefixed, name, members, self.rank, RankGroup._leaves)
            with contextlib.suppress(ConfigError):  # which the first agreement raises on all ranks
                self._set_limits()
        return RankGroup._lines[key]

    def _set_limits(self) -> None:
        line = None if self._is_alone else self._line()
        if line is not None:
            timeout: timedelta = _default_store().timeout
            line.limits = Limits.from_environment(absence_s=timeout.total_seconds())

    @contextlib.contextmanager
    def _doing(self, what: str, progress: Callable[[], Progress] | None) -> Iterator[None]:
        line = None if self._is_alone else self._line()
        with contextlib.nullcontext() if line is None else line.doing(what, progress):
            yield

    def _exchange(self, step: str, obj: T, title: str | None = None) -> list[T]:
        """Returns every rank's object. Raises RankError if some are lost, or come to another step."""
        if self._is_alone:
            return [obj] * self.world_size
        line = self._line()
        if line is None:
            gathered: list[Any] = [None] * self.world_size
            dist.all_gather_object(gathered, (step, obj), group=self._group)
        else:
            try:
                with line.doing(step):
                    texts = line.exchange(base64.b64encode(pickle.dumps((step, obj))).decode())
                # Of our own ranks, as with torch's collectives of objects.
                gathered = [pickle.loads(base64.b64decode(text)) for text in texts]
            except LostError as error:
                raise RankError(title or step, error.ranks) from None
        elsewhere = _minorities(self._by_rank(at for at, _ in gathered), "is at {!r}", "are at {!r}")
        if elsewhere:
            raise RankError(title or step, elsewhere)
        return [held for _, held in gathered]

    def _by_rank(self, held: Iterable[T]) -> dict[int, T]:
        return {self._in_world(rank): one for rank, one in enumerate(held)}

    def _in_world(self, rank: int) -> int:
        """Returns the rank in the default group of a rank of this one."""
        return rank if self._group is None else dist.get_global_rank(self._group, rank)


def _stop_if_troubled(line: Line | None) -> None:
    if line is not None and line.trouble:
        raise StoppedError(f"stopped because of rank(s) {spell_ranks(sorted(line.trouble))}")


def require_live() -> None:
    """Raises ConfigError where there is no default group."""
    if not dist.is_initialized():
        raise ConfigError(
            "DistributedInterface: the process group was destroyed. Construct a new DistributedInterface."
        )


def _told(error: BaseException) -> BaseException:
    """Marks an error of which all ranks know."""
    with contextlib.suppress(AttributeError, TypeError):  # somebody's own class
        setattr(error, _TOLD, True)
    return error


def _default_store() -> Any:
    """Returns the store that the ranks of the default group met in; None for a group that needs none (MPI).

    Source: torch 2.13 distributed_c10d.py, `_get_default_store`.
    """
    return dist.distributed_c10d._get_default_store()  # noqa: SLF001


_OF_ONE_PROCESS = re.compile(r"\b0x[0-9a-fA-F]+|(?<=[a-z]:)[0-9]+")
"""What differs between ranks in the text of one and the same error: addresses, and the indices of devices (cuda:1)."""


def _comparable(text: str) -> str:
    return _OF_ONE_PROCESS.sub("#", text)


def _minorities(held: Mapping[int, Any], this: str, others: str) -> dict[int, str]:
    """A message for each rank that does not hold what most do (of equals: what the lowest rank does)."""
    usual = Counter(held.values()).most_common(1)[0][0]
    holders = spell_ranks([rank for rank, one in held.items() if one == usual])
    return {
        rank: f"{this.format(one)}, where rank(s) {holders} {others.format(usual)}"
        for rank, one in held.items()
        if one != usual
    }


def _own_client(store: Any) -> Any:
    """Returns another client of the same store: each serves one call at a time, and some calls wait long.

    Before torch 2.8 stores have no `clone`. There a TCPStore is connected to anew, without the prefixes around it,
    which sessions make up for; another kind (FileStore) is shared.
    """
    if hasattr(store, "clone"):
        return store.clone()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):  # type: ignore[attr-defined]
        return dist.TCPStore(store.host, store.port, is_master=False, timeout=store.timeout)  # type: ignore[attr-defined]
    return store


def spell_ranks(ranks: list[int]) -> str:
    """Ascending ranks with runs shortened: [0, 1, 2, 5] is `0-2, 5`."""
    runs: list[tuple[int, int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)

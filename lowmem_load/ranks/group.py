"""Small objects among the ranks of one group, and agreement: either all of them go on, or all raise.

Which collectives run depends only on what all ranks know, so that a failure of one is an error on all and never a hang.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any, TypeVar

import torch.distributed as dist

from lowmem_load.errors import ConfigError, RankError

T = TypeVar("T")


class RankGroup:
    """The ranks that load a model together.

    Args:
        group: of torch.distributed; None for the default group, whichever is live.
    """

    __slots__ = ("_group",)

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
        """
        if self.world_size == 1 or self.is_fake:
            return [obj] * self.world_size
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, obj, group=self._group)
        return gathered

    def broadcast_object(self, obj: T, src: int = 0) -> T:
        """Returns rank `src`'s object. Collective. On the fake backend: this rank's own."""
        if self.world_size == 1 or self.is_fake:
            return obj
        holder: list[Any] = [obj]
        dist.broadcast_object_list(holder, src=self._in_world(src), group=self._group)
        received: T = holder[0]
        return received

    def agree(self, step: str, error: BaseException | None, digest: str | None = None) -> None:
        """Returns if no rank has an error and all have the same digest; else raises, on every rank.

        Collective:
            Exactly one, whatever happens; none on a single rank or on the fake backend, where only the own error
            counts.

        Args:
            step: What was done, for the message: "planning".
            error: What went wrong on this rank, if something did.
            digest: Fingerprint of what must be equal on all ranks.

        Raises:
            RankError: Some rank failed, or digests differ. It is chained to this rank's own error, if any.
            BaseException: `error` itself, where there is one rank, or all ranks failed alike: nothing is learnt from
                a wrapper then.
        """
        if self.world_size == 1 or self.is_fake:
            if error is not None:
                raise error
            return
        message = None if error is None else _spelled(error)
        statuses = self.all_gather_object((message, digest))
        failures = {self._in_world(rank): failed for rank, (failed, _) in enumerate(statuses) if failed is not None}
        if error is not None and len(failures) == len(statuses) and len(set(failures.values())) == 1:
            raise error
        failures = failures or _minorities({self._in_world(rank): held for rank, (_, held) in enumerate(statuses)})
        if failures:
            raise RankError(step, failures) from error

    @contextlib.contextmanager
    def agreed(self, step: str) -> Iterator[list[str]]:
        """Runs the block on every rank, then lets all ranks go on or raises on all of them, as `agree` does.

        The block may append one digest to the list that it is given. Blocks may nest. An interrupt or exit of this rank
        stays one; to the other ranks it is a `RankError`.
        """
        digest: list[str] = []
        error: BaseException | None = None
        try:
            yield digest
        except RankError:  # an inner block has agreed on it
            raise
        except (Exception, KeyboardInterrupt, SystemExit) as caught:  # noqa: BLE001  all ranks must hear of it
            error = caught
        try:
            self.agree(step, error, digest[0] if digest and error is None else None)
        except RankError:
            if error is None or isinstance(error, Exception):
                raise
        if error is not None:  # an interrupt of this rank stays one, now that the others have heard of it
            raise error

    def _in_world(self, rank: int) -> int:
        """Returns the rank in the default group of a rank of this one."""
        return rank if self._group is None else dist.get_global_rank(self._group, rank)


def require_live() -> None:
    """Raises ConfigError where there is no default group."""
    if not dist.is_initialized():
        raise ConfigError(
            "DistributedInterface: the process group was destroyed. Construct a new DistributedInterface."
        )


def _spelled(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001  somebody's own class, whose text must not keep the ranks from hearing of it
        return f"{type(error).__name__} (its text cannot be had)"


def _minorities(digests: dict[int, str | None]) -> dict[int, str]:
    """A message for each rank whose digest is not the most frequent one (of equals: the lowest rank's)."""
    usual = Counter(digests.values()).most_common(1)[0][0]
    holders = spell_ranks([rank for rank, digest in digests.items() if digest == usual])
    return {
        rank: f"holds digest {digest}, where rank(s) {holders} hold {usual}"
        for rank, digest in digests.items()
        if digest != usual
    }


def spell_ranks(ranks: list[int]) -> str:
    """Ascending ranks with runs shortened: [0, 1, 2, 5] is `0-2, 5`."""
    runs: list[tuple[int, int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)

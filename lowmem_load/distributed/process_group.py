"""The process group and the device of each rank: `DistributedInterface` alone makes, adopts and destroys the group.

With two owners `init_process_group` is called twice, and the second call fails; or there are two groups of different
sizes, and ZeRO-3 takes the wrong one.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import socket
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist

from lowmem_load.distributed import environment
from lowmem_load.distributed.channel import new_client, peek
from lowmem_load.distributed.environment import require_live
from lowmem_load.distributed.peers import Entry, Heartbeat, Limits, verdict_on
from lowmem_load.distributed.steps import MAX_TEXT, RankGroup
from lowmem_load.errors import ConfigError, LowMemLoadError, RankError, error_text

if TYPE_CHECKING:
    # torch.distributed has it too, but does not export it to type checkers.
    from torch._C._distributed_c10d import Store

_LOOK_S = 0.01  # between looks of a rank that waits for others


class _Record(NamedTuple):
    """This module's part in one group. It is stale once that group is no longer the live one."""

    group: weakref.ref[dist.ProcessGroup]  # weak, as sockets and device memory end with the group
    made: bool  # False if it was adopted
    env_set: dict[str, str]  # environment variables to remove with the group


class _Meeting(NamedTuple):
    """The store that the ranks of a launcher meet in; it outlives the groups.

    A group made after `destroy` must not meet in a new store. The first rank to come back would reach rank 0's old
    store just before it ends, or, under torchrun, whose agent keeps one store for all, read the addresses of the old
    group. Either way all ranks hang. So the store is kept, and each group has a prefix of its own in it.
    """

    address: tuple[str, ...]  # values of LAUNCHER_NAMES without LOCAL_RANK
    store: Store


def _agree_on_nonce(store: Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """Choose the device of each rank; return the nonce of the new group: the prefix of all its keys. Collective.

    [Note: nonce] The store has what earlier groups wrote, of which each rank may have made another number. So each rank
    draws a token, and writes it with the error of its device. Rank 0, whose token is the nonce, answers with what all
    have written, again and again until each rank has found its own token there. Older texts have other tokens.

    Raises:
        RankError: a rank does not see its device, or has not come; the same on every rank.
    """
    title, client, token = "making the process group", new_client(store), secrets.token_hex(8)
    error: Exception | None = None
    try:
        choose_device()
    except Exception as caught:  # noqa: BLE001  also of a driver: the others must hear of it
        error = caught
    mine = json.dumps([token, error and error_text(error, MAX_TEXT)])
    until_s, written = time.monotonic() + timeout.total_seconds(), [""] * world_size
    try:
        client.set(f"newcomer/{rank}", mine)
        while True:
            if rank:
                written = json.loads(peek(client, "newcomers") or "[]")
                absent = [other for other, text in enumerate(written) if not text] if mine in written else [0]
            else:
                written = [peek(client, f"newcomer/{other}").decode() or before for other, before in enumerate(written)]
                client.set("newcomers", json.dumps(written))
                absent = [other for other in range(1, world_size) if peek(client, f"met/{other}") != token.encode()]
            if not absent:
                break
            if time.monotonic() > until_s:
                raise RankError(title, dict.fromkeys(absent, Limits(absence_s=timeout.total_seconds()).absence))
            time.sleep(_LOOK_S)
        found = [json.loads(text) for text in written]
        nonce = str(found[0][0])
        client.set(f"met/{rank}", nonce)
    except dist.DistError as lost:
        raise RankError(title, {0: f"its store cannot be reached or used: {lost}"}) from lost
    finally:
        with contextlib.suppress(dist.DistError):
            client.delete_key(f"newcomer/{rank}")
    verdict = verdict_on({other: Entry("", text) for other, (_, text) in enumerate(found)})
    if verdict.failures:
        raise error if error and verdict.is_alike else RankError(title, dict(verdict.failures))
    return nonce


class DistributedInterface(RankGroup):
    """A handle on the default process group; the first handle makes or adopts it.

    A handle keeps no state, so any number of them agree, and all are stale when the group is destroyed.

    A live group (of torch, accelerate or DeepSpeed) is adopted. Otherwise torchrun, deepspeed or accelerate launch say
    how to make one, through env://. Without them this is a lone process: it gets a group of size 1 that needs no port,
    and the variables that DeepSpeed needs are set until `destroy`. DeepSpeed's comm is live afterwards in all cases, so
    `deepspeed.zero.Init` and `deepspeed.initialize` initialize nothing. Not thread-safe.

    Collective:
        Making a group is. Adopting one is if LOCAL_RANK is unset (on all ranks or none): it is derived from the host
        names of all ranks.

    Args:
        backend: Default: what DeepSpeed's accelerator communicates with (nccl, gloo, ...). "cpu:gloo,cuda:nccl" for
            collectives of your own on host memory; loads use none.
        timeout: Limit of collectives. Default for a group made here: DEEPSPEED_TIMEOUT minutes if set, else 30. The
            timeout of a live group is read from torch's backend object; where that has none (fake), it is not compared.

    Raises:
        ConfigError: The arguments contradict the live group; a launcher variable is missing; this process does not
            see the device of its LOCAL_RANK; or the group was live when this process was forked, and its threads
            stayed behind.
        RankError: Another rank does not see its device, when a group is made.

    Example:
        ranks = DistributedInterface()  # after it, torch.distributed is initialized
        print(ranks.rank, ranks.world_size, ranks.device)
        ranks.barrier()
    """

    __slots__ = ()

    # The only mutable state of the module; it belongs to the process, as the group does.
    _record: ClassVar[_Record | None] = None
    _meeting: ClassVar[_Meeting | None] = None

    def __init__(self, *, backend: str | None = None, timeout: timedelta | None = None) -> None:
        super().__init__(None)
        self._forget_if_gone()
        if dist.is_initialized():
            require_live()
            self._check_agrees(backend, timeout)
            if DistributedInterface._record is None:
                self._adopt()
        else:
            backend = backend or str(accelerator().communication_backend_name())
            self._make(backend, timeout or environment.default_timeout())

    @property
    def local_rank(self) -> int:
        """Rank among the processes of this machine; it selects the device."""
        require_live()
        return environment.integer("LOCAL_RANK")

    @property
    def device(self) -> torch.device:
        """The accelerator's device of this rank; plain `cpu` on CPU."""
        name = accelerator().device_name()
        return torch.device("cpu") if name == "cpu" else torch.device(name, self.local_rank)

    @property
    def backend(self) -> str:
        """Backend that serves this rank's device, e.g. `nccl` where the group is `cpu:gloo,cuda:nccl`."""
        require_live()
        return environment.backends_by_device().get(accelerator().device_name(), dist.get_backend())

    def barrier(self) -> None:
        """Wait for all ranks. Collective."""
        # By default NCCL derives the device from the rank: wrong where ranks do not fill machines in order.
        dist.barrier(device_ids=[self.local_rank] if self.backend == "nccl" else None)

    def subgroup(self, group: Any) -> RankGroup:
        """Return the ranks of a group that the caller made; all ranks for None.

        Raises:
            ConfigError: this rank is not in it.
        """
        if group is None:
            return self
        is_group = isinstance(group, dist.ProcessGroup)
        if group == dist.GroupMember.NON_GROUP_MEMBER or (is_group and dist.get_rank(group) < 0):
            raise ConfigError(
                f"data_parallel_group: rank {self.rank} is not in it; call this on the ranks of the group only"
            )
        if not is_group:
            error = ConfigError(f"data_parallel_group: expected a group of torch.distributed, got {group!r}")
            self.abort("the check of data_parallel_group", error)
            raise error
        return RankGroup(group)

    def destroy(self, *, force: bool = False) -> None:
        """Destroy torch's group and DeepSpeed's comm; the next `DistributedInterface()` makes new ones.

        Does nothing if no group is live or, unless `force`, if it was adopted. Variables that were set are removed.
        """
        self._forget_if_gone()
        record = DistributedInterface._record
        if dist.is_initialized() and (force or (record is not None and record.made)):
            dist.destroy_process_group()
            self._forget_if_gone()

    @staticmethod
    def _forget_if_gone() -> None:
        """Drop the record of a group that was destroyed or replaced, perhaps by other code."""
        record = DistributedInterface._record
        if record is not None and not (dist.is_initialized() and record.group() is dist.group.WORLD):
            DistributedInterface._record = None
            _undo(record.env_set)

    def _check_agrees(self, backend: str | None, timeout: timedelta | None) -> None:
        """Raise one ConfigError that names every argument that differs from the live group."""
        wrong, live_timeout = [], _live_timeout()
        if backend not in (None, self.backend, dist.get_backend(), dist.get_backend_config()):
            wrong.append(f"backend: asked for {backend}, live group has {self.backend}")
        if timeout and live_timeout and timeout != live_timeout:
            wrong.append(f"timeout: asked for {timeout}, live group has {live_timeout}")
        if wrong:
            raise ConfigError(
                f"DistributedInterface: the live process group contradicts the arguments: {'; '.join(wrong)}. "
                "Drop these arguments, or destroy that group first."
            )

    def _make(self, backend: str, timeout: timedelta) -> None:
        """Make the default group and DeepSpeed's comm on it; leave nothing behind if that fails."""
        from lowmem_load.engines.ops import bring_up_comm

        is_alone = not any(os.environ.get(name) for name in environment.LAUNCHER_NAMES)
        env_set = environment.set_missing(environment.alone()) if is_alone else {}
        try:
            if is_alone:
                choose_device()
                store: Store = dist.HashStore()  # type: ignore[attr-defined]
            else:
                environment.require_launched()
                store = self._meet(timeout)
            rank, size = environment.integer("RANK"), environment.integer("WORLD_SIZE")
            device = _device_to_bind(size)
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout, device_id=device)
            bring_up_comm(backend, timeout)
        except BaseException:
            if dist.is_initialized():
                dist.destroy_process_group()
            _undo(env_set)
            raise
        DistributedInterface._record = _Record(weakref.ref(environment.default_group()), True, env_set)

    @staticmethod
    def _meet(timeout: timedelta) -> Store:
        """Return the launcher's store with the new group's prefix. Collective."""
        address = tuple(os.environ[name] for name in environment.LAUNCHER_NAMES if name != "LOCAL_RANK")
        meeting = DistributedInterface._meeting
        if meeting is None or meeting.address != address or not _answers(meeting.store):
            DistributedInterface._meeting = meeting = None
            store, _, _ = next(dist.rendezvous("env://", timeout=timeout))  # type: ignore[attr-defined]
            meeting = DistributedInterface._meeting = _Meeting(address, store)
        meeting.store.set_timeout(timeout)
        ranks = environment.integer("RANK"), environment.integer("WORLD_SIZE")
        prefix = f"lowmem_load/{_agree_on_nonce(meeting.store, *ranks, timeout)}"
        return dist.PrefixStore(prefix, meeting.store)  # type: ignore[attr-defined]

    def _adopt(self) -> None:
        """Adopt a group that other code made, and set up what it may have left out."""
        from lowmem_load.engines.ops import bring_up_comm

        local_rank = os.environ.get("LOCAL_RANK") or str(self._derive_local_rank())
        env_set = environment.set_missing({"LOCAL_RANK": local_rank})
        try:
            choose_device()
        except BaseException as error:  # also of a driver: the others must hear of it
            environment.unset(env_set)
            self.abort("DistributedInterface", error)
            raise
        DistributedInterface._record = _Record(weakref.ref(environment.default_group()), False, env_set)
        bring_up_comm(dist.get_backend(), _live_timeout() or environment.default_timeout())

    def _derive_local_rank(self) -> int:
        """Return the number of lower ranks on this machine; 0 if each rank sees one device, its own. Collective."""
        if self.is_fake:
            return 0
        host = socket.gethostname()
        with self.step("deriving LOCAL_RANK") as step:
            step.payload = host
        lower = step.payloads[: self.rank].count(host)
        return 0 if accelerator().device_name() != "cpu" and accelerator().device_count() == 1 else lower


def _answers(store: Store) -> bool:
    """Return whether a store is still there: rank 0, which has it, may have been started again."""
    try:
        store.check([""])
    except RuntimeError:
        return False
    return True


def _device_to_bind(world_size: int) -> torch.device | None:
    """Return the device to bind NCCL to, so that no barrier has to guess it; None if that is useless.

    Source: deepspeed 0.19.8 comm/torch.py:264, whose rule this is.
    """
    if accelerator().device_name() != "cuda" or world_size == 1:
        return None
    return torch.device("cuda", environment.integer("LOCAL_RANK"))


def _undo(env_set: dict[str, str]) -> None:
    """Remove the variables of a group that is gone, and what DeepSpeed keeps about it."""
    from lowmem_load.engines.ops import reset_comm

    environment.unset(env_set)
    # If a successor is live already, DeepSpeed's state may be the successor's.
    if not dist.is_initialized():
        reset_comm()


def _live_timeout() -> timedelta | None:
    """Return the timeout of the live group; None if its backend keeps none.

    Source: torch 2.13 ProcessGroup._get_backend, Backend.options._timeout. The fake backend has no options.
    """
    device = accelerator().device_name()
    if device not in environment.backends_by_device():
        return None
    group = environment.default_group()
    options = getattr(group._get_backend(torch.device(device)), "options", None)  # noqa: SLF001
    timeout = getattr(options, "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else None


@contextlib.contextmanager
def fake_group(rank: int, world_size: int) -> Iterator[None]:
    """Inside, this process is one rank of a world whose other ranks do not exist. Collectives do nothing.

    Source: torch 2.13 `testing/_internal/distributed/fake_pg.py`.
    """
    if dist.is_initialized():
        raise ConfigError("plan: this process has a process group; plan in a process of its own")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def accelerator() -> Any:
    """Return DeepSpeed's accelerator. The import takes seconds and selects the accelerator."""
    from deepspeed.accelerator import get_accelerator

    return get_accelerator()


def choose_device() -> None:
    """Make LOCAL_RANK's device the current one. NCCL would otherwise start all ranks on the first device.

    Raises:
        ConfigError: this process does not see that device.
    """
    devices, local_rank = accelerator(), environment.integer("LOCAL_RANK")
    count = local_rank + 1 if devices.device_name() == "cpu" else devices.device_count()
    if not 0 <= local_rank < count:
        visible = "".join(
            f", {name}={os.environ[name]}" for name in devices.visible_devices_envs() if name in os.environ
        )
        raise ConfigError(
            f"LOCAL_RANK is {local_rank}, but this process sees {count} {devices.device_name()} device(s){visible}: "
            "start no more ranks on a machine than it has devices; where each rank is shown one device of its own, set "
            "LOCAL_RANK=0 in all of them"
        )
    devices.set_device(local_rank)


def look_into(host: str, port: int, looks_s: float = 3.0) -> list[dict[str, Any]]:
    """Return what the ranks of a job do, by the store in which their process groups meet: a row for each rank."""
    try:
        store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=10))  # type: ignore[attr-defined]
    except RuntimeError as error:
        raise LowMemLoadError(f"no store of torch.distributed answers at {host}:{port}") from error
    if not hasattr(store, "list_keys"):
        raise LowMemLoadError("this release of torch cannot list the keys of a store; 2.13 can")
    found = [re.fullmatch(r"(.*lowmem_load/.*?)/?rank/(\d+)", key) for key in store.list_keys()]
    before = {match: store.get(match[0]) for match in found if match}
    time.sleep(looks_s)
    rows = []
    for match, content in sorted(before.items(), key=lambda item: (item[0][1], int(item[0][2]))):
        now = store.get(match[0])
        beat = Heartbeat.read(now)
        if beat.who:
            place = {"prefix": match[1], "rank": int(match[2]), "silent": bool(beat.title) and now == content}
            rows.append({**place, "does": beat.doing, **beat._asdict()})
    return rows

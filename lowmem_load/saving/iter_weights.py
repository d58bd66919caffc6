"""iter_weights: the tensors that save_model writes, put together on the ranks, a bucket at a time.

A save asks which bytes of files a rank's elements fill; here they fill tensors in memory. See docs/situations/
rlhf_weights.md.

[Note: one step a bucket] Before each bucket the ranks agree, through the store, that all have come for it. Only then
they begin the next collective, which runs while the consumer has the bucket. So no rank waits in a collective for one
that does not come: a consumer that stopped, raised or hangs, or a weight that changed, is an error of the next step.

[Note: early ends] Python closes an iterator that nobody holds, and may do so at any time, in any thread, on one rank
only. So no step of all ranks is made then: this rank tells the others that it does not come to the next one. They raise
if they come there. If all ranks have left the loop at the same bucket, nobody comes, and all is well.

[Note: fresh memory] Each tensor is in memory that nobody else holds, so one that a consumer keeps stays right. The list
is emptied when the next bucket is asked for; else a `for` loop would keep three buckets alive.

[Note: streams] A consumer may ask for buckets on one stream and use them on another, as vLLM's packed producer does. So
buckets are made on a stream of our own, and are complete before they are handed out. All work of the device is over
before memory is taken: the consumer may still read, on any stream, what it has given up. That is waited for behind the
exchange, which would hang such a wait if a rank were lost.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import tempfile
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from lowmem_load.distributed.exchange import Exchange, device_of, has_fast_gather
from lowmem_load.distributed.group import RankGroup
from lowmem_load.errors import ConfigError
from lowmem_load.fingerprint import fingerprint
from lowmem_load.hf import merging, saver
from lowmem_load.hf.loader import load_lock
from lowmem_load.hf.merging import Merge
from lowmem_load.io.elements import SpareMemory, own_memory, scatter_elements, source_elements
from lowmem_load.planning.buckets import (
    Bucket,
    Message,
    Part,
    Regions,
    Unit,
    Wanted,
    lengths,
    plan_buckets,
    plan_messages,
)
from lowmem_load.planning.copies import Copy
from lowmem_load.planning.expression import Expression, Held, Source
from lowmem_load.planning.nest import Axis, Nest
from lowmem_load.planning.ranges import FlatRange, Grid, Region
from lowmem_load.saving.local_shards import LocalShard, is_dtensor, local_shards
from lowmem_load.saving.model_digest import unwrapped
from lowmem_load.saving.save import ranks_of
from lowmem_load.saving.writer import proved_copies

Tensors: TypeAlias = "list[tuple[str, torch.Tensor]]"
"""Names and values of a bucket's tensors."""

Names: TypeAlias = "Collection[str] | Callable[[str], bool]"

_ONE_FILE = 1 << 60
"""Bytes of a shard, so that there is one."""


def iter_weights(
    engine_or_model: nn.Module,
    *,
    bucket_bytes: int = 1 << 30,
    to: int | Literal["all"] = "all",
    dtype: torch.dtype | None = None,
    names: Names | None = None,
    merge_adapters: bool = False,
) -> Generator[Tensors, None, None]:
    """Yield all weights in buckets, `[(name, tensor), ...]`, put together from what the ranks hold.

    Names, shapes, dtypes and values are those of the files that `save_model` would write: of the Hugging Face
    checkpoint, experts apart, tied weights once. Of what each rank holds in full, the values are those of rank 0;
    replicas (HSDP, MiCS), which hold equal values, send a share each.
    Partitions are read where they lie, also on the host or nvme; DeepSpeed's parameters stay as they are. While the
    consumer has one bucket, the next one is on its way. The tensors have memory of their own, on the accelerator where
    its collectives run, and stay right as long as they are kept. The list is emptied when the next one is asked for.

    Args:
        engine_or_model: an engine (so that its steps are noticed under each stage) or a model, as for `save_model`.
        bucket_bytes: a bucket ends with the tensor that fills it. A tensor at least as large has a bucket of its own.
        to: "all", or the rank (in the group of the ranks that hold the model) that gets the tensors; the buckets of
            other ranks are empty lists.
        dtype: as for `save_model`. With torch.float32 the optimizer's fp32 values are yielded where it has some.
        names: names to yield, or a function that says of a name whether to yield it; equal on all ranks.
        merge_adapters: of a PEFT model, yield what `merge_and_unload` would make, and not the adapters. The layers of
            a bucket are merged when they are put together; the engine does not change.

    Collective: all ranks that hold the model. All ranks have to take all buckets, or stop after the same one. There is
        one collective for each bucket, at most `total bytes / bucket_bytes + 2`, and one for each rank that sends
        large tensors of its own alone. On gloo, and where equal messages would take too much, each rank sends for
        itself.
    Memory: on ranks that get tensors two buckets, each smaller than two times `bucket_bytes` or as large as one
        tensor, and tensors that the consumer keeps. Messages of one bucket take up to twice as much if some ranks hold
        less of it than others. A merge takes a few times its layer.

    Raises:
        ConfigError: an argument cannot be used, an optimizer stepped or a weight changed between two buckets, or
            `GatheredParameters` is open.
        UnsupportedError: names a tensor that cannot be put together, and why.
        RankError: another rank failed, stopped early, or did not come for the next bucket within the timeout of the
            process group. A rank whose own loop is left by `break` or an error gets none of these.
    """
    arguments = Arguments(bucket_bytes, to, dtype, names, merge_adapters)
    return _planned_and_sent(engine_or_model, arguments)


def _planned_and_sent(engine: nn.Module, arguments: Arguments) -> Generator[Tensors, None, None]:
    yield from plan_weights(engine, arguments).buckets()


@dataclass(frozen=True, slots=True)
class Arguments:
    """Those of `iter_weights`."""

    bucket_bytes: int
    to: int | Literal["all"]
    dtype: torch.dtype | None
    names: Names | None
    merge_adapters: bool

    def check(self, world_size: int) -> None:
        """Raise ConfigError if one cannot be used."""
        if self.bucket_bytes < 1:
            raise ConfigError(f"iter_weights: bucket_bytes: {self.bucket_bytes!r} is no positive number of bytes")
        if self.to != "all" and self.to not in range(world_size):
            raise ConfigError(f"iter_weights: to: {self.to!r} is neither 'all' nor a rank below {world_size}")

    def chosen(self, tensors: Mapping[str, Expression]) -> dict[str, Expression]:
        """Return the tensors to yield."""
        names = self.names
        if names is None:
            return dict(tensors)
        if callable(names):
            return {name: part for name, part in tensors.items() if names(name)}
        wanted = {names} if isinstance(names, str) else set(names)
        if unknown := sorted(wanted - tensors.keys()):
            raise ConfigError(f"iter_weights: names: {', '.join(unknown)}: not in the checkpoint of this model")
        return {name: part for name, part in tensors.items() if name in wanted}


def plan_weights(engine: nn.Module, arguments: Arguments) -> Weights:
    """Return the weights of a model, planned but not sent. Collective."""
    model = unwrapped(engine)
    with load_lock():
        ranks = ranks_of(model)
        with ranks.step("planning the weights") as step:
            arguments.check(ranks.world_size)
            masters = arguments.dtype == torch.float32 and not arguments.merge_adapters
            shards = local_shards(model, ranks.rank, masters=masters)
            units, merges = _described(model, arguments, shards)
            step.digest = {
                "bucket_bytes, to, dtype": f"{arguments.bucket_bytes}, {arguments.to}, {arguments.dtype}",
                "tensors": fingerprint(map(_spelled, units)),
            }
            step.payload = _encoded(shards)
        regions = [_decoded(payload, shards) for payload in step.payloads or [_encoded(shards)]]
        buckets = plan_buckets(units, regions, arguments.bucket_bytes)
        to = None if arguments.to == "all" else arguments.to
        by_name = {shard.source.name: shard for shard in shards}
        return Weights(engine, ranks, to, by_name, merges, buckets, regions, arguments.bucket_bytes)


def _described(model: nn.Module, arguments: Arguments, shards: Sequence[LocalShard]) -> tuple[list[Unit], list[Merge]]:
    sources = {id(shard.tensor): shard.source for shard in shards}
    whole, merges = merging.unloaded(model) if arguments.merge_adapters else (model, [])
    with tempfile.TemporaryDirectory(prefix="lowmem_load-") as scratch:
        files = saver.describe_save(
            *(whole, Path(scratch), sources), dtype=arguments.dtype, max_shard_size=_ONE_FILE, kwargs={}
        )
    tensors = arguments.chosen({name: part for file in files for name, part in file.tensors.items()})
    wanted = [Wanted(name, part.shape, part.dtype, tuple(proved_copies(name, part))) for name, part in tensors.items()]
    return list(_units(wanted, merges, sources)), merges


def _units(wanted: Sequence[Wanted], merges: Sequence[Merge], sources: Mapping[int, Source]) -> Iterator[Unit]:
    """Yield what is sent together: a tensor, or the parameters of a merge, of which all its tensors are made."""
    merge_of = {sources[id(p)].name: number for number, merge in enumerate(merges) for p in merge.parameters}
    made: dict[int, list[Wanted]] = {}
    for one in wanted:
        numbers = {merge_of[source.name] for source in one.sources if source.name in merge_of}
        if not numbers:
            yield Unit((one,))
        elif len(numbers) == 1:
            made.setdefault(numbers.pop(), []).append(one)
        else:
            raise ConfigError(f"{one.name}: is made of parameters that are merged apart; save the model instead")
    for number, tensors in made.items():
        merge = merges[number]
        needed = {sources[id(p)]: None for p in (*merge.parameters, *merge.adapters())}
        needed |= {source: None for one in tensors for source in one.sources}
        yield Unit(tuple(map(_whole, needed)), tuple(tensors), number)


def _spelled(unit: Unit) -> str:
    """Return all that decides what is sent where."""
    copies = [(one.name, [(getattr(c.leaf, "name", ""), c.nest) for c in one.copies]) for one in unit.sent]
    return f"{copies} {[(one.name, one.shape, one.dtype) for one in (*unit.sent, *unit.made)]}"


def _whole(source: Source) -> Wanted:
    elements = FlatRange(0, torch.Size(source.shape).numel())
    copy = Copy(source, Nest(0, 0, (Axis(elements.numel, 1, 1),)))
    return Wanted(source.name, source.shape, source.dtype, (copy,))


def _encoded(shards: Sequence[LocalShard]) -> tuple[list[Any], list[int]]:
    """Return the regions that this rank holds as JSON data: each one that occurs, and its number for each shard."""
    numbers: dict[Region, int] = {}
    chosen = [numbers.setdefault(shard.held, len(numbers)) for shard in shards]
    return [[r.start, r.end] if isinstance(r, FlatRange) else [r.runs] for r in numbers], chosen


def _decoded(payload: tuple[list[Any], list[int]], shards: Sequence[LocalShard]) -> Regions:
    regions: list[Region] = []
    for fields in payload[0]:
        if len(fields) == 2:
            regions.append(FlatRange(*fields))
        else:
            regions.append(Grid(tuple(tuple((start, end) for start, end in dim) for dim in fields[0])))
    return {shard.source.name: regions[number] for shard, number in zip(shards, payload[1], strict=True)}


@dataclass(slots=True)
class _Sent:
    """A bucket on its way."""

    bucket: Bucket
    messages: list[Message]
    exchange: Exchange


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of a model, planned. `regions` are those of each rank; `to` is the rank that gets them, or None."""

    engine: nn.Module
    ranks: RankGroup
    to: int | None
    shards: Mapping[str, LocalShard]
    merges: Sequence[Merge]
    planned: Sequence[Bucket]
    regions: Sequence[Regions]
    bucket_bytes: int
    spare: SpareMemory = field(default_factory=SpareMemory)

    @property
    def tensors(self) -> list[Wanted]:
        """What the buckets hold, in order."""
        return [one for bucket in self.planned for unit in bucket.units for one in unit.made or unit.sent]

    def buckets(self) -> Generator[Tensors, None, None]:
        """Yield the tensors of each bucket. Collective. See [Note: one step a bucket]."""
        sent: _Sent | None = None
        device = device_of(self.ranks)
        stream = None if device.type == "cpu" else torch.Stream(device)
        with _changes(self.engine, list(self.shards.values())) as changed, contextlib.ExitStack() as stack:
            stack.callback(lambda: sent.exchange.drain() if sent else None)
            for number in range(len(self.planned) + 1):
                with self._step(number):
                    _refuse(changed())
                    if sent:
                        sent.exchange.finish(self.ranks.check)
                    with _on(stream):
                        tensors = self._received(sent) if sent else []
                        sent = self._filled(self.planned[number], sent) if number < len(self.planned) else None
                if sent:
                    self._start(sent.exchange)
                if number:
                    yield from self._given(tensors, number)
            with self._step(len(self.planned) + 1):
                pass  # the consumers of all ranks have come to the end

    def _step(self, number: int) -> contextlib.AbstractContextManager[Any]:
        return self.ranks.step(self._title(number))

    def _title(self, number: int) -> str:
        return f"sending the weights ({number} of {len(self.planned)} buckets)"

    def _start(self, exchange: Exchange) -> None:
        try:
            exchange.start()
        except BaseException as error:
            self.ranks.abort("sending the weights", error)
            raise

    def _given(self, tensors: Tensors, number: int) -> Iterator[Tensors]:
        """Yield a bucket. See [Note: early ends]."""
        next_step = self.ranks.next_step()
        try:
            yield tensors
        except GeneratorExit:
            why = f"its loop over the weights ended after {number} of {len(self.planned)} buckets"
            self.ranks.leave(next_step, self._title(number + 1), why)
            raise
        except BaseException:
            with self._step(number + 1):
                raise
        tensors.clear()  # see [Note: fresh memory]

    def _filled(self, bucket: Bucket, before: _Sent | None) -> _Sent:
        """Return a bucket whose message from this rank is filled, in the memory of the one before if that is enough."""
        messages = plan_messages(bucket, self.regions)
        gathers = has_fast_gather(self.ranks)
        sizes = lengths(messages, self.bucket_bytes, are_equal=gathers)
        last = before.exchange if before else None
        exchange = Exchange(self.ranks, sizes, to=self.to, gathers=gathers, before=last)
        if exchange.mine is not None:
            wanted, parts = bucket.sent, messages[self.ranks.rank].parts
            for name, group in itertools.groupby(sorted(parts, key=lambda part: part.parameter), _parameter_of):
                with self.shards[name].flat() as memory:
                    for part in group:
                        _fill(exchange.mine, wanted[part.number].dtype, part, memory)
        return _Sent(bucket, messages, exchange)

    def _received(self, sent: _Sent) -> Tensors:
        """Return the tensors of a bucket that has come."""
        if self.to not in (None, self.ranks.rank):
            return []
        received, device, wanted = sent.exchange.received, device_of(self.ranks), sent.bucket.sent
        taken = self.spare.take([one.nbytes for one in wanted], device)
        tensors = [memory.view(one.dtype).view(one.shape) for one, memory in zip(wanted, taken, strict=True)]
        del taken
        for rank, memory in received.items():
            for part in sent.messages[rank].parts:
                _place(tensors[part.number], memory, part)
        by_name: dict[str, torch.Tensor] = {}
        for one, tensor in zip(wanted, tensors, strict=True):
            _place_held(one, tensor)
            by_name[one.name] = tensor
        return [pair for unit in sent.bucket.units for pair in self._made(unit, by_name)]

    def _made(self, unit: Unit, sent: dict[str, torch.Tensor]) -> Tensors:
        if unit.merge is None:
            return [(one.name, sent[one.name]) for one in unit.sent]
        merge = self.merges[unit.merge]
        names = {id(shard.tensor): name for name, shard in self.shards.items()}
        given = {id(p): sent[names[id(p)]] for p in (*merge.parameters, *merge.adapters())}
        merged = merge.run(given)
        values = sent | {names[id(p)]: value for p, value in zip(merge.parameters, merged, strict=True)}
        made: Tensors = []
        for one in unit.made:
            tensor = own_memory(one.nbytes, merged[0].device).view(one.dtype).view(one.shape)
            for copy in one.copies:
                if isinstance(copy.leaf, Source):
                    scatter_elements(copy.nest, values[copy.leaf.name].reshape(-1), tensor.view(-1))
            _place_held(one, tensor)
            made.append((one.name, tensor))
        return made


@contextlib.contextmanager
def _on(stream: torch.Stream | None) -> Iterator[None]:
    """Use this stream inside, and wait for it. See [Note: streams]."""
    if stream is None:
        yield
        return
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.synchronize(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
    stream.synchronize()


def _parameter_of(part: Part) -> str:
    return part.parameter


def _fill(message: torch.Tensor, dtype: torch.dtype, part: Part, memory: torch.Tensor) -> None:
    """Put elements of a parameter into a message, cast."""
    values = source_elements(part.nest, memory)
    for cast in part.nest.casts[:-1]:
        values = values.to(cast)
    _piece(message, part, dtype).view(values.shape).copy_(values)


def _place(tensor: torch.Tensor, message: torch.Tensor, part: Part) -> None:
    """Put elements of a message into their tensor."""
    nest = Nest(part.nest.source, part.nest.destination, part.nest.axes).gathered()
    scatter_elements(nest, _piece(message, part, tensor.dtype), tensor.view(-1))


def _piece(message: torch.Tensor, part: Part, dtype: torch.dtype) -> torch.Tensor:
    return message[part.start : part.start + part.nest.numel * dtype.itemsize].view(dtype)


def _place_held(wanted: Wanted, tensor: torch.Tensor) -> None:
    """Put values that are no parameter's, such as padding, into a tensor."""
    for copy in wanted.copies:
        if isinstance(copy.leaf, Held):
            flat = copy.leaf.flat.to(tensor.device)
            scatter_elements(copy.nest.shifted(source=-copy.leaf.first), flat, tensor.view(-1))


# -- changes between buckets -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _changes(engine: nn.Module, shards: Sequence[LocalShard]) -> Iterator[Callable[[], str]]:
    """Yield a function that returns what has changed the weights since; "" if nothing that can be seen has."""
    stepped: list[str] = []
    parameters = {id(shard.tensor) for shard in shards}
    optimizers: set[int] = set()
    if "deepspeed" in sys.modules:
        from lowmem_load.ds.parameters import optimizers_of

        optimizers = {*map(id, optimizers_of(engine, [shard.tensor for shard in shards]))}

    def note(optimizer: Any, *_: Any) -> None:
        trained = (id(parameter) for group in optimizer.param_groups for parameter in group["params"])
        if id(optimizer) in optimizers or not parameters.isdisjoint(trained):
            stepped.append(type(optimizer).__name__)

    model = unwrapped(engine)
    before = {shard.source.name: (shard.version, shard.address) for shard in shards}

    def changed() -> str:
        if stepped:
            return f"an optimizer ({stepped[0]}) stepped"
        there = {*map(id, model.parameters())}
        for shard in shards:
            # FSDP2 puts other parameters in the place of its DTensors while it computes.
            may_go = is_dtensor(shard.tensor) or not isinstance(shard.tensor, nn.Parameter)
            is_there = may_go or id(shard.tensor) in there
            if not is_there or (shard.version, shard.address) != before[shard.source.name]:
                return f"{shard.source.name} was changed"
        return ""

    handle = register_optimizer_step_post_hook(note)
    try:
        yield changed
    finally:
        handle.remove()


def _refuse(what: str) -> None:
    if what:
        raise ConfigError(
            f"iter_weights: {what} between two buckets, so they would be no state of the model; take all buckets "
            "before the next step"
        )

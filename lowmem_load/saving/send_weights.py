"""Weights on their way: each bucket is sent by all ranks that hold some of it, and put together where it goes.

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
import functools
import itertools
import operator
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn

from lowmem_load.distributed.exchange import Exchange, device_of, has_fast_gather
from lowmem_load.distributed.group import RankGroup
from lowmem_load.hf.merging import Merge
from lowmem_load.io.elements import SpareMemory, own_memory, scatter_elements, source_elements
from lowmem_load.planning.buckets import Bucket, Message, Part, Regions, Unit, Wanted, lengths, plan_messages
from lowmem_load.planning.expression import Held, Source
from lowmem_load.planning.nest import Nest
from lowmem_load.saving.local_shards import LocalShard
from lowmem_load.saving.weight_changes import changes_refused

Tensors: TypeAlias = "list[tuple[str, torch.Tensor]]"
"""Names and values of a bucket's tensors."""


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
        stream = None if device.type == "cpu" else _stream_of(device)
        with (
            changes_refused(self.engine, list(self.shards.values())) as refuse_changes,
            contextlib.ExitStack() as stack,
        ):
            stack.callback(lambda: sent.exchange.drain() if sent else None)
            for number in range(len(self.planned) + 1):
                with self._step(number):
                    refuse_changes()
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
            by_name = operator.attrgetter("parameter")
            for name, group in itertools.groupby(sorted(parts, key=by_name), by_name):
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


@functools.cache
def _stream_of(device: torch.device) -> torch.Stream:
    """Return the one stream on which buckets are made: torch keeps freed memory for the stream that took it."""
    return torch.Stream(device)


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

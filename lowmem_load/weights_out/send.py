"""Weights on their way: each bucket is sent by all ranks that own some of it, and put together where it goes.

[Note: one step a bucket] Before each bucket the ranks agree, through the store, that all have come for it. Only then
they begin the next collective, which runs while the consumer has the bucket. So no rank waits in a collective for one
that does not come: a consumer that stopped, raised or hangs, or a weight that changed, is an error of the next step.

[Note: early ends] Python closes an iterator that nobody refers to, and may do so at any time, in any thread, on one
rank only. So a step of all ranks cannot be made then: this rank tells the others that it has left the loop. They raise
if they come to its next step, whatever steps the script has made within the loop. If all ranks have left it at the same
bucket, nobody comes, and all is well.

[Note: fresh memory] Each tensor has memory of its own, so one that a consumer keeps stays right. The list is emptied
when the next bucket is asked for; otherwise a `for` loop would keep three buckets alive.

[Note: streams] A consumer may ask for buckets on one stream and use them on another, as vLLM's packed producer does. So
buckets are made on a stream of our own, and are complete before they are handed out. All work of the device is over
before memory is taken: the consumer may still read, on any stream, what it has given up. That is waited for behind the
exchange, which would hang such a wait if a rank were lost.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from lowmem_load.distributed.side_group import Exchange, SideGroup, device_of
from lowmem_load.distributed.steps import RankGroup
from lowmem_load.errors import ConfigError
from lowmem_load.files.memory import SpareMemory, own_memory, scatter_elements, source_elements, trim_heap
from lowmem_load.planning.expression import Held, Source
from lowmem_load.planning.nest import Nest
from lowmem_load.planning.regions import Distribution
from lowmem_load.text import fingerprint
from lowmem_load.weights_out.buckets import (
    MessagePart,
    Messages,
    PlannedTensor,
    Shares,
    Unit,
    message_lengths,
    plan_buckets,
    plan_messages,
    sent_in,
)
from lowmem_load.weights_out.changes import (
    Change,
    change_of,
    changed_elements,
    pack,
    packed_bytes,
    read_message,
    write_message,
)
from lowmem_load.weights_out.rank_shards import RankShard, is_dtensor, layouts_by_rule, rules_of, unwrapped, zero3

Tensors: TypeAlias = "list[tuple[str, Any]]"
"""Names and values of a bucket's tensors; with `changed_only` of those that differ, some as a `Change`."""


class SendPlan:
    """What the ranks send of a model, by rules that all ranks know: see [Note: rules] in `planning/regions.py`. Local.

    The ranks have to agree on the digests `tensors` and `rules`, of what is sent and of how it lies.
    """

    def __init__(self, units: Sequence[Unit], shards: Sequence[RankShard], ranks: RankGroup, bucket_bytes: int) -> None:
        self.buckets, self.bucket_bytes = plan_buckets(units, bucket_bytes), bucket_bytes
        self.tensors = fingerprint(map(_unit_text, units))
        self.layouts, self.rules = layouts_by_rule(shards, rules_of(shards), ranks.rank, ranks.world_size)
        self.shares: dict[tuple[Distribution, Nest], Shares] = {}  # of copies; see `plan_messages`
        # Who took the messages of this rank, and these. An engine in this process is not kept alive.
        self.snapshot: tuple[Callable[[], object], list[torch.Tensor]] | None = None


def _unit_text(unit: Unit) -> str:
    """Return all that decides what is sent where."""
    copies = [(tensor.name, [(getattr(c.leaf, "name", ""), c.nest) for c in tensor.copies]) for tensor in unit.sent]
    return f"{copies} {[(tensor.name, tensor.shape, tensor.dtype) for tensor in (*unit.sent, *unit.made)]}"


@dataclass(slots=True)
class _Sent:
    """A bucket on its way."""

    bucket: Sequence[Unit]
    messages: Messages
    exchange: Exchange
    has_changes: bool = False


class Sending:
    """Weights of a model on their way to all ranks, to the rank `to`, or to a rank for each bucket.

    The optimizer of an engine is watched.

    `latest` is what `buckets` has yielded last, and `failure` is what it has raised, on all ranks. With `changed_only`,
    `snapshot` has what this rank sent last, or nothing if all ranks are to send all; see [Note: changes].
    """

    def __init__(
        self,
        engine: nn.Module,
        plan: SendPlan,
        shards: Sequence[RankShard],
        ranks: RankGroup,
        *,
        to: int | Sequence[int] | None,
        changed_only: bool = False,
        snapshot: Sequence[torch.Tensor] = (),
    ) -> None:
        self.plan, self.ranks, self.changed_only = plan, ranks, changed_only
        self._is_compared, self._snapshot = bool(snapshot), list(snapshot)
        self._to = to if isinstance(to, Sequence) else [to] * len(plan.buckets)
        self._engine, self._spare = engine, SpareMemory()
        self.shards = {shard.source.name: shard for shard in shards}
        self._names = {id(shard.tensor): name for name, shard in self.shards.items()}
        self.latest: Tensors = []
        self.failure: Exception | None = None

    @property
    def tensors(self) -> list[PlannedTensor]:
        """What the buckets contain, in order."""
        return [tensor for bucket in self.plan.buckets for unit in bucket for tensor in unit.made or unit.sent]

    def buckets(self) -> Generator[Tensors, None, None]:
        """Yield the tensors of each bucket. Collective. See [Note: one step a bucket]."""
        sent: _Sent | None = None
        loop = self.ranks.loop()
        side = SideGroup(loop, on_device=True)
        on_stream = contextlib.nullcontext if side.device.type == "cpu" else lambda: _on(_stream_of(side.device))
        changes = _Changes(self._engine, list(self.shards.values()))
        try:
            for number in range(len(self.plan.buckets) + 1):
                with self._step(number, loop) as step:
                    changes.refuse()
                    if not number:
                        side.connect()
                    if sent:
                        side.finish(self.ranks.check)
                    with on_stream():
                        tensors = self._put_together(sent) if sent else []
                        if self._is_compared and number < len(self.plan.buckets):
                            pieces = self._compare(number, side)
                            step.payload = packed_bytes(pieces)
                        else:
                            sent = self._fill(number, side, sent) if number < len(self.plan.buckets) else None
                if step.payload is not None:
                    with loop.session("filling the message"), on_stream():
                        sent = self._fill_changes(number, side, sent, pieces, step.payloads)
                if sent:
                    with loop.session("sending the weights"):
                        sent.exchange.start()
                if number:
                    yield from self._hand_out(tensors, number, loop, side)
            with self._step(len(self.plan.buckets) + 1, loop):
                pass  # the consumers of all ranks have come to the end
        except Exception as error:
            self.failure = error
            raise
        finally:
            changes.hook.remove()
            side.close()

    def _step(self, number: int, loop: RankGroup) -> contextlib.AbstractContextManager[Any]:
        return loop.step(f"sending the weights ({number} of {len(self.plan.buckets)} buckets)")

    def _hand_out(self, tensors: Tensors, number: int, loop: RankGroup, side: SideGroup) -> Iterator[Tensors]:
        """Yield a bucket. See [Note: early ends]."""
        self.latest = tensors
        try:
            yield tensors
        except GeneratorExit:
            why = f"its loop over the weights ended after {number} of {len(self.plan.buckets)} buckets"
            loop.leave(why)
            side.close_later()
            raise
        except BaseException:
            with self._step(number + 1, loop):
                raise
        tensors.clear()  # see [Note: fresh memory]

    def _fill(self, number: int, side: SideGroup, before: _Sent | None) -> _Sent:
        """Return a bucket whose message from this rank is filled, in the memory of the one before if that is enough."""
        bucket, messages = self._messages(number)
        lengths = message_lengths(messages.nbytes, self.plan.bucket_bytes, are_equal=side.gathers)
        exchange = Exchange(side, lengths, to=self._to[number], before=before.exchange if before else None)
        if exchange.mine is not None:
            mine, planned = exchange.mine, sent_in(bucket)

            def fill(_: int, part: MessagePart, memory: torch.Tensor) -> None:
                gather_elements(part.nest, memory, _piece(mine, part, planned[part.number].dtype))

            self._read_parts(messages, fill)
        if self.changed_only:
            size, is_device = messages.nbytes[self.ranks.rank], side.device.type != "cpu"
            pinned = functools.partial(torch.empty, dtype=torch.uint8, device="cpu", pin_memory=True)
            self._snapshot.append(pinned(size) if is_device else own_memory(size, side.device))
            if exchange.mine is not None:
                self._snapshot[-1].copy_(exchange.mine[:size])
        return _Sent(bucket, messages, exchange)

    def _compare(self, number: int, side: SideGroup) -> list[torch.Tensor]:
        """Return what the message of this rank has of a bucket's changes. The snapshot gets them."""
        bucket, messages = self._messages(number)
        planned, changed = sent_in(bucket), dict[int, list[torch.Tensor]]()

        def compare(place: int, part: MessagePart, memory: torch.Tensor) -> None:
            before = _piece(self._snapshot[number], part, planned[part.number].dtype)
            changed[place] = changed_elements(part.nest, memory, before, side.device)

        self._read_parts(messages, compare)
        return pack(part for _, part in sorted(changed.items()))

    def _fill_changes(
        self,
        number: int,
        side: SideGroup,
        before: _Sent | None,
        pieces: Sequence[torch.Tensor],
        nbytes: Sequence[int],
    ) -> _Sent:
        """Return a bucket of changes, as `_fill`, once the bytes of all ranks are known."""
        lengths = message_lengths(nbytes, self.plan.bucket_bytes, are_equal=side.gathers)
        exchange = Exchange(side, lengths, to=self._to[number], before=before.exchange if before else None)
        if exchange.mine is not None:
            write_message(pieces, exchange.mine)
        return _Sent(*self._messages(number), exchange, has_changes=True)

    def _messages(self, number: int) -> tuple[Sequence[Unit], Messages]:
        bucket = self.plan.buckets[number]
        return bucket, plan_messages(bucket, self.plan.layouts, self.ranks.world_size, self.plan.shares)

    def _read_parts(self, messages: Messages, use: Callable[[int, MessagePart, torch.Tensor], None]) -> None:
        """Call `use` with the place of each part in this rank's message, the part, and the memory of its parameter."""

        def name_of(numbered: tuple[int, MessagePart]) -> str:
            return numbered[1].parameter

        # Each parameter is read once from nvme for the bucket, whatever the order of the parts.
        parts = sorted(enumerate(messages.parts(self.ranks.rank)), key=name_of)
        for name, group in itertools.groupby(parts, name_of):
            with self.shards[name].flat() as memory:
                for place, part in group:
                    use(place, part, memory)

    def keep_snapshot(self, taker: object) -> None:
        """Note that all has been taken, so that what comes next may be compared with it. Call on every rank."""
        if self.changed_only:
            try:
                self.plan.snapshot = weakref.ref(taker), self._snapshot
            except TypeError:  # None, or of a class that allows none
                self.plan.snapshot = lambda: taker, self._snapshot

    def _put_together(self, sent: _Sent) -> Tensors:
        """Return the tensors of a bucket that has come."""
        if not sent.exchange.arrives:
            return []
        if sent.has_changes:
            return self._put_together_changes(sent)
        planned = sent_in(sent.bucket)
        pieces = self._spare.take([tensor.nbytes for tensor in planned], device_of(self.ranks))
        values = [piece.view(tensor.dtype).view(tensor.shape) for tensor, piece in zip(planned, pieces, strict=True)]
        del pieces  # `SpareMemory` counts who uses it
        for rank, message in sent.exchange.received.items():
            for part in sent.messages.parts(rank):
                nest, value = Nest(part.nest.source, part.nest.destination, part.nest.axes), values[part.number]
                scatter_elements(nest.gathered(), _piece(message, part, value.dtype), value.view(-1))
        by_name: dict[str, torch.Tensor] = {}
        for tensor, value in zip(planned, values, strict=True):
            place_constants(tensor, value)
            by_name[tensor.name] = value
        return [pair for unit in sent.bucket for pair in self._finish(unit, by_name)]

    def _put_together_changes(self, sent: _Sent) -> Tensors:
        """Return what has changed in a bucket that has come: tensors of which all parts came in full, and changes."""
        planned = sent_in(sent.bucket)
        parts: list[list[tuple[Nest, torch.Tensor | None, torch.Tensor]]] = [[] for _ in planned]
        for rank, message in sent.exchange.received.items():
            for part, positions, values in read_message(message, sent.messages.parts(rank), planned):
                parts[part.number].append((part.nest, positions, values))
        changed: dict[str, torch.Tensor | Change] = {}
        for tensor, of_tensor in zip(planned, parts, strict=True):
            if not sum(len(values) for _, _, values in of_tensor):
                continue
            if any(positions is not None for _, positions, _ in of_tensor):
                changed[tensor.name] = change_of(tensor.shape, of_tensor)
                continue
            value = own_memory(tensor.nbytes, device_of(self.ranks)).view(tensor.dtype).view(tensor.shape)
            for nest, _, values in of_tensor:
                scatter_elements(Nest(0, nest.destination, nest.axes).gathered(), values, value.view(-1))
            place_constants(tensor, value)
            changed[tensor.name] = value
        names = (tensor.name for unit in sent.bucket for tensor in unit.sent)
        return [(name, changed[name]) for name in names if name in changed]

    def _finish(self, unit: Unit, sent: dict[str, torch.Tensor]) -> Tensors:
        """Return the tensors of a unit, merged if it has adapters."""
        if unit.merge is None:
            return [(tensor.name, sent[tensor.name]) for tensor in unit.sent]
        merge, names = unit.merge, self._names
        trim_heap()  # of the merge before
        merged = merge.run({id(p): sent[names[id(p)]] for p in (*merge.parameters, *merge.adapters())})
        sources = sent | {names[id(p)]: value for p, value in zip(merge.parameters, merged, strict=True)}
        made: Tensors = []
        for tensor in unit.made:
            value = own_memory(tensor.nbytes, merged[0].device).view(tensor.dtype).view(tensor.shape)
            for copy in tensor.copies:
                if isinstance(copy.leaf, Source):
                    scatter_elements(copy.nest, sources[copy.leaf.name].reshape(-1), value.view(-1))
            place_constants(tensor, value)
            made.append((tensor.name, value))
        return made


@contextlib.contextmanager
def delivery(sending: Sending) -> Iterator[Iterator[Tensors]]:
    """Yield the buckets, all of which the block has to take. Collective: all ranks raise if one rank's block raises.

    A bucket is taken when the next one is asked for, or when its list has been emptied.
    """
    buckets = sending.buckets()
    # The other ranks learn at this step of errors that come after the last bucket, such as an answer of the server.
    with sending.ranks.step("handing out the weights"):
        # The first one is asked for here: an error before a generator has begun would not reach the other ranks.
        first = list(itertools.islice(buckets, 1))
        try:
            yield itertools.chain(first, buckets)
            if sending.failure is None and (sending.latest or next(buckets, None) is not None):
                raise ConfigError("the client did not take all of the weights")
        except BaseException as caught:
            if sending.failure is None:
                error = caught
                if isinstance(caught, StopIteration | GeneratorExit):  # which say something else to a generator
                    error = RuntimeError(f"the client raised {type(caught).__name__}")
                    error.__cause__ = caught
                buckets.throw(error)  # raised on all ranks
                raise
        finally:
            buckets.close()
        if sending.failure is not None:  # all ranks know of it, whatever the client has made of it
            raise sending.failure


def name_tensor_pairs(buckets: Iterator[Tensors]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and tensors of all buckets."""
    for bucket in buckets:
        bucket.reverse()
        while bucket:
            yield bucket.pop()  # so that nothing here keeps it while the next bucket is made


@functools.cache
def _stream_of(device: torch.device) -> torch.Stream:
    """Return the one stream on which buckets are made: torch keeps freed memory for the stream that took it."""
    return torch.Stream(device)


@contextlib.contextmanager
def _on(stream: torch.Stream) -> Iterator[None]:
    """Use this stream inside, and wait for it. See [Note: streams]."""
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.synchronize(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
    stream.synchronize()


def gather_elements(nest: Nest, source: torch.Tensor, destination: torch.Tensor) -> None:
    """Put the elements of the flat tensor `source` that a nest moves into `destination`, cast and without gaps."""
    values = source_elements(nest, source)
    for cast in nest.casts[:-1]:
        values = values.to(cast)
    destination.view(values.shape).copy_(values)


def _piece(message: torch.Tensor, part: MessagePart, dtype: torch.dtype) -> torch.Tensor:
    return message[part.start : part.start + part.nest.numel * dtype.itemsize].view(dtype)


def place_constants(tensor: PlannedTensor, value: torch.Tensor) -> None:
    """Put values that are not those of a parameter, such as padding, into a tensor."""
    for copy in tensor.copies:
        if isinstance(copy.leaf, Held):
            flat = copy.leaf.flat.to(value.device)
            scatter_elements(copy.nest.shifted(source=-copy.leaf.first), flat, value.view(-1))


class _Changes:
    """Notices changes of the weights while they are sent: buckets from before and after one would not be a model."""

    def __init__(self, engine: nn.Module, shards: Sequence[RankShard]) -> None:
        self._model, self._shards = unwrapped(engine), shards
        self._before = [shard.state for shard in shards]
        self._parameters = {id(shard.tensor) for shard in shards}
        optimizers = [] if zero3() is None else zero3().optimizers_of(engine, [shard.tensor for shard in shards])
        self._optimizers = {id(optimizer) for optimizer in optimizers}
        self._stepped = ""
        self.hook = register_optimizer_step_post_hook(self._note_step)

    def refuse(self) -> None:
        """Raise ConfigError if something that can be seen has changed the weights."""
        change = f"an optimizer ({self._stepped}) stepped" if self._stepped else ""
        present = {*map(id, self._model.parameters())}
        for shard, before in zip(self._shards, self._before, strict=True):
            # FSDP2 puts other parameters in the place of its DTensors while it computes.
            may_go = is_dtensor(shard.tensor) or not isinstance(shard.tensor, nn.Parameter)
            if not change and (shard.state != before or not (may_go or id(shard.tensor) in present)):
                change = f"{shard.source.name} was changed"
        if change:
            raise ConfigError(
                f"{change} while the weights were sent, so what was sent before and after it would not be any state of "
                "the model; take the next step when this call has ended, or all buckets were taken"
            )

    def _note_step(self, optimizer: Any, *_: Any) -> None:
        trained = (id(parameter) for group in optimizer.param_groups for parameter in group["params"])
        if id(optimizer) in self._optimizers or not self._parameters.isdisjoint(trained):
            self._stepped = type(optimizer).__name__

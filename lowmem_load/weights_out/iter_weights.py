"""iter_weights and push_weights: the tensors that `save_model` writes, put together on the ranks, bucket by bucket.

A save asks which bytes of files a rank's elements fill; here they fill tensors in memory. See docs/howto/rlhf.md.
"""

from __future__ import annotations

import functools
import inspect
import sys
import tempfile
import weakref
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import nn

from lowmem_load.distributed.side_group import device_of
from lowmem_load.distributed.steps import RankGroup
from lowmem_load.engines.mesh import chunks_of, local_tensor
from lowmem_load.errors import ConfigError, UnsupportedError
from lowmem_load.models.active import load_lock
from lowmem_load.models.peft import Merge
from lowmem_load.planning.expression import Expression, Shape
from lowmem_load.planning.proof import prove_names
from lowmem_load.renamed import renamed_keywords
from lowmem_load.weights_out.buckets import PlannedTensor, Unit, merge_unit
from lowmem_load.weights_out.rank_shards import RankShard, is_dtensor, rank_shards, ranks_of, unwrapped
from lowmem_load.weights_out.send import Sending, SendPlan, Tensors, delivery, name_tensor_pairs
from lowmem_load.weights_out.weights import plan_tensor, weights_of_model

Names: TypeAlias = "Collection[str] | Callable[[str], bool]"


@renamed_keywords(engine_or_model="model", to="dst")
def iter_weights(
    model: nn.Module,
    *,
    bucket_bytes: int = 1 << 30,
    dst: int | Literal["all"] = "all",
    dtype: torch.dtype | None = None,
    names: Names | None = None,
    merge_adapters: bool = False,
    changed_only: bool = False,
) -> Generator[Tensors, None, None]:
    """Yield all weights in buckets, `[(name, tensor), ...]`, put together from the parts of the ranks.

    Names, shapes, dtypes and values are those of the files that `save_model` would write. Partitions are read where
    they lie, also on the host or nvme; DeepSpeed's parameters stay as they are. While the consumer has one bucket, the
    next one is on its way. The tensors have memory of their own, on the accelerator where its collectives run, and stay
    right as long as they are kept. The list is emptied when the next one is asked for.

    Args:
        model: an engine (so that its steps are noticed under each stage) or a model, as for `save_model`.
        bucket_bytes: a bucket ends before it would exceed them. A tensor at least as large has a bucket of its own.
        dst: "all", or the rank (in the group of the ranks that have the model) that gets the tensors; other ranks get
            empty lists.
        dtype: as for `save_model`. With torch.float32 the optimizer's fp32 values are yielded where a ZeRO-3 engine has
            some.
        names: names to yield, or a function that says for a name whether to yield it; equal on all ranks.
        merge_adapters: yield what `merge_and_unload` of a PEFT model would make, and not the adapters. The layers of a
            bucket are merged when they are put together; the engine does not change.
        changed_only: yield only what differs, bit by bit, from the last time that all buckets were taken: a tensor in
            full, or a `Change` of some elements, for `apply_changes`. All tensors are yielded the first time, and again
            if a loop did not end, if the layout or the arguments changed, or if other weights were sent in between.

    Call on every rank that has the model. All ranks have to take all buckets, or stop after the same one. There are at
    most `2 * total bytes / bucket_bytes + 1`, each with one collective (on gloo, and for experts on hundreds of ranks,
    with one of each rank).
    Memory: on ranks that get tensors two times `bucket_bytes`, or two times the largest tensor if that is larger: the
    messages of a bucket, and its tensors. On accelerators messages that are padded may take as much again. A merge
    takes a few times its layer. With `changed_only` each rank keeps what it sent last in host memory: its part of the
    model, in the dtype that is sent. For an accelerator it is pinned, and torch rounds each bucket to a power of two.

    Raises:
        ConfigError: an argument cannot be used, an optimizer stepped or a weight changed between two buckets, or
            `GatheredParameters` is open.
        UnsupportedError: names a tensor that cannot be put together, and why.
        RankError: another rank failed, stopped early, or did not come for the next bucket.

    Example:
        for bucket in iter_weights(engine, dst=0):  # on every rank
            for name, tensor in bucket:  # on rank 0
                send_to_inference(name, tensor)
    """
    arguments = Arguments(bucket_bytes, dst, dtype, names, merge_adapters, changed_only)
    sending = plan_weights(model, arguments, iter_weights)
    yield from sending.buckets()
    sending.keep_snapshot(iter_weights)


@dataclass(frozen=True, slots=True)
class Arguments:
    """Those of `iter_weights`."""

    bucket_bytes: int = 1 << 30
    dst: int | Literal["all"] = "all"
    dtype: torch.dtype | None = None
    names: Names | None = None
    merge_adapters: bool = False
    changed_only: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.names, Iterable) and not callable(self.names):  # the caller may change the given ones later
            names = {self.names} if isinstance(self.names, str) else self.names
            object.__setattr__(self, "names", frozenset(names))

    def choose(self, tensors: Mapping[str, Expression]) -> dict[str, Expression]:
        """Return the tensors to yield."""
        names = tensors.keys() if self.names is None else self.names
        if not callable(names) and (unknown := sorted(set(names) - tensors.keys())):
            raise ConfigError(f"iter_weights: names: {', '.join(unknown)}: not in the checkpoint of this model")
        is_chosen = names if callable(names) else names.__contains__
        return {name: part for name, part in tensors.items() if is_chosen(name)}


_KEPT: weakref.WeakKeyDictionary[nn.Module, tuple[list[Any], SendPlan]] = weakref.WeakKeyDictionary()
"""What decided the last plan of a model, and the plan: planning experts may take longer than sending them."""


def plan_weights(engine: nn.Module, arguments: Arguments, taker: object = None) -> Sending:
    """Return the weights of a model, planned but not sent. Collective.

    A snapshot serves the `taker` that took it on this rank, and goes from the plan: it is whole again once all is sent.
    """
    model = unwrapped(engine)
    with load_lock():
        ranks = ranks_of(model)
        with ranks.step("planning the weights") as step:
            if arguments.bucket_bytes < 1:
                raise ConfigError(f"iter_weights: bucket_bytes: {arguments.bucket_bytes!r} is not a positive number")
            if arguments.dst != "all" and arguments.dst not in range(ranks.world_size):
                raise ConfigError(
                    f"iter_weights: dst: {arguments.dst!r} is neither 'all' nor a rank below {ranks.world_size}"
                )
            if arguments.changed_only and (arguments.merge_adapters or callable(arguments.names)):
                raise ConfigError(
                    "iter_weights: changed_only: what was sent last cannot be compared if adapters are merged, or if "
                    "names is a function; send all, or the adapters alone, and pass the names"
                )
            masters = arguments.dtype == torch.float32 and not arguments.merge_adapters
            shards = rank_shards(model, ranks.rank, masters=masters)
            plan = _plan(model, arguments, shards, ranks)
            before, plan.snapshot = plan.snapshot, None
            snapshot = before[1] if before is not None and before[0]() is taker else []
            step.payload = bool(snapshot)
            step.digest = {
                "changed_only": str(arguments.changed_only),
                "bucket_bytes, dst, dtype": f"{arguments.bucket_bytes}, {arguments.dst}, {arguments.dtype}",
                "tensors": plan.tensors,
                "the layout of the tensors": plan.rules,
            }
        to = None if arguments.dst == "all" else arguments.dst
        if not all(step.payloads):  # a rank that has failed in between, or whose client is another one
            snapshot = []
        return Sending(engine, plan, shards, ranks, to=to, changed_only=arguments.changed_only, snapshot=snapshot)


def _plan(model: nn.Module, arguments: Arguments, shards: Sequence[RankShard], ranks: RankGroup) -> SendPlan:
    """Return the last plan of the model, or a new one if anything has changed that decides it on this rank."""
    given: list[Any] = [arguments, ranks.group, ranks.rank, ranks.world_size]
    given += [(shard.source, shard.local_region, shard.is_master) for shard in shards]
    before, plan = _KEPT.pop(model, (None, None))
    if plan is None or before != (state := [*given, *_state_of(model)]):
        units = _units_of(model, arguments, shards)
        plan = SendPlan(units, shards, ranks, arguments.bucket_bytes)
        state = [*given, *_state_of(model)]  # `save_pretrained` has put dtype and class into the configuration
    if not callable(arguments.names):  # it may choose others the next time
        _KEPT[model] = state, plan
    return plan


def _state_of(model: nn.Module) -> Iterator[Any]:
    """Yield what decides which tensors `save_pretrained` writes: the modules, which names are tied, configurations.

    A new object may have the `id` of one that is gone. Then all that is compared is equal, and the plan is right.
    """
    yield from (repr(getattr(model, name, None)) for name in ("config", "peft_config"))
    for module in model.modules():
        adapter = repr(getattr(module, "_active_adapter", None))  # PEFT may save or merge another part by it
        yield id(module), type(module), adapter, {*module._non_persistent_buffers_set}  # noqa: SLF001
    for named in (nn.Module.named_parameters, nn.Module.named_buffers):
        yield [(name, id(tensor)) for name, tensor in named(model, remove_duplicate=False)]


def _units_of(model: nn.Module, arguments: Arguments, shards: Sequence[RankShard]) -> list[Unit]:
    """Return what is sent together: a tensor, or the parameters of a merge, of which all its tensors are made."""
    sources = {id(shard.tensor): shard.source for shard in shards}
    options: dict[str, Any] = {"dtype": arguments.dtype, "merge_adapters": arguments.merge_adapters, "kwargs": {}}
    options |= {"max_shard_size": 1 << 60, "has_configs": False}  # one file
    with tempfile.TemporaryDirectory(prefix="lowmem_load-") as made:
        weights = weights_of_model(model, shards, Path(made), **options)
    files = weights.files
    names = {(file.name, name): name for file in files for name in file.tensors}
    prove_names("iter_weights: the files of a save", names, names)  # each adapter has a file, with the same names
    merge_of = {sources[id(parameter)].name: merge for merge in weights.merges for parameter in merge.parameters}
    merged: dict[Merge, list[PlannedTensor]] = {}
    units: list[Unit] = []
    for name, part in arguments.choose({name: part for file in files for name, part in file.tensors.items()}).items():
        tensor = plan_tensor(name, part)
        found = {merge_of[source.name] for source in tensor.sources if source.name in merge_of}
        if len(found) > 1:
            raise ConfigError(f"{name}: is made of parameters that are merged apart; save the model instead")
        if found:
            merged.setdefault(found.pop(), []).append(tensor)
        else:
            units.append(Unit((tensor,)))
    return [*units, *(merge_unit(merge, tensors, sources) for merge, tensors in merged.items())]


# -- to inference engines. Sources of the methods: trl 1.16 `generation/vllm_client.py`; sglang 0.5
# `srt/entrypoints/engine.py`; vllm 0.28 and 0.33 `distributed/weight_transfer/base.py` --------------------------------

_OF_TRL, _OF_OLD_TRL, _OF_SGLANG = "update_named_params", "update_named_param", "update_weights_from_tensor"
_METHODS = _OF_TRL, _OF_OLD_TRL, _OF_SGLANG
_OF_CHANGES = "apply_changes"

_RESETS = "reset_prefix_cache", "flush_cache"
"""Methods that drop what was computed with the old weights."""


@renamed_keywords(engine_or_model="model")
def push_weights(model: nn.Module, client: Any, **keywords: Any) -> None:
    """Send all weights of a model to an inference engine. See `iter_weights`.

    Args:
        model: as for `iter_weights`.
        client: a function that takes a bucket, `[(name, tensor), ...]`, such as the `load_weights` of a vLLM model; or
            an object with TRL's `update_named_params(metadata, named_params)` or `update_named_param(name, weights)`,
            such as its `VLLMClient`; or with SGLang's `update_weights_from_tensor(named_tensors, flush_cache=)`, such
            as its `Engine`. An object's `reset_prefix_cache()` or `flush_cache()` is called at the end, if it has one.
            Its calls return when they have ended; a coroutine, generator or future is an error. None on ranks that do
            not take weights. If one rank has a client, the weights are sent to it alone, otherwise to all.
        **keywords: bucket_bytes, dtype, names, merge_adapters and changed_only, as for `iter_weights`. With
            `changed_only` a client is an object with a method `apply_changes(bucket)`, and one that has not taken the
            last push in full, such as a new one, is sent all.

    Call on every rank that has the model. Memory: as `iter_weights`, on ranks that are sent the weights.

    Raises:
        ConfigError: no rank has a client, or it cannot be used; and as `iter_weights`.
        RankError: the client of a rank failed, or did not take all weights; it is chained to the client's own error.

    Example:
        is_first = torch.distributed.get_rank() == 0
        client = VLLMClient("http://inference:8000") if is_first else None  # TRL's
        push_weights(engine, client, dtype=torch.bfloat16)  # on every rank
    """
    ranks = ranks_of(unwrapped(model))
    with ranks.step("finding who takes the weights") as step:
        step.payload = client is not None
        arguments = Arguments(dst="all", **keywords)
        if client is not None and arguments.changed_only and _method_of(client, True) is None:
            raise ConfigError(
                f"push_weights: client: a {type(client).__name__} has no method {_OF_CHANGES}, so it takes no changes; "
                "pass an object that has one, which writes a bucket of tensors and `Change`s, or leave changed_only out"
            )
        if client is not None and not callable(client) and _method_of(client, arguments.changed_only) is None:
            raise ConfigError(
                f"push_weights: client: a {type(client).__name__} is not a function and has none of the methods "
                f"{', '.join(_METHODS)}; pass a function that takes a bucket, or an object with one of them"
            )
    for other, (_, plan) in list(_KEPT.items()):  # of which this client will not have the weights any more
        if client is not None and other is not unwrapped(model) and plan.snapshot and plan.snapshot[0]() is client:
            plan.snapshot = None
    takers = [rank for rank, takes in enumerate(step.payloads) if takes]
    if not takers:
        raise ConfigError("push_weights: client: no rank has one; pass it on the rank that is to take the weights")
    dst: int | Literal["all"] = takers[0] if len(takers) == 1 else "all"
    sending = plan_weights(model, replace(arguments, dst=dst), client)
    with delivery(sending) as buckets:
        hand_over(client, sending, buckets)
    sending.keep_snapshot(client)
    with ranks.step("resetting the cache"):
        if reset := next((name for name in _RESETS if hasattr(client, name)), ""):
            answer = _finished(getattr(client, reset)())
            if answer is False or getattr(answer, "success", True) is False:  # vLLM's and SGLang's
                raise ConfigError(
                    f"push_weights: client: {reset} failed, so what was computed with the old weights is still used; "
                    "end all requests of the engine, and reset its cache again"
                )


class TensorMeta(NamedTuple):
    """What vLLM is told of a tensor: its `ParamMeta`. Without owners, each rank yields it in full."""

    name: str
    dtype: torch.dtype
    shape: Shape
    owners: Shape | None = None
    mesh_shape: Shape | None = None
    placements: tuple[Any, ...] | None = None


class _Metadata(list[TensorMeta]):
    """A list, as vLLM 0.33 reads it, that can be called, as vLLM 0.28 to 0.32 do."""

    def __call__(self) -> _Metadata:
        return self


class WeightSource:
    """The weights of a model, as the engines for trainers in vLLM 0.28 and later take them: their `WeightSource`.

    Each iteration yields the present weights as (name, tensor). All ranks have to iterate, and to the end. Weights may
    not change between two tensors, and so not within `send_weights`.

    The arguments are those of `iter_weights`, without `changed_only`. For `dst`, 0 is enough for vLLM's NCCL engine,
    whose rank 0 sends; its IPC and sharded RDT engines need "all". Its M2N engine takes `iter_local`, which needs FSDP2
    and no conversion. Its sparse engine has no source, and takes patches: see docs/howto/rlhf.md. Its ModelExpress has
    no engine for trainers.

    Raises:
        ConfigError, UnsupportedError, RankError: as `iter_weights`, when the metadata is asked for or when iterated.

    Example:
        source = WeightSource(engine, dst=0)
        names = [tensor.name for tensor in source.metadata]
        for name, tensor in source:  # on every rank
            send_to_inference(name, tensor)
    """

    @renamed_keywords(engine_or_model="model", to="dst")
    def __init__(self, model: nn.Module, **keywords: Any) -> None:
        self._engine, self._arguments = model, Arguments(**keywords)
        if self._arguments.changed_only:
            raise ConfigError(
                "WeightSource: changed_only: a source yields all weights; pass it to push_weights instead"
            )

    @functools.cached_property
    def _planned(self) -> Sending:
        return plan_weights(self._engine, self._arguments)

    @property
    def metadata(self) -> _Metadata:
        """The `name`, `dtype` and `shape` of each tensor, in order, and who yields which part of it by `iter_local`.

        To ask for it the first time is collective.
        """
        return _Metadata(TensorMeta(one.name, one.dtype, one.shape, *self._lies(one)) for one in self._planned.tensors)

    def _lies(self, tensor: PlannedTensor) -> tuple[Any, ...]:
        """Return owners, mesh shape and placements of a parameter as FSDP2 cuts it; nothing for any other tensor."""
        nests, shapes = [copy.nest for copy in tensor.copies], [source.shape for source in tensor.sources]
        is_as_it_is = shapes == [tensor.shape] and len(nests) == 1 and nests[0].is_run and len(nests[0].casts) < 2
        shard = self._planned.shards[tensor.sources[0].name].tensor if is_as_it_is else None
        if shard is None or not is_dtensor(shard) or self._arguments.merge_adapters:
            return ()
        return chunks_of(shard, sys.modules.get("vllm.distributed.weight_transfer.base"))  # it tells them by class

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and the value of each tensor, on ranks that get any. Collective."""
        yield from name_tensor_pairs(plan_weights(self._engine, self._arguments).buckets())

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the same, as vLLM 0.33 asks for it. Collective."""
        return iter(self)

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name of each tensor and this rank's part of it, by its placements, without a gather. Collective.

        A part is the memory of the model itself, unless it is cast or copied to the accelerator.

        Raises UnsupportedError, the same on all ranks, that names a tensor which is not a parameter as FSDP2 cuts it.
        """
        sending = plan_weights(self._engine, self._arguments)
        kinds = [[(one.name, one.dtype, one.shape) for one in each.tensors] for each in (sending, self._planned)]
        if kinds[0] != kinds[1]:
            raise ConfigError("iter_local: the model has other tensors than the metadata; make a new WeightSource")
        if other := next((tensor.name for tensor in sending.tensors if not self._lies(tensor)), ""):
            raise UnsupportedError(
                f"{other}: is not a parameter that FSDP2 cuts by torch.chunk among all ranks in their order, which "
                "iter_local yields, but partitioned by ZeRO-3, replicated, placed otherwise, converted (fused experts) "
                "or merged; use iter_full, and in vLLM the engine nccl, ipc or sharded_rdt"
            )
        shards = [sending.shards[tensor.sources[0].name] for tensor in sending.tensors]
        before, loop = [shard.state for shard in shards], sending.ranks.loop()
        for tensor, shard in zip(sending.tensors, shards, strict=True):
            local = local_tensor(shard.tensor).detach()
            try:
                yield tensor.name, local.to(device_of(sending.ranks), tensor.dtype)
            except GeneratorExit:
                loop.leave(f"its loop over iter_local ended at {tensor.name}")
                raise
        with loop.step("comparing the weights with those at the start"):
            if before != [shard.state for shard in shards]:
                raise ConfigError("iter_local: weights were changed before all parts were taken; sync again")

    def owned_names(self, rank: int) -> list[str]:  # noqa: ARG002
        """Return the names that a rank yields: all."""
        return [tensor.name for tensor in self._planned.tensors]

    def implements_iter_full(self) -> bool:
        """Return True."""
        return True

    def implements_iter_local(self) -> bool:
        """Return whether `iter_local` can yield all tensors. To ask the first time is collective."""
        return all(map(self._lies, self._planned.tensors))


def _method_of(client: Any, changed_only: bool) -> str | None:
    methods = (_OF_CHANGES,) if changed_only else _METHODS
    return next((name for name in methods if callable(getattr(client, name, None))), None)


def hand_over(client: Any, sending: Sending, buckets: Iterator[Tensors]) -> None:
    """Hand all buckets to a client; take them on a rank that has none."""
    method = _method_of(client, sending.changed_only)
    if client is None:
        for _ in buckets:
            pass
    elif method == _OF_CHANGES:
        for bucket in buckets:
            _finished(client.apply_changes(bucket))
    elif method == _OF_TRL:
        _finished(client.update_named_params(metadata_of(sending), name_tensor_pairs(buckets)))
    elif method == _OF_OLD_TRL:
        for name, tensor in name_tensor_pairs(buckets):
            _finished(client.update_named_param(name, tensor))
            del tensor
    elif method == _OF_SGLANG:
        for bucket in buckets:
            answer = _finished(client.update_weights_from_tensor(bucket, flush_cache=False))
            if isinstance(answer, tuple) and not answer[0]:  # whether it succeeded, and a message
                raise ConfigError(f"push_weights: client: {_OF_SGLANG} says: {answer[1]}")
    else:
        for bucket in buckets:
            _finished(client(bucket))


def _finished(answer: Any) -> Any:
    """Return what a client has answered, unless it has yet to do what it was asked for."""
    is_late = inspect.isawaitable(answer) or inspect.isgenerator(answer) or inspect.isasyncgen(answer)
    if is_late or isinstance(answer, Future):
        raise ConfigError(
            f"push_weights: client: a call returned a {type(answer).__name__}, which nothing awaits, so its work may "
            "never be done; pass a client whose calls return when they have ended, such as a function with asyncio.run "
            "or with the result() of a future"
        )
    return answer


def metadata_of(sending: Sending) -> list[tuple[str, str, list[int]]]:
    """Return name, dtype ("bfloat16") and shape of each tensor in order, as TRL's client wants to know them before."""
    return [(tensor.name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for tensor in sending.tensors]

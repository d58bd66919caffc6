"""Fills the parts that ranks own of a model that was lazy: shards on the meta device, and ZeRO-3 partitions.

What comes from files unchanged, or moved and cast, each rank reads for itself: the elements of its part. What a script
has made or changed comes from rank 0, as by default.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lowmem_load.distributed.side_group import SideGroup
from lowmem_load.distributed.steps import RankGroup
from lowmem_load.engines.mesh import local_shard, local_tensor, part_of
from lowmem_load.errors import CheckpointError, UnsupportedError, listed
from lowmem_load.files.fill import Part, name_in_files
from lowmem_load.files.memory import naming_shortage
from lowmem_load.files.source import OpenSources
from lowmem_load.load.checks import agree_on_bytes, identify_files
from lowmem_load.load.execute import reading
from lowmem_load.load.lazy import LazyReader, leave, reader_of, was_lazy
from lowmem_load.phases import computing
from lowmem_load.planning.expression import Concat, Expression, Source, Strided, children, leaves
from lowmem_load.planning.load_plan import in_common_order
from lowmem_load.symbolic.lazy import LazyTensor, is_unread, keep, replace_in_place, values_of
from lowmem_load.text import fingerprint
from lowmem_load.weights_out.buckets import in_batches

if TYPE_CHECKING:
    from lowmem_load.engines.partition import Partitioner


BATCH_BYTES = 64 << 20
"""Bytes of changed weights that rank 0 sends at a time. A larger one goes by itself."""


def are_lazy(model: nn.Module) -> bool:
    """Return whether each rank of the default process group has a lazy model to fill, whatever it has read. Collective.

    Programs may give weights to one rank alone, from which the default loader then sends them.
    """
    with RankGroup(None).step("looking for lazy weights", name=type(model).__name__) as step:
        step.payload = was_lazy(model)
    return all(step.payloads)


def fill_sharded(model: nn.Module, state: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Give a model that is sharded on meta memory on a device, and the values of a state dict of the same names.

    Raises CheckpointError if the state dict lacks a name, or if the ranks have different weights. Collective: all ranks
    of the default process group. Memory: in addition to the shards, a staging buffer for each reading thread, and
    `BATCH_BYTES` or one tensor for what comes from rank 0.
    """
    ranks, name_of_model = RankGroup(None), type(model).__name__
    with ranks.session("filling the sharded model"), torch.no_grad():
        allocate_shards(model, device)
        shards = model.state_dict()
        with ranks.step("looking at the state dict"):
            if missing := sorted(shards.keys() - state.keys()):
                raise CheckpointError(
                    f"{name_of_model}: the state dict from which it is filled lacks {listed(missing)}. Pass the full "
                    "state dict of the same model"
                )
        unchanged = _find_unchanged(name_of_model, {name: state[name] for name in shards}, ranks)
        parts: dict[LazyReader, dict[int, Part]] = {}
        for name, tensor in unchanged.items():
            region, memory = local_shard(name, shards[name], needs_memory=True)
            part = Part(name, tensor.expression, region, memory)
            parts.setdefault(reader_of(tensor), {}).setdefault(memory.data_ptr() or id(memory), part)
        _read(name_of_model, {reader: list(own.values()) for reader, own in parts.items()}, ranks)
        _send({name: shards[name] for name in sorted(shards.keys() - unchanged.keys())}, state, ranks)
    leave(model)


def _find_unchanged(name: str, tensors: Mapping[Any, torch.Tensor], ranks: RankGroup) -> dict[Any, LazyTensor]:
    """Return those of the tensors, in order of their keys, that all ranks have as the files have them. Collective.

    Raise CheckpointError on all ranks unless these are the same tensors of equal files.
    """
    with ranks.step("finding what was changed") as step:
        lazy = {key: tensor for key, tensor in tensors.items() if isinstance(tensor, LazyTensor)}
        own = {key: tensor for key, tensor in lazy.items() if _is_of_files(tensor)}
        step.payload = [*own], [key for key, tensor in tensors.items() if key not in own and tensor.is_meta]
    if empty := step.payloads[0][1]:
        raise UnsupportedError(
            f"{name}: {listed(empty)} have no values: they are on the meta device on rank 0; make them on the CPU"
        )
    # What one rank has changed, all take from rank 0: ranks that differ in the way would wait for each other.
    unchanged = {key: own[key] for key in sorted(set(own).intersection(*(keys for keys, _ in step.payloads)))}
    parts = (leaf for tensor in unchanged.values() for leaf in leaves(tensor.expression))
    sources: list[OpenSources] = [*dict.fromkeys(leaf.files for leaf in parts if isinstance(leaf, Source))]
    with ranks.step("comparing the weights") as step:
        lines = (f"{key} {line}" for key, tensor in unchanged.items() for line in _lines(tensor.expression))
        files = [
            f"{place} {file.nbytes} {file.digest}"
            for place, opened in enumerate(sources)
            for file in in_common_order(opened.files.values())
        ]
        step.digest = {"weights that are not read yet": fingerprint(lines), "files": fingerprint(files)}
        step.payload = [identify_files(list(opened.files.values())) for opened in sources]
    for place, opened in enumerate(sources):
        ids = [of_rank[place] for of_rank in step.payloads]
        agree_on_bytes(ranks, name, list(opened.files.values()), opened, ids)
    return unchanged


def fill_partitions(partitioner: Partitioner, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Partition those of a model's parameters that are still as in the files. DeepSpeed has to partition the others.

    Returns the others, which then have memory: on the first rank with their values. They stay the same objects. Raises
    CheckpointError if the ranks have different weights. Collective: the ranks among which parameters are partitioned.
    Memory: the partitions, a staging buffer for each reading thread, and the others.
    """
    ranks = RankGroup(partitioner.group)
    lazy = {number: local for number, local in enumerate(parameters) if isinstance(local, LazyTensor)}
    with ranks.session("partitioning the model"), torch.no_grad():
        takable = {number: parameter for number, parameter in lazy.items() if partitioner.takes(parameter)}
        taken = _find_unchanged("the model", takable, ranks)
        parts: dict[LazyReader, list[Part]] = {}

        def read() -> None:
            _read("the model", parts, ranks)
            parts.clear()

        for parameter in taken.values():
            partitioner.make_room(read)
            reader = reader_of(parameter)  # which a lazy tensor alone has
            parts.setdefault(reader, []).extend(_partition(partitioner, parameter))
        read()
        partitioner.finish()
        with ranks.step("reading what was changed"):
            for number in lazy.keys() - taken.keys():
                local = lazy[number]
                if ranks.rank == 0 or not is_unread(local):
                    replace_in_place(local, keep(local))
                else:
                    replace_in_place(local, torch.empty(local.shape, dtype=local.dtype, device=local.device))
    if partitioner.module is not None:
        leave(partitioner.module)
    return [parameter for number, parameter in enumerate(parameters) if number not in taken]


def _partition(partitioner: Partitioner, parameter: Any) -> list[Part]:
    """Let a lazy parameter be one of ZeRO-3; return what its partitions are to be filled with."""
    expression = parameter.expression
    partitioner.convert(parameter)
    replace_in_place(parameter, torch.empty(0, dtype=parameter.dtype, device=partitioner.device))
    parts, name = partitioner.allocate(parameter), name_in_files(expression)
    return [Part(name, expression, region, memory[: region.numel]) for region, memory in parts]


def allocate_shards(model: nn.Module, device: torch.device) -> None:
    """Do what `to_empty` does, and name a shortage of memory.

    It makes several parameters of a tied one, and keeps the strides of a buffer, whose values come in order.
    """

    def put(name: str, tensor: torch.Tensor) -> None:
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, tensor)

    first: dict[int, str] = {}
    parameters = model.named_parameters(remove_duplicate=False)
    origins = {name: first.setdefault(id(parameter), name) for name, parameter in parameters}
    shard_bytes = sum(local_tensor(parameter).nbytes for parameter in model.parameters())
    with naming_shortage("shards of this rank", shard_bytes), torch.no_grad():
        model.to_empty(device=device)
    for name, origin in origins.items():
        if name != origin:
            put(name, model.get_parameter(origin))
    for name, buffer in list(model.named_buffers()):
        if local_tensor(buffer) is buffer and not buffer.is_contiguous():
            put(name, torch.empty(buffer.shape, dtype=buffer.dtype, device=device))


def _read(name: str, parts: Mapping[LazyReader, list[Part]], ranks: RankGroup) -> None:
    executors, reports = [reader.executor for reader in parts], [reader.report for reader in parts]
    needed_bytes = sum(part.memory.nbytes for own in parts.values() for part in own)
    with reading(ranks, name, executors, needed_bytes, reports, bar="Loading shards") as state:
        for reader, own in parts.items():
            report = reader.report
            with report.phase("read"):
                costs = reader.fill(own, state.on_part)
            report.needed_bytes, report.partition_bytes = costs.needed_bytes, sum(part.memory.nbytes for part in own)


def _send(shards: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor], ranks: RankGroup) -> None:
    """Fill shards with the values that rank 0 has, which go through the host. Collective."""
    side = SideGroup(ranks)
    with contextlib.closing(side):
        for number, batch in enumerate(in_batches(shards, lambda name: shards[name].nbytes, BATCH_BYTES)):
            with ranks.step("reading what was changed", progress=computing()):
                if not number:
                    side.connect()
                places = [local_shard(name, shards[name], needs_memory=True) for name in batch]
                with naming_shortage("changed weights", sum(shards[name].nbytes for name in batch)):
                    whole = [
                        values_of(state[name]).to("cpu", shards[name].dtype, copy=True).contiguous()
                        if ranks.rank == 0
                        else torch.empty(shards[name].shape, dtype=shards[name].dtype, device="cpu")
                        for name in batch
                    ]
            with ranks.step("sending what was changed", progress=side.progress(computing())):
                for values in whole:
                    side.broadcast(values, 0)
                side.finish(ranks.check)
            for (grid, memory), values in zip(places, whole, strict=True):
                memory.copy_(part_of(values, grid))


def _is_of_files(tensor: LazyTensor) -> bool:
    """Return whether a tensor is what a load has described, elements perhaps moved or cast since."""
    if not is_unread(tensor):
        return False
    known = reader_of(tensor).leaves
    return all(id(leaf) in known for leaf in leaves(tensor.expression))


def _lines(expression: Expression) -> Iterator[str]:
    """Yield a line for each step from files to a tensor. Ranks that differ here would give it other values."""
    nodes = [expression]
    while nodes:
        node = nodes.pop()
        text = f"{type(node).__name__} {node.shape} {node.dtype}"
        if isinstance(node, Source):
            text += f" {node.path.rpartition('/')[2]} {node.name} {node.start}"
        elif isinstance(node, Strided):
            text += f" {node.start} {node.strides}"
        elif isinstance(node, Concat):
            text += f" {node.dim}"
        yield text
        nodes.extend(children(node))

"""Fills the parts that ranks hold of a model that was lazy: shards on the meta device, and ZeRO-3 partitions.

What comes from files unchanged, or moved and cast, each rank reads for itself: the elements of its part. What a script
has made or changed comes from rank 0, as in stock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lowmem_load.distributed.group import RankGroup
from lowmem_load.distributed.heartbeat import Progress
from lowmem_load.dtensor.mesh import local_shard, local_tensor, scatter_into
from lowmem_load.errors import CheckpointError, UnsupportedError, listed
from lowmem_load.io.memory import naming_shortage
from lowmem_load.lazy_weights.lazy_model import LazyReader, Part, leave, reader_of
from lowmem_load.phases import progress_bar
from lowmem_load.planning.expression import Computed, Elementwise, Expression, Held, Source, children, leaves
from lowmem_load.symbolic.lazy import LazyTensor, become, is_unread, keep, values_of
from lowmem_load.text import fingerprint, share

if TYPE_CHECKING:
    from lowmem_load.ds.partition import Partitioner


def fill_sharded(model: nn.Module, state: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Give a model that is sharded on meta memory on a device, and the values of a state dict of the same names.

    Collective: all ranks of the default process group. Memory: beside the shards a staging buffer for each reading
    thread; for what comes from rank 0, one tensor.

    Raises:
        CheckpointError: the state dict lacks a name, or the ranks hold different weights.
        RankError: another rank failed.
    """
    ranks = RankGroup(None)
    with ranks.session("filling the sharded model"), torch.no_grad():
        allocate_shards(model, device)
        shards = model.state_dict()
        with ranks.step("finding what was changed") as step:
            if missing := sorted(shards.keys() - state.keys()):
                raise CheckpointError(f"the state dict that the sharded model is filled from lacks {listed(missing)}")
            others = [name for name in shards if not _is_of_files(state[name])]
            step.payload = others, [name for name in others if state[name].is_meta]
        # What one rank has changed, all take from rank 0: ranks that differ in the way would wait for each other.
        changed = {name for names, _ in step.payloads for name in names}
        if empty := step.payloads[0][1]:
            raise UnsupportedError(
                f"{type(model).__name__}: {listed(empty)} have no values: they are on the meta device on rank 0; make "
                "them on the CPU"
            )
        with ranks.step("comparing the weights") as step:
            lines = (f"{name} {line}" for name in sorted(shards.keys() - changed) for line in _lines(state[name]))
            step.digest = {"weights that are not read yet": fingerprint(lines)}
        parts: dict[LazyReader, dict[int, Part]] = {}
        for name, tensor in state.items():
            if name in shards and name not in changed:
                assert isinstance(tensor, LazyTensor)  # `_is_of_files`
                region, memory = local_shard(name, shards[name], needs_memory=True)
                part = Part(name, tensor.expression, region, memory)
                parts.setdefault(reader_of(tensor), {}).setdefault(memory.data_ptr() or id(memory), part)
        for reader, own in parts.items():
            _read(reader, list(own.values()), ranks)
        for name in shards:
            if name in changed:
                values = values_of(state[name]) if ranks.rank == 0 else torch.empty(shards[name].shape)
                scatter_into(name, shards[name], values)
    leave(model)


def fill_partitions(partitioner: Partitioner, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Partition those of a model's parameters that are still as in the files. DeepSpeed has to partition the others.

    Returns the others, which then have memory: on the first rank with their values. They stay the same objects.
    Collective: the ranks among which parameters are partitioned. Memory: the partitions, a staging buffer for each
    reading thread, and the others.

    Raises:
        CheckpointError: the ranks hold different weights.
        RankError: another rank failed.
    """
    ranks = RankGroup(partitioner.group)
    lazy = {number: local for number, local in enumerate(parameters) if isinstance(local, LazyTensor)}
    with ranks.session("partitioning the model"), torch.no_grad():
        with ranks.step("finding what was changed") as step:
            step.payload = [number for number in lazy if partitioner.takes(lazy[number]) and _is_of_files(lazy[number])]
        taken = sorted(set(step.payloads[0]).intersection(*step.payloads))
        with ranks.step("comparing the weights") as step:
            lines = (f"{number} {line}" for number in taken for line in _lines(lazy[number]))
            step.digest = {"weights that are not read yet": fingerprint(lines)}
        parts: dict[LazyReader, list[Part]] = {}

        def read() -> None:
            for reader, own in parts.items():
                _read(reader, own, ranks)
            parts.clear()

        for number in taken:
            if partitioner.swapping is not None and partitioner.swapping.is_swap_due:
                read()
                partitioner.swapping.swap_out()
            parameter, reader = lazy[number], reader_of(lazy[number])
            parts.setdefault(reader, []).extend(_partition(partitioner, parameter))
        read()
        if partitioner.swapping is not None:
            partitioner.swapping.finish()
        with ranks.step("reading what was changed"):
            for number in lazy.keys() - set(taken):
                _make_ordinary(lazy[number], has_values=ranks.rank == 0)
    if partitioner.module is not None:
        leave(partitioner.module)
    return [parameter for number, parameter in enumerate(parameters) if number not in set(taken)]


def _partition(partitioner: Partitioner, parameter: Any) -> list[Part]:
    """Let a lazy parameter be one of ZeRO-3; return what its partitions are to be filled with."""
    expression, regions = parameter.expression, partitioner.regions(parameter.numel())
    partitioner.convert(parameter)
    become(parameter, torch.empty(0, dtype=parameter.dtype, device=partitioner.device))
    tensors = partitioner.allocate(parameter, [region.numel for region in regions])
    name = next((leaf.name for leaf in leaves(expression) if isinstance(leaf, Source)), "a parameter")
    return [
        Part(name, expression, region, tensor[: region.numel]) for region, tensor in zip(regions, tensors, strict=True)
    ]


def _make_ordinary(parameter: LazyTensor, *, has_values: bool) -> None:
    if has_values or not is_unread(parameter):
        become(parameter, keep(parameter))
    else:
        become(parameter, torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device))


def allocate_shards(model: nn.Module, device: torch.device) -> None:
    """Do what `to_empty` does, keep ties (it makes several parameters of a tied one), and name a shortage of memory."""
    first: dict[int, str] = {}
    ties = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            ties.append((name, first[id(parameter)]))
    shard_bytes = sum(local_tensor(parameter).nbytes for parameter in model.parameters())
    with naming_shortage("shards of this rank", shard_bytes), torch.no_grad():
        model.to_empty(device=device)
    for name, origin in ties:
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, model.get_parameter(origin))


def _read(reader: LazyReader, parts: list[Part], ranks: RankGroup) -> None:
    executor, report = reader.executor, reader.report
    needed_bytes, read_before = sum(part.memory.nbytes for part in parts), executor.stats.read_bytes

    def progress() -> Progress:
        read = share(executor.stats.read_bytes - read_before, needed_bytes)
        return Progress(executor.stats.read_bytes, f"{read} read, last from {executor.stats.path or 'no file'}")

    def on_part() -> None:
        ranks.check()
        report.sample_memory()

    def on_bytes(num_bytes: int) -> None:
        update(num_bytes)
        ranks.check()

    reading = ranks.step("reading", name=reader.name, progress=progress)
    bar = progress_bar(needed_bytes, "Loading shards", ranks.rank)
    with reading, report.phase("read"), bar as update:
        executor.on_bytes, executor.sources.on_wait = on_bytes, ranks.check
        try:
            costs = reader.fill(parts, on_part)
        finally:
            executor.on_bytes, executor.sources.on_wait = int, int
    report.needed_bytes, report.partition_bytes = costs.needed_bytes, needed_bytes


def _is_of_files(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is what a load has described, elements perhaps moved or cast since."""
    if not isinstance(tensor, LazyTensor) or not is_unread(tensor):
        return False
    known, nodes = reader_of(tensor).leaves, [tensor.expression]
    while nodes:
        node = nodes.pop()
        if id(node) in known:
            continue
        if isinstance(node, Source | Held | Computed | Elementwise):
            return False
        nodes.extend(children(node))
    return True


def _lines(tensor: torch.Tensor) -> Iterator[str]:
    """Yield a line for each step from files to a tensor. Ranks that differ here would give it other values."""
    assert isinstance(tensor, LazyTensor)
    nodes: list[Expression] = [tensor.expression]
    while nodes:
        node = nodes.pop()
        text = f"{type(node).__name__} {node.shape} {node.dtype}"
        if isinstance(node, Source):
            text += f" {node.path.rpartition('/')[2]} {node.name} {node.start}"
        yield text
        nodes.extend(children(node))

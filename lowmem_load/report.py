"""What a load did: bytes, reads, seconds, memory, keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from lowmem_load.differences import known_differences
from lowmem_load.phases import FileReads, Memory, Phases
from lowmem_load.planning.cooperative import Shared
from lowmem_load.planning.load_plan import REPLICATED, LoadPlan, SlowPath
from lowmem_load.planning.reads import LOCAL, ReadCost
from lowmem_load.quantities import count, duration, size
from lowmem_load.tables import facts

if TYPE_CHECKING:
    from rich.console import Group


_LISTS = ("missing_keys", "unexpected_keys", "mismatched_keys", "uninitialised_parameters", "slow_paths")
"""Attributes of a report that list names."""

MAX_NAMES = 3
"""Of each that a table shows."""


def _count(number: int) -> str:
    return f"{number / 1e9:.3f} B" if number >= 1e9 else f"{number / 1e6:.3f} M"


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):.1f}"


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Accelerator memory of this process's tensors, bytes: now, and the most since it started or reset its peaks."""

    allocated_bytes: int
    peak_bytes: int


def device_memory() -> DeviceMemory:
    """Return the memory of the current accelerator device; zeros without one."""
    if torch.accelerator.is_available():
        device_module = torch.get_device_module(torch.accelerator.current_accelerator())
        if device_module.is_initialized():
            return DeviceMemory(int(device_module.memory_allocated()), int(device_module.max_memory_allocated()))
    return DeviceMemory(0, 0)


@dataclass(frozen=True, slots=True)
class Overlap:
    """How long a load read for its device, how long it copied to it, and how long it did both at once. Seconds."""

    read_s: float
    copy_s: float
    both_s: float

    @classmethod
    def of(cls, reads: Sequence[tuple[float, float]], copies: Sequence[tuple[float, float]]) -> Overlap:
        """Return it for spans of time, as (begin, end), that may overlap among themselves."""
        read_s, copy_s = _union_s(reads), _union_s(copies)
        return cls(read_s, copy_s, read_s + copy_s - _union_s([*reads, *copies]))


def _union_s(spans: Iterable[tuple[float, float]]) -> float:
    total, last = 0.0, -math.inf
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, last))
        last = max(last, end)
    return total


@dataclass(slots=True)
class LoadReport(Phases):
    """What one load did on this rank.

    Attributes:
        name: what was loaded.
        rank, world_size: of the partition group.
        num_nodes: that its ranks run on; ranks in containers of their own count as nodes.
        commits: of the Hub, that the files are of: one for a model, two for an adapter and its base model; none for
            folders.
        ds_config: the configuration the model was partitioned for, every "auto" that loading reads resolved.
            `deepspeed.initialize` accepts it once optimizer and scheduler hold no "auto".
        dtype: storage dtype of floating-point parameters, as torch prints it.
        num_parameters: distinct parameters; tied ones count once.
        num_elements: elements of all of them, unpadded.
        persistent_parameters, persistent_elements: parameters, and their elements, that an engine of this ds_config
            keeps whole on every rank because they are at most stage3_param_persistence_threshold elements large.
        partition_bytes: bytes of the partitions on this rank, padding included; 0 under stages 0 to 2.
        total_partition_bytes: bytes of the partitions on all ranks.
        whole_bytes: bytes of the parameters that every rank holds whole: all of them under stages 0 to 2, those beside
            the partitions where `partition` was given.
        file_bytes: bytes of the files of the checkpoint, headers included.
        num_quantized: parameters whose packed values are held; their elements are counted as they are stored.
        companion_bytes: bytes of what goes with these, whole on every rank: scales, code books.
        needed_bytes: bytes of shard files whose values ended up in the partitions and buffers of this rank.
        read_bytes: bytes read from shard files, headers excluded.
        num_reads: reads of the plan; small ones that lie one behind the other share a system call.
        num_opens: how often this rank opened a shard file, to read its header, its data, or both.
        headers_from: the rank that asked the Hub and read the index and the headers for this one: itself, or the first
            of its node.
        num_retries: attempts that followed a transient fault (EINTR, EAGAIN, EIO, ESTALE) of the storage.
        seconds, spans, start_memory, peak_memory: see `Phases`; the phases are describe, plan, compare, read.
        files: what was read of each file, by its path.
        read_cost: what a read was taken to cost, by which reads were planned, and where that comes from.
        shared: what came of reading together with other ranks of the node; None where this rank read alone.
        not_shared: why it did, where it had reads to share.
        start_device, peak_device_bytes: accelerator memory of this process's tensors before the load, and the most
            during it; 0 on the CPU. The most is exact where it is more than ever before in the process, else the most
            that was seen after a parameter was made.
        overlap: of reads and copies, where memory of a device was filled.
        missing_keys, unexpected_keys, mismatched_keys: as transformers' `output_loading_info` gives them.
        uninitialised_parameters: parameters that are neither in the files nor initialised by transformers, whose
            ordinary load leaves them as `torch.empty` made them. Here they are zero.
        read_to_describe: see `LoadPlan`.
        slow_paths: parameters and buffers that took a slower path.
        recast_parameters: parameters that an ordinary load keeps in another dtype (float32 as a rule) and that are
            stored in the engine's dtype, because a ZeRO-3 engine trains all parameters in one.
        differences_from_stock: a sentence for each difference that `make compat` saw between stock ZeRO-3 and this load
            with the installed releases, on models that have what it concerns.
    """

    name: str
    rank: int = 0
    world_size: int = 1
    num_nodes: int = 1
    commits: list[str] = field(default_factory=list)
    ds_config: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = ""
    num_parameters: int = 0
    num_elements: int = 0
    persistent_parameters: int = 0
    persistent_elements: int = 0
    partition_bytes: int = 0
    total_partition_bytes: int = 0
    whole_bytes: int = 0
    file_bytes: int = 0
    num_quantized: int = 0
    companion_bytes: int = 0
    needed_bytes: int = 0
    read_bytes: int = 0
    num_reads: int = 0
    num_opens: int = 0
    headers_from: int = 0
    num_retries: int = 0
    files: Mapping[str, FileReads] = field(default_factory=dict)
    read_cost: ReadCost = field(default_factory=ReadCost)
    shared: Shared | None = None
    not_shared: str = ""
    start_device: DeviceMemory = DeviceMemory(0, 0)
    peak_device_bytes: int = 0
    overlap: Overlap | None = None
    missing_keys: list[str] = field(default_factory=list)
    unexpected_keys: list[str] = field(default_factory=list)
    mismatched_keys: list[Any] = field(default_factory=list)
    uninitialised_parameters: list[str] = field(default_factory=list)
    read_to_describe: tuple[tuple[str, int], ...] = ()
    slow_paths: list[SlowPath] = field(default_factory=list)
    recast_parameters: list[str] = field(default_factory=list)
    differences_from_stock: list[str] = field(default_factory=list)

    def take_plan(self, plan: LoadPlan, ds_config: Mapping[str, Any]) -> None:
        """Note what a plan says of the load."""
        self.ds_config = ds_config
        self.num_parameters = len(plan.targets)
        self.num_elements = sum(target.numel for target in plan.targets)
        floating = [target.dtype for target in plan.targets if target.dtype.is_floating_point]
        self.dtype = str(floating[-1]) if floating else ""
        self.partition_bytes, self.whole_bytes = plan.partition_bytes, plan.replicated_bytes
        self.total_partition_bytes = self.partition_bytes * self.world_size
        self.file_bytes = sum(file.nbytes for file in plan.files)
        self.num_quantized, self.companion_bytes = plan.num_quantized, plan.companion_bytes
        self.needed_bytes, self.read_cost = plan.needed_bytes, plan.read_cost
        self.missing_keys, self.unexpected_keys = list(plan.missing_keys), list(plan.unexpected_keys)
        self.mismatched_keys = list(plan.mismatched_keys)
        self.uninitialised_parameters = [target.name for target in plan.targets if target.is_uninitialised]
        self.recast_parameters = [target.name for target in plan.targets if target.is_recast]
        self.slow_paths, self.read_to_describe = plan.slow_paths, plan.read_to_describe
        if any(target.kind != REPLICATED for target in plan.targets):
            parameters = [name for target in plan.targets for name in target.names]
            buffers = [name for buffer in plan.buffers for name in buffer.names]
            self.differences_from_stock = known_differences([*parameters, *buffers])

    def sample_memory(self) -> Memory:
        """Raise the peaks to the memory now where that is more; return the host memory now."""
        device = device_memory()
        is_new_peak = device.peak_bytes > self.start_device.peak_bytes
        reached = device.peak_bytes if is_new_peak else device.allocated_bytes
        self.peak_device_bytes = max(self.peak_device_bytes, reached)
        return Phases.sample_memory(self)  # with slots, super() would need the class that they were added to

    def savings(self) -> str:
        """Return one line: what this rank read of the files, and took of memory, beside the whole of both.

        The whole is what a rank of stock ZeRO-3 reads that loads for all; what that takes of memory is not known here.
        What is known to differ from stock follows.
        """
        spared = max(0, self.file_bytes - self.read_bytes)
        read = f"read {_mib(self.read_bytes)} of {_mib(self.file_bytes)} MiB in the files"
        share = f" ({spared / self.file_bytes:.0%} not read)" if self.file_bytes else ""
        held, whole = self.partition_bytes + self.whole_bytes, self.total_partition_bytes + self.whole_bytes
        return (
            f"{self.name}: rank {self.rank} of {self.world_size} {read}{share}, holds {_mib(held)} of "
            f"{_mib(whole)} MiB of parameters, and took at most {_mib(self._grown_bytes)} MiB of host memory for it"
            + "".join(f"; known: {sentence}" for sentence in self.differences_from_stock)
        )

    @property
    def _grown_bytes(self) -> int:
        return self.peak_memory.total_bytes - self.start_memory.total_bytes

    def _by(self, rank: int) -> str:
        return "this rank" if rank == self.rank else f"rank {rank}, of the same node"

    def _cost_text(self) -> str:
        cost = self.read_cost
        taken_as = f"taken as {cost.call_s * 1e6:g} us and {cost.bytes_per_s / 1e6:g} MB/s: {cost.origin}"
        return "" if cost.origin == LOCAL else taken_as

    def _device_text(self) -> str:
        if self.overlap is None:
            return ""
        grown = (self.peak_device_bytes - self.start_device.allocated_bytes) / (1 << 20)
        read_s, copy_s, both_s = self.overlap.read_s, self.overlap.copy_s, self.overlap.both_s
        return (
            f", {grown:.1f} MiB on the device; read {read_s:.2f} s, copied {copy_s:.2f} s, both at once {both_s:.2f} s"
        )

    def _sharing_text(self) -> str:
        if self.shared is None:
            return f"not, though some could be: {self.not_shared}" if self.not_shared else ""
        of = self.shared
        return (
            f"by {of.num_ranks} ranks of this node {size(of.node_bytes)} instead of {size(of.wanted_bytes)}, "
            f"of it {size(of.read_bytes)} here in {of.num_rounds} rounds; "
            f"{size(of.exchanged_bytes)} taken from the others"
        )

    def figures(self) -> dict[str, str]:
        """Return what there is to say, by topic, as text."""
        dtype = self.dtype.removeprefix("torch.")
        grown = self.peak_memory.total_bytes - self.start_memory.total_bytes
        held = f"{size(self.partition_bytes)} of {size(self.total_partition_bytes)}"
        whole = f", and {size(self.whole_bytes)} whole on every rank" if self.whole_bytes else ""
        retries = f", {self.num_retries} of them again" if self.num_retries else ""
        device = ""
        if self.overlap is not None:
            above = self.peak_device_bytes - self.start_device.allocated_bytes
            device = f"{size(above)} at the most; copied {duration(self.overlap.copy_s)}"
        rows = {
            "model": f"{self.num_parameters} parameters, {count(self.num_elements)} elements, {dtype}",
            "partition": held + whole,
            "quantized": f"{self.num_quantized}, with {size(self.companion_bytes)} of scales"
            * bool(self.num_quantized),
            "read": f"{size(self.read_bytes)} of {size(self.file_bytes)} in the files, "
            f"{size(self.needed_bytes)} needed; {self.num_reads:,} reads{retries}",
            "cost of a read": self._cost_text(),
            "read together": self._sharing_text(),
            "host memory": f"{size(grown)} above the start at the most",
            "device memory": device,
            "seconds": ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.seconds.items()),
            "kept whole in training": f"{self.persistent_parameters} small parameters, "
            f"{count(self.persistent_elements)} elements",
        }
        for label in _LISTS:
            values = getattr(self, label)
            if values:
                shown = ", ".join(str(getattr(value, "name", value)) for value in values[:MAX_NAMES])
                rows[label.replace("_", " ")] = f"{len(values)}: {shown}{', ...' if len(values) > MAX_NAMES else ''}"
        rows["known"] = "; ".join(self.differences_from_stock)
        return rows

    def __rich__(self) -> Group:
        return facts(f"{self.name}: rank {self.rank} of {self.world_size}", self.figures())

    def show(self) -> None:
        """Print this report: as a table where stdout is a terminal, else as the text that `str` gives."""
        from rich.console import Console

        console = Console(highlight=False)
        console.print(self if console.is_terminal else str(self), soft_wrap=not console.is_terminal, markup=False)

    def __str__(self) -> str:
        mib = float(1 << 20)
        grown = self._grown_bytes / mib
        lines = [
            f"{self.name}: {self.num_parameters} parameters, {_count(self.num_elements)} elements, {self.dtype}, "
            f"rank {self.rank} of {self.world_size}",
            f"  partition {self.partition_bytes / mib:.1f} MiB here, {self.total_partition_bytes / mib:.1f} MiB in all"
            + (f"; {self.whole_bytes / mib:.1f} MiB whole on every rank" if self.whole_bytes else ""),
            f"  kept whole between steps: {self.persistent_parameters} small parameters, "
            f"{_count(self.persistent_elements)} elements",
            f"  read {self.read_bytes / mib:.1f} MiB in {self.num_reads} reads for {self.needed_bytes / mib:.1f} MiB "
            f"needed{f', {self.num_retries} of them again after a fault of the storage' if self.num_retries else ''}",
            f"  {self.num_opens} opens of files; headers read by {self._by(self.headers_from)}",
            f"  peak {grown:.1f} MiB above the start" + self._device_text(),
            "  " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.seconds.items()),
        ]
        if self._sharing_text():
            lines.insert(4, f"  read together: {self._sharing_text()}")
        if self._cost_text():
            lines.insert(4, f"  cost of a read: {self._cost_text()}")
        if self.num_quantized:
            scales = f"{self.companion_bytes / mib:.1f} MiB of scales whole on every rank"
            lines.insert(2, f"  {self.num_quantized} parameters are quantized; {scales}")
        keys = ("missing_keys", "unexpected_keys", "mismatched_keys", "uninitialised_parameters")
        for label in (*keys, "slow_paths", "recast_parameters"):
            values = getattr(self, label)
            if values:
                shown = ", ".join(str(getattr(value, "name", value)) for value in values[:5])
                lines.append(f"  {label}: {len(values)}: {shown}{', ...' if len(values) > 5 else ''}")
        lines += [f"  known: {sentence}" for sentence in self.differences_from_stock]
        return "\n".join(lines)


OnLoad: TypeAlias = Callable[[LoadReport], object]
"""Told of a load when it has ended."""

"""What a load did: bytes, reads, seconds, memory, keys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch

from lowmem_load.errors import listed
from lowmem_load.files.executor import ReadStats
from lowmem_load.files.remote_file import Counts, request_counts
from lowmem_load.files.source import retries
from lowmem_load.load.read_once import ReadOnce
from lowmem_load.phases import Phases
from lowmem_load.planning.load_plan import SHARDED, LoadPlan, SlowPath
from lowmem_load.text import count, size


class DeviceMemory(NamedTuple):
    """Accelerator memory of this process's tensors, bytes: now, and the most since it started or reset its peaks."""

    allocated_bytes: int
    peak_bytes: int


def device_memory() -> DeviceMemory:
    """Return the memory of the current accelerator device; zeros without one."""
    if torch.accelerator.is_available():
        device_module = torch.get_device_module(torch.accelerator.current_accelerator())
        if getattr(device_module, "is_initialized", bool)():  # torch.mps has no such figures
            return DeviceMemory(int(device_module.memory_allocated()), int(device_module.max_memory_allocated()))
    return DeviceMemory(0, 0)


@dataclass(slots=True)
class LoadReport(Phases):
    """What one load did on this rank. `print` shows all of it.

    Attributes:
        name: what was loaded.
        rank, world_size: of the partition group.
        ds_config: what the model was partitioned for, with each "auto" that loading reads resolved.
            `deepspeed.initialize` accepts it once optimizer and scheduler have no "auto". Empty for `load_into`.
        contents: how many distinct parameters there are, tied ones counted once, with how many elements, and the dtype
            of most floating-point ones.
        num_quantized: parameters that stay quantized; their elements are counted as they are stored.
        partition_bytes: bytes of the partitions on this rank, padding included; 0 under stages 0 to 2.
        whole_bytes: bytes that are replicated on every rank: all parameters under stages 0 to 2, those that `partition`
            leaves out, and the scales of quantized ones.
        file_bytes: bytes of the files of the checkpoint, headers included; 0 for a model built from its configuration.
        needed_bytes: bytes of the files whose values this rank keeps.
        read_bytes: bytes read from the files, headers excluded.
        num_reads: reads that were made; small adjacent ones share a system call.
        cold_files: local files that were not in the page cache when the load began. If most are not, more threads read
            into host memory.
        direct_files: those of them whose large reads go past the page cache, because host memory has no room for it.
        received_bytes: bytes that another rank has read for this one.
        requests: what was read from a remote store: requests and bytes. Zeros where all files are on this machine.
        seconds: seconds by phase: describe the model, plan the reads, compare files and plans with other ranks, read.
        peak_memory: resident host memory at the peak, above the start.
        peak_device_bytes: accelerator memory of this process's tensors at the peak, above the start; 0 on the CPU.
            Exact where the peak is a new one of the process, else the most seen after a parameter was made.
        loading_info: missing_keys, unexpected_keys and mismatched_keys, as transformers' `output_loading_info` has
            them.
        slow_paths: name and reason of each parameter or buffer that was converted on full tensors, which takes more
            time and memory.
        notes: a sentence for each surprise: parameters that nothing initialized, parameters in another dtype than an
            ordinary load gives, reads that could not be shared, reads that were tried again.

    Example:
        report = get_load_report(model)
        print(report.contents, report.partition_bytes, report.read_bytes)
        assert not report.loading_info["missing_keys"]
    """

    name: str
    rank: int = 0
    world_size: int = 1
    ds_config: Mapping[str, Any] = field(default_factory=dict)
    contents: str = "0 tensors, 0 parameters"
    num_quantized: int = 0
    partition_bytes: int = 0
    whole_bytes: int = 0
    file_bytes: int = 0
    needed_bytes: int = 0
    read_bytes: int = 0
    num_reads: int = 0
    cold_files: int = 0
    direct_files: int = 0
    received_bytes: int = 0
    requests: Counts = field(default_factory=Counts)
    peak_device_bytes: int = 0
    loading_info: dict[str, list[Any]] = field(default_factory=dict)
    slow_paths: list[SlowPath] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _device_start: DeviceMemory = field(default_factory=device_memory, repr=False)
    _retries_before: Counter[str] = field(default_factory=retries, repr=False)
    _requests_before: Counts = field(default_factory=request_counts, repr=False)

    def take_plan(self, plan: LoadPlan, ds_config: Mapping[str, Any]) -> None:
        """Copy what is known from the plan: configuration, sizes, keys, slow paths, notes. Internal."""
        is_sharded = any(target.kind == SHARDED for target in plan.targets)
        self.ds_config = {} if is_sharded else ds_config  # that of `load_into` is not the user's
        self.num_quantized = plan.num_quantized
        floating = sorted(str(target.dtype) for target in plan.targets if target.dtype.is_floating_point)
        dtype = max(floating, key=floating.count, default="").removeprefix("torch.")
        num_elements = sum(target.numel for target in plan.targets)
        self.contents = f"{len(plan.targets)} tensors, {count(num_elements)} parameters" + f", {dtype}" * bool(dtype)
        self.partition_bytes, self.whole_bytes = plan.partition_bytes, plan.replicated_bytes + plan.companion_bytes
        self.file_bytes = sum(file.nbytes for file in plan.files)
        self.needed_bytes = plan.costs.needed_bytes
        self.loading_info = {
            key: list(getattr(plan, key)) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")
        }
        self.slow_paths = plan.slow_paths
        if recast := [target.name for target in plan.targets if target.is_recast]:
            of = "the shards have" if is_sharded else "this ds_config trains in"
            trained = f"in {dtype}, the dtype that {of}; an ordinary load keeps another"
            self.notes.append(f"{trained}: {listed(recast)}")

    def take_counts(self, stats: ReadStats, once: ReadOnce) -> None:
        """Note what was read, tried again after a fault of a file system, and received from other ranks. Internal."""
        self.read_bytes, self.num_reads = stats.read_bytes, stats.num_reads
        self.cold_files, self.direct_files = stats.cold_files, stats.direct_files
        self.requests = request_counts().since(self._requests_before)
        if faults := [f"{fault} ({number}x)" for fault, number in (retries() - self._retries_before).items()]:
            self.notes.append(f"tried again after {listed(faults)}")
        self.received_bytes = once.received_bytes
        if once.why_alone:
            self.notes.append(f"no reads were shared with other ranks: {once.why_alone}")

    def sample_memory(self) -> None:
        """Raise the peaks to the memory in use now, where that is more. Internal."""
        device = device_memory()
        is_new_peak = device.peak_bytes > self._device_start.peak_bytes
        reached = device.peak_bytes if is_new_peak else device.allocated_bytes
        self.peak_device_bytes = max(self.peak_device_bytes, reached - self._device_start.allocated_bytes)
        Phases.sample_memory(self)  # with slots, super() would need the class that they were added to

    def __str__(self) -> str:
        title = f"{self.name}: rank {self.rank} of {self.world_size}"
        return "\n".join([title, *(f"  {topic}: {text}" for topic, text in self._rows().items())])

    def _rows(self) -> dict[str, str]:
        quantized = f"; {self.num_quantized} tensors are quantized" if self.num_quantized else ""
        of_all = f"of {size(self.partition_bytes * self.world_size)} partitioned" if self.ds_config else "of shards"
        keeps = {f"{size(self.partition_bytes)} {of_all}": self.partition_bytes}
        keeps |= {f"{size(self.whole_bytes)} full on every rank": self.whole_bytes}
        needed = f", {size(self.needed_bytes)} needed" if self.needed_bytes else ""  # not counted: read one by one
        read = f"{size(self.read_bytes)} of {size(self.file_bytes)} in the files{needed}"
        cold = f", {self.cold_files} file{'s' * (self.cold_files > 1)} not cached" if self.cold_files else ""
        cold += f", {self.direct_files} read past the cache" if self.direct_files else ""
        speed = f", {self.read_bytes / 1e9 / self.seconds['read']:.2f} GB/s" if self.seconds.get("read") else ""
        from_files = (
            f"{read}, {self.num_reads:,} reads{cold}{speed}"
            if self.file_bytes
            else "nothing: built from its configuration"
        )
        requests = self.requests
        lists = {**self.loading_info, "slow paths": [path.name for path in self.slow_paths]}
        rows = {
            "model": f"{self.contents}{quantized}",
            "keeps": ", ".join(text for text, nbytes in keeps.items() if nbytes),
            "read": from_files,
            "requests": f"{requests.num_requests:,}, {size(requests.received_bytes)}" if requests.num_requests else "",
            "received": f"{size(self.received_bytes)} from ranks that need the same" if self.received_bytes else "",
            "host memory": f"peak {size(self.peak_memory.total_bytes)} above the start",
            "device memory": f"peak {size(self.peak_device_bytes)} above the start" if self.peak_device_bytes else "",
            "seconds": ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.seconds.items()),
            **{label.replace("_", " "): listed(list(map(str, values))) for label, values in lists.items()},
            "notes": "; ".join(self.notes),
        }
        return {topic: text for topic, text in rows.items() if text}


OnLoad: TypeAlias = Callable[[LoadReport], object]
"""Called with the report when a load has ended."""

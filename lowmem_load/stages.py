"""The phases of a load, in order: describe -> plan -> agree -> read -> agree -> report."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from lowmem_load.describe.initialise import Scratch
from lowmem_load.ds.partition import persistent
from lowmem_load.errors import ConfigError
from lowmem_load.fill import digest_of, fill_buffers, fill_parameters, plan_targets
from lowmem_load.hf import loader, names
from lowmem_load.planning.copies import FlatRange, partition_range, plan_digest
from lowmem_load.ranks.group import RankGroup
from lowmem_load.read.executor import Reader
from lowmem_load.report import LoadReport, host_memory
from lowmem_load.settings.ds_config import hidden_size_of, resolve_auto, zero_stage
from lowmem_load.settings.precision import precision_of
from lowmem_load.targets.choice import Partition, check_ties, choose, chosen_parameters, mark
from lowmem_load.targets.target import Partial, Partitioned, Placement, Whole

MAX_THREADS = 4
"""Reads in flight per rank. More compete for the same disk and page tables; transformers found 16 slower than 4."""

REPORT_ATTRIBUTE = "lowmem_load_report"
"""Where a model keeps its `LoadReport`; `load_report(model)` finds it."""

_PLACES_BY_ITSELF = ("device_map", "quantization_config", "gguf_file")
"""Keywords of loads that transformers itself does under stages 0 to 2."""

PROGRESS_DELAY_S = 3.0
"""Seconds before the progress bar appears: short loads stay quiet."""


class Stream:
    """Loads models under one ds_config."""

    def __init__(
        self,
        ds_config: dict[str, Any],
        ranks: RankGroup,
        progress: bool | None,
        partition: Partition | None = None,
        must_match: bool = False,
    ) -> None:
        self._partition, self._must_match = partition, must_match
        self._ds_config = ds_config
        self._ranks = ranks
        self._progress = progress
        self._stage = zero_stage(ds_config)

    def load(self, call: loader.Call) -> tuple[nn.Module, dict[str, Any]]:
        """Run a `from_pretrained`; return the model, filled and with its report, and the loading info."""
        if self._stage == 3 and call.kwargs.get("device_map") is not None:
            raise ConfigError(f"{call.name}: device_map and ZeRO-3 both place parameters; remove device_map")
        if self._stage < 3 and any(call.kwargs.get(name) for name in _PLACES_BY_ITSELF):
            return call.run()
        memory = host_memory()
        report = LoadReport(call.name, start_memory=memory, peak_memory=memory)
        report.rank, report.world_size = self._ranks.rank, self._ranks.world_size
        with self._same_random_numbers(), self._reader() as reader:
            with self._ranks.agreed(f"{call.name}: describing the model") as digest, report.phase("describe"):
                model, info = call.describe(
                    reader.read_whole,
                    Scratch(reader.read_whole, self._kept_range),
                    self._stays_whole,
                    lambda base: self._complete(base, reader, report),
                )
                digest.append(plan_digest(f"{key} {sorted(map(str, keys))}" for key, keys in sorted(info.items())))
            self._complete(model, reader, report)
            report.read_bytes, report.num_reads = reader.stats.read_bytes, reader.stats.num_reads
        report.missing_keys = sorted(info["missing_keys"])
        report.unexpected_keys = sorted(info["unexpected_keys"])
        report.mismatched_keys = list(info["mismatched_keys"])
        if report.uninitialised_parameters and report.rank == 0:
            warnings.warn(
                f"{call.name}: not in the files, and left uninitialised by transformers: "
                f"{', '.join(report.uninitialised_parameters)}; they are zero",
                stacklevel=4,
            )
        setattr(model, REPORT_ATTRIBUTE, report)
        return model, info

    def _complete(self, model: nn.Module, reader: Reader, report: LoadReport) -> None:
        """Turn every description in `model` into a parameter or buffer that holds its values."""
        with self._ranks.agreed(f"{report.name}: planning") as digest, report.phase("plan"):
            placement = self._placement(model, report)
            targets = plan_targets(model, placement, report)
            digest.append(digest_of(model, targets, placement))
        with self._ranks.agreed(f"{report.name}: reading"), report.phase("read"):
            total = sum(plan.needed_bytes for target in targets for plan in target.plans)
            with self._bar(total) as bar:
                reader.on_bytes = bar
                fill_buffers(model, reader, placement, report)
                fill_parameters(targets, reader, placement, report)
                reader.finish()
                placement.settle()
        report.needed_bytes += total
        if self._stage == 3:
            report.persistent_parameters, report.persistent_elements = persistent(report.ds_config, model)

    def _kept_range(self, numel: int) -> FlatRange:
        """Return this rank's part of a parameter that is initialised, before partitions are known."""
        return partition_range(numel, self._ranks.rank, self._ranks.world_size)

    def _stays_whole(self, model: nn.Module) -> Callable[[torch.Tensor], bool]:
        """Tell of which parameters this rank may need more than its partition."""
        secondary = self._ds_config["zero_optimization"].get("zero_hpz_partition_size", 1)
        if self._stage < 3 or secondary != 1:
            return lambda _: True
        if self._partition is None:
            return lambda _: False
        chosen = chosen_parameters(choose(model, self._partition, must_match=self._must_match))
        return lambda parameter: id(parameter) not in chosen

    def _placement(self, model: nn.Module, report: LoadReport) -> Placement:
        precision = precision_of(self._ds_config, absent="disabled")
        config = getattr(model, "config", None)
        report.ds_config = resolve_auto(
            self._ds_config,
            world_size=self._ranks.world_size,
            hidden_size=hidden_size_of(config),
            precision=precision,
        )
        if self._stage < 3:
            return Whole(torch.device("cpu"))
        quantizer = getattr(model, "hf_quantizer", None)
        if quantizer is not None:
            names.refuse_quantized(quantizer, {})
        if self._partition is None:
            mark({"": model})
            return Partitioned(report.ds_config, model, self._ranks)
        chosen = choose(model, self._partition, must_match=self._must_match)
        check_ties(model, chosen)
        mark(chosen)
        return Partial(report.ds_config, model, self._ranks, chosen_parameters(chosen))

    def _reader(self) -> Reader:
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", self._ranks.world_size))
        return Reader(num_threads=max(1, min(MAX_THREADS, (os.cpu_count() or 1) // max(1, local_ranks))))

    @contextlib.contextmanager
    def _bar(self, total: int) -> Iterator[Callable[[int], object]]:
        shown = self._progress if self._progress is not None else sys.stderr.isatty()
        with tqdm(
            total=total,
            desc="Loading partitions",
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            disable=not shown or self._ranks.rank != 0,
            delay=0 if self._progress else PROGRESS_DELAY_S,
        ) as bar:
            yield bar.update

    @contextlib.contextmanager
    def _same_random_numbers(self) -> Iterator[None]:
        """Give every rank the random state of rank 0, so that missing keys are initialised equally on all ranks."""
        if self._ranks.world_size == 1:
            yield
            return
        own = torch.get_rng_state()
        common = self._ranks.broadcast_object(own, src=0)
        torch.set_rng_state(common)
        try:
            yield
        finally:
            if not torch.equal(own, common):
                torch.set_rng_state(own)

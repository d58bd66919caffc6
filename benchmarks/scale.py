"""What the largest models cost: python -m benchmarks.scale MODEL --rank R --world-size W, or --all.

Simulated: the checkpoints are sparse files with true headers and holes for data (`benchmarks.sparse`), and one
process is rank R of W. A rank whose partition is small enough loads the model, on torch's fake process group, which has
no other ranks; of others only the plan is made. Every measurement is a fresh process. With `--all`, what an earlier
version of the package takes stands above each row.

With `--figure` it draws what models cost against the size of the world and against the number of tensors, too.
`python -m benchmarks.scale_table FILE` prints what `--json FILE` has written as a table for the documentation.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.apart import FailedError, be_rank, run_apart, unpack_package
from benchmarks.machine import describe_machine
from benchmarks.published import MODELS
from benchmarks.sparse import write
from benchmarks.table import aligned
from benchmarks.touched import Touched, touched_by

DS_CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
}

# Read by the libraries when they are imported. Nothing needs an accelerator, and the figures are those of one core.
ENVIRONMENT = {"DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

DEQUANTIZING = {"fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config"}
"""transformers' class of quantization configs for each method that checkpoints of `MODELS` are stored in."""

BEFORE = "f8082b3"
"""The last commit before large models were described and planned as they are now."""

MAX_LOADED_BYTES = 4 << 30
"""Of the largest partition that is loaded; of larger ones only the plan is made."""

LIMIT_S, LIMIT_BYTES = 135.0, 12 << 30
"""Of one measurement: earlier versions dequantized whole models on every rank."""

COLUMNS = (
    "model", "tensors", "rank/world", "version", "describe", "plan", "read s", "over", "anon", "file", "partition",
    "reads", "median", "pages", "blocks", "read/needed",
)  # fmt: skip

DEFINITIONS = f"""\
Simulated: sparse checkpoints with true headers and holes for data; one process is rank R of W, on torch's fake process
group, with one reading thread unless `--threads` says another number. Sizes in MiB (2**20 bytes) where nothing else is
said. Every row is a fresh process; of several, the one of median CPU seconds is shown. Headers, and what is read, are
in the page cache or come from holes.
tensors    in all files, those included that the model does not use.
describe, plan, read   CPU seconds of all threads: transformers' loader run on symbolic tensors; from there to the
           finished plan; partitions made and filled ('-' where they are more than {MAX_LOADED_BYTES >> 30} GiB).
over       high-water mark of resident memory (VmHWM, reset at the start) above the start and the partition; of the plan
           alone where nothing is read. The start is after imports (torch, transformers and the model's module,
           deepspeed) and malloc_trim.
anon, file largest sample of RssAnon, and of RssFile + RssShmem, every 5 ms, above the start; anon holds the partition.
reads      read calls of the plan; median: bytes of one of them.
pages, blocks   4 KiB pages, and 1 MiB blocks, of the files that these touch, in bytes over the bytes that are needed.
version    now: this checkout; before: commit {BEFORE}. What takes longer than {LIMIT_S:.0f} s, or more than
           {LIMIT_BYTES >> 30} GiB, is ended, and what fails at one rank is not tried at others."""


class Row(NamedTuple):
    """A model of `MODELS`, or its first layers, as one rank of a world."""

    model: str
    rank: int
    world_size: int
    num_layers: int | None = None

    @property
    def folder_name(self) -> str:
        """Of the checkpoint."""
        return self.model if self.num_layers is None else f"{self.model}-{self.num_layers}"


ROWS = (
    Row("llama-3.1-405b", 3, 8),
    Row("llama-3.1-405b", 517, 1024),
    Row("qwen3-235b-a22b", 517, 1024),
    Row("deepseek-v3-bf16", 517, 1024),
    Row("deepseek-v3-fp8", 517, 1024),
    Row("kimi-k2-fp8", 517, 1024),
    Row("qwen3-vl-235b-a22b", 33, 64),
    Row("qwen3-vl-235b-a22b", 517, 1024),
    Row("qwen3-vl-235b-a22b", 1, 4096),
    Row("gpt-oss-120b", 33, 64),
    Row("gpt-oss-120b", 517, 1024),
)
"""What `--all` measures: ranks in the middle of most worlds, since the last one's partitions may be cut short."""

WORLDS = tuple(
    Row("qwen3-vl-235b-a22b", rank, world_size)
    for rank, world_size in ((9, 16), (33, 64), (129, 256), (517, 1024), (1, 4096))
)
LAYERS = tuple(Row("deepseek-v3-bf16", 517, 1024, num_layers) for num_layers in (8, 16, 32, None))
"""What is drawn: against the size of the world, and against the number of tensors. Some of it is in `ROWS`."""


@dataclass(frozen=True, slots=True)
class Result:
    """What one rank cost, and what its plan says; bytes and seconds.

    Attributes:
        phases_s: CPU seconds of each phase.
        over_bytes: peak of resident memory above the start and the partition, if that was made.
    """

    model: str
    rank: int
    world_size: int
    num_layers: int | None
    num_tensors: int
    is_loaded: bool
    phases_s: dict[str, float]
    over_bytes: int
    peak_anon_bytes: int
    peak_file_bytes: int
    partition_bytes: int
    needed_bytes: int
    read_bytes: int
    touched: Touched

    @property
    def cpu_s(self) -> float:
        """Of all phases."""
        return sum(self.phases_s.values())

    def cells(self, version: str) -> list[str]:
        """Return the row of the table."""
        seconds = [self.phases_s.get(phase) for phase in ("describe", "plan", "read")]
        sizes = (self.over_bytes, self.peak_anon_bytes, self.peak_file_bytes, self.partition_bytes)
        shares = (self.touched.page_bytes / self.needed_bytes, self.touched.block_bytes / self.needed_bytes)
        return [
            *_names(self, version, self.num_tensors),
            *("-" if each is None else f"{each:.2f}" for each in seconds),
            *(f"{size / 2**20:.0f}" for size in sizes),
            f"{self.touched.num_reads:,}",
            f"{self.touched.median_bytes:,}",
            *(f"{share:.3f}" for share in shares),
            f"{self.read_bytes / self.needed_bytes:.4f}",
        ]


def _names(row: Any, version: str, num_tensors: int) -> list[str]:
    return [row.model, f"{num_tensors:,}", f"{row.rank}/{row.world_size}", version]


def keywords_of(model: str) -> dict[str, Any]:
    """Return what loading a model of `MODELS` takes besides its folder."""
    import transformers

    config = MODELS[model].config
    if "quantization_config" not in config:
        return {}
    method = DEQUANTIZING[config["quantization_config"]["quant_method"]]
    return {"quantization_config": getattr(transformers, method)(dequantize=True)}


def measure(folder: Path, row: Row, is_loaded: bool, num_threads: int) -> Result:
    """Load, or plan, in this process, which must be fresh: what an earlier load left behind would not be counted."""
    import deepspeed  # noqa: F401  imported here so that the figures are the load's alone
    import transformers

    import lowmem_load
    from lowmem_load.bench.memory import MemorySampler
    from lowmem_load.stages import load as stages

    getattr(transformers, MODELS[row.model].config["architectures"][0])  # imports the model's module
    keywords = keywords_of(row.model)
    ordinary, plans = stages.make_plan, []

    def kept(*args: Any, **kwargs: Any) -> Any:
        planned = ordinary(*args, **kwargs)
        plans.append(planned.plan)
        return planned

    stages.make_plan = kept
    stages.environment.cores = lambda _: num_threads
    if is_loaded:
        be_rank(row.rank, row.world_size)
    with MemorySampler() as sampler, _conversion_errors():
        time.perf_counter = time.process_time  # phases are measured by it
        if is_loaded:
            model = lowmem_load.load_model(folder, DS_CONFIG, **keywords)
            phases_s = dict(lowmem_load.load_report(model).seconds)
        else:
            plans = [lowmem_load.plan(folder, DS_CONFIG, rank=row.rank, world_size=row.world_size, **keywords)]
            phases_s = dict(plans[0].seconds)
    memory, plan = sampler.use(), plans[0]
    return Result(
        *row,
        num_tensors=len(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]),
        is_loaded=is_loaded,
        phases_s=phases_s,
        over_bytes=memory.peak - (plan.partition_bytes if is_loaded else 0),
        peak_anon_bytes=memory.peak_anon,
        peak_file_bytes=memory.peak_file,
        partition_bytes=plan.partition_bytes,
        needed_bytes=plan.needed_bytes,
        read_bytes=plan.read_bytes,
        touched=touched_by(plan),
    )


@contextlib.contextmanager
def _conversion_errors() -> Iterator[None]:
    """Raise what transformers could not convert, which it only logs, in place of the error that follows from it."""
    logged = logging.Handler()
    found: list[str] = []
    logged.emit = lambda record: found.extend(re.findall(r"^\w+Error: .+", record.getMessage(), re.MULTILINE))
    logging.getLogger("transformers").addHandler(logged)
    try:
        yield
    except Exception as error:
        if found:
            raise FailedError(f"transformers: {found[0]}") from error
        raise


@dataclass(frozen=True, slots=True)
class Settings:
    """How rows are measured: in how many fresh processes each, where checkpoints lie, with which versions."""

    repeats: int
    num_threads: int
    folder: Path
    packages: dict[str, Path | None]


def measure_row(row: Row, settings: Settings, package: Path | None) -> Result:
    """Return the repeat of median CPU seconds (the lower one of an even number); each is a fresh process.

    Raises:
        FailedError: one of them failed.
    """
    checkpoint, repeats = settings.folder / row.folder_name, settings.repeats
    if not checkpoint.exists():
        write(row.model, checkpoint, row.num_layers)
    is_loaded = MODELS[row.model].num_parameters * 2 // row.world_size <= MAX_LOADED_BYTES
    limits = {"package": package, "limit_s": LIMIT_S, "limit_bytes": LIMIT_BYTES}
    arguments = (checkpoint, row, is_loaded, settings.num_threads)
    results: list[Result] = [run_apart(measure, *arguments, **limits) for _ in range(repeats)]
    return sorted(results, key=lambda result: result.cpu_s)[(len(results) - 1) // 2]


def measure_all(rows: Iterable[Row], settings: Settings) -> Iterator[tuple[str, Row, Result | FailedError]]:
    """Yield what each row costs with each version of the package; what fails at one rank is not tried at others."""
    failed: dict[tuple[str, str], str] = {}
    for row in rows:
        for version, package in settings.packages.items():
            try:
                if (row.folder_name, version) in failed:
                    raise FailedError(failed[row.folder_name, version])
                result: Result | FailedError = measure_row(row, settings, package)
            except FailedError as error:
                result = error
                failed.setdefault((row.folder_name, version), f"as rank {row.rank} of {row.world_size}, so not run")
            yield version, row, result
            line = f"failed: {result}" if isinstance(result, FailedError) else "  ".join(result.cells(version))
            print(f"{row.folder_name} {row.rank}/{row.world_size} {version}: {line}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: measure, print the table, write it as JSON and figures where `--json` and `--figure` say."""
    options = _options(arguments)
    rows = ROWS if options.all else [Row(options.model, options.rank, options.world_size)]
    os.environ.update(ENVIRONMENT)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder, packages = Path(name), {}
        commit = options.before or (BEFORE if options.all else None)
        if commit:
            packages["before"] = unpack_package(commit, folder / "before")
        packages["now"] = None
        settings = Settings(options.repeats, options.threads, folder, packages)
        measured = list(measure_all(dict.fromkeys((*rows, *((*WORLDS, *LAYERS) if options.figure else ()))), settings))
    found = [_as_json(*each, is_row=each[1] in rows) for each in measured]
    if options.figure:
        _draw(found, options.figure)
    described = describe_machine()
    print("\n".join([*described.lines(), "", *_table([each for each in measured if each[1] in rows]), "", DEFINITIONS]))
    if options.json:
        data = {"simulated": True, "machine": asdict(described), "ds_config": DS_CONFIG}
        data |= {"before": commit, "num_threads": options.threads, "rows": found}
        options.json.write_text(json.dumps(data, indent=1) + "\n")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", choices=list(MODELS), help="what to load or plan")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--world-size", type=int)
    parser.add_argument("--all", action="store_true", help="the default table instead of one model")
    before = f"compare with lowmem_load as of a commit ({BEFORE}), as --all does"
    parser.add_argument("--before", metavar="COMMIT", nargs="?", const=BEFORE, help=before)
    parser.add_argument("--repeats", type=int, default=1, help="fresh processes for each row")
    parser.add_argument("--threads", type=int, default=1, help="that read; the figures are of all of them")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw cost against world size and tensors")
    parser.add_argument("--folder", help="where the sparse checkpoints go; by default the temporary folder")
    options = parser.parse_args(arguments)
    if options.all == (options.model is not None):
        parser.error("name a model, or pass --all")
    if options.model and not 0 <= options.rank < (options.world_size or 0):
        parser.error("a model needs --world-size W and --rank R, from 0 to W - 1")
    if min(options.repeats, options.threads) < 1:
        parser.error("--repeats and --threads must be at least 1")
    return options


def _table(measured: Sequence[tuple[str, Row, Result | FailedError]]) -> list[str]:
    """Return the table of some results, with what failed below it, as lines."""
    cells: list[Sequence[str]] = [COLUMNS]
    failures: list[str] = []
    for version, row, result in measured:
        if isinstance(result, Result):
            cells.append(result.cells(version))
            continue
        names = _names(row, version, MODELS[row.model].num_tensors)
        cells.append([*names, "failed", *[""] * (len(COLUMNS) - len(names) - 1)])
        failures.append(f"{row.model} {row.rank}/{row.world_size} {version}: {result}")
    return [*aligned(cells), "", *failures]


def _as_json(version: str, row: Row, result: Result | FailedError, *, is_row: bool) -> dict[str, Any]:
    figures = {"failed": str(result)} if isinstance(result, FailedError) else asdict(result)
    return {**row._asdict(), "version": version, "is_row": is_row, **figures}


def _draw(found: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw what was measured of `WORLDS` and of `LAYERS`."""
    from benchmarks.plots import plot_scale

    plot_scale(
        *([each for each in found if Row(*(each[name] for name in Row._fields)) in rows] for rows in (WORLDS, LAYERS)),
        path,
    )


if __name__ == "__main__":
    main()

"""Each ZeRO-3 mode, stock and streamed: python -m benchmarks.modes [--params N] [--modes NAME ...] [--out FILE].

For each row two groups of fresh processes load the same checkpoint under the mode's ds_config and train five steps. All
partitions (secondary ones too), the parameters that stay whole, and the losses are compared.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.checkpoint import checkpoint_of
from benchmarks.launch import REPOSITORY, GroupError
from benchmarks.results import log, markdown
from benchmarks.worker import RankResult, Spec, run_group

TRAIN_STEPS = 5
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Mode:
    """A ds_config to load under.

    Attributes:
        zero: what it adds to zero_optimization; "{swap}" in a value stands for a folder.
        config: what it adds at top level.
        dtype: "bf16", "fp16" or "fp32".
        num_ranks: ranks that it needs.
        needs_gpu: why it cannot run on CPU ranks; empty if it can.
        trains_on_cpu: whether the engine can be made on CPU ranks; loads are compared in any case.
        needs_module: of DeepSpeed, which older or newer releases may lack; empty if all have it.
    """

    zero: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    dtype: str = "bf16"
    num_ranks: int = 2
    needs_gpu: str = ""
    trains_on_cpu: bool = True
    needs_module: str = ""

    @property
    def is_known(self) -> bool:
        """Whether the installed DeepSpeed has the mode."""
        return not self.needs_module or importlib.util.find_spec(self.needs_module) is not None


def _nvme(**more: Any) -> dict[str, Any]:
    return {"device": "nvme", "nvme_path": "{swap}", "pin_memory": False, "buffer_count": 8, **more}


# Unpinned first: stock and streamed differ in nothing but where partitions are born.
_BUFFERS = {"buffer_size": 20_000_000}
MODES: dict[str, Mode] = {
    "bf16": Mode(),
    "fp32": Mode(dtype="fp32"),
    "fp16": Mode(dtype="fp16", trains_on_cpu=False),
    "torch_autocast": Mode(
        config={"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
        dtype="fp32",
        needs_module="deepspeed.runtime.torch_autocast",
    ),
    "persistence thresholds": Mode(
        {"stage3_param_persistence_threshold": 2000, "stage3_model_persistence_threshold": 4000}
    ),
    "no persistence": Mode({"stage3_param_persistence_threshold": 0}),
    "offload_param cpu": Mode({"offload_param": {"device": "cpu", "pin_memory": False}}),
    "offload_param cpu pinned": Mode({"offload_param": {"device": "cpu", "pin_memory": True}}),
    "offload_param nvme": Mode({"offload_param": _nvme(**_BUFFERS)}),
    "offload_optimizer cpu": Mode({"offload_optimizer": {"device": "cpu", "pin_memory": False}}),
    "offload_optimizer nvme": Mode({"offload_optimizer": _nvme(), "sub_group_size": 5_000_000}),
    "offload both cpu": Mode(
        {
            "offload_param": {"device": "cpu", "pin_memory": False},
            "offload_optimizer": {"device": "cpu", "pin_memory": False},
        }
    ),
    "offload both nvme": Mode(
        {"offload_param": _nvme(**_BUFFERS), "offload_optimizer": _nvme(), "sub_group_size": 5_000_000}
    ),
    "zero_hpz_partition_size": Mode({"zero_hpz_partition_size": 2}, num_ranks=4),
    "zero_hpz_partition_size, offload_param cpu": Mode(
        {"zero_hpz_partition_size": 2, "offload_param": {"device": "cpu", "pin_memory": False}}, num_ranks=4
    ),
    "stage3_use_all_reduce_for_fetch_params": Mode({"stage3_use_all_reduce_for_fetch_params": True}),
    "memory_efficient_linear off": Mode({"memory_efficient_linear": False}),
    "override_module_apply off": Mode({"override_module_apply": False}),
    "keep_in_fp32_modules": Mode(
        config={"data_types": {"keep_in_fp32_modules": ["rotary_emb"]}},
        needs_module="deepspeed.runtime.keep_in_fp32",
    ),
    "zero_quantized_weights": Mode({"zero_quantized_weights": True}, needs_gpu="its quantizer is a CUDA kernel"),
    "zero_quantized_nontrainable_weights": Mode(
        {"zero_quantized_nontrainable_weights": True}, needs_gpu="its quantizer is a CUDA kernel"
    ),
}


def ds_config(mode: Mode, swap: str) -> dict[str, Any]:
    """Return the ds_config of a mode, with `swap` as folder of its swap files."""
    precision = {"bf16": {"enabled": mode.dtype == "bf16"}, "fp16": {"enabled": mode.dtype == "fp16"}}
    # The default bucket of 5e8 elements is larger than the models; it is allocated by training only.
    zero = {"stage": 3, "reduce_bucket_size": 50_000_000, **mode.zero}
    config = {"train_micro_batch_size_per_gpu": 1, **precision, "zero_optimization": zero, **mode.config}
    replaced: dict[str, Any] = json.loads(json.dumps(config).replace("{swap}", swap))
    return replaced


@dataclass(frozen=True, slots=True)
class Row:
    """What a mode came to. Bytes and seconds; the worst rank's."""

    name: str
    num_ranks: int
    partitions: str
    losses: str
    stock: list[RankResult] | None
    lowmem: list[RankResult] | None

    @property
    def failed(self) -> bool:
        """Whether something differs, or did not run where stock did."""
        return "DIFFER" in self.partitions + self.losses or "FAILED" in self.partitions + self.losses


def run_mode(name: str, checkpoint: Path, out: Path, on_gpu: bool) -> Row:
    """Run stock and streamed loads of one mode, and compare them."""
    mode = MODES[name]
    if not mode.is_known:
        return Row(name, mode.num_ranks, "this deepspeed has none", "not run", None, None)
    if mode.needs_gpu and not on_gpu:
        return Row(name, mode.num_ranks, f"needs a GPU: {mode.needs_gpu}", "not run", None, None)
    steps = TRAIN_STEPS if on_gpu or mode.trains_on_cpu else 0
    results: dict[str, list[RankResult]] = {}
    for method in ("stock", "lowmem"):
        folder = out / f"{name.replace(' ', '_').replace(',', '')}-{method}"
        config = ds_config(mode, str(folder / "swap"))
        spec = Spec(method, str(checkpoint), mode.dtype, steps, str(folder), config)
        try:
            results[method] = run_group(spec, mode.num_ranks, on_gpu)
        except GroupError as error:
            if method == "lowmem":
                return Row(name, mode.num_ranks, f"FAILED: {error}", "FAILED", results.get("stock"), None)
            last = str(error).strip().splitlines()[-1]
            log(f"{name}: stock fails: {last}")
    if "stock" not in results:
        return Row(name, mode.num_ranks, "stock fails", "stock fails", None, results["lowmem"])
    stock, lowmem = results["stock"], results["lowmem"]
    same = all(left.digests == right.digests for left, right in zip(stock, lowmem, strict=True))
    equal = all(left.losses == right.losses for left, right in zip(stock, lowmem, strict=True))
    persistent = [[result.persistent for result in ranks] for ranks in (stock, lowmem)]
    if equal and persistent[0] == persistent[1]:
        losses = "equal" if steps else "not trained: needs a GPU"
    else:
        losses = "DIFFER"
    return Row(name, mode.num_ranks, "equal" if same else "DIFFER", losses, stock, lowmem)


def _worst(results: list[RankResult] | None, value: Callable[[RankResult], float]) -> str:
    return "-" if results is None else f"{max(value(result) for result in results):.0f}"


def table(rows: Sequence[Row]) -> list[list[str]]:
    """Return the cells, header first: memory in MiB above the start."""
    header = ["mode", "ranks", "partitions", "5 losses", "peak stock", "peak ours"]
    on_gpu = torch.cuda.is_available()
    cells = [[*header, "HBM stock", "HBM ours"] if on_gpu else header]
    for row in rows:
        line = [row.name, str(row.num_ranks), row.partitions.splitlines()[0], row.losses]
        line += [_worst(results, lambda r: r.memory.peak / MIB) for results in (row.stock, row.lowmem)]
        if on_gpu:
            line += [_worst(results, lambda r: (r.hbm_peak_bytes or 0) / MIB) for results in (row.stock, row.lowmem)]
        cells.append(line)
    return cells


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--params", type=int, default=100_000_000, help="parameters of the Llama that is loaded")
    parser.add_argument("--modes", nargs="+", choices=list(MODES), metavar="NAME", help="instead of all")
    parser.add_argument("--out", type=Path, help="write the table there, as Markdown")
    options = parser.parse_args(arguments)
    out = REPOSITORY / "benchmarks" / "results" / "modes"
    rows = []
    with checkpoint_of(options.params, REPOSITORY / ".cache" / "benchmarks", keep=False, log=log) as checkpoint:
        for name in options.modes or MODES:
            rows.append(run_mode(name, checkpoint, out, torch.cuda.is_available()))
            log(f"{name}: partitions {rows[-1].partitions}, losses {rows[-1].losses}")
    cells = table(rows)
    log(markdown(cells))
    log("Peak: resident host memory above the start of the load, of the worst rank, MiB. Page cache warm.")
    log(f"Python {platform.python_version()}, torch {torch.__version__}; CPU ranks over gloo share {_cores()} cores.")
    if options.out:
        options.out.write_text(markdown(cells))
    return int(any(row.failed for row in rows))


def _cores() -> int:
    return len(os.sched_getaffinity(0))


if __name__ == "__main__":
    sys.exit(main())

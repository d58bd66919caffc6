"""Starts a group of ranks of a benchmark as fresh processes and collects their results."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.worker import RankResult, Spec
from lowmem_load.cli.bench import GroupError, run_ranks

REPOSITORY = Path(__file__).resolve().parents[1]

__all__ = ["REPOSITORY", "GroupError", "run_group", "run_processes"]


def run_group(spec: Spec, world_size: int, on_gpu: bool) -> list[RankResult]:
    """Run `world_size` fresh processes of one load and return their results in rank order."""
    texts = run_processes("benchmarks.worker", asdict(spec), Path(spec.out), world_size, on_gpu)
    return [RankResult.from_json(text) for text in texts]


def run_processes(module: str, spec: dict[str, Any], out: Path, world_size: int, on_gpu: bool) -> list[str]:
    """See `run_ranks`; the processes run in the repository and keep what DeepSpeed compiles there."""
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(REPOSITORY / ".cache" / "torch_extensions"))
    return run_ranks(module, spec, out, world_size, on_gpu=on_gpu, cwd=REPOSITORY)

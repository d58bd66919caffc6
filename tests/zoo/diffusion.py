"""Walks the models of diffusers: python -m tests.zoo.diffusion [--world-sizes 2 4] [--methods mesh zero3].

`diffusers.json` has a tiny configuration of each class, as diffusers' own tests build it. Each load is compared with
diffusers' plain one, and each save byte by byte with its `save_pretrained`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.ranks import set_environment

set_environment()

import torch  # noqa: E402  the environment comes first
from torch import nn  # noqa: E402

from tests import parity  # noqa: E402
from tests.zoo import checks, meshes, walk  # noqa: E402
from tests.zoo.checks import Case, Journal  # noqa: E402

CONFIGS = Path(__file__).parent / "diffusers.json"
SHARD_SIZE = 200_000
MAX_NUMEL = 30_000_000


def build_all(names: list[str], root: str, folder: str, limit_s: float) -> None:
    """Rank function, for one rank: makes a checkpoint of each class."""
    import diffusers

    checks._prepare()
    journal, configs = Journal(folder, limit_s), json.loads(CONFIGS.read_text())
    for name in names:
        with journal.item(name) as result:
            path = Path(root) / name
            try:
                torch.manual_seed(0)
                model = getattr(diffusers, name).from_config(configs[name])
                numel = sum(parameter.numel() for parameter in model.parameters())
                if numel > MAX_NUMEL:
                    raise ValueError(f"too large: {numel} parameters")
                checks.randomize(model, zlib.crc32(name.encode()))
                model.save_pretrained(path, max_shard_size=SHARD_SIZE)
            except Exception as error:
                shutil.rmtree(path, ignore_errors=True)
                result.update(error=checks._where(error))


def compare_all(cases: list[Case], method: str, precision: str, folder: str, limit_s: float) -> None:
    """Rank function: compares load after load."""
    checks.compare_cases(cases, lambda case: _compare(case, method, precision, Path(folder)), folder, limit_s)


def _compare(case: Case, method: str, precision: str, folder: Path) -> dict[str, Any]:
    import diffusers
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from lowmem_load import load_model, load_report, save_model

    cls = getattr(diffusers, case.cls)
    kwargs = {"torch_dtype": torch.bfloat16} if precision == "bf16" else {}
    try:
        plain, info = cls.from_pretrained(case.path, output_loading_info=True, **kwargs)
    except Exception as error:
        return {"unloadable": checks._where(error)}
    how = parity.FP32 if method == "zero3" else init_device_mesh("cpu", (dist.get_world_size(),))
    model = load_model(case.path, how, dtype="bfloat16" if precision == "bf16" else "float32")
    report = load_report(model)
    lines = (parity if method == "zero3" else meshes).differences(model, plain)
    lines += [
        f"{key}: {report.loading_info[key]}"
        for key in info
        if list(report.loading_info.get(key, info[key])) != list(info[key])
    ]
    lines += _save_differences(save_model, model, plain, folder / "saved")
    return {"differences": lines, "saved": 1, "missing": len(info["missing_keys"])}


def _save_differences(save_model: Any, model: nn.Module, plain: Any, folder: Path) -> list[str]:
    """Returns the files that differ from those of diffusers' save. Collective."""
    import torch.distributed as dist

    save_model(model, folder / "ours", max_shard_size=SHARD_SIZE)
    lines = []
    if dist.get_rank() == 0:
        plain.save_pretrained(folder / "plain", max_shard_size=SHARD_SIZE)
        ours, theirs = (
            {path.name: path.read_bytes() for path in (folder / each).iterdir()} for each in ("ours", "plain")
        )
        lines = [
            f"file {name} differs" for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name)
        ]
        type(plain).from_pretrained(folder / "ours")
        shutil.rmtree(folder)
    dist.barrier()
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; exit status 1 when a load or save differs or fails."""
    import diffusers

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--classes", nargs="*", help="all when left out")
    parser.add_argument("--world-sizes", nargs="*", type=int, default=[2])
    parser.add_argument("--methods", nargs="*", choices=["mesh", "zero3"], default=["mesh", "zero3"])
    parser.add_argument("--precision", nargs="*", choices=["fp32", "bf16"], default=["fp32"])
    parser.add_argument("--root", type=Path, default=walk.CACHE.with_name("lowmem-load-diffusers"))
    options = parser.parse_args(arguments)
    names = options.classes or list(json.loads(CONFIGS.read_text()))
    options.root.mkdir(parents=True, exist_ok=True)
    todo = [name for name in names if not (options.root / name).is_dir()]
    walk.run_sets(build_all, todo, (str(options.root),), world_size=1, limit_s=240)
    cases = [Case(name, name, str(options.root / name)) for name in names if (options.root / name).is_dir()]
    print(f"{len(names)} classes of diffusers {diffusers.__version__}, {len(cases)} built")
    status = 0
    for method, world_size, precision in itertools.product(options.methods, options.world_sizes, options.precision):
        outcomes = walk.run_sets(compare_all, cases, (method, precision), world_size=world_size, limit_s=400)
        run = walk.summary(outcomes)
        walk.print_run(f"{method}, {world_size} ranks, {precision}", run)
        status |= int(run["failed"] > 0)
    return status


if __name__ == "__main__":
    sys.exit(main())

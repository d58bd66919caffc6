"""Walks the models of diffusers: python -m tests.zoo.diffusion [--world-sizes 2 4] [--methods mesh zero3].

`diffusers.json` has a tiny configuration of each class, as diffusers' own tests build it. Each load is compared with
diffusers' plain one, and each save byte by byte with its `save_pretrained`.
"""

from __future__ import annotations

import argparse
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

from tests.zoo import checks, walk  # noqa: E402
from tests.zoo.checks import Case, Journal  # noqa: E402

CONFIGS = Path(__file__).parent / "diffusers.json"
SHARD_SIZE = 200_000
MAX_NUMEL = 30_000_000
Z3 = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}


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
    how = Z3 if method == "zero3" else init_device_mesh("cpu", (dist.get_world_size(),))
    model = load_model(case.path, how, dtype="bfloat16" if precision == "bf16" else "float32")
    report = load_report(model)
    lines = _differences(model, plain)
    lines += [
        f"{key}: {report.loading_info[key]}"
        for key in info
        if list(report.loading_info.get(key, info[key])) != list(info[key])
    ]
    lines += _save_differences(save_model, model, plain, folder / "saved")
    nbytes = sum(file.stat().st_size for file in Path(case.path).glob("*.safetensors"))
    return {
        "differences": lines,
        "saved": 1,
        "missing": len(info["missing_keys"]),
        "read": round(report.read_bytes / nbytes, 3),
    }


def _differences(model: nn.Module, plain: nn.Module) -> list[str]:
    import deepspeed
    from torch.distributed.tensor import DTensor

    lines = []
    for kind in ("named_parameters", "named_buffers"):
        ours, theirs = (dict(getattr(each, kind)(remove_duplicate=False)) for each in (model, plain))
        lines += [f"{name}: only one has it" for name in ours.keys() ^ theirs.keys()]
        for name in ours.keys() & theirs.keys():
            one, other = ours[name], theirs[name]
            with deepspeed.zero.GatheredParameters([one] if hasattr(one, "ds_id") else []):
                whole = (one.full_tensor() if isinstance(one, DTensor) else one.data).detach()
                if whole.dtype != other.dtype or not torch.equal(whole.cpu(), other.detach()):
                    lines.append(f"{name}: {whole.dtype}, plain {other.dtype}; values differ")
            lines += [f"{name}: requires_grad"] if one.requires_grad != other.requires_grad else []
    return sorted(lines)


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
    parser.add_argument("--out", type=Path, help="JSON file of all results")
    options = parser.parse_args(arguments)
    names = options.classes or list(json.loads(CONFIGS.read_text()))
    options.root.mkdir(parents=True, exist_ok=True)
    todo = [name for name in names if not (options.root / name).is_dir()]
    walk.run_sets(build_all, todo, (str(options.root),), world_size=1, limit_s=240)
    cases = [Case(name, name, str(options.root / name)) for name in names if (options.root / name).is_dir()]
    print(f"{len(names)} classes of diffusers {diffusers.__version__}, {len(cases)} built")
    status, report = 0, {}
    for method, world_size, precision in (
        (m, w, p) for m in options.methods for w in options.world_sizes for p in options.precision
    ):
        outcomes = walk.run_sets(compare_all, cases, (method, precision), world_size=world_size, limit_s=400)
        title, run = f"{method}, {world_size} ranks, {precision}", walk.summary(outcomes)
        walk.print_run(title, run)
        report[title] = {**run, "details": {o.name: o.results for o in outcomes}}
        status |= int(run["failed"] > 0)
        if options.out:
            options.out.write_text(json.dumps(report, indent=1))
    return status


if __name__ == "__main__":
    sys.exit(main())

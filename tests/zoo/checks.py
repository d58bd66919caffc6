"""What ranks do in the zoo: build tiny checkpoints, and compare loads of them. Each function handles many types.

A rank writes what it starts and what comes of it to a journal, line by line, so that the parent knows where it stood
when it was killed. A type that takes longer than its limit ends the rank, with the stacks in its output.
"""

import faulthandler
import json
import os
import re
import resource
import shutil
import sys
import time
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from transformers.integrations.deepspeed import HfDeepSpeedConfig

from lowmem_load import get_load_report, load_model, save_model
from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.errors import UnsupportedError
from tests import parity
from tests.model_digest import differing
from tests.zoo import meshes
from tests.zoo.configs import classes_of, other_class, tiny_configs

MAX_NUMEL = 40_000_000
"""Parameters of a model that still counts as tiny: 160 MB in float32."""

PROCESS_NBYTES = 6_000_000_000
"""Memory that a process may take: a configuration that stayed large must not take the machine down."""

SHARD_NBYTES = 2_000_000
"""Larger checkpoints have several files."""

SETTLE_S = 0.5
"""Time that the other ranks get to write down an error of their own before the set is taken down."""


@dataclass(frozen=True, slots=True)
class Case:
    """One load to compare: the class `cls` from the checkpoint in `path`."""

    name: str
    cls: str
    path: str


class Journal:
    """Appends what a rank does to a file, for `walk.run_sets` to read."""

    def __init__(self, folder: str, limit_s: float) -> None:
        self._path = Path(folder) / f"rank{os.environ['RANK']}.jsonl"
        self._limit_s = limit_s

    def write(self, **entry: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    @contextmanager
    def item(self, name: str) -> Iterator[dict[str, Any]]:
        """The block fills the result of `name`; when it runs out of time the process ends."""
        self.write(start=name)
        result: dict[str, Any] = {}
        started = time.monotonic()
        faulthandler.dump_traceback_later(self._limit_s, exit=True, file=sys.__stderr__)
        try:
            yield result
        finally:
            faulthandler.cancel_dump_traceback_later()
            self.write(name=name, seconds=round(time.monotonic() - started, 2), **result)


# -- checkpoints -----------------------------------------------------------------------------------------------------


def build_all(types: list[str], root: str, folder: str, limit_s: float) -> None:
    """Rank function, for one rank: makes a checkpoint of each type, with the names of its classes next to it."""
    _prepare()
    journal = Journal(folder, limit_s)
    for name in types:
        with journal.item(name) as result:
            result.update(_build(name, Path(root) / name))


def _build(model_type: str, path: Path) -> dict[str, Any]:
    """Returns what was built, or why nothing was."""
    classes = classes_of(model_type)
    if not classes:
        return {"error": "no class in transformers"}
    problems = []
    for cls in classes:
        for profile, make_config in tiny_configs(model_type):
            try:
                model = _model(getattr(transformers, cls), make_config())
                _save(model, path, zlib.crc32(model_type.encode()))
            except Exception as error:
                problems.append(f"{cls}, {profile}: {_where(error)}")
                continue
            other = other_class(model_type, cls)
            return {"classes": [cls] if other is None else [cls, other], "problems": problems}
    return {"error": problems[0], "problems": problems}


def _save(model: nn.Module, path: Path, seed: int) -> None:
    randomize(model, seed)
    shutil.rmtree(path, ignore_errors=True)
    try:
        model.save_pretrained(path, max_shard_size=SHARD_NBYTES)
    except Exception:
        shutil.rmtree(path, ignore_errors=True)
        raise


def _model(cls: Any, config: Any) -> nn.Module:
    """Returns the model, refusing a large one before it takes memory."""
    try:
        with torch.device("meta"):
            sketch = cls(config.__class__.from_dict(config.to_dict()))
    except Exception:
        pass
    else:
        _check_size(sketch)
    torch.manual_seed(0)
    model: nn.Module = cls(config)
    _check_size(model)
    return model


def _check_size(model: nn.Module) -> None:
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    if sum(sizes.values()) > MAX_NUMEL:
        largest = sorted(sizes, key=sizes.__getitem__)[-3:]
        shapes = {name: tuple(model.get_parameter(name).shape) for name in largest}
        raise ValueError(f"too large: {sum(sizes.values()) / 1e6:.0f} M in {len(sizes)} parameters, such as {shapes}")


def randomize(model: nn.Module, seed: int) -> None:
    """Makes every parameter and every buffer that is saved random, so that no two can be mistaken for each other."""
    generator = torch.Generator().manual_seed(seed)
    made: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(_random_like(parameter, generator))
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is None or name in module._non_persistent_buffers_set:
                    continue
                if id(buffer) not in made:
                    made[id(buffer)] = _random_like(buffer, generator)
                module._buffers[name] = made[id(buffer)]


def _random_like(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if tensor.dtype == torch.bool:
        return torch.rand(tensor.shape, generator=generator) < 0.5
    if tensor.is_floating_point() or tensor.is_complex():
        return (0.1 * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)
    top = max(int(tensor.max()), 1) if tensor.numel() else 1
    return torch.randint(0, top + 1, tensor.shape, generator=generator, dtype=tensor.dtype)


# -- loads -----------------------------------------------------------------------------------------------------------


def compare_all(cases: list[Case], method: str, precision: str, saves: bool, folder: str, limit_s: float) -> None:
    """Rank function: compares load after load; `method` is "lowmem" or "default" for ZeRO-3, or one of `meshes.LOADS`.

    With `saves` what we loaded is saved again, and loaded ordinarily.
    """
    save_to = Path(folder, "saved") if saves else None
    compare_cases(cases, lambda case: _compare(case, method, precision, save_to), folder, limit_s)


def compare_cases(cases: list[Case], compare: Callable[[Case], dict[str, Any]], folder: str, limit_s: float) -> None:
    """Compare case after case. An exception in one ends the set, since ranks may then be out of step."""
    _prepare()
    DistributedInterface()
    journal = Journal(folder, limit_s)
    for case in cases:
        error = None
        with journal.item(case.name) as result:
            try:
                result.update(compare(case))
            except Exception as caught:
                error = caught
                result.update(error=_where(caught), traceback=traceback.format_exc()[-6000:])
        if error is not None:
            time.sleep(SETTLE_S)
            raise error


def _compare(case: Case, method: str, precision: str, save_to: Path | None) -> dict[str, Any]:
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    cls = getattr(transformers, case.cls)
    try:
        reference, info = _ordinary(cls, case.path, dtype)
    except Exception as error:
        return {"unloadable": _where(error)}
    torch.manual_seed(dist.get_rank())  # ranks of a training job have seeds of their own; rank 0's counts
    if method in meshes.LOADS:
        try:
            model, keys = meshes.LOADS[method](cls, case.path, reference, dtype)
        except meshes.UnshardableError as error:
            return {"unshardable": _where(error)}
        found = [f"{name} differs" for name in differing(model, reference)]
    else:
        load = _default if method == "default" else _ours
        model, keys = load(cls, case.path, parity.BF16 if precision == "bf16" else parity.FP32, dtype)
        found = parity.differences(model, reference)
    if method == "default":  # garbage by design; see docs of lowmem_load.zero3
        found = [line for line in found if not line.endswith("padding is not zero")]
    for key in sorted(keys.keys() & info.keys()):
        names = keys[key]
        if sorted(map(str, names)) != sorted(map(str, info[key])):
            found.append(f"{key}: {sorted(map(str, names))} instead of {sorted(map(str, info[key]))}")
    recast = [line for line in found if _RECAST.search(line)]
    found = [line for line in found if line not in recast]
    unsteady: list[str] = []
    if found:
        again, _ = _ordinary(cls, case.path, dtype)
        unsteady = _unsteady(reference, again)
        found = [line for line in found if not any(name in line for name in unsteady)]
    saved = {}
    if save_to is not None:  # on all ranks, whatever each of them has found
        saved = _save_again(model, reference, cls, dtype, save_to, unsteady + [line.split(":")[0] for line in recast])
        found += saved.pop("differences", [])
    return {
        **saved,
        "differences": [line[:400] for line in found],
        "unsteady": unsteady,
        "recast": len(recast),
        "missing": len(info["missing_keys"]),
        "slow_paths": _slow_paths(model),
    }


def _save_again(
    model: nn.Module, reference: nn.Module, cls: Any, dtype: torch.dtype, folder: Path, apart: list[str]
) -> dict[str, Any]:
    """Saves a model that we loaded; returns how an ordinary load of it differs from that of the original.

    Where it does, and so does one of what transformers itself saves, tensor by tensor, that is transformers'. Tensors
    that are `apart` differ anyway.
    """
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)  # of the former type
    try:
        report = save_model(model, folder, max_shard_size=SHARD_NBYTES)
    except UnsupportedError as error:
        return {"refused": _where(error)}
    found: dict[str, Any] = {"saved": len(report.files)}
    if dist.get_rank() == 0:
        again, _ = _ordinary(cls, str(folder), dtype)
        differing = [name for name in _unsteady(reference, again) if name not in apart]
        if differing:
            shutil.rmtree(default := folder.with_name("default"), ignore_errors=True)
            reference.save_pretrained(default, max_shard_size=SHARD_NBYTES)
            ordinary, _ = _ordinary(cls, str(default), dtype)
            found["as_default"] = [name for name in differing if name not in (own := _unsteady(ordinary, again))]
            found["differences"] = [f"saved and loaded again: {name} differs" for name in differing if name in own]
    return found


_RECAST = re.compile(r": dtype torch\.(bfloat16|float32) instead of torch\.float(32|64)$")
"""A parameter that the ordinary load keeps wider: ZeRO-3 has one dtype. Its values are compared after the cast."""


def _ordinary(cls: Any, path: str, dtype: torch.dtype) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    model, info = cls.from_pretrained(path, dtype=dtype, output_loading_info=True)
    return model, info


def _ours(cls: Any, path: str, ds_config: Any, dtype: torch.dtype) -> tuple[nn.Module, dict[str, Any]]:
    model = load_model(path, ds_config, auto_class=cls)
    report = get_load_report(model)
    return model, report.loading_info


def _default(cls: Any, path: str, ds_config: Any, dtype: torch.dtype) -> tuple[nn.Module, dict[str, Any]]:
    """Loads as HfDeepSpeedConfig does; its loading info is empty by construction, so it is not compared."""
    alive = HfDeepSpeedConfig(dict(ds_config))
    model = cls.from_pretrained(path, dtype=dtype)
    del alive
    return model, {}


def _unsteady(left: nn.Module, right: nn.Module) -> list[str]:
    """Returns the parameters and buffers that differ between two ordinary loads from the same seed."""
    others = {**dict(right.named_parameters()), **dict(right.named_buffers())}
    return [
        name
        for name, tensor in {**dict(left.named_parameters()), **dict(left.named_buffers())}.items()
        if name not in others or not parity._same_bytes(tensor.detach().reshape(-1), others[name].detach().reshape(-1))
    ]


def _slow_paths(model: nn.Module) -> list[str]:
    """Returns why parameters were not read range by range, without the names."""
    report = getattr(model, "lowmem_load_report", None)
    return sorted({path.reason for path in report.slow_paths}) if report is not None else []


def _where(error: BaseException) -> str:
    """Returns an error in one line, with the place that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" [{Path(frames[-1].filename).name}:{frames[-1].lineno}]" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}{place}"


def _prepare() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (PROCESS_NBYTES, PROCESS_NBYTES))
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

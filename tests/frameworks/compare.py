"""What two runs of a case came to, side by side: losses, saved tensors, memory, and what lowmem_load said."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from tests.frameworks.run import LOG, OUTPUT, RANKS

NUM_RANKS = 2
REPORT = re.compile(r"^.*lowmem_load: .*: rank 0 of \d+$", re.MULTILINE)
"""The first line of the report of a load by lowmem_load."""


@dataclass(frozen=True, slots=True)
class RankResult:
    """What a rank has seen: losses, and the largest sample of resident bytes above that at the first `from_pretrained`.

    `load_bytes` are up to the first engine, when everything is loaded; files that are mapped count.
    """

    losses: list[float]
    load_bytes: int
    load_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Run:
    """What a run of a case left behind; ranks in order."""

    ranks: list[RankResult]
    saved: Mapping[str, str]
    num_loads: int


def read_run(folder: Path) -> Run:
    """Return what is in the folder of a run.

    Raises:
        FileNotFoundError: a rank has loaded nothing, or has not ended by itself.
    """
    texts = [(folder / RANKS / f"rank{rank}.json").read_text() for rank in range(NUM_RANKS)]
    log = (folder / LOG).read_text(errors="replace")
    ranks = [RankResult(**json.loads(text)) for text in texts]
    return Run(ranks, saved_tensors(folder / OUTPUT), len(REPORT.findall(log)))


def saved_tensors(folder: Path) -> dict[str, str]:
    """Return digests of all tensors in the safetensors and torch files under a folder, by file and name."""
    found = {}
    for path in sorted([*folder.rglob("*.safetensors"), *folder.rglob("*model*.bin")]):
        for name, tensor in _tensors(path).items():
            found[f"{path.relative_to(folder)}: {name}"] = _digest(tensor)
    return found


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix == ".bin":
        loaded: dict[str, torch.Tensor] = torch.load(path, map_location="cpu", weights_only=True)
        return loaded
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  safe_open is no mapping


def _digest(tensor: torch.Tensor) -> str:
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} {hashlib.sha256(data).hexdigest()[:16]}"


def compare(default: Run, ours: Run) -> dict[str, Any]:
    """Return what the results of a case say, as data for JSON."""
    return {
        "losses": {
            "default": default.ranks[0].losses,
            "first difference": first_difference(
                [rank.losses for rank in default.ranks], [rank.losses for rank in ours.ranks]
            ),
        },
        "saved": {"tensors": len(default.saved), "different": different(default.saved, ours.saved)},
        "loads by lowmem_load": ours.num_loads,
        "peaks": {"load": [_peak(run) for run in (default, ours)]},
        "seconds": {"load": [round(max(rank.load_s for rank in run.ranks), 1) for run in (default, ours)]},
    }


def first_difference(default: Sequence[Sequence[float]], ours: Sequence[Sequence[float]]) -> str:
    """Return where the losses of ranks first differ, "" if they are equal bit for bit.

    Args:
        default, ours: losses by step, of each rank.
    """
    if not all(default):
        return "no engine went back from a loss"
    for rank, (expected, found) in enumerate(zip(default, ours, strict=True)):
        if len(expected) != len(found):
            return f"rank {rank}: {len(found)} losses instead of {len(expected)}"
        for step, (one, other) in enumerate(zip(expected, found, strict=True), 1):
            if one != other:
                return f"rank {rank}, step {step}: {other:.9g} instead of {one:.9g}"
    return ""


def different(default: Mapping[str, str], ours: Mapping[str, str]) -> list[str]:
    """Return the saved tensors that are not equal, or that one run alone has saved, and how they differ."""
    found = []
    for name in sorted(default.keys() | ours.keys()):
        if default.get(name) != ours.get(name):
            one, other = default.get(name, "nothing"), ours.get(name, "nothing")
            found.append(f"{name}: {other} instead of {one}")
    return found


def _peak(run: Run) -> float:
    return round(max(rank.load_bytes for rank in run.ranks) / 2**20, 1)


def is_equal(result: Mapping[str, Any]) -> bool:
    """Whether lowmem_load loaded the model of a case, and it has the losses and tensors of the default loader."""
    if "error" in result:
        return False
    saved = result["saved"]
    equal = not result["losses"]["first difference"] and not saved["different"]
    return bool(equal and saved["tensors"] and result["loads by lowmem_load"])

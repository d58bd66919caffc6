"""Compares a streamed model with an ordinary load of the same checkpoint, on the rank that calls it."""

from __future__ import annotations

import os
from typing import Any

import torch
import transformers
from torch import nn

from lowmem_load import load_model, load_report
from lowmem_load.ds.partition import partition_of
from lowmem_load.planning.ranges import partition_range

BF16 = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1}
FP32 = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}


def differences(model: nn.Module, reference: nn.Module, rank: int, world_size: int) -> list[str]:
    """Returns what differs between a streamed and an ordinary model: empty when nothing does."""
    found: list[str] = []
    streamed = dict(model.named_parameters(remove_duplicate=False))
    ordinary = dict(reference.named_parameters(remove_duplicate=False))
    if list(streamed) != list(ordinary):
        found.append(f"parameter names: {set(streamed) ^ set(ordinary) or 'order'}")
    for name in streamed.keys() & ordinary.keys():
        found += _parameter_differences(name, streamed[name], ordinary[name], rank, world_size)
    if _ties(streamed) != _ties(ordinary):
        found.append(f"ties: {_ties(streamed)} instead of {_ties(ordinary)}")
    found += _buffer_differences(dict(model.named_buffers()), dict(reference.named_buffers()))
    for attribute in ("training", "config.dtype", "config._attn_implementation", "generation_config"):
        values = [_attribute(owner, attribute) for owner in (model, reference)]
        if str(values[0]) != str(values[1]):
            found.append(f"{attribute}: {values[0]} instead of {values[1]}")
    return found


def compare_load(
    path: str,
    ds_config: dict[str, Any],
    auto_class: str | None,
    dtype: torch.dtype,
    from_pretrained_kwargs: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Rank function: streams `path` and loads it ordinarily; returns the differences and the report's figures."""
    import torch.distributed as dist

    kwargs = from_pretrained_kwargs or {}
    torch.manual_seed(int(os.environ["RANK"]))  # ranks of a training job have seeds of their own; rank 0's counts
    model = load_model(path, ds_config, auto_class=auto_class, **kwargs)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    cls = getattr(transformers, auto_class or transformers.AutoConfig.from_pretrained(path).architectures[0])
    torch.manual_seed(0)
    reference, info = cls.from_pretrained(path, dtype=dtype, output_loading_info=True, **kwargs)
    report = load_report(model)
    found = differences(model, reference, rank, world_size)
    for key in ("missing_keys", "unexpected_keys"):
        if getattr(report, key) != sorted(info[key]):
            found.append(f"{key}: {getattr(report, key)} instead of {sorted(info[key])}")
    mismatched = [sorted(str(key) for key in keys) for keys in (report.mismatched_keys, info["mismatched_keys"])]
    if mismatched[0] != mismatched[1]:
        found.append(f"mismatched_keys: {mismatched[0]} instead of {mismatched[1]}")
    return {
        "differences": found,
        "needed_bytes": report.needed_bytes,
        "read_bytes": report.read_bytes,
        "num_reads": report.num_reads,
        "num_parameters": report.num_parameters,
        "missing_keys": report.missing_keys,
        "slow_paths": [path.name for path in report.slow_paths],
        "partition_bytes": report.partition_bytes,
    }


def _parameter_differences(
    name: str, streamed: nn.Parameter, ordinary: nn.Parameter, rank: int, world_size: int
) -> list[str]:
    found = []
    partition, span = partition_of(streamed), partition_range(ordinary.numel(), rank, world_size)
    values = ordinary.detach().reshape(-1)[span.start : span.end]
    if partition.dtype != ordinary.dtype:
        found.append(f"{name}: dtype {partition.dtype} instead of {ordinary.dtype}")
        values = values.to(partition.dtype)
    if tuple(streamed.ds_shape) != tuple(ordinary.shape):
        found.append(f"{name}: shape {tuple(streamed.ds_shape)} instead of {tuple(ordinary.shape)}")
    elif not _same_bytes(partition[: span.numel], values):
        found.append(f"{name}: values differ")
    elif partition[span.numel :].any():
        found.append(f"{name}: padding is not zero")
    if partition.numel() != -(-ordinary.numel() // world_size):
        found.append(f"{name}: partition of {partition.numel()} elements")
    if streamed.requires_grad != ordinary.requires_grad:
        found.append(f"{name}: requires_grad {streamed.requires_grad}")
    if streamed.numel() != 0:
        found.append(f"{name}: {streamed.numel()} elements are allocated beside the partition")
    return found


def _same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def _ties(parameters: dict[str, nn.Parameter]) -> list[list[str]]:
    groups: dict[int, list[str]] = {}
    for name, parameter in parameters.items():
        groups.setdefault(id(parameter), []).append(name)
    return sorted(names for names in groups.values() if len(names) > 1)


def _buffer_differences(streamed: dict[str, torch.Tensor], ordinary: dict[str, torch.Tensor]) -> list[str]:
    if streamed.keys() != ordinary.keys():
        return [f"buffer names: {streamed.keys() ^ ordinary.keys()}"]
    found = []
    for name, buffer in streamed.items():
        other = ordinary[name]
        if buffer.dtype != other.dtype or buffer.shape != other.shape or type(buffer) is not torch.Tensor:
            found.append(f"buffer {name}: {buffer.dtype} {tuple(buffer.shape)} {type(buffer).__name__}")
        elif not _same_bytes(buffer.cpu().reshape(-1), other.reshape(-1)):
            found.append(f"buffer {name}: values differ")
    return found


def _attribute(owner: Any, dotted: str) -> Any:
    for name in dotted.split("."):
        owner = getattr(owner, name, None)
    return owner

"""Sizes of a checkpoint's model and of its parts, from its configuration: no values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lowmem_load.families import diffusion
from lowmem_load.hf.names import class_and_config, model_config
from lowmem_load.hf.remote_names import Checkpoint
from lowmem_load.hf.skeleton import blocks
from lowmem_load.planning.load_plan import LoadPlan, TargetPlan
from lowmem_load.planning.training_memory import Training


def elements(target: TargetPlan) -> int:
    """Return the elements of a parameter; of a quantized one, those that its packed values stand for."""
    return 2 * target.numel * target.dtype.itemsize if target.companions else target.numel


def config_of(checkpoint: Checkpoint, keywords: Mapping[str, Any]) -> Any:
    """Return transformers' configuration of a model, given keywords of `plan`; None for a model of diffusers."""
    if diffusion.model_class(checkpoint.folder, keywords.get("auto_class"), keywords) is not None:
        return None
    return model_config(checkpoint.folder, keywords)


def adapter_elements(checkpoint: Checkpoint, training: Training, keywords: Mapping[str, Any]) -> int:
    """Return the elements of adapters on every Linear but the output layer, as PEFT's "all-linear" has them."""
    if not training.lora_rank:
        return 0
    model = without_values(checkpoint, keywords)
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    linears = [module for module in model.modules() if isinstance(module, nn.Linear) and module is not output]
    return training.lora_rank * sum(linear.in_features + linear.out_features for linear in linears)


def gathered_bytes(checkpoint: Checkpoint, keywords: Mapping[str, Any], plan: LoadPlan) -> int:
    """Return what FSDP2 gathers at a time: two blocks, one ahead of its use, and what is in none, which stays gathered.

    Of packed weights one is dequantized at a time.
    """
    model = without_values(checkpoint, keywords)
    nbytes = {name: target.numel * target.dtype.itemsize for target in plan.targets for name in target.names}
    whole = {id(parameter): nbytes[name] for name, parameter in model.named_parameters()}
    in_blocks = [{id(parameter): whole[id(parameter)] for parameter in block.parameters()} for block in blocks(model)]
    inside = {key for block in in_blocks for key in block}
    root = sum(size for key, size in whole.items() if key not in inside)
    dequantized = max((2 * elements(target) for target in plan.targets if target.companions), default=0)
    return root + sum(sorted(sum(block.values()) for block in in_blocks)[-2:]) + dequantized


def without_values(checkpoint: Checkpoint, keywords: Mapping[str, Any]) -> Any:
    """Return the model of a checkpoint on the meta device; `keywords` are those of `plan`."""
    if (of_diffusers := diffusion.model_class(checkpoint.folder, keywords.get("auto_class"), keywords)) is not None:
        return diffusion.skeleton(of_diffusers, checkpoint.folder, keywords, torch.device("meta"))
    cls, config = class_and_config(checkpoint.folder, keywords.get("auto_class"), keywords)
    with torch.device("meta"):
        return cls(config) if isinstance(cls, type) and issubclass(cls, nn.Module) else cls.from_config(config)

"""Tensors of a model, whole however many ranks hold them, for tests of loads and saves."""

import contextlib
import hashlib

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lowmem_load.weights_out.rank_shards import unwrapped


def model_digest(model: nn.Module) -> dict[str, str]:
    """Return a digest of each parameter and persistent buffer, tied ones once. Gathers one at a time. Collective."""
    whole = unwrapped(model)
    persistent = whole.state_dict(keep_vars=True)
    tensors = {
        **dict(whole.named_parameters()),
        **{key: each for key, each in whole.named_buffers() if key in persistent},
    }
    return {name: _digest(gathered(tensor).cpu().contiguous()) for name, tensor in tensors.items()}


def _digest(full: torch.Tensor) -> str:
    values = full.reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{full.dtype} {tuple(full.shape)} ".encode() + values).hexdigest()


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of what DeepSpeed or torch has partitioned, whole; of any other tensor as it is. Collective."""
    with contextlib.ExitStack() as stack:
        if hasattr(tensor, "ds_id"):
            import deepspeed

            stack.enter_context(deepspeed.zero.GatheredParameters([tensor]))
        full = tensor.detach()
        return (full.full_tensor() if isinstance(full, DTensor) else full).clone()


def whole_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of all parameters and buffers, tied ones under each name. Collective."""
    found = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
        try:
            found[name] = gathered(tensor)
        except ValueError:  # torch 2.11 gathers no shard that is strided over a mesh of one dim
            assert torch.__version__.startswith("2.11"), name
    return found


def differing(model: nn.Module, reference: nn.Module) -> list[str]:
    """Return the names of tensors that are not equal, bit for bit. Collective."""
    found, expected = whole_tensors(model), whole_tensors(reference)
    assert found.keys() == expected.keys() or torch.__version__.startswith("2.11")
    return [name for name, tensor in found.items() if not torch.equal(tensor, expected[name])]

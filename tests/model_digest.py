"""A digest of a model's tensors that is the same however many ranks hold them, for tests of loads and saves."""

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
    return {name: _digest(tensor) for name, tensor in tensors.items()}


def _digest(tensor: torch.Tensor) -> str:
    with contextlib.ExitStack() as stack:
        if hasattr(tensor, "ds_id"):
            import deepspeed

            stack.enter_context(deepspeed.zero.GatheredParameters([tensor]))
        full = tensor.detach()
        full = (full.full_tensor() if isinstance(full, DTensor) else full).cpu().contiguous()
        values = full.reshape(-1).view(torch.uint8).numpy().tobytes()
        return hashlib.sha256(f"{full.dtype} {tuple(full.shape)} ".encode() + values).hexdigest()

"""The digest of a checkpoint, without a model in memory."""

from __future__ import annotations

import os
from typing import Any

import torch

from lowmem_load.hf import names
from lowmem_load.integrity.model import ModelDigest
from lowmem_load.integrity.sums import Keys
from lowmem_load.load.instead import instead_of_loading
from lowmem_load.load.request import Request, spelled
from lowmem_load.settings.settings import read_settings
from lowmem_load.stages.digest import digest_only


def digest_checkpoint(
    name: str | os.PathLike[str],
    *,
    auto_class: str | type | None = None,
    dtype: str | torch.dtype | None = "auto",
    key: str = "",
    **from_pretrained_kwargs: Any,
) -> ModelDigest:
    """Return the `model_digest` of what an ordinary `from_pretrained` gives, without holding all of it at a time.

    Local: a plain process, without ranks.
    Memory: the two largest parameters, whole.

    Args:
        name: as for `load_model`.
        auto_class: as for `load_model`.
        dtype: of floating-point parameters; "auto" for that of the checkpoint's config. Digests of loads in another
            dtype differ.
        key: as for `model_digest`.
        **from_pretrained_kwargs: as for `load_model`.

    Raises:
        CheckpointError: the folder or its files cannot be used.
        UnsupportedError: of packed, quantized weights.
    """
    name = spelled(name)
    settings = read_settings({"zero_optimization": {"stage": 0}}, world_size=1)
    if dtype in (None, "auto"):
        config = names.model_config(name, from_pretrained_kwargs)
        dtype = getattr(config, names.DTYPE_KEYWORD, None) or torch.float32
    checked = Request(name, auto_class, dtype, from_pretrained_kwargs).checked(settings)
    return instead_of_loading(checked, lambda call: digest_only(call, checked.settings, Keys(key)))

"""`save_pretrained` of a model whose weights are lazy: tensor by tensor, in the memory of the largest one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lowmem_load.hf.saver import files_written_by
from lowmem_load.saving.writer import Writer, lay_out
from lowmem_load.symbolic.lazy import LazyTensor, values_of


def save_lazily(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Do what `save_pretrained` of a transformers model does; safetensors files get one tensor after the other."""
    with files_written_by(_write):
        return type(model).save_pretrained(model, *args, **kwargs)


def _write(ordinary: Any, tensors: Mapping[str, torch.Tensor], path: Any, metadata: Any = None) -> None:
    if not any(isinstance(tensor, LazyTensor) for tensor in tensors.values()):
        ordinary(tensors, path, metadata)
        return
    # Beside the target and renamed: the target may be one of the files that the values are read from.
    target = Path(os.fsdecode(path))
    file = target.with_name(f".{target.name}.{os.getpid()}")
    layout = lay_out(
        target.name, {name: (each.dtype, tuple(each.shape)) for name, each in tensors.items()}, metadata or {}
    )
    with open(file, "wb") as opened:
        opened.write(layout.header)
        opened.truncate(layout.nbytes)
    with Writer([file], int) as writer:
        for name in sorted(tensors, key=layout.starts.__getitem__):
            writer.put(0, values_of(tensors[name].detach()).contiguous().view(-1).cpu(), layout.starts[name])
        writer.sync()
    os.replace(file, target)

"""save_model: what a live model has to write, and under which names. See docs/howto/saving.md."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lowmem_load.distributed.steps import RankGroup
from lowmem_load.models.active import load_lock
from lowmem_load.weights_out.rank_shards import rank_shards, ranks_of, unwrapped
from lowmem_load.weights_out.weights import Weights, weights_of_model, with_merging
from lowmem_load.weights_out.write import SaveReport, write


def save_model(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
    merge_adapters: bool = False,
    **save_pretrained_kwargs: Any,
) -> SaveReport:
    """Write the folder that `save_pretrained` of the full model would write. Each rank writes the bytes that it owns.

    Every rank must call it, between steps and outside of `GatheredParameters`. The files are ordinary Hugging Face
    files, with the same names, keys, shards and bytes. Works under ZeRO-3 in every mode (offload, hpZ, partial
    ZeRO-3, frozen parts), under stages 0 to 2, and without DeepSpeed. A new folder appears all at once when all ranks
    are done. In an existing one, files are replaced at that moment, and what a save does not write stays; until then,
    and after a failure, all of it is as before.

    Args:
        model: a model of transformers, diffusers or PEFT (whose adapters are written), or an engine, DDP or a compiled
            module around one. These are known by their classes. A module without a `save_pretrained` is written under
            the names of its tensors.
        folder: on a file system that all ranks share; nodes may have it under different paths. Made if it is not there.
        max_shard_size: bytes, or text such as "5GB", as for `save_pretrained`.
        dtype: of floating-point tensors in the files: fp64, fp32, fp16 or bf16. None: that of the model. With
            torch.float32, the optimizer's fp32 values are written of parameters that a ZeRO-3 engine trains in 16
            bits; `SaveReport.num_masters` counts them. Under stages 0 to 2 the 16-bit values are cast.
        merge_adapters: of a PEFT model, write what its `merge_and_unload().save_pretrained` writes; the model does not
            change. All ranks gather the weights that adapters change, one layer at a time. With a dtype, the merged
            values are cast.
        **save_pretrained_kwargs: for the model's `save_pretrained`: variant, save_original_format, ... A module without
            a `save_pretrained` takes `rename`, which turns its names into those in the files; see `load_into`.

    All ranks that have partitions of the model save together. Weights cross the network only to be merged.
    Memory: a buffer of 8 MiB where elements are cast, rearranged or on a device; to merge, a few times the largest
    layer.

    Raises:
        ConfigError: the folder or an argument cannot be used, or `GatheredParameters` is open.
        UnsupportedError: names a tensor that cannot be saved without gathering it, and why.
        CheckpointError: the system refuses a write: the disk is full.
        RankError: another rank failed; the same error is raised on every rank.

    Example:
        engine, *_ = deepspeed.initialize(model=model, config=ds_config)
        report = save_model(engine, "out", dtype=torch.bfloat16)  # on every rank
        print(report.written_bytes)
    """
    model = unwrapped(model)
    options: dict[str, Any] = {"dtype": dtype, "max_shard_size": max_shard_size, "merge_adapters": merge_adapters}
    return save_by(ranks_of(model, may_be_alone=True), model, folder, options, save_pretrained_kwargs)


def save_when_all_call(what: str, model: nn.Module, folder: str | os.PathLike[str], **keywords: Any) -> None:
    """Do what `save_model` does in place of `what`, which scripts may call on one rank only: then raise soon."""
    title = f"{what}, to be called on all ranks and not by the main one alone"
    with ranks_of(model).step(title, is_prompt=True):
        pass  # wait for all ranks
    save_model(model, folder, **keywords)


def save_by(
    ranks: RankGroup,
    model: nn.Module,
    folder: str | os.PathLike[str],
    options: Mapping[str, Any],
    kwargs: Mapping[str, Any],
) -> SaveReport:
    """Do what `save_model` does with a model that nothing wraps, by its options and keywords. Collective: the ranks."""

    def weights(scratch: Path) -> Weights:
        masters = options["dtype"] == torch.float32 and not options.get("merge_adapters")
        shards = rank_shards(model, ranks.rank, masters=masters)
        described = weights_of_model(model, shards, scratch, kwargs=kwargs, **options)
        return with_merging(described, model, shards, ranks)

    compared = {**options, **{key: value for key, value in kwargs.items() if key != "rename"}}  # a function
    with load_lock():
        return write(ranks, folder, weights, compared, title="save_model")

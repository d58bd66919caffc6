"""Loads inside code that calls `from_pretrained` by itself."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from lowmem_load.api.load_model import load_on
from lowmem_load.api.request import Options
from lowmem_load.config.settings import Partition, read_settings
from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.errors import (
    LoadOrderWarning,
    NotStreamedWarning,
    RankError,
    UnsupportedError,
    outside_level,
)
from lowmem_load.hf import loader
from lowmem_load.hf.active import active_zero3_config, deepspeed_config, note_load, was_dropped
from lowmem_load.hf.loader import load_lock
from lowmem_load.hf.remote_names import located_names
from lowmem_load.pipeline.checks import SHARDS


@contextlib.contextmanager
def streaming_by(
    ds_config: Any, options: Options, *, partition: Partition | None, data_parallel_group: Any
) -> Iterator[None]:
    """Do what `streaming()` does with a ds_config."""
    with load_lock():
        ranks = DistributedInterface().subgroup(data_parallel_group)
        with ranks.step("checking the ds_config") as step:
            settings = read_settings(ds_config, world_size=ranks.world_size, partition=partition)
            step.digest = settings.compared
    with (
        located_names(),
        deepspeed_config(settings.ds_config),  # for code that asks for it: generate, resize_token_embeddings
        loader.intercepted(load_on(ranks, settings, options)),
        _sharded_calls(options),
    ):
        try:
            yield
        except BaseException as error:
            if not isinstance(error, RankError):
                ranks.abort("streaming()", error)
            raise


@contextlib.contextmanager
def following(options: Options, *, everywhere: bool = False) -> Iterator[None]:
    """Do what `streaming()` does without a ds_config: for all threads with `everywhere`."""

    def load(call: loader.Call) -> tuple[nn.Module, dict[str, Any]]:
        ds_config = active_zero3_config()
        assert ds_config is not None  # asked a moment ago, by _zero3_is_active
        ranks = DistributedInterface()
        with ranks.step("checking the active ds_config") as step:
            settings = read_settings(ds_config, world_size=ranks.world_size, is_active=True)
            step.digest = settings.compared
        return load_on(ranks, settings, options)(call)

    with (
        located_names(everywhere=everywhere),
        loader.intercepted(load, _zero3_is_active, everywhere=everywhere),
        _sharded_calls(options, everywhere=everywhere),
    ):
        yield


def _sharded_calls(options: Options, *, everywhere: bool = False) -> contextlib.AbstractContextManager[None]:
    def load(call: loader.Call) -> tuple[nn.Module, dict[str, Any]]:
        from lowmem_load.api.load_into import filling

        random_state = torch.get_rng_state()
        try:
            with filling(call.path, call.kwargs, options):
                return call.run()
        except UnsupportedError as error:  # on all ranks: what one alone raises is a RankError
            if options.verify or not options.is_lenient:
                raise
            text = f"{call.name}: not streamed, but left to transformers: {error}"
        warnings.warn(text, NotStreamedWarning, stacklevel=outside_level())
        torch.set_rng_state(random_state)
        return call.run()

    def is_sharded(kwargs: Mapping[str, Any]) -> bool:
        return any(kwargs.get(keyword) is not None for keyword in SHARDS)

    return loader.intercepted(load, is_sharded, everywhere=everywhere)


def _zero3_is_active(_: Mapping[str, Any]) -> bool:
    if was_dropped():
        text = (
            "a HfDeepSpeedConfig was made but nothing keeps it alive, so this model is loaded whole on every rank, not "
            "into ZeRO-3 partitions; transformers holds the object weakly: keep it in a variable for as long as models "
            "are loaded. If the load is meant to be an ordinary one, call "
            "transformers.integrations.unset_hf_deepspeed_config() before it"
        )
        warnings.warn(text, LoadOrderWarning, stacklevel=outside_level())
    note_load()
    return active_zero3_config() is not None

"""A model by name, as a caller asks for it; and what comes of that once all of it is checked."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from lowmem_load.config.settings import Settings
from lowmem_load.distributed.group import RankGroup
from lowmem_load.distributed.node_cache import NodeCache
from lowmem_load.errors import ConfigError
from lowmem_load.hf import names
from lowmem_load.hf.hub import adapter_sought_alike, commit_of
from lowmem_load.hf.quantizers import refuse_quantized
from lowmem_load.hf.replaced import replaced


@dataclass(frozen=True)
class Request:
    """A model by name, and how it is to be loaded.

    Attributes:
        name: see `spelled`.
        auto_class: see `lowmem_load.load_model`.
        dtype: see `lowmem_load.load_model`.
        kwargs: of `from_pretrained`.
    """

    name: str
    auto_class: str | type | None
    dtype: str | torch.dtype | None
    kwargs: Mapping[str, Any]

    def checked(self, settings: Settings) -> Checked:
        """Return the call that will load, with the settings for this model.

        Raises:
            ConfigError: an argument cannot be used.
            CheckpointError: the folder, or what the name stands for, cannot be used.
            UnsupportedError: the weights cannot be partitioned.
        """
        kwargs, dtype = dict(self.kwargs), self.dtype
        if "torch_dtype" in kwargs:  # the older name of the same keyword
            dtype = kwargs.pop("torch_dtype") if dtype == "auto" else dtype
        is_partitioned = settings.stage == 3
        storage = _storage_dtype(dtype, settings.dtype, must_agree=is_partitioned and settings.partition is None)
        kwargs[names.DTYPE_KEYWORD] = storage
        names.check_name(self.name, kwargs.get("subfolder", ""))
        config = names.model_config(self.name, kwargs)
        cls = names.model_class(self.auto_class, config, bool(kwargs.get("trust_remote_code")))
        if is_partitioned:
            if kwargs.get("device_map") is not None:
                raise ConfigError("device_map and ZeRO-3 both place parameters; remove device_map")
            refuse_quantized(config, kwargs)
            names.check_weights(self.name, kwargs.get("subfolder", ""), kwargs.get("use_safetensors"))
        return Checked(self.name, settings.for_model(config), cls, kwargs)

    def checked_once(self, settings: Settings, ranks: RankGroup) -> Checked:
        """Do what `checked` does with a name on the Hub, which one rank of each node asks for all of it.

        The load is of the commit that the name stands for now, and of no later one. Collective: two steps.
        """

        def check(commit: str, **changed: Any) -> tuple[str, Checked]:
            pinned = {**self.kwargs, **changed, "revision": commit} if commit else self.kwargs
            return commit, replace(self, kwargs=pinned).checked(settings)

        def pack(found: tuple[str, Checked]) -> bytes:
            return found[0].encode()

        def look(content: bytes) -> tuple[str, Checked]:
            return check(content.decode(), force_download=False)  # it was, a moment ago

        with NodeCache(ranks) as cache:
            with ranks.step("finding the nodes", name=self.name) as step:
                step.payload = cache.offer
            cache.meet(step.payloads)
            with ranks.step("asking the Hub", name=self.name) as step, cache.stage():
                commit, checked = cache.once("commit", lambda: check(commit_of(self.name, self.kwargs)), pack, look)
                step.digest = {"commit": commit}
        return checked


@dataclass(frozen=True)
class Checked:
    """A request that can be met.

    Attributes:
        name: of the model.
        settings: resolved for it.
        cls: its class.
        kwargs: of `from_pretrained`, the dtype among them.
    """

    name: str
    settings: Settings
    cls: Any
    kwargs: Mapping[str, Any]

    def from_pretrained(self) -> Any:
        """Return what the class's `from_pretrained` does."""
        with replaced(adapter_sought_alike(self.name, self.kwargs)):
            return self.cls.from_pretrained(self.name, **self.kwargs)


def spelled(name: Any) -> str:
    """Return the name of a model as text.

    Raises:
        ConfigError: it is neither a path nor text.
    """
    if not isinstance(name, str | os.PathLike) or not os.fspath(name):
        raise ConfigError(f"name: expected a local folder or a Hub id, got {name!r}")
    return os.fsdecode(name)


def _storage_dtype(dtype: str | torch.dtype | None, engine: torch.dtype, *, must_agree: bool) -> torch.dtype:
    if dtype in (None, "auto"):
        return engine
    asked = dtype if isinstance(dtype, torch.dtype) else _torch_dtype(str(dtype))
    if must_agree and asked != engine:
        raise ConfigError(
            f"dtype {asked} contradicts the ds_config, under which DeepSpeed runs in {engine}; "
            "drop dtype, or change bf16.enabled and fp16.enabled"
        )
    return asked


def _torch_dtype(name: str) -> torch.dtype:
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"dtype {name!r} is not a torch dtype; use 'auto' or one such as 'bfloat16'")
    return found

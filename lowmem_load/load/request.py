"""A model by name, as a caller asks for it, and the checks before the load."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch

from lowmem_load.config.settings import Settings, read_settings
from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.distributed.steps import RankGroup
from lowmem_load.engines.mesh import is_mesh
from lowmem_load.engines.zero3_target import target_maker
from lowmem_load.errors import ConfigError, UnsupportedError
from lowmem_load.files.stand_ins import is_url
from lowmem_load.load.load import Load, LoadedModel, Options
from lowmem_load.models import diffusion, loader, model_class, model_folder
from lowmem_load.models.loader import LEFT_ALONE, SHARDS, Call
from lowmem_load.models.model_folder import commit_of, find_folder, rename_loaded
from lowmem_load.models.quantizers import refuse_quantized, stays_packed
from lowmem_load.models.skeleton import is_distributed_config
from lowmem_load.renamed import warn_of
from lowmem_load.text import plain_url


class Request(NamedTuple):
    """A model by name, and how to load it: see `lowmem_load.load_model`. `kwargs` are those of `from_pretrained`."""

    name: Any
    auto_class: str | type | None
    dtype: str | torch.dtype | None
    kwargs: Mapping[str, Any]
    settings: Settings | None = None  # None if no engine decides on its dtype
    compared: Mapping[str, str] = {}  # what must be equal on all ranks, too

    def checked(self) -> Checked:
        """Return the call that will load, with the settings for this model."""
        kwargs, settings = dict(self.kwargs), self.settings
        if sharding := [keyword for keyword in SHARDS if kwargs.get(keyword) is not None]:
            raise ConfigError(f"{self.name}: remove {sharding[0]}; the ds_config, mesh or distributed_config shards")
        dtype = asked_dtype(self.dtype, kwargs)
        cls, config = class_and_config(self.name, self.auto_class, kwargs)
        if settings is not None:
            is_partitioned = settings.stage == 3
            must_agree = is_partitioned and settings.partition is None
            if dtype == "auto" or (dtype is None and must_agree):
                dtype = settings.dtype
            if must_agree and dtype != settings.dtype:
                raise ConfigError(
                    f"dtype {dtype} contradicts the ds_config, under which DeepSpeed runs in {settings.dtype}; "
                    "drop dtype, or change bf16.enabled and fp16.enabled"
                )
            if is_partitioned and config is not None:
                refuse_quantized(config, kwargs)
            settings = settings.for_model(config)
        if config is not None:
            kwargs["dtype"] = dtype
        else:
            kwargs["torch_dtype"] = None if dtype == "auto" else dtype
        return Checked(self.name, cls, config, kwargs, settings or stage_3(torch.float32, 1))


class Checked(NamedTuple):
    """A request that can be met: the class, transformers' configuration, and all keywords of `from_pretrained`."""

    name: str
    cls: Any
    config: Any  # None for a model of diffusers
    kwargs: Mapping[str, Any]
    settings: Settings  # for the model

    def run(self, load: Callable[[Call], LoadedModel]) -> Any:
        """Call the class's `from_pretrained`, for which `load` does what loads; return the model.

        Raises UnsupportedError if that is not asked, as the class loads in a way of its own.
        """
        taken: list[Call] = []

        def note(call: Call) -> LoadedModel:
            taken.append(call)
            return load(call)

        with loader.intercepted(note), diffusion.intercepted(note):
            model = self.cls.from_pretrained(self.name, **self.kwargs)
        if not taken:
            raise not_taken(self.cls.__name__)
        return rename_loaded(model)


def not_taken(what: str) -> UnsupportedError:
    """Return the error for a `from_pretrained` that has loaded a model by itself."""
    return UnsupportedError(
        f"{what}: its class does not load through transformers' from_pretrained, so lowmem_load had no part in it; "
        "build the model, and fill it by load_into"
    )


def class_and_config(name: str, auto_class: str | type | None, kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the class whose `from_pretrained` to call, and transformers' configuration; None for diffusers' models."""
    if (cls := diffusion.model_class(name, auto_class, kwargs)) is not None:
        return cls, None
    if auto_class is not None:
        cls = model_class.model_class(auto_class, None, trust_remote_code=False)
        return cls, model_class.model_config(name, kwargs, getattr(cls, "config_class", None))
    config = model_class.model_config(name, kwargs)
    return model_class.model_class(None, config, trust_remote_code=bool(kwargs.get("trust_remote_code"))), config


def agree_on_request(ranks: RankGroup, make_request: Callable[[], Request], *, stream: bool = False) -> Checked:
    """Return what `make_request` returns, checked and equal on all ranks. For `stream`, see `find_folder`.

    Collective: one step; two for a Hub id.
    """
    with ranks.step("checking the arguments") as step:
        request = make_request()
        name, kwargs = find_folder(name_text(request.name), request.kwargs, stream=stream, check=ranks.check)
        request = request._replace(name=name, kwargs=kwargs)
        model_folder.check_name(name, kwargs.get("subfolder") or "")
        is_folder = os.path.isdir(name)
        step.digest = {**request.compared, "as name": "a local folder" if is_folder else "a name on the Hub"}
        if is_folder:
            return request.checked()
    with ranks.step("asking the Hub", name=name) as step:
        commit = commit_of(name, kwargs)
        step.digest = {"commit": commit}
        pinned = {"revision": commit} if commit else {}
        return request._replace(kwargs={**kwargs, **pinned}).checked()


def stage_3(dtype: torch.dtype, world_size: int) -> Settings:
    """Return the settings of a stage 3 in any floating-point dtype, for shards, whose dtype no ds_config says."""
    return replace(read_settings({"zero_optimization": {"stage": 3}}, world_size=world_size), dtype=dtype)


def refuse_placing(kwargs: Mapping[str, Any], text: str) -> None:
    """Raise ConfigError for keywords of `from_pretrained` that place, shard or quantize, other than in 4 bits."""
    for keyword in (*LEFT_ALONE, *SHARDS):
        value = kwargs.get(keyword)
        if value is not None and not (keyword == "quantization_config" and stays_packed(value)):
            raise ConfigError(text.format(keyword))


def make_load(ranks: RankGroup, settings: Settings, options: Options) -> Load:
    """Return the `Load` of these settings on these ranks, onto the device of each."""
    device = DistributedInterface().device
    return Load(settings, ranks, target_maker(ranks.rank, device, ranks.group), options)


def name_text(name: Any) -> str:
    """Return the name of a model as text; raise ConfigError if it is neither a path nor text."""
    if not isinstance(name, str | os.PathLike) or not os.fspath(name):
        raise ConfigError(f"name: expected a local folder, a Hub id or a URL, got {name!r}")
    return os.fsdecode(name)


def target_of(**targets: Any) -> tuple[str, Any]:
    """Return name and value of the one argument that says where parameters go; raise ConfigError for none and several.

    In 0.3 `ds_config` was any of them, which warns.
    """
    given = [(key, value) for key, value in targets.items() if value is not None]
    if len(given) != 1:
        named = " and ".join(key for key, _ in given) or "none"
        raise ConfigError(f"expected one of {', '.join(targets)}, got {named}")
    [(key, value)] = given
    if key == "ds_config" and (is_mesh(value) or is_distributed_config(value)):
        key = "mesh" if is_mesh(value) else "distributed_config"
        warn_of(f"{type(value).__name__} as ds_config", f"{key}=")
    return key, value


def weights_folder(path: Any) -> str | None:
    """Return the folder or URL of a training checkpoint, and None for none; raise ConfigError for anything else."""
    if path is None:
        return None
    text = os.fsdecode(path) if isinstance(path, str | os.PathLike) else ""
    if not text or ("://" in text and not is_url(path)):
        shown = repr(plain_url(text) if "://" in text else path)
        raise ConfigError(f"weights_from: expected the folder or URL of a training checkpoint, got {shown}")
    return text


def asked_dtype(dtype: str | torch.dtype | None, kwargs: dict[str, Any]) -> torch.dtype | Literal["auto"] | None:
    """Return a dtype of `load_model` and the like; raise ConfigError for what is none.

    It may be in the keywords by its older name, `torch_dtype`, which is taken out of them.
    """
    older = kwargs.pop("torch_dtype", None)
    if dtype is None or dtype == "auto":
        dtype = dtype if older is None else older
    if dtype is None or dtype == "auto":
        return None if dtype is None else "auto"
    wanted = dtype if isinstance(dtype, torch.dtype) else getattr(torch, str(dtype).removeprefix("torch."), None)
    if not isinstance(wanted, torch.dtype) or not wanted.is_floating_point:
        raise ConfigError(
            f"dtype {dtype!r} is not a floating-point dtype of torch; use 'auto' or one such as 'bfloat16'"
        )
    return wanted

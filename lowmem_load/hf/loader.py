"""Describes a model: runs transformers' own loader on symbolic tensors.

The loader builds, renames, converts, checks, ties and initialises as ever; only the reading of files is replaced, and
it is told that there is no ZeRO-3. Written for transformers 5.6 to 5.24.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import transformers
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from lowmem_load import foreign_names
from lowmem_load.contract import TORCH, TRANSFORMERS, check_release, require
from lowmem_load.errors import CheckpointError, LowMemLoadError, ModelBuildError, UnsupportedError, error_text, listed
from lowmem_load.foreign_names import ForeignName
from lowmem_load.formats.index import check_files, check_index
from lowmem_load.hf.collecting import collecting_handlers, for_loader, symbolic_files
from lowmem_load.hf.hub_files import HUB_KEYWORDS, has_file, hub_keywords
from lowmem_load.hf.load_lock import constructors, inside_load, is_loading, load_lock
from lowmem_load.hf.model_folder import MAX_QUOTED, check_config, files_explained, refuse_foreign
from lowmem_load.hf.names import config_values
from lowmem_load.hf.quantizers import described_quantizers
from lowmem_load.io.stand_ins import origin
from lowmem_load.replaced import Handler, Handlers, replaced, require_names
from lowmem_load.symbolic.constructor import META, Constructor
from lowmem_load.symbolic.context import Context
from lowmem_load.symbolic.lazy import assigned_data_is_real
from lowmem_load.symbolic.tensor import SymbolicTensor, make_uninitialised

T = TypeVar("T")

MAX_MODULES = 1 << 18
"""Modules of a model, of some kilobytes each: twice as many as the largest published models have."""

require(
    TRANSFORMERS,
    {
        "transformers:PreTrainedModel": ("from_pretrained.__func__", "_from_config.__func__"),
        "transformers.integrations.deepspeed": ("HfDeepSpeedConfig",),
        "transformers.utils.logging": (
            *("disable_progress_bar", "enable_progress_bar", "is_progress_bar_enabled"),
            *("get_verbosity", "set_verbosity"),
        ),
    },
)
check_release(TORCH)

import transformers.modeling_utils as modeling_utils  # noqa: E402  the contract gives the better error
from transformers import PreTrainedModel  # noqa: E402

from lowmem_load.hf.active import ordinary_path, quiet  # noqa: E402  it uses private names, too

require_names(TRANSFORMERS, ["hf.active", "hf.collecting", "hf.hub_files", "hf.loader", "hf.skeleton"])


class Call:
    """A call of `from_pretrained` that has not run yet. `from_config` runs in its place, but is described as it is."""

    def __init__(
        self,
        ordinary: Callable[..., Any],
        cls: type,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        from_config: Callable[[], Any] | None = None,
    ) -> None:
        name = args[0] if args else kwargs.get("pretrained_model_name_or_path")
        self.path = cls.__name__ if name is None else str(name)
        self.name = origin(self.path)  # for messages
        self.kwargs = kwargs
        self._given = dict(kwargs)  # what is taken out of `kwargs` is not for describing, but for an ordinary call
        self._ordinary, self._cls, self._args, self._from_config = ordinary, cls, args, from_config

    def move(self, folder: str, kwargs: dict[str, Any]) -> None:
        """Let it load from a folder, by these keywords."""
        kwargs.pop("pretrained_model_name_or_path", None)
        self.path, self.name, self.kwargs = folder, origin(folder), kwargs
        self._given, self._args = kwargs, (folder, *self._args[1:])

    def run(self) -> tuple[nn.Module, dict[str, Any]]:
        """Run it as without lowmem_load; return the model and the loading info."""
        return self._run(self._given) if self._from_config is None else (self._from_config(), {})

    def _run(self, kwargs: Mapping[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
        kwargs = {**kwargs, "output_loading_info": True}
        model, info = self._ordinary(self._cls, *self._args, **kwargs)
        return model, info

    def _run_on(
        self, weights: Mapping[str, torch.Tensor], kwargs: Mapping[str, Any]
    ) -> tuple[nn.Module, dict[str, Any]]:
        """Run it on these weights; raise CheckpointError unless they are those of the model, and all of them."""
        cls: Any = self._cls
        config = kwargs.get("config")
        if config is None:
            if not has_file(self.path, "config.json", self.kwargs):  # as of an adapter: transformers takes its default
                raise CheckpointError(f"{self.name}: has no config.json, which says what model the weights are of")
            config = cls.config_class.from_pretrained(self.path, **hub_keywords(kwargs))
        others = {key: value for key, value in kwargs.items() if key not in (*HUB_KEYWORDS, "config", "subfolder")}
        weights = {name: for_loader(name, tensor) for name, tensor in weights.items()}
        others |= {"output_loading_info": True, "config": config, "state_dict": weights}
        model, info = self._ordinary(cls, None, **others)
        differences = {kind: sorted(map(str, info.get(f"{kind}_keys", ()))) for kind in ("missing", "unexpected")}
        if text := "; ".join(f"{kind}: {listed(keys)}" for kind, keys in differences.items() if keys):
            raise CheckpointError(f"the weights are not of a {cls.__name__} as {self.name} says: {text}")
        if model.can_generate() and has_file(self.path, "generation_config.json", self.kwargs):
            model.generation_config = transformers.GenerationConfig.from_pretrained(
                self.path, **hub_keywords(self.kwargs), subfolder=self.kwargs.get("subfolder") or ""
            )
        return model, info

    def describe(self, context: Context) -> tuple[nn.Module, dict[str, Any]]:
        """Run it on symbolic tensors: return a model of expressions and the loading info. `run` may be called after."""
        refuse_foreign(self.name, self.kwargs)
        subfolder = self.kwargs.get("subfolder") or ""
        if self._from_config is None and self.kwargs.get("config") is None:
            check_config(self.path, subfolder)
        kwargs = {name: value for name, value in self.kwargs.items() if name != "disable_mmap"}  # nothing is mapped
        handlers: dict[ForeignName, Handler] = {
            **symbolic_files(context),
            **collecting_handlers(),
            **building_handlers(context.constructor),
            **_initialising_handlers(context),
            foreign_names.SHARD_FILES: _check_index,
            foreign_names.LOAD_PRETRAINED_MODEL: _note_model(context.constructor),
            foreign_names.LOAD_ADAPTER: _load_adapter,
            foreign_names.MODEL_INIT.of(self._cls): _build(self._cls, self.name, context.check_built),
        }
        with (
            ordinary_path(),
            quiet(logging.ERROR if context.is_quiet or self._from_config is not None else logging.NOTSET),
            _modules_counted(self.name),
            described_quantizers(is_partitioned=context.is_partitioned),
            replaced(handlers),
            files_explained(self.path, subfolder),
        ):
            try:
                return self._run(kwargs) if context.weights is None else self._run_on(context.weights, kwargs)
            except RuntimeError as error:
                # Source: transformers 5.24 `loading_report.py`.
                if re.search("ignore_mismatched_sizes|size mismatch for ", str(error)) is None:
                    raise
                raise CheckpointError(
                    f"{self.name}: tensors of the files have other shapes than config.json gives the parameters of "
                    f"{self._cls.__name__}; transformers' report above names them. Correct config.json, or pass "
                    "ignore_mismatched_sizes=True to leave them out"
                ) from error

    def configuration(self, model: nn.Module) -> dict[str, str]:
        """Return the values of the model's configurations by key."""
        texts: dict[str, str] = {}
        for topic, attribute in (("configuration", "config"), ("generation_config.json", "generation_config")):
            config = getattr(model, attribute, None)
            values = {} if config is None else config_values(config)
            texts |= {f"{topic} {key}": text for key, text in values.items()}
        return texts

    def log_zero_init(self, model: nn.Module) -> None:
        """Log what transformers logs when it builds a model under ZeRO-3: users and its own tests look for it."""
        if getattr(model, "hf_quantizer", None) is None:
            message = "Detected DeepSpeed ZeRO-3: activating zero.init() for this model"
            logging.getLogger(modeling_utils.__name__).info(message)


def _load_adapter(ordinary: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with assigned_data_is_real():
        info = ordinary(model, *args, **kwargs)
    if info is None and not transformers.__version__.startswith("4."):  # 4.x does not use the result
        raise UnsupportedError(
            f"transformers {transformers.__version__} cannot tell which keys of an adapter are missing; load the "
            "base model, then peft.PeftModel.from_pretrained(model, adapter), or use a newer transformers"
        )
    return info


def _build(cls: Any, name: str, check: Callable[[nn.Module], None]) -> Handler:
    def build(ordinary: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> None:
        if type(model) is not cls:  # a submodule of a class that inherits the constructor
            ordinary(model, *args, **kwargs)
            return
        try:
            constructors.append(object())
            try:
                ordinary(model, *args, **kwargs)
            finally:
                constructors.pop()
            check(model)
        except LowMemLoadError:
            raise
        except Exception as error:  # the constructor trusts the values, so a wrong one may raise anything
            raise ModelBuildError(
                f"{name}: {cls.__name__} cannot be built from its configuration (config.json): "
                f"{error_text(error, MAX_QUOTED)}"
            ) from error

    return build


def building_handlers(constructor: Constructor) -> Handlers:
    """Return what has transformers build a model by `constructor`, not on meta."""

    def init_contexts(ordinary: Callable[..., Any], cls: type, *args: Any, **kwargs: Any) -> list[Any]:
        contexts = ordinary(cls, *args, **kwargs)
        return [constructor.building() if context == META else context for context in contexts]

    def init_weights(ordinary: Callable[..., Any], model: nn.Module) -> None:
        # It initialises unless it finds itself on meta.
        with META if constructor.is_building else contextlib.nullcontext():
            ordinary(model)

    return {foreign_names.GET_INIT_CONTEXT: init_contexts, foreign_names.INIT_WEIGHTS: init_weights}


def _note_model(constructor: Constructor) -> Handler:
    def load(ordinary: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        constructor.note(next(value for value in (*args, *kwargs.values()) if isinstance(value, PreTrainedModel)))
        return ordinary(*args, **kwargs)

    return load


@contextlib.contextmanager
def _modules_counted(name: str) -> Iterator[None]:
    num_modules, thread = 0, threading.get_ident()

    def count(*_: Any) -> None:
        nonlocal num_modules
        num_modules += threading.get_ident() == thread  # torch calls it in all threads
        if num_modules > MAX_MODULES:
            raise CheckpointError(
                f"{name}: its configuration (config.json) asks for more than {MAX_MODULES} modules; correct the number "
                "of layers or experts"
            )

    counting = register_module_module_registration_hook(count)
    try:
        yield
    finally:
        counting.remove()


def _initialising_handlers(context: Context) -> Handlers:
    """Return what keeps as expressions the parameters that no file has."""
    initialiser, read_now = context.initialiser, context.read_now

    def initialise(ordinary: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> None:
        made: dict[int, nn.Parameter] = {}
        keeps = context.keeps_of(model)
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                if isinstance(parameter, SymbolicTensor):
                    parameter.initialise_in(initialiser, keeps(parameter))
                elif not parameter.is_meta and not getattr(parameter, "_is_hf_initialized", False):
                    if id(parameter) not in made:
                        empty = make_uninitialised(parameter, read_now)
                        empty.initialise_in(initialiser, keeps(parameter))
                        made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                    setattr(module, name, made[id(parameter)])
        context.constructor.restore(read_now, initialiser)
        ordinary(model, *args, **kwargs)
        initialiser.release()

    return {foreign_names.INITIALIZE_WEIGHTS: initialise}


def _check_index(ordinary: Callable[..., Any], name: str, index: str, *args: Any, **kwargs: Any) -> Any:
    check_index(index)
    if os.path.isdir(name):  # else the files may not have been downloaded yet
        check_files(index)
    return ordinary(name, index, *args, **kwargs)


def copy_marks(loaded: nn.Parameter, made: nn.Parameter) -> None:
    """Copy transformers' mark of a loaded parameter, which keeps it from being initialised again."""
    if getattr(loaded, "_is_hf_initialized", False):
        made._is_hf_initialized = True


# -- calls that are handed to a handler. Streamed loads wait for each other: all ranks take part in one at a time ------

Load = Callable[[Call], tuple[nn.Module, dict[str, Any]]]


def run_load(load: Callable[[T], tuple[Any, dict[str, Any]]], call: T) -> tuple[Any, dict[str, Any]]:
    """Run a load of any family in this thread. Loads that the model's own code makes are part of it."""
    with load_lock(), inside_load():
        return load(call)


@contextlib.contextmanager
def intercepted(
    load: Load, wanted: Callable[[Mapping[str, Any]], bool] = lambda _: True, *, everywhere: bool = False
) -> Iterator[None]:
    """Inside, `load` gets each outermost `from_pretrained`, and each `from_config` as one from no files.

    `wanted` is asked with the keywords of the call. `everywhere` means all threads. The innermost block counts.
    """

    def from_pretrained(ordinary: Callable[..., Any], cls: type, *args: Any, **kwargs: Any) -> Any:
        if is_loading() or not wanted(kwargs):
            return ordinary(cls, *args, **kwargs)
        wants_info = kwargs.pop("output_loading_info", False)
        model, info = run_load(load, Call(ordinary, cls, args, kwargs))
        return (model, info) if wants_info else model

    def from_config(ordinary: Callable[..., Any], cls: Any, /, config: Any, **kwargs: Any) -> Any:
        as_load = {"config": config, "state_dict": {}, **kwargs}
        if is_loading() or not wanted(as_load):
            return ordinary(cls, config, **kwargs)
        from_config = functools.partial(ordinary, cls, config, **kwargs)
        model, _ = run_load(load, Call(PreTrainedModel.from_pretrained.__func__, cls, (None,), as_load, from_config))
        model.config.name_or_path = getattr(config, "name_or_path", "")
        return model.train()

    handlers: Handlers = {foreign_names.FROM_PRETRAINED: from_pretrained, foreign_names.FROM_CONFIG: from_config}
    with replaced(handlers, everywhere=everywhere):
        yield

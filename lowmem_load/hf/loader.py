"""Describes a model: runs transformers' own loader on symbolic tensors.

The loader builds, renames, converts, checks, ties and initialises as ever; only the reading of files is replaced, and
it is told that there is no ZeRO-3. Written for transformers 4.51 to 5.24.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.overrides import TorchFunctionMode

from lowmem_load.contract import TRANSFORMERS, require
from lowmem_load.errors import (
    CheckpointError,
    ConfigError,
    LowMemLoadError,
    ModelBuildError,
    UnsupportedError,
    error_text,
)
from lowmem_load.formats.index import check_index
from lowmem_load.hf.collecting import described_collecting, symbolic_files
from lowmem_load.hf.hub_files import asked_once
from lowmem_load.hf.names import MAX_QUOTED, check_config, files_explained, refuse_foreign
from lowmem_load.hf.quantizers import described_quantizers
from lowmem_load.io.stand_ins import origin_of
from lowmem_load.replaced import Replacement, holding, replaced
from lowmem_load.symbolic.constructor import META, Constructor
from lowmem_load.symbolic.context import Context, Once
from lowmem_load.symbolic.initialise import ReadNow
from lowmem_load.symbolic.tensor import SymbolicTensor, expression_of, make_uninitialised

_INITIALISES = (
    "initialize_weights" if hasattr(transformers.PreTrainedModel, "initialize_weights") else "_initialize_missing_keys"
)
"""Initialises the parameters that no file has. transformers 4.51 marks the others in the same method."""

constructors: list[object] = []  # one object for each constructor of a model that runs in the thread that loads

MAX_MODULES = 1 << 18
"""Modules of a model, of some kilobytes each: twice as many as the largest published models have."""

PATIENCE_S = 30.0
"""Seconds that a thread waits for another one to build a model. The largest models take a second."""

_LOCK = threading.RLock()

_IS_LOADING: ContextVar[bool] = ContextVar("lowmem_load_is_loading", default=False)
"""Whether a handler runs. Calls that the model's own code makes are part of its load."""


require(
    TRANSFORMERS,
    {
        "transformers:PreTrainedModel": (
            "from_pretrained.__func__",
            "_from_config.__func__",
            "_load_pretrained_model",
            "get_init_context.__func__",
            "init_weights",
            _INITIALISES,
            "load_adapter",
        ),
        "transformers.integrations.deepspeed": (
            *("HfDeepSpeedConfig", "_hf_deepspeed_config_weak_ref", "set_hf_deepspeed_config"),
        ),
        "transformers.modeling_utils": (
            *("get_checkpoint_shard_files", "is_deepspeed_zero3_enabled", "is_fsdp_enabled"),
            *("load_state_dict", "safe_open"),
        ),
        "transformers.models.auto.auto_factory": ("find_adapter_config_file",),
        "transformers.quantizers.auto:AutoHfQuantizer": ("from_config",),
        "transformers.quantizers.base:HfQuantizer": ("validate_environment",),
        "transformers.utils.hub": ("cached_files",),
        "transformers.utils.logging": (
            *("disable_progress_bar", "enable_progress_bar", "is_progress_bar_enabled"),
            *("get_verbosity", "set_verbosity", "set_verbosity_error"),
        ),
    },
)

import transformers.modeling_utils as modeling_utils  # noqa: E402  the contract gives the better error
from transformers import PreTrainedModel  # noqa: E402

from lowmem_load.hf.active import ordinary_path, quiet  # noqa: E402  it uses private names, too


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
        self.name = origin_of(self.path)  # for messages
        self.kwargs = kwargs
        self._ordinary, self._cls, self._args, self._from_config = ordinary, cls, args, from_config

    def move(self, folder: str, kwargs: dict[str, Any]) -> None:
        """Let it load from a folder, by these keywords."""
        kwargs.pop("pretrained_model_name_or_path", None)
        self.path, self.name, self.kwargs = folder, origin_of(folder), kwargs
        self._args = (folder, *self._args[1:])

    def run(self) -> tuple[nn.Module, dict[str, Any]]:
        """Run it as without lowmem_load; return the model and the loading info."""
        return self._run(self.kwargs) if self._from_config is None else (self._from_config(), {})

    def _run(self, kwargs: Mapping[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
        kwargs = {**kwargs, "output_loading_info": True}
        model, info = self._ordinary(self._cls, *self._args, **kwargs)
        return model, info

    def describe(self, context: Context, *, is_partitioned: bool) -> tuple[nn.Module, dict[str, Any]]:
        """Run it on symbolic tensors: return a model of expressions and the loading info. `run` may be called after."""
        refuse_foreign(self.name, self.kwargs)
        subfolder = self.kwargs.get("subfolder") or ""
        if self._from_config is None and self.kwargs.get("config") is None:
            check_config(self.path, subfolder)
        kwargs = {name: value for name, value in self.kwargs.items() if name != "disable_mmap"}  # nothing is mapped
        keeps_names = self.kwargs.get("device_map") is not None
        replacements = [
            *symbolic_files(context),
            *described_collecting(),
            _checked_indexes(context.once, keeps_names=keeps_names),
            asked_once(context.once),
            _initialised_in(context),
            *built_with_values(context.constructor),
            (PreTrainedModel, "_load_pretrained_model", _noted(context.constructor)),
            _adapters(context.read_now),
            _built(self._cls, self.name, context.check_built),
        ]
        with (
            ordinary_path(),
            quiet(errors_only=self._from_config is not None),  # then all parameters are missing
            _modules_counted(self.name),
            described_quantizers(is_partitioned=is_partitioned),
            replaced(*replacements),
            files_explained(self.path, subfolder),
        ):
            try:
                return self._run(kwargs)
            except RuntimeError as error:
                # Source: transformers 5.23 `loading_report.py`, 4.57 `modeling_utils.py`.
                if re.search("ignore_mismatched_sizes|size mismatch for ", str(error)) is None:
                    raise
                raise CheckpointError(
                    f"{self.name}: tensors of the files have other shapes than config.json gives the parameters of "
                    f"{self._cls.__name__}; transformers' report above names them. Correct config.json, or pass "
                    "ignore_mismatched_sizes=True to leave them out"
                ) from error


def log_zero_init(model: nn.Module) -> None:
    """Log what transformers logs when it builds a model under ZeRO-3: users and its own tests look for it."""
    if getattr(model, "hf_quantizer", None) is None:
        message = "Detected DeepSpeed ZeRO-3: activating zero.init() for this model"
        logging.getLogger(modeling_utils.__name__).info(message)


class AssignedDataIsRead(TorchFunctionMode):
    """Reads symbolic values that are assigned to the `data` of real parameters: torch would drop their class."""

    def __init__(self, read_now: ReadNow) -> None:
        super().__init__()
        self._read_now = read_now

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        # Not `is`: each look-up of the attribute makes a new wrapper.
        if func == torch.Tensor.data.__set__ and isinstance(args[1], SymbolicTensor):
            parameter, value = args
            if not isinstance(parameter, SymbolicTensor):
                args = (parameter, self._read_now(expression_of(value), "assigning to the data of an adapter"))
        return func(*args, **(kwargs or {}))


def _adapters(read_now: ReadNow) -> Replacement:
    def load_adapter(ordinary: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with AssignedDataIsRead(read_now):
            info = ordinary(model, *args, **kwargs)
        if info is None and not transformers.__version__.startswith("4."):  # 4.x does not use the result
            raise UnsupportedError(
                f"transformers {transformers.__version__} cannot tell which keys of an adapter are missing; load the "
                "base model, then peft.PeftModel.from_pretrained(model, adapter), or use a newer transformers"
            )
        return info

    return PreTrainedModel, "load_adapter", load_adapter


def _built(cls: Any, name: str, check: Callable[[nn.Module], None]) -> Replacement:
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

    return cls, "__init__", build


def built_with_values(constructor: Constructor) -> list[Replacement]:
    """Return what has transformers 5 build a model by `constructor`, not on meta. transformers 4 builds with memory."""

    def init_contexts(ordinary: Callable[..., Any], cls: type, *args: Any, **kwargs: Any) -> list[Any]:
        contexts = ordinary(cls, *args, **kwargs)
        return [constructor.building() if context == META else context for context in contexts]

    def init_weights(ordinary: Callable[..., Any], model: nn.Module) -> None:
        # It initialises unless it finds itself on meta.
        with META if constructor.is_building else contextlib.nullcontext():
            ordinary(model)

    return [(PreTrainedModel, "get_init_context", init_contexts), (PreTrainedModel, "init_weights", init_weights)]


def _noted(constructor: Constructor) -> Callable[..., Any]:
    def load(ordinary: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        constructor.note(next(each for each in (*args, *kwargs.values()) if isinstance(each, PreTrainedModel)))
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


def _initialised_in(context: Context) -> Replacement:
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

    return PreTrainedModel, _INITIALISES, initialise


def _checked_indexes(once: Once, *, keeps_names: bool) -> Replacement:
    """Check the index that transformers uses, and read it on one rank of a node."""
    keeps_names = keeps_names or transformers.__version__.startswith("4.")
    unused = () if keeps_names else ("all_checkpoint_keys", "weight_map")

    def checked(ordinary: Callable[..., Any], name: str, index: str, *args: Any, **kwargs: Any) -> Any:
        def find() -> tuple[list[str], dict[str, Any]]:
            check_index(index)
            files, metadata = ordinary(name, index, *args, **kwargs)
            return files, {key: value for key, value in metadata.items() if key not in unused}

        def pack(found: tuple[list[str], dict[str, Any]]) -> bytes:
            return json.dumps(found, separators=(",", ":")).encode()

        return once(f"index {name} {index} {os.getcwd()}", find, pack, json.loads)

    return modeling_utils, "get_checkpoint_shard_files", checked


def copy_marks(loaded: nn.Parameter, made: nn.Parameter) -> None:
    """Copy transformers' mark of a loaded parameter, which keeps it from being initialised again."""
    if getattr(loaded, "_is_hf_initialized", False):
        made._is_hf_initialized = True


# -- calls that are handed to a handler. Streamed loads wait for each other: all ranks take part in one at a time ------

Handler = Callable[[Call], tuple[nn.Module, dict[str, Any]]]


@contextlib.contextmanager
def load_lock() -> Iterator[None]:
    """Have one thread load or save at a time. That thread may take the lock again.

    Raises ConfigError if the other thread stays in one constructor, which may wait for this thread.
    """
    before: list[object] = []
    while not _LOCK.acquire(timeout=PATIENCE_S):
        now = constructors[:1]
        if now and now == before:
            raise ConfigError(
                "another thread of this process is loading, and has been in the constructor of its model for more than "
                f"{PATIENCE_S:.0f} s; if that constructor waits for this thread, let it load without a thread"
            )
        before = now
    try:
        yield
    finally:
        _LOCK.release()


def is_loading() -> bool:
    """Return whether this code runs as part of a load of this package."""
    return _IS_LOADING.get()


def outermost() -> contextlib.AbstractContextManager[None]:
    """Inside, a `from_pretrained` is no part of the load in progress: it is handed to a handler like any other."""
    return holding(_IS_LOADING, False)


def handled(handler: Handler, call: Call) -> tuple[Any, dict[str, Any]]:
    """Have a handler do a load in this thread. Loads that the model's own code makes are part of it."""
    with load_lock(), holding(_IS_LOADING, True):
        return handler(call)


@contextlib.contextmanager
def intercepted(
    handler: Handler, wanted: Callable[[Mapping[str, Any]], bool] = lambda _: True, *, everywhere: bool = False
) -> Iterator[None]:
    """Inside, `handler` gets each outermost `from_pretrained`, and each `from_config` as one from no files.

    `wanted` is asked with the keywords of the call. `everywhere` means all threads. The innermost block counts.
    """

    def from_pretrained(ordinary: Callable[..., Any], cls: type, *args: Any, **kwargs: Any) -> Any:
        if _IS_LOADING.get() or not wanted(kwargs):
            return ordinary(cls, *args, **kwargs)
        wants_info = kwargs.pop("output_loading_info", False)
        model, info = handled(handler, Call(ordinary, cls, args, kwargs))
        return (model, info) if wants_info else model

    def from_config(ordinary: Callable[..., Any], cls: Any, /, config: Any, **kwargs: Any) -> Any:
        as_load = {"config": config, "state_dict": {}, **kwargs}
        if _IS_LOADING.get() or not wanted(as_load):
            return ordinary(cls, config, **kwargs)
        from_config = functools.partial(ordinary, cls, config, **kwargs)
        model, _ = handled(handler, Call(PreTrainedModel.from_pretrained.__func__, cls, (None,), as_load, from_config))
        model.config.name_or_path = getattr(config, "name_or_path", "")
        return model.train()

    with replaced(
        (PreTrainedModel, "from_pretrained", from_pretrained),
        (PreTrainedModel, "_from_config", from_config),
        everywhere=everywhere,
    ):
        yield

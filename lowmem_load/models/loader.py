"""Describes a model: runs transformers' own loader on symbolic tensors. `Call` is what a load needs of any model.

The loader builds, renames, converts, checks, ties and initializes as ever. Only the reading of files is replaced: they
give symbolic tensors, and nothing of them is read. And it is told that there is no ZeRO-3. Written for transformers 5.6
to 5.24.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from lowmem_load import foreign_names
from lowmem_load.config.settings import Settings
from lowmem_load.errors import (
    CheckpointError,
    ConfigError,
    LowMemLoadError,
    ModelBuildError,
    UnsupportedError,
    error_text,
    listed,
)
from lowmem_load.files.format import CheckpointFile, CheckpointFormat
from lowmem_load.files.index import check_files, check_index
from lowmem_load.files.safetensors import CODES, Safetensors
from lowmem_load.files.stand_ins import origin
from lowmem_load.files.torch_zip import NestedTorchZip, TorchZip
from lowmem_load.foreign_names import TORCH, TRANSFORMERS, ForeignName, check_release
from lowmem_load.models.active import IS_LOADING, constructors, load_lock, ordinary_path, quiet
from lowmem_load.models.model_folder import HUB_KEYWORDS, check_config, files_explained, find_file, hub_keywords
from lowmem_load.models.quantizers import described_quantizers
from lowmem_load.models.wrappers import refuse_differences
from lowmem_load.planning.expression import Computed, leaves, numel
from lowmem_load.replaced import Handler, Handlers, holding, replaced
from lowmem_load.symbolic.attributes import EXTRA_STATE
from lowmem_load.symbolic.constructor import META, Constructor, Context
from lowmem_load.symbolic.initialise import UNINITIALISED, ReadNow
from lowmem_load.symbolic.lazy import assigned_data_is_real
from lowmem_load.symbolic.tensor import SymbolicTensor, make_uninitialised

T = TypeVar("T")

check_release(TORCH)
check_release(TRANSFORMERS)

LEFT_ALONE = ("device_map", "quantization_config", "gguf_file")
"""Keywords of loads that transformers itself does under stages 0 to 2."""

SHARDS = ("distributed_config", "tp_plan", "tp_size")
"""Keywords by which `from_pretrained` shards a model."""


class Call(Protocol):
    """A load of one model that has not run yet. A `ModuleCall` fills any module by names.

    Attributes:
        path: path of its files: a folder, a file, a Hub id or a URL.
        name: what the path stands for, for messages.
        kwargs: keywords that choose files and place the model, as `from_pretrained` of transformers has them.
    """

    path: str
    name: str
    kwargs: dict[str, Any]

    def move(self, folder: str, kwargs: dict[str, Any]) -> None:
        """Let it load from a folder, by these keywords."""
        kwargs.pop("pretrained_model_name_or_path", None)
        self.path, self.name, self.kwargs = folder, origin(folder), kwargs

    def run(self) -> tuple[nn.Module, dict[str, Any]]:
        """Load as without lowmem_load; return the model and the loading info."""

    def describe(self, context: Context) -> tuple[nn.Module, dict[str, Any]]:
        """Return a model of expressions and the loading info. `run` may be called after."""


def is_left_alone(call: Call, settings: Settings) -> bool:
    """Return whether transformers does a load by itself. Raise ConfigError for a device_map under ZeRO-3."""
    placed = [name for name in LEFT_ALONE if call.kwargs.get(name) is not None]  # device_map=0 is a GPU
    if settings.stage == 3 and "device_map" in placed:
        raise ConfigError(f"{call.name}: device_map and ZeRO-3 both place parameters; remove device_map")
    return settings.stage < 3 and bool(placed)


def is_local(call: Call) -> bool:
    """Return whether nothing can come from the Hub, not even the base model of an adapter."""
    folder = os.path.join(call.path, call.kwargs.get("subfolder") or "")
    return os.path.isdir(call.path) and not os.path.isfile(os.path.join(folder, "adapter_config.json"))


def configuration_of(model: nn.Module) -> dict[str, str]:
    """Return what must be equal on all ranks, in addition to parameters and files, as text by topic.

    Private keys of a configuration are left out: one is the folder.
    """

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(key): plain(item) for key, item in value.items() if not str(key).startswith("_")}
        return [plain(item) for item in value] if isinstance(value, list | tuple) else value

    texts = {"class of the model": type(model).__name__}
    for topic, attribute in (("configuration", "config"), ("generation_config.json", "generation_config")):
        config: Any = getattr(model, attribute, None)
        config = config.to_dict() if hasattr(config, "to_dict") else config
        for key, value in plain(config).items() if isinstance(config, Mapping) else ():
            texts[f"{topic} {key}"] = json.dumps(value, sort_keys=True, default=lambda other: type(other).__name__)
    return texts


class PretrainedCall(Call):
    """A call of `from_pretrained` that has not run yet."""

    def __init__(self, ordinary: Callable[..., Any], cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = args[0] if args else kwargs.get("pretrained_model_name_or_path")
        self.path = "" if name is None else str(name)  # a from_config, or a state_dict, has no files
        self.name, self.kwargs = origin(self.path) or cls.__name__, kwargs
        self._ordinary, self._cls, self._args = ordinary, cls, args

    def move(self, folder: str, kwargs: dict[str, Any]) -> None:
        """See `Call`."""
        super().move(folder, kwargs)
        self._args = (folder, *self._args[1:])

    def run(self) -> tuple[nn.Module, dict[str, Any]]:
        """See `Call`."""
        return self._run(self.kwargs)

    def _run(self, kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        model, info = self._ordinary(self._cls, *self._args, **{**kwargs, "output_loading_info": True})
        return model, info


class TransformersCall(PretrainedCall):
    """A call of transformers. `from_config` runs in its place, but is described as it is."""

    from_config: Callable[[], Any] | None = None

    def run(self) -> tuple[nn.Module, dict[str, Any]]:
        """See `Call`."""
        return super().run() if self.from_config is None else (self.from_config(), {})

    def _run_on(
        self, weights: Mapping[str, torch.Tensor], kwargs: Mapping[str, Any]
    ) -> tuple[nn.Module, dict[str, Any]]:
        """Run it on these weights; raise CheckpointError unless they are those of the model, and all of them."""
        config, hub = kwargs.get("config"), hub_keywords(kwargs)
        others = {key: value for key, value in kwargs.items() if key not in HUB_KEYWORDS}
        if config is None:
            # An adapter has none, and transformers would take the default of the class.
            if find_file(self.path, "config.json", self.kwargs) is None:
                raise CheckpointError(f"{self.name}: has no config.json, which says what model the weights are of")
            # Some keywords are the configuration's: they may not reach the constructor.
            own = {key: others.pop(key) for key in ("dtype", "quantization_config") if key in others}
            make_config = self._cls.config_class.from_pretrained
            config, others = make_config(self.path, return_unused_kwargs=True, **hub, **others)
            others |= own
        weights = {name: for_loader(name, tensor) for name, tensor in weights.items()}
        others |= {"output_loading_info": True, "config": config, "state_dict": weights}
        model, info = self._ordinary(self._cls, None, **others)
        differences = {kind: sorted(map(str, info.get(f"{kind}_keys", ()))) for kind in ("missing", "unexpected")}
        what = f"the weights are not of a {self._cls.__name__} as {self.name} says"
        refuse_differences(what, differences, "Name the model that was saved")
        if model.can_generate() and find_file(self.path, "generation_config.json", self.kwargs) is not None:
            model.generation_config = GenerationConfig.from_pretrained(self.path, **hub_keywords(self.kwargs))
        return model, info

    def describe(self, context: Context) -> tuple[nn.Module, dict[str, Any]]:
        """See `Call`."""
        if file := self.kwargs.get("gguf_file"):
            raise UnsupportedError(
                f"{self.name}: lowmem_load cannot read gguf_file, which every rank would have to load in full; convert "
                "it once, without lowmem_load, by "
                f'model_class.from_pretrained(folder, gguf_file="{file}").save_pretrained(new_folder)'
            )
        subfolder = self.kwargs.get("subfolder") or ""
        if self.from_config is None and self.kwargs.get("config") is None:
            check_config(self.path, subfolder)
        kwargs = {name: value for name, value in self.kwargs.items() if name != "disable_mmap"}  # nothing is mapped
        handlers: dict[ForeignName, Handler] = {
            **symbolic_files(context),
            **collecting_handlers(),
            **building_handlers(context.constructor),
            foreign_names.INITIALIZE_WEIGHTS: functools.partial(_initialise, context),
            foreign_names.SHARD_FILES: check_shards,
            foreign_names.LOAD_PRETRAINED_MODEL: functools.partial(_note_model, context),
            foreign_names.LOAD_ADAPTER: _load_adapter,
            foreign_names.MODEL_INIT.of(self._cls): functools.partial(self._build, context),
        }
        with (
            ordinary_path(),
            quiet(logging.ERROR if context.is_quiet or self.from_config is not None else logging.NOTSET),
            described_quantizers(is_partitioned=context.is_partitioned),
            replaced(handlers),
            files_explained(self.path, subfolder),
        ):
            try:
                model, info = self._run(kwargs) if context.weights is None else self._run_on(context.weights, kwargs)
            except RuntimeError as error:
                # Source: transformers 5.24 `loading_report.py`.
                if re.search("ignore_mismatched_sizes|size mismatch for ", str(error)) is None:
                    raise
                raise CheckpointError(
                    f"{self.name}: tensors of the files have other shapes than config.json gives the parameters of "
                    f"{self._cls.__name__}; transformers' report above names them. Correct config.json, or pass "
                    "ignore_mismatched_sizes=True to leave them out"
                ) from error
        if self.from_config is not None:
            _refuse_unset(model)
        context.note_values(model)
        return model, info

    def _build(self, context: Context, ordinary: Callable[..., Any], model: Any, /, *args: Any, **kwargs: Any) -> None:
        if type(model) is not self._cls:  # a submodule of a class that inherits the constructor
            ordinary(model, *args, **kwargs)
            return
        constructors.append(object())
        try:
            ordinary(model, *args, **kwargs)
            context.check_built(model)
        except LowMemLoadError:
            raise
        except Exception as error:  # the constructor trusts the values, so a wrong one may raise anything
            raise ModelBuildError(
                f"{self.name}: {self._cls.__name__} cannot be built from its configuration (config.json): "
                f"{error_text(error)}"
            ) from error
        finally:
            constructors.pop()


def _refuse_unset(model: nn.Module) -> None:
    """Raise for a model of no files in which `_init_weights` leaves parameters alone: a constructor makes no values."""
    if unset := [
        name
        for name, parameter in model.named_parameters()
        if isinstance(parameter, SymbolicTensor)
        and any(
            isinstance(leaf, Computed) and leaf.operation == UNINITIALISED
            for leaf in leaves(parameter.initialised or parameter.expression)
        )
    ]:
        raise UnsupportedError(
            f"from_config: _init_weights of {type(model).__name__} sets no value for {listed(unset)}, and lowmem_load "
            "does not keep those of the constructor. Set them in _init_weights, or build the model without lowmem_load"
        )


def _load_adapter(ordinary: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with assigned_data_is_real():
        return ordinary(model, *args, **kwargs)


def building_handlers(constructor: Constructor) -> Handlers:
    """Return what has transformers build a model by `constructor`, not on meta."""

    def init_contexts(ordinary: Callable[..., Any], cls: type, *args: Any, **kwargs: Any) -> list[Any]:
        contexts = ordinary(cls, *args, **kwargs)
        return [constructor.building() if context == META else context for context in contexts]

    def init_weights(ordinary: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> None:
        # It initializes unless it finds itself on meta.
        with META if constructor.is_building else contextlib.nullcontext():
            ordinary(model, *args, **kwargs)

    return {foreign_names.GET_INIT_CONTEXT: init_contexts, foreign_names.INIT_WEIGHTS: init_weights}


def _note_model(
    context: Context,
    ordinary: Callable[..., Any],
    model: Any,
    state_dict: Any,
    checkpoint_files: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    context.constructor.note(model)
    if state_dict is None and checkpoint_files is not None:
        paths = map(os.fspath, checkpoint_files)
        context.read_ahead({path: Safetensors() if path.endswith(".safetensors") else TorchZip() for path in paths})
    return ordinary(model, state_dict, checkpoint_files, *args, **kwargs)


def _initialise(context: Context, ordinary: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Initialize the parameters that no file has, and keep them as expressions."""
    initialiser, read_now = context.initialiser, context.read_now
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


def check_shards(
    ordinary: Callable[..., Any], pretrained_model_name_or_path: Any, index_filename: Any, *args: Any, **kwargs: Any
) -> Any:
    """Check an index before transformers, or diffusers, looks for the files that it names."""
    check_index(os.fspath(index_filename))
    if os.path.isdir(pretrained_model_name_or_path):  # else the files may not have been downloaded yet
        check_files(os.fspath(index_filename))
    return ordinary(pretrained_model_name_or_path, index_filename, *args, **kwargs)


def copy_marks(loaded: nn.Parameter, made: nn.Parameter) -> None:
    """Copy transformers' mark of a loaded parameter, which keeps it from being initialized again."""
    if getattr(loaded, "_is_hf_initialized", False):
        made._is_hf_initialized = True


# -- how transformers reads and collects tensors. Source: transformers 5.6 to 5.24 `core_model_loading.py` -------------


class SymbolicFile(contextlib.AbstractContextManager["SymbolicFile"]):
    """Stands for what `safetensors.safe_open` returns."""

    def __init__(self, file: CheckpointFile, read_now: ReadNow) -> None:
        self._file, self._read_now = file, read_now
        self.expression = file.expression

    def __exit__(self, *error: object) -> None:
        pass

    def keys(self) -> list[str]:
        """Return the names of the tensors, sorted as those of `safe_open`: dtype "auto" is that of the first."""
        return sorted(self._file.names)

    def metadata(self) -> Mapping[str, str] | None:
        """Return the strings in the header, such as the format."""
        return self._file.metadata

    def offset_keys(self) -> list[str]:
        """Return the names of the tensors in the order of their data."""
        return list(self._file.names)

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return a symbolic tensor; a real one for an extra state."""
        return for_loader(name, SymbolicTensor(self.expression(name), self._read_now))

    def get_tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors, by their names."""
        return {name: self.get_tensor(name) for name in self.offset_keys()}

    def get_slice(self, name: str) -> _SymbolicSlice:
        """Return a tensor that may be indexed before it is made."""
        return _SymbolicSlice(self, name)

    def get_tensor_meta(self, name: str) -> _SymbolicMeta:
        """Return what the header says of a tensor."""
        return _SymbolicMeta(self, name)

    def prefetch(
        self, plan: Mapping[str, slice | None] | None = None, *, device: Any = None, threads: int = 8
    ) -> _SymbolicLoader:
        """Return symbolic tensors, some with the rows of the plan. Nothing is read, and they stay on the host."""
        return _SymbolicLoader(self, dict.fromkeys(self.offset_keys()) if plan is None else plan)


class _SymbolicSlice:
    __slots__ = ("_file", "_name")

    def __init__(self, file: SymbolicFile, name: str) -> None:
        self._file, self._name = file, name  # not looked up yet: torch may lack the dtype of a tensor that nobody uses

    def get_shape(self) -> list[int]:
        return list(self._file.expression(self._name).shape)

    def get_dtype(self) -> str:
        return CODES[self._file.expression(self._name).dtype]

    def __getitem__(self, index: Any) -> torch.Tensor:
        tensor = self._file.get_tensor(self._name)
        return tensor if index is Ellipsis else tensor[index]


class _SymbolicMeta(_SymbolicSlice):
    """Stands for `TensorMeta` of safetensors 0.9."""

    __slots__ = ()
    shape = property(_SymbolicSlice.get_shape)
    dtype = property(_SymbolicSlice.get_dtype)

    @property
    def data_offsets(self) -> tuple[int, int]:
        first: Any = self._file.expression(self._file.offset_keys()[0])
        tensor: Any = self._file.expression(self._name)
        start = tensor.start - first.start
        return start, start + numel(tensor) * tensor.dtype.itemsize


class _SymbolicLoader(contextlib.AbstractContextManager["_SymbolicLoader"]):
    """Stands for `PrefetchLoader` of safetensors 0.9, which gives each tensor once."""

    def __init__(self, file: SymbolicFile, plan: Mapping[str, slice | None]) -> None:
        self._file, self._rows = file, dict(plan)

    def __exit__(self, *error: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, self.take(name)) for name in self.names())

    def names(self) -> list[str]:
        return [name for name in self._file.offset_keys() if name in self._rows]

    def take(self, name: str) -> torch.Tensor:
        rows, tensor = self._rows.pop(name), self._file.get_tensor(name)
        return tensor if rows is None else tensor[rows]

    def close(self) -> None:
        self._rows.clear()


def for_loader(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a symbolic tensor, but the values of an extra state: the code of its module may do anything with them."""
    if name.rpartition(".")[2] == EXTRA_STATE and isinstance(tensor, SymbolicTensor):
        return tensor.read_now(tensor.expression, "set_extra_state")
    return tensor


def symbolic_files(context: Context) -> Handlers:
    """Return the handlers by which transformers finds symbolic tensors in the files of a checkpoint."""

    def symbolic_open(_: Any, filename: str | os.PathLike[str], *args: Any, **kwargs: Any) -> SymbolicFile:
        return SymbolicFile(context.file(os.fspath(filename), Safetensors()), context.read_now)

    def symbolic_state_dict(ordinary: Any, checkpoint_file: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if os.fspath(checkpoint_file).endswith(".safetensors"):
            return dict(ordinary(checkpoint_file, *args, **kwargs))  # through symbolic_open
        tensors = _symbols(context.file(os.fspath(checkpoint_file), TorchZip()), context)
        return {name: for_loader(name, tensor.detach()) for name, tensor in tensors.items()}  # ties are one value

    return {
        foreign_names.SAFE_OPEN: symbolic_open,
        foreign_names.LOAD_STATE_DICT: symbolic_state_dict,
        foreign_names.IS_ON_HF_MOUNT: lambda *_, **__: False,  # on such mounts it reads full files to avoid mmap
    }


class _Waiting:
    """Makes a tensor once a converter has collected all of its parts. A `partial` would take three times the memory."""

    __slots__ = ("_device", "_dtype", "_tensor")

    def __init__(self, tensor: _SymbolicSlice, device: Any, dtype: torch.dtype | None) -> None:
        self._tensor, self._device, self._dtype = tensor, device, dtype

    def __call__(self) -> torch.Tensor:
        return self._tensor[...].to(device=self._device, dtype=self._dtype)


def collecting_handlers() -> Handlers:
    """Return what saves time and memory in large models.

    With transformers' copies of converters, describing DeepSeek-V3 in fp8 takes twice the time. Its threads would only
    make symbolic tensors, and what it keeps of each tensor until then takes 2 KiB as a future, 0.4 KiB as a closure. It
    sorts the names of all tensors at once, by keys of a kilobyte each.
    """
    import transformers.core_model_loading as loading

    latest: dict[int, tuple[Any, Any]] = {}
    parts_of_keys: dict[Any, Any] = {}

    def copy_once_for_each_use(ordinary: Callable[..., Any], x: Any, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or not isinstance(x, loading.WeightConverter):
            return ordinary(x, *args, **kwargs)
        original, copied = latest.get(id(x), (None, None))
        if original is not x or copied.collected_tensors:
            quantizers = [operation.hf_quantizer for operation in x.operations if hasattr(operation, "hf_quantizer")]
            copied = ordinary(x, {id(quantizer): quantizer for quantizer in quantizers})
            latest[id(x)] = x, copied
        return copied

    def without_threads(
        ordinary: Any, thread_pool: Any, tensor: Any, device: Any = None, dtype: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        is_plain = isinstance(tensor, _SymbolicSlice) and kwargs.get("sharding_op") is None
        if is_plain and not args and kwargs.keys() <= {"sharding_op", "tensor_idx"}:
            return _Waiting(tensor, device, dtype)
        return ordinary(None, tensor, device, dtype, *args, **kwargs)

    def with_shared_parts(ordinary: Callable[..., Any], s: str, *args: Any, **kwargs: Any) -> list[Any]:
        return [parts_of_keys.setdefault(part, part) for part in ordinary(s, *args, **kwargs)]

    return {
        foreign_names.DEEPCOPY: copy_once_for_each_use,
        foreign_names.SPAWN_MATERIALIZE: without_threads,
        foreign_names.SORTING_KEY: with_shared_parts,
    }


def tensors_in(paths: Iterable[str], context: Context) -> dict[str, torch.Tensor]:
    """Return the tensors of several files by name, as symbolic ones. Nothing of them is read.

    Raises CheckpointError if a name is in several files.
    """
    tensors: dict[str, torch.Tensor] = {}
    homes: dict[str, str] = {}
    formats = {path: file_format(path) for path in paths}
    context.read_ahead(formats)
    for path, checkpoint_format in formats.items():
        file = context.file(path, checkpoint_format)
        for name, tensor in _symbols(file, context).items():
            if name in tensors:
                raise CheckpointError(
                    f"{name}: is in {homes[name]} and in {path}; name one of the files by its path, or pass variant="
                )
            tensors[name], homes[name] = tensor, path
    return tensors


def _symbols(file: CheckpointFile, context: Context) -> dict[str, torch.Tensor]:
    expressions = {name: file.expression(name) for name in file.names}
    shared = {id(node): SymbolicTensor(node, context.read_now) for node in expressions.values()}
    return {name: shared[id(node)] for name, node in expressions.items()}


def file_format(path: str) -> CheckpointFormat:
    """Return the format of a file of weights."""
    if path.endswith(".safetensors"):
        return Safetensors()
    return NestedTorchZip()


# -- calls that are handed to a handler. Loads wait for each other: all ranks take part in one at a time ------

Load = Callable[[TransformersCall], tuple[nn.Module, dict[str, Any]]]


def run_load(load: Callable[[T], tuple[Any, dict[str, Any]]], call: T) -> tuple[Any, dict[str, Any]]:
    """Run a load of any family in this thread. Loads that the model's own code makes are part of it."""
    with load_lock(), holding(IS_LOADING, True):
        return load(call)


def taking_calls(
    load: Callable[[T], tuple[Any, dict[str, Any]]],
    make_call: Callable[[Callable[..., Any], type, tuple[Any, ...], dict[str, Any]], T],
    wanted: Callable[[type, Mapping[str, Any]], bool],
) -> Handler:
    """Return what gives `load` each outermost `from_pretrained` of a family that is wanted."""

    def from_pretrained(ordinary: Callable[..., Any], cls: type, *args: Any, **kwargs: Any) -> Any:
        if IS_LOADING.get() or not wanted(cls, kwargs):
            return ordinary(cls, *args, **kwargs)
        wants_info = kwargs.pop("output_loading_info", False)
        model, info = run_load(load, make_call(ordinary, cls, args, kwargs))
        return (model, info) if wants_info else model

    return from_pretrained


@contextlib.contextmanager
def intercepted(
    load: Load, wanted: Callable[[Mapping[str, Any]], bool] = lambda _: True, *, everywhere: bool = False
) -> Iterator[None]:
    """Inside, `load` gets each outermost `from_pretrained`, and each `from_config` as one from no files.

    `wanted` is asked with the keywords of the call. `everywhere` means all threads. The innermost block counts.
    """

    def from_config(ordinary: Callable[..., Any], cls: Any, /, config: Any, **kwargs: Any) -> Any:
        as_load = {"config": config, "state_dict": {}, **kwargs}
        if IS_LOADING.get() or not wanted(as_load):
            return ordinary(cls, config, **kwargs)
        call = TransformersCall(PreTrainedModel.from_pretrained.__func__, cls, (None,), as_load)
        call.from_config = functools.partial(ordinary, cls, config, **kwargs)
        model, _ = run_load(load, call)
        model.config.name_or_path = getattr(config, "name_or_path", "")
        return model.train()

    from_pretrained = taking_calls(load, TransformersCall, lambda _, kwargs: wanted(kwargs))
    handlers: Handlers = {foreign_names.FROM_PRETRAINED: from_pretrained, foreign_names.FROM_CONFIG: from_config}
    with replaced(handlers, everywhere=everywhere):
        yield

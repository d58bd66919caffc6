"""The transformers seam: the only module that touches transformers, and each private name of it once.

[Note: the seam] transformers' own ordinary loader does the work: it builds the skeleton on meta, renames and converts
checkpoint tensors, checks shapes, ties, initialises what is missing and writes the loading info. Only the reading of
files is replaced while it runs: `safe_open` and `load_state_dict`, as `modeling_utils` sees them, hand out symbolic
tensors (`symbolic.py`), so that what the loader puts into the model are expressions instead of data. Meanwhile no
DeepSpeed configuration is visible to transformers, which keeps it, and modelling code that asks, off the ZeRO-3 path.
Nothing here knows what happens to the expressions afterwards.

Written for transformers 4.57 to 5.23.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import transformers
from torch import nn

from .checkpoint import check_indexes, read_header, source
from .errors import CheckpointError, ConfigError, IncompatibleVersionError, UnsupportedError
from .header import Header
from .symbolic import ReadWhole, Scratch, SymbolicTensor
from .torch_zip import read_torch_zip

SUPPORTED = "transformers >=4.57,<6"

HUB_KEYWORDS = (
    *("cache_dir", "force_download", "proxies", "token", "local_files_only", "revision", "code_revision"),
    *("subfolder", "trust_remote_code"),
)
"""Keywords of `from_pretrained` that say where files come from; the configuration is resolved with the same ones."""


def _check_contract() -> None:
    """Raise when a name that this module relies on is absent or has another form."""
    try:
        import transformers.integrations.deepspeed as integration
        import transformers.modeling_utils as modeling

        names = ("safe_open", "load_state_dict")
        missing = [f"modeling_utils.{name}" for name in names if not hasattr(modeling, name)]
        missing += [
            f"integrations.deepspeed.{name}"
            for name in ("_hf_deepspeed_config_weak_ref", "set_hf_deepspeed_config", "HfDeepSpeedConfig")
            if not hasattr(integration, name)
        ]
        missing += [
            f"PreTrainedModel.{name}"
            for name in ("initialize_weights", "load_adapter")
            if not callable(getattr(transformers.PreTrainedModel, name, None))
        ]
        missing += [
            f"PreTrainedModel.{name} as a classmethod"
            for name in ("from_pretrained", "_from_config")
            if not isinstance(transformers.PreTrainedModel.__dict__.get(name), classmethod)
        ]
        if not missing and "safe_open" not in inspect.getsource(modeling):
            missing.append("a from_pretrained that reads through safe_open")
    except (ImportError, AttributeError, OSError) as error:
        missing = [str(error)]
    if missing:
        raise IncompatibleVersionError(
            f"transformers {transformers.__version__} lacks {', '.join(missing)}; "
            f"lowmem_load was written for {SUPPORTED}"
        )


_check_contract()

import transformers.integrations.deepspeed as hf_deepspeed  # noqa: E402  the contract gives the better error
import transformers.modeling_utils as modeling_utils  # noqa: E402
from transformers import AutoConfig, PreTrainedModel  # noqa: E402
from transformers.integrations.deepspeed import HfDeepSpeedConfig  # noqa: E402
from transformers.utils import logging as hf_logging  # noqa: E402

# -- the global DeepSpeed configuration ------------------------------------------------------------------------------


@contextlib.contextmanager
def deepspeed_config(config: Mapping[str, Any] | HfDeepSpeedConfig | None) -> Iterator[HfDeepSpeedConfig | None]:
    """Make `config` the DeepSpeed configuration that transformers sees; None hides any. Restores the one before.

    transformers keeps only a weak reference (`integrations/deepspeed.py`), so the object lives as long as the block.
    """
    before = hf_deepspeed._hf_deepspeed_config_weak_ref
    alive: HfDeepSpeedConfig | None = None
    try:
        if config is None:
            hf_deepspeed._hf_deepspeed_config_weak_ref = None
        elif isinstance(config, Mapping):
            alive = HfDeepSpeedConfig(dict(config))
        else:
            alive = config
            hf_deepspeed.set_hf_deepspeed_config(config)
        yield alive
    finally:
        hf_deepspeed._hf_deepspeed_config_weak_ref = before


# -- from_pretrained -------------------------------------------------------------------------------------------------


class Call:
    """One call of `from_pretrained` that somebody made, not yet run."""

    def __init__(self, ordinary: Callable[..., Any], cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = args[0] if args else kwargs.get("pretrained_model_name_or_path")
        self.name = cls.__name__ if name is None else str(name)
        self.kwargs = kwargs
        self._ordinary, self._cls, self._args = ordinary, cls, args

    def run(self) -> tuple[nn.Module, dict[str, Any]]:
        """Run it as transformers would; return the model and the loading info."""
        model, info = self._ordinary(self._cls, *self._args, **{**self.kwargs, "output_loading_info": True})
        return model, info

    def describe(
        self, read_whole: ReadWhole, scratch: Scratch, before_adapter: Callable[[nn.Module], None]
    ) -> tuple[nn.Module, dict[str, Any]]:
        """Run it with symbolic tensors in place of those in files; see [Note: the seam].

        Args:
            read_whole: reads an expression for code that needs its value at once.
            scratch: where parameters that are not in the files are initialised, one at a time.
            before_adapter: called with the base model when a PEFT adapter is about to be put on it, since PEFT needs
                parameters and not descriptions of them.

        Returns:
            The model, some of whose parameters and buffers are symbolic, and the loading info.

        Raises:
            UnsupportedError: the call asks for a format that cannot be streamed.
        """
        _refuse_foreign(self.name, self.kwargs)
        folder = os.path.join(self.name, self.kwargs.get("subfolder") or "")
        if os.path.isdir(folder):
            check_indexes(folder)
        self.kwargs.pop("disable_mmap", None)  # nothing is mapped, so there is nothing to disable
        with deepspeed_config(None), _quiet(), contextlib.ExitStack() as hooks:
            hooks.enter_context(_symbolic_files(read_whole))
            hooks.enter_context(_initialised_in(scratch))
            hooks.enter_context(_adapter_hook(before_adapter))
            return self.run()


Handler = Callable[[Call], tuple[nn.Module, dict[str, Any]]]


def _always() -> bool:
    return True


@contextlib.contextmanager
def intercepted(handler: Handler, wanted: Callable[[], bool] = _always) -> Iterator[None]:
    """Inside, every outermost `from_pretrained` of a transformers model is handed to `handler` as a `Call`.

    So is `from_config`, as a `from_pretrained` from no file at all: then every parameter is a missing one. Calls at
    which `wanted()` is false run as if nothing were intercepted.
    """
    ordinary = _ordinary("from_pretrained")
    ordinary_from_config = _ordinary("_from_config")
    busy = False  # a from_pretrained that the model's own code makes while it is loaded is part of that load

    def from_pretrained(cls: type, *args: Any, **kwargs: Any) -> Any:
        nonlocal busy
        if busy or not wanted():
            return ordinary(cls, *args, **kwargs)
        busy = True
        try:
            wants_info = kwargs.pop("output_loading_info", False)
            model, info = handler(Call(ordinary, cls, args, kwargs))
            return (model, info) if wants_info else model
        finally:
            busy = False

    def from_config(cls: type, /, config: Any, **kwargs: Any) -> Any:
        if busy or not wanted():
            return ordinary_from_config(cls, config, **kwargs)
        with _errors_only():  # that parameters are missing is no news here
            model = from_pretrained(cls, None, config=config, state_dict={}, **kwargs)
        model.config.name_or_path = getattr(config, "name_or_path", "")
        return model.train()

    functools.update_wrapper(from_pretrained, ordinary)
    functools.update_wrapper(from_config, ordinary_from_config)
    from_pretrained.lowmem_load_ordinary = ordinary
    from_config.lowmem_load_ordinary = ordinary_from_config
    with (
        _replaced(PreTrainedModel, "from_pretrained", classmethod(from_pretrained)),
        _replaced(PreTrainedModel, "_from_config", classmethod(from_config)),
    ):
        yield


def interceptor() -> object:
    """Return what stands for `from_pretrained` now: another object within each `intercepted`."""
    return PreTrainedModel.__dict__["from_pretrained"].__func__


def _ordinary(name: str) -> Callable[..., Any]:
    """Return transformers' own class method, also where an outer `intercepted` has replaced it."""
    function = PreTrainedModel.__dict__[name].__func__
    ordinary: Callable[..., Any] = getattr(function, "lowmem_load_ordinary", function)
    return ordinary


@contextlib.contextmanager
def _errors_only() -> Iterator[None]:
    level = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    inherited = name not in vars(owner)
    before = None if inherited else vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide transformers' progress bar: it would show the naming of tensors as the loading of weights."""
    enabled = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            hf_logging.enable_progress_bar()


@contextlib.contextmanager
def _adapter_hook(before_adapter: Callable[[nn.Module], None]) -> Iterator[None]:
    ordinary = PreTrainedModel.load_adapter

    def load_adapter(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        before_adapter(model)
        return ordinary(model, *args, **kwargs)

    with _replaced(PreTrainedModel, "load_adapter", load_adapter):
        yield


@contextlib.contextmanager
def _initialised_in(scratch: Scratch) -> Iterator[None]:
    """Let what `initialize_weights` writes into parameters go through `scratch`.

    transformers has given the missing ones `torch.empty` memory by then; they give it back untouched.
    """
    ordinary = PreTrainedModel.initialize_weights

    def initialize_weights(model: nn.Module) -> None:
        replaced: dict[int, nn.Parameter] = {}
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                if isinstance(parameter, SymbolicTensor):
                    scratch.own(parameter)
                elif not parameter.is_meta and not getattr(parameter, "_is_hf_initialized", False):
                    if id(parameter) not in replaced:
                        empty = scratch.uninitialised(parameter)
                        scratch.own(empty)
                        replaced[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                    setattr(module, name, replaced[id(parameter)])
        ordinary(model)
        scratch.release()

    with _replaced(PreTrainedModel, "initialize_weights", initialize_weights):
        yield


@contextlib.contextmanager
def _symbolic_files(read_whole: ReadWhole) -> Iterator[None]:
    def symbolic_open(path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> _SymbolicFile:
        return _SymbolicFile(os.fspath(path), read_whole)

    ordinary = modeling_utils.load_state_dict
    opened = functools.cache(read_torch_zip)  # 4.57 asks for the same file up to three times

    def symbolic_state_dict(path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        if os.fspath(path).endswith(".safetensors"):
            return dict(ordinary(path, *args, **kwargs))  # through symbolic_open
        described = opened(os.fspath(path))
        tensors = {id(node): SymbolicTensor(node, read_whole) for node in described.values()}
        return {name: tensors[id(node)].detach() for name, node in described.items()}  # tied names share one value

    with contextlib.ExitStack() as stack:
        stack.enter_context(_replaced(modeling_utils, "safe_open", symbolic_open))
        stack.enter_context(_replaced(modeling_utils, "load_state_dict", symbolic_state_dict))
        if hasattr(modeling_utils, "_is_on_hf_mount"):  # 5.9 on: reads files whole on such mounts to avoid mmap
            stack.enter_context(_replaced(modeling_utils, "_is_on_hf_mount", _never))
        yield


def _never(path: object) -> bool:
    return False


class _SymbolicFile:
    """What `safetensors.safe_open` returns, with symbolic tensors. Reads the header and nothing else."""

    def __init__(self, path: str, read_whole: ReadWhole) -> None:
        self._path, self._read_whole = path, read_whole
        self._header: Header = read_header(path)

    def __enter__(self) -> _SymbolicFile:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def keys(self) -> list[str]:
        return list(self._header.tensors)

    def metadata(self) -> Mapping[str, str] | None:
        return self._header.metadata

    def get_tensor(self, name: str) -> torch.Tensor:
        return SymbolicTensor(source(self._path, self._header, name), self._read_whole)

    def get_slice(self, name: str) -> _SymbolicSlice:
        return _SymbolicSlice(self, name)

    def entry(self, name: str) -> Any:
        return self._header.tensors[name]


class _SymbolicSlice:
    """What `safe_open(...).get_slice` returns: shape and dtype at once, a tensor when indexed."""

    def __init__(self, file: _SymbolicFile, name: str) -> None:
        self._file, self._name = file, name

    def get_shape(self) -> list[int]:
        return list(self._file.entry(self._name).shape)

    def get_dtype(self) -> str:
        return str(self._file.entry(self._name).dtype_code)

    def __getitem__(self, index: Any) -> torch.Tensor:
        tensor = self._file.get_tensor(self._name)
        return tensor if index is Ellipsis else tensor[index]


def copy_marks(loaded: nn.Parameter, made: nn.Parameter) -> None:
    """Carry over transformers' mark that keeps a loaded parameter from being initialised again later."""
    if getattr(loaded, "_is_hf_initialized", False):
        made._is_hf_initialized = True


# -- what to load ----------------------------------------------------------------------------------------------------


def check_name(name: str, subfolder: str) -> None:
    """Refuse a name that is meant as a local folder but cannot be loaded from, before anything asks the Hub.

    Raises:
        CheckpointError: says what is missing.
    """
    looks_local = name.startswith((".", "~", os.sep)) or os.path.isabs(name) or name.count("/") > 1
    if not os.path.isdir(name):
        if os.path.isfile(name):
            raise CheckpointError(f"{name}: is a file; pass the folder that holds it and its config.json")
        if looks_local:
            raise CheckpointError(f"{name}: no such folder")
        return
    folder = os.path.join(name, subfolder)
    if not os.path.isdir(folder):
        raise CheckpointError(f"{folder}: no such subfolder")
    if not os.listdir(folder):
        raise CheckpointError(f"{folder}: the folder is empty")


_FOREIGN_FILES: Mapping[str, str] = {
    ".gguf": 'model_class.from_pretrained(folder, gguf_file="{file}").save_pretrained(new_folder)',
    ".h5": "model_class.from_pretrained(folder, from_tf=True).save_pretrained(new_folder), with transformers 4",
    ".ckpt.index": "model_class.from_pretrained(folder, from_tf=True).save_pretrained(new_folder), with transformers 4",
    ".msgpack": "model_class.from_pretrained(folder, from_flax=True).save_pretrained(new_folder), with transformers 4",
    ".pth": "the script that came with the model, or torch.load(..., weights_only=True) and safetensors' save_file",
    ".pt": "the script that came with the model, or torch.load(..., weights_only=True) and safetensors' save_file",
}
"""Weights that cannot be streamed, by the end of their file names, and what converts them."""


def check_weights(name: str, subfolder: str, use_safetensors: bool | None) -> None:
    """Refuse a local folder with neither safetensors files nor `pytorch_model*.bin`, naming what it holds instead.

    Raises:
        CheckpointError: says how to convert.
    """
    folder = os.path.join(name, subfolder)
    if not os.path.isdir(folder):  # a Hub id: transformers picks the files
        return
    files = sorted(os.listdir(folder))
    safe = any(file.endswith(".safetensors") for file in files)
    torch_files = any(file.startswith("pytorch_model") and file.endswith(".bin") for file in files)
    if (safe and use_safetensors is not False) or (torch_files and not use_safetensors):
        return
    if safe or torch_files:
        there = "safetensors" if safe else "pytorch_model*.bin"
        raise CheckpointError(f"{folder}: use_safetensors={use_safetensors}, but it holds only {there}; drop it")
    foreign = {file: end for file in files for end in _FOREIGN_FILES if file.endswith(end)}
    if not foreign:
        raise CheckpointError(f"{folder}: no pytorch_model*.bin and no safetensors files; it holds no weights at all")
    file, end = next(iter(foreign.items()))
    raise CheckpointError(
        f"{folder}: no pytorch_model*.bin and no safetensors files to stream from; it holds "
        f"{', '.join(list(foreign)[:5])}. Convert once with {_FOREIGN_FILES[end].format(file=file)}"
    )


def _refuse_foreign(name: str, kwargs: Mapping[str, Any]) -> None:
    """Raise when the caller asks for a format of which every rank would have to hold the whole model."""
    for keyword, end in {"gguf_file": ".gguf", "from_tf": ".h5", "from_flax": ".msgpack"}.items():
        if kwargs.get(keyword):
            convert = _FOREIGN_FILES[end].format(file=kwargs[keyword])
            raise UnsupportedError(
                f"{name}: {keyword} cannot be streamed; convert once, without lowmem_load, by {convert}"
            )


def model_config(name: str, kwargs: Mapping[str, Any]) -> Any:
    """Return the transformers configuration that `from_pretrained(name, **kwargs)` will use.

    Raises:
        CheckpointError: there is none, or it is malformed.
    """
    given = kwargs.get("config")
    if given is not None and not isinstance(given, str | os.PathLike):
        return given
    hub = {key: kwargs[key] for key in HUB_KEYWORDS if key in kwargs}
    try:
        return AutoConfig.from_pretrained(name if given is None else given, **hub)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{name}: no usable model configuration: {error}") from error


def model_class(auto_class: str | type | None, config: Any, trust_remote_code: bool) -> Any:
    """Return the class whose `from_pretrained` to call.

    Args:
        auto_class: a class, the name of a transformers class, or None for the one that `config.architectures` names.
        config: the model's configuration.
        trust_remote_code: whether `config.auto_map` may name a class that comes with the checkpoint.

    Raises:
        ConfigError: there is no such class.
    """
    if isinstance(auto_class, type):
        if not callable(getattr(auto_class, "from_pretrained", None)):
            raise ConfigError(f"auto_class {auto_class.__name__} has no from_pretrained; pass a transformers class")
        return auto_class
    if auto_class is not None:
        return _class_named(auto_class, "auto_class")
    architectures = getattr(config, "architectures", None) or []
    if not architectures:
        raise ConfigError("the model's config names no architectures; pass auto_class, such as 'AutoModelForCausalLM'")
    remote = getattr(config, "auto_map", None) or {}
    if trust_remote_code:
        for auto_name, reference in remote.items():
            if auto_name.startswith("AutoModel") and str(reference).rpartition(".")[2] == architectures[0]:
                return _class_named(auto_name, "auto_map of the model's config")
    return _class_named(architectures[0], "architectures of the model's config")


def _class_named(name: str, where: str) -> Any:
    found = getattr(transformers, name, None)
    if not isinstance(found, type) or not callable(getattr(found, "from_pretrained", None)):
        raise ConfigError(
            f"{where}: transformers {transformers.__version__} has no model class {name!r}; "
            "pass a class, or trust_remote_code=True for code that comes with the checkpoint"
        )
    return found


def refuse_quantized(config: Any, kwargs: Mapping[str, Any]) -> None:
    """Raise for a quantized model, unless it is to be dequantized: ZeRO-3 partitions floating-point parameters.

    Raises:
        UnsupportedError: names the method.
    """
    quantization = kwargs.get("quantization_config") or getattr(config, "quantization_config", None)
    if quantization is not None:
        fields = quantization if isinstance(quantization, Mapping) else vars(quantization)
        if fields.get("dequantize") is True:
            return
        method = fields.get("quant_method", type(quantization).__name__)
        raise UnsupportedError(
            f"quantization {str(getattr(method, 'value', method))!r} cannot be partitioned by ZeRO-3: every rank "
            "would hold the whole model; ask for dequantize=True where the method has it (fp8, mxfp4), load a "
            "dequantized checkpoint, or use ZeRO stage 0, 1 or 2"
        )


# -- what goes with a model ------------------------------------------------------------------------------------------

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
TOKENIZER_FILES = (
    *("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model"),
    *("sentencepiece.bpe.model", "tekken.json"),
)
"""Of either kind, one is enough to say that the checkpoint comes with a processor, or with a tokenizer."""


def load_processor(name: str, kwargs: Mapping[str, Any]) -> Any:
    """Return the processor that comes with a checkpoint, else its tokenizer; None if it comes with neither.

    Which of these holds is read off the names of its files, so that one that is there but broken is an error.

    Raises:
        CheckpointError: there is one, but it cannot be loaded.
    """
    hub = {key: kwargs[key] for key in HUB_KEYWORDS if key in kwargs}
    for kind, files in (("AutoProcessor", PROCESSOR_FILES), ("AutoTokenizer", TOKENIZER_FILES)):
        if any(_has_file(name, file, hub) for file in files):
            try:
                return getattr(transformers, kind).from_pretrained(name, **hub)
            except Exception as error:  # the tokenizers library raises no class of its own
                raise CheckpointError(
                    f"{name}: its {kind.removeprefix('Auto').lower()} cannot be loaded: {error}; "
                    "repair its files, or remove all of them to load the model alone"
                ) from error
    return None


def _has_file(name: str, file: str, hub: Mapping[str, Any]) -> bool:
    """Return whether the folder, or the Hub (offline: the cache), has the file. It is fetched with that."""
    if os.path.isdir(name):
        return os.path.isfile(os.path.join(name, hub.get("subfolder") or "", file))
    where = {key: value for key, value in hub.items() if key not in ("trust_remote_code", "code_revision")}
    return transformers.utils.cached_file(name, file, _raise_exceptions_for_missing_entries=False, **where) is not None


def enable_checkpointing(model: Any, checkpoint_kwargs: Mapping[str, Any]) -> None:
    """Make the model recompute activations in the backward pass, and keep no key-value cache.

    Raises:
        UnsupportedError: this model cannot.
    """
    # 5.23 renamed it and warns about the old name.
    enable = getattr(model, "activation_checkpointing_enable", None)
    keyword = "gradient_checkpointing_kwargs" if enable is None else "activation_checkpointing_kwargs"
    try:
        (enable or model.gradient_checkpointing_enable)(**{keyword: dict(checkpoint_kwargs)})
    except ValueError as error:
        raise UnsupportedError(f"{type(model).__name__}: no gradient checkpointing: {error}") from error
    configs: list[Any] = [model.config, getattr(model.config, "text_config", None)]
    for config in configs:
        if hasattr(config, "use_cache"):
            config.use_cache = False

"""The releases of other packages that this one needs, and their functions that are replaced while a block lasts.

`replaced.py` takes no other name than those of the table here. A new release of a package is checked against it;
`docs/development/foreign_names.md` shows it. Private names that are only used are checked by `require`. A release that
lacks some is refused with the names of all that is missing. A release newer than the tested ones is used if it lacks
nothing, with one warning.
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import operator
import pkgutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from packaging.version import InvalidVersion, Version

from lowmem_load.errors import IncompatibleVersionError, UnsupportedError

logger = logging.getLogger(__name__)


class Releases(NamedTuple):
    """The releases of a package, named as pip and `import` do, that this package was tested with."""

    package: str
    oldest: str
    newest: str

    def __str__(self) -> str:
        return f"{self.package} {self.oldest} to {self.newest}"


DEEPSPEED = Releases("deepspeed", oldest="0.18.4", newest="0.19.8")
TRANSFORMERS = Releases("transformers", oldest="5.6.0", newest="5.24.0")
TORCH = Releases("torch", oldest="2.8.0", newest="2.15.0")
PEFT = Releases("peft", oldest="0.18.1", newest="0.21.2")
BITSANDBYTES = Releases("bitsandbytes", oldest="0.48.2", newest="0.50.2")
COMPRESSED_TENSORS = Releases("compressed-tensors", oldest="0.15.0", newest="0.20.1")
ACCELERATE = Releases("accelerate", oldest="1.11.0", newest="1.15.0")
TRL = Releases("trl", oldest="0.28.0", newest="1.16.0")
LLAMAFACTORY = Releases("llamafactory", oldest="0.9.5", newest="0.9.5")
DIFFUSERS = Releases("diffusers", oldest="0.42.0", newest="0.42.1")
AXOLOTL = Releases("axolotl", oldest="0.19.0", newest="0.19.0")


# -- the check of releases and of names that are used ------------------------------------------------------------------


def require(supported: Releases, names: Mapping[str, Sequence[str]]) -> None:
    """Raise IncompatibleVersionError, which names all that is missing, unless a release can be used.

    An owner of `names` is "package.module" or "package.module:Class"; names may be dotted.
    """
    check_release(supported)
    missing: list[str] = []
    for owner, attributes in names.items():
        label = owner.replace(":", ".")
        try:
            missing += _missing_attributes(label, pkgutil.resolve_name(owner), attributes)
        except (ImportError, AttributeError) as error:
            missing.append(f"{label} ({error})")
    refuse(supported, missing)


def require_attributes(supported: Releases, owner: object, names: Sequence[str]) -> None:
    """Raise IncompatibleVersionError unless an object has all attributes: those that `__init__` sets, say."""
    refuse(supported, _missing_attributes(type(owner).__qualname__, owner, names))


def _missing_attributes(label: str, owner: object, names: Iterable[str]) -> list[str]:
    missing = []
    for name in names:
        try:
            operator.attrgetter(name)(owner)
        except AttributeError:
            missing.append(f"{label}.{name}")
    return missing


def installed_release(package: str) -> str:
    """Return the release of a package that is imported or installed; "" if it does not say."""
    try:
        return str(getattr(sys.modules.get(package), "__version__", None) or importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:  # it runs from a folder of sources
        return ""


def absent(setting: str) -> UnsupportedError:
    """Return the error about a setting that only newer releases of DeepSpeed know."""
    release = installed_release("deepspeed")
    return UnsupportedError(f"{setting}: deepspeed {release} would ignore it; remove it, or install deepspeed>=0.19.8")


def is_release_between(package: str, oldest: str, newest: str = "") -> bool:
    """Return whether the installed release lies between two, ends included; also if it does not say."""
    try:
        release = Version(installed_release(package)).release
    except InvalidVersion:
        return True
    return Version(oldest).release <= release and (not newest or release <= Version(newest).release)


def check_release(supported: Releases) -> None:
    """Raise IncompatibleVersionError for a release that is too old; warn once of one that is newer than the tested."""
    package, oldest, _ = supported
    if not is_release_between(package, oldest):
        raise IncompatibleVersionError(
            f"{package} {installed_release(package)} is too old: lowmem_load works with {supported}; "
            f"install {package}=={oldest} or newer"
        )
    warn_of_newer(supported)


@functools.cache
def warn_of_newer(supported: Releases) -> None:
    """Warn once of a release that is newer than the tested ones."""
    package, _, newest = supported
    if not is_release_between(package, "0", newest):
        logger.warning(
            "%s %s is newer than what lowmem_load was tested with (%s). The names that lowmem_load uses are checked, "
            "not what they mean: compare the first losses with those of a run without it",
            package,
            installed_release(package),
            supported,
        )


def refuse(supported: Releases, missing: Sequence[str]) -> None:
    """Raise IncompatibleVersionError if names are missing."""
    if missing:
        raise IncompatibleVersionError(
            f"{supported.package} {installed_release(supported.package)} lacks {', '.join(missing)}; lowmem_load works "
            f"with {supported}: install {supported.package}=={supported.newest}"
        )


# -- the table of names that are replaced ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ForeignName:
    """A function of another package.

    Attributes:
        releases: of the package: the newest is the one that the name was last checked with.
        module: where it is looked up, which may be not where it is defined.
        name: "function" or "Class.method".
        loss: what a user loses where it is missing; "" if nothing works without it. Names with the same loss are
            replaced together or not at all.
        since, until: the releases that have it. Others need not have it.
        takes: the parameters that handlers use, without `self`: the first ones in their order, and others after a "*".
        owner: the subclass whose method is meant, see `of`.
    """

    releases: Releases
    module: str
    name: str
    loss: str = ""
    since: str = ""
    until: str = ""
    takes: str = ""
    owner: type | None = None

    def of(self, owner: type) -> ForeignName:
        """Return the same method of a subclass, which may have its own."""
        return replace(self, owner=owner)

    def __str__(self) -> str:
        return f"{self.module}.{self.name}" + f"({', '.join(self.takes.split())})" * bool(self.takes)


# -- transformers: loads -----------------------------------------------------------------------------------------------

_transformers = functools.partial(ForeignName, TRANSFORMERS)
_modeling = functools.partial(_transformers, "transformers.modeling_utils")
_collecting = functools.partial(_transformers, "transformers.core_model_loading")
_OF_SHARDS = "pretrained_model_name_or_path index_filename"
_EXPERTS = "planning a model of many experts takes twice the time and memory"

FROM_PRETRAINED = _modeling("PreTrainedModel.from_pretrained", takes="pretrained_model_name_or_path")
FROM_CONFIG = _modeling("PreTrainedModel._from_config", takes="config")
LOAD_PRETRAINED_MODEL = _modeling(
    "PreTrainedModel._load_pretrained_model", takes="model state_dict checkpoint_files load_config"
)
FINALIZE_MODEL_LOADING = _modeling("PreTrainedModel._finalize_model_loading", takes="model load_config loading_info")
GET_INIT_CONTEXT = _modeling("PreTrainedModel.get_init_context")
INIT_WEIGHTS = _modeling("PreTrainedModel.init_weights")
INITIALIZE_WEIGHTS = _modeling("PreTrainedModel.initialize_weights")
LOAD_ADAPTER = _modeling("PreTrainedModel.load_adapter")
MODEL_INIT = _modeling("PreTrainedModel.__init__")
TIED_WEIGHTS_KEYS = _modeling("PreTrainedModel.get_expanded_tied_weights_keys")
RESOLVE_FILES = _modeling("_get_resolved_checkpoint_files")
SAFE_OPEN = _modeling("safe_open", takes="filename")
LOAD_STATE_DICT = _modeling("load_state_dict", takes="checkpoint_file")
SHARD_FILES = _modeling("get_checkpoint_shard_files", takes=_OF_SHARDS)
IS_ON_HF_MOUNT = _modeling("_is_on_hf_mount", "files on a mount of the Hub are read in full before the load")
DEEPCOPY = _collecting("deepcopy", _EXPERTS, takes="x")
SPAWN_MATERIALIZE = _collecting("spawn_materialize", _EXPERTS, takes="thread_pool tensor device dtype")
SORTING_KEY = _collecting("dot_natural_key", _EXPERTS, takes="s")

# What transformers asks while it loads. Its other modules ask functions that look at the configuration, whose reference
# is replaced, too. Axolotl puts its own answer in both places of `is_deepspeed_zero3_enabled`.
_deepspeed = functools.partial(_transformers, "transformers.integrations.deepspeed")

CONFIG_REFERENCE = _deepspeed("_hf_deepspeed_config_weak_ref")
SET_CONFIG = _deepspeed("set_hf_deepspeed_config")
IS_ZERO3 = _deepspeed("is_deepspeed_zero3_enabled")
IS_ZERO3_IN_LOADS = _modeling("is_deepspeed_zero3_enabled")
IS_FSDP_IN_LOADS = _modeling("is_fsdp_enabled")
IS_FSDP_IN_PLACING = _transformers("transformers.integrations.accelerate", "is_fsdp_enabled")

# -- quantized weights -------------------------------------------------------------------------------------------------

_quantizer = functools.partial(_transformers, "transformers.quantizers.base")
_bitsandbytes = functools.partial(ForeignName, BITSANDBYTES, "bitsandbytes.nn")
_compressors = functools.partial(ForeignName, COMPRESSED_TENSORS, since="0.20.1")
_WHOLE = "are dequantized in full on every rank instead of being refused"
_PARTIAL = "fp8 weights with a partial last block cannot be dequantized"
_TWICE = "transformers takes memory for the full 4-bit model on each GPU before it is partitioned"
_UNPACKED = "4-bit codes of compressed-tensors are unpacked one full weight at a time instead of by ranges"

MAKE_QUANTIZER = _transformers("transformers.quantizers.auto", "AutoHfQuantizer.from_config")
VALIDATE_ENVIRONMENT = _quantizer("HfQuantizer.validate_environment")
UPDATE_CONVERSIONS = _quantizer(
    "HfQuantizer.update_weight_conversions", f"experts of compressed-tensors {_WHOLE}", since="5.8.0"
)
INKLING_EXPERTS = _collecting(
    "Inkling2LoopDequantizeExperts.convert", f"experts of Inkling 2 {_WHOLE}", since="5.24.0", takes="input_dict"
)
FP8_DEQUANTIZE = _transformers(
    "transformers.integrations.finegrained_fp8",
    "Fp8Dequantize._dequantize_one",
    _PARTIAL,
    since="5.8.0",
    takes="quantized scales",
)
MXFP4_DEQUANTIZE = _transformers(
    "transformers.integrations.mxfp4", "convert_moe_packed_tensors", takes="blocks scales * dtype"
)
WARM_UP = _modeling("caching_allocator_warmup", _TWICE)
NEW_PARAMS_4BIT = _bitsandbytes("Params4bit.__new__", takes="data")
PACKED_PARAMS_4BIT = _bitsandbytes(
    "Params4bit.from_prequantized", takes="data quantized_stats requires_grad device module"
)
UNPACK_FP4 = _compressors(
    "compressed_tensors.compressors.nvfp4.base", "unpack_fp4_from_uint8", _UNPACKED, takes="a m n dtype"
)
UNPACK_INT4 = _compressors(
    "compressed_tensors.compressors.pack_quantized.base",
    "unpack_from_int32",
    _UNPACKED,
    takes="value num_bits shape packed_dim",
)

# -- saves; the last three under `install`, where engines train --------------------------------------------------------

_peft = functools.partial(ForeignName, PEFT, "peft.peft_model")
_OF_FILE = "tensors filename metadata"
_DEFAULT_SAVE = "gathers the weights, if the ds_config allows it"
_EMPTY = "save_pretrained writes partitioned parameters as empty tensors; call lowmem_load.save_model"

WRITE_WEIGHTS = _modeling("safe_save_file", takes=_OF_FILE)
WRITE_ADAPTER = _peft("safe_save_file", takes=_OF_FILE)
NUM_PARAMETERS = _modeling("PreTrainedModel.num_parameters")
SHOULD_SAVE = _modeling("PreTrainedModel.should_save_on_this_rank", since="5.15.0")
SAVE_CONFIG = _transformers("transformers.configuration_utils", "PretrainedConfig.save_pretrained")
SAVE_GENERATION_CONFIG = _transformers(
    "transformers.generation.configuration_utils", "GenerationConfig.save_pretrained"
)
MODEL_SAVE = _modeling("PreTrainedModel.save_pretrained", _EMPTY, takes="save_directory * state_dict is_main_process")
ADAPTER_SAVE = _peft("PeftModel.save_pretrained", _EMPTY, takes="save_directory * is_main_process")
TRAINER_SAVE = _transformers("transformers.trainer", "Trainer.save_model", f"Trainer.save_model {_DEFAULT_SAVE}")

# -- DeepSpeed ---------------------------------------------------------------------------------------------------------

_engine = functools.partial(ForeignName, DEEPSPEED, "deepspeed")
_partitioning = functools.partial(ForeignName, DEEPSPEED, "deepspeed.runtime.zero.partition_parameters")
_OWN = "deepspeed.initialize and the engine's loads and saves are DeepSpeed's own; loads for ZeRO-3 are refused"
_UNREAD = "every rank reads the full lazy model before ZeRO-3 partitions it"

INITIALIZE = _engine("initialize", _OWN, takes="* model config")
LOAD_CHECKPOINT = _engine("DeepSpeedEngine.load_checkpoint", _OWN, takes="load_dir tag")
PARTITION = _partitioning("Init._convert_to_zero_parameters", _UNREAD, takes="param_list")
BROADCAST_MODEL = _engine("DeepSpeedEngine._broadcast_model", _UNREAD)

# -- accelerate, and axolotl's copy of it ------------------------------------------------------------------------------

_accelerator = functools.partial(ForeignName, ACCELERATE, "accelerate.accelerator")
_fsdp_utils = functools.partial(ForeignName, ACCELERATE, "accelerate.utils.fsdp_utils")
_axolotl = functools.partial(ForeignName, AXOLOTL, "axolotl.monkeypatch.accelerate.fsdp2")
_state = functools.partial(ForeignName, ACCELERATE, "accelerate.state")
_BROADCASTS = "rank 0 reads all weights of FSDP2 models with cpu_ram_efficient_loading, and broadcasts them"
_READS_WHOLE = "every rank reads the full FSDP2 model if its optimizer is made before Accelerator.prepare"
_TIES = "accelerate ties what a configuration ties, also where the files have two tensors"
_UNNOTICED = "FSDP2 goes unnoticed where an Accelerator asks for it and no variable does: accelerate loads these models"

ACCELERATE_FILL = _fsdp_utils("fsdp2_load_full_state_dict", _BROADCASTS, takes="accelerator model full_sd")
AXOLOTL_FILL = _axolotl("fsdp2_load_full_state_dict", _BROADCASTS, takes="_accelerator model full_sd")
PREPARE_FSDP2 = _accelerator("Accelerator._prepare_fsdp2", _READS_WHOLE)
PREPARE_MODEL = (_fsdp_utils("fsdp2_prepare_model", _TIES), _accelerator("fsdp2_prepare_model", _TIES))
SHARED_STATE = _state("AcceleratorState._shared_state", _UNNOTICED)
"""Looked at, and not replaced."""
GET_STATE_DICT = _accelerator(
    "Accelerator.get_state_dict", f"Accelerator.get_state_dict {_DEFAULT_SAVE}", takes="model"
)

# -- diffusers ---------------------------------------------------------------------------------------------------------

_diffusers = functools.partial(ForeignName, DIFFUSERS)
_in_models = functools.partial(_diffusers, "diffusers.models.modeling_utils")
_in_loading = functools.partial(_diffusers, "diffusers.models.model_loading_utils")
_single_file = functools.partial(_diffusers, "diffusers.loaders.single_file_model")
_pipelines = functools.partial(_diffusers, "diffusers.pipelines.pipeline_utils")
_LOADS_WHOLE = "nothing warns that from_single_file loads full models on every rank"
_REFUSED = "pipelines that one rank loads by itself are refused"
_EMPTY_MODELS = "save_pretrained of diffusers writes empty parameters under ZeRO-3, and fails under FSDP2"

DIFFUSERS_FROM_PRETRAINED = _in_models(
    "ModelMixin.from_pretrained",
    "every rank loads diffusers' models in full",
    takes="pretrained_model_name_or_path",
)
DIFFUSERS_SINGLE_FILE = _single_file("FromOriginalModelMixin.from_single_file", _LOADS_WHOLE)
DIFFUSERS_PIPELINE = _pipelines("DiffusionPipeline.from_pretrained", _REFUSED)
DIFFUSERS_SAVE = _in_models(
    "ModelMixin.save_pretrained", _EMPTY_MODELS, takes="save_directory * is_main_process max_shard_size variant"
)
DIFFUSERS_LOAD = _in_models("ModelMixin._load_pretrained_model", takes="model * is_parallel_loading_enabled")
DIFFUSERS_STATE_DICTS = (
    _in_models("load_state_dict", takes="checkpoint_file"),
    _in_loading("load_state_dict", takes="checkpoint_file"),
)
DIFFUSERS_SHARD_FILES = _in_models("_get_checkpoint_shard_files", takes=_OF_SHARDS)
DIFFUSERS_SET_TENSOR = _in_loading("set_module_tensor_to_device", takes="module tensor_name * value")
DIFFUSERS_EMPTY_WEIGHTS = _diffusers("accelerate", "init_empty_weights")
DIFFUSERS_WRITE = _diffusers("safetensors.torch", "save_file", takes=_OF_FILE)

# -- TRL and LLaMA-Factory ---------------------------------------------------------------------------------------------

_vllm = functools.partial(ForeignName, TRL, "trl.generation.vllm_generation")
_fsdp2 = functools.partial(ForeignName, LLAMAFACTORY, "llamafactory.v1.plugins.trainer_plugins.distributed.fsdp2")
_GATHERS = "TRL gathers the weights for vLLM itself, one parameter after the other"
_UNCHECKED = "LLaMA-Factory v1 reads the weights of FSDP2 models itself, without lowmem_load's checks"

SYNC_WEIGHTS = _vllm("VLLMGeneration.sync_weights", _GATHERS)
ITER_NAMED_PARAMS = _vllm("VLLMGeneration._iter_named_params", _GATHERS)
WEIGHT_METADATA = _vllm("VLLMGeneration._weight_metadata", _GATHERS)
"""Set on objects, and not replaced."""
_ASYNC_GATHERS = "TRL's asynchronous trainers gather the weights for vLLM themselves, and send empty ones under ZeRO-3"


def _of_async(name: str, takes: str = "") -> tuple[ForeignName, ...]:
    trainers = {"async_grpo": "AsyncGRPOTrainer", "async_distillation": "AsyncDistillationTrainer"}
    modules = [(f"trl.experimental.{key}.{key}_trainer", name.format(trainer)) for key, trainer in trainers.items()]
    return tuple(ForeignName(TRL, *names, _ASYNC_GATHERS, since="1.15.0", takes=takes) for names in modules)


ASYNC_SYNCS, ASYNC_ITERS = _of_async("{}._sync_weight_merged"), _of_async("{}._streaming_iter")
ASYNC_ADAPTER_SYNCS = _of_async("{}._sync_weight_lora")
ASYNC_SAVES = _of_async("save_lora_adapter", takes="model accelerator adapter_name dest_dir")
ASYNC_NAMES = [*ASYNC_SYNCS, *ASYNC_ITERS, *ASYNC_ADAPTER_SYNCS, *ASYNC_SAVES]
LLAMAFACTORY_LOAD = _fsdp2("FSDP2Engine._load_weights_from_hf_checkpoint", _UNCHECKED, takes="model hf_model_path")

# -- torch: reads the memory of lazy tensors past its dispatcher -------------------------------------------------------

MESH_SCATTER = ForeignName(
    TORCH, "torch.distributed.tensor.placement_types", "mesh_scatter", takes="output scatter_list"
)
FLATTEN_TENSORS = ForeignName(TORCH, "torch.distributed.fsdp._flat_param", "FlatParamHandle.flatten_tensors")
ASSIGNED_DATA = ForeignName(TORCH, "torch.nn", "Parameter.data")
"""A property, which `symbolic/lazy.py` replaces by itself while there are lazy models."""

TABLE: tuple[ForeignName, ...] = tuple(
    name
    for value in list(globals().values())
    for name in (value if isinstance(value, tuple) else (value,))
    if isinstance(name, ForeignName)
)

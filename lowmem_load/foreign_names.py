"""Every function of another package that this one replaces while a block lasts. `replaced.py` takes no other name.

A new release of a package is checked against this table. `docs/development/foreign_names.md` shows it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from lowmem_load import contract
from lowmem_load.contract import ACCELERATE, DEEPSPEED, DIFFUSERS, PEFT, TORCH, TRANSFORMERS, TRL, Releases


@dataclass(frozen=True, slots=True)
class ForeignName:
    """A function of another package.

    Attributes:
        releases: of the package: the newest is the one that the name was last checked with.
        module: where it is looked up, which may be not where it is defined.
        name: "function" or "Class.method".
        handlers: our modules that replace it.
        loss: what a user loses where it is missing; "" if nothing works without it. Names with the same loss are
            replaced together or not at all.
        since, until: the releases that have it. Others need not have it.
        owner: the subclass whose method is meant, see `of`.
    """

    releases: Releases
    module: str
    name: str
    handlers: str
    loss: str = ""
    since: str = ""
    until: str = ""
    owner: type | None = None

    def of(self, owner: type) -> ForeignName:
        """Return the same method of a subclass, which may have its own."""
        return replace(self, owner=owner)

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


# -- transformers: loads -----------------------------------------------------------------------------------------------

_transformers = partial(ForeignName, TRANSFORMERS)
_modeling = partial(_transformers, "transformers.modeling_utils")
_ALL = "hf.loader, integrations.startup_hook"

FROM_PRETRAINED = _modeling("PreTrainedModel.from_pretrained", _ALL)
FROM_CONFIG = _modeling("PreTrainedModel._from_config", _ALL)
LOAD_PRETRAINED_MODEL = _modeling("PreTrainedModel._load_pretrained_model", "hf.loader, hf.skeleton")
FINALIZE_MODEL_LOADING = _modeling("PreTrainedModel._finalize_model_loading", "hf.skeleton")
GET_INIT_CONTEXT = _modeling("PreTrainedModel.get_init_context", "hf.loader, hf.skeleton")
INIT_WEIGHTS = _modeling("PreTrainedModel.init_weights", "hf.loader")
INITIALIZE_WEIGHTS = _modeling("PreTrainedModel.initialize_weights", "hf.loader")
LOAD_ADAPTER = _modeling("PreTrainedModel.load_adapter", "hf.loader")
MODEL_INIT = _modeling("PreTrainedModel.__init__", "hf.loader, hf.skeleton")
TIED_WEIGHTS_KEYS = _modeling("PreTrainedModel.get_expanded_tied_weights_keys", "hf.skeleton")
SAFE_OPEN = _modeling("safe_open", "hf.collecting")
LOAD_STATE_DICT = _modeling("load_state_dict", "hf.collecting")
SHARD_FILES = _modeling("get_checkpoint_shard_files", "hf.loader")

_MOUNTS = "files on a mount of the Hub are read whole before the load"
_EXPERTS = "planning a model of many experts takes twice the time and memory"
_collecting = partial(_transformers, "transformers.core_model_loading")

IS_ON_HF_MOUNT = _modeling("_is_on_hf_mount", "hf.collecting", loss=_MOUNTS)
DEEPCOPY = _collecting("deepcopy", "hf.collecting", loss=_EXPERTS)
SPAWN_MATERIALIZE = _collecting("spawn_materialize", "hf.collecting", loss=_EXPERTS)

# What transformers asks while it loads. Its other modules ask functions that look at the configuration, whose reference
# is replaced, too. Axolotl puts its own answer in both places of `is_deepspeed_zero3_enabled`.
_deepspeed = partial(_transformers, "transformers.integrations.deepspeed")
_placing = partial(_transformers, "transformers.integrations.accelerate")

CONFIG_REFERENCE = _deepspeed("_hf_deepspeed_config_weak_ref", "hf.active")
SET_CONFIG = _deepspeed("set_hf_deepspeed_config", "hf.active")
IS_ZERO3 = _deepspeed("is_deepspeed_zero3_enabled", "hf.active")
IS_ZERO3_IN_LOADS = _modeling("is_deepspeed_zero3_enabled", "hf.active")
IS_FSDP_IN_LOADS = _modeling("is_fsdp_enabled", "hf.active")
IS_FSDP_IN_PLACING = _placing("is_fsdp_enabled", "hf.active")

# -- transformers: names of checkpoints --------------------------------------------------------------------------------

_auto_factory = partial(_transformers, "transformers.models.auto.auto_factory")

FIND_ADAPTER = _auto_factory("find_adapter_config_file", "hf.hub_files")

# -- quantized weights -------------------------------------------------------------------------------------------------

_WHOLE = "are dequantized whole on every rank, not refused"
_PARTIAL = "fp8 weights with a partial last block cannot be dequantized"
_TWICE = "transformers takes memory for a whole 4-bit model on each GPU before it is partitioned"
_quantizer = partial(_transformers, "transformers.quantizers.base")
_fp8 = partial(_transformers, "transformers.integrations.finegrained_fp8")
_mxfp4 = partial(_transformers, "transformers.integrations.mxfp4")
_bitsandbytes = partial(ForeignName, contract.BITSANDBYTES, "bitsandbytes.nn")

MAKE_QUANTIZER = _transformers("transformers.quantizers.auto", "AutoHfQuantizer.from_config", "hf.quantizers")
VALIDATE_ENVIRONMENT = _quantizer("HfQuantizer.validate_environment", "hf.quantizers")
UPDATE_CONVERSIONS = _quantizer(
    "HfQuantizer.update_weight_conversions",
    "hf.quantizers",
    loss=f"experts of compressed-tensors {_WHOLE}",
    since="5.8.0",
)
INKLING_EXPERTS = _collecting(
    "Inkling2LoopDequantizeExperts.convert", "hf.quantizers", loss=f"experts of Inkling 2 {_WHOLE}", since="5.24.0"
)
FP8_DEQUANTIZE = _fp8("Fp8Dequantize._dequantize_one", "hf.dequantize", loss=_PARTIAL, since="5.8.0")
MXFP4_DEQUANTIZE = _mxfp4("convert_moe_packed_tensors", "hf.dequantize")
WARM_UP = _modeling("caching_allocator_warmup", "hf.quantizers", loss=_TWICE)
NEW_PARAMS_4BIT = _bitsandbytes("Params4bit.__new__", "frameworks.bitsandbytes")
PACKED_PARAMS_4BIT = _bitsandbytes("Params4bit.from_prequantized", "frameworks.bitsandbytes")

# -- saves; the last three under `install`, where engines train --------------------------------------------------------

_STOCK = "is stock's: it gathers the weights, if the ds_config allows it"
_EMPTY = "save_pretrained writes partitioned parameters as empty tensors; call lowmem_load.save_model"
_generation = partial(_transformers, "transformers.generation.configuration_utils")
_peft = partial(ForeignName, PEFT, "peft.peft_model")
_trainer = partial(_transformers, "transformers.trainer")

WRITE_WEIGHTS = _modeling("safe_save_file", "hf.saver")
WRITE_ADAPTER = _peft("safe_save_file", "hf.saver")
NUM_PARAMETERS = _modeling("PreTrainedModel.num_parameters", "hf.saver")
SHOULD_SAVE = _modeling("PreTrainedModel.should_save_on_this_rank", "hf.saver", since="5.15.0")
SAVE_CONFIG = _transformers("transformers.configuration_utils", "PretrainedConfig.save_pretrained", "hf.saver")
SAVE_GENERATION_CONFIG = _generation("GenerationConfig.save_pretrained", "hf.saver")
MODEL_SAVE = _modeling("PreTrainedModel.save_pretrained", "integrations.saves", loss=_EMPTY)
ADAPTER_SAVE = _peft("PeftModel.save_pretrained", "integrations.saves", loss=_EMPTY)
TRAINER_SAVE = _trainer("Trainer.save_model", "integrations.saves", loss=f"Trainer.save_model {_STOCK}")

# -- DeepSpeed ---------------------------------------------------------------------------------------------------------

_OWN = "deepspeed.initialize and the engine's loads and saves are DeepSpeed's own; loads for ZeRO-3 are refused"
_engine = partial(ForeignName, DEEPSPEED, "deepspeed")

INITIALIZE = _engine("initialize", "integrations.engine, partial.initialize", loss=_OWN)
LOAD_CHECKPOINT = _engine("DeepSpeedEngine.load_checkpoint", "integrations.engine", loss=_OWN)
ENGINE_SAVE = _engine(
    "DeepSpeedEngine.save_16bit_model", "integrations.engine", loss=f"engine.save_16bit_model {_STOCK}"
)

_UNREAD = "every rank reads a lazy model whole before ZeRO-3 partitions it"
PARTITION = ForeignName(
    DEEPSPEED,
    "deepspeed.runtime.zero.partition_parameters",
    "Init._convert_to_zero_parameters",
    "integrations.accelerate",
    loss=_UNREAD,
)
BROADCAST_MODEL = _engine("DeepSpeedEngine._broadcast_model", "integrations.accelerate", loss=_UNREAD)

# -- accelerate, and axolotl's copy of it ------------------------------------------------------------------------------

_BROADCASTS = "rank 0 reads all weights of FSDP2 models with cpu_ram_efficient_loading, and broadcasts them"
_READS_WHOLE = "every rank reads an FSDP2 model whole if its optimizer is made before Accelerator.prepare"
_TIES = "accelerate ties what a configuration ties, also where the files have two tensors"
_UNNOTICED = "FSDP2 goes unnoticed where an Accelerator asks for it and no variable does: stock loads these models"
_SAVES = f"Accelerator.save_model {_STOCK}"
_HERE = "integrations.accelerate"
_fill = partial(ForeignName, name="fsdp2_load_full_state_dict", handlers=_HERE, loss=_BROADCASTS)
_accelerator = partial(ForeignName, ACCELERATE, "accelerate.accelerator")

ACCELERATE_FILL = _fill(ACCELERATE, "accelerate.utils.fsdp_utils")
AXOLOTL_FILL = _fill(contract.AXOLOTL, "axolotl.monkeypatch.accelerate.fsdp2")
PREPARE_FSDP2 = _accelerator("Accelerator._prepare_fsdp2", _HERE, loss=_READS_WHOLE)
PREPARE_MODEL = tuple(
    ForeignName(ACCELERATE, f"accelerate.{module}", "fsdp2_prepare_model", _HERE, loss=_TIES)
    for module in ("utils.fsdp_utils", "accelerator")
)
SHARED_STATE = ForeignName(ACCELERATE, "accelerate.state", "AcceleratorState._shared_state", _HERE, loss=_UNNOTICED)
"""Looked at, and not replaced."""
SAVE_MODEL = _accelerator("Accelerator.save_model", _HERE, loss=_SAVES)
GET_STATE_DICT = _accelerator("Accelerator.get_state_dict", _HERE, loss=_SAVES)
SAVE = _accelerator("Accelerator.save", _HERE, loss=_SAVES)

# -- diffusers ---------------------------------------------------------------------------------------------------------

_diffusers = partial(ForeignName, DIFFUSERS, handlers="families.diffusion")
_in_models = partial(_diffusers, "diffusers.models.modeling_utils")
_in_loading = partial(_diffusers, "diffusers.models.model_loading_utils")

DIFFUSERS_FROM_PRETRAINED = _in_models("ModelMixin.from_pretrained", loss="every rank loads diffusers' models whole")
DIFFUSERS_SINGLE_FILE = _diffusers(
    "diffusers.loaders.single_file_model",
    "FromOriginalModelMixin.from_single_file",
    handlers="integrations.diffusion",
    loss="nothing warns that from_single_file loads whole models on every rank",
)
DIFFUSERS_PIPELINE = _diffusers(
    "diffusers.pipelines.pipeline_utils",
    "DiffusionPipeline.from_pretrained",
    handlers="integrations.diffusion",
    loss="pipelines that one rank loads by itself are refused",
)
DIFFUSERS_SAVE = _in_models(
    "ModelMixin.save_pretrained",
    handlers="integrations.diffusion",
    loss="save_pretrained of diffusers writes empty parameters under ZeRO-3, and fails under FSDP2",
)
DIFFUSERS_LOAD = _in_models("ModelMixin._load_pretrained_model")
DIFFUSERS_STATE_DICTS = (_in_models("load_state_dict"), _in_loading("load_state_dict"))
DIFFUSERS_SHARD_FILES = _in_models("_get_checkpoint_shard_files")
DIFFUSERS_SET_TENSOR = _in_loading("set_module_tensor_to_device")
DIFFUSERS_EMPTY_WEIGHTS = _diffusers("accelerate", "init_empty_weights")
DIFFUSERS_WRITE = _diffusers("safetensors.torch", "save_file")

# -- TRL and LLaMA-Factory ---------------------------------------------------------------------------------------------

_GATHERS = "TRL gathers the weights for vLLM itself, one parameter after the other"
_BOTH = "sync_ref_model gathers two whole models on every rank"
_UNCHECKED = "LLaMA-Factory v1 reads the weights of FSDP2 models itself, without lowmem_load's checks"
_vllm = partial(ForeignName, TRL, "trl.generation.vllm_generation", loss=_GATHERS)
_online_dpo = partial(ForeignName, TRL, "trl.experimental.online_dpo.online_dpo_trainer", loss=_GATHERS)
_callbacks = partial(ForeignName, TRL, "trl.trainer.callbacks")
_fsdp2 = partial(
    ForeignName, contract.LLAMAFACTORY, "llamafactory.v1.plugins.trainer_plugins.distributed.fsdp2", loss=_UNCHECKED
)

SYNC_WEIGHTS = _vllm("VLLMGeneration.sync_weights", "integrations.trl")
ITER_NAMED_PARAMS = _vllm("VLLMGeneration._iter_named_params", "integrations.trl")
WEIGHT_METADATA = _vllm("VLLMGeneration._weight_metadata", "integrations.trl")
"""Set on objects, and not replaced."""
MOVE_TO_VLLM = _online_dpo("OnlineDPOTrainer._move_model_to_vllm_inner", "integrations.trl")
SYNC_TARGET_MODEL = _callbacks("SyncRefModelCallback.sync_target_model", "integrations.trl", loss=_BOTH)
LLAMAFACTORY_LOAD = _fsdp2("FSDP2Engine._load_weights_from_hf_checkpoint", "integrations.llamafactory")

# -- torch: reads the memory of lazy tensors past its dispatcher -------------------------------------------------------

_torch = partial(ForeignName, TORCH)

MESH_SCATTER = _torch("torch.distributed.tensor.placement_types", "mesh_scatter", "dtensor.mesh")
FLATTEN_TENSORS = _torch("torch.distributed.fsdp._flat_param", "FlatParamHandle.flatten_tensors", "dtensor.mesh")
ASSIGNED_DATA = _torch("torch.nn", "Parameter.data", "symbolic.lazy")
"""A property, which `symbolic/lazy.py` replaces by itself while there are lazy models."""
LINEAR = _torch("torch.nn.functional", "linear", "ds.partition")
"""DeepSpeed's under memory_efficient_linear. It stays, as in stock."""

TABLE: tuple[ForeignName, ...] = tuple(
    name
    for value in list(globals().values())
    for name in (value if isinstance(value, tuple) else (value,))
    if isinstance(name, ForeignName)
)

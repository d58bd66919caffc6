"""The functions of training frameworks that `install` replaces, and what it says where a release lacks one.

These names are private, and any release may move them. An import of a user must work all the same. So a hook whose
names are not all there is left out, with one warning that says what stays stock's.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any, NamedTuple

from packaging.version import InvalidVersion, Version

from lowmem_load.contract import DEEPSPEED, PEFT, TRANSFORMERS, Releases
from lowmem_load.errors import NotStreamedWarning, outside_level
from lowmem_load.integrations.imports import after_import, once_imported
from lowmem_load.replaced import Handler, is_replaceable, replaced

_TRL = Releases("trl", oldest="0.28.0", newest="1.16.0")
_LLAMAFACTORY = Releases("llamafactory", oldest="0.9.5", newest="0.9.5")
_AXOLOTL = Releases("axolotl", oldest="0.19.0", newest="0.19.0")
_ACCELERATE = Releases("accelerate", oldest="1.6.0", newest="1.15.0")


class Hook(NamedTuple):
    """Names of one module of a framework that are replaced or relied on, all of them or none.

    Attributes:
        releases: nothing is said of a release before the oldest: it has no such feature.
        module: the module that has the names.
        names: "function" or "Class.method".
        loss: what a user loses where a name is missing.
    """

    releases: Releases
    module: str
    names: tuple[str, ...]
    loss: str


_GATHERS = "TRL gathers the weights for vLLM itself, one parameter after the other"

TRL_SYNC = Hook(
    _TRL,
    "trl.generation.vllm_generation",
    ("VLLMGeneration.sync_weights", "VLLMGeneration._iter_named_params"),
    _GATHERS,
)
TRL_ONLINE_DPO = Hook(
    _TRL, "trl.experimental.online_dpo.online_dpo_trainer", ("OnlineDPOTrainer._move_model_to_vllm_inner",), _GATHERS
)
TRL_MIX = Hook(
    _TRL,
    "trl.trainer.callbacks",
    ("SyncRefModelCallback.sync_target_model",),
    "sync_ref_model gathers two whole models on every rank",
)
LLAMAFACTORY_LOAD = Hook(
    _LLAMAFACTORY,
    "llamafactory.v1.plugins.trainer_plugins.distributed.fsdp2",
    ("FSDP2Engine._load_weights_from_hf_checkpoint",),
    "LLaMA-Factory v1 reads the weights of FSDP2 models itself, without lowmem_load's checks",
)
ENGINE = Hook(
    DEEPSPEED,
    "deepspeed",
    ("initialize", "DeepSpeedEngine.load_checkpoint"),
    "deepspeed.initialize and the engine's saves and loads are DeepSpeed's own; loads for ZeRO-3 are refused",
)

# Of models for FSDP2, which are right without them, but slower.
_FILL = "fsdp2_load_full_state_dict"
_BROADCASTS = "rank 0 reads all weights of FSDP2 models with cpu_ram_efficient_loading, and broadcasts them"
ACCELERATE_FILL = Hook(_ACCELERATE, "accelerate.utils.fsdp_utils", (_FILL,), _BROADCASTS)
AXOLOTL_FILL = Hook(_AXOLOTL, "axolotl.monkeypatch.accelerate.fsdp2", (_FILL,), _BROADCASTS)
ACCELERATE_PREPARE = Hook(
    _ACCELERATE,
    "accelerate.accelerator",
    ("Accelerator._prepare_fsdp2",),
    "every rank reads an FSDP2 model whole if its optimizer is made before Accelerator.prepare",
)
ACCELERATE_PREPARE_MODEL = tuple(
    Hook(
        _ACCELERATE,
        module,
        ("fsdp2_prepare_model",),
        "accelerate ties what a configuration ties, also where the files have two tensors",
    )
    for module in ("accelerate.utils.fsdp_utils", "accelerate.accelerator")
)
ACCELERATE_STATE = Hook(
    _ACCELERATE,
    "accelerate.state",
    ("AcceleratorState._shared_state",),
    "FSDP2 goes unnoticed where an Accelerator asks for it and no variable does: stock loads these models",
)

# Of saves under ZeRO-3.
_SAVES_STOCK = "is stock's: it gathers the weights, if the ds_config allows it"
ENGINE_SAVE = Hook(
    DEEPSPEED, "deepspeed", ("DeepSpeedEngine.save_16bit_model",), f"engine.save_16bit_model {_SAVES_STOCK}"
)
ACCELERATE_SAVE = Hook(
    _ACCELERATE,
    "accelerate.accelerator",
    ("Accelerator.save_model", "Accelerator.get_state_dict", "Accelerator.save"),
    f"Accelerator.save_model {_SAVES_STOCK}",
)
TRAINER_SAVE = Hook(TRANSFORMERS, "transformers.trainer", ("Trainer.save_model",), f"Trainer.save_model {_SAVES_STOCK}")
MODEL_SAVE = Hook(
    TRANSFORMERS,
    "transformers.modeling_utils",
    ("PreTrainedModel.save_pretrained",),
    "save_pretrained writes partitioned parameters as empty tensors; call lowmem_load.save_model",
)
ADAPTER_SAVE = Hook(PEFT, "peft.peft_model", ("PeftModel.save_pretrained",), MODEL_SAVE.loss)


def hooked(hook: Hook, handlers: Callable[[], Mapping[str, Handler]]) -> ExitStack:
    """Return a block: inside, handlers are called in place of the hook's names. For all threads.

    `handlers` is called once the module is imported. Its keys are names of the hook.
    """

    def replace(module: ModuleType) -> AbstractContextManager[None]:
        replacements = [(*_owner_of(module, name), handler) for name, handler in handlers().items()]
        return replaced(*replacements, everywhere=True)

    return entered_once_imported(hook, replace)


def entered_once_imported(hook: Hook, block: Callable[[ModuleType], AbstractContextManager[object]]) -> ExitStack:
    """Return a block: inside, `entered` once the module is imported. Its absence is noticed with its package."""
    stack = once_imported(hook.module, lambda module: entered(hook, module, block))
    package = hook.module.partition(".")[0]
    if package != hook.module:
        stack.callback(after_import(package, lambda imported: _check_module(hook, imported)))
    return stack


@contextlib.contextmanager
def entered(
    hook: Hook, module: ModuleType, block: Callable[[ModuleType], AbstractContextManager[object]]
) -> Iterator[None]:
    """Enter a block with an imported module, if that has all names of the hook. Else warn."""
    with ExitStack() as stack:
        missing = missing_names(hook, module)
        warn_missing(hook, missing)
        if not missing:
            try:
                stack.enter_context(block(module))
            except ImportError as error:  # of what the block needs; an IncompatibleVersionError is one
                _warn(f"{error}. So {hook.loss}")
        yield


def missing_names(hook: Hook, module: ModuleType | None) -> list[str]:
    """Return what a release lacks of a hook: names, or the module."""
    if module is None:
        return [hook.module]
    return [f"{hook.module}.{name}" for name in hook.names if not is_replaceable(*_owner_of(module, name))]


def missing_text(hook: Hook, missing: Sequence[str]) -> str:
    """Return what a warning or an error says of missing names."""
    package, _, newest = hook.releases
    return (
        f"{package} {_release_of(package) or '(of no known release)'} lacks {', '.join(missing)}, so {hook.loss}. "
        f"lowmem_load was tested with {hook.releases}: install {package}=={newest}, or a newer lowmem_load"
    )


def warn_missing(hook: Hook, missing: Sequence[str]) -> None:
    """Warn of names that are missing, if any are, and the release is not one from before the feature."""
    if missing and not _is_older(hook):
        _warn(missing_text(hook, missing))


def _warn(text: str) -> None:
    warnings.warn(text, NotStreamedWarning, stacklevel=outside_level())


def _owner_of(module: ModuleType, name: str) -> tuple[Any, str]:
    owner, _, last = name.rpartition(".")
    return (getattr(module, owner, None) if owner else module), last


def _check_module(hook: Hook, package: ModuleType) -> None:
    """Warn if the module is no file of its package, which has just been imported. Imports nothing."""
    path, parts = getattr(package, "__path__", []), hook.module.split(".")
    for depth in range(2, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:depth]), path)
        if spec is None:
            warn_missing(hook, missing_names(hook, None))
            return
        path = spec.submodule_search_locations or []


def _release_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # it runs from a folder of sources
        return str(getattr(sys.modules.get(package), "__version__", ""))


def _is_older(hook: Hook) -> bool:
    try:
        return Version(_release_of(hook.releases.package)).release < Version(hook.releases.oldest).release
    except InvalidVersion:
        return False

"""install(): lowmem_load inside code that calls `from_pretrained` by itself, for a block or a script.

It follows the configuration that is active in transformers and accelerate, and lets the default loader do what it
cannot. It also hooks into `deepspeed.initialize`, saves, and `engine.load_checkpoint`, once a program imports what is
replaced there.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

from torch import nn

from lowmem_load import foreign_names
from lowmem_load.config.settings import Partition, read_settings
from lowmem_load.distributed.environment import has_group
from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.distributed.steps import Alone, RankGroup
from lowmem_load.errors import LoadOrderWarning, RankError, outside_level
from lowmem_load.foreign_names import ForeignName
from lowmem_load.integrations import accelerate
from lowmem_load.integrations import diffusion as diffusers
from lowmem_load.integrations.switch import after_import, keywords_of_run
from lowmem_load.load.load import Load, Options, fall_back, fallback_reason, find
from lowmem_load.load.load_into import filling, skeletons_sharded
from lowmem_load.load.report import OnLoad
from lowmem_load.load.request import make_load
from lowmem_load.models import diffusion, loader
from lowmem_load.models.active import (
    active_zero3_config,
    begins_after_drop,
    deepspeed_config,
    load_lock,
    random_states,
)
from lowmem_load.models.loader import SHARDS, Call
from lowmem_load.models.model_folder import rename_loaded
from lowmem_load.planning.replicas import ShareReads
from lowmem_load.renamed import renamed_keywords
from lowmem_load.replaced import Handlers, replaced, usable_names, warn_of_loss, warn_of_missing


@contextlib.contextmanager
def streaming(ds_config: Any, *, partition: Partition | None = None, **options: Any) -> Iterator[None]:
    """Inside, each `from_pretrained` of this thread loads as `load_model` does by these arguments. A name of 0.3.

    `options` are stream and share_reads. Under stages 0 to 2 models keep the dtype that the caller asked for.
    Collective: all ranks.
    """
    with load_lock():
        load = _load_by(ds_config, Options(**options), partition=partition)
    # Code that the block calls may ask for the ds_config: generate, resize_token_embeddings.
    with deepspeed_config(load.settings.ds_config), loader.intercepted(load), diffusion.intercepted(load):
        try:
            yield
        except BaseException as error:
            if not isinstance(error, RankError):
                load.ranks.abort("streaming()", error)
            raise


_installed: list[contextlib.ExitStack] = []  # what to undo: at most one


@renamed_keywords(stream="not download")
def install(
    *,
    strict: bool = False,
    saves: bool = True,
    on_load: OnLoad | None = None,
    download: bool = True,
    share_reads: ShareReads = "auto",
) -> contextlib.ExitStack:
    """Load models straight into ZeRO-3 partitions or FSDP2 shards from now on, wherever one of them is active.

    Call this before the first model is loaded. It does not wait for other ranks. ZeRO-3 is active after
    `TrainingArguments(deepspeed=...)`, `Accelerator(deepspeed_plugin=...)` or an `HfDeepSpeedConfig` in a variable, if
    that names stage 3. Under `accelerate launch`, a plain `TrainingArguments(...)` or `Accelerator()` is enough. FSDP2
    is active where accelerate or a `DistributedConfig` asks for it; `from_pretrained` then returns a lazy model, as it
    does for diffusers' models under ZeRO-3. All other loads stay as they are.

    If lowmem_load cannot load a model (in 8 bits, for example), the default loader does, and every rank emits a
    `FallbackWarning` with the reason. All ranks decide this together, before they allocate or read anything; for a
    lazy model each rank decides by itself. If a framework lacks a function that is patched, every rank emits one such
    warning, which says what stays as it is without lowmem_load.

    Every rank emits a `LoadOrderWarning` if `deepspeed.initialize` under stage 3 gets a transformers model without
    partitions (unless it is for `initialize_partial`), or if a model loads after an `HfDeepSpeedConfig` was dropped
    that did not serve a load. `warnings.simplefilter("error", LoadOrderWarning)` turns the warning into an error.

    `engine.load_checkpoint`, and so `Trainer.train(resume_from_checkpoint=...)`, also takes a ZeRO-3 checkpoint that
    another number of ranks saved, as `lowmem_load.load_checkpoint` does. DeepSpeed itself refuses that. TRL's trainers
    send the weights of partitioned and sharded models to vLLM in buckets; see docs/howto/rlhf.md.

    Args:
        strict: whether to raise an error (usually an `UnsupportedError`) instead of falling back to the default loader.
            Default: False, unless `lowmem-load run --strict` started the script.
        saves: whether `Trainer.save_model`, and `save_pretrained` with the state of `Accelerator.get_state_dict`, write
            the same files under ZeRO-3 without gathering, and `save_pretrained` refuses to write empty parameters; see
            docs/howto/saving.md. stage3_gather_16bit_weights_on_model_save is not needed. Default: True.
        on_load: function of the `LoadReport`, which is called on every rank at the end of each load.
        download: as for `load_model`. Classes of models take URLs as names in any case; auto classes take the folder
            that `local_folder` returns.
        share_reads: as for `load_model`.

    Returns:
        A context manager: after `with install():`, or its `close()`, all is as before. While lowmem_load is installed,
        another call changes nothing, and neither does the end of what it returns.

    Example:
        install()
        alive = HfDeepSpeedConfig(ds_config)  # or TrainingArguments(deepspeed=...), in a variable
        model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-8B")  # in partitions
    """
    if _installed:
        return contextlib.ExitStack()
    of_run = keywords_of_run()  # a script that `lowmem-load run --strict` has started may call this itself
    strict, download = strict or "strict" in of_run, download and of_run.keys().isdisjoint(("download", "stream"))
    options = Options(is_lenient=not strict, on_load=on_load, stream=not download, share_reads=share_reads)
    with contextlib.ExitStack() as stack:
        for load, is_wanted in (  # the last is asked first
            (_load_by_active_config, _is_for_zero3),
            (_load_sharded, lambda kwargs: any(kwargs.get(keyword) is not None for keyword in SHARDS)),
            (accelerate.load_lazily, accelerate.is_for_fsdp2),
        ):
            with_options = functools.partial(load, options=options)
            stack.enter_context(loader.intercepted(with_options, is_wanted, everywhere=True))
        for names, handlers in _hooks(options, saves=saves):
            stack.enter_context(_replaced_once_imported(names, handlers))
        stack.callback(_installed.clear)
        _installed.append(stack.pop_all())
    return _installed[0]


def uninstall() -> None:
    """Undo `install`, whoever called it. Does nothing if nothing is installed. For tests; not public."""
    for handle in tuple(_installed):
        handle.close()


# -- loads of transformers models --------------------------------------------------------------------------------------


def _load_by(ds_config: Any, options: Options, **how: Any) -> Load:
    """Return what loads by a ds_config, which all ranks have alike. `how` is for `read_settings`. Collective."""
    ranks = DistributedInterface()
    with ranks.step("checking the ds_config") as step:
        settings = read_settings(ds_config, world_size=ranks.world_size, **how)
        step.digest = settings.compared
    return make_load(ranks, settings, options)


def _load_by_active_config(call: Call, *, options: Options) -> tuple[nn.Module, dict[str, Any]]:
    """Run a call by the ds_config that is active in transformers. Collective."""
    return _load_by(active_zero3_config(), options, is_active=True)(call)


def _is_for_zero3(_: Mapping[str, Any]) -> bool:
    if begins_after_drop():
        text = (
            "a HfDeepSpeedConfig was made but nothing keeps it alive, so this model is loaded in full on every rank, "
            "and not into ZeRO-3 partitions. transformers has only a weak reference to the object: keep it in a "
            "variable for as long as models are loaded. If the load is meant to be an ordinary one, call "
            "transformers.integrations.unset_hf_deepspeed_config() before it"
        )
        warnings.warn(text, LoadOrderWarning, stacklevel=outside_level())
    return active_zero3_config() is not None


def _load_sharded(call: loader.TransformersCall, *, options: Options) -> tuple[nn.Module, dict[str, Any]]:
    """Run a call that transformers itself shards, by a `DistributedConfig`."""

    def ranks() -> RankGroup:  # without a group, transformers makes one
        return RankGroup(None) if has_group() else Alone()

    restore = random_states()
    try:
        # An error of one rank, such as a folder that it lacks, is one of all.
        with ranks().session(f"the load of {call.name}"):
            find(call, options, ranks())
            try:
                with skeletons_sharded(call.path, call.kwargs, filling(options), weights=options.weights):
                    return rename_loaded(call.run())
            except Exception:
                with ranks().step("building the sharded model", name=call.name):
                    raise  # on all ranks: what one alone raises is a RankError
    except Exception as error:  # noqa: BLE001  it is raised again unless the default loader may work
        reason = fallback_reason(error, call, options)
    return fall_back(call, "transformers", reason, restore)


# -- what is replaced once a program imports it. Our modules are imported then, or by the first call -------------------

_SAVES = (
    *(foreign_names.GET_STATE_DICT, foreign_names.TRAINER_SAVE),
    *(foreign_names.MODEL_SAVE, foreign_names.ADAPTER_SAVE),
)


def _hooks(options: Options, *, saves: bool) -> Iterator[tuple[Sequence[ForeignName], Callable[[], Handlers]]]:
    """Yield names, and what returns their handlers once their module is imported."""
    of_diffusers = diffusers.handlers(options)
    yield tuple(accelerate.HANDLERS), lambda: accelerate.HANDLERS
    yield tuple(of_diffusers), lambda: of_diffusers
    yield [foreign_names.LLAMAFACTORY_LOAD], lambda: _late("llamafactory").load_handlers(options)
    yield [foreign_names.SYNC_WEIGHTS, foreign_names.ITER_NAMED_PARAMS], lambda: _late("trl").HANDLERS
    yield foreign_names.ASYNC_NAMES, lambda: _late("trl").ASYNC_HANDLERS
    yield [foreign_names.INITIALIZE, foreign_names.LOAD_CHECKPOINT], lambda: _late("deepspeed").HANDLERS
    if saves:
        yield [foreign_names.DIFFUSERS_SAVE], lambda: diffusers.SAVE_HANDLERS
        yield _SAVES, lambda: {name: functools.partial(_save, name) for name in _SAVES}


def _late(module: str) -> Any:
    """Return a module of this folder, which only programs that use its framework import."""
    return importlib.import_module(f"lowmem_load.integrations.{module}")


def _save(name: ForeignName, ordinary: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # Others can save what DeepSpeed has not partitioned. The handlers need DeepSpeed: 70 MiB, and seconds of imports.
    if "deepspeed" not in sys.modules:
        return ordinary(*args, **kwargs)
    try:
        handler = _late("deepspeed").HANDLERS[name]
    except ImportError:  # a warning has said so when DeepSpeed was imported, and that saves stay as they are then
        return ordinary(*args, **kwargs)
    return handler(ordinary, *args, **kwargs)


def _replaced_once_imported(names: Sequence[ForeignName], handlers: Callable[[], Handlers]) -> contextlib.ExitStack:
    """Return a block: inside, handlers are called in place of names once their module is imported, in all threads.

    These names are private, and any release may move them. An import of a user must work nevertheless, so what a
    release lacks is one warning.
    """
    stack = contextlib.ExitStack()

    def replace(names: Sequence[ForeignName], _: ModuleType) -> None:
        if usable := usable_names(names):
            try:
                made = handlers()
                stack.enter_context(replaced({name: made[name] for name in usable}, everywhere=True))
            except ImportError as error:  # of what the handlers need; an IncompatibleVersionError is one
                warn_of_loss(f"{error}. So {names[0].loss}")

    for module in dict.fromkeys(name.module for name in names):
        of_module = [name for name in names if name.module == module]
        stack.callback(after_import(module, functools.partial(replace, of_module)))
        package = module.partition(".")[0]
        if package != module:
            stack.callback(after_import(package, functools.partial(_check_module, of_module)))
    return stack


def _check_module(names: Sequence[ForeignName], package: ModuleType) -> None:
    """Warn if a package, which has just been imported, does not have the module of names. Imports nothing."""
    path, parts = getattr(package, "__path__", []), names[0].module.split(".")
    for depth in range(2, len(parts) + 1):  # not by paths: the package may be in a zip archive, or compiled
        spec = PathFinder.find_spec(".".join(parts[:depth]), path)
        if spec is None:
            warn_of_missing(names)
            return
        path = spec.submodule_search_locations or []

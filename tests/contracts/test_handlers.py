"""All handlers take what the table says that they use, and pass on the arguments that later releases add."""

import contextlib
import importlib.util
import inspect
import sys
import warnings
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.utils import logging as hf_logging

from lowmem_load import foreign_names as names
from lowmem_load import replaced
from lowmem_load.engines import mesh
from lowmem_load.errors import FallbackWarning, IncompatibleVersionError
from lowmem_load.foreign_names import TABLE, ForeignName
from lowmem_load.integrations import accelerate, deepspeed, diffusion, llamafactory, trl
from lowmem_load.load.load import Options
from lowmem_load.models import active, loader, quantizers, saver, skeleton
from lowmem_load.models.diffusion import DiffusersCall
from lowmem_load.planning.expression import Source
from lowmem_load.replaced import Handler
from tests import builders

SHARDS_MODELS = hasattr(PreTrainedModel, "maybe_distribute_model")  # older releases of transformers do not

NO_FUNCTIONS = {names.SHARED_STATE, names.WEIGHT_METADATA, names.ASSIGNED_DATA}

WITHOUT_SELF = {names.LOAD_PRETRAINED_MODEL, names.FINALIZE_MODEL_LOADING}

LEFT = {names.FROM_CONFIG, names.LLAMAFACTORY_LOAD}
"""Their handlers do something else with what they are given, so a call with a new argument is left to the function."""

STAND_INS = {
    *(names.CONFIG_REFERENCE, names.SET_CONFIG, names.IS_ZERO3, names.IS_ZERO3_IN_LOADS, names.IS_FSDP_IN_LOADS),
    *(names.IS_FSDP_IN_PLACING, names.IS_ON_HF_MOUNT, names.SAFE_OPEN, names.RESOLVE_FILES, names.WARM_UP),
    *(names.FINALIZE_MODEL_LOADING, names.WRITE_WEIGHTS, names.WRITE_ADAPTER, names.NUM_PARAMETERS, names.SHOULD_SAVE),
    *(names.SAVE_CONFIG, names.SAVE_GENERATION_CONFIG, names.DIFFUSERS_WRITE, names.DIFFUSERS_EMPTY_WEIGHTS),
    *(*names.DIFFUSERS_STATE_DICTS, names.DIFFUSERS_SET_TENSOR),
}
"""Their handlers do not call the function."""

Named = list[tuple[ForeignName, Handler]]


class Quantizer:
    def __init__(self, method: str) -> None:
        self.quantization_config = {"quant_method": method, "load_in_4bit": True}

    def update_weight_conversions(self) -> None: ...


def enter_all_blocks(folder: Path) -> None:
    """Enter each block that replaces functions."""

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError

    context: Any = MagicMock(weights=None)
    blocks: list[Any] = [active.ordinary_path(), mesh.made_real(fail), skeleton.ties_kept()]
    blocks += [loader.intercepted(fail, lambda _: False), quantizers.described_quantizers(is_partitioned=True)]
    if SHARDS_MODELS:
        blocks.append(skeleton.filled_by(fail, weights="folder"))
    for block in blocks:
        with block:
            pass
    for call in (loader.TransformersCall, DiffusersCall):
        with contextlib.suppress(RuntimeError):
            call(fail, LlamaForCausalLM, (str(folder),), {}).describe(context)
    model = LlamaForCausalLM.from_pretrained(folder)
    tensors: Any = defaultdict(lambda: Source("file", "w", 0, (1,), torch.float32))
    for is_of_diffusers in (False, True):
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Exception):
            patch.setattr(saver.diffusion, "is_model", lambda _, answer=is_of_diffusers: answer)
            saver.describe_save_pretrained(
                model, folder / "scratch", tensors, dtype=None, max_shard_size=1, kwargs={}, has_configs=False
            )


@pytest.fixture(scope="module")
def handlers(tmp_path_factory: pytest.TempPathFactory) -> Named:
    """All handlers, some of them for the same name. Nothing is replaced."""
    found: Named = []

    def note(made: Any) -> list[ForeignName]:
        found.extend(made.items())
        return []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replaced, "usable_names", note)
        patch.setattr(importlib.util, "find_spec", lambda name, package=None: name)
        for module in ("diffusers.utils.logging", names.WRITE_ADAPTER.module):
            patch.setitem(sys.modules, module, hf_logging)
        enter_all_blocks(builders.tiny_llama(tmp_path_factory.mktemp("handlers")))
        for method in ("bitsandbytes", "compressed-tensors", "fp8", "mxfp4"):
            with quantizers.described_quantizers(is_partitioned=True):
                dict(found)[names.MAKE_QUANTIZER](lambda method=method: Quantizer(method))
    modules = accelerate.HANDLERS, trl.HANDLERS, trl.ASYNC_HANDLERS, deepspeed.HANDLERS, diffusion.SAVE_HANDLERS
    for made in (*modules, diffusion.handlers(Options()), llamafactory.load_handlers(Options())):
        found.extend(made.items())
    return found


def test_each_name_of_the_table_has_a_handler(handlers: Named) -> None:
    absent = NO_FUNCTIONS if SHARDS_MODELS else {*NO_FUNCTIONS, *WITHOUT_SELF, names.RESOLVE_FILES}
    assert {replace(name, owner=None) for name, _ in handlers} >= set(TABLE) - absent


class Call(NamedTuple):
    """A call of a function that has parameters which are new."""

    signature: inspect.Signature
    args: list[Any]
    kwargs: dict[str, Any]


def call_of(name: ForeignName, values: Mapping[str, Any], new: Mapping[str, Any], counts: tuple[int, int]) -> Call:
    """Return a call by all parameters. `counts`: how many are new ones by position, and how many are given so."""
    first, _, others = (part.split() for part in name.takes.partition("*"))
    has_self = "." in name.name and name not in WITHOUT_SELF
    by_position = [*["self"] * has_self, *first, *list(new)[: counts[0]]]
    by_name = [*others, *list(new)[counts[0] :]]
    parameters = [inspect.Parameter(each, inspect.Parameter.POSITIONAL_OR_KEYWORD) for each in by_position]
    parameters += [inspect.Parameter(each, inspect.Parameter.KEYWORD_ONLY) for each in by_name]
    arguments = {each: {**values, **new}.get(each, MagicMock(name=each)) for each in (*by_position, *by_name)}
    num_given = min(max(has_self + name.takes.startswith("_"), counts[1]), len(by_position))
    args = [arguments.pop(each) for each in by_position[:num_given]]
    return Call(inspect.Signature(parameters), args, arguments)


def play(name: ForeignName, handler: Handler, call: Call) -> tuple[list[dict[str, Any]], bool]:
    """Return the arguments of each call of the function, and whether the handler has left the call to it."""
    calls: list[dict[str, Any]] = []

    def function(*args: Any, **kwargs: Any) -> MagicMock:
        calls.append(call.signature.bind(*args, **kwargs).arguments)
        return MagicMock()

    function.__signature__ = call.signature  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        try:
            replaced._tolerant(name, handler)(function, *call.args, **call.kwargs)
        except (FallbackWarning, IncompatibleVersionError) as error:
            return calls, "other arguments" in str(error)
        except Exception:  # of what is no tensor, or no file
            pass
    return calls, False


def test_new_arguments_reach_the_function(handlers: Named, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerate, "are_lazy", lambda _: False)
    monkeypatch.setattr(accelerate, "fill_partitions", lambda _, parameters: parameters)
    monkeypatch.setattr("lowmem_load.engines.partition.Partitioner", MagicMock())
    monkeypatch.setattr("lowmem_load.engines.hooks.partitions_all", lambda _: False)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"metadata": {}, "weight_map": {"w": "a.safetensors"}}')
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=32, intermediate_size=8, num_hidden_layers=1))
    values = {"index_filename": index, "checkpoint_file": "a.safetensors", "model": model}
    called: set[ForeignName] = set()

    @settings(max_examples=10, deadline=None, phases=[Phase.generate], suppress_health_check=[HealthCheck.too_slow])
    @given(
        st.lists(st.from_regex("new_[a-z]+", fullmatch=True), min_size=1, max_size=3, unique=True),
        st.tuples(st.integers(0, 3), st.integers(0, 8)),
    )
    def play_all(new: list[str], counts: tuple[int, int]) -> None:
        given = {each: object() for each in new}
        for name, handler in handlers:
            calls, is_left = play(name, handler, call_of(name, values, given, counts))
            assert not is_left or name in LEFT, name
            for arguments in calls:
                called.add(name)
                assert arguments.items() >= given.items(), name

    play_all()
    made = {replace(name, owner=None) for name, _ in handlers}
    assert made - {replace(name, owner=None) for name in called} == STAND_INS & made

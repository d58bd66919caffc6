"""What is described from the plan cache equals what is described without; what it depends on is in its key."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers.core_model_loading", reason="transformers before 5 has no such conversion")

import transformers
from safetensors.torch import load_file, save_file

from benchmarks import published, sparse
from lowmem_load import plan
from lowmem_load.describe.tensor import SymbolicTensor
from lowmem_load.formats.kept import read_kept, write_kept
from lowmem_load.formats.templates import NotDataError, Teller, Template
from lowmem_load.hf import collecting, fp8, mxfp4, outcome_key, plan_cache
from lowmem_load.hf.outcome import Named
from lowmem_load.planning import expression as ex
from lowmem_load.planning.load_plan import LoadPlan
from lowmem_load.read.executor import Executor
from lowmem_load.read.whole import read_whole
from lowmem_load.stages import plan_only
from lowmem_load.stages.describe import Described
from lowmem_load.stages.plan_cache import PLAN_CACHE
from tests import builders
from tests.conversions.mappings import symbolic_file

if not hasattr(transformers.core_model_loading, "set_param_for_module"):
    pytest.skip("this transformers sets parameters in another way", allow_module_level=True)

DS_CONFIG = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the plan cache."""
    monkeypatch.setenv(PLAN_CACHE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> list[Described]:
    """What was described, in order."""
    found: list[Described] = []
    ordinary = plan_only.describe

    def kept(*args: Any, **kwargs: Any) -> Described:
        found.append(ordinary(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(plan_only, "describe", kept)
    return found


def planned(path: Path, ds_config: dict[str, Any] = DS_CONFIG, **keywords: Any) -> LoadPlan:
    return plan(path, ds_config, rank=1, world_size=3, **keywords)


def done(found: Described) -> list[str]:
    """Returns what was done with the plan cache."""
    assert found.plan_cache is not None
    return list(found.plan_cache.files.values())


def facts(found: Described, plan: LoadPlan) -> Any:
    conversions = getattr(found.model, "_weight_conversions", None)
    marks = [(name, getattr(each, "_is_hf_initialized", None)) for name, each in found.model.named_parameters()]
    return (
        *(plan.fingerprint, plan.targets, plan.buffers, plan.files, plan.read_to_describe),
        *(plan.missing_keys, plan.unexpected_keys, sorted(map(str, plan.mismatched_keys))),
        [(name, value.requires_grad, value.stride()) for name, value in found.model.named_parameters()],
        marks,
        [
            (type(each).__name__, each.source_patterns, each.target_patterns, getattr(each, "_was_used", None))
            for each in conversions or ()
        ],
        [sorted(map(str, keys)) for _, keys in sorted(found.info.items())],
    )


def without_a_tensor(path: Path, to: Path, taken: str, added: str) -> Path:
    """Returns a copy of a checkpoint in which one tensor has another name, which nobody expects."""
    shutil.copytree(path, to)
    tensors = load_file(to / "model.safetensors")
    tensors[added] = tensors.pop(taken)
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


MODELS: dict[str, Callable[[Path, Path], tuple[Path, dict[str, Any]]]] = {
    "plain": lambda root, _: (builders.tiny_llama(root), {}),
    "shards": lambda root, _: (builders.tiny_llama(root, torch.float32, "20KB"), {}),
    "tied": lambda root, _: (builders.tiny_qwen2_tied(root), {}),
    "experts": lambda root, _: (builders.tiny_mixtral(root), {}),
    "buffers": lambda root, _: (builders.tiny_gpt2(root), {}),
    "prefix, missing and unexpected": lambda root, _: (
        builders.tiny_bert(root),
        {"auto_class": "AutoModelForSequenceClassification"},
    ),
    "renamed": lambda root, _: (builders.tiny_llava(root), {}),
    "transposed": lambda root, _: (builders.tiny_qwen3_vl_moe(root), {}),
    "missing": lambda root, tmp: (
        without_a_tensor(builders.tiny_llama(root), tmp / "m", "model.norm.weight", "nobody.weight"),
        {},
    ),
    "mismatched": lambda root, _: (
        builders.tiny_llama(root),
        {"ignore_mismatched_sizes": True, "vocab_size": 96},
    ),
    "fp8": lambda _, tmp: (with_few_experts("deepseek-v3-fp8", tmp / "fp8", 4), dequantizing("FineGrainedFP8Config")),
    "mxfp4": lambda _, tmp: (sparse.write("gpt-oss-120b", tmp / "mxfp4", 1), dequantizing("Mxfp4Config")),
}


def with_few_experts(model: str, folder: Path, num_layers: int) -> Path:
    """Returns the folder of a published model, sparse: 8 experts, and all blocks whole, as releases before 5.16 ask."""
    config = {**published.MODELS[model].config, "n_routed_experts": 8, "qk_rope_head_dim": 128}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(published.MODELS, "few", dataclasses.replace(published.MODELS[model], config=config))
        return sparse.write("few", folder, num_layers)


def partial_blocks() -> Any:
    """Returns transformers' module of fp8, if its weights may end in half a block."""
    module = pytest.importorskip(fp8.MODULE, exc_type=ImportError)
    if not hasattr(module.Fp8Dequantize, "_dequantize_one"):
        pytest.skip("this transformers refuses weights whose blocks are not whole")
    return module


def dequantizing(name: str) -> dict[str, Any]:
    return {"quantization_config": getattr(transformers, name)(dequantize=True)}


@pytest.mark.parametrize("kind", MODELS)
def test_what_is_described_from_the_cache_is_equal(
    kind: str, checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, described: list[Described]
) -> None:
    if kind == "fp8":
        partial_blocks()
    path, keywords = MODELS[kind](checkpoints, tmp_path)
    plans = [planned(path, **keywords)]
    assert described[0].plan_cache is None
    monkeypatch.setenv(PLAN_CACHE, str(tmp_path / "cache"))
    plans += [planned(path, **keywords) for _ in range(2)]
    _, missed, hit = described
    assert (done(missed), done(hit)) == (["written"], ["read"])
    assert missed.plan_cache is not None
    assert hit.plan_cache is not None
    assert missed.plan_cache.contents == hit.plan_cache.contents
    expected, *others = (facts(*each) for each in zip(described, plans, strict=True))
    assert others == [expected, expected]
    if kind == "mismatched":
        assert plans[0].mismatched_keys
    if "missing" in kind:
        assert plans[0].missing_keys
        assert plans[0].unexpected_keys


@pytest.mark.parametrize("kind", ["fp8", "mxfp4"])
def test_dequantization_from_the_cache_gives_the_same_values(kind: str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    if kind == "fp8":
        weight = (torch.randn(9, 8, generator=generator) * 100).to(torch.float8_e4m3fn)  # the last block is half a one
        tensors = {"a": weight, "b": torch.rand(5, 2, generator=generator)}
        operation = partial_blocks().Fp8Dequantize(
            SimpleNamespace(quantization_config=SimpleNamespace(weight_block_size=(2, 4)))
        )
    else:
        shapes = ((2, 3, 2, 16), (2, 3, 2))
        tensors = {
            name: torch.randint(100, 140, shape, dtype=torch.uint8, generator=generator)
            for name, shape in zip("ab", shapes, strict=True)
        }
    save_file(tensors, tmp_path / "model.safetensors")
    with Executor() as executor, pytest.MonkeyPatch.context() as patch:

        def read_now(expression: ex.Expression, reason: str = "") -> torch.Tensor:
            return read_whole(executor, expression)

        for owner, name, function in (fp8 if kind == "fp8" else mxfp4).replacements():
            patch.setattr(owner, name, function)
        file = symbolic_file(tmp_path / "model.safetensors")
        given = [SymbolicTensor(file.expression(name), read_now) for name in "ab"]
        dequantize = (
            functools.partial(operation._dequantize_one, output_dtype=torch.bfloat16)
            if kind == "fp8"
            else importlib.import_module(mxfp4.MODULE).convert_moe_packed_tensors
        )
        described = dequantize(*given)
        assert isinstance(described, SymbolicTensor)
        names = Named(read_now)
        teller = Teller(names, lambda source: "ab".index(source.name))
        _, numbers = teller.told(described.expression)
        template = Template(json.loads(json.dumps(teller.templates[0])), names)
        made = read_now(template.made([file.expression("ab"[number]) for number in numbers]))
        expected = read_now(described.expression)
    assert torch.equal(made, expected)


# -- what the key holds ----------------------------------------------------------------------------------------------


def rewritten(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def configured(path: Path, **values: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | values))


def with_other_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the module of the model were another."""
    ordinary = outcome_key.digest_of_file
    monkeypatch.setattr(outcome_key, "digest_of_file", lambda path: ordinary(path) + ("!" * ("modeling_llama" in path)))


def with_other_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if somebody had replaced a function that transformers converts by."""
    module = transformers.core_model_loading
    ordinary = module.rename_source_key

    def rename(*args: Any, **kwargs: Any) -> Any:
        return ordinary(*args, **kwargs)

    monkeypatch.setattr(module, "rename_source_key", rename)


CHANGES: dict[str, Callable[[Path, pytest.MonkeyPatch], dict[str, Any] | None]] = {
    "configuration": lambda path, _: configured(path, attention_dropout=0.5),
    "header": lambda path, _: rewritten(path, lambda tensors: tensors.update(more=torch.zeros(1))),
    "dtype": lambda path, _: {"ds_config": {**DS_CONFIG, "bf16": {"enabled": False}}},
    "keyword": lambda path, _: {"ignore_mismatched_sizes": True},
    "key mapping": lambda path, _: {"key_mapping": {"^nobody": "none"}},
    "class": lambda path, _: {"auto_class": "AutoModel"},
    "model code": lambda path, patch: with_other_code(patch),
    "transformers' code": lambda path, patch: with_other_conversion(patch),
    "version of torch": lambda path, patch: patch.setattr(torch, "__version__", "2.99"),
    "own code": lambda path, patch: patch.setattr(outcome_key, "_own_code", lambda: "another"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_it_depends_on_changes_the_key(
    change: str,
    checkpoints: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    described: list[Described],
) -> None:
    path = shutil.copytree(builders.tiny_llama(checkpoints), tmp_path / "model")
    planned(path)
    keywords = CHANGES[change](path, monkeypatch) or {}
    planned(path, **keywords)
    assert [done(found) for found in described] == [["written"], ["written"]]
    assert len(os.listdir(folder)) == 2


def test_where_files_lie_and_what_they_hold_is_not_in_the_key(
    checkpoints: Path, tmp_path: Path, folder: Path, described: list[Described]
) -> None:
    path = builders.tiny_llama(checkpoints)
    plan(path, DS_CONFIG, rank=0, world_size=2)
    other = shutil.copytree(path, tmp_path / "elsewhere")
    rewritten(other, lambda tensors: tensors["model.norm.weight"].add_(1))
    found = plan(other, DS_CONFIG, rank=4, world_size=7)
    assert [done(each) for each in described] == [["written"], ["read"]]
    assert {file.path for file in found.files} == {str(other / "model.safetensors")}
    assert {fill.steps[0].tensor.path for fill in found.targets[0].fills} == {str(other / "model.safetensors")}


# -- what is in the folder -------------------------------------------------------------------------------------------


def only_file(folder: Path) -> Path:
    (name,) = os.listdir(folder)
    return folder / name


def poisoned(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes what a file of the cache says, under a right digest."""
    key = path.read_bytes()[48:80]
    content = json.loads(read_kept(str(path), key) or b"")
    change(content)
    write_kept(str(path), key, json.dumps(content).encode())


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def set_twice(content: dict[str, Any]) -> None:
    content["targets"].append(content["targets"][0])


def swap(field: int, one: int, other: int) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        targets = content["targets"]
        targets[one][field], targets[other][field] = targets[other][field], targets[one][field]

    return change


HOSTILE: dict[str, Callable[[Path], None]] = {
    "truncated": cut_short,
    "foreign": lambda path: path.write_bytes(b"something else"),
    "not JSON": lambda path: write_kept(str(path), path.read_bytes()[48:80], b"{"),
    "deep JSON": lambda path: write_kept(str(path), path.read_bytes()[48:80], b"[" * 100_000),
    "a list": lambda path: write_kept(str(path), path.read_bytes()[48:80], b"[]"),
    "without a field": lambda path: poisoned(path, lambda content: content.pop("used")),
    "an unknown tensor": lambda path: poisoned(path, lambda content: content["targets"][0].__setitem__(2, [1 << 40])),
    "a negative tensor": lambda path: poisoned(path, lambda content: content["targets"][0].__setitem__(2, [-1])),
    "tensors of other shapes": lambda path: poisoned(path, swap(2, 0, -1)),
    "a parameter of another shape": lambda path: poisoned(path, swap(0, 0, -1)),
    "an unknown parameter": lambda path: poisoned(path, lambda content: content["targets"][0].__setitem__(0, "x")),
    "a parameter twice": lambda path: poisoned(path, set_twice),
    "an unknown template": lambda path: poisoned(path, lambda content: content["targets"][0].__setitem__(1, 99)),
    "a wild stride": lambda path: poisoned(path, lambda content: content["targets"][0].__setitem__(3, [1 << 60, 1])),
    "a parameter of another kind": lambda path: poisoned(path, lambda content: content["targets"][0].__setitem__(4, 1)),
    "an unknown conversion": lambda path: poisoned(path, lambda content: content["conversions"].append(99)),
    "unexpected, and there": lambda path: poisoned(
        path, lambda content: content["unexpected"].append("model.norm.weight")
    ),
    "mismatched, and fitting": lambda path: poisoned(
        path, lambda content: content["mismatched"].append("model.norm.weight")
    ),
}


def test_a_file_that_cannot_be_used_is_ignored_with_one_warning_and_written_anew(
    checkpoints: Path, folder: Path, described: list[Described], caplog: pytest.LogCaptureFixture
) -> None:
    path = builders.tiny_llama(checkpoints)
    expected = facts(described[-1], found) if (found := planned(path)) else None
    whole = only_file(folder).read_bytes()
    for kind, spoil in HOSTILE.items():
        spoil(only_file(folder))
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger=plan_cache.__name__):
            found = planned(path)
        (warning,) = caplog.messages
        assert str(only_file(folder)) in warning, kind
        assert "described anew" in warning, kind
        assert done(described[-1]) == ["written"], kind
        assert facts(described[-1], found) == expected, kind
        assert only_file(folder).read_bytes() == whole, kind


def test_a_folder_that_cannot_be_written_is_a_warning(
    checkpoints: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    described: list[Described],
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(PLAN_CACHE, str(tmp_path / "file" / "below"))
    planned(builders.tiny_llama(checkpoints))
    assert any("the plan cache cannot be written" in message for message in caplog.messages)
    assert done(described[0])[0].startswith("not written: ")


def test_another_rank_writes(
    checkpoints: Path, folder: Path, described: list[Described], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = plan_only.describe
    monkeypatch.setattr(plan_only, "describe", lambda *args, **kwargs: counted(*args, **kwargs, writes=False))
    planned(builders.tiny_llama(checkpoints))
    assert not folder.exists()
    assert done(described[0]) == ["described here, to be written by the first rank of the node"]


# -- what is not kept ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("bin", "elsewhere than safetensors files"),
        ("values", "a value in memory"),
        ("more", "changes more of the model than its parameters"),
        ("config", "changes more of the model than its parameters"),
        ("read", "values that were read"),
        ("closure", "a closure"),
    ],
)
def test_what_cannot_be_kept_is_described_as_ever(
    kind: str,
    reason: str,
    checkpoints: Path,
    folder: Path,
    described: list[Described],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = transformers.core_model_loading
    path = builders.tiny_llama(checkpoints)
    ordinary, ordinary_copy = module.set_param_for_module, module._materialize_copy

    @functools.wraps(ordinary)
    def setter(model: Any, target_name: str, *args: Any, **kwargs: Any) -> Any:
        changed = model.config if kind == "config" else model.get_submodule(target_name.rpartition(".")[0])
        changed.told = True
        return ordinary(model, target_name, *args, **kwargs)

    def copy(*args: Any, **kwargs: Any) -> Any:
        value = ordinary_copy(*args, **kwargs)
        if kind == "values":
            return value * torch.ones(value.shape, dtype=value.dtype)
        assert value[..., 0].sum().item() == value[..., 0].sum().item()
        return value

    if kind == "bin":
        path = builders.as_torch_bin(path)
    elif kind == "closure":
        monkeypatch.setattr(plan_cache, "key_of", lambda *args, **kwargs: outcome_key.told(setter))
    elif kind in ("values", "read"):
        monkeypatch.setattr(module, "_materialize_copy", copy)
    else:
        monkeypatch.setattr(module, "set_param_for_module", setter)
    planned(path)
    (said,) = done(described[0])
    assert said.startswith("nothing kept: ")
    assert reason in said
    assert not folder.exists()


def test_a_release_that_converts_in_another_way_keeps_nothing(
    checkpoints: Path, folder: Path, described: list[Described], monkeypatch: pytest.MonkeyPatch
) -> None:
    ordinary = plan_cache.modeling_utils.convert_and_load_state_dict_in_model

    def convert(model: Any, state_dict: Any, load_config: Any, more: Any = None, **others: Any) -> Any:
        return ordinary(model, state_dict, load_config, **others)

    monkeypatch.setattr(plan_cache.modeling_utils, "convert_and_load_state_dict_in_model", convert)
    planned(builders.tiny_llama(checkpoints))
    assert done(described[0]) == ["nothing kept: this release of transformers converts by another function"]
    assert not folder.exists()


def test_what_a_process_tells_of_a_value_is_what_another_tells() -> None:
    one = {"b": {3, 1, 2}, "a": (torch.bfloat16, [None, True, 1.5]), "c": frozenset("xyz")}
    other = {"c": frozenset("zyx"), "a": (torch.bfloat16, [None, True, 1.5]), "b": {2, 3, 1}}
    assert outcome_key.told(one) == outcome_key.told(other)
    late = collecting._LatePattern("a|b")
    assert outcome_key.told(late) == outcome_key.told(re.compile("a|b")) != outcome_key.told(re.compile("a"))
    assert outcome_key.told(one) != outcome_key.told({**other, "a": (torch.float16, [None, True, 1.5])})
    first, second = (lambda x, n=n: x * n for n in (1, 2))
    assert outcome_key.told(first) != outcome_key.told(second), "functions that differ in their defaults alone"


@pytest.mark.parametrize("value", [functools.partial(round, 1.5), Path("a").exists, [].append, torch.ones(2)])
def test_what_does_not_tell_all_that_it_holds_has_no_key(value: Any) -> None:
    with pytest.raises(NotDataError):
        outcome_key.told(value)

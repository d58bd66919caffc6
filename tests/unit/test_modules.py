"""Modules that are filled by names: from which files, by which names, and what happens to all that has none there."""

import json
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import weight_norm

from lowmem_load.errors import CheckpointError, ConfigError, UnsupportedError
from lowmem_load.files.executor import Executor
from lowmem_load.load.describe import describe
from lowmem_load.load.execute import execute
from lowmem_load.load.make_plan import make_plan
from lowmem_load.load.request import stage_3
from lowmem_load.models.model_folder import files_of
from lowmem_load.models.modules import ModuleCall
from tests.described import whole
from tests.hub import hub


class Net(nn.Module):
    """Tied weights, a frozen one, buffers of both kinds, a parameter without a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        self.inner[0].weight.requires_grad_(False)
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.rand(2))
        self.register_buffer("table", torch.arange(6.0) ** 2, persistent=False)


def reference() -> nn.Module:
    torch.manual_seed(1)
    model = Net()
    for tensor in (*model.parameters(), model.inner[1].running_mean):
        tensor.data.normal_()
    return model


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return {name: tensor for name, tensor in tensors.items() if name != "head.weight"}


def on_meta() -> nn.Module:
    with torch.device("meta"):
        model = Net()
    model.table = torch.arange(6.0) ** 2
    return model


def load(path: Path, model: nn.Module | None = None, **how: Any) -> nn.Module:
    """Fill a module on one rank."""
    model = on_meta() if model is None else model
    kwargs = {key: how.pop(key) for key in ("subfolder", "variant") if key in how}
    call = ModuleCall(str(path), model, kwargs, **how)
    with Executor() as executor:
        described = describe(call, stage_3(torch.float32, 1), whole, executor, holds_values=True)
        execute(make_plan(described, 0), described.target, executor)
    return model


def assert_equal(model: nn.Module, expected: nn.Module) -> None:
    assert model.state_dict().keys() == expected.state_dict().keys()
    for (name, tensor), other in zip(model.state_dict().items(), expected.state_dict().values(), strict=True):
        assert torch.equal(tensor, other), name
        assert tensor.dtype == other.dtype
    if isinstance(expected, Net):
        assert torch.equal(model.table, expected.table)
        assert model.head.weight is model.embed.weight
    flags = [parameter.requires_grad for parameter in model.parameters()]
    assert flags == [parameter.requires_grad for parameter in expected.parameters()]


# -- files -------------------------------------------------------------------------------------------------------------


def in_one_file(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, folder / "anything.safetensors")
    (folder / "optimizer.pt").write_bytes(b"no weights")
    return folder


def in_shards(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    names = list(tensors)
    weight_map = {}
    for number, part in enumerate((names[:3], names[3:])):
        file = f"open_clip_model-{number}.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "open_clip_model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    save_file({"another": torch.ones(1)}, folder / "another.safetensors")  # that the index does not name
    return folder


def in_torch_file(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    nested = {f"module._orig_mod.model.{name}": tensor for name, tensor in tensors.items()}
    torch.save({"epoch": 3, "optimizer": {"lr": 0.1}, "state_dict": OrderedDict(nested)}, folder / "last.pth")
    return folder / "last.pth"


@pytest.mark.parametrize("write", [in_one_file, in_shards, in_torch_file])
def test_values_are_those_of_the_files_wherever_they_lie(write: Any, tmp_path: Path) -> None:
    expected = reference()
    assert_equal(load(write(tmp_path, state(expected))), expected)


def test_a_hub_id_stands_for_the_files_that_are_chosen_there(tmp_path: Path) -> None:
    expected = reference()
    (tmp_path / "below").mkdir()
    in_shards(tmp_path / "below", state(expected))
    save_file({}, tmp_path / "below" / "other.fp16.safetensors")
    (tmp_path / "malformed").mkdir()
    (tmp_path / "malformed" / "m.safetensors.index.json").write_text("{}")
    assert_equal(load(tmp_path / "below" / "open_clip_model.safetensors.index.json"), expected)
    with hub(tmp_path, "maker/net") as asked:
        assert_equal(load(Path("maker/net"), subfolder="below"), expected)
        fetched = {line.split()[1] for line in asked}
        assert {"open_clip_model-0.safetensors", "open_clip_model-1.safetensors"} <= fetched
        assert not {"other.fp16.safetensors", "another.safetensors"} & fetched
        with pytest.raises(CheckpointError, match=r"maker/none.*the Hub"):
            load(Path("maker/none"))
        with pytest.raises(CheckpointError, match=r"^maker/net/: has no weights"):
            load(Path("maker/net"))
        with pytest.raises(CheckpointError, match="has no weight_map"):
            load(Path("maker/net"), subfolder="malformed")


@pytest.mark.parametrize(
    ("names", "variant", "found"),
    [
        (["m.safetensors", "m.fp16.safetensors", "m.bin"], None, ["m.safetensors"]),
        (["m.safetensors", "m.fp16.safetensors"], "fp16", ["m.fp16.safetensors"]),
        (["m.fp16.safetensors"], None, ["m.fp16.safetensors"]),
        (["m.bin", "optimizer.pt", "rng_state_0.pth", "training_args.bin"], None, ["m.bin"]),
        (["m-00001-of-00002.safetensors", "m-00002-of-00002.safetensors"], None, None),
        (["m.fp16-00001-of-00001.safetensors", "m.safetensors"], "fp16", ["m.fp16-00001-of-00001.safetensors"]),
        (["notes.txt"], None, "has no weights .*; notes.txt are there"),
        (["m.safetensors"], "fp16", "no weights of the variant 'fp16'"),
        (["a.safetensors.index.json", "b.safetensors.index.json"], None, "has the indexes a.* name one by its path"),
    ],
)
def test_one_set_of_weights_is_found_or_an_error(
    names: list[str], variant: str | None, found: list[str] | str | None, tmp_path: Path
) -> None:
    for name in names:
        (tmp_path / name).touch()
    if isinstance(found, str):
        with pytest.raises(CheckpointError, match=found):
            files_of(str(tmp_path), "", variant)
        return
    assert files_of(str(tmp_path), "", variant) == [str(tmp_path / name) for name in found or names]


def test_keywords_that_choose_no_files_are_refused() -> None:
    with pytest.raises(ConfigError, match="torch_dtype: not a keyword of a load by names"):
        ModuleCall("folder", on_meta(), {"torch_dtype": "auto"})


def test_a_name_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file({"weight": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match=r"weight: is in .*a.safetensors and in .*b.safetensors"):
        load(tmp_path)


def test_shards_that_an_index_names_must_be_there(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"files are missing that it names: .*gone.safetensors"):
        load(tmp_path)


# -- names -------------------------------------------------------------------------------------------------------------


def test_two_names_must_not_become_one(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"rename: .* and .* would both become x"):
        load(in_one_file(tmp_path, state(reference())), rename=lambda _: "x")


def test_one_error_lists_all_keys_that_do_not_match(tmp_path: Path) -> None:
    tensors = state(reference()) | {"more": torch.ones(1), "scale": torch.ones(3)}
    del tensors["inner.0.bias"], tensors["inner.1.running_var"]
    with pytest.raises(CheckpointError) as caught:
        load(in_one_file(tmp_path, tensors))
    assert (
        "missing: inner.0.bias, inner.1.running_var; mismatched: scale (3,) instead of (2,); unexpected: more"
        in str(caught.value)
    )


def test_values_are_cast_to_the_dtypes_of_the_module(tmp_path: Path) -> None:
    model, expected = on_meta().to(torch.bfloat16), reference()
    model.scale.data = model.scale.data.float()
    load(in_one_file(tmp_path, state(expected)), model)
    assert torch.equal(model.embed.weight, expected.embed.weight.bfloat16())
    assert torch.equal(model.scale, expected.scale)
    assert model.inner[1].num_batches_tracked.dtype == torch.int64


@pytest.mark.parametrize("change", [0.0, 1.0])
def test_both_names_of_a_tied_weight_must_have_equal_values(change: float, tmp_path: Path) -> None:
    expected = reference()
    tensors = state(expected)
    tensors["head.weight"] = tensors["embed.weight"] + change
    if not change:
        assert_equal(load(in_one_file(tmp_path, tensors)), expected)
        return
    with pytest.raises(CheckpointError, match=r"embed.weight and head.weight differ, and the module has one parameter"):
        load(in_one_file(tmp_path, tensors))


# -- what torch does in `load_state_dict` ------------------------------------------------------------------------------


def test_a_buffer_of_no_state_dict_keeps_its_value(tmp_path: Path) -> None:
    expected = reference()
    folder = in_one_file(tmp_path, state(expected) | {"table": torch.zeros(6)})
    with pytest.raises(RuntimeError, match="Unexpected"):
        reference().load_state_dict({**expected.state_dict(), "table": torch.zeros(6)})
    with pytest.raises(CheckpointError, match=r"Net\. unexpected: table\. "):
        load(folder)
    assert_equal(load(folder, strict=False), expected)


class Hiding(nn.Sequential):
    def named_parameters(self, *_: Any, **__: Any) -> Any:
        yield "mine", self[0].weight


@pytest.mark.parametrize("wrapped", [Hiding, lambda *modules: checkpoint_wrapper(nn.Sequential(*modules))])
def test_all_parameters_are_filled_whatever_named_parameters_says(wrapped: Any, tmp_path: Path) -> None:
    expected, model = nn.Linear(2, 3), nn.Linear(2, 3, device="meta")
    load(in_one_file(tmp_path, {f"0.{name}": value for name, value in expected.state_dict().items()}), wrapped(model))
    assert torch.equal(model.weight, expected.weight)
    assert torch.equal(model.bias, expected.bias)


class Extra(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.amax = torch.ones(2)

    def get_extra_state(self) -> torch.Tensor:
        return self.amax

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.amax = state.clone()


OLD_AND_NEW: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "weight norm": (
        lambda: weight_norm(nn.Linear(3, 2)),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)),
    ),
    "instance norm": (
        lambda: nn.InstanceNorm1d(3, affine=True),
        lambda: nn.InstanceNorm1d(3, affine=True, track_running_stats=False),
    ),
    "extra state": (Extra, Extra),
}


def changed(old: nn.Module) -> dict[str, torch.Tensor]:
    return {name: torch.rand_like(value) for name, value in old.state_dict().items() if "tracked" not in name}


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("kind", OLD_AND_NEW)
def test_files_of_older_modules_load_as_in_torch(kind: str, tmp_path: Path) -> None:
    old, new = OLD_AND_NEW[kind]
    tensors = {f"inner.0.{name}": value for name, value in changed(old()).items()}
    expected, model = nn.ModuleDict({"inner": nn.Sequential(new())}), nn.ModuleDict({"inner": nn.Sequential(new())})
    expected.load_state_dict(tensors)
    model.to("meta")
    load(in_one_file(tmp_path, tensors), model)
    assert_equal(model, expected)


def test_attributes_in_wrapped_modules_are_computed_and_set(tmp_path: Path) -> None:
    class Scaled(Extra):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.arange(3.0)

    def build() -> nn.Module:
        return nn.Sequential(checkpoint_wrapper(torch.compile(Scaled(), backend="eager")))

    old = Scaled()
    old.amax = torch.rand(2)
    with torch.device("meta"):
        model = build()
    load(in_one_file(tmp_path, {f"0.{name}": value for name, value in old.state_dict().items()}), model, build=build)
    assert torch.equal(model[0].table, old.table)
    assert torch.equal(model[0].amax, old.amax)


def test_extra_state_that_is_absent_unknown_or_left(tmp_path: Path) -> None:
    folder = in_one_file(tmp_path, nn.Linear(2, 2).state_dict())
    with pytest.raises(CheckpointError, match=r"missing: _extra_state\. "):
        load(folder, Extra())
    assert torch.equal(load(folder, Extra(), skip=["_extra_state"]).amax, torch.ones(2))
    wrapped = checkpoint_wrapper(Extra())
    load(in_one_file(tmp_path, changed(Extra())), wrapped, skip=["_checkpoint_wrapped_module._extra_state"])
    assert torch.equal(wrapped.amax, torch.ones(2))
    folder = in_one_file(tmp_path, Extra().state_dict())
    with pytest.raises(CheckpointError, match=r"unexpected: _extra_state\. "):
        load(folder, nn.Linear(2, 2))
    folder, model = in_one_file(tmp_path, {"_extra_state": torch.zeros(2)}), Extra()
    with pytest.raises(CheckpointError, match=r"missing: bias, weight\. "):
        load(folder, model)
    assert torch.equal(model.amax, torch.ones(2)), "was set before the names were compared"


# -- what no file has --------------------------------------------------------------------------------------------------


def test_what_is_left_keeps_its_values(tmp_path: Path) -> None:
    expected, model = reference(), on_meta()
    model.scale = nn.Parameter(torch.tensor([5.0, 6.0]))
    load(in_one_file(tmp_path, state(expected)), model, skip=["scale"])
    expected.scale.data = torch.tensor([5.0, 6.0])
    assert_equal(model, expected)
    with pytest.raises(ConfigError, match=r"skip: scale are on the meta device; give them values"):
        load(tmp_path, skip=["scale"])
    with pytest.raises(ConfigError, match=r"skip: the module has no parameter or buffer scales"):
        load(tmp_path, skip=["scales"])


def test_buffers_of_no_file_are_computed_or_refused_by_name(tmp_path: Path) -> None:
    expected = reference()
    folder = in_one_file(tmp_path, state(expected))
    model = on_meta().to("meta")
    with pytest.raises(UnsupportedError, match=r"Net: no file has the buffers table, and their values are not known"):
        load(folder, model)
    assert_equal(load(folder, on_meta().to("meta"), build=Net), expected)
    model = load(folder, on_meta().to(torch.bfloat16).to("meta"), build=Net)
    assert model.table.dtype == torch.bfloat16
    assert torch.equal(model.table, expected.table.bfloat16())

    def build() -> nn.Module:
        built = Net()
        built.table = torch.arange(7.0)
        return built

    with pytest.raises(ConfigError, match=r"build: .* table \(7,\) instead of \(6,\)"):
        load(folder, on_meta().to("meta"), build=build)


def test_code_that_load_state_dict_would_run_is_named(tmp_path: Path) -> None:
    path = in_one_file(tmp_path, state(reference()))
    model = on_meta()
    model.inner[1].register_load_state_dict_post_hook(lambda module, _: module.weight.data.mul_(2))
    with pytest.warns(UserWarning, match=r"inner\.1: load_state_dict would run code"):
        load(path, model)

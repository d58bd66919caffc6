"""Names without what others put around modules: a part of a name goes by the class of the module that stands there."""

import re
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from lowmem_load.errors import CheckpointError, UnsupportedError
from lowmem_load.models.modules import tensors_of
from lowmem_load.models.saver import SavedFile
from lowmem_load.models.wrappers import named_modules, named_tensors, plain_name
from lowmem_load.weights_out.rank_shards import rank_shards
from lowmem_load.weights_out.weight_files import lay_out
from lowmem_load.weights_out.weights import weights_of_model

WORDS = ("_orig_mod", "_checkpoint_wrapped_module", "base_layer", "original_module")


class Holder(nn.Module):
    """Somebody's own module, with a child of any name, and a weight that the child's would hide."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self.add_module(key, nn.Linear(2, 2))
        self.weight = nn.Parameter(torch.ones(2, 2))


def blocks() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), nn.Linear(2, 2, bias=False)
    )


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")


def names_of(model: nn.Module) -> list[str]:
    return [named.name for named in named_tensors(model)]


def file_of(model: nn.Module, scratch: Path) -> SavedFile:
    shards = rank_shards(model, 0, masters=False)
    [file] = weights_of_model(model, shards, scratch, dtype=None, max_shard_size="5GB", kwargs={}).files
    return file


def saved(model: nn.Module, scratch: Path) -> set[str]:
    return set(file_of(model, scratch).tensors)


def test_a_save_has_what_named_parameters_leaves_out(tmp_path: Path) -> None:
    model = blocks()
    vars(model)["named_parameters"] = lambda *_, **__: iter([("mine", model[0].weight)])
    assert saved(model, tmp_path) == set(blocks().state_dict())


@pytest.mark.parametrize("name", ["__metadata__", "\ud800"])
def test_a_name_that_no_file_can_have_is_refused(name: str, tmp_path: Path) -> None:
    model = blocks()
    model.register_parameter(name, nn.Parameter(torch.ones(2)))
    with pytest.raises(UnsupportedError, match="cannot be a name in a safetensors file"):
        lay_out(file_of(model, tmp_path))


def test_names_that_the_module_chooses_for_its_state_dict(tmp_path: Path) -> None:
    model = blocks()
    model[0] = compiled(model[0])
    model.register_state_dict_post_hook(lambda _, state, *__: state.update(mine=state.pop("0._orig_mod.weight")))
    assert saved(model, tmp_path) == {"mine", *blocks().state_dict()} - {"0.weight"}


def test_adapters_of_peft_and_own_modules_that_look_alike() -> None:
    model = nn.Sequential(Holder("base_layer"), nn.Linear(2, 2))
    model = inject_adapter_in_model(LoraConfig(r=1, target_modules=["base_layer"], modules_to_save=["1"]), model)
    assert set(names_of(model)) == {
        *("0.weight", "0.base_layer.weight", "0.base_layer.bias"),
        *("0.base_layer.lora_A.default.weight", "0.base_layer.lora_B.default.weight"),
        *("1.weight", "1.bias", "1.modules_to_save.default.weight", "1.modules_to_save.default.bias"),
    }
    assert plain_name(model, "0.base_layer.base_layer.weight") == "0.base_layer.weight"
    assert dict(named_modules(model))["0.base_layer"] is model[0].base_layer.base_layer


def test_two_tensors_of_one_plain_name_are_an_error(tmp_path: Path) -> None:
    model = inject_adapter_in_model(LoraConfig(r=1, target_modules=["0"]), blocks())
    model[0].weight_of_mine = nn.Parameter(torch.ones(2))
    model[0].base_layer.weight_of_mine = nn.Parameter(torch.ones(2))
    message = r"0\.\S*weight_of_mine and 0\.\S*weight_of_mine would both become 0\.weight_of_mine"
    with pytest.raises(CheckpointError, match=message):
        tensors_of(model)
    with pytest.raises(CheckpointError, match=message):
        saved(model, tmp_path)


def test_a_tied_weight_has_all_of_its_names() -> None:
    model = blocks()
    model[2].weight = model[0].weight
    model[0], model[2] = checkpoint_wrapper(model[0]), compiled(model[2])
    assert next(slot.names for slot in tensors_of(model)) == ["0.weight", "2.weight"]
    assert not [name for name in names_of(model) if re.search("|".join(WORDS), name)]

"""What PEFT's code merges later, layer by layer, are the weights that it merges at once."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn

from lowmem_load import save_model
from lowmem_load.errors import ConfigError, UnsupportedError
from lowmem_load.models.peft import unloaded

pytestmark = pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False but")


def test_layers_that_share_a_weight_are_merged_together() -> None:
    torch.manual_seed(0)
    plain = nn.ModuleDict({"words": nn.Embedding(20, 8), "head": nn.Linear(8, 20, bias=False)})
    plain["head"].weight = plain["words"].weight
    model = get_peft_model(plain, LoraConfig(target_modules=["words", "head"], r=2))
    _, merges = unloaded(model)
    ((parameter,),) = [merge.parameters for merge in merges]
    assert parameter is plain["words"].base_layer.weight
    assert len(merges[0].layers) == 2 and len(merges[0].adapters()) == 4


def test_what_cannot_be_merged_is_refused() -> None:
    with pytest.raises(ConfigError, match="Linear is not a PeftModel"):
        unloaded(nn.Linear(2, 2))
    model = get_peft_model(nn.ModuleDict({"mha": nn.MultiheadAttention(8, 2)}), LoraConfig(target_modules=["mha"]))
    before = [id(module) for module in model.modules()]
    with pytest.raises(UnsupportedError, match=r"LoRA on torch\.nn\.MultiheadAttention"):
        unloaded(model)
    assert before == [id(module) for module in model.modules()]


def test_merging_takes_the_memory_of_a_few_layers(tmp_path: Path) -> None:
    wide = nn.Sequential(*(nn.Linear(1024, 4096, bias=False) for _ in range(12)))
    model = get_peft_model(wide, LoraConfig(target_modules=[str(number) for number in range(12)]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.01)
    report = save_model(model, tmp_path, merge_adapters=True)
    assert report.num_merged == 12
    assert report.peak_memory.anonymous_bytes < 6 * 1024 * 4096 * 4
    saved = load_file(tmp_path / "model.safetensors")
    wanted = model.merge_and_unload().state_dict()
    assert saved.keys() == wanted.keys() and all(torch.equal(saved[name], wanted[name]) for name in wanted)

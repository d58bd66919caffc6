"""What the constructor of a model computes is there after every kind of load: code that comes with a checkpoint."""

import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.integrations import HfDeepSpeedConfig

import lowmem_load
from lowmem_load import UnsupportedError, plan
from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.integrations.install import streaming
from lowmem_load.load.load_model import plan_rank
from tests.parity import FP32
from tests.ranks import run_ranks

CODE = """
import math
import numpy as np
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class TableConfig(PretrainedConfig):
    model_type = "table_lm"

    def __init__(self, hidden_size=16, vocab_size=53, trouble="", **kwargs):
        self.hidden_size, self.vocab_size, self.trouble = hidden_size, vocab_size, trouble
        super().__init__(**kwargs)


class Angles(nn.Module):
    def __init__(self, dim):
        super().__init__()
        steps = torch.outer(torch.arange(32).float(), 1.0 / 10000 ** (torch.arange(dim).float() / dim))
        self.register_buffer("cos", steps.cos(), persistent=False)
        mask = torch.empty(8, 8)
        mask.fill_(float("-inf"))
        self.mask = mask.triu_(1)


class Scaled(nn.Linear):
    def __init__(self, dim):
        super().__init__(dim, 1)
        self.state = {"amax": torch.zeros(3)}
        self.weight.requires_grad_(False)
        self.weight.is_marked = True

    def get_extra_state(self):
        return self.state["amax"]

    def set_extra_state(self, state):
        self.state = {"amax": torch.tensor(state.tolist())}


class TableForCausalLM(PreTrainedModel):
    config_class = TableConfig

    def __init__(self, config, base=1.0, extra=None):
        super().__init__(config)
        self.register_buffer("powers", base ** torch.arange(3.0), persistent=False)
        self.extra = nn.Identity() if extra is None else extra
        dim = config.hidden_size
        self.embed = nn.Embedding(config.vocab_size, dim)
        self.angles = nn.ModuleList([Angles(dim)])
        self.scale = torch.arange(dim).float()
        self.tables = [torch.tensor(np.linspace(0, 1, 4)), {"bias": (torch.ones(2), "name")}]
        self.rates = [rate.item() for rate in torch.arange(4) / 4] + torch.arange(3).tolist()
        self.register_buffer("mean", torch.full((dim,), 0.5))  # the files lack it
        self.register_buffer("steps", torch.zeros(dim))  # the files have it
        self.register_buffer("filled", torch.empty(dim), persistent=False)
        self.register_buffer("turned", torch.arange(6.0).view(2, 3).t(), persistent=False)  # not contiguous
        self.head = nn.Linear(dim, config.vocab_size, bias=False)
        self.score = nn.Linear(dim, 2)  # the files lack it: it is drawn
        self.hidden = [self.score.weight]
        gains = [nn.Parameter(torch.empty(dim)) for _ in range(2)]
        for number, gain in enumerate(gains):
            self.register_parameter(f"gain{number}", gain)
        self.gains = {"gains": gains}
        self.scaled = Scaled(dim)
        torch.Tensor(3).uniform_()  # as wav2vec2 does, also where parameters are on meta
        if config.trouble == "large":
            self.register_buffer("too_large", torch.zeros(1 << 25), persistent=False)
        if config.trouble == "random":
            self.angles[0].noise = [torch.randn(3)]
        if config.trouble == "numpy":
            self.angles[0].noise = [torch.zeros(2), torch.from_numpy(np.random.randn(3))]
            self.register_buffer("draws", torch.tensor(np.random.rand(2)), persistent=False)
        self.post_init()

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            torch.nn.init.normal_(module.weight)
            if module.bias is not None:
                torch.nn.init.zeros_(module.bias)
        if isinstance(module, TableForCausalLM):
            with torch.no_grad():
                module.filled.copy_(torch.arange(module.config.hidden_size))

    def forward(self, input_ids, labels=None, **_):
        states = self.embed(input_ids) * self.angles[0].cos[: input_ids.shape[1]] * self.scale + self.mean
        logits = self.head(states)
        loss = None if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return CausalLMOutput(loss=loss, logits=logits)
"""
REMOTE: dict[str, Any] = {"trust_remote_code": True}
AUTO = "AutoModelForCausalLM"


def make_checkpoint(folder: Path, **config: Any) -> str:
    folder.mkdir()
    (folder / "modeling_table.py").write_text(CODE)
    auto_map = {"AutoConfig": "modeling_table.TableConfig", AUTO: "modeling_table.TableForCausalLM"}
    names = {"model_type": "table_lm", "architectures": ["TableForCausalLM"], "auto_map": auto_map}
    (folder / "config.json").write_text(json.dumps({**names, **config}))
    torch.manual_seed(0)
    tensors = {"embed.weight": torch.randn(53, 16), "head.weight": torch.randn(53, 16), "steps": torch.randn(16)}
    tensors |= {"gain0": torch.randn(16), "gain1": torch.randn(16), "scaled._extra_state": torch.arange(1.0, 4.0)}
    tensors |= {"scaled.weight": torch.randn(1, 16), "scaled.bias": torch.randn(1)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    return make_checkpoint(tmp_path / "table")


def values(model: Any) -> dict[str, torch.Tensor]:
    """All buffers and tensor attributes."""
    bias, _ = model.tables[1]["bias"]
    attributes = {"scale": model.scale, "mask": model.angles[0].mask, "linspace": model.tables[0], "bias": bias}
    attributes |= {"extra state": model.scaled.get_extra_state()}
    return dict(model.named_buffers()) | attributes | {"rates": torch.tensor(model.rates)}


def expected(path: str) -> dict[str, torch.Tensor]:
    """Those of a model that is built with memory, and the one buffer of the files."""
    config = AutoConfig.from_pretrained(path, **REMOTE)
    model = AutoModelForCausalLM.from_config(config, **REMOTE)
    with torch.no_grad():
        model.filled.copy_(torch.arange(16))  # transformers 4 does not initialise the model itself
    files = load_file(f"{path}/model.safetensors")
    return values(model) | {"steps": files["steps"], "extra state": files["scaled._extra_state"]}


def check(model: Any, right: dict[str, torch.Tensor]) -> None:
    found = values(model)
    assert found.keys() == right.keys()
    assert [name for name, value in found.items() if not torch.equal(value.cpu(), right[name])] == []
    assert model.scale.device == model.tables[1]["bias"][0].device == model.mean.device
    assert model.hidden[0] is model.score.weight
    assert list(map(id, model.gains["gains"])) == [id(model.gain0), id(model.gain1)]


def check_flags(model: Any) -> None:
    """As of an ordinary load, not as the constructor has set them."""
    weight = model.scaled.weight
    assert weight.requires_grad and not hasattr(weight, "is_marked")
    assert any("scaled.weight train" in note for note in model.lowmem_load_report.notes)


def load_all(path: str) -> None:
    """Rank function: each kind of load."""
    right = expected(path)

    def models() -> Iterator[Any]:
        yield lowmem_load.load_model(path, FP32, auto_class=AUTO, **REMOTE)
        yield lowmem_load.load_model(path, {**FP32, "zero_optimization": {"stage": 1}}, auto_class=AUTO, **REMOTE)
        with streaming(FP32):
            yield AutoModelForCausalLM.from_pretrained(path, **REMOTE)
        kept = HfDeepSpeedConfig(FP32)
        lowmem_load.install(strict=True)
        yield AutoModelForCausalLM.from_pretrained(path, **REMOTE)
        assert kept.is_zero3()

    with warnings.catch_warnings():
        warnings.simplefilter("error", lowmem_load.FallbackWarning)
        for model in models():
            check(model, right)
            check_flags(model)


def load_on_meshes(path: str) -> None:
    """Rank function: a model that its owner has built on meta and sharded, and one that a mesh shards."""
    dist.init_process_group("gloo")
    right, config = expected(path), AutoConfig.from_pretrained(path, **REMOTE)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(3)
    drawn, after = lowmem_load.lazy(path, auto_class=AUTO, **REMOTE).score.weight, torch.rand(1)
    torch.manual_seed(3)
    model = lowmem_load.load_model(path, mesh=mesh, auto_class=AUTO, dtype=torch.float32, **REMOTE)
    assert torch.equal(torch.rand(1), after)
    assert torch.equal(model.score.weight.full_tensor(), drawn)
    check(model, right)
    check_flags(model)

    extra = nn.Sequential(nn.Linear(4, 4))
    keywords: dict[str, Any] = {"base": 3.0, "extra": extra, **REMOTE}
    model = lowmem_load.load_model(path, mesh=mesh, auto_class=AUTO, dtype=torch.float32, **keywords)
    assert torch.equal(model.powers, torch.tensor([1.0, 3.0, 9.0]))
    assert model.extra[0].weight.full_tensor().shape == (4, 4)

    model = AutoModelForCausalLM.from_config(config, **REMOTE)
    for module in model.modules():  # as if it had been built on meta, which the items of this one forbid
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype, device="meta"))
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.to("meta")))
    model.scale, model.angles[0].mask = model.scale.to("meta"), model.angles[0].mask.to("meta")
    model.tables[0], model.tables[1]["bias"] = model.tables[0].to("meta"), (torch.empty(2, device="meta"), "name")
    model.scaled.bias.requires_grad_(False)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    model.scaled.bias.is_marked = True
    model.hidden, model.gains = [model.score.weight], {"gains": [model.gain0, model.gain1]}
    lowmem_load.load_into(model, path, **REMOTE)
    check(model, right)
    assert not model.scaled.bias.requires_grad and model.scaled.bias.is_marked, "the owner's"


def test_values_of_the_constructor_are_there_under_zero(checkpoint: str) -> None:
    run_ranks(load_all, checkpoint, timeout_s=180)


def test_values_of_the_constructor_are_there_on_meshes(checkpoint: str) -> None:
    run_ranks(load_on_meshes, checkpoint, timeout_s=180)
    assert plan_rank(checkpoint, sharding=(2,), rank=1, world_size=2, auto_class=AUTO, **REMOTE).buffers


@pytest.mark.parametrize(
    ("trouble", "text"),
    [("large", r"too_large \(33554432 elements"), ("random", r"angles\.0\.noise \(made of random numbers")],
)
def test_what_has_no_value_is_refused_by_name(tmp_path: Path, trouble: str, text: str) -> None:
    """Each rank describes the model alike, before anything is read."""
    path = make_checkpoint(tmp_path / trouble, trouble=trouble)
    with pytest.raises(UnsupportedError, match=text):
        plan(path, FP32, rank=0, world_size=2, auto_class=AUTO, **REMOTE)


def load_differing(path: str) -> None:
    """Rank function: what numpy draws on each rank is an error that names it; `install()` leaves it to DeepSpeed."""
    rank = DistributedInterface().rank
    text = r"TableForCausalLM has values of no file that differ between ranks: angles\.0\.noise, draws\. "
    for target in ({"ds_config": FP32}, {"mesh": init_device_mesh("cpu", (dist.get_world_size(),))}):
        np.random.seed(rank)
        with pytest.raises(UnsupportedError, match=text):
            lowmem_load.load_model(path, **target, auto_class=AUTO, **REMOTE)
        np.random.seed(7)
        lowmem_load.load_model(path, **target, auto_class=AUTO, **REMOTE)
    kept = HfDeepSpeedConfig(FP32)
    lowmem_load.install()
    np.random.seed(rank)
    with pytest.warns(lowmem_load.FallbackWarning, match=text):
        AutoModelForCausalLM.from_pretrained(path, **REMOTE)
    assert kept.is_zero3()


def load_differing_parameters(folder: str) -> None:
    """Rank function: each rank would keep its part of what it has itself; DeepSpeed takes all of rank 0."""
    rank, text = DistributedInterface().rank, "has values of no file that differ between ranks: "
    with torch.device("meta"):
        model = nn.ModuleDict({"body": nn.Linear(4, 4), "head": nn.Linear(4, 2)})
    torch.manual_seed(rank)
    model["head"].to_empty(device="cpu").reset_parameters()
    if rank == 0:
        save_file({"body.weight": torch.ones(4, 4), "body.bias": torch.ones(4)}, f"{folder}/own.safetensors")
    dist.barrier()
    with pytest.raises(UnsupportedError, match=rf"ModuleDict {text}head\.bias, head\.weight\. "):
        lowmem_load.load_into(model, f"{folder}/own.safetensors", FP32, skip=["head.weight", "head.bias"])

    small = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)
    plain = LlamaForCausalLM(small)
    state = {name: torch.full_like(tensor, rank) for name, tensor in plain.state_dict().items()}
    kept = HfDeepSpeedConfig(FP32)
    lowmem_load.install()
    with pytest.warns(lowmem_load.FallbackWarning, match=rf"LlamaForCausalLM {text}lm_head\.weight, "):
        loaded = LlamaForCausalLM.from_pretrained(None, config=small, state_dict=state)
    with deepspeed.zero.GatheredParameters(list(loaded.parameters())):
        assert not any(parameter.any() for parameter in loaded.parameters())
    assert kept.is_zero3()


@pytest.mark.parametrize("load", [load_differing, load_differing_parameters])
def test_values_that_differ_between_ranks_are_refused_by_name(tmp_path: Path, load: Callable[[str], None]) -> None:
    run_ranks(load, make_checkpoint(tmp_path / "numpy", trouble="numpy"), timeout_s=180)

"""What load_model, load_into, streaming, plan and get_load_report refuse before anything is read."""

import functools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM

import lowmem_load
from lowmem_load import ConfigError, UnsupportedError, get_load_report, load_model, plan
from lowmem_load.distributed.steps import Alone
from lowmem_load.load.load import Options, find
from lowmem_load.load.load_into import IntoModule
from lowmem_load.models.loader import TransformersCall
from tests import builders

STAGE_3 = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}
STAGE_0 = {"zero_optimization": {"stage": 0}, "train_micro_batch_size_per_gpu": 1}


@pytest.fixture
def llama(checkpoints: Path) -> str:
    return str(builders.tiny_llama(checkpoints))


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_plan_is_for_a_rank_that_there_is(rank: int, world_size: int, llama: str) -> None:
    with pytest.raises(ConfigError, match=f"rank: asked for {rank}, expected 0 <= rank < world_size = {world_size}"):
        plan(llama, STAGE_3, rank=rank, world_size=world_size)


def test_a_plan_of_shards_takes_no_choice_of_partitions(llama: str) -> None:
    sharding = pytest.importorskip("transformers.distributed").DistributedConfig(fsdp_size=2)
    with pytest.raises(ConfigError, match="partition belongs to ZeRO"):
        plan(llama, rank=0, world_size=2, distributed_config=sharding, partition="model.layers.*")


@pytest.mark.parametrize("name", [7, None, ""])
def test_a_name_is_text_or_a_path(name: Any) -> None:
    with pytest.raises(ConfigError, match="name: expected a local folder, a Hub id or a URL"):
        plan(name, STAGE_3, rank=0, world_size=2)


def test_a_class_that_loads_in_its_own_way_has_no_plan(llama: str) -> None:
    class Own(LlamaForCausalLM):  # type: ignore[misc]
        @classmethod
        def from_pretrained(cls, *_: Any, **__: Any) -> nn.Module:
            return nn.Linear(1, 1)

    for load in (functools.partial(plan, ds_config=STAGE_3, rank=0, world_size=2), lowmem_load.lazy):
        with pytest.raises(UnsupportedError, match="its class does not load through transformers' from_pretrained"):
            load(llama, auto_class=Own)


def test_a_model_of_no_files_is_looked_for_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A `from_config` under `install(download=False)`; the Hub has no model that is called like its class."""
    monkeypatch.setattr("lowmem_load.load.load.find_folder", None)
    call = TransformersCall(lambda *_: None, LlamaForCausalLM, (None,), {"config": LlamaConfig(), "state_dict": {}})
    find(call, Options(stream=True), Alone())
    assert call.name == "LlamaForCausalLM"


@pytest.mark.parametrize("keyword", ["tp_plan", "tp_size"])
def test_tensor_parallelism_comes_with_no_other_sharding(llama: str, keyword: str) -> None:
    for ds_config in (STAGE_3, STAGE_0):
        with pytest.raises(ConfigError, match=f"remove {keyword}; the ds_config, mesh or distributed_config shards"):
            plan(llama, ds_config, rank=0, world_size=2, **{keyword: "auto"})


def test_what_transformers_places_by_itself_has_no_plan(llama: str) -> None:
    for device_map in ("cpu", 0):  # 0 is the first GPU
        with pytest.raises(UnsupportedError, match="transformers places this model by itself, so there is nothing"):
            plan(llama, STAGE_0, rank=0, world_size=2, device_map=device_map)
        with pytest.raises(ConfigError, match="device_map and ZeRO-3 both place parameters; remove device_map"):
            plan(llama, STAGE_3, rank=0, world_size=2, device_map=device_map)


@pytest.mark.filterwarnings("ignore:::torch")
def test_weights_of_a_trainer_for_a_model_in_a_subfolder(llama: str, tmp_path: Path, lone_process: None) -> None:
    shutil.copytree(llama, tmp_path / "model" / "sub")
    GenerationConfig(max_length=77).save_pretrained(tmp_path / "model" / "sub")
    state = LlamaForCausalLM.from_pretrained(llama).state_dict()
    dcp.save({"model": state}, checkpoint_id=str(tmp_path / "saved"), no_dist=True)
    how: dict[str, Any] = {"subfolder": "sub", "weights_from": tmp_path / "saved"}
    model = load_model(tmp_path / "model", STAGE_0, num_labels=7, attn_implementation="eager", **how)
    assert (model.config.num_labels, model.config._attn_implementation) == (7, "eager")
    assert model.generation_config.max_length == 77
    assert all(torch.equal(tensor, state[name].to(tensor.dtype)) for name, tensor in model.state_dict().items())


@pytest.mark.filterwarnings("ignore:::torch")
def test_a_distributed_checkpoint_is_read_by_ranges(llama: str, tmp_path: Path, lone_process: None) -> None:
    shutil.copy(Path(llama) / "config.json", tmp_path)
    state = LlamaForCausalLM.from_pretrained(llama).state_dict()
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path), save_distributed=True)
    dcp.save(state, storage_writer=writer, no_dist=True)
    costs = plan(tmp_path, STAGE_3, rank=0, world_size=2).costs
    assert 0 < costs.read_bytes < 0.6 * sum(tensor.nbytes for tensor in state.values())
    model = load_model(tmp_path, STAGE_0)
    assert all(torch.equal(tensor, state[name].to(tensor.dtype)) for name, tensor in model.state_dict().items())


def test_an_ordinary_model_has_no_report(llama: str) -> None:
    with pytest.raises(ValueError, match="LlamaForCausalLM was not loaded by lowmem_load"):
        get_load_report(AutoModelForCausalLM.from_pretrained(llama))


def test_names_are_listed_before_they_are_imported() -> None:
    assert set(lowmem_load.__all__) <= set(dir(lowmem_load))
    with pytest.raises(AttributeError, match="has no attribute 'load_modle'"):
        lowmem_load.load_modle  # noqa: B018


# -- which tensors of a module `load_into` leaves to the caller --------------------------------------------------------


SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 8}


class Norm(nn.Module):
    """A module with an extra state."""

    def get_extra_state(self) -> torch.Tensor:
        return torch.zeros(1)

    def set_extra_state(self, state: Any) -> None:
        pass


class Policy(nn.Module):
    """A transformers model with tied weights, and a head that is to be filled."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.llm = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))
        self.llm.norm = Norm()
        self.value = nn.Linear(2, 1, bias=False)


TIED = {"lm_head.weight", "model.embed_tokens.weight"}


@pytest.mark.parametrize(
    ("leave", "left"),
    [
        ([], set()),
        (["llm.lm_head.weight"], TIED),
        (["model.embed_tokens.weight"], TIED),
        (["llm.model.norm.weight"], {"model.norm.weight"}),
        (["llm.norm._extra_state"], {"norm._extra_state"}),
        (["norm._extra_state"], {"norm._extra_state"}),
    ],
)
def test_what_is_left_is_named_in_the_module_or_in_its_model(leave: list[str], left: set[str]) -> None:
    assert IntoModule(Policy(), "folder", kwargs={}, skip=["value.weight", *leave]).left == left


@pytest.mark.parametrize("unknown", ["lm_head.weigth", "llm.lm_head", "llm.value.weight", "value._extra_state"])
def test_a_name_of_no_tensor_is_refused(unknown: str) -> None:
    with pytest.raises(ConfigError, match=f"skip: the module has no parameter or buffer {unknown}"):
        IntoModule(Policy(), "folder", kwargs={}, skip=["value.weight", unknown])


@pytest.mark.parametrize("how", [{}, {"rename": {}}])
def test_a_text_is_no_collection_of_names(how: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"skip: 'value.weight' is one name; pass .* \['value.weight'\]"):
        IntoModule(Policy(), "folder", kwargs={}, skip="value.weight", **how)

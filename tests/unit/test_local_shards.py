"""What has no values of its own on a rank is refused before anything is written."""

from __future__ import annotations

import json
from pathlib import Path

import deepspeed
import pytest
import torch
import transformers
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim.swa_utils import AveragedModel

from lowmem_load import iter_weights, save_model
from lowmem_load.errors import UnsupportedError
from lowmem_load.partial.partial_engine import PartialEngine
from lowmem_load.planning.regions import FlatRange
from lowmem_load.weights_out.local_shards import local_shards, unwrapped


def test_what_is_whole_is_written_by_rank_0() -> None:
    model = nn.Linear(3, 2)
    for rank, numels in ((0, [[6], [2]]), (1, [[], []])):
        found = local_shards(model, rank, masters=False)
        assert [[span.numel for span in one.mine] for one in found] == numels


def test_a_slice_of_tensor_parallelism_is_refused() -> None:
    model = nn.Linear(3, 2)
    model.weight.tensor_model_parallel = True
    with pytest.raises(UnsupportedError, match=r"^weight: is split by DeepSpeed's tensor parallelism"):
        local_shards(model, 0, masters=False)


def test_experts_of_which_other_ranks_hold_others_are_refused() -> None:
    model = nn.Linear(3, 2)
    model.weight.allreduce, model.weight.group_name = False, "ep_size_1"
    assert local_shards(model, 0, masters=False)
    model.weight.group_name = "ep_size_2"
    with pytest.raises(UnsupportedError, match=r"^weight: is split by DeepSpeed's expert parallelism"):
        local_shards(model, 0, masters=False)


def test_each_rank_writes_its_shard_of_a_dtensor(lone_process: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    model = nn.Linear(3, 2)
    values = model.weight.detach().clone()
    model.weight = nn.Parameter(distribute_tensor(values, init_device_mesh("cpu", (1,))))
    weight = local_shards(model, 0, masters=False)[0]
    assert weight.mine == (FlatRange(0, 6),)
    with weight.memory() as [(memory, first)]:
        assert torch.equal(memory, values.view(-1)) and first == 0


def test_a_tensor_without_values_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"^weight: is on the meta device"):
        local_shards(nn.Linear(3, 2, device="meta"), 0, masters=False)
    model = nn.Module()
    model.register_buffer("sparse", torch.eye(2).to_sparse())
    with pytest.raises(UnsupportedError, match=r"^sparse: is of layout"):
        local_shards(model, 0, masters=False)


def tiny_bert() -> transformers.BertModel:
    sizes = dict(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    return transformers.BertModel(transformers.BertConfig(**sizes, max_position_embeddings=8))


class OwnerConfig(transformers.PretrainedConfig):
    """Of `Owner`."""

    model_type = "owner"


class Owner(transformers.PreTrainedModel):
    """A model whose only child is called `module`."""

    config_class = OwnerConfig

    def __init__(self, config: OwnerConfig) -> None:
        super().__init__(config)
        self.module = tiny_bert()
        self.post_init()


def test_a_model_with_a_child_named_module_is_saved_whole(lone_process: None, tmp_path: Path) -> None:
    model = Owner(OwnerConfig())
    model.save_pretrained(tmp_path / "stock")
    save_model(model, tmp_path / "ours")
    names = sorted(path.name for path in (tmp_path / "stock").iterdir())
    assert sorted(path.name for path in (tmp_path / "ours").iterdir()) == names
    for name in names:
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "stock" / name).read_bytes(), name
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["model_type"] == "owner"
    sent = {name for bucket in iter_weights(model) for name, _ in bucket}
    assert sent == {name for name, _ in model.named_parameters()}


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch's own, in torch.compile
def test_wrappers_are_known_by_class(lone_process: None) -> None:
    model = nn.Linear(3, 2)
    averaged = AveragedModel(model)
    assert unwrapped(averaged) is averaged.module
    parallel = nn.parallel.DistributedDataParallel(model)
    for wrapper in (parallel, nn.DataParallel(model), torch.compile(model), torch.compile(parallel)):
        assert unwrapped(wrapper) is model
    for engine in (deepspeed.DeepSpeedEngine, deepspeed.InferenceEngine, PartialEngine):
        wrapper = engine.__new__(engine)
        nn.Module.__init__(wrapper)
        wrapper.module = parallel
        assert unwrapped(wrapper) is model
    assert isinstance(unwrapped(nn.Sequential(model)), nn.Sequential)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch's own, in torch.compile
def test_a_compiled_model_is_saved_under_its_own_names(lone_process: None, tmp_path: Path) -> None:
    model = tiny_bert()
    save_model(model, tmp_path / "plain")
    save_model(torch.compile(model), tmp_path / "compiled")
    file = "model.safetensors"
    assert (tmp_path / "compiled" / file).read_bytes() == (tmp_path / "plain" / file).read_bytes()


@pytest.mark.filterwarnings("ignore:.*FSDP:UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_fsdp1_is_refused(lone_process: None, tmp_path: Path) -> None:
    model = nn.Sequential(FullyShardedDataParallel(nn.Linear(3, 2), device_id=torch.device("cpu")))
    with pytest.raises(UnsupportedError, match=r"^0: is wrapped by FSDP1 .*use FSDP2"):
        save_model(model, tmp_path)

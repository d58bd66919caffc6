"""What has no values of its own on a rank is refused before anything is written."""

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
from lowmem_load.weights_out.rank_shards import rank_shards, unwrapped
from tests.multi_rank.test_save import equal_folders


def test_what_other_ranks_hold_parts_of_is_refused() -> None:
    model = nn.Linear(3, 2)
    model.weight.tensor_model_parallel = True
    with pytest.raises(UnsupportedError, match=r"^weight: is split by DeepSpeed's tensor parallelism"):
        rank_shards(model, 0, masters=False)
    model = nn.Linear(3, 2)
    model.weight.allreduce, model.weight.group_name = False, "ep_size_1"
    assert rank_shards(model, 0, masters=False)
    model.weight.group_name = "ep_size_2"
    with pytest.raises(UnsupportedError, match=r"^weight: is split by DeepSpeed's expert parallelism"):
        rank_shards(model, 0, masters=False)


def test_a_tensor_without_values_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"^weight: is on the meta device"):
        rank_shards(nn.Linear(3, 2, device="meta"), 0, masters=False)
    model = nn.Module()
    model.register_buffer("sparse", torch.eye(2).to_sparse())
    with pytest.raises(UnsupportedError, match=r"^sparse: is of layout"):
        rank_shards(model, 0, masters=False)


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
    model.save_pretrained(tmp_path / "default")
    save_model(model, tmp_path / "ours")
    equal_folders(tmp_path / "ours", tmp_path / "default")
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


@pytest.mark.filterwarnings("ignore:.*FSDP:UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_fsdp1_is_refused(lone_process: None, tmp_path: Path) -> None:
    model = nn.Sequential(FullyShardedDataParallel(nn.Linear(3, 2), device_id=torch.device("cpu")))
    with pytest.raises(UnsupportedError, match=r"^0: is wrapped by FSDP1 .*use FSDP2"):
        save_model(model, tmp_path)

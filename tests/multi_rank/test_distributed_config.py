"""Models that transformers shards by a `DistributedConfig`, or FSDP2 over a mesh: as after a plain load."""

import inspect
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import lowmem_load
from lowmem_load import ConfigError, RankError, UnsupportedError, get_load_report, install, load_model, plan
from lowmem_load.integrations.install import uninstall
from tests import builders
from tests.model_digest import differing
from tests.multi_rank.test_load_into import losses, shard_fully, start
from tests.multi_rank.test_plan import fp8
from tests.ranks import run_ranks

if not hasattr(transformers.PreTrainedModel, "maybe_distribute_model"):
    pytest.skip("this release of transformers shards no model", allow_module_level=True)

SIZES: dict[int, list[dict[str, Any]]] = {
    2: [{"fsdp_size": 2}, {"tp_size": 2}],
    4: [{"fsdp_size": 2, "dp_replicate_size": 2}, {"fsdp_size": 2, "tp_size": 2}],
}
EXPERTS = {"fsdp_size": 2, "tp_size": 2, "ep_size": 2}


def load_all(paths: list[str], moe: str) -> list[list[Any]]:
    """Rank function: what each load has read."""
    from transformers.distributed import DistributedConfig

    world_size, costs = start(), list[list[Any]]()
    is_early = "dp_replicate_size" not in inspect.signature(DistributedConfig).parameters  # meshes of one dim only
    cases = [(path, sizes) for path in paths for sizes in SIZES[world_size] if len(sizes) == 1 or not is_early]
    for path, sizes in [*cases, *([(moe, EXPERTS)] if world_size == 4 and not is_early else [])]:
        cls = getattr(transformers, transformers.AutoConfig.from_pretrained(path).architectures[0])
        reference = cls.from_pretrained(path, dtype=torch.bfloat16)
        model = load_model(path, distributed_config=DistributedConfig(**sizes), dtype=torch.bfloat16)
        assert differing(model, reference) == [], (path, sizes)
        assert not model.training
        install(strict=True)
        again, info = cls.from_pretrained(
            path, distributed_config=DistributedConfig(**sizes), dtype=torch.bfloat16, output_loading_info=True
        )
        uninstall()
        assert differing(again, reference) == [], (path, sizes)
        assert not info["missing_keys"]
        report = get_load_report(model)
        assert get_load_report(again).read_bytes == report.read_bytes > 0
        costs.append([path, sizes, report.needed_bytes, report.read_bytes, report.num_reads])
    return costs


@pytest.mark.parametrize(("world_size", "is_whole"), [(2, True), (4, False)])
def test_what_transformers_shards_equals_the_ordinary_load(checkpoints: Path, world_size: int, is_whole: bool) -> None:
    moe = str(builders.tiny_mixtral(checkpoints))
    dense = [str(builders.tiny_llama(checkpoints)), str(builders.tiny_qwen2_tied(checkpoints))]
    paths = [*(dense if is_whole else dense[:1]), *([moe] if is_whole else [])]
    for rank, costs in enumerate(run_ranks(load_all, paths, moe, world_size=world_size, timeout_s=240)):
        for path, sizes, *cost in costs:
            config = transformers.distributed.DistributedConfig(**sizes)
            planned = plan(path, distributed_config=config, rank=rank, world_size=world_size, dtype=torch.bfloat16)
            assert [planned.costs.needed_bytes, planned.costs.read_bytes, planned.costs.num_reads] == cost, (
                path,
                sizes,
                rank,
            )


def train_all(path: str) -> None:
    mesh = init_device_mesh("cpu", (start(),))
    for kind in ("fp32", "bf16", "offload"):
        train(path, mesh, kind)


def train(path: str, mesh: Any, kind: str) -> None:
    """Ten steps, after our load and after a plain load that is sharded by `fully_shard`."""
    policy: dict[str, Any] = {}
    if kind == "bf16":
        policy["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if kind == "offload":
        policy["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    model = load_model(path, mesh=mesh, fully_shard_kwargs=policy, dtype=torch.float32)
    plain = type(model).__mro__[2].from_pretrained(path, dtype=torch.float32)
    shard_fully(plain, mesh=mesh, **policy)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    found = losses(model)
    assert found == losses(plain), kind
    assert found[-1] < found[0], kind


class Own(transformers.LlamaForCausalLM):  # type: ignore[misc]
    """Loads in its own way."""

    @classmethod
    def from_pretrained(cls, *_: Any, **__: Any) -> torch.nn.Module:
        return torch.nn.Linear(1, 1)


def refuse(path: str) -> None:
    from transformers.distributed import DistributedConfig

    mesh = init_device_mesh("cpu", (start(),))
    with pytest.raises(ConfigError, match="belong to ZeRO"):
        load_model(path, mesh=mesh, partition=["model"])
    with pytest.raises(ConfigError, match="fully_shard_kwargs"):
        load_model(path, distributed_config=DistributedConfig(fsdp_size=2), fully_shard_kwargs={})
    with pytest.raises(ConfigError, match="mp_policy: is for fully_shard; pass it in fully_shard_kwargs"):
        load_model(path, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    with pytest.raises(UnsupportedError, match="Own: its class does not load through transformers' from_pretrained"):
        load_model(path, {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}, auto_class=Own)
    with pytest.raises(UnsupportedError, match=r"llama.*: its class does not load through"):
        load_model(path, mesh=mesh, auto_class=Own)
    rank = dist.get_rank()
    with pytest.raises(RankError, match="has fully_shard_kwargs reshard_after_forward True"):
        load_model(path, mesh=mesh, fully_shard_kwargs={"reshard_after_forward": bool(rank)})
    policy = {"shard_placement_fn": lambda _: None}  # at another address on each rank
    assert get_load_report(load_model(path, mesh=mesh, fully_shard_kwargs=policy)).read_bytes
    if "pp_size" in inspect.signature(DistributedConfig).parameters:
        with pytest.raises(UnsupportedError, match="pp_size > 1"):
            load_model(path, distributed_config=DistributedConfig(pp_size=2))


def load_installed(path: str) -> None:
    """Rank function: an unchanged script under `install()`."""
    from transformers.distributed import DistributedConfig

    start()
    seen: list[Any] = []
    lowmem_load.install(on_load=seen.append)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, distributed_config=DistributedConfig(fsdp_size=2))
    lowmem_load.integrations.install.uninstall()
    reference = transformers.AutoModelForCausalLM.from_pretrained(path)
    assert differing(model, reference) == []
    assert seen == [get_load_report(model)]
    lowmem_load.install()
    began_s = time.monotonic()
    with pytest.raises(RankError, match=r"rank 0: CheckpointError: .*absent: no such folder"):
        transformers.MixtralForCausalLM.from_pretrained(
            path if dist.get_rank() else f"{path}/absent", distributed_config=DistributedConfig(fsdp_size=2)
        )
    assert time.monotonic() - began_s < 10, "no rank waits for rank 0"
    lowmem_load.integrations.install.uninstall()


@pytest.mark.parametrize(
    ("check", "build"),
    [(train_all, builders.tiny_llama), (refuse, builders.tiny_llama), (load_installed, builders.tiny_mixtral)],
)
def test_sharded_loads(check: Callable[[str], None], build: Callable[[Path], Path], checkpoints: Path) -> None:
    run_ranks(check, str(build(checkpoints)), timeout_s=120)


def load_dequantized(path: str, options: dict[str, Any]) -> list[int]:
    """Rank function: an fp8 checkpoint, dequantized while transformers' shards are filled; what was read."""
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(fsdp_size=start())
    try:
        reference = transformers.LlamaForCausalLM.from_pretrained(path, dtype=torch.bfloat16, **options)
    except AttributeError:  # transformers 5.16: its own load looks into a tp_plan that is None
        return []
    model = load_model(path, config, dtype=torch.bfloat16, **options)
    assert differing(model, reference) == []
    return [get_load_report(model).read_bytes, get_load_report(model).num_reads]


def test_an_fp8_checkpoint_is_dequantized_into_shards(checkpoints: Path, tmp_path: Path) -> None:
    folder, options = fp8(checkpoints, tmp_path)
    costs = run_ranks(load_dequantized, str(folder), options, world_size=2)
    if not all(costs):
        pytest.skip("an ordinary load of this transformers fails, too")
    for rank, cost in enumerate(costs):
        config = transformers.distributed.DistributedConfig(fsdp_size=2)
        planned = plan(folder, distributed_config=config, rank=rank, world_size=2, dtype=torch.bfloat16, **options)
        assert [planned.costs.read_bytes, planned.costs.num_reads] == cost


def load_others(adapter: str, base: str, without: str, weights: str) -> None:
    """Rank function: an adapter, and a training checkpoint of a model of which only the configuration is there."""
    from transformers.distributed import DistributedConfig

    mesh, cls = init_device_mesh("cpu", (start(),)), transformers.LlamaForCausalLM
    with pytest.raises(UnsupportedError, match="is an adapter; load the base model"):
        load_model(adapter, mesh=mesh, auto_class=cls)
    if not transformers.__version__.startswith("5.19."):  # which takes the shapes of shards for those of the files
        reference = cls.from_pretrained(adapter, distributed_config=DistributedConfig(fsdp_size=2))
        install()
        with pytest.warns(lowmem_load.FallbackWarning, match="is an adapter; load the base model"):
            model = cls.from_pretrained(adapter, distributed_config=DistributedConfig(fsdp_size=2))
        uninstall()
        assert differing(model, reference) == []

    expected = cls.from_pretrained(base)
    for name in (base, without):
        for sharding in ({"mesh": mesh}, {"distributed_config": DistributedConfig(fsdp_size=2)}):
            model = load_model(name, auto_class=cls, weights_from=weights, **sharding)
            assert {parameter.dtype for parameter in model.parameters()} == {expected.dtype}, name
            assert differing(model, expected) == [], name


@pytest.mark.filterwarnings("ignore")
def test_adapters_fall_back_and_weights_of_a_trainer_need_a_configuration_alone(
    checkpoints: Path, tmp_path: Path
) -> None:
    base = builders.tiny_llama(checkpoints)
    model = transformers.LlamaForCausalLM.from_pretrained(base)
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "dcp")
    config = json.loads((base / "config.json").read_text())
    assert config.pop("dtype")  # so it is that of the weights
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text(json.dumps(config))
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    paths = (tmp_path / "adapter", base, tmp_path / "config", tmp_path / "dcp")
    run_ranks(load_others, *map(str, paths), timeout_s=120)

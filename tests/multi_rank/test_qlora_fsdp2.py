"""QLoRA under FSDP2: shards of packed weights, their quantization states, and training, as by default.

The default loader packs or keeps full weights on every rank until `fully_shard` cuts them up.
"""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import lowmem_load
from lowmem_load import ConfigError, UnsupportedError, get_load_report, load_into, load_model
from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.load import execute
from lowmem_load.load.load_model import plan_rank
from lowmem_load.symbolic.lazy import is_unread
from tests import builders
from tests.multi_rank.test_accelerate_fsdp2 import ENVIRONMENT, prepare
from tests.multi_rank.test_load_into import losses, shard_fully, start
from tests.ranks import run_ranks

bnb = pytest.importorskip("bitsandbytes")

SIZES = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 8, "hidden_size": 30, "intermediate_size": 74}
"""None of the weights does 2, 4 or 64 divide when packed."""

FIGURES = ("partition_bytes", "whole_bytes", "read_bytes", "num_reads")
"""Of a load: attributes of a `LoadReport`."""


def quantization(kind: str = "nf4", *, double: bool = True, storage: torch.dtype = torch.bfloat16) -> Any:
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=double,
        bnb_4bit_quant_storage=storage,
    )


def loaded_by_default(path: str, **kwargs: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, **kwargs)


def assert_same(model: nn.Module, expected: nn.Module, what: object) -> int:
    """All parameters of a sharded model, packed ones included, and all quantization states equal those of another."""
    ours, theirs = whole(model), whole(expected)
    assert ours.keys() == theirs.keys(), what
    for name, values in theirs.items():
        assert ours[name].dtype == values.dtype, (what, name)
        assert torch.equal(ours[name].view(torch.uint8), values.view(torch.uint8)), (what, name)
    states = {name: module.quant_state for name, module in expected.named_modules() if hasattr(module, "quant_state")}
    for name, state in states.items():
        left, right = model.get_submodule(name).quant_state.as_dict(), state.as_dict()
        assert left.keys() == right.keys(), (what, name)
        for key, value in right.items():
            same = torch.equal(left[key], value) if isinstance(value, torch.Tensor) else left[key] == value
            assert same, (what, name, key)
    return len(states)


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    named = model.named_parameters()
    return {name: (p.full_tensor() if isinstance(p, DTensor) else p.data).contiguous() for name, p in named}


def losses_of_adapters(model: nn.Module) -> list[float]:
    """Of training what is not packed."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = losses(model, 5, torch.optim.AdamW(trained, lr=1e-2))
    assert len(set(found)) == 5
    return found


def owned(path: str, mesh: Any, **kwargs: Any) -> nn.Module:
    """Do what docs/howto/quantized.md says of a model that its owner shards."""
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear

    config = transformers.AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    replace_with_bnb_linear(model, ["lm_head"], kwargs["quantization_config"])
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            numel = module.weight.numel() // 2 // module.quant_storage.itemsize
            packed = torch.empty(numel, 1, dtype=module.quant_storage, device="meta")
            module.weight = nn.Parameter(packed, requires_grad=False)
    shard_fully(model, mesh=mesh)
    model.to_empty(device="cpu")
    lowmem_load.load_into(model, path, **kwargs)
    return model


def compare(path: str, packed: str) -> dict[str, int]:
    """Rank function: models over a mesh, packed at load and in the file; what the first load has read and holds."""
    world_size = DistributedInterface().world_size
    mesh = init_device_mesh("cpu", (world_size,))
    kinds = [quantization("nf4", double=True), quantization("fp4", double=False)]
    loads = [(path, {"quantization_config": kind}) for kind in kinds] + [(packed, {})]
    figures: dict[str, int] = {}
    for number, (name, kwargs) in enumerate(loads):
        expected = loaded_by_default(name, **kwargs)
        execute.BATCH_BYTES = 1000 if number else 16 << 20  # several batches, one of which is too large
        model = load_model(name, mesh=mesh, dtype=torch.bfloat16, **kwargs)
        num_states = assert_same(model, expected, kwargs)
        report = get_load_report(model)
        assert report.num_quantized == num_states > 0
        assert model.is_loaded_in_4bit and model.hf_quantizer.pre_quantized == (name == packed)
        assert report.slow_paths == []
        if number == 0:
            figures = {name: getattr(report, name) for name in FIGURES}
            assert_same(owned(name, mesh, **kwargs), expected, "load_into")
        shard_fully(expected, mesh=mesh)
        assert losses_of_adapters(model) == losses_of_adapters(expected), kwargs
    return figures


def pack(path: str, folder: str) -> None:
    """Rank function: makes the packed checkpoint."""
    loaded_by_default(path, quantization_config=quantization(double=True)).save_pretrained(folder)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_shards_and_training_equal_the_default(family: str, checkpoints: Path) -> None:
    world_size = 4 if family == "llama" else 2
    if family == "llama":
        path = str(builders.tiny_llama(checkpoints, **SIZES))
    else:  # a kernel of its experts needs rows of whole 16 bytes
        path = str(builders.tiny_qwen3_moe(checkpoints, **{**SIZES, "hidden_size": 40}))
    packed = str(checkpoints / f"packed_{family}")
    run_ranks(pack, path, packed, world_size=1)
    figures = run_ranks(compare, path, packed, world_size=world_size, timeout_s=180)
    how: dict[str, Any] = {"world_size": world_size, "dtype": torch.bfloat16}
    for rank in (0, world_size - 1):
        plan = plan_rank(path, sharding=[world_size], rank=rank, quantization_config=quantization(), **how)
        whole_bytes = plan.replicated_bytes + plan.companion_bytes
        planned = plan.partition_bytes, whole_bytes, plan.costs.read_bytes, plan.costs.num_reads
        assert planned == tuple(figures[rank].values())
        assert plan_rank(packed, sharding=[world_size], rank=rank, **how).partition_bytes == plan.partition_bytes


def compare_prepared(path: str, packed: str) -> None:
    """Rank function: adapters on models that accelerate shards, under `install` and without."""
    import peft

    def adapted(name: str, **kwargs: Any) -> nn.Module:
        model = peft.prepare_model_for_kbit_training(
            loaded_by_default(name, **kwargs), use_gradient_checkpointing=False
        )
        torch.manual_seed(0)
        lora = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights="gaussian")
        return peft.get_peft_model(model, lora)

    start()
    warnings.simplefilter("error", lowmem_load.FallbackWarning)
    loads = [
        (path, {"quantization_config": quantization("nf4", double=True)}),
        (path, {"quantization_config": quantization("fp4", double=False)}),
        (path, {"quantization_config": quantization(storage=torch.uint8)}),  # accelerate leaves these whole
        (packed, {}),
    ]
    for name, kwargs in loads:
        expected = prepare(adapted(name, **kwargs), efficient=True, mixed_precision="bf16")
        lowmem_load.install()
        ours = adapted(name, **kwargs)
        bits = [parameter for parameter in ours.parameters() if isinstance(parameter, bnb.nn.Params4bit)]
        assert len(bits) == 14 and all(map(is_unread, bits)), kwargs
        ours = prepare(ours, efficient=True, mixed_precision="bf16")
        lowmem_load.integrations.install.uninstall()
        assert_same(ours, expected, kwargs)
        assert losses_of_adapters(ours) == losses_of_adapters(expected), kwargs


@pytest.mark.filterwarnings("ignore")
def test_what_accelerate_prepares_equals_the_default(checkpoints: Path) -> None:
    path, packed = str(builders.tiny_llama(checkpoints, **SIZES)), str(checkpoints / "packed_for_accelerate")
    run_ranks(pack, path, packed, world_size=1)
    run_ranks(compare_prepared, path, packed, world_size=2, env=ENVIRONMENT, timeout_s=180)


def refuse(path: str, even: str, odd: str) -> None:
    """Rank function: what the bytes would not survive."""
    from transformers.distributed import DistributedConfig

    mesh = init_device_mesh("cpu", (DistributedInterface().world_size,))
    policy = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
    bits = quantization(storage=torch.float32)
    with pytest.raises(ConfigError, match=r"q_proj.weight: .* as torch.float32, and FSDP2 would cast them to torch.b"):
        load_model(even, mesh=mesh, dtype=torch.float32, fully_shard_kwargs=policy, quantization_config=bits)
    with pytest.raises(UnsupportedError, match=r"q_proj.weight: has the shape \(18, 15\), and so 135 bytes in 4 bits"):
        load_model(odd, mesh=mesh, dtype=torch.bfloat16, quantization_config=quantization())
    for sizes in ({"fsdp_size": 2}, {"tp_size": 2}):
        with pytest.raises(UnsupportedError, match=r"q_proj.weight: was sharded .* pass a DeviceMesh, not a Distr"):
            load_model(
                even,
                distributed_config=DistributedConfig(**sizes),
                dtype=torch.bfloat16,
                quantization_config=quantization(),
            )
    with torch.device("meta"):
        config = transformers.AutoConfig.from_pretrained(path)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    shard_fully(model, mesh=mesh)
    model.to_empty(device="cpu")
    with pytest.raises(UnsupportedError, match=r"q_proj.weight: stays packed as \(180, 1\) of torch.bfloat16"):
        load_into(model, path, quantization_config=quantization())


def test_what_fsdp2_would_spoil_is_refused(checkpoints: Path) -> None:
    paths = [builders.tiny_llama(checkpoints, **sizes) for sizes in (SIZES, {}, builders.ODD_SIZES)]
    run_ranks(refuse, *map(str, paths), world_size=2)

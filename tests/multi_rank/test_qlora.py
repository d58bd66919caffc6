"""QLoRA under ZeRO-3: what ranks hold of 4-bit weights, and training adapters on them, as by default.

The default loader keeps them in full on every rank until `deepspeed.initialize` cuts them up.
"""

from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers.integrations import HfDeepSpeedConfig, unset_hf_deepspeed_config

from lowmem_load import RankError, get_load_report, install, load_model, plan
from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.integrations.install import uninstall
from lowmem_load.load import execute
from tests import builders
from tests.parity import ADAM, BF16
from tests.parity import train as steps_of
from tests.ranks import run_ranks

pytest.importorskip("bitsandbytes")

CONFIG = {**BF16, **ADAM}
KINDS: dict[str, dict[str, Any]] = {
    "packed at load": {"bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": torch.bfloat16},
    "scales quantized": {
        "bnb_4bit_quant_type": "fp4",
        "bnb_4bit_quant_storage": torch.bfloat16,
        "bnb_4bit_use_double_quant": True,
    },
    "stored as bytes": {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
}
TRAINED = ("scales quantized", "packed")
"""One of each storage, one of each way to load."""


def quantization(kind: str) -> Any:
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16, **KINDS[kind])


def loads(path: str, packed: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return folder and keywords of each load that is compared."""
    return {kind: (path, {"quantization_config": quantization(kind)}) for kind in KINDS} | {"packed": (packed, {})}


def pack(path: str, folder: str) -> None:
    """Rank function: makes the packed checkpoint."""
    config = quantization("stored as bytes")
    AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, quantization_config=config).save_pretrained(folder)


def compare(path: str, packed: str) -> None:
    """Rank function: this rank's bytes of each parameter are those of the default loader's full one."""
    group = DistributedInterface()
    for kind, (folder, kwargs) in loads(path, packed).items():
        model = load_model(folder, BF16, **kwargs)
        default = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **kwargs).named_parameters())
        for name, parameter in model.named_parameters():
            theirs = default[name].data.flatten()
            size = parameter.ds_tensor.ds_numel
            assert size == -(-theirs.numel() // group.world_size), (kind, name)
            mine = theirs[group.rank * size : (group.rank + 1) * size]
            ours = parameter.ds_tensor.data
            assert torch.equal(ours[: mine.numel()].view(torch.uint8), mine.view(torch.uint8)), (kind, name)
            assert not ours[mine.numel() :].view(torch.uint8).any(), (kind, name)
            assert type(parameter) is type(default[name]) and parameter.numel() == 0, (kind, name)
            if hasattr(default[name], "quant_state"):
                assert parameter.quant_state == default[name].quant_state, (kind, name)
        assert get_load_report(model).num_quantized == 14, kind
        planned = plan(folder, BF16, rank=group.rank, world_size=group.world_size, **kwargs)
        assert planned.replicated_bytes + planned.companion_bytes == get_load_report(model).whole_bytes, kind
        assert planned.costs.read_bytes == get_load_report(model).read_bytes, kind


def train(path: str, packed: str) -> dict[str, Any]:
    """Rank function: losses and adapters of default loads and of ours, by kind.

    install() loads the packed checkpoint, with adapters as PEFT makes them if it is not told otherwise.
    """
    from peft import LoraConfig, get_peft_model

    DistributedInterface()
    found: dict[str, Any] = {}
    for kind in TRAINED:
        folder, kwargs = loads(path, packed)[kind]
        for method in ("default", "ours"):
            is_installed = kind == "packed" and method == "ours"
            if is_installed:
                install()
            if method == "default" or is_installed:
                alive = HfDeepSpeedConfig(CONFIG)
                model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **kwargs)
                del alive
                unset_hf_deepspeed_config()
            else:
                model = load_model(folder, CONFIG, **kwargs)
            partitioned = sum(hasattr(parameter, "ds_id") for parameter in model.parameters())
            torch.manual_seed(0)
            lora = LoraConfig(r=2, target_modules="all-linear", init_lora_weights="gaussian", task_type="CAUSAL_LM")
            model = get_peft_model(model, lora, autocast_adapter_dtype=kind == "packed").train()
            engine, *_ = deepspeed.initialize(model=model, config=CONFIG)
            uninstall()
            found[f"{kind}, {method}"] = partitioned, steps_of(engine, 3), adapter(model)
            engine.destroy()
    return found


def adapter(model: Any) -> dict[str, torch.Tensor]:
    from peft import get_peft_model_state_dict

    with deepspeed.zero.GatheredParameters([p for name, p in model.named_parameters() if "lora_" in name]):
        return {name: value.float().clone() for name, value in get_peft_model_state_dict(model).items()}


@pytest.fixture(scope="module")
def checkpoint(checkpoints: Path) -> str:
    """None of its weights does 2, 3 or 64 divide when packed."""
    sizes = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 8}
    return str(builders.tiny_llama(checkpoints, hidden_size=30, intermediate_size=74, **sizes))


@pytest.fixture(scope="module")
def packed(checkpoint: str, checkpoints: Path) -> str:
    folder = str(checkpoints / "packed")
    run_ranks(pack, checkpoint, folder, world_size=1)
    return folder


def fail_and_compare(path: str, packed: str) -> None:
    """Rank function: after a failure of one rank, the script's collectives and the next load meet none of the load."""

    def fail(*args: Any, **keywords: Any) -> None:
        raise MemoryError("there is no memory")

    for owner, name in ((execute, "fill_planned"), (execute, "_in_parts"), (execute.SideGroup, "broadcast")):
        with pytest.MonkeyPatch.context() as patches:
            if DistributedInterface().rank == 1:
                patches.setattr(owner, name, fail)
            with pytest.raises(RankError, match="there is no memory"):
                load_model(path, BF16, quantization_config=quantization("scales quantized"))
        ones = torch.ones(1)
        dist.all_reduce(ones)
        assert ones.item() == 3
    compare(path, packed)


def test_ranks_hold_their_partitions_of_what_the_default_loader_keeps_in_full_even_after_a_failure(
    checkpoint: str, packed: str
) -> None:
    run_ranks(fail_and_compare, checkpoint, packed, world_size=3, timeout_s=240)


def test_adapters_train_as_by_default(checkpoint: str, packed: str) -> None:
    results = run_ranks(train, checkpoint, packed, world_size=2, timeout_s=300)
    for found in results:
        for kind in TRAINED:
            default, ours = found[f"{kind}, default"], found[f"{kind}, ours"]
            assert (default[0], ours[0]) == (0, 21), kind
            assert len(set(default[1])) == 3 and ours[1] == default[1], kind
            assert len(default[2]) == 28 and list(ours[2]) == list(default[2]), kind
            assert all(torch.equal(ours[2][name], value) for name, value in default[2].items()), kind

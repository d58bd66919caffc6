"""accelerate's FSDP2 under `install()`: unchanged calls, without a full copy on any rank and without a broadcast."""

from __future__ import annotations

import copy
import inspect
import os
import sys
import types
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate.utils import FullyShardedDataParallelPlugin
from packaging.version import Version
from torch import nn

import lowmem_load
from lowmem_load import NotStreamedWarning, UnsupportedError
from lowmem_load.integrations.accelerate_fsdp2 import _needs_weights
from tests import builders
from tests.multi_rank.test_load_into import TRAINS_ON_CPU, losses, start
from tests.ranks import run_ranks

PARTS_TIED = Version(version("accelerate")) < Version("1.15")
"""accelerate then made two parameters of tied ones in fsdp2_prepare_model; behind `install()` they stay tied."""

if "fsdp_version" not in inspect.signature(FullyShardedDataParallelPlugin).parameters:
    pytest.skip("this release of accelerate has no FSDP2", allow_module_level=True)

ENVIRONMENT = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
LORA: dict[str, dict[str, Any]] = {
    "lora": {"init_lora_weights": False},
    "lora, head": {"modules_to_save": ["lm_head", "embed_tokens"]},
    "lora, dora": {"use_dora": True},
    "lora, pissa": {"init_lora_weights": "pissa"},
}
WHOLE = {
    "lora, dora": "LORA adapter",
    "lora, pissa": "LORA adapter",
    "run": "its forward",
    "moved": "to a device",
}
"""What of these loads the whole model before it is sharded, as the warning has it."""


def prepare(model: nn.Module, *, efficient: bool, mixed_precision: str = "no", checkpointed: bool = False) -> nn.Module:
    """What `Accelerator.prepare` does with a model. accelerate itself chooses no FSDP on CPU ranks."""
    import accelerate.utils.fsdp_utils as fsdp_utils
    from accelerate import PartialState

    PartialState(cpu=True)  # for accelerate's logger
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, cpu_ram_efficient_loading=efficient, auto_wrap_policy="transformer_based_wrap"
    )
    accelerator = types.SimpleNamespace(
        state=types.SimpleNamespace(fsdp_plugin=plugin),
        device=torch.device("cpu"),
        mixed_precision=mixed_precision,
        is_main_process=torch.distributed.get_rank() == 0,
        torch_device_mesh=None,
    )
    if checkpointed:  # `Accelerator.prepare` does so before
        plugin.set_auto_wrap_policy(model)
        model = fsdp_utils.fsdp2_apply_ac(accelerator, model)
    return fsdp_utils.fsdp2_prepare_model(accelerator, model)


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    from torch.distributed.tensor import DTensor

    held = [*model.named_parameters(), *model.named_buffers()]
    return {name: (each.full_tensor() if isinstance(each, DTensor) else each).detach() for name, each in held}


def from_files(path: str, kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "missing":
        return transformers.LlamaForSequenceClassification.from_pretrained(path, dtype=torch.bfloat16, num_labels=3)
    if kind == "from_config":
        return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(path))
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    model.generation_config.eos_token_id = 3
    if kind.startswith("resized"):
        model.resize_token_embeddings(model.config.vocab_size + 7)
    if kind == "given memory" and torch.distributed.get_rank() > 0:
        give_memory(model)
    if kind == "axolotl":
        sys.modules["axolotl.train"].materialize_trainable_meta_params(model)
    if kind == "copied":
        model = copy.deepcopy(model)
    if kind == "run":
        model(torch.tensor([[1, 2]]))
    if kind == "moved":
        model.to("cpu") if os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "True" else model.cpu()
    if kind in LORA:
        import peft

        config = peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], **LORA[kind]})
        model = peft.get_peft_model(model, config)
    return model


def give_memory(model: nn.Module) -> None:
    """axolotl's function of this name, in short. It runs on all ranks where some parameters are frozen."""
    for module in model.modules():
        for name, each in list(module.named_parameters(recurse=False)):
            if each.is_meta:
                setattr(module, name, nn.Parameter(torch.zeros_like(each, device="cpu")))


def compare(path: str, kind: str) -> None:
    """Rank function: stock and ours, then training."""
    start()
    sys.modules["axolotl.train"] = types.ModuleType("axolotl.train")
    sys.modules["axolotl.train"].materialize_trainable_meta_params = give_memory  # type: ignore[attr-defined]
    warnings.simplefilter("always", NotStreamedWarning)
    # Before transformers 5 only the first rank has weights with efficient loading: stock's PiSSA computes with garbage.
    is_stock_able = kind != "lora, pissa" or Version(transformers.__version__) >= Version("5")
    for efficient in (True, False) if is_stock_able else (False,):
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = str(efficient)  # the launcher sets it, and stock loads by it
        precision = "no" if kind in LORA else "bf16"
        how: Any = {"efficient": efficient, "mixed_precision": precision, "checkpointed": kind == "checkpointed"}
        stock = prepare(from_files(path, kind), **how)
        lowmem_load.install()
        with warnings.catch_warnings(record=True) as seen:
            pending = from_files(path, kind)
        said = [str(each.message) for each in seen if issubclass(each.category, NotStreamedWarning)]
        assert [WHOLE[kind] in text for text in said] == ([True] if kind in WHOLE else []), said
        is_pending = hasattr(pending, "lowmem_load_pending") or any(each.is_meta for each in pending.parameters())
        assert is_pending == (kind not in WHOLE and kind != "from_config")
        ours = prepare(pending, **how)
        lowmem_load.integrations.install.uninstall()
        expected, found = whole(stock), whole(ours)
        parted = expected.keys() - found.keys()
        assert found.keys() <= expected.keys()
        assert not parted or (parted == {"lm_head.weight"} and PARTS_TIED), parted
        for name, tensor in found.items():
            assert tensor.dtype == expected[name].dtype, name
            assert torch.equal(tensor, expected[name]), (name, kind, efficient)
        if kind == "checkpointed":
            assert any("_checkpoint_wrapped_module" in name for name, _ in ours.named_modules())
        if kind == "plain":
            assert ours.generation_config.eos_token_id == 3
            assert not TRAINS_ON_CPU or losses(ours, 3) == losses(stock, 3)


@pytest.mark.parametrize(
    "kind",
    [
        "plain",
        "tied",
        "missing",
        "from_config",
        "resized",
        "resized, tied",
        "copied",
        "checkpointed",
        "given memory",
        "axolotl",
        "fp32",
        *LORA,
        "run",
        "moved",
    ],
)
def test_what_accelerate_prepares_equals_stock(checkpoints: Path, kind: str) -> None:
    path = builders.tiny_qwen2_tied(checkpoints) if "tied" in kind else builders.tiny_llama(checkpoints)
    if kind == "fp32":
        path = builders.tiny_llama(checkpoints, torch.float32)
    run_ranks(compare, str(path), kind, env=ENVIRONMENT, timeout_s=120)


def refuse_changes(path: str) -> None:
    """Rank function: values that would be lost are an error."""
    start()
    for name in [name for name in sys.modules if name.partition(".")[0] == "peft"]:
        del sys.modules[name]
    lowmem_load.install()
    model = from_files(path, "plain")
    assert not any(name.startswith("peft.") for name in sys.modules)  # it takes longer to import than a load takes
    torch.nn.init.zeros_(model.lm_head.weight)
    with pytest.raises(UnsupportedError, match=r"lm_head.weight changed before FSDP2"):
        prepare(model, efficient=True)


def test_changes_of_a_pending_model_are_refused(checkpoints: Path) -> None:
    run_ranks(refuse_changes, str(builders.tiny_llama(checkpoints)), env=ENVIRONMENT)


def refuse_unverified(path: str) -> None:
    """Rank function: what would be read by stock cannot be verified."""
    start()
    lowmem_load.install(verify=True)
    model = from_files(path, "plain")
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="its forward needs its weights before FSDP2 has sharded it"):
            model(torch.tensor([[1, 2]]))


def test_what_is_needed_before_sharding_cannot_be_verified(checkpoints: Path) -> None:
    run_ranks(refuse_unverified, str(builders.tiny_llama(checkpoints)), env=ENVIRONMENT)


class Wrapper(nn.Module):
    """A model with state of its own beside it. On meta it has none, but for what accelerate keeps."""

    def __init__(self, base: nn.Module, device: str) -> None:
        super().__init__()
        self._no_split_modules = base._no_split_modules
        self.base = base
        self.register_buffer("mean", torch.full((2, 3), 1.5).T, persistent=False)
        self.register_buffer("count", torch.tensor(7, device=device))
        self.register_buffer("again", self.count)


def keep_buffers(path: str) -> None:
    """Rank function: buffers beside the model keep rank 0's values."""
    start()
    lowmem_load.install()
    device = "cpu" if torch.distributed.get_rank() == 0 else "meta"
    ours = prepare(Wrapper(from_files(path, "plain"), device), efficient=True)
    lowmem_load.integrations.install.uninstall()
    assert torch.equal(ours.mean, torch.full((3, 2), 1.5))
    assert ours.count.item() == ours.again.item() == 7
    expected = from_files(path, "plain").model.rotary_emb.inv_freq
    assert torch.equal(ours.base.model.rotary_emb.inv_freq, expected)


def refuse_garbage(path: str) -> None:
    """Rank function: a head on meta would become memory without values."""
    start()
    lowmem_load.install()
    model = Wrapper(from_files(path, "plain"), "cpu")
    model.head = nn.Linear(4, 2, device=model.base.device)
    with pytest.raises(
        UnsupportedError, match=r"Wrapper: no file fills head\.weight, head\.bias; make them on the CPU"
    ):
        prepare(model, efficient=True)


def test_parameters_beside_a_pending_model_need_values(checkpoints: Path) -> None:
    run_ranks(refuse_garbage, str(builders.tiny_llama(checkpoints)), env=ENVIRONMENT)


def test_buffers_beside_a_pending_model_are_kept(checkpoints: Path) -> None:
    run_ranks(keep_buffers, str(builders.tiny_llama(checkpoints)), env=ENVIRONMENT)


@pytest.mark.parametrize(("kind", "is_plain"), [("LORA", True), ("ADALORA", True), ("RANDLORA", False)])
def test_only_plain_lora_needs_no_weights(kind: str, is_plain: bool) -> None:
    config = types.SimpleNamespace(peft_type=f"PeftType.{kind}", **({"init_lora_weights": True} if is_plain else {}))
    assert _needs_weights(config) is not is_plain


def load_for_trainer(path: str, folder: str) -> None:
    """Rank function: nothing but TrainingArguments asks for FSDP2."""
    start()
    lowmem_load.install()
    arguments = transformers.TrainingArguments(folder, fsdp=True, fsdp_config={"fsdp_version": 2}, use_cpu=True)
    pending = from_files(path, "plain")
    assert all(parameter.is_meta for parameter in pending.parameters())
    arguments.fsdp_plugin_args["fsdp_version"] = 1
    assert not any(parameter.is_meta for parameter in from_files(path, "plain").parameters())


def test_training_arguments_alone_ask_for_fsdp2(checkpoints: Path, tmp_path: Path) -> None:
    if not hasattr(transformers.TrainingArguments, "_process_fsdp_args"):
        pytest.skip("this release sets the environment")
    run_ranks(load_for_trainer, str(builders.tiny_llama(checkpoints)), str(tmp_path))


def train_qlora(path: str, folder: str) -> None:
    """Rank function: 4-bit weights, packed by the load or before, are left to stock, and train as there."""
    import peft

    start()
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "true"
    bits = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_storage=torch.bfloat16)

    def train(name: str, **kwargs: Any) -> list[float]:
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16, **kwargs)
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
        return losses(prepare(adapted, efficient=True, mixed_precision="bf16"), 2)

    if torch.distributed.get_rank() == 0:
        os.environ["ACCELERATE_USE_FSDP"] = "false"
        transformers.AutoModelForCausalLM.from_pretrained(path, quantization_config=bits).save_pretrained(folder)
        os.environ["ACCELERATE_USE_FSDP"] = "true"
    torch.distributed.barrier()
    expected = train(path, quantization_config=bits)
    lowmem_load.install()
    assert train(path, quantization_config=bits) == expected
    with pytest.warns(NotStreamedWarning, match="quantized weights cannot be filled"):
        packed = train(folder)
    lowmem_load.integrations.install.uninstall()
    assert packed == train(folder)
    lowmem_load.install(verify=True)
    with pytest.raises(UnsupportedError, match="quantized weights cannot be filled"):  # stock would not verify
        train(folder)


@pytest.mark.filterwarnings("ignore")
def test_qlora_is_left_to_stock(checkpoints: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    run_ranks(
        train_qlora, str(builders.tiny_llama(checkpoints)), str(tmp_path / "packed"), env=ENVIRONMENT, timeout_s=120
    )


def map_optimizer(path: str) -> None:
    """Rank function: accelerate tells the parameters of an optimizer by their addresses."""
    start()
    lowmem_load.install()
    model = from_files(path, "plain")
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    assert len(set(addresses)) == len(addresses)
    assert 0 not in addresses


def test_parameters_of_a_pending_model_can_be_told_apart(checkpoints: Path) -> None:
    run_ranks(map_optimizer, str(builders.tiny_llama(checkpoints)), env=ENVIRONMENT)


def shard_as_trl(path: str) -> None:
    """Rank function: TRL shards a reference model by `fully_shard` itself."""
    start()
    seen: list[Any] = []
    lowmem_load.install(on_load=seen.append)
    ours = from_files(path, "plain")
    ours.resize_token_embeddings(ours.config.vocab_size)  # reads the embeddings, which is not yet the load
    assert seen == []
    from torch.distributed.fsdp import fully_shard  # as TRL does, in a function

    fully_shard(ours)
    assert seen == [lowmem_load.load_report(ours)]
    lowmem_load.integrations.install.uninstall()
    expected = from_files(path, "plain")
    assert {name: str(tensor.device) for name, tensor in ours.named_parameters() if tensor.is_meta} == {}
    found = whole(ours)
    assert all(torch.equal(found[name], tensor.detach()) for name, tensor in expected.named_parameters())


def test_a_model_that_others_shard_is_filled_too(checkpoints: Path) -> None:
    env = {**ENVIRONMENT, "FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}
    run_ranks(shard_as_trl, str(builders.tiny_llama(checkpoints)), env=env)
